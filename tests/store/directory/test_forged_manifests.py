"""Law: whatever a manifest with a valid checksum says, the directory opens and works, or `DatasetError` names file and field.

The cases are generated: a valid manifest is changed in one to three places, as by another writer's mistake or by malice.
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
from directories import edit_manifest, forge_checksums
from graphs import random_data, random_hetero

import salientpp
from salientpp import NeighborLoader
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.local_copy import copy_to_disk
from salientpp.store.directory.manifest import manifest_checksum
from salientpp.vip.policies import score

#: Number of cases in the suite.
CASES = 100

JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 60, 2**31, 2**62, 2**63, -(2**63), 10**30, 0.5, -0.0, float("nan"), float("inf"), "", "x", "all", "train",
    "../x", "/etc/passwd", "part-00000/../../x.npy", "a\0b", "\ud800", "int64", "float32", "bits8", "quint8", "complex32", "nn", "<i8", ">f4",
    "|O", "0" * 64, [], [0], [0, 60], [[]], [-1], {}, {"x": 1}, {"x": {}}, {"dtype": "int64", "row_shape": []}, "y" * 5000,
]  # fmt: skip


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Returns the path of every value inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in places(item, (*path, key)))]


def forge(manifest: dict[str, Any], seed: int) -> str:
    """Changes the manifest somewhere, and returns a description of the change."""
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
    """Uses a directory as commands and loaders do."""
    part = salientpp.load(root, part_id=0)
    repr(part)
    assert len(part.fingerprint) == 16
    for name, book in part.books.items():
        part.original_id(torch.arange(book.num_vertices), name)
    for columns, type_ in zip(part.edge_rows_by_type().values(), part.description.edge_types):
        assert all(len(rows) == type_.num_edges for rows in columns.values())
    typed = part.typed_graph(part.description.time_attr)
    assert list(typed.node_types) == part.node_types and list(typed.edge_types) == part.edge_types
    for part_id in range(part.num_parts):
        for type_ in part.description.node_types:
            rows = part.rows(part_id)[type_.name]
            size = type_.num_vertices if type_.replicated else part.books[type_.name].size_of(part_id)
            assert all(len(values) == size for values in rows.values())
            for name in (*type_.splits, "all"):
                part.split(name, part_id, type_.name)
            part.vip(part_id, type_.name)
        for edges in part.description.edge_types:
            for name in (*edges.splits, "all"):
                part.edge_split(name, part_id, edges.name)
        part.part_graph(part_id=part_id)
        part.part_edge_rows(part_id)
    if not part.is_hetero:
        part.graph.transpose()
        assert part.num_features >= 0 and part.num_classes >= 0
        for part_id in range(part.num_parts):
            part.workload(part_id, part.split("all", part_id), [2], 8)
    if part.num_parts == 1 and part.manifest["version"] == 1:
        for batch in NeighborLoader(part, [2, 2], "all", batch_size=32, replication_factor=0.5):
            assert "x" not in part.manifest["node_attributes"] or batch.x.size(0) == batch.num_nodes
    copy_to_disk(root, to, parts=[0])
    salientpp.load(to / root.name, part_id=0)


def forged_case(roots: list[Path], scratch: Path, seed: int) -> str:
    """Runs one case. Returns '' if the directory worked, otherwise the error's text."""
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


def _set(*path: Any, to: Any) -> Callable[[dict], None]:
    def change(manifest: dict) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = to

    return change


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("forged")
    data = random_data(60, 240, edge_attributes=True)
    data.z = torch.arange(60).bfloat16()
    for num_parts in (1, 2):
        salientpp.partition(data, num_parts, folder / f"d{num_parts}", [2], 8)
    return [folder / "d1", folder / "d2"]


@pytest.fixture(scope="module")
def roots_with_narrow_edges(tmp_path_factory) -> list[Path]:
    """Returns directories of version 5 whose edges have encoded rows, in both forms of the topology."""
    folder = tmp_path_factory.mktemp("forged")
    data = random_data(60, 240)
    data.edge_attr = torch.rand(data.num_edges, 9)
    for form in ("whole", "parts"):
        salientpp.partition(data, 2, folder / form, [2], 8, topology=form, store_as={"edge_attr": "int4"})
    return [folder / "whole", folder / "parts"]


