"""Law: whatever a manifest says under a checksum that fits, a directory opens and works, or `DatasetError` names file and field.

The cases are generated: a valid manifest, changed in one to three places, as another writer's mistake or malice would.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import random_data
from test_dataset_dir import edit_manifest, forge_checksums

import salientpp
from salientpp import NeighborLoader
from salientpp.plan.cache import score
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.local_copy import stage
from salientpp.store.directory.manifest import manifest_checksum

#: Cases in the suite; a run of 3,000 was made when this was written.
CASES = 100

JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 60, 2**31, 2**62, 2**63, -(2**63), 10**30, 0.5, -0.0, float("nan"), float("inf"), "", "x", "all", "train",
    "../x", "/etc/passwd", "part-00000/../../x.npy", "a\0b", "\ud800", "int64", "float32", "bits8", "quint8", "complex32", "nn", "<i8", ">f4",
    "|O", "0" * 64, [], [0], [0, 60], [[]], [-1], {}, {"x": 1}, {"x": {}}, {"dtype": "int64", "row_shape": []}, "y" * 5000,
]  # fmt: skip


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in places(item, (*path, key)))]


def forge(manifest: dict[str, Any], seed: int) -> str:
    """Change it somewhere; says how."""
    choose = random.Random(seed)
    done = []
    for _ in range(choose.randint(1, 3)):
        path = choose.choice([place for place in places(manifest) if place])
        holder = manifest
        for key in path[:-1]:
            holder = holder[key]
        key, kind = path[-1], choose.choice(["junk", "junk", "delete", "nudge", "rename", "swap", "deep"])
        old = holder[key]
        if kind == "delete":
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict):
            holder[choose.choice([name for name in JUNK if isinstance(name, str)])] = holder.pop(key)
        elif kind == "nudge" and isinstance(old, int):
            holder[key] = old + choose.choice([-1, 1, 2**20, 2**64, -(2**40)])
        elif kind == "swap":
            other = choose.choice([place for place in places(manifest) if place])
            source = manifest
            for step in other:
                source = source[step]
            holder[key] = copy.deepcopy(source)
        elif kind == "deep":
            for _ in range(choose.choice([3, 400])):
                old = [old]
            holder[key] = old
        else:
            kind = "junk"
            holder[key] = copy.deepcopy(choose.choice(JUNK))
        done.append(f"{kind} at {ascii(path)[:80]}")
    return "; ".join(done)


def use(root: Path, to: Path) -> None:
    """What commands and loaders do with a directory."""
    part = salientpp.load(root, part_id=0)
    repr(part)
    assert part.num_features >= 0 and part.num_classes >= 0 and len(part.fingerprint) == 16
    part.graph.transpose()
    part.original_id(torch.arange(part.num_vertices))
    part.edge_rows()
    for part_id in range(part.num_parts):
        rows = part.node_rows(part_id)
        assert all(len(values) == part.book.size_of(part_id) for values in rows.values())
        seeds = [part.split(name, part_id) for name in (*part.manifest["splits"], "all")]
        part.workload(part_id, seeds[0], [2], 8)
        part.vip(part_id)
    if part.num_parts == 1:
        for batch in NeighborLoader(part, [2, 2], "all", batch_size=32, replication_factor=0.5):
            assert "x" not in part.manifest["node_attributes"] or batch.x.size(0) == batch.num_nodes
    stage(root, to, parts=[0])
    salientpp.load(to / root.name, part_id=0)


def forged_case(roots: list[Path], scratch: Path, seed: int) -> str:
    """Run one case; '' if it worked, the error's text otherwise."""
    root = roots[seed % len(roots)]
    path = root / "manifest.json"
    whole = path.read_text()
    try:
        manifest = json.loads(whole)
        del manifest["checksum"]
        try:
            how = forge(manifest, seed)
            manifest["checksum"] = manifest_checksum(manifest)
            path.write_text(json.dumps(manifest))
        except RecursionError:
            return "nested too deep to be written"
        use(root, scratch / "to")
        return ""
    except DatasetError as error:
        assert str(root) in str(error), (seed, how)
        return str(error)
    except Exception as error:
        raise AssertionError(f"case {seed}, {how}: {type(error).__name__}: {error}") from error
    finally:
        path.write_text(whole)
        shutil.rmtree(scratch / "to", ignore_errors=True)


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("forged")
    data = random_data(60, 240, edge_attributes=True)
    data.z = torch.arange(60).bfloat16()
    for num_parts in (1, 2):
        salientpp.partition(data, num_parts, folder / f"d{num_parts}", [2], 8)
    return [folder / "d1", folder / "d2"]


