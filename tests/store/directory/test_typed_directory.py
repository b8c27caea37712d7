"""Laws of dataset directories of several types: every row, edge, split and id of every type is stored in its place, for any number of parts.

Attributes of vertices hold their type and number, and those of edges their relation and number. So every row on disk identifies its vertex or edge.
"""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from directories import FANOUTS, contents, edit_manifest, forge_checksums, names_in
from graphs import RELATIONS, random_data, random_hetero
from rare import rare
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import SAGEConv, to_hetero

import salientpp
from salientpp.datasets import synthetic_mag
from salientpp.graph.typed import TypedGraph
from salientpp.store.directory import contents as contents_of
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.local_copy import copy_to_disk
from salientpp.vip.inclusion import typed_inclusion_probability, uniform_starts

BATCH_SIZE = 8
CITES = ("paper", "cites", "paper")


def hetero(seed: int = 0, **sizes: int) -> HeteroData:
    """Returns a graph with splits of papers and authors. Some papers lack a label.

    One type has no rows, one has no vertices, and one relation has no edges.
    """
    print(f"seed {seed}")
    data = random_hetero(seed=seed, **sizes)
    draw = torch.Generator().manual_seed(seed)
    data["paper"].y = torch.randint(-1, 5, (data["paper"].num_nodes,), generator=draw)
    data["paper"].half = data["paper"].x.bfloat16()
    for name, share in (("paper", 0.5), ("author", 0.3)):
        data[name].val_mask = torch.rand(data[name].num_nodes, generator=draw) < share
    data["paper"].train_mask = torch.rand(data["paper"].num_nodes, generator=draw) < 0.5
    data["topic"].num_nodes = 11
    data["nobody"].num_nodes = 0
    data["paper", "on", "topic"].edge_index = torch.stack(
        [torch.randint(data["paper"].num_nodes, (50,), generator=draw), torch.randint(11, (50,), generator=draw)]
    )
    data["nobody", "reads", "paper"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    data["topic", "of", "nobody"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    return data


def write(data: HeteroData | Data, num_parts: int, root: Path, **options: Any) -> salientpp.PartitionedGraph:
    return salientpp.partition(data, num_parts, root, FANOUTS, BATCH_SIZE, **options)


def original(part: salientpp.PartitionedGraph) -> dict[Any, Tensor]:
    """Returns the user's id of every vertex, per type."""
    return {name: part.original_id(torch.arange(book.num_vertices), name) for name, book in part.books.items()}


def kept(data: HeteroData, name: str, split: str) -> Tensor:
    """Returns the ids in a mask, without vertices whose label is unknown."""
    mask = data[name][f"{split}_mask"]
    return (mask & (data[name].y >= 0) if "y" in data[name] else mask).nonzero().flatten()


def assert_nothing_is_lost(
    data: HeteroData, part: salientpp.PartitionedGraph, splits: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Checks every row, edge and split. ``splits`` is type -> name -> ascending original ids."""
    K, ids = part.num_parts, original(part)
    assert part.is_hetero and part.metadata() == data.metadata() == (part.node_types, part.edge_types)
    for name in data.node_types:
        size, book = data[name].num_nodes, part.books[name]
        assert torch.equal(ids[name].sort().values, torch.arange(size)), "every vertex occurs once"
        assert book.num_parts == K and book.num_vertices == size
        rows_of = [part.rows(p)[name] for p in range(K)]
        columns = {key for key in data[name].keys() if key not in ("num_nodes", "train_mask", "val_mask", "test_mask")}
        for column in columns:
            pieces = [rows[column] for rows in rows_of]
            if name in part.replicated:
                assert part.row_books[name].num_parts == 1
                for piece in pieces:
                    assert torch.equal(piece, data[name][column][ids[name]]), "every part has all rows"
            else:
                assert torch.equal(part.row_books[name].offsets, book.offsets)
                assert [len(piece) for piece in pieces] == [book.size_of(p) for p in range(K)]
                assert torch.equal(torch.cat(pieces), data[name][column][ids[name]]), (name, column)
        assert all(set(rows) == columns for rows in rows_of), name
        of_type = splits.get(name, {})
        for split, expected in of_type.items():
            pieces = [part.split(split, p, name) for p in range(K)]
            for p, piece in enumerate(pieces):
                begin, end = book.range_of(p)
                assert bool((piece.diff() > 0).all()) and bool(((piece >= begin) & (piece < end)).all())
            assert torch.equal(ids[name][torch.cat(pieces)].sort().values, expected), (name, split)
        assert set(part.description.vertices(name).splits) == set(of_type)
        for p in range(K):
            assert part.split("all", p, name).tolist() == list(range(*book.range_of(p)))
            assert part.vip(p, name).shape == (size,) and part.vip(p, name).dtype == torch.float32
    graph = part.typed_graph()
    for name, relation in zip(graph.edge_types, graph.relations):
        edge_index = data[name].edge_index
        target = torch.arange(relation.indptr.numel() - 1).repeat_interleave(relation.indptr.diff())
        pairs = torch.stack([ids[name[0]][relation.indices.long()], ids[name[2]][target]])
        assert relation.edge_id is None, "edge ids are positions"
        rows = part.edge_rows_by_type()[name]
        if "edge_attr" in data[name]:
            number = rows["edge_attr"][:, 1].long()
            assert torch.equal(number.sort().values, torch.arange(edge_index.size(1))), "every edge occurs once"
            assert torch.equal(pairs, edge_index[:, number]), "an edge keeps its attributes"
            for column in data[name].keys():
                if column != "edge_index":
                    assert torch.equal(rows[column], data[name][column][number]), (name, column)
        else:
            by_ends = [ends[:, (ends[0] * 1000 + ends[1]).argsort()] for ends in (pairs, edge_index)]
            assert torch.equal(*by_ends), "a relation without attributes has the same edges"
        for p in range(K):
            begin, end = part.books[name[2]].range_of(p)
            own = part.edge_split("all", p, name)
            assert torch.equal(own, ((target >= begin) & (target < end)).nonzero().flatten())


def mask_splits(data: HeteroData) -> dict[str, dict[str, Tensor]]:
    return {
        "paper": {"train": kept(data, "paper", "train"), "val": kept(data, "paper", "val")},
        "author": {"val": kept(data, "author", "val")},
    }


# --- round trip ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize(("seed", "method"), [(0, "metis"), (1, "random"), *rare((0, "random"), (1, "metis"))])
def test_everything_of_every_type_survives_a_round_trip(tmp_path, seed, num_parts, method):
    data = hetero(seed)
    part = write(data, num_parts, tmp_path / "d", method=method, replicate={"venue"})
    assert part.replicated == {"venue"}
    assert_nothing_is_lost(data, part, mask_splits(data))
    assert_nothing_is_lost(data, salientpp.load(tmp_path / "d", verify="full"), mask_splits(data))
    assert part.manifest["version"] == 2
    assert part.num_features["paper"] == 2 and part.num_features["topic"] == 0
    assert part.num_classes == {"paper": 5, "author": 0, "venue": 0, "topic": 0, "nobody": 0}


@pytest.mark.parametrize("time_attr", ["time", "edge_time"])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_times_change_only_the_order_inside_lists_on_disk(tmp_path, num_parts, time_attr):
    data = hetero(2)
    part = write(data, num_parts, tmp_path / "d", time_attr=time_attr)
    assert_nothing_is_lost(data, part, mask_splits(data))
    plain = write(data, num_parts, tmp_path / "plain")
    graph, other = part.typed_graph(time_attr), plain.typed_graph(time_attr)
    for name, relation, sorted_in_memory in zip(graph.edge_types, graph.relations, other.relations):
        assert relation.edge_id is None, "memory maps are shared"
        assert relation.indices.data_ptr() == part.lists[name][1].data_ptr()
        timed = name in RELATIONS if time_attr == "edge_time" else name[0] not in ("topic", "nobody")
        assert (relation.edge_time is not None) == (timed and time_attr == "edge_time")
        assert (relation.source_time is not None) == (timed and time_attr == "time")
        # The lists are the same. Edge ids are not compared, because they are positions in different files.
        assert torch.equal(relation.indptr, sorted_in_memory.indptr)
        assert torch.equal(relation.indices, sorted_in_memory.indices)
    if time_attr == "time":
        ids = original(part)
        for name, time in zip(graph.node_types, graph.node_time):
            assert time is None if name in ("topic", "nobody") else torch.equal(time, data[name].time[ids[name]])


@pytest.mark.parametrize(
    ("stored", "asked"),
    [(None, None), (None, "time"), (None, "edge_time"), ("time", "time"), ("edge_time", "edge_time")],
)
def test_the_typed_graph_equals_the_graph_in_memory_under_the_same_ids(tmp_path, stored, asked):
    data = hetero(3)
    part = write(data, 3, tmp_path / "d", time_attr=stored)
    ids = original(part)
    renumbered = HeteroData()
    for name in data.node_types:
        renumbered[name].num_nodes = data[name].num_nodes
        if "time" in data[name]:
            renumbered[name].time = data[name].time[ids[name]]
    new_id = {name: torch.empty_like(order).scatter_(0, order, torch.arange(len(order))) for name, order in ids.items()}
    for name in data.edge_types:
        ends = data[name].edge_index
        renumbered[name].edge_index = torch.stack([new_id[name[0]][ends[0]], new_id[name[2]][ends[1]]])
        for column in ("edge_time", "weight"):
            if column in data[name]:
                renumbered[name][column] = data[name][column]
    got = part.typed_graph(asked, "weight")
    want = TypedGraph.from_data(renumbered, time_attr=asked, weight_attr="weight")
    assert (got.node_types, got.num_vertices, got.edge_types) == (want.node_types, want.num_vertices, want.edge_types)
    for name, a, b in zip(got.edge_types, got.relations, want.relations):
        for field in ("indptr", "indices", "edge_weight", "edge_time", "source_time"):
            x, y = getattr(a, field), getattr(b, field)
            assert (x is None and y is None) or torch.equal(x, y), (name, field)
        rows = part.edge_rows_by_type()[name]
        if "edge_attr" in rows:
            number = rows["edge_attr"][:, 1].long()  # the user's number, by position in the files
            assert torch.equal(number if a.edge_id is None else number[a.edge_id], b.edge_id), name
    for x, y in zip(got.node_time, want.node_time):
        assert (x is None and y is None) or torch.equal(x, y)
    assert (got.clock is None) == (asked is None)


# --- splits of edges --------------------------------------------------------------------------------------


def assert_edge_split(
    part: salientpp.PartitionedGraph, name: Any, split: str, number: Tensor, expected: Tensor
) -> None:
    """Checks a split. ``number`` holds the user's number of each edge by position; ``expected`` holds ascending numbers."""
    pieces = [part.edge_split(split, p, name) for p in range(part.num_parts)]
    for p, piece in enumerate(pieces):
        own = part.edge_split("all", p, name)
        assert piece.dtype == torch.int64 and bool((piece.diff() > 0).all())
        assert torch.isin(piece, own).all(), "an edge belongs to the part that owns its target"
    assert torch.equal(number[torch.cat(pieces)].sort().values, expected)
    assert part.description.edges(name).splits[split] == [len(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("num_parts", "time_attr"),
    [(1, None), (2, "edge_time"), (4, None), *rare((1, "edge_time"), (2, None), (4, "edge_time"))],
)
def test_splits_of_edges_can_be_given_as_ids_or_masks(tmp_path, num_parts, time_attr):
    data = hetero(4)
    writes = ("author", "writes", "paper")
    mask = torch.arange(300) % 3 == 0
    part = write(
        data,
        num_parts,
        tmp_path / "d",
        edge_split={CITES: {"train": torch.tensor([7, 5, 5, 299]), "none": []}, writes: {"val": mask}},
        time_attr=time_attr,
    )
    part = salientpp.load(tmp_path / "d", verify="full")
    assert_nothing_is_lost(data, part, mask_splits(data))
    number = {name: rows["edge_attr"][:, 1].long() for name, rows in part.edge_rows_by_type().items() if rows}
    assert_edge_split(part, CITES, "train", number[CITES], torch.tensor([5, 7, 299]))
    assert_edge_split(part, CITES, "none", number[CITES], torch.empty(0, dtype=torch.int64))
    assert_edge_split(part, writes, "val", number[writes], mask.nonzero().flatten())
    with pytest.raises(
        ValueError, match=r"has the splits 'val', 'all' of \('author', 'writes', 'paper'\), got 'train'"
    ):
        part.edge_split("train", 0, writes)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize(
    "options", [{"edge_split": {"train": torch.arange(0, 240, 2)}}, {"time_attr": "age"}, {"time_attr": "when"}]
)
def test_homogeneous_graphs_can_have_splits_of_edges_and_times(tmp_path, num_parts, options):
    data = random_data(60, 240, directed=True)
    data.edge_attr = torch.arange(240)
    data.age, data.when = torch.arange(60) % 9, torch.arange(240) % 11
    plain = write(data, num_parts, tmp_path / "plain")
    part = write(data, num_parts, tmp_path / "d", **options)
    part = salientpp.load(tmp_path / "d", verify="full")
    assert plain.manifest["version"] == 1 and part.manifest["version"] == 2
    assert not part.is_hetero and part.node_types == part.edge_types == [None]
    assert (part.num_features, part.num_classes, part.num_edges) == (3, 7, 240)
    assert torch.equal(part.book.offsets, plain.book.offsets)
    everything = torch.arange(60)
    assert torch.equal(part.original_id(everything), plain.original_id(everything))
    assert torch.equal(part.graph.indptr, plain.graph.indptr)
    number, before = part.edge_rows()["edge_attr"], plain.edge_rows()["edge_attr"]
    for p in range(num_parts):
        for name, rows in plain.node_rows(p).items():
            assert torch.equal(part.node_rows(p)[name], rows)
        for split in ("train", "val", "test", "all"):
            assert torch.equal(part.split(split, p), plain.split(split, p))
        assert torch.equal(part.vip(p), plain.vip(p))
    workload = part.workload(0, part.split("train", 0), FANOUTS, BATCH_SIZE)
    assert torch.equal(workload.vip, plain.vip(0)), "the stored probabilities are found"
    if "edge_split" in options:
        assert torch.equal(number, before)
        assert_edge_split(part, None, "train", number, torch.arange(0, 240, 2))
    else:
        source = part.original_id(part.graph.indices.long())
        time = data.age[source] if options["time_attr"] == "age" else data.when[number]
        for v in range(60):
            begin, end = int(part.graph.indptr[v]), int(part.graph.indptr[v + 1])
            mine = before[begin:end]
            of_mine = (data.age[data.edge_index[0]] if options["time_attr"] == "age" else data.when)[mine]
            assert torch.equal(number[begin:end], mine[of_mine.argsort(stable=True)]), (
                "edges with equal times keep their order"
            )
        assert part.typed_graph(options["time_attr"]).relations[0].edge_id is None
        assert time.numel() == 240


# --- the plan ---------------------------------------------------------------------------------------------


def limit_of(load: Tensor, num_parts: int, tolerance: float = 0.05) -> int:
    total = int(load.sum())
    return max(int((1 + tolerance) * total / num_parts), -(-total // num_parts), int(load.max()))


@pytest.mark.parametrize("edge_weights", ["vip", "equal"])
@pytest.mark.parametrize("num_parts", [2, 4])
def test_vertices_of_types_edges_of_relations_and_splits_are_balanced(tmp_path, num_parts, edge_weights):
    data = synthetic_mag(num_papers=4000, num_features=4, papers_per_institution=15)
    part = salientpp.partition(data, num_parts, tmp_path / "d", [5, 5], 32, edge_weights=edge_weights)
    loads = {f"vertices of {name}": part.books[name].offsets.diff() for name in part.node_types}
    single = {name: torch.ones(part.books[name].num_vertices, dtype=torch.int64) for name in part.node_types}
    heaviest = {f"vertices of {name}": single[name] for name in part.node_types}
    for name, relation in zip(part.edge_types, part.typed_graph().relations):
        degree = relation.indptr.diff()
        loads[f"edges of {' '.join(name)}"] = relation.indptr[part.books[name[2]].offsets].diff()
        heaviest[f"edges of {' '.join(name)}"] = degree
    for split, counts in part.description.vertices("paper").splits.items():
        loads[f"{split} of paper"] = torch.tensor(counts)
        heaviest[f"{split} of paper"] = torch.tensor([1] * sum(counts))
    balance = part.description.quality["balance"]
    assert set(balance) == set(loads)
    for name, load in loads.items():
        assert int(load.max()) <= limit_of(heaviest[name], num_parts), (name, load.tolist())
        assert balance[name] == pytest.approx(float(load.max()) * num_parts / int(load.sum()))


def test_method_random_balances_every_type_and_split(tmp_path):
    data = hetero(5, paper=61, author=34)
    part = write(data, 4, tmp_path / "d", method="random")
    for name in part.node_types:
        sizes = part.books[name].offsets.diff()
        assert int(sizes.max() - sizes.min()) <= 4, "each stratum of splits is off by at most one"
    counts = torch.tensor(part.description.vertices("paper").splits["train"])
    assert int(counts.max() - counts.min()) <= 2


def test_a_given_assignment_of_every_type_is_kept(tmp_path):
    data = hetero(6)
    draw = torch.Generator().manual_seed(1)
    given = {name: torch.randint(3, (data[name].num_nodes,), generator=draw) * 2 for name in data.node_types}
    part = write(data, 5, tmp_path / "d", method=given)
    assert_nothing_is_lost(data, part, mask_splits(data))
    for name, ids in original(part).items():
        assert torch.equal(part.books[name].owner(torch.arange(len(ids))), given[name][ids])


@pytest.mark.parametrize("seeds", [("paper", "train"), ("author", "val"), ("author", "all"), "all"])
def test_inside_a_part_the_ids_of_every_type_descend_by_typed_vip(tmp_path, seeds):
    data = hetero(7)
    part = write(data, 3, tmp_path / "d", seeds=seeds)
    named = part.description.seeds
    assert named == ((None, "all") if seeds == "all" else seeds)
    graph = part.typed_graph()
    for p in range(3):
        types = part.node_types if named[0] is None else [named[0]]
        start = uniform_starts({name: part.split(named[1], p, name) for name in types}, BATCH_SIZE)
        fanouts = [FANOUTS] * len(part.edge_types)
        without = typed_inclusion_probability(graph, start, fanouts)
        with_seeds = typed_inclusion_probability(graph, start, fanouts, include_seeds=True)
        for name in part.node_types:
            torch.testing.assert_close(part.vip(p, name), without[name], rtol=1e-5, atol=1e-7)
            begin, end = part.books[name].range_of(p)
            inside = with_seeds[name][begin:end]
            assert bool((inside.diff() <= 1e-5 * inside[:-1] + 1e-7).all()), (p, name)


def test_fanouts_may_differ_between_edge_types(tmp_path):
    data = hetero(8)
    fanouts = {name: [number % 3, 2] for number, name in enumerate(data.edge_types)}
    part = salientpp.partition(data, 2, tmp_path / "d", fanouts, BATCH_SIZE)
    assert part.manifest["workload"]["num_neighbors"] == list(fanouts.values())
    start = uniform_starts({"paper": part.split("train", 1, "paper")}, BATCH_SIZE)
    want = typed_inclusion_probability(part.typed_graph(), start, list(fanouts.values()))
    for name in part.node_types:
        torch.testing.assert_close(part.vip(1, name), want[name], rtol=1e-5, atol=1e-7)


def test_vip_weights_keep_together_vertices_that_draw_each_other(tmp_path):
    """Papers form two clusters. Twice as many edges lead to tags, which join the clusters. Batches draw citations only."""
    data = HeteroData()
    number = 200
    cluster = torch.arange(number) // (number // 2)
    draw = torch.Generator().manual_seed(0)
    data["paper"].x = torch.zeros(number, 8)
    data["tag"].num_nodes = number
    within = (
        torch.randint(number // 2, (2, 1500), generator=draw)
        + torch.tensor([0, number // 2])[torch.randint(2, (1500,), generator=draw)]
    )
    data["paper", "cites", "paper"].edge_index = within
    # Every tag belongs to papers of both clusters, and batches draw nothing through tags.
    data["paper", "has", "tag"].edge_index = torch.stack(
        [torch.randint(number, (3000,), generator=draw), torch.randint(number, (3000,), generator=draw)]
    )
    fanouts = {("paper", "cites", "paper"): [5, 5], ("paper", "has", "tag"): [0, 0]}
    part = salientpp.partition(data, 2, tmp_path / "d", fanouts, 8)
    mine = cluster[part.original_id(torch.arange(number), "paper")]
    owner = part.books["paper"].owner(torch.arange(number))
    same = float((mine == owner).double().mean())
    assert max(same, 1 - same) > 0.95


# --- replicated types -------------------------------------------------------------------------------------


def test_types_with_few_bytes_are_replicated_by_default(tmp_path, monkeypatch):
    data = hetero(9)
    assert write(data, 2, tmp_path / "few").replicated == set(), (
        "in this small graph, each type has more than 1 % of the bytes"
    )
    data["paper"].wide = torch.zeros(60, 2000)
    part = write(data, 2, tmp_path / "wide")
    assert part.replicated == {"author", "venue"}, "types without rows are not replicated"
    assert_nothing_is_lost(data, part, mask_splits(data))
    assert write(data, 2, tmp_path / "none", replicate=()).replicated == set()
    assert write(data, 2, tmp_path / "one", replicate=["author"]).replicated == {"author"}
    monkeypatch.setattr(contents_of, "_REPLICATED_BYTES", 100)
    assert write(data, 2, tmp_path / "large").replicated == {"venue"}, (
        "types above the limit of bytes are not replicated"
    )


def test_rows_of_a_replicated_type_are_stored_once(tmp_path):
    part = write(hetero(10), 3, tmp_path / "d", replicate={"venue", "author"})
    files = set(part.manifest["files"])
    assert {"n1.node_x.npy", "n2.node_x.npy"} <= files
    assert {name for name in files if "/n1." in name} == {
        f"part-0000{p}/n1.{what}.npy" for p in range(3) for what in ("split_val", "vip")
    }
    assert part.rows(0)["author"]["x"].shape == (35, 2)
    taken = [part.split("all", p, "author") for p in range(3)]
    assert torch.equal(torch.cat(taken), torch.arange(35)), "each vertex is still a seed of exactly one part"


# --- arguments --------------------------------------------------------------------------------------------


def broken(change) -> HeteroData:
    data = hetero(11)
    change(data)
    return data


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"split": {"train": torch.arange(3)}}, "the keys of split must be node types of the data .'paper', .*, got 'train'"),
        ({"split": {"paper": torch.arange(3)}}, "split of 'paper' must be a mapping of names to vertex ids or masks, got Tensor"),
        ({"split": {"paper": {"train": torch.tensor([60])}}}, r"split 'train' of 'paper' must hold ids in \[0, 60\), got 60"),
        ({"split": [1]}, "split of a HeteroData must map node types to splits by name, got list"),
        ({"edge_split": {"train": torch.arange(3)}}, "the keys of edge_split must be edge types of the data .*, got 'train'"),
        ({"edge_split": {CITES: {"train": torch.tensor([300])}}}, r"edge_split 'train' of \('paper', 'cites', 'paper'\) must hold ids in \[0, 300\), got 300"),
        ({"edge_split": {CITES: {"all": []}}}, r"a split's name must be an identifier other than 'all', got 'all' of \('paper'"),
        ({"split": {"paper": {"vertices": [1]}}}, "a split may not be called 'vertices': vertices are always balanced; rename the split"),
        ({"seeds": "val"}, r"seeds='val' is a split of 'paper', 'author'; name the type: seeds=\('paper', 'val'\)"),
        ({"seeds": ("paper", "vla")}, "seeds must be a split of 'paper' .'train', 'val', 'all'., got 'vla'"),
        ({"seeds": ("papre", "val")}, "seeds must name a node type of the data .*, got 'papre'"),
        ({"seeds": "vla"}, r"seeds must be 'all' or a split of the data \('train', 'val'\), got 'vla'"),
        ({"seeds": 3}, r"seeds must be a split or \(node type, split\), got 3"),
        ({"replicate": {"venues"}}, "replicate must name node types of the data .*, got 'venues'"),
        ({"time_attr": "tiem"}, "'tiem' is neither a node-level or edge-level attribute"),
        ({"num_neighbors": {CITES: [3]}}, "num_neighbors must have a list for every edge type, got none for"),
        ({"num_neighbors": {("a", "b", "c"): [3]}}, r"the keys of num_neighbors must be edge types of the data .*, got \('a', 'b', 'c'\)"),
        ({"num_neighbors": [-2]}, r"num_neighbors\[0\] must be an integer >= 0, or -1"),
        ({"method": torch.zeros(60)}, "method must be 'auto', 'metis', 'kaminpar', 'random' or a mapping from node types to tensors of part ids, got Tensor"),
        ({"method": {"paper": torch.zeros(60).long()}}, "method must have a tensor of part ids for every node type, got none for 'author'"),
        ({"method": {"venues": torch.zeros(60).long()}}, "the keys of method must be node types of the data .*, got 'venues'"),
        ({"method": "kahip"}, "method must be .*, got 'kahip'"),
        ({"num_parts": 0}, "num_parts must be an integer >= 1, got 0"),
        ({"data": broken(lambda d: d["paper"].__setattr__("n_id", torch.arange(60)))}, r"data\['paper'\].n_id cannot be stored: batches have"),
        ({"data": broken(lambda d: d["topic"].__setattr__("x", torch.zeros(9, 2)))},
            r"data\['topic'\].x must be a tensor with one row per vertex, expected 11"),
        ({"data": broken(lambda d: d[CITES].__setattr__("edge_attr", torch.zeros(3)))},
            r"data\[\('paper', 'cites', 'paper'\)\].edge_attr must be a tensor with one row per edge, expected 300 rows, got \[3\]"),
        ({"data": broken(lambda d: d["paper"].__setattr__("words", ["a"] * 60))}, r"data\['paper'\].words must be a tensor to be stored, got list"),
        ({"data": broken(lambda d: d["paper"].__setattr__("train_mask", torch.ones(60)))}, r"data\['paper'\].train_mask must be bool, got torch.float32"),
        ({"data": broken(lambda d: d[CITES].edge_index.fill_(60))}, r"edge_index\[0, 0\] of \('paper', 'cites', 'paper'\) must be in \[0, 60\), got 60"),
        ({"data": broken(lambda d: d[CITES].edge_time.fill_(0)), "time_attr": "x"}, "x"),
        ({"data": HeteroData()}, "data has no node types; a HeteroData to be partitioned needs at least one"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_without_leaving_files(tmp_path, options, text):
    arguments = {"data": hetero(11), "num_parts": 2, "num_neighbors": FANOUTS, "batch_size": BATCH_SIZE, **options}
    with pytest.raises((ValueError, TypeError), match=text):
        salientpp.partition(root=tmp_path / "d", **arguments)
    assert names_in(tmp_path) == []


def test_attributes_of_homogeneous_graphs_are_refused_with_several_types(tmp_path):
    part = write(hetero(12), 2, tmp_path / "d", method="random")
    part = salientpp.load(tmp_path / "d", part_id=0)
    for ask, instead in (
        (lambda: part.book, "books"),
        (lambda: part.graph, "typed_graph"),
        (part.node_rows, r"rows\(\)"),
        (part.edge_rows, r"edge_rows_by_type\(\)"),
        (lambda: part.workload(0, torch.arange(3), [2], 8), "typed_graph"),
    ):
        with pytest.raises(
            ValueError,
            match=f"d has several vertex types .*this attribute exists only for graphs with one type; use .*{instead}",
        ):
            ask()
    for ask in (lambda: part.split("train"), part.vip, lambda: part.original_id(torch.arange(3))):
        with pytest.raises(ValueError, match=r"type_ must be a node type of .*/d \('paper', .*\), got None"):
            ask()
    with pytest.raises(ValueError, match=r"type_ must be an edge type of .*, got \('a', 'b', 'c'\)"):
        part.edge_split("all", 0, ("a", "b", "c"))
    with pytest.raises(ValueError, match="d has the splits 'train', 'val', 'all' of 'paper', got 'trian'"):
        part.split("trian", 0, "paper")
    with pytest.raises(ValueError, match="'x2' is neither a node-level or edge-level attribute"):
        part.typed_graph("x2")
    with pytest.raises(ValueError, match="no edges have an attribute 'heavy'"):
        part.typed_graph(None, "heavy")
    ids = part.original_id({"paper": torch.tensor([3, 1]), "venue": torch.tensor([0])})
    assert set(ids) == {"paper", "venue"} and ids["paper"].shape == (2,)
    assert repr(part).startswith(f"PartitionedGraph('{tmp_path}/d', num_parts=2, part_id=0, num_vertices=")


@pytest.mark.parametrize(
    ("value", "text"), [(float("nan"), "must be finite and >= 0, got nan"), (-1.0, "must be finite and >= 0, got -1.0")]
)
def test_invalid_weights_and_times_are_refused_when_they_are_requested(tmp_path, value, text):
    data = hetero(13)
    data[CITES].weight[5] = value
    data[CITES].edge_time = data[CITES].edge_time.double()
    data[CITES].edge_time[5] = float("nan")
    part = write(data, 2, tmp_path / "d")
    part.typed_graph()
    with pytest.raises(ValueError, match=rf"d: the weight of \('paper', 'cites', 'paper'\) {text}"):
        part.typed_graph(None, "weight")
    with pytest.raises(ValueError, match="edge_time.*must hold numbers, got NaN"):
        part.typed_graph("edge_time")
    with pytest.raises(ValueError, match="edge_time.*must hold numbers, got NaN"):
        write(data, 2, tmp_path / "timed", time_attr="edge_time")


@pytest.mark.parametrize("name", ["a/b", "..", "n0.", "x\ny", "", "α β", "all", "part-00000", "null"])
def test_types_can_have_any_name(tmp_path, name):
    data = HeteroData()
    data[name].x = torch.arange(12.0).view(6, 2)
    data["other"].x = torch.arange(8.0).view(4, 2)
    data[name, "to", "other"].edge_index = torch.tensor([[0, 5, 2], [3, 3, 0]])
    data["other", name, name].edge_index = torch.tensor([[0, 3], [3, 5]])
    part = write(data, 2, tmp_path / "d", method="random")
    part = salientpp.load(tmp_path / "d", part_id=0, verify="full")
    assert part.node_types == [name, "other"] and part.edge_types == [(name, "to", "other"), ("other", name, name)]
    assert torch.equal(torch.cat([part.rows(p)[name]["x"] for p in range(2)]), data[name].x[original(part)[name]])
    assert names_in(tmp_path) == ["d"]
    for path in (tmp_path / "d").iterdir():
        assert path.name == "manifest.json" or path.name.startswith(("n0.", "n1.", "e0.", "e1.", "part-0000"))


def test_the_same_input_gives_byte_identical_files(tmp_path):
    data = hetero(14)
    for options in ({}, {"time_attr": "time", "edge_split": {CITES: {"train": torch.arange(9)}}}):
        a = write(data, 3, tmp_path / "a", overwrite=True, **options)
        b = write(data.clone(), 3, tmp_path / "b", overwrite=True, **options)
        assert contents(tmp_path / "a") == contents(tmp_path / "b") and a.fingerprint == b.fingerprint


# --- opening and copying ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pristine") / "d"
    edge_split = {CITES: {"train": torch.arange(0, 300, 2)}}
    write(hetero(15), 2, root, replicate={"venue"}, time_attr="time", edge_split=edge_split)
    return root


@pytest.fixture
def root(pristine, tmp_path) -> Path:
    shutil.copytree(pristine, tmp_path / "d")
    return tmp_path / "d"


def test_a_copy_for_one_host_has_the_files_that_its_ranks_read(root, tmp_path):
    whole = salientpp.load(root)
    copy = copy_to_disk(root, tmp_path / "to", parts=[1])
    part = salientpp.load(copy, part_id=1, verify="full")
    assert part.fingerprint == whole.fingerprint
    assert not (copy / "part-00000").exists()
    for name, rows in whole.rows(1).items():
        for column, values in rows.items():
            assert torch.equal(part.rows()[name][column], values), "replicated rows are copied too"
    for time_attr in (None, "time", "edge_time"):
        for a, b in zip(part.typed_graph(time_attr).relations, whole.typed_graph(time_attr).relations):
            assert torch.equal(a.indices, b.indices)
    with pytest.raises(DatasetError, match="is a copy without part 0; its parts are 1"):
        part.rows(0)
    assert torch.equal(part.edge_split("train", 1, CITES), whole.edge_split("train", 1, CITES))


def test_a_copy_lacks_times_of_vertices_that_were_not_stored_whole(tmp_path):
    data = hetero(16)
    write(data, 2, tmp_path / "d")
    part = salientpp.load(copy_to_disk(tmp_path / "d", tmp_path / "to", parts=[1]), part_id=1)
    text = (
        "to/d is a copy without part 0; every rank needs the times 'time' of the part's vertices of 'paper' for sampling; partition with "
        "time_attr='time', which stores them whole, or open the original directory"
    )
    with pytest.raises(DatasetError, match=text):
        part.typed_graph("time")
    part.typed_graph("edge_time")
    copy_to_disk(tmp_path / "d", tmp_path / "to", parts=[0])
    assert salientpp.load(tmp_path / "to" / "d", part_id=1).typed_graph("time").node_time[0] is not None


def test_directories_whose_types_have_other_names_are_different(root, tmp_path):
    copy_to_disk(root, tmp_path / "to", parts=[0])
    edit_manifest(
        root,
        lambda m: (
            m["node_types"][4].update(name="somebody")
            or [e.update(name=[{"nobody": "somebody"}.get(n, n) for n in e["name"]]) for e in m["edge_types"]]
        ),
        checksum=True,
    )
    assert salientpp.load(root).node_types[4] == "somebody"
    with pytest.raises(DatasetError, match="is a copy of other contents"):
        copy_to_disk(root, tmp_path / "to", parts=[1])


def test_every_file_of_every_type_is_checked_when_opened(root):
    for name in salientpp.load(root).manifest["files"]:
        path = root / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(DatasetError, match=f"{name} was altered"):
            salientpp.load(root)
        path.unlink()
        with pytest.raises(DatasetError, match=f"{name} cannot be read"):
            salientpp.load(root)
        path.write_bytes(whole)
    salientpp.load(root, verify="full")


LIES = {
    "an id is too large for the source type": ("e0.indices.npy", lambda a: a.__setitem__(0, 60),
        r"holds no graph of \('paper', 'by', 'author'\): indices\[0\] must be in \[0, 60\), got 60"),
    "indptr falls": ("e1.indptr.npy", lambda a: a.__setitem__(3, 10**9), r"holds no graph of \('author', 'writes', 'paper'\): indptr must not decrease"),
    "two have one id": ("n1.original_id.npy", lambda a: a.fill(3), "n1.original_id.npy must hold each of 0 to 34 once"),
    "seeds of no part": ("part-00001/n0.split_train.npy", lambda a: a.__setitem__(-1, 2**62), r"n0.split_train.npy must hold ascending ids in \["),
    "seeds far below": ("part-00001/n0.split_train.npy", lambda a: a.__setitem__(slice(-2, None), [2**63 - 1, -(2**63)]),
        r"n0.split_train.npy must hold ascending ids in \["),
    "edges of another part": ("part-00001/e2.split_train.npy", lambda a: a.__setitem__(0, 0), r"e2.split_train.npy must hold ascending ids in \["),
    "no probability": ("part-00000/n2.vip.npy", lambda a: a.__setitem__(0, np.nan), "n2.vip.npy must hold probabilities"),
    "times of another order": ("n0.time_time.npy", lambda a: a.__setitem__(slice(None), a[::-1].copy()),
        "n0.time_time.npy must hold what part-0000./n0.node_time.npy holds"),
    "lists of another order": ("e2.indices.npy", lambda a: a.__setitem__(slice(None), a[::-1].copy()),
        "the times of .'paper', 'cites', 'paper'. must ascend inside a neighbour list"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_full_verification_finds_inconsistent_arrays_of_several_types(root, lie):
    name, change, text = LIES[lie]
    array = np.load(root / name)
    change(array)
    np.save(root / name, array)
    forge_checksums(root, name)
    salientpp.load(root)
    with pytest.raises(DatasetError, match=f"{text}.*; copy .* again, or partition again"):
        salientpp.load(root, verify="full")


def test_pickles_and_copies_open_the_same_directory(root):
    part = salientpp.load(root, part_id=1)
    part.typed_graph()
    for other in (pickle.loads(pickle.dumps(part)), copy.deepcopy(part)):
        assert other.fingerprint == part.fingerprint and other.part_id == 1
        assert torch.equal(other.rows()["paper"]["x"], part.rows()["paper"]["x"])


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv((3, 3), 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index).relu()


def small_typed(tmp_path):
    data = HeteroData(a={"x": torch.randn(12, 3)}, b={"x": torch.randn(9, 3)})
    ends = torch.stack([torch.arange(12), torch.arange(12) % 9])
    data["a", "to", "b"].edge_index, data["b", "of", "a"].edge_index = ends, ends.flip(0)
    data["a", "to", "b"].edge_attr = torch.rand(12, 2)
    return data, salientpp.partition(data, 2, tmp_path / "d", [2], 4, split={"a": {"train": torch.arange(12)}})


def test_pyg_makes_a_typed_model_from_the_types_of_a_partitioned_graph(tmp_path):
    data, part = small_typed(tmp_path)
    for types in (part.metadata(), (part.node_types, part.edge_types)):
        assert types == data.metadata()
        assert to_hetero(Layer(), types)(data.x_dict, data.edge_index_dict)["b"].shape == (9, 4)
    plain = write(random_data(60, 240), 2, tmp_path / "plain")
    with pytest.raises(ValueError, match="has one type of vertices, without a name; metadata"):
        plain.metadata()


def test_a_typed_model_of_a_partitioned_graph_trains(tmp_path):
    _, part = small_typed(tmp_path)
    torch.manual_seed(0)
    model = to_hetero(Layer(), part.metadata())
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.02), []
    loader = salientpp.NeighborLoader(salientpp.load(part.root), [2], ("a", "train"), batch_size=12)
    for _ in range(30):
        (batch,) = loader
        loss = (model(batch.x_dict, batch.edge_index_dict)["a"][:12] - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_a_typed_graph_has_the_names_of_a_heterodata_that_need_no_rows(tmp_path):
    data, part = small_typed(tmp_path)
    names = ["num_nodes", "num_edges", "num_features", "num_node_features", "num_edge_features"]
    assert [getattr(part, name) for name in names] == [getattr(data, name) for name in names]
    assert (part.num_node_types, part.num_edge_types) == (2, 2)
    for type_ in data.node_types:
        assert (part[type_].num_nodes, part[type_].num_features) == (data[type_].num_nodes, data[type_].num_features)
    edges = part["a", "b"]
    assert (edges.num_edges, edges.num_features, edges.keys()) == (12, 2, ["edge_index", "edge_attr"])
    assert repr(copy.deepcopy(edges)) == "StoredType(('a', 'to', 'b'), num_edges=12, edge_attr=[12, 2])"
    for ask, text in {
        lambda: part["a"].x: r"'a' of .* has no 'x': its rows are divided into parts",
        lambda: part["a"].train_mask: r"use part.split\('train', part_id, type_='a'\), or input_nodes=\('a', 'train'\)",
        lambda: part["a"].num_edges: "'a' of .* has no num_edges, but num_nodes",
        lambda: edges.edge_index: r"part.typed_graph\(\) has the edges",
        lambda: part.x_dict: r"part.take\('x', n_id, 'a'\)",
        lambda: part.edge_attr: r"part.edge_rows_by_type\(\)\[\('a', 'to', 'b'\)\]\['edge_attr'\]",
        lambda: part.num_nodes_dict: r"part\[type\].num_nodes",
    }.items():
        with pytest.raises(AttributeError, match=text):
            ask()
    with pytest.raises(KeyError, match="has no type 'c'; its types are 'a', 'b'"):
        part["c"]


def test_repr_lists_the_types(tmp_path):
    _, part = small_typed(tmp_path)
    size = sum(entry["bytes"] for entry in part.manifest["files"].values())
    assert repr(part) == (
        f"PartitionedGraph('{tmp_path}/d', num_parts=2, part_id=None, num_vertices=21, num_edges=24,\n"
        "  a: 12, x=[12, 3], splits train 12,\n  b: 9, x=[9, 3],\n  a to b: 12, edge_attr=[12, 2],\n  b of a: 12,\n"
        f"  {size / 1000:.3g} kB on disk)"
    )
