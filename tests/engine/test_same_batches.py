"""Law 3 over time: for fixed seeds, every version of the package gives the same batches.

Every case digests its batches (ids, edges, rows, labels) and the number of rows from each tier. Features are whole numbers and draws depend only on keys, so
the digests are the same on every machine. A digest may change only if the package's promises about batches change. Then
``PYTHONPATH=tests/support python -m tests.engine.test_same_batches`` prints the new table.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from batches import packed
from graphs import RELATIONS, random_data, random_hetero
from rare import rare
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader

DIGESTS: dict[str, str] = {
    "data, beta 0": "455c1b40461dc1d0",
    "data, beta 0, on device": "455c1b40461dc1d0",
    "data, beta 0.3": "b5f790b77186ac37",
    "data, beta 0.3, half": "5576d93887b2ac93",
    "data, beta 0.3, on device": "b5f790b77186ac37",
    "data, beta 0.3, on device, half": "5576d93887b2ac93",
    "types, beta 0": "782cc6d40d140d02",
    "types, beta 0, on device": "782cc6d40d140d02",
    "types, beta 0.3": "1dedec0dbfcf9f07",
    "types, beta 0.3, half": "2c76561dd8410133",
    "types, beta 0.3, on device": "1dedec0dbfcf9f07",
    "types, beta 0.3, on device, half": "2c76561dd8410133",
    "links, beta 0": "eae6401a6235155c",
    "links, beta 0, on device": "eae6401a6235155c",
    "links, beta 0.3": "05cad22f64cc437c",
    "links, beta 0.3, half": "3a307cc778e22ffd",
    "links, beta 0.3, on device": "05cad22f64cc437c",
    "links, beta 0.3, on device, half": "3a307cc778e22ffd",
    "data, zero-copy": "b5f790b77186ac37",
    "data, induced": "34fd077787f2067b",
    "data, workers": "455c1b40461dc1d0",
    "1 parts, 1 ranks, alpha 0, beta 0": "ea1dcda3989abc92",
    "1 parts, 1 ranks, alpha 0, beta 0, on device": "ea1dcda3989abc92",
    "1 parts, 1 ranks, alpha 0, beta 0.3": "4614ffa721c7a934",
    "1 parts, 1 ranks, alpha 0, beta 0.3, on device": "4614ffa721c7a934",
    "1 parts, 1 ranks, alpha 0.3, beta 0": "ea1dcda3989abc92",
    "1 parts, 1 ranks, alpha 0.3, beta 0, on device": "ea1dcda3989abc92",
    "1 parts, 1 ranks, alpha 0.3, beta 0.3": "4614ffa721c7a934",
    "1 parts, 1 ranks, alpha 0.3, beta 0.3, on device": "4614ffa721c7a934",
    "1 parts, 1 ranks, all gathered": "43fcd3c0250818bf",
    "1 parts, 1 ranks, all gathered, on device": "43fcd3c0250818bf",
    "1 parts, 1 ranks, half": "0185b4ca2fb43b05",
    "1 parts, 1 ranks, zero-copy": "4614ffa721c7a934",
    "1 parts, 1 ranks, exact": "ea1dcda3989abc92",
    "2 parts, 2 ranks, alpha 0, beta 0": "51c3ed1b7c44befc",
    "2 parts, 2 ranks, alpha 0, beta 0, on device": "51c3ed1b7c44befc",
    "2 parts, 2 ranks, alpha 0, beta 0.3": "80644dcd6421700e",
    "2 parts, 2 ranks, alpha 0, beta 0.3, on device": "80644dcd6421700e",
    "2 parts, 2 ranks, alpha 0.3, beta 0": "854748cf8046ee47",
    "2 parts, 2 ranks, alpha 0.3, beta 0, on device": "854748cf8046ee47",
    "2 parts, 2 ranks, alpha 0.3, beta 0.3": "c138db76187ac7bc",
    "2 parts, 2 ranks, alpha 0.3, beta 0.3, on device": "c138db76187ac7bc",
    "2 parts, 2 ranks, all gathered": "6042f356cd9244f9",
    "2 parts, 2 ranks, all gathered, on device": "6042f356cd9244f9",
    "2 parts, 2 ranks, half": "549502370fe0a2c0",
    "2 parts, 2 ranks, zero-copy": "c138db76187ac7bc",
    "2 parts, 2 ranks, exact": "cf043d78ee7ae738",
    "4 parts, 4 ranks, alpha 0, beta 0": "8c11a5f2d0f2bdea",
    "4 parts, 4 ranks, alpha 0, beta 0, on device": "8c11a5f2d0f2bdea",
    "4 parts, 4 ranks, alpha 0, beta 0.3": "8c06386bad47ad1d",
    "4 parts, 4 ranks, alpha 0, beta 0.3, on device": "8c06386bad47ad1d",
    "4 parts, 4 ranks, alpha 0.3, beta 0": "c18f643efe8aa679",
    "4 parts, 4 ranks, alpha 0.3, beta 0, on device": "c18f643efe8aa679",
    "4 parts, 4 ranks, alpha 0.3, beta 0.3": "e766191c272da3f7",
    "4 parts, 4 ranks, alpha 0.3, beta 0.3, on device": "e766191c272da3f7",
    "4 parts, 4 ranks, all gathered": "cb47d5f543ca92f7",
    "4 parts, 4 ranks, all gathered, on device": "cb47d5f543ca92f7",
    "4 parts, 4 ranks, half": "6c64d9c6034e039b",
    "4 parts, 4 ranks, zero-copy": "e766191c272da3f7",
    "4 parts, 4 ranks, exact": "eb48405bb751a357",
    "2 parts, 4 ranks, alpha 0, beta 0": "bd5811419305e9f4",
    "2 parts, 4 ranks, alpha 0, beta 0, on device": "bd5811419305e9f4",
    "2 parts, 4 ranks, alpha 0, beta 0.3": "1a751074a849d57d",
    "2 parts, 4 ranks, alpha 0, beta 0.3, on device": "1a751074a849d57d",
    "2 parts, 4 ranks, alpha 0.3, beta 0": "35cd246ca5d2fa35",
    "2 parts, 4 ranks, alpha 0.3, beta 0, on device": "35cd246ca5d2fa35",
    "2 parts, 4 ranks, alpha 0.3, beta 0.3": "e1fd7a408f142277",
    "2 parts, 4 ranks, alpha 0.3, beta 0.3, on device": "e1fd7a408f142277",
    "2 parts, 4 ranks, all gathered": "9dd5ea494483e959",
    "2 parts, 4 ranks, all gathered, on device": "9dd5ea494483e959",
    "2 parts, 4 ranks, half": "bf96ee429570d062",
    "2 parts, 4 ranks, zero-copy": "e1fd7a408f142277",
    "2 parts, 4 ranks, exact": "cd05e66b12daffab",
}


def digest(batches: Iterable[Data | HeteroData], loader: Any) -> str:
    """Digests every tensor of the batches, with its name, dtype and shape, and the number of rows per tier."""
    sha = hashlib.sha256()
    for batch in batches:
        for store in batch.stores:
            for name, value in sorted(store.items()):
                sha.update(f"{store._key} {name} ".encode())
                if isinstance(value, Tensor):
                    sha.update(
                        f"{value.dtype} {list(value.shape)}".encode()
                        + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    )
                else:
                    sha.update(repr(value).encode())
    stats = loader.stats()
    sha.update(
        repr(
            (stats.batches, stats.rows_device, stats.rows_host, stats.rows_cache, stats.rows_remote, stats.bytes_sent)
        ).encode()
    )
    return sha.hexdigest()[:16]


def run(loader: Any, on_device: bool = False) -> str:
    loader = packed(loader, on_device) if on_device else loader
    return digest([batch for _ in range(2) for batch in loader], loader)


# --- one process ------------------------------------------------------------------------------------------


def whole() -> Data:
    data = random_data(300, 1800, edge_attributes=True)
    data.small, data.wide = (
        (torch.arange(300) % 128).to(torch.int8),
        torch.arange(600.0, dtype=torch.float64).view(300, 2, 1),
    )
    return data


def of_data(on_device: bool = False, **options: Any) -> str:
    data = whole()
    return run(NeighborLoader(data, [4, 3], data.train_mask, batch_size=16, shuffle=True, seed=3, **options), on_device)


def of_types(on_device: bool = False, **options: Any) -> str:
    data = random_hetero()
    return run(
        NeighborLoader(data, dict.fromkeys(RELATIONS, [3, 2]), "paper", batch_size=8, seed=1, **options), on_device
    )


def of_links(on_device: bool = False, **options: Any) -> str:
    data = whole()
    edges = data.edge_index[:, ::7]
    return run(
        LinkNeighborLoader(data, [3, 2], edges, batch_size=32, neg_sampling="binary", seed=2, **options), on_device
    )


ALONE: dict[str, Callable[[], str]] = {
    f"{name}, beta {beta}{', on device' if on_device else ''}{', half' if dtype else ''}": lambda of=of, beta=beta, on_device=on_device, dtype=dtype: (
        of(on_device, device_rows=beta, dtype=dtype)
    )
    for name, of in {"data": of_data, "types": of_types, "links": of_links}.items()
    for beta in (0, 0.3)
    for on_device in (False, True)
    for dtype in (None, torch.float16)
    if dtype is None or beta
}
ALONE["data, zero-copy"] = lambda: of_data(True, device_rows={"part": 0.3, "zero_copy": True})
ALONE["data, induced"] = lambda: of_data(subgraph_type="induced")
ALONE["data, workers"] = lambda: of_data(num_workers=2, depth=4)


# --- ranks ------------------------------------------------------------------------------------------------

#: Options of a loader, and whether it assembles rows as on a device.
SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    f"alpha {alpha}, beta {beta}{', on device' if on_device else ''}": (
        {"replication_factor": alpha, "device_rows": {"part": beta, "cache": 84 if on_device else 0}},
        on_device,
    )
    for alpha in (0, 0.3)
    for beta in (0, 0.3)
    for on_device in (False, True)
}
SETTINGS["all gathered"] = (
    {"columns": ["x", "y", "small", "wide"], "replication_factor": 0.3, "device_rows": 0.3},
    False,
)
SETTINGS["all gathered, on device"] = (
    {"columns": ["x", "y", "small", "wide"], "replication_factor": 0.3, "device_rows": 0.3},
    True,
)
SETTINGS["half"] = ({"dtype": torch.float16, "replication_factor": 0.3}, False)
SETTINGS["zero-copy"] = ({"device_rows": {"part": 0.3, "zero_copy": True}, "replication_factor": 0.3}, True)
SETTINGS["exact"] = ({"uneven": "exact", "policy": "degree", "replication_factor": 0.1}, False)


def _digests_of_a_rank(rank: int, root: str) -> dict[str, str]:
    part = salientpp.load(root)
    return {
        name: run(NeighborLoader(part, [4, 3], "train", batch_size=16, shuffle=True, seed=3, **options), on_device)
        for name, (options, on_device) in SETTINGS.items()
    }


def of_ranks(folder: Path, num_parts: int, num_ranks: int) -> dict[str, str]:
    """Returns one digest for each setting, made from the digests of all ranks."""
    root = folder / f"d{num_parts}-{num_ranks}"
    salientpp.partition(whole(), num_parts, root, [4, 3], 16, method=torch.arange(300) * 7 % 11 % num_parts)
    ranks = distributed.run(_digests_of_a_rank, num_ranks, str(root))
    return {
        f"{num_parts} parts, {num_ranks} ranks, {name}": hashlib.sha256(
            " ".join(of_rank[name] for of_rank in ranks).encode()
        ).hexdigest()[:16]
        for name in SETTINGS
    }


RANKS = [(1, 1), (2, 2), (4, 4), (2, 4)]


# --- the law ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALONE)
def test_batches_of_one_process_never_change(case):
    assert ALONE[case]() == DIGESTS[case]


@pytest.mark.parametrize("num_parts, num_ranks", [*(each for each in RANKS if each != (4, 4)), *rare((4, 4))])
def test_batches_of_several_ranks_never_change(tmp_path, num_parts, num_ranks):
    found = of_ranks(tmp_path, num_parts, num_ranks)
    assert found == {case: DIGESTS[case] for case in found}


def test_the_digest_depends_on_every_byte():
    data = whole()
    make = lambda: NeighborLoader(data, [4, 3], torch.arange(20), batch_size=16, seed=3)  # noqa: E731
    before = run(make())
    assert run(make()) == before
    data.small[batch_vertex(make())] += 1
    assert run(make()) != before


def batch_vertex(loader: NeighborLoader) -> int:
    return int(next(iter(loader)).n_id[-1])


if __name__ == "__main__":
    table = {case: make() for case, make in ALONE.items()}
    with tempfile.TemporaryDirectory() as folder:
        for parts, ranks in RANKS:
            table |= of_ranks(Path(folder), parts, ranks)
    print("DIGESTS = {\n" + "".join(f'    "{case}": "{found}",\n' for case, found in table.items()) + "}")