def test_a_forged_manifest_is_refused_in_words_or_works(roots, tmp_path):
    said = [forged_case(roots, tmp_path, seed) for seed in range(CASES)]
    assert 0.5 * CASES < sum(map(bool, said)) < CASES, "most are refused, and some changes are harmless"
    assert list(tmp_path.iterdir()) == [], "nothing was written elsewhere"


def _set(*path: Any, to: Any) -> Callable[[dict], None]:
    def change(manifest: dict) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda manifest: manifest.pop("offsets"), "it has no offsets, expected a list of integers >= 0"),
        (_set("offsets", to=[0, 40, 30, 60]), "offsets must ascend from 0 to num_vertices, 60, in num_parts"),
        (_set("offsets", to=[0, 70, 60]), "offsets must ascend from 0 to num_vertices, 60"),
        (_set("offsets", to=[0, 20, 60]), r"splits\[.*\] must have a number|files\['part-0000. *.*'\] must be"),
        (_set("num_vertices", to=-1), "num_vertices must be an integer >= 0, got -1"),
        (_set("num_vertices", to=2**70), "num_vertices must be an integer >= 0, got 1180591620717411303424"),
        (_set("num_vertices", to=True), "num_vertices must be an integer >= 0, got True"),
        (_set("node_attributes", "x", "dtype", to="flaot32"), "node_attributes must be a map of names"),
        (
            _set("node_attributes", "x", "dtype", to="quint8"),
            r"node_attributes\['x'\] must have a dtype that files can hold, got 'quint8'",
        ),
        (
            _set("node_attributes", "x", "dtype", to="int32"),
            r"files\['part-0000./node_x.npy'\] must be <i4 \[.*, 3\], got '<f4'",
        ),
        (
            _set("node_attributes", "../../x", to={"dtype": "int64", "row_shape": []}),
            "node_attributes must be a map of names, without '/'",
        ),
        (
            _set("files", "../x.npy", to={"bytes": 1, "quick": 1, "sha256": "0" * 64, "dtype": "<i8", "shape": []}),
            "files must have those of the graph alone, got '../x.npy'",
        ),
        (
            _set("files", "/x.npy", to={"bytes": 1, "quick": 1, "sha256": "0" * 64, "dtype": "<i8", "shape": []}),
            "files must have those of the graph alone, got '/x.npy'",
        ),
        (lambda manifest: manifest["files"].pop("indptr.npy"), "files must have 'indptr.npy', and it is not there"),
        (
            _set("files", "indptr.npy", "shape", to=[2**62]),
            r"files\['indptr.npy'\] must be <i8 \[61\], got '<i8' \[4611686018427387904\]",
        ),
        (_set("files", "indptr.npy", "bytes", to=-8), "files must be a map of names to bytes"),
        (_set("workload", "seeds", to="tset"), "workload.seeds must be a split or 'all', got 'tset'"),
        (_set("splits", "train", to=[1]), r"splits\['train'\] must have a number for each of 2 parts"),
        (_set("splits", "not a name", to=[1, 1]), "splits must be a map of identifiers"),
        (_set("quality", to={}), "quality must be edge_cut and edge_cut_fraction, numbers"),
    ],
)
def test_what_a_manifest_may_not_say_is_named(roots, tmp_path, change, text):
    root = tmp_path / "d"
    shutil.copytree(roots[1], root)
    edit_manifest(root, change, checksum=True)
    with pytest.raises(
        DatasetError, match=f"manifest.json does not describe a dataset directory: ({text}).*; partition again"
    ):
        salientpp.load(root)
    with pytest.raises(DatasetError):
        stage(root, tmp_path / "to", parts=[0])
    assert not (tmp_path / "x.npy").exists()


