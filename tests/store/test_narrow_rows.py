"""Laws of rows that are stored or sent narrower: every row of a batch equals its decoded bytes, whatever tier or rank it came from."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import distributed
import pytest
import torch
from batches import packed
from directories import edit_manifest
from graphs import random_data
from one_process import TYPED_FANOUTS, typed_data
from rare import rare
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.cli import main
from salientpp.fullgraph import local
from salientpp.store.directory.files import DatasetError
from salientpp.store.narrow import Narrow
from salientpp.ways.lookahead.way import Lookahead

FANOUTS, BATCH = [4, 3], 16


def featured(num_vertices: int = 300, shape: tuple[int, ...] = (37,), dtype: torch.dtype = torch.float32) -> Data:
    """Returns a graph whose rows vary in magnitude as much as real ones."""
    data = random_data(num_vertices, 5 * num_vertices)
    generator = torch.Generator().manual_seed(7)
    ones = (1,) * len(shape)
    size = torch.rand(num_vertices, generator=generator).view(-1, *ones) * 9
    data.x = (torch.randn(num_vertices, *shape, generator=generator) * size + 1).to(dtype)
    data.z = torch.randn(num_vertices, 2, 9, generator=generator)
    data.who = torch.arange(num_vertices)
    return data


def recoded(rows: torch.Tensor, format: str) -> torch.Tensor:
    """Encodes and decodes the rows."""
    narrow = Narrow(format, rows.dtype, tuple(rows.shape[1:]))
    return narrow.decode(narrow.encode(rows))


def assert_same(ours: Any, theirs: Any, but: set[str] = frozenset()) -> None:
    for store, other in zip(ours.stores, theirs.stores, strict=True):
        assert list(store.keys()) == list(other.keys())
        for name, value in store.items():
            if name not in but:
                assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], (
                    name
                )


#: Paths of rows: options of a loader, True if it assembles rows as for a device, and True if it also assembles rows for other ranks in this way.
TIERS = [
    ({}, False, False),
    ({"replication_factor": 0.3}, False, False),
    ({"replication_factor": 0.3, "device_rows": {"part": 0.4, "cache": 700}}, False, False),
    ({"replication_factor": 0.3, "device_rows": {"part": 0.4, "cache": 700}, "depth": 3}, True, True),
    ({"device_rows": {"part": 1.0, "zero_copy": True}, "num_workers": 2, "depth": 1}, True, False),
    ({"device_rows": {"zero_copy": True}, "replication_factor": 2.0}, True, True),
    ({"device_rows": {"zero_copy": True}, "replication_factor": 0.2}, False, False),
    ({"replication_factor": 0.6, "lookahead": 1}, False, False),
    ({"replication_factor": 0.6, "lookahead": 1, "device_rows": 0.4}, True, True),
]


def _compare(
    rank: int, roots: dict[str, str], x: torch.Tensor, formats: list[str], tiers: list[tuple]
) -> tuple[int, list[int]]:
    """Returns the number of compared batches, and for each format the number of remote rows that a loader fetched."""
    parts = {name: salientpp.load(root) for name, root in roots.items()}
    common = {"batch_size": BATCH, "shuffle": True, "seed": 3}
    number, sizes = 0, []
    for format in formats:
        read = recoded(x, format)
        for options, as_device, serves in tiers:
            for name, send_as in ((format, None), ("wide", {"x": format})):
                loader = NeighborLoader(parts[name], FANOUTS, "train", send_as=send_as, **common, **options)
                plain = NeighborLoader(parts["wide"], FANOUTS, "train", **common)
                if as_device:
                    packed(loader, serves)
                for batch, other in zip(loader, plain, strict=True):
                    assert_same(batch, other, but={"x"})
                    assert batch.x.dtype == x.dtype
                    assert torch.equal(batch.x, read[parts["wide"].original_id(batch.n_id)]), (format, options, send_as)
                    number += 1
                stats = loader.stats()
                narrow = Narrow(format, x.dtype, tuple(x.shape[1:]))
                assert stats.by_type[None]["bytes_received"] == stats.rows_remote * narrow.row_bytes
                if "lookahead" in options:
                    assert (loader.engine.way(Lookahead).finds_late) == (parts["wide"].num_parts > 1)
                elif "replication_factor" in options and parts["wide"].num_parts > 1:
                    of_rows = loader.cache.rows["x"]
                    assert (of_rows.dtype, of_rows.size(1)) == (torch.uint8, narrow.row_bytes)
        sizes.append(stats.rows_remote)
    return number, sizes


@pytest.mark.parametrize(
    ("num_parts", "format"),
    [(1, "int8"), (2, "int4/16"), (3, "int4"), *rare((1, "int4"), (2, "int8"), (3, "int8"))],
)
def test_every_tier_serves_the_decoded_rows(tmp_path, num_parts, format):
    data = featured()
    formats = [format]
    roots = {"wide": str(tmp_path / "wide")}
    salientpp.partition(data, num_parts, roots["wide"], FANOUTS, BATCH)
    for number, format in enumerate(formats):
        roots[format] = str(tmp_path / str(number))
        salientpp.partition(data, num_parts, roots[format], FANOUTS, BATCH, store_as={"x": format})
    for number, _ in distributed.run(_compare, num_parts, roots, data.x, formats, TIERS):
        assert number >= 3 * len(TIERS)


@pytest.mark.parametrize(
    ("dtype", "first"),
    [(torch.float16, 0), (torch.float64, 1), (torch.bfloat16, 2)],
    ids=["float16", "float64", "bfloat16"],
)
def test_rows_are_decoded_to_their_original_dtype_and_shape(tmp_path, dtype, first):
    data = featured(120, (3, 5), dtype)
    roots = {name: str(tmp_path / name) for name in ("wide", "int8")}
    salientpp.partition(data, 2, roots["wide"], FANOUTS, BATCH)
    salientpp.partition(data, 2, roots["int8"], FANOUTS, BATCH, store_as={"x": "int8"})
    assert all(number for number, _ in distributed.run(_compare, 2, roots, data.x, ["int8"], TIERS[first::3]))


def _several(rank: int, wide: str, narrow: str) -> int:
    """Compares attributes of seeds and of all vertices, joined parts, hosts with several ranks, edge seeds, and the delivered dtype."""
    data, number = featured(), 0
    parts = salientpp.load(wide), salientpp.load(narrow)
    read = {"x": recoded(data.x, "int4"), "z": recoded(data.z, "bf16")}
    send_as = {"x": "int4", "z": "bf16"}
    common = {"batch_size": BATCH, "seed": 3, "replication_factor": 0.2}
    for gather, hosts, device in itertools.product([("x", "z"), ("z",), ("x",)], [1, 2], [False, True]):
        options = {**common, "columns": gather, "ranks_per_host": hosts}
        sent = {name: send_as[name] for name in gather}
        loaders = [
            NeighborLoader(parts[1], FANOUTS, "train", **options),
            NeighborLoader(parts[0], FANOUTS, "train", send_as=sent, **options),
        ]
        loaders = [packed(loader, True) for loader in loaders] if device and hosts == 1 else loaders
        for stored, sent_ones in zip(*loaders, strict=True):
            ids = parts[0].original_id(stored.n_id)
            assert_same(stored, sent_ones, but={"x", "z"} - set(gather))
            for name in ("x", "z"):
                kept = ids if name in gather else ids[: stored.batch_size]
                assert torch.equal(stored[name], read[name][kept])
                assert torch.equal(sent_ones[name], read[name][kept] if name in gather else data[name][kept])
            assert torch.equal(stored.who, ids[: stored.batch_size])
            number += 1
    for part, sent in ((parts[1], None), (parts[0], {"x": "int4"})):
        loader = LinkNeighborLoader(part, FANOUTS, neg_sampling="binary", send_as=sent, dtype=torch.float16, **common)
        for batch in itertools.islice(loader, 5):
            assert batch.x.dtype == torch.float16
            assert torch.equal(batch.x, read["x"][part.original_id(batch.n_id)].half())
            number += 1
    return number


@pytest.mark.parametrize("num_parts", [5, *rare(2)])
def test_narrow_rows_reach_seeds_links_hosts_and_joined_parts(tmp_path, num_parts):
    data = featured()
    salientpp.partition(data, num_parts, tmp_path / "wide", FANOUTS, BATCH)
    salientpp.partition(data, num_parts, tmp_path / "narrow", FANOUTS, BATCH, store_as={"x": "int4", "z": "bf16"})
    assert all(distributed.run(_several, 2, str(tmp_path / "wide"), str(tmp_path / "narrow")))


def widened(data: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for name in data.node_types:
        data[name].x = torch.randn(data[name].num_nodes, 24, generator=generator)
    return data


def _typed(rank: int, wide: str, narrow: str) -> int:
    data, number = widened(typed_data()), 0
    parts = salientpp.load(wide), salientpp.load(narrow)
    formats = {"paper": "int8", "author": "int4"}
    for options, (part, sent, venues) in itertools.product(
        [{}, {"replication_factor": 0.3, "device_rows": 0.3}],
        [(parts[1], None, "int8"), (parts[0], {"x": "int8", ("author", "x"): "int4"}, None)],
    ):
        loader = NeighborLoader(part, TYPED_FANOUTS, ("paper", "train"), batch_size=8, seed=1, send_as=sent, **options)
        for batch in loader:
            for name in batch.node_types:
                format = formats.get(name, venues)
                rows = data[name].x if format is None else recoded(data[name].x, format)
                assert torch.equal(batch[name].x, rows[part.original_id(batch[name].n_id, name)]), name
            number += 1
    return number


def _received_of_types(rank: int, root: str, sent: dict[Any, str]) -> int:
    loader = NeighborLoader(
        salientpp.load(root), TYPED_FANOUTS, ("paper", "train"), batch_size=8, shuffle=True, seed=1, replication_factor=0.3, send_as=sent
    )  # fmt: skip
    for _ in loader:
        pass
    return sum(of_type["bytes_received"] for of_type in loader.stats().by_type.values())


def test_each_vertex_type_has_its_own_format(tmp_path):
    store_as = {"x": "int8", ("author", "x"): "int4"}
    for name, given in (("wide", None), ("narrow", store_as)):
        salientpp.partition(
            widened(typed_data()), 2, tmp_path / name, TYPED_FANOUTS, 8, seeds=("paper", "train"), replicate=("venue",), store_as=given
        )  # fmt: skip
    assert all(distributed.run(_typed, 2, str(tmp_path / "wide"), str(tmp_path / "narrow")))
    counted = analyze(
        salientpp.load(tmp_path / "narrow"),
        Batches(num_neighbors=TYPED_FANOUTS, batch_size=8, epochs=1, seeds=("paper", "train")),
        Ways(replication_factors=[0], policies=["vip"]),
    )
    assert counted.row_bytes == {"paper": 32, "author": 20, "venue": 32}
    sent: dict[Any, str] = {"x": "int8", ("author", "x"): "int4"}
    counted = analyze(
        salientpp.load(tmp_path / "wide"),
        Batches(num_neighbors=TYPED_FANOUTS, batch_size=8, epochs=1, seeds=("paper", "train"), seed=1),
        Ways(replication_factors=[0.3], policies=["vip"], send_as=sent),
    )
    assert counted.row_bytes == {
        "paper": 32,
        "author": 20,
        "venue": 96,
    }  # rows of a replicated type do not travel, so they stay wide
    live = distributed.run(_received_of_types, 2, str(tmp_path / "wide"), sent)
    assert sum(live) == sum(volume.remote_bytes_per_epoch for volume in counted.results) > 0


def test_a_type_without_vertices_is_stored_narrower_with_the_others(tmp_path):
    data = widened(typed_data())
    data["reader"].x = torch.zeros(0, 8)
    data["paper", "of", "reader"].edge_index = torch.zeros(2, 0, dtype=torch.int64)
    part = salientpp.partition(data, 2, tmp_path / "d", [2, 2], 8, seeds=("paper", "train"), store_as={"x": "int8"})
    loader = NeighborLoader(part, [2, 2], ("paper", "train"), batch_size=8)
    assert all(batch["reader"].x.shape == (0, 8) for batch in loader)


# --- other readers of rows --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("narrow")
    salientpp.partition(featured(), 2, folder / "wide", FANOUTS, BATCH)
    salientpp.partition(featured(), 2, folder / "narrow", FANOUTS, BATCH, store_as={"x": "int8/16", "z": "fp16"})
    return folder


def test_a_directory_with_narrow_rows_reads_as_one_with_the_decoded_rows(roots, tmp_path):
    data = featured()
    part, plain = salientpp.load(roots / "narrow", part_id=1, verify="full"), salientpp.load(roots / "wide", part_id=1)
    for name, format in (("x", "int8/16"), ("z", "fp16")):
        read = recoded(data[name], format)
        every = torch.arange(300)
        assert torch.equal(part.take(name, every), read[part.original_id(every)])
        own = part.original_id(part.split("all"))
        assert torch.equal(part.node_rows()[name], read[own])
    assert torch.equal(part.node_rows()["y"], plain.node_rows()["y"])
    assert (part.num_features, part.description.version, plain.description.version) == (37, 3, 1)
    file = roots / "narrow" / "part-00001" / "n0.node_x.npy"
    row_bytes = 3 * 8 + 37 + 3
    assert file.stat().st_size == 128 + len(own) * row_bytes
    both = salientpp.load(roots / "narrow").joined((0, 2), 0)
    assert torch.equal(both.node_rows()["x"], recoded(data.x, "int8/16")[both.original_id(torch.arange(300))])
    assert analyze(part.whole, Batches(epochs=1), Ways(replication_factors=[0.1], policies=["vip"])).row_bytes == {
        "": row_bytes
    }


def test_the_manifest_records_formats_and_errors(roots):
    data = featured()
    manifest = json.loads((roots / "narrow" / "manifest.json").read_text())
    for name, format, width in (("x", "int8/16", 64), ("z", "fp16", 36)):
        entry = manifest["node_types"][0]["attributes"][name]
        error = (recoded(data[name], format) - data[name]).double()
        assert entry["dtype"] == "float32" and entry["row_shape"] == list(data[name].shape[1:])
        assert (entry["stored_as"]["format"], entry["stored_as"]["row_bytes"]) == (format, width)
        assert entry["stored_as"]["largest_error"] == float(error.abs().max())
        expected = float(error.square().mean().sqrt() / data[name].double().square().mean().sqrt())
        assert entry["stored_as"]["relative_rms_error"] == pytest.approx(expected)
    assert "stored_as" not in manifest["node_types"][0]["attributes"]["y"]


def _infer(rank: int, root: str) -> tuple[torch.Tensor, torch.Tensor]:
    part = salientpp.load(root)
    torch.manual_seed(0)
    model = GraphSAGE(37, 8, 2, 3).eval()
    rows = salientpp.inference(model, part, replication_factor=0.2)
    return rows, part.original_id(part.split("all"))


def test_inference_on_narrow_rows_equals_inference_on_the_decoded_rows(roots):
    data = featured()
    data.x = recoded(data.x, "int8/16")
    torch.manual_seed(0)
    model = GraphSAGE(37, 8, 2, 3).eval()
    with torch.no_grad():
        expected = model(data.x, data.edge_index)
    for rows, ids in distributed.run(_infer, 2, str(roots / "narrow")):
        assert torch.allclose(rows, expected[ids], atol=1e-4)


def _local(rank: int, root: str) -> tuple[torch.Tensor, torch.Tensor]:
    part = salientpp.load(root)
    return local(part).x, part.original_id(part.split("all"))


def test_full_graph_training_reads_the_decoded_rows(roots):
    expected = recoded(featured().x, "int8/16")
    for x, ids in distributed.run(_local, 2, str(roots / "narrow")):
        assert torch.equal(x, expected[ids])


def _cached_bytes(rank: int, roots: list[str]) -> list[int]:
    loaders = [
        NeighborLoader(salientpp.load(root), FANOUTS, "train", replication_factor=0.5, send_as=send_as)
        for root, send_as in ((roots[0], None), (roots[0], {"x": "int8/16"}), (roots[1], None))
    ]
    return [sum(rows.nbytes for rows in loader.cache.rows.values()) for loader in loaders]


def test_a_cache_of_the_same_size_takes_fewer_bytes(roots):
    for wide, sent, stored in distributed.run(_cached_bytes, 2, [str(roots / "wide"), str(roots / "narrow")]):
        assert wide == 75 * 37 * 4 and sent == stored == 75 * 64


def _received(rank: int, roots: list[str]) -> list[int]:
    """Returns the bytes of rows that arrived in one epoch, per directory and format, with a static cache and with lookahead."""
    found = []
    for root, send_as in zip(roots, SENT):
        part = salientpp.load(root)
        for ahead in (0, 3):
            loader = NeighborLoader(
                part, FANOUTS, "train", batch_size=BATCH, shuffle=True, seed=3, replication_factor=0.3, lookahead=ahead, send_as=send_as
            )  # fmt: skip
            for _ in loader:
                pass
            found.append(loader.stats().by_type[None]["bytes_received"])
    return found


#: One value of ``send_as`` per directory.
SENT = [None, {"x": "int8/16"}, None]


def test_predicted_bytes_are_the_bytes_that_arrive(roots):
    """Covers rows that are not encoded, sent narrower, and stored narrower."""
    directories = [str(roots / name) for name in ("wide", "wide", "narrow")]
    live = [sum(of_ranks) for of_ranks in zip(*distributed.run(_received, 2, directories))]
    counted = []
    for root, send_as in zip(directories, SENT):
        analysis = analyze(
            salientpp.load(root),
            Batches(epochs=1, seed=3),
            Ways(replication_factors=[0.3], policies=["vip"], lookahead=3, send_as=send_as),
        )
        counted += [analysis.results[0].remote_bytes_per_epoch, analysis.of(way="lookahead")[0].remote_bytes_per_epoch]
        assert analysis.row_bytes == {"": 64 if root.endswith("narrow") or send_as else 37 * 4}
        assert analysis.send_as == send_as
    assert live == counted
    assert counted[0] * 64 == counted[2] * 37 * 4 and counted[2:4] == counted[4:]


def test_the_command_counts_the_bytes_of_narrow_rows(roots, tmp_path, capsys):
    given = ["--policies", "vip", "--epochs", "1", "--replication-factors", "0,0.3", "--json", str(tmp_path / "a.json")]
    assert main(["analyze", str(roots / "wide"), *given, "--send-as", "x=int8/16"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    written = json.loads((tmp_path / "a.json").read_text())
    assert "64 bytes per row sent as int8/16" in shown and "B a step." in shown
    assert written["row_bytes"] == {"": 64} and written["send_as"] == {"x": "int8/16"}
    assert written["steps_per_epoch"] > 0
    for volume in written["results"][:2]:
        assert volume["remote_bytes_per_epoch"] == 64 * volume["remote_rows_per_epoch"] > 0


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("wide", "x=int9", r"send_as\['x'\]: a format must be one of"),
        ("wide", "q=int8", r"send_as must name node attributes \(x\), got 'q'"),
        ("narrow", "x=int8", "send_as names 'x', .* as int8/16; leave it out"),
    ],
)
def test_the_command_refuses_formats_that_it_cannot_send(roots, capsys, name, given, text):
    assert main(["analyze", str(roots / name), "--epochs", "1", "--send-as", given]) == 2
    assert re.search(text, capsys.readouterr().err)


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, store_as, kind, text",
    [
        ({}, {"y": "int8"}, ValueError, r"store_as\['y'\]: rows of int64 cannot be stored as int8"),
        ({}, {"edges": "int8"}, ValueError, r"store_as must name node or edge attributes \(edge_attr, who, x, y, z\), got 'edges'"),
        ({}, {"edge_index": "int8"}, ValueError, "store_as must name node or edge attributes"),
        ({}, {"kind": "int8"}, ValueError, r"store_as\['kind'\]: rows of int64 cannot be stored as int8, which takes float32"),
        ({"edge_attr": (7, torch.inf)}, {"edge_attr": "int8"}, ValueError, r"data.edge_attr cannot be stored as int8: a value in row 7 is not finite"),
        ({}, {"x": "int9"}, ValueError, r"store_as\['x'\]: a format must be one of"),
        ({}, ["x"], TypeError, "store_as must map node attribute names to formats, .* got list"),
        ({"x": (40, torch.nan)}, {"x": "int8"}, ValueError, r"data.x cannot be stored as int8: a value in row 40 is not finite, or too large"),
        ({"x": (3, 7e4)}, {"x": "fp16"}, ValueError, r"data.x cannot be stored as fp16: a value in row 3 .* store the attribute as bf16"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_stored_narrower_are_refused_before_anything_is_written(
    tmp_path, change, store_as, kind, text
):
    data = featured()
    data.edge_attr = torch.rand(data.num_edges, 9)
    if "kind" in store_as:
        data.kind = torch.arange(data.num_edges * 4).view(-1, 4)
    for name, (row, value) in change.items():
        data[name][row, 2] = value
    with pytest.raises(kind, match=text):
        salientpp.partition(data, 2, tmp_path / "d", FANOUTS, BATCH, store_as=store_as)
    assert not (tmp_path / "d").exists()


def test_16_bit_floats_keep_infinities_and_nan(tmp_path):
    data = featured()
    data.x[5, 1], data.x[6, 2] = torch.nan, -torch.inf
    part = salientpp.partition(data, 1, tmp_path / "d", FANOUTS, BATCH, store_as={"x": "bf16"})
    rows = part.take("x", torch.arange(300))
    original = part.original_id(torch.arange(300))
    assert torch.equal(rows.isnan(), data.x[original].isnan()) and torch.equal(rows.isinf(), data.x[original].isinf())
    assert json.loads((tmp_path / "d" / "manifest.json").read_text())["node_types"][0]["attributes"]["x"]["stored_as"]["largest_error"] < 1  # fmt: skip


def test_times_are_stored_without_encoding(tmp_path):
    data = featured()
    data.when = torch.rand(300, dtype=torch.float64)
    with pytest.raises(
        ValueError, match="'when' is time_attr, which decides how batches are drawn, so it is stored as it is"
    ):
        salientpp.partition(data, 1, tmp_path / "d", FANOUTS, BATCH, time_attr="when", store_as={"when": "fp16"})


@pytest.mark.parametrize(
    "change, text",
    [
        ({"format": "int7"}, r"a format must be one of"),
        ({"format": "int8"}, r"row_bytes must be 48, got 64"),
        ({"row_bytes": 65}, r"stored_as.row_bytes must be 64, got 65"),
        ({"row_bytes": "64"}, r"stored_as must be a format, row_bytes, an integer >= 0"),
        ({"largest_error": -1}, r"stored_as must be"),
        ({"relative_rms_error": None}, r"stored_as must be"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path, change, text):
    salientpp.partition(featured(), 1, tmp_path / "d", FANOUTS, BATCH, store_as={"x": "int8/16"})

    def edit(manifest: dict) -> None:
        manifest["node_types"][0]["attributes"]["x"]["stored_as"].update(change)

    edit_manifest(tmp_path / "d", edit, checksum=True)
    with pytest.raises(DatasetError, match=text):
        salientpp.load(tmp_path / "d")


def test_only_version_3_stores_rows_narrower(tmp_path):
    salientpp.partition(featured(), 1, tmp_path / "d", FANOUTS, BATCH, store_as={"x": "int8/16"})
    edit_manifest(tmp_path / "d", lambda manifest: manifest.update(version=2), checksum=True)
    with pytest.raises(DatasetError, match=r"node_types\[0\].attributes\['x'\].stored_as is valid only in version 3 or later"):  # fmt: skip
        salientpp.load(tmp_path / "d")


@pytest.mark.parametrize(
    "options, text",
    [
        ({"send_as": {"y": "int8"}, "columns": ("x", "y")}, r"send_as\['y'\]: rows of int64 cannot be stored"),
        ({"send_as": {"z": "int8"}}, r"send_as is for attributes that every sampled vertex gets \(columns=\['x'\]\), got 'z'"),
        ({"send_as": {"w": "int8"}}, "send_as must name node or edge attributes"),
        ({"send_as": {"x": "int5"}}, r"send_as\['x'\]: a format must be one of"),
        ({"send_as": "int8"}, "send_as must map node attribute names to formats"),
        ({"narrow": True, "send_as": {"x": "int4"}}, "send_as names 'x', which .* stores and sends as int8/16; leave it out of send_as"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_sent_narrower_are_refused(roots, options, text):
    options = dict(options)
    part = salientpp.load(roots / ("narrow" if options.pop("narrow", False) else "wide"), part_id=0)
    with pytest.raises((ValueError, TypeError), match=text):
        NeighborLoader(part.joined((0, 2), 0), FANOUTS, "train", **options)


def test_rows_of_an_object_in_memory_are_not_sent():
    with pytest.raises(
        ValueError, match="send_as= applies only to a partitioned graph, whose rows travel between ranks"
    ):
        NeighborLoader(featured(), FANOUTS, send_as={"x": "int8"})


def _differ(rank: int, root: str) -> list[str]:
    part, words = salientpp.load(root), []
    for send_as in ({"x": "int8"} if rank else None, {"x": "bf16" if rank else "fp16"}):
        try:
            NeighborLoader(part, FANOUTS, "train", batch_size=BATCH, send_as=send_as)
        except ValueError as error:
            words.append(str(error))
    made = NeighborLoader(part, FANOUTS, "train", batch_size=BATCH, send_as={"x": "bf16"}, replication_factor=0.2)
    try:
        NeighborLoader(part, FANOUTS, "train", batch_size=BATCH, send_as={"x": "fp16"}, cache=made.cache)
    except ValueError as error:
        words.append(str(error))
    again = NeighborLoader(part, FANOUTS, "val", batch_size=BATCH, send_as={"x": "bf16"}, cache=made.cache)
    expected = recoded(featured().x, "bf16")
    for batch in again:
        assert torch.equal(batch.x, expected[part.original_id(batch.n_id)])
    return words


def test_ranks_agree_on_formats_and_a_cache_holds_rows_of_that_format(roots):
    for words in distributed.run(_differ, 2, str(roots / "wide")):
        assert "all ranks must have the same send_as, got {} on rank 0 and {'x': 'int8'} on rank 1" in words[0]
        assert (
            "all ranks must have the same send_as, got {'x': 'fp16'} on rank 0 and {'x': 'bf16'} on rank 1" in words[1]
        )
        assert "the given cache must hold rows of this loader's dataset, encoded in the same way" in words[2]
        assert len(words) == 3
