"""Batches that one process draws from the whole graph, to compare with those of ranks."""

from __future__ import annotations

from typing import Any

import torch
from graphs import random_data
from torch_geometric.data import Data, HeteroData

import salientpp
from salientpp import NeighborSampler
from salientpp.testing.graphs import TYPED_FANOUTS, typed_data

__all__ = [
    "BATCH",
    "FANOUTS",
    "TYPED_FANOUTS",
    "by_type",
    "check_batches",
    "check_links",
    "homogeneous",
    "store_of",
    "typed_data",
    "whole",
]

FANOUTS, BATCH = [4, 3, 2], 8


def whole(part: salientpp.PartitionedGraph) -> Data | HeteroData:
    """All content of the directory in one graph, with the directory's ids."""
    data: Any = HeteroData() if part.is_hetero else Data()
    rows = [part.rows(part_id) for part_id in range(part.num_parts)]
    for type_ in part.node_types:
        store = data if type_ is None else data[type_]
        store.num_nodes = part.books[type_].num_vertices
        replicated = part.row_books[type_].num_parts < part.num_parts
        for name in rows[0][type_]:
            pieces = [of_part[type_][name] for of_part in rows]
            store[name] = pieces[0] if replicated else _joined(pieces)
    graph = part.typed_graph()
    for type_, relation in zip(part.edge_types, graph.relations):
        store = data if type_ is None else data[type_]
        target = torch.repeat_interleave(torch.arange(relation.indptr.numel() - 1), relation.indptr.diff())
        store.edge_index = torch.stack([relation.indices.long(), target])
        for name, values in part.edge_rows_by_type()[type_].items():
            store[name] = values
    return data


def _joined(pieces: list[Any]) -> Any:
    if isinstance(pieces[0], torch.Tensor):
        return torch.cat(pieces)
    from torch_frame import cat

    return cat(pieces, dim=0)


def by_type(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {None: value}


def store_of(batch: Any, type_: Any) -> Any:
    return batch if type_ is None else batch[type_]


def check_batches(loader: Any, one: NeighborSampler, data: Any, draw: str, **given: Any) -> int:
    """Compares an epoch with what ``one`` draws from ``data`` for the same keys; returns the number of remote rows."""
    epoch, number, remote = loader.state_dict()["epoch"], 0, 0
    expected_positions = loader.engine.basis.epochs.positions(epoch)
    begin_end = {
        type_: book.range_of(loader.engine.basis.source.exchange.part_id) for type_, book in loader.data.books.items()
    }
    for index, batch in enumerate(loader):
        inputs = loader.engine.basis.source.seeds.inputs[expected_positions[index]]
        keys = loader.engine.basis.epochs.keys(epoch, index)
        mfg = getattr(one, draw)(inputs, key=keys.batch, draw_key=keys.draws, **given)
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
            if "y" in store:
                assert torch.equal(store.y, store_of(data, type_).y[n_id[: store.batch_size]])
            if loader.data.row_books[type_].num_parts > 1 and x is not None:
                begin, end = begin_end[type_]
                distinct = n_id.unique()
                remote += int(((distinct < begin) | (distinct >= end)).sum())
        for type_, row in by_type(mfg.row).items():
            store, edge = store_of(batch, type_), by_type(mfg.edge)[type_]
            assert torch.equal(store.edge_index, torch.stack([row, by_type(mfg.col)[type_]]))
            for name, values in {"e_id": None, **loader.data.edge_rows_by_type()[type_]}.items():
                if edge is None:  # bidirectional subgraphs: a relation without a reverse
                    assert name not in store
                else:
                    assert torch.equal(store[name], edge if values is None else values[edge])
        if draw == "sample_from_edges":
            check_links(batch, mfg, inputs)
        number += 1
    assert number == len(loader) and (
        number or not sum(s.num_batches for s in loader.engine.basis.epochs.order.schedules)
    )
    return remote


def check_links(batch: Any, mfg: Any, inputs: Any) -> None:
    edges = store_of(batch, inputs.input_type)
    assert torch.equal(edges.input_id, mfg.metadata[0])
    if "edge_label_index" in edges:
        assert torch.equal(edges.edge_label_index, mfg.metadata[1])
        for name, value in (("edge_label", mfg.metadata[2]), ("edge_label_time", mfg.metadata[3])):
            assert (value is None) == (name not in edges) and (value is None or torch.equal(edges[name], value))


def homogeneous() -> Data:
    data = random_data(300, 1800, edge_attributes=True)
    generator = torch.Generator().manual_seed(1)
    data.time = torch.randint(20, (data.num_nodes,), generator=generator)
    data.edge_time = torch.randint(20, (data.num_edges,), generator=generator)
    data.weight = torch.rand(data.num_edges, generator=generator) ** 3
    data.weight[::7] = 0
    return data