def test_a_forged_manifest_with_narrow_edges_works_or_is_refused(roots_with_narrow_edges, tmp_path):
    said = [forged_case(roots_with_narrow_edges, tmp_path, seed) for seed in range(CASES)]
    assert 0.5 * CASES < sum(map(bool, said)) < CASES, "most changes are refused, and some are harmless"


@pytest.fixture(scope="module")
def roots_with_tables(tmp_path_factory) -> list[Path]:
    """Returns directories of version 5, in both forms of the topology. Skips the test without PyTorch Frame."""
    from tables import table

    folder = tmp_path_factory.mktemp("forged")
    data = random_data(30, 90)
    data.tf, data.edge_tf = table(30), table(data.num_edges)
    salientpp.partition(data, 2, folder / "whole", [2], 8)
    salientpp.partition(data, 2, folder / "parts", [2], 8, topology="parts")
    return [folder / "whole", folder / "parts"]


def test_a_forged_manifest_with_tables_works_or_is_refused(roots_with_tables, tmp_path):
    said = [forged_case(roots_with_tables, tmp_path, seed) for seed in range(CASES)]
    assert 0.5 * CASES < sum(map(bool, said)) < CASES, "most changes are refused, and some are harmless"
    assert list(tmp_path.iterdir()) == [], "no file was written elsewhere"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m["node_types"][0].pop("frames"), r"field node_types\[0\].frames is missing, expected a map of names to pieces"),
        (_set("node_types", 0, "frames", "tf", "pieces", 0, "kind", to="sparse"), r"node_types\[0\].frames must be a map of names to pieces"),
        (_set("node_types", 0, "frames", "tf", "pieces", 0, "kind", to="embedding"), r"frames\['tf'\].pieces must fit the shapes .*'tf.timestamp'"),
        (_set("node_types", 0, "frames", "tf", "pieces", 1, "column", to="tf.nothing"), r"frames\['tf'\].pieces must name distinct attributes"),
        (_set("node_types", 0, "frames", "tf", "pieces", 1, "column", to="tf.categorical"), r"frames\['tf'\].pieces must name distinct attributes"),
        (_set("node_types", 0, "frames", "tf", "pieces", 1, "stype", to="categorical"), r"frames\['tf'\] must have another name than attributes, and one"),
        (_set("node_types", 0, "frames", "tf", "pieces", 5, "key", to=None), r"frames\['tf'\] must have another name than attributes, and one"),
        (_set("node_types", 0, "frames", "tf", "names", 1, to=["numerical", ["a"]]), r"frames\['tf'\].pieces must fit the shapes .*'tf.numerical'"),
        (_set("node_types", 0, "frames", "tf", "names", to=[]), r"frames\['tf'\].names must have every stype of the pieces once"),
        (_set("node_types", 0, "frames", "tf", "pieces", 7, "offset", to=[0, 4, 3, 5]), r"frames\['tf'\].pieces must fit the shapes .*'tf.embedding'"),
        (_set("edge_types", 0, "edge_offsets", to=None), r"edge_types\[0\].edge_offsets must be null if and only if topology is 'whole', got None"),
        (_set("topology", to="whole"), r"edge_types\[0\].edge_offsets must be null if and only if topology is 'whole', got"),
    ],
)  # fmt: skip
def test_errors_about_tables_name_file_and_field(roots_with_tables, change, text):
    path = roots_with_tables[1] / "manifest.json"
    before = path.read_text()
    try:
        edit_manifest(roots_with_tables[1], change, checksum=True)
        with pytest.raises(DatasetError, match=text):
            salientpp.load(roots_with_tables[1], part_id=0)
    finally:
        path.write_text(before)


