"""Partitioning changes where rows are, and nothing else: on 1, 2 and 4 ranks, batches with times, weights, trees, types or links as seeds are those
that one process draws for the same key from the same graph, bit for bit."""

from __future__ import annotations

from typing import Any

import distributed
import pytest
import torch
from graphs import random_data
from torch_geometric.data import Data, HeteroData

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader, NeighborSampler
from salientpp.analysis.typed_volume import analyze_typed

FANOUTS, BATCH = [4, 3, 2], 8


def whole(part: salientpp.PartitionedGraph) -> Data | HeteroData:
    """Everything that the directory holds, under its ids, as one process would have it."""
    data: Any = HeteroData() if part.is_hetero else Data()
    rows = [part.rows(part_id) for part_id in range(part.num_parts)]
    for type_ in part.node_types:
        store = data if type_ is None else data[type_]
        store.num_nodes = part.books[type_].num_vertices
        replicated = part.row_books[type_].num_parts < part.num_parts
        for name in rows[0][type_]:
            pieces = [of_part[type_][name] for of_part in rows]
            store[name] = pieces[0] if replicated else torch.cat(pieces)
    graph = part.typed_graph()
    for type_, relation in zip(part.edge_types, graph.relations):
        store = data if type_ is None else data[type_]
        target = torch.repeat_interleave(torch.arange(relation.indptr.numel() - 1), relation.indptr.diff())
        store.edge_index = torch.stack([relation.indices.long(), target])
        for name, values in part.edge_rows_by_type()[type_].items():
            store[name] = values
    return data


