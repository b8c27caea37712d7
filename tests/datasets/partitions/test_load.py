"""Laws of loading partitions of PyG and GLT: ids, order of edges, attributes and parts equal the original graph's.

The tests write directories in both formats. PyG's own partitioner writes some too, if its libraries are installed.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from command_line import mistake, run, wide_terminal  # noqa: F401  the fixture is used by name
from graphs import random_data, random_hetero
from peers import peer
from rare import rare
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import ClusterData

import salientpp
from salientpp.datasets import load_dataset, load_partition

PARTS = 3


# --- graphs -----------------------------------------------------------------------------------------------


def one_type(*, edge_attributes: bool = True, time: bool = False) -> Data:
    """Returns a graph with unsorted edges, an isolated vertex, a self-loop and repeated edges."""
    data = random_data(60, 200, edge_attributes=edge_attributes, seed=3)
    del data.y, data.train_mask, data.val_mask, data.test_mask
    data.x = torch.rand(61, 5)
    more = torch.tensor([[7, 8, 9, 8, 9], [7, 9, 8, 9, 8]])
    data.edge_index = torch.cat([data.edge_index, more], dim=1)
    data.edge_index = data.edge_index[:, torch.randperm(data.num_edges, generator=torch.Generator().manual_seed(1))]
    if edge_attributes:
        data.edge_attr = torch.rand(data.num_edges, 2)
    if time:
        data.time = torch.randint(1000, (61,))
    return data


def several_types(*, time: bool = False, without_features: str | None = "venue") -> HeteroData:
    """Returns a graph of three types and four relations, two of them in opposite directions. One type has no features."""
    generator = torch.Generator().manual_seed(5)
    source = random_hetero(90, paper=40, author=25, venue=6)
    data = HeteroData()
    for name in source.node_types:
        data[name].num_nodes = source[name].num_nodes
        if name != without_features:
            data[name].x = torch.rand(source[name].num_nodes, 4, generator=generator)
        if time:
            data[name].time = torch.randint(1000, (source[name].num_nodes,), generator=generator)
    for name in source.edge_types:
        data[name].edge_index = source[name].edge_index
        data[name].edge_attr = torch.rand(data[name].num_edges, 2, generator=generator)
    return data


def dealt(data: Data | HeteroData, seed: int = 0) -> torch.Tensor | dict[str, torch.Tensor]:
    """Returns random parts. A type may have a part without vertices."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(data, Data):
        return torch.randint(PARTS, (data.num_nodes,), generator=generator)
    return {name: torch.randint(PARTS, (data[name].num_nodes,), generator=generator) for name in data.node_types}


# --- the formats of the partitioners ----------------------------------------------------------------------


def stores_of(data, assignment):
    """Returns (type, store, parts) for types of vertices and for types of edges. An edge is in the part of its target."""
    if isinstance(data, Data):
        return [(None, data, assignment)], [(None, data, assignment[data.edge_index[1]])]
    return (
        [(name, data[name], assignment[name]) for name in data.node_types],
        [(name, data[name], assignment[name[2]][data[name].edge_index[1]]) for name in data.edge_types],
    )


def shuffled(parts: torch.Tensor, part: int) -> torch.Tensor:
    ids = (parts == part).nonzero().flatten()
    return ids[torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(part))]


def save(value, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, file)


def write_pyg(root: Path, data: Data | HeteroData, assignment) -> Path:
    """Writes a partition in the format of `torch_geometric.distributed.Partitioner`."""
    vertices, edges = stores_of(data, assignment)
    is_hetero = isinstance(data, HeteroData)
    some_have = {key: any(key in store for _, store, _ in [*vertices, *edges]) for key in ("x", "edge_attr")}

    def rows(store, key, ids, num_columns):
        if key in store:
            return store[key][ids]
        # A type without the attribute gets NaN if another type has it.
        return torch.full((ids.numel(), num_columns), float("nan")) if is_hetero and some_have[key] else None

    for part in range(PARTS):
        graph, node_feats, edge_feats = {}, {}, defaultdict(dict) if is_hetero else defaultdict()
        first = 0
        for of, store, parts in edges:
            ids = shuffled(parts, part)
            row, col = store.edge_index[:, ids]
            sizes = [data[name].num_nodes for name in (of[0], of[2])] if of else [data.num_nodes] * 2
            entry = {"edge_id": ids + first, "row": row, "col": col, "size": tuple(sizes)}
            graph.update({of: entry} if is_hetero else entry)
            own = {}
            if (attributes := rows(store, "edge_attr", ids, 2)) is not None:
                own = {"global_id": ids, "feats": {"edge_attr": attributes}}
            if "edge_time" in store:
                own["edge_time"] = store.edge_time[ids]
            edge_feats.update(({of: own} if own else {}) if is_hetero else own)
            first += parts.numel()
        first = 0
        for of, store, parts in vertices:
            ids = shuffled(parts, part)
            entry = {"global_id": ids + first, "feats": {"x": rows(store, "x", ids, 4)}}
            if is_hetero:
                entry["id"] = ids
            if "time" in store:
                entry["time"] = store.time
            node_feats.update({of: entry} if is_hetero else entry)
            first += parts.numel()
        for name, value in (("graph", graph), ("node_feats", node_feats), ("edge_feats", edge_feats)):
            save(value, root / f"part_{part}" / f"{name}.pt")
    for folder, stores in (("node_map", vertices), ("edge_map", edges)):
        for of, _, parts in stores:
            name = "__".join(of) if isinstance(of, tuple) else of
            save(parts, root / folder / f"{name}.pt" if is_hetero else root / f"{folder}.pt")
    meta = {"num_parts": PARTS, "node_types": None, "edge_types": None, "node_offset": None, "is_hetero": is_hetero}
    if is_hetero:
        meta |= {"node_types": data.node_types, "edge_types": data.edge_types}
    (root / "META.json").write_text(json.dumps(meta | {"is_sorted": True}))
    return root


