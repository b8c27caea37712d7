"""Laws of dataset directories of several types: every row, edge, split and id of every type is where it must be, for any number of parts.

Vertices know their type and who they are, edges their relation and theirs, so whatever lies on disk says whose it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import RELATIONS, random_hetero
from test_dataset_dir import FANOUTS
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import salientpp
from salientpp.graph.typed import TypedGraph

BATCH_SIZE = 8
CITES = ("paper", "cites", "paper")


def hetero(seed: int = 0, **sizes: int) -> HeteroData:
    """Splits of papers and authors, labels of papers some of which are missing, a type without rows, one without vertices, a relation without edges."""
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
    """Per type the user's id of every vertex."""
    return {name: part.original_id(torch.arange(book.num_vertices), name) for name, book in part.books.items()}


def kept(data: HeteroData, name: str, split: str) -> Tensor:
    """The ids of a mask, without vertices whose label is unknown."""
    mask = data[name][f"{split}_mask"]
    return (mask & (data[name].y >= 0) if "y" in data[name] else mask).nonzero().flatten()


def assert_nothing_is_lost(
    data: HeteroData, part: salientpp.PartitionedGraph, splits: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """``splits``: type -> name -> ascending original ids."""
    K, ids = part.num_parts, original(part)
    assert part.is_hetero and part.node_types == tuple(data.node_types) and part.edge_types == tuple(data.edge_types)
    for name in data.node_types:
        size, book = data[name].num_nodes, part.books[name]
        assert torch.equal(ids[name].sort().values, torch.arange(size)), "every vertex is there once"
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
        assert relation.edge_id is None, "positions are the ids of edges"
        rows = part.edge_rows_by_type()[name]
        if "edge_attr" in data[name]:
            number = rows["edge_attr"][:, 1].long()
            assert torch.equal(number.sort().values, torch.arange(edge_index.size(1))), "every edge is there once"
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


@pytest.mark.parametrize("method", ["metis-vip", "metis", "random"])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_row_edge_split_and_id_of_every_type_comes_back(tmp_path, seed, num_parts, method):
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
def test_with_times_lists_ascend_on_disk_and_nothing_else_changes(tmp_path, num_parts, time_attr):
    data = hetero(2)
    part = write(data, num_parts, tmp_path / "d", time_attr=time_attr)
    assert_nothing_is_lost(data, part, mask_splits(data))
    plain = write(data, num_parts, tmp_path / "plain")
    graph, other = part.typed_graph(time_attr), plain.typed_graph(time_attr)
    for name, relation, sorted_in_memory in zip(graph.edge_types, graph.relations, other.relations):
        assert relation.edge_id is None, "maps are shared"
        assert relation.indices.data_ptr() == part.lists[name][1].data_ptr()
        timed = name in RELATIONS if time_attr == "edge_time" else name[0] not in ("topic", "nobody")
        assert (relation.edge_time is not None) == (timed and time_attr == "edge_time")
        assert (relation.source_time is not None) == (timed and time_attr == "time")
        # The same lists: other edges' ids are positions in other files.
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
def test_the_typed_graph_is_what_one_machine_reads_under_the_same_ids(tmp_path, stored, asked):
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
            number = rows["edge_attr"][:, 1].long()  # the user's, by position in the files
            assert torch.equal(number if a.edge_id is None else number[a.edge_id], b.edge_id), name
    for x, y in zip(got.node_time, want.node_time):
        assert (x is None and y is None) or torch.equal(x, y)
    assert (got.clock is None) == (asked is None)