def by_type(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {None: value}


def store_of(batch: Any, type_: Any) -> Any:
    return batch if type_ is None else batch[type_]


def check_batches(loader: Any, one: NeighborSampler, data: Any, draw: str, **given: Any) -> int:
    """Compare an epoch with what ``one`` draws from ``data`` for the same keys; gives the number of remote rows."""
    epoch, number, remote = loader._epoch_number, 0, 0
    expected_positions = loader._positions(epoch)
    begin_end = {type_: book.range_of(loader._source.exchange.part_id) for type_, book in loader.data.books.items()}
    for index, batch in enumerate(loader):
        inputs = loader._source.seeds.inputs[expected_positions[index]]
        mfg = getattr(one, draw)(inputs, key=loader._key(epoch, index), **given)
        for type_, n_id in by_type(mfg.node).items():
            store = store_of(batch, type_)
            assert torch.equal(store.n_id, n_id)
            if mfg.batch is not None:
                assert torch.equal(store.batch, by_type(mfg.batch)[type_])
            if mfg.num_sampled_nodes is not None:
                assert store.num_sampled_nodes == by_type(mfg.num_sampled_nodes)[type_]
            x = store_of(data, type_).get("x")
            if x is not None:
                assert torch.equal(store.x, x[n_id]) and store.x.dtype == x.dtype
            if loader.data.row_books[type_].num_parts > 1 and x is not None:
                begin, end = begin_end[type_]
                distinct = n_id.unique()
                remote += int(((distinct < begin) | (distinct >= end)).sum())
        for type_, row in by_type(mfg.row).items():
            store, edge = store_of(batch, type_), by_type(mfg.edge)[type_]
            assert torch.equal(store.edge_index, torch.stack([row, by_type(mfg.col)[type_]]))
            assert torch.equal(store.e_id, edge)
            for name, values in loader.data.edge_rows_by_type()[type_].items():
                assert torch.equal(store[name], values[edge])
        if draw == "sample_from_edges":
            check_links(batch, mfg, inputs)
        number += 1
    assert number == len(loader) > 0
    return remote


def check_links(batch: Any, mfg: Any, inputs: Any) -> None:
    edges = store_of(batch, inputs.input_type)
    assert torch.equal(edges.input_id, mfg.metadata[0])
    if "edge_label_index" in edges:
        assert torch.equal(edges.edge_label_index, mfg.metadata[1])
        for name, value in (("edge_label", mfg.metadata[2]), ("edge_label_time", mfg.metadata[3])):
            assert (value is None) == (name not in edges) and (value is None or torch.equal(edges[name], value))


# --- one type of vertices ----------------------------------------------------------------------------------


def homogeneous() -> Data:
    data = random_data(300, 1800, edge_attributes=True)
    generator = torch.Generator().manual_seed(1)
    data.time = torch.randint(20, (data.num_nodes,), generator=generator)
    data.edge_time = torch.randint(20, (data.num_edges,), generator=generator)
    data.weight = torch.rand(data.num_edges, generator=generator) ** 3
    data.weight[::7] = 0
    return data


NODE_OPTIONS = [
    {"time_attr": "time"},
    {"time_attr": "time", "temporal_strategy": "last"},
    {"time_attr": "edge_time", "of_edges": True},
    {"weight_attr": "weight"},
    {"weight_attr": "weight", "replace": True},
    {"weight_attr": "weight", "time_attr": "time"},
    {"disjoint": True},
    {"subgraph_type": "bidirectional"},
    {"subgraph_type": "induced"},
    {"replace": True},
]


def check_one_type(rank: int, root: str, alphas: list[float]) -> None:
    part = salientpp.load(root)
    data = whole(part)
    for options in NODE_OPTIONS:
        options = dict(options)
        given: dict[str, Any] = {}
        if options.pop("of_edges", False):
            given["input_time"] = torch.arange(part.split("train").numel()) % 20
        one = NeighborSampler(data, FANOUTS, **options)
        for alpha in alphas:
            loader = NeighborLoader(
                part, FANOUTS, "train", batch_size=BATCH, shuffle=True, seed=3, replication_factor=alpha, num_workers=1,
                **options, **given,
            )  # fmt: skip
            remote = check_batches(loader, one, data, "sample_from_nodes")
            stats = loader.stats()
            assert stats.rows_remote + stats.rows_cache >= remote if options.get("disjoint") else True
            if alpha == 0:
                assert stats.rows_remote == remote, options
            else:
                assert stats.rows_remote <= remote


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_times_weights_trees_and_subgraphs_are_those_of_one_process(tmp_path, num_parts):
    root = tmp_path / "parts"
    salientpp.partition(homogeneous(), num_parts, root, FANOUTS, BATCH)
    distributed.run(check_one_type, num_parts, str(root), [0.0, 0.3])


LINK_OPTIONS = [
    {},
    {"neg_sampling": "binary"},
    {"neg_sampling": "triplet", "disjoint": True},
    {"time_attr": "time", "edge_label_time": "edge_time", "neg_sampling": "binary"},
    {"weight_attr": "weight", "edge_label": "edge_label_of", "neg_sampling": "binary"},
]


def check_links_of_one_type(rank: int, root: str) -> None:
    part = salientpp.load(root)
    data = whole(part)
    for options in LINK_OPTIONS:
        sampling = {name: options[name] for name in ("time_attr", "weight_attr", "disjoint") if name in options}
        one = NeighborSampler(data, FANOUTS, **sampling)
        for alpha in (0.0, 0.3):
            loader = LinkNeighborLoader(
                part, FANOUTS, batch_size=BATCH, shuffle=True, seed=3, replication_factor=alpha, **options
            )
            assert loader._source.seeds.number == int(
                (
                    (data.edge_index[1] >= part.book.range_of(rank)[0])
                    & (data.edge_index[1] < part.book.range_of(rank)[1])
                ).sum()
            )
            remote = check_batches(loader, one, data, "sample_from_edges", neg_sampling=loader.neg_sampling)
            assert loader.stats().rows_remote == remote if alpha == 0 else loader.stats().rows_remote <= remote


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_links_are_those_of_one_process(tmp_path, num_parts):
    data = random_data(120, 400)
    generator = torch.Generator().manual_seed(1)
    data.time = torch.randint(20, (data.num_nodes,), generator=generator)
    data.edge_time = torch.randint(20, (data.num_edges,), generator=generator)
    data.weight = torch.rand(data.num_edges, generator=generator) + 0.1
    data.edge_label_of = torch.randint(3, (data.num_edges,), generator=generator)
    root = tmp_path / "parts"
    salientpp.partition(data, num_parts, root, FANOUTS, BATCH)
    distributed.run(check_links_of_one_type, num_parts, str(root))


# --- what is counted is what travels -----------------------------------------------------------------------


def live_rows(rank: int, root: str, links: bool, epochs: int, alpha: float, given: dict[str, Any]) -> dict[Any, int]:
    kind = LinkNeighborLoader if links else NeighborLoader
    loader = kind(
        salientpp.load(root), FANOUTS, batch_size=BATCH, shuffle=True, seed=5, replication_factor=alpha, **given
    )
    loader.reset_stats()
    for _ in range(epochs):
        for _ in loader:
            pass
    return {type_: of_type["remote"] for type_, of_type in loader.stats().by_type.items()}


@pytest.mark.parametrize(
    "links, seeds, sampling",
    [
        (False, "train", {"disjoint": True}),
        (False, "train", {"weight_attr": "weight"}),
        (False, "train", {"time_attr": "time", "temporal_strategy": "last"}),
        (True, "all", {"neg_sampling": "triplet"}),
        (True, "all", {"time_attr": "time", "edge_label_time": "edge_time", "neg_sampling": "binary"}),
    ],
)
def test_the_analysis_counts_the_rows_that_a_run_fetches(tmp_path, links, seeds, sampling):
    root = tmp_path / "parts"
    salientpp.partition(homogeneous(), 2, root, FANOUTS, BATCH)
    analysis = analyze_typed(
        salientpp.load(root), FANOUTS, batch_size=BATCH, replication_factors=[0, 0.25], policies=["vip"], epochs=2, seeds=seeds,
        link=links, seed=5, **sampling,
    )  # fmt: skip
    given = {"edge_label_index" if links else "input_nodes": seeds, **sampling}
    for volume in analysis.results:
        live = distributed.run(live_rows, 2, str(root), links, 2, volume.replication_factor, given)
        assert sum(of_rank[None] for of_rank in live) == 2 * volume.rows_per_epoch[""] > 0