def write_glt(root: Path, data: Data | HeteroData, assignment, pickled: bool = False) -> Path:
    """Writes a partition in the format of GLT's `RandomPartitioner`. Later versions write features in pickled chunks (`pickled`)."""
    vertices, edges = stores_of(data, assignment)

    def folder(group: str, part: int, of) -> Path:
        name = "__".join(of) if isinstance(of, tuple) else of
        path = root / f"part{part}" / group / (name or "")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def save_rows(path: Path, rows: torch.Tensor, ids: torch.Tensor) -> None:
        for name, value in (("feats", rows), ("ids", ids)):
            if not pickled:
                save(value, path / f"{name}.pt")
                continue
            with (path / f"{name}.pkl").open("ab") as file:
                for chunk in value.split(7):
                    pickle.dump(chunk.clone(), file)

    for part in range(PARTS):
        for of, store, parts in edges:
            ids = (parts == part).nonzero().flatten()
            path = folder("graph", part, of)
            values = {"rows": store.edge_index[0, ids], "cols": store.edge_index[1, ids], "eids": ids}
            if "edge_weight" in store:
                values["weights"] = store.edge_weight[ids]
            for name, value in values.items():
                save(value, path / f"{name}.pt")
            if "edge_attr" in store:
                save_rows(folder("edge_feat", part, of), store.edge_attr[ids], ids)
        for of, store, parts in vertices:
            ids = (parts == part).nonzero().flatten()
            if "x" in store:
                save_rows(folder("node_feat", part, of), store.x[ids], ids)
                hot = torch.tensor([0, 1])  # copies of other parts' rows
                save(store.x[hot], folder("node_feat", part, of) / "cache_feats.pt")
                save(hot, folder("node_feat", part, of) / "cache_ids.pt")
    for group, stores in (("node_pb", vertices), ("edge_pb", edges)):
        for of, _, parts in stores:
            name = "__".join(of) if isinstance(of, tuple) else of
            save(parts, root / group / f"{name}.pt" if name else root / f"{group}.pt")
    is_hetero = isinstance(data, HeteroData)
    meta = {
        "num_parts": PARTS,
        "data_cls": "hetero" if is_hetero else "homo",
        "node_types": data.node_types if is_hetero else None,
        "edge_types": data.edge_types if is_hetero else None,
    }
    (root / "META").write_bytes(pickle.dumps(meta, pickle.HIGHEST_PROTOCOL))
    return root


def assert_same_graph(got: Data | HeteroData, data: Data | HeteroData) -> None:
    """Compares graphs attribute by attribute, in the same order; `num_nodes` must be set."""
    assert type(got) is type(data)
    if isinstance(data, Data):
        pairs = [(got, data)]
    else:
        assert (got.node_types, got.edge_types) == (data.node_types, data.edge_types)
        pairs = [(got[name], data[name]) for name in [*data.node_types, *data.edge_types]]
    for one, other in pairs:
        assert set(one.keys()) - {"num_nodes"} == set(other.keys()) - {"num_nodes"}
        assert getattr(one, "num_nodes", None) == getattr(other, "num_nodes", None)
        for key in set(one.keys()) - {"num_nodes"}:
            assert one[key].dtype == other[key].dtype, key
            assert torch.equal(one[key], other[key]), key


def assert_same_parts(got, assignment) -> None:
    if isinstance(assignment, dict):
        assert set(got) == set(assignment) and all(torch.equal(got[name], assignment[name]) for name in assignment)
    else:
        assert torch.equal(got, assignment)


# --- round trips ------------------------------------------------------------------------------------------

GRAPHS = {
    "one type": one_type,
    "one type, plain": lambda: one_type(edge_attributes=False),
    "one type, times": lambda: one_type(time=True),
    "several types": several_types,
    "several types, times": lambda: several_types(time=True),
    "several types, all with features": lambda: several_types(without_features=None),
}
WRITERS = {
    "pyg": write_pyg,
    "glt": write_glt,
    "glt, pickled": lambda root, data, assignment: write_glt(root, data, assignment, pickled=True),
}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_loaded_partition_equals_the_original_graph(tmp_path, writer, graph):
    data = GRAPHS[graph]()
    if writer != "pyg" and "times" in graph:
        for store in data.node_stores:
            del store["time"]  # GLT's partitioners store none
    assignment = dealt(data)
    given = load_partition(WRITERS[writer](tmp_path / "parts", data, assignment))
    assert_same_graph(given.data, data)
    assert_same_parts(given.assignment, assignment)
    assert given.num_parts == PARTS


def test_edge_times_are_restored_with_and_without_edge_attributes(tmp_path):
    for name, attributes in (("both", True), ("alone", False)):
        data = one_type(edge_attributes=attributes)
        data.edge_time = torch.randint(100, (data.num_edges,))
        assert_same_graph(load_partition(write_pyg(tmp_path / name, data, dealt(data))).data, data)