@pytest.fixture(scope="module")
def typed_roots(tmp_path_factory) -> list[Path]:
    """Returns directories of version 2 with several types and every kind of data, one with one type, times and a split of edges, and one of version 4."""
    folder = tmp_path_factory.mktemp("forged")
    data = random_hetero(60, paper=20, author=11, venue=3)
    data["paper"].train_mask, data["paper"].y = torch.arange(20) % 2 == 0, torch.arange(20) % 3
    data["topic"].num_nodes = 2
    cites = {("paper", "cites", "paper"): {"train": torch.arange(0, 60, 3)}}
    for num_parts in (1, 2):
        root = folder / f"h{num_parts}"
        salientpp.partition(data, num_parts, root, [2], 8, edge_split=cites, replicate={"venue"}, time_attr="time")
    plain = random_data(60, 240, edge_attributes=True)
    plain.age = torch.arange(60)
    salientpp.partition(plain, 2, folder / "o2", [2], 8, edge_split={"train": torch.arange(9)}, time_attr="age")
    salientpp.partition(
        data, 2, folder / "p2", [2], 8, edge_split=cites, replicate={"venue"}, time_attr="edge_time", topology="parts"
    )
    return [folder / "h1", folder / "h2", folder / "o2", folder / "p2"]


def test_a_forged_manifest_of_several_types_works_or_is_refused(typed_roots, tmp_path):
    said = [forged_case(typed_roots, tmp_path, seed) for seed in range(CASES)]
    assert 0.5 * CASES < sum(map(bool, said)) < CASES, "most changes are refused, and some are harmless"
    assert list(tmp_path.iterdir()) == [], "no file was written elsewhere"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.pop("node_types"), "field node_types is missing, expected a list of at least one record"),
        (lambda m: m.update(node_types=[]), "node_types must be a list of at least one record, got"),
        (lambda m: m.update(edge_types={}), "edge_types must be a list of records, got"),
        (lambda m: m["node_types"][1].pop("offsets"), r"field node_types\[1\].offsets is missing, expected a list of integers"),
        (lambda m: m["node_types"][1].update(name="paper"), "node_types must have distinct names, got 'paper' as number 0 and 1"),
        (lambda m: m["edge_types"][1].update(name=["paper", "by", "author"]), r"edge_types must have distinct names, got \('paper', 'by', 'author'\) as"),
        (lambda m: m["edge_types"][0].update(name=["paper", "by", "editor"]), r"edge_types\[0\].name must join node types .*got .*'editor'"),
        (lambda m: m["edge_types"][0].update(name=["paper", "by"]), r"edge_types\[0\].name must be three strings, or null"),
        (lambda m: m["edge_types"][0].update(name=None), r"edge_types\[0\].name must join node types|a type named null"),
        (lambda m: m["node_types"][3].update(name=None), "a type named null must be the only vertex type"),
        (lambda m: m["node_types"][0].update(name="\ud800"), r"node_types\[0\].name must be a string, or null"),
        (lambda m: m["node_types"][0].update(name=7), r"node_types\[0\].name must be a string, or null"),
        (_set("node_types", 0, "offsets", to=[0, 30, 20]), r"node_types\[0\].offsets must ascend from 0 to num_vertices, 20"),
        (_set("node_types", 0, "splits", "train", to=[1]), r"node_types\[0\].splits\['train'\] must have one number for each of 2 parts"),
        (_set("edge_types", 2, "splits", "train", to=[61, 0]), r"edge_types\[2\].splits\['train'\] must have one number .*at most the number of edges"),
        (_set("edge_types", 2, "splits", "all", to=[1, 1]), r"edge_types\[2\].splits must be a map of identifiers"),
        (_set("node_types", 2, "replicated", to=1), r"node_types\[2\].replicated must be true or false, got 1"),
        (_set("node_types", 2, "replicated", to=False), r"files must have 'part-0000.*n2.node_|files must have only files"),
        (_set("node_types", 0, "attributes", "x", "dtype", to="quint8"), r"node_types\[0\].attributes\['x'\] must have a dtype that files can hold"),
        (_set("node_types", 0, "attributes", "../x", to={"dtype": "int64", "row_shape": []}), r"node_types\[0\].attributes must be a map of names"),
        (_set("time_attr", to="x"), "time_attr must be null, or name scalar times of nodes or of edges, got 'x'"),
        (_set("time_attr", to="tiem"), "time_attr must be null, or name scalar times of nodes or of edges, got 'tiem'"),
        (_set("time_attr", to=None), "files must have only files of the graph, got 'n0.time_time.npy'"),
        (_set("time_attr", to=3), "time_attr must be null or a string, got 3"),
        (_set("workload", "seeds", to="train"), "workload must be num_neighbors, a list of fanouts for each of edge_types"),
        (_set("workload", "seeds", to=["paper", "tset"]), "workload.seeds must be a split or 'all', got 'tset' of 'paper'"),
        (_set("workload", "seeds", to=["papre", "all"]), "workload.seeds must name a node type, got 'papre'"),
        (_set("workload", "num_neighbors", to=[[2]]), "workload.num_neighbors must have a list for each of 4 edge types"),
        (_set("workload", "num_neighbors", to=[[2], [2], [2], [2, 2]]), "workload.num_neighbors must have a list for each of 4 edge types, all of one"),
        (_set("files", "n9.original_id.npy", to={"bytes": 1, "quick": 1, "sha256": "0" * 64, "dtype": "<i8", "shape": []}),
         "files must have only files of the graph"),
        (_set("version", to=1), "field num_vertices is missing"),
    ],
)  # fmt: skip
def test_an_error_names_the_invalid_field_of_a_manifest_of_several_types(typed_roots, tmp_path, change, text):
    check_it_is_named(typed_roots[1], tmp_path, change, text)


