"""Opens the graph of an analysis: its topology, its seeds, and what its rows take as they travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch_geometric.data import Data

from salientpp.analysis.batches import Batches
from salientpp.analysis.in_memory import Unparted
from salientpp.graph.csc import Graph
from salientpp.store.directory.contents import collect_splits
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.narrow import read_formats


def open_graph(
    data: Data | PartitionedGraph, parts: int | None, batches: Batches, send_as: Mapping[Any, str] | None = None
) -> tuple[PartitionedGraph | Unparted, dict[str | None, int]]:
    """What an analysis needs of a graph, and by vertex type the bytes of a row of ``x`` as it travels.

    Raises:
        ValueError: ``parts``, ``batches`` or ``send_as`` do not fit it.
    """
    if isinstance(data, PartitionedGraph):
        if parts not in (None, data.num_parts):
            raise ValueError(
                f"{data.root} has {data.num_parts} parts, got parts={parts}; leave it out, or partition again"
            )
        return data, sent_row_bytes(data, send_as)
    if parts is None:
        raise ValueError("parts must be given for a graph that is not partitioned yet")
    if not batches.is_plain:
        raise ValueError(
            "batches with seeds that are edges, times, weights, trees or replacement are counted on a dataset directory; write one with "
            "salientpp.partition first"
        )
    seeds = batches.seeds
    graph = Graph.from_data(data)
    graph = Graph.trusted(graph.indptr, graph.indices)  # the user's edge ids are not needed: 8 bytes per edge
    splits = collect_splits(data, None, data.get("y"), graph.num_vertices)
    if seeds != "all" and seeds not in splits:
        raise ValueError(
            f"seeds must be 'all' or a split of the data ({', '.join(splits) or 'it has none'}), got {seeds!r}"
        )
    x = data.get("x")
    row_bytes = 0 if x is None else x[0].numel() * x.element_size()
    for narrow in read_formats("send_as", send_as, {} if x is None else {(None, "x"): (x.dtype, x.shape[1:])}).values():
        row_bytes = narrow.row_bytes
    return Unparted(graph, splits, None if seeds == "all" else splits[seeds], parts), {None: row_bytes}


def sent_row_bytes(part: PartitionedGraph, send_as: Mapping[Any, str] | None) -> dict[str | None, int]:
    """By type of vertices, of a row of ``x`` as a run sends it and caches it; 0 of types without.

    Raises:
        TypeError, ValueError: ``send_as`` is not what a loader takes.
    """
    types = {type_.name: type_ for type_ in part.description.node_types}
    known = {}
    for name, type_ in types.items():
        if "x" in type_.attributes:
            entry = type_.attributes["x"]
            known[name, "x"] = getattr(torch, entry["dtype"]), entry["row_shape"]
    row_bytes = {name: type_.row_bytes("x") for name, type_ in types.items()}
    for (name, attribute), format in read_formats("send_as", send_as, known).items():
        stored = types[name].narrow(attribute)
        if stored is not None:
            words = attribute if name is None else str((name, attribute))
            raise ValueError(
                f"send_as names {words!r}, which {part.root} stores as {stored.format}, and so it travels; leave it out"
            )
        if not types[name].replicated:
            row_bytes[name] = format.row_bytes
    return row_bytes