def test_edge_weights_are_restored(tmp_path):
    data = one_type()
    data.edge_weight = torch.rand(data.num_edges)
    assert_same_graph(load_partition(write_glt(tmp_path, data, dealt(data))).data, data)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64])
@pytest.mark.parametrize("writer", WRITERS)
def test_features_keep_their_dtype(tmp_path, writer, dtype):
    data = one_type()
    data.x = (100 * data.x).to(dtype)
    assert_same_graph(load_partition(WRITERS[writer](tmp_path / "parts", data, dealt(data))).data, data)


def test_a_part_without_vertices_and_a_relation_without_edges_are_restored(tmp_path):
    data = several_types()
    empty = data.edge_types[0]
    data[empty].edge_index, data[empty].edge_attr = torch.empty(2, 0, dtype=torch.int64), torch.empty(0, 2)
    assignment = {name: parts.clamp(max=1) for name, parts in dealt(data).items()}
    for writer in ("pyg", "glt"):
        given = load_partition(WRITERS[writer](tmp_path / writer, data, assignment))
        assert_same_graph(given.data, data)
        assert given.num_parts == PARTS


def test_a_relation_may_have_double_underscores_in_its_name(tmp_path):
    data = HeteroData({"a": {"num_nodes": 3}, "c": {"num_nodes": 2}})
    data["a", "x__y", "c"].edge_index = torch.tensor([[0, 2], [1, 0]])
    for writer in WRITERS:
        assert_same_graph(load_partition(WRITERS[writer](tmp_path / writer, data, dealt(data))).data, data)


def test_a_loaded_graph_does_not_need_the_files(tmp_path):
    data = several_types(time=True)
    root = write_pyg(tmp_path / "parts", data, dealt(data))
    labels, parts = tmp_path / "label.pt", dealt(data)
    save(torch.arange(40), labels)
    given = load_partition(root, y=labels, node_type="paper")
    for file in [labels, *root.rglob("*.pt")]:
        file.write_bytes(b"")  # in place: reading the mapped file again would end the process
    data["paper"].y = torch.arange(40)
    assert_same_graph(given.data, data)
    assert_same_parts(given.assignment, parts)


def test_reading_does_not_change_the_safe_globals_of_torch(tmp_path):
    before = set(torch.serialization.get_safe_globals())
    data = one_type()
    load_partition(write_pyg(tmp_path, data, dealt(data)))
    assert set(torch.serialization.get_safe_globals()) == before


# --- PyG's own partitioner --------------------------------------------------------------------------------


def undirected_hetero() -> HeteroData:
    """Returns a symmetric graph, since METIS as PyG calls it crashes on others."""
    generator = torch.Generator().manual_seed(2)
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.rand(50, 4, generator=generator), torch.rand(30, 4, generator=generator)
    pairs = torch.stack([torch.randint(n, (160,), generator=generator) for n in (50, 30)]).unique(dim=1)
    order = torch.randperm(pairs.size(1), generator=generator)
    data["paper", "by", "author"].edge_index = pairs
    data["author", "writes", "paper"].edge_index = pairs.flip(0)[:, order]
    for name in data.edge_types:
        data[name].edge_attr = torch.rand(pairs.size(1), 2, generator=generator)
    return data


def pyg_graph(kind: str) -> Data | HeteroData:
    if kind.startswith("one type"):
        data = one_type(time="node times" in kind)
        if "plain" in kind:
            del data.edge_attr
        if "edge times" in kind:
            data.edge_time = torch.arange(data.num_edges)
        return data
    data = undirected_hetero()
    for place, name in enumerate(data.node_types):
        if "node times" in kind:
            data[name].time = torch.arange(data[name].num_nodes) + place
    if "one without features" in kind:
        data["author"].num_nodes = 30
        del data["author"].x
    if "one without edge attributes" in kind:
        del data["paper", "by", "author"].edge_attr
    if "no features" in kind:
        for name in data.node_types:
            data[name].num_nodes = data[name].x.size(0)
            del data[name].x
    return data


PYG_GRAPHS = ["one type", "one type, plain", "one type, node times", "one type, edge times", "several types", "several types, node times",
              "several types, one without features", "several types, one without edge attributes", "several types, no features"]  # fmt: skip