def check_it_is_named(whole, tmp_path, change, text) -> None:
    """Checks that every function that opens a directory with a changed manifest raises an error with this text."""
    root = tmp_path / "d"
    shutil.copytree(whole, root)
    edit_manifest(root, change, checksum=True)
    with pytest.raises(
        DatasetError, match=f"manifest.json does not describe a dataset directory: ({text}).*; partition again"
    ):
        salientpp.load(root)
    with pytest.raises(DatasetError):
        copy_to_disk(root, tmp_path / "to", parts=[0])


def test_a_forged_manifest_works_or_is_refused(roots, tmp_path):
    said = [forged_case(roots, tmp_path, seed) for seed in range(CASES)]
    assert 0.5 * CASES < sum(map(bool, said)) < CASES, "most changes are refused, and some are harmless"
    assert list(tmp_path.iterdir()) == [], "no file was written elsewhere"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda manifest: manifest.pop("offsets"), "field offsets is missing, expected a list of integers >= 0"),
        (_set("offsets", to=[0, 40, 30, 60]), "offsets must ascend from 0 to num_vertices, 60, in num_parts"),
        (_set("offsets", to=[0, 70, 60]), "offsets must ascend from 0 to num_vertices, 60"),
        (_set("offsets", to=[0, 20, 60]), r"splits\[.*\] must have one number|files\['part-0000. *.*'\] must be"),
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
            "files must have only files of the graph, got '../x.npy'",
        ),
        (
            _set("files", "/x.npy", to={"bytes": 1, "quick": 1, "sha256": "0" * 64, "dtype": "<i8", "shape": []}),
            "files must have only files of the graph, got '/x.npy'",
        ),
        (lambda manifest: manifest["files"].pop("indptr.npy"), "files must have 'indptr.npy', but it is missing"),
        (
            _set("files", "indptr.npy", "shape", to=[2**62]),
            r"files\['indptr.npy'\] must be <i8 \[61\], got '<i8' \[4611686018427387904\]",
        ),
        (_set("files", "indptr.npy", "bytes", to=-8), "files must be a map of names to bytes"),
        (_set("workload", "seeds", to="tset"), "workload.seeds must be a split or 'all', got 'tset'"),
        (_set("splits", "train", to=[1]), r"splits\['train'\] must have one number for each of 2 parts"),
        (_set("splits", "not a name", to=[1, 1]), "splits must be a map of identifiers"),
        (_set("quality", to={}), "quality must be edge_cut and edge_cut_fraction, numbers"),
    ],
)
def test_an_error_names_the_invalid_field_of_a_manifest(roots, tmp_path, change, text):
    check_it_is_named(roots[1], tmp_path, change, text)
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
def test_an_invalid_list_of_parts_is_refused(roots, tmp_path, text):
    root = tmp_path / "d"
    shutil.copytree(roots[1], root)
    (root / "parts.json").write_text(text)
    with pytest.raises(DatasetError, match="parts.json does not list parts"):
        salientpp.load(root, part_id=0)


# --- inconsistent arrays ----------------------------------------------------------------------------------

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
    "seeds of no part": (
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
def test_full_verification_finds_inconsistent_arrays_without_a_crash(roots, tmp_path, lie):
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
    for options in ({}, {"replace": True}, {"subgraph_type": "induced"}, {"device_rows": 0.5, "num_workers": 1}):
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