@pytest.mark.parametrize(
    "text",
    [
        '{"parts": "01"}',
        '{"parts": [[0]]}',
        '{"parts": [-1]}',
        '{"parts": [true]}',
        '{"parts": {"0": 1}}',
        "[0]",
        '"parts"',
        "[" * 5000,
    ],
)
def test_a_list_of_parts_that_is_none_is_refused(roots, tmp_path, text):
    root = tmp_path / "d"
    shutil.copytree(roots[1], root)
    (root / "parts.json").write_text(text)
    with pytest.raises(DatasetError, match="parts.json does not list parts"):
        salientpp.load(root, part_id=0)


# --- arrays whose contents lie ----------------------------------------------------------------------------

LIES: dict[str, tuple[str, Callable[[np.ndarray], None], str]] = {
    "indptr falls": ("indptr.npy", lambda a: a.__setitem__(5, 10**9), "d1 holds no graph: indptr must not decrease"),
    "indptr ends late": ("indptr.npy", lambda a: a.__setitem__(-1, 2**62), "d1 holds no graph: indptr"),
    "indptr is negative": (
        "indptr.npy",
        lambda a: a.__setitem__(slice(1, -1), -(2**63)),
        "d1 holds no graph: indptr must not decrease",
    ),
    "an id is large": (
        "indices.npy",
        lambda a: a.__setitem__(slice(None), 2**31 - 1),
        r"d1 holds no graph: indices\[0\] must be in \[0, 60\)",
    ),
    "an id is negative": (
        "indices.npy",
        lambda a: a.__setitem__(slice(None, None, 2), -1),
        r"d1 holds no graph: indices\[0\] must be in \[0, 60\)",
    ),
    "two have one id": (
        "original_id.npy",
        lambda a: a.__setitem__(slice(None), 7),
        "original_id.npy must hold each of 0 to 59 once",
    ),
    "ids of others": (
        "original_id.npy",
        lambda a: a.__setitem__(0, 2**62),
        "original_id.npy must hold each of 0 to 59 once",
    ),
    "seeds of nobody": (
        "part-00000/split_train.npy",
        lambda a: a.__setitem__(-1, 2**62),
        r"split_train.npy must hold ascending ids in \[0, 60\)",
    ),
    "negative seeds": (
        "part-00000/split_train.npy",
        lambda a: a.__setitem__(0, -5),
        r"split_train.npy must hold ascending ids in \[0, 60\)",
    ),
    "seeds twice": (
        "part-00000/split_train.npy",
        lambda a: a.__setitem__(1, a[0]),
        r"split_train.npy must hold ascending ids in \[0, 60\)",
    ),
    "no probability": ("part-00000/vip.npy", lambda a: a.__setitem__(0, np.nan), "vip.npy must hold probabilities"),
    "more than certain": ("part-00000/vip.npy", lambda a: a.__setitem__(3, np.inf), "vip.npy must hold probabilities"),
}


@pytest.mark.parametrize("lie", LIES)
def test_arrays_that_lie_are_found_by_full_verification_and_crash_nothing(roots, tmp_path, lie):
    name, change, text = LIES[lie]
    root = tmp_path / "d1"
    shutil.copytree(roots[0], root)
    array = np.load(root / name)
    change(array)
    np.save(root / name, array)
    forge_checksums(root, name)
    with pytest.raises(DatasetError, match=f"{text}.*; copy (it|indptr.npy and indices.npy) again, or partition again"):
        salientpp.load(root, verify="full")
    part = salientpp.load(root)
    for options in ({}, {"replace": True}, {"subgraph_type": "induced"}, {"gpu_fraction": 0.5, "num_workers": 1}):
        for nodes in ("train", "all"):
            try:
                for batch in NeighborLoader(part, [3, -1], nodes, batch_size=8, **options):
                    assert torch.equal(
                        batch.x[:, 0].long(),
                        torch.from_numpy(np.load(root / "part-00000/node_x.npy"))[batch.n_id][:, 0].long(),
                    )
            except (RuntimeError, ValueError) as error:
                assert any(word in str(error) for word in ("corrupt", "must", "out of")), error
    for policy in ("vip", "vip-hop", "degree", "halo", "wpr", "paths", "simulation"):
        try:
            seeds = part.split("train")
            score(policy, part.workload(0, seeds, [2, 2], 8))
        except (RuntimeError, ValueError, IndexError):
            pass