def cut(self: ClusterData, edge_index: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Replaces PyG's METIS with an arbitrary cut. METIS of pyg-lib is compiled for AVX-512 and ends the process on other processors."""
    return torch.arange(num_nodes) * 7 % 11 % self.num_parts


@pytest.mark.parametrize("kind", PYG_GRAPHS)
def test_a_partition_that_pyg_wrote_equals_the_original_graph(tmp_path, monkeypatch, kind):
    peer("torch_sparse")
    from torch_geometric.distributed import Partitioner

    monkeypatch.setattr(ClusterData, "_metis", cut)
    data = pyg_graph(kind)
    Partitioner(data, PARTS, str(tmp_path)).generate_partition()
    given = load_partition(tmp_path)
    assert_same_graph(given.data, data)
    names = [""] if isinstance(data, Data) else data.node_types
    for part in range(PARTS):
        stored = torch.load(tmp_path / f"part_{part}" / "node_feats.pt", weights_only=True)
        for name in names:
            ids = stored[name]["id"] if name else stored["global_id"]
            parts = given.assignment[name] if name else given.assignment
            assert (parts == part).nonzero().flatten().tolist() == sorted(ids.tolist())


# --- dataset directories ----------------------------------------------------------------------------------


def assert_parts_own(root: Path, data: Data, owned: list[set[int]]) -> None:
    """Checks that the parts of a directory have the vertices ``owned``, with their rows and edges of `data`."""
    edges = set()
    for part_id, expected in enumerate(owned):
        part = salientpp.load(root, part_id=part_id)
        begin, end = part.book.range_of(part_id)
        ids = part.original_id(torch.arange(begin, end))
        assert set(ids.tolist()) == expected and len(ids) == len(expected)
        assert torch.equal(part.node_rows()["x"], data.x[ids])
    everyone = part.original_id(torch.arange(part.num_vertices))
    targets = everyone.repeat_interleave(part.graph.indptr.diff())
    edges = sorted(zip(everyone[part.graph.indices.long()].tolist(), targets.tolist()))
    assert edges == sorted(zip(*data.edge_index.tolist()))


def test_a_dataset_directory_has_the_parts_of_the_partitioner(tmp_path):
    data = one_type()
    assignment = dealt(data)
    owned = [set((assignment == part).nonzero().flatten().tolist()) for part in range(PARTS)]
    for writer in WRITERS:
        graph, given, num_parts = load_partition(WRITERS[writer](tmp_path / writer, data, assignment))
        salientpp.partition(graph, num_parts, tmp_path / f"{writer}-d", [3, 2], 8, method=given)
        assert_parts_own(tmp_path / f"{writer}-d", data, owned)


def test_a_dataset_directory_has_the_parts_that_pyg_wrote(tmp_path, monkeypatch):
    peer("torch_sparse")
    from torch_geometric.distributed import Partitioner

    monkeypatch.setattr(ClusterData, "_metis", cut)
    data = one_type()
    Partitioner(data, PARTS, str(tmp_path / "pyg")).generate_partition()
    files = [tmp_path / "pyg" / f"part_{part}" / "node_feats.pt" for part in range(PARTS)]
    owned = [set(torch.load(file, weights_only=True)["global_id"].tolist()) for file in files]
    graph, given, num_parts = load_partition(tmp_path / "pyg")
    salientpp.partition(graph, num_parts, tmp_path / "d", [3, 2], 8, method=given)
    assert_parts_own(tmp_path / "d", data, owned)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_dataset_directory_of_several_types_has_the_parts_of_the_partitioner(tmp_path, capsys, writer):
    data, train = several_types(time=writer == "pyg"), torch.arange(0, 40, 3)
    assignment = dealt(data)
    root = WRITERS[writer](tmp_path / "parts", data, assignment)
    graph, given, num_parts = load_partition(root, train=train, node_type="paper")
    salientpp.partition(graph, num_parts, tmp_path / "d", [3, 2], 8, method=given)
    save(train, tmp_path / "train.pt")
    name = f"{writer[:3]}-partition:{root},node_type=paper,train={tmp_path}/train.pt"
    code, _, err = run(capsys, "partition", name, tmp_path / "c", "--parts", PARTS, "--num-neighbors", "3,2")
    assert code == 0, err
    for part_id in range(PARTS):
        for directory in ("d", "c"):
            part = salientpp.load(tmp_path / directory, part_id=part_id)
            for of in data.node_types:
                ids = part.original_id(torch.arange(*part.books[of].range_of(part_id)), of)
                assert sorted(ids.tolist()) == (assignment[of] == part_id).nonzero().flatten().tolist()
                if "x" in data[of]:
                    assert torch.equal(
                        part.take("x", torch.arange(*part.books[of].range_of(part_id)), of), data[of].x[ids]
                    )
            seeds = part.original_id(part.split("train", part_id, "paper"), "paper")
            assert set(seeds.tolist()) == {v for v in train.tolist() if assignment["paper"][v] == part_id}


# --- labels and splits ------------------------------------------------------------------------------------


def test_labels_and_splits_can_be_tensors_files_or_folders(tmp_path):
    data = one_type()
    root = write_pyg(tmp_path / "parts", data, dealt(data))
    labels, train = torch.arange(61) % 4, torch.arange(0, 40, 2)
    save(labels, tmp_path / "label.pt")
    for place, ids in enumerate(train.split(3)):  # more than ten files, since they are joined in the order of numbers
        save(ids, tmp_path / "train" / f"partition{place}.pt")
    save(torch.arange(61) >= 50, tmp_path / "test.pt")
    got = load_partition(root, y=tmp_path / "label.pt", train=tmp_path / "train", val=torch.tensor([41]), test=str(tmp_path / "test.pt")).data  # fmt: skip
    assert torch.equal(got.y, labels)
    assert got.train_mask.nonzero().flatten().tolist() == train.tolist()
    assert got.val_mask.nonzero().flatten().tolist() == [41]
    assert got.test_mask.nonzero().flatten().tolist() == list(range(50, 61))
    by_name = load_dataset(
        f"pyg-partition:{root},y={tmp_path}/label.pt,train={tmp_path}/train", val=torch.tensor([41]), test=str(tmp_path / "test.pt")
    )  # fmt: skip
    assert_same_graph(by_name, got)


def test_labels_can_belong_to_one_of_several_types(tmp_path):
    data = several_types()
    root = write_glt(tmp_path / "parts", data, dealt(data))
    save(torch.arange(40), tmp_path / "label.pt")
    got = load_dataset(f"glt-partition:{root},node_type=paper,y={tmp_path}/label.pt")
    data["paper"].y = torch.arange(40)
    assert_same_graph(got, data)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"y": torch.zeros(60)}, "y must have a row for each of the 61 vertices, got float32 [60]"),
        ({"y": torch.tensor(3)}, "y must have a row for each of the 61 vertices, got int64 []"),
        ({"train": torch.tensor([61])}, "train must be in [0, 61), got 61 at position 0"),
        ({"train": torch.tensor([0.5])}, "train must be a mask or integer ids, got torch.float32"),
        (
            {"train": torch.tensor([0, 1, 1, 0])},
            "train must hold each vertex id once, got one again; if it has a flag per vertex",
        ),
        ({"train": torch.ones(60).bool()}, "train as a mask must have shape [61], got [60]"),
        ({"test": "none.pt"}, "none.pt: no such file"),
        ({"test": "{tmp}"}, "expected a .pt file, or a folder with partition0.pt, partition1.pt, ..., got neither"),
        ({"y": "{tmp}"}, "a directory; expected a file"),
        (
            {"y": torch.zeros(61), "node_type": "paper"},
            "node_type is for graphs with several types, but this graph has one",
        ),
    ],
)
def test_labels_and_splits_that_do_not_fit_are_refused(tmp_path, arguments, words):
    data = one_type()
    root = write_pyg(tmp_path / "parts", data, dealt(data))
    given = {key: value.format(tmp=tmp_path) if isinstance(value, str) else value for key, value in arguments.items()}
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_partition(root, **given)
    assert words in str(error.value)


def test_labels_of_several_types_need_the_type(tmp_path):
    data = several_types()
    root = write_pyg(tmp_path / "parts", data, dealt(data))
    for node_type, got in ((None, "got None"), ("papers", "got 'papers'. Did you mean paper?")):
        with pytest.raises(ValueError) as error:
            load_partition(root, y=torch.zeros(40), node_type=node_type)
        assert f"node_type must say which of the types {', '.join(data.node_types)} has y" in str(error.value)
        assert got in str(error.value)


# --- damaged files ----------------------------------------------------------------------------------------


def edited(name: str, change):
    """Applies `change` to the contents of a file."""

    def edit(root: Path) -> None:
        value = torch.load(root / name, weights_only=False)
        changed = change(value)
        save(value if changed is None else changed, root / name)

    return edit


def at(*keys, to):
    """Sets an entry of nested dicts to ``to``, or to the result of ``to`` if it is a function."""

    def change(value):
        inner = value
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to(inner[keys[-1]]) if callable(to) else to

    return change


def without(key):
    def change(value):
        del value[key]

    return change


def with_first(value):
    """Returns a function that copies a tensor with `value` as its first entry."""
    return lambda tensor: torch.cat([torch.full_like(tensor[:1], value), tensor[1:]])


def meta(**entries):
    def edit(root: Path) -> None:
        if (root / "META.json").exists():
            stored = json.loads((root / "META.json").read_text())
            (root / "META.json").write_text(json.dumps({**stored, **entries}))
        else:
            stored = pickle.loads((root / "META").read_bytes())
            (root / "META").write_bytes(pickle.dumps({**stored, **entries}))

    return edit


def removed(name: str):
    def edit(root: Path) -> None:
        shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink()

    return edit


def copied(name: str, to: str):
    return lambda root: shutil.copytree(root / name, root / to)


def cut_short(name: str):
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:100])


def twice(tensor):
    """Returns a copy whose second entry repeats the first."""
    return torch.cat([tensor[:1], tensor[:1], tensor[2:]])


PYG_DAMAGE = [
    (removed("META.json"), "expected META.json, which PyG's partitioner writes, or META, which GLT's partitioners write, got edge_map.pt, node_map.pt"),
    (lambda root: (root / "META.json").write_text("{"), "META.json: not JSON ("),
    (lambda root: (root / "META.json").write_text("[]"), "META.json: expected num_parts, an integer above 0, and is_hetero"),
    (meta(num_parts=0), "META.json: expected num_parts, an integer above 0"),
    (meta(num_parts=4), "META.json says, got none named part_3; bring the folders of all machines together"),
    (meta(num_parts=2), "META.json says 2 parts, but there is a folder part_2; it is of another partition"),
    (removed("part_1"), "got none named part_1; bring the folders of all machines together in one directory"),
    (removed("part_1/graph.pt"), "part_1/graph.pt: no such file"),
    (removed("node_map.pt"), "node_map.pt: no such file"),
    (copied("part_0", "part_3"), "there is a folder part_3"),
    (cut_short("part_2/node_feats.pt"), "part_2/node_feats.pt: damaged, or not a file that torch.save wrote"),
    (edited("node_map.pt", lambda parts: parts.float()), "node_map.pt: it must hold integers, shape [n], got float32 [61]"),
    (edited("node_map.pt", lambda parts: parts.tolist()), "node_map.pt: it must be a dense tensor with a row per id, got a list"),
    (edited("node_map.pt", with_first(3)), "node_map.pt: expected a part in [0, 3) for every id, got 3 for 0"),
    (edited("node_map.pt", with_first(-1)), "node_map.pt: expected a part in [0, 3) for every id, got -1 for 0"),
    (edited("node_map.pt", lambda parts: (parts + 1) % 3), "but {root}/node_map.pt puts it in part"),
    (edited("node_map.pt", lambda parts: parts[:-1]), "graph.pt: expected edges from 60 sources to 60 targets, the numbers of vertices in node_map, got"),
    (edited("edge_map.pt", lambda parts: parts[:-1]), "graph.pt: expected ids in [0, "),
    (edited("edge_map.pt", lambda parts: (parts + 1) % 3), "graph.pt: edge "),
    (edited("part_0/graph.pt", lambda graph: [graph]), "part_0/graph.pt: expected a dict, got a list"),
    (edited("part_0/graph.pt", without("row")), "part_0/graph.pt: expected 'row', got 'edge_id', 'col', 'size'"),
    (edited("part_0/graph.pt", at("row", to=with_first(61))), "must have a source in [0, 61), the size of node_map.pt, got 61"),
    (edited("part_0/graph.pt", at("col", to=with_first(-1))), "must have a target in [0, 61), the size of node_map.pt, got -1"),
    (edited("part_0/graph.pt", at("row", to=lambda row: row[1:])), "graph.pt: row must have a row for each of the"),
    (edited("part_0/graph.pt", at("edge_id", to=lambda ids: ids.float())), "graph.pt: edge_id must hold integers"),
    (edited("part_0/graph.pt", at("edge_id", to=twice)), "global_id must list the edges of graph.pt in the same order"),
    (edited("part_0/graph.pt", at("edge_id", to=with_first(-1))), "got edge -1"),
    (edited("part_1/node_feats.pt", at("global_id", to=twice)), "expected x of each vertex, got none for"),
    (edited("part_1/node_feats.pt", at("global_id", to=with_first(61))), "expected ids in [0, 61), the size of node_map.pt, got vertex 61"),
    (edited("part_1/node_feats.pt", at("feats", "x", to=lambda x: x[1:])), "node_feats.pt: x must have a row for each of the"),
    (edited("part_1/node_feats.pt", at("feats", "x", to=lambda x: x[:, 1:])), "expected x as in earlier parts, float32 [0, 5] with any number of rows"),
    (edited("part_1/node_feats.pt", at("feats", "x", to=lambda x: x.double())), "with any number of rows, got float64"),
    (edited("part_1/node_feats.pt", at("feats", "x", to=None)), "expected x of each vertex, got none for"),
    (edited("part_1/node_feats.pt", at("feats", to=[])), "node_feats.pt: expected a dict under feats, got a list"),
    (edited("part_1/node_feats.pt", at("feats", "x", to=lambda x: x * float("nan"))), "x must be finite, got nan or infinity in row"),
    (edited("part_1/node_feats.pt", at("time", to=lambda t: t + 1)), "node_feats.pt: expected time as in earlier parts, got other values"),
    (edited("part_1/node_feats.pt", at("time", to=lambda t: t[1:])), "node_feats.pt: expected time with 61 rows, the size of node_map.pt, got int64 [60]"),
    (edited("part_2/edge_feats.pt", at("global_id", to=lambda ids: ids.flip(0))), "edge_feats.pt: global_id must list the edges of graph.pt in the same order"),
    (edited("part_2/edge_feats.pt", at("feats", "edge_attr", to=lambda rows: rows[1:])), "edge_feats.pt: edge_attr must have a row for each of the"),
    (edited("part_2/edge_feats.pt", lambda feats: {}), "expected edge_attr of each edge, got none for"),
]  # fmt: skip


@pytest.mark.parametrize("damage, words", PYG_DAMAGE)
def test_a_damaged_partition_of_pyg_is_refused_with_a_clear_error(tmp_path, damage, words):
    data = one_type(time=True)
    root = write_pyg(tmp_path / "parts", data, dealt(data))
    damage(root)
    refused(root, words)


def refused(root: Path, words: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_partition(root)
    assert words.format(root=root) in str(error.value)


RELATION = ("author", "writes", "paper")
PYG_HETERO_DAMAGE = [
    (meta(node_types=["paper", "author"]), "META.json: expected node_types, a list of names, and edge_types"),
    (meta(node_types=["paper", "author", "venue", "paper"]), "all distinct, got"),
    (meta(edge_types=[["paper", "by"]]), "a list of [source, relation, target] with these names"),
    (meta(edge_types=None), "a list of [source, relation, target] with these names"),
    (meta(edge_types=[["paper", ["by"], "author"]]), "a list of [source, relation, target] with these names"),
    (removed("node_map/author.pt"), "node_map/author.pt: no such file"),
    (removed("edge_map/author__writes__paper.pt"), "edge_map/author__writes__paper.pt: no such file"),
    (edited("part_0/graph.pt", without(RELATION)), f"graph.pt: expected {RELATION}, got ("),
    (edited("part_0/graph.pt", at(RELATION, "row", to=with_first(25))), f"edge of type {RELATION} "),
    (edited("part_0/graph.pt", at(RELATION, to=None)), f"graph.pt: expected a dict for {RELATION}, got a NoneType"),
    (edited("part_0/edge_feats.pt", at(RELATION, to=3)), f"edge_feats.pt: expected a dict for {RELATION}, got a int"),
    (edited("part_0/edge_feats.pt", without(RELATION)), f"expected edge_attr of each edge of type {RELATION}, got none for"),
    (edited("part_0/node_feats.pt", at("author", "global_id", to=with_first(0))), "got vertex of type 'author' -"),
    (edited("part_0/node_feats.pt", without("author")), "node_feats.pt: expected 'author', got 'paper', "),
    (edited("part_0/node_feats.pt", at("author", "feats", "x", to=lambda x: x * float("inf"))), "author: x must be finite"),
]  # fmt: skip


@pytest.mark.parametrize("damage, words", PYG_HETERO_DAMAGE)
def test_an_error_about_a_partition_of_several_types_names_the_type(tmp_path, damage, words):
    data = several_types()
    root = write_pyg(tmp_path / "parts", data, dealt(data))
    damage(root)
    refused(root, words)


GLT_DAMAGE = [
    (lambda root: (root / "META").write_bytes(b""), "META: expected num_parts above 0, data_cls 'homo' or 'hetero'"),
    (lambda root: (root / "META").write_bytes(b"no pickle"), "META: damaged, or not a pickle"),
    (meta(num_parts=0), "META: expected num_parts above 0"),
    (meta(num_parts=2), "META says 2 parts, but there is a folder part2"),
    (meta(data_cls="graph"), "META: expected num_parts above 0, data_cls 'homo' or 'hetero'"),
    (removed("part1"), "got none named part1; bring the folders of all machines together"),
    (removed("edge_pb.pt"), "edge_pb.pt: no such file"),
    (removed("part1/graph/eids.pt"), "part1/graph/eids.pt: no such file"),
    (copied("part1/graph", "graph"), "written with graph_caching=True, which loses the order of edges; partition again without it"),
    (edited("part0/graph/rows.pt", with_first(61)), "must have a source in [0, 61), the size of node_pb.pt, got 61"),
    (edited("part0/graph/rows.pt", lambda rows: rows[1:]), "part0/graph: row must have a row for each of the"),
    (edited("part0/graph/eids.pt", twice), "expected the ends of each edge, got none for"),
    (edited("node_pb.pt", lambda parts: parts.flip(0)), "puts it in part"),
    (removed("part1/node_feat"), "expected x of each vertex, got none for"),
    (removed("part1/node_feat/ids.pt"), "part1/node_feat/ids.pt: no such file"),
    (edited("part1/node_feat/ids.pt", lambda ids: ids[1:]), "part1/node_feat: x must have a row for each of the"),
    (edited("part1/edge_feat/feats.pt", lambda rows: rows.to_sparse()), "feats must be a dense tensor with a row per id, got"),
]  # fmt: skip


@pytest.mark.parametrize("damage, words", GLT_DAMAGE)
def test_a_damaged_partition_of_glt_is_refused_with_a_clear_error(tmp_path, damage, words):
    data = one_type()
    root = write_glt(tmp_path / "parts", data, dealt(data))
    damage(root)
    refused(root, words)


def test_a_repeated_row_is_refused(tmp_path):
    data = one_type()
    root = write_glt(tmp_path / "parts", data, dealt(data), pickled=True)
    for name in ("feats", "ids"):
        file = root / "part1" / "node_feat" / f"{name}.pkl"
        file.write_bytes(2 * file.read_bytes())
    refused(root, "expected x of each vertex once, got ")
    (root / "part1" / "node_feat" / "ids.pkl").unlink()
    refused(root, "part1/node_feat/ids.pkl: no such file")


def test_a_folder_without_a_partition_is_refused_with_advice(tmp_path):
    data = one_type(edge_attributes=False)
    refused(tmp_path / "none", "{root}: no such directory")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "expected a directory that a partitioner wrote, got a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "got nothing; that file is written last: give the partitioner's output directory")
    salientpp.partition(data, 2, tmp_path / "own", [2], 4, method="random")
    refused(tmp_path / "own", "it is a dataset directory; open it with salientpp.load")


# --- files that would run code ----------------------------------------------------------------------------


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_no_file_runs_code(tmp_path):
    data, ran = one_type(), tmp_path / "ran"
    evil = Evil(ran)
    for writer, names in (
        ("pyg", ["node_map.pt", "edge_map.pt", "part_0/graph.pt", "part_0/node_feats.pt", "part_0/edge_feats.pt"]),
        ("glt", ["node_pb.pt", "edge_pb.pt", "part0/graph/rows.pt", "part0/node_feat/ids.pt", "part0/edge_feat/feats.pt"]),
    ):  # fmt: skip
        for name in names:
            root = WRITERS[writer](tmp_path / "parts", data, dealt(data))
            save({"x": evil}, root / name)
            refused(root, f"{root / name}: not read, since it holds more than tensors and plain containers")
            shutil.rmtree(root)
    for name in ("META", "part0/node_feat/ids.pkl", "part2/edge_feat/feats.pkl"):
        root = WRITERS["glt, pickled"](tmp_path / "parts", data, dealt(data))
        (root / name).write_bytes(pickle.dumps(evil))
        refused(root, f"{root / name}: not read, since it holds more than tensors and plain values (")
        (root / name).write_bytes(b"\x80\x02cos\x0b\nsystem\n.")  # a damaged name
        refused(root, f"{root / name}: not read, since it holds more than tensors and plain values (os\\x0b.system)")
        # Code inside the storage of a tensor, which torch stores as a file of its own.
        inner = b"\x80\x02ctorch.storage\n_load_from_bytes\nB" + len(pickle.dumps(evil)).to_bytes(4, "little")
        (root / name).write_bytes(inner + pickle.dumps(evil) + b"\x85R.")
        refused(root, f"{root / name}: damaged, or not a pickle")
        shutil.rmtree(root)
    assert not ran.exists()
    pickle.loads(pickle.dumps(evil))
    assert ran.exists(), "the code runs if it is not refused"


@pytest.mark.parametrize(("seed", "number"), [(8, 20), *rare((7, 60))])
def test_a_randomly_damaged_partition_is_loaded_or_refused_in_one_line(tmp_path, seed, number):
    rng = random.Random(seed)
    data = several_types(time=True)
    for writer in WRITERS:
        root = WRITERS[writer](tmp_path / "parts", data, dealt(data))
        files = sorted(file for file in root.rglob("*") if file.is_file())
        for _ in range(number):
            file = rng.choice(files)
            whole = file.read_bytes()
            damaged = bytearray(whole)
            for _ in range(rng.choice([1, 3, 30])):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            file.write_bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged) + 1)])])
            try:
                load_partition(root)
            except (ValueError, FileNotFoundError) as error:
                assert len(str(error).splitlines()) == 1
            file.write_bytes(whole)
        shutil.rmtree(root)


# --- the command line -------------------------------------------------------------------------------------


def test_the_command_converts_a_partition(tmp_path, capsys):
    data = one_type()
    assignment = dealt(data)
    save(torch.arange(61) % 4, tmp_path / "label.pt")
    save(torch.arange(20), tmp_path / "train.pt")
    for writer in ("pyg", "glt"):
        root = WRITERS[writer](tmp_path / writer, data, assignment)
        name = f"{writer}-partition:{root},y={tmp_path}/label.pt,train={tmp_path}/train.pt"
        code, _, err = run(
            capsys, "partition", name, tmp_path / f"{writer}-d", "--parts", PARTS, "--num-neighbors", "3,2"
        )
        assert code == 0, err
        owned = [set((assignment == part).nonzero().flatten().tolist()) for part in range(PARTS)]
        assert_parts_own(tmp_path / f"{writer}-d", data, owned)
        part = salientpp.load(tmp_path / f"{writer}-d", part_id=0)
        mine = part.original_id(part.split("train"))
        assert set(mine.tolist()) == owned[0] & set(range(20)) and part.num_classes == 4


def test_the_command_can_make_another_partition_of_the_graph(tmp_path, capsys):
    data = one_type()
    root = write_pyg(tmp_path / "pyg", data, dealt(data))
    code, _, err = run(
        capsys, "partition", f"pyg-partition:{root}", tmp_path / "d", "--parts", 2, "--method", "random", "--num-neighbors", 2
    )  # fmt: skip
    assert code == 0, err
    assert salientpp.load(tmp_path / "d", part_id=0).num_parts == 2


def test_the_command_analyzes_a_given_partition(tmp_path, capsys):
    data = one_type()
    assignment = dealt(data)
    root = write_pyg(tmp_path / "pyg", data, assignment)
    options = [
        "--parts",
        PARTS,
        "--num-neighbors",
        2,
        "--batch-size",
        8,
        "--predict-only",
        "--seeds",
        "all",
        "--json",
        tmp_path / "j",
    ]
    assert run(capsys, "analyze", f"pyg-partition:{root}", *options)[0] == 0
    cut = assignment[data.edge_index[0]] != assignment[data.edge_index[1]]
    found = json.loads((tmp_path / "j").read_text())
    assert found["edge_cut_fraction"] == pytest.approx(float(cut.float().mean()))
    hetero = several_types()
    write_glt(tmp_path / "glt", hetero, dealt(hetero))
    line = mistake(capsys, "analyze", f"glt-partition:{tmp_path}/glt", *options)
    assert "has several vertex types" in line


@pytest.mark.parametrize(
    "dataset, options, words",
    [
        ("pyg-partition:{root}", ["--parts", 2], "has 3 parts, expected 2; ask for 3 parts, or partition again with a method such as metis"),
        ("pyg-partition:", ["--parts", 3], "expected pyg-partition:DIR, or pyg-partition:DIR,y=FILE,train=FILE, got 'pyg-partition:'"),
        ("glt-partition:{root}", ["--parts", 3], "{root} is a pyg-partition, got 'glt-partition:"),
        ("pyg-partition:{root}/none", ["--parts", 3], "{root}/none: no such directory"),
        ("pyg-partition:{root},labels=y.pt", ["--parts", 3], "pyg-partition has no parameter 'labels'; it has y, train, val, test, node_type"),
        ("pyg-partition:{root},y=none.pt", ["--parts", 3], "none.pt: no such file"),
        ("synthetic", ["--parts", 3, "--method", "given"], "--method given needs a partitioned dataset"),
        ("pyg-partitions:{root}", ["--parts", 3], "Did you mean pyg-partition"),
    ],
)  # fmt: skip
def test_a_mistake_on_the_command_line_is_one_line(tmp_path, capsys, dataset, options, words):
    data = one_type()
    root = write_pyg(tmp_path / "pyg", data, dealt(data))
    line = mistake(capsys, "partition", dataset.format(root=root), tmp_path / "d", *options)
    assert words.format(root=root) in line
