"""Reads and checks the contents of a PyG ``Data`` or ``HeteroData`` that a dataset directory stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.graph.csc import Graph
from salientpp.graph.relation import Relation
from salientpp.graph.typed import TypedGraph
from salientpp.store.directory.attributes import Collected, collect_attributes, collect_keys, node_stores, place
from salientpp.store.directory.description import EdgeColumn, EdgeName
from salientpp.store.directory.given_splits import by_type, collect_splits, find_seeds, read_splits
from salientpp.store.frames import Frame, feature_columns, formats_of_columns
from salientpp.store.key_table import KeyTable
from salientpp.store.narrow import Column, EncodedRows, Loss, Narrow, read_formats
from salientpp.store.rows import TensorRows
from salientpp.suggestions import did_you_mean

#: By default, a type's rows are replicated if they take at most this many bytes and at most this share of the bytes of all types.
_REPLICATED_BYTES, _REPLICATED_SHARE = 16 * 2**20, 0.01

#: Attribute name -> the encoding of its rows, and the resulting error.
_Stored = dict[str, tuple[Narrow, Loss]]

#: Number of values per piece, when the loss of an encoding is measured.
_PIECE = 2**20


@dataclass(frozen=True, eq=False, kw_only=True)
class Contents:
    """Checked contents of the user's data, which :func:`salientpp.partition` stores. All ids are the user's. A homogeneous graph's types are named None.

    Attributes:
        graph: the topology. If ``time_attr`` was given, neighbour lists ascend by time.
        node_columns, edge_columns: per type, attribute name -> rows [N, ...] or [E, ...].
        node_frames, edge_frames: per type, attribute name -> the table that some of these columns make up.
        splits, edge_splits: per type, name -> ascending ids.
        seeds: the (type, split) that batches start from; (None, 'all') means all vertices.
        replicated: vertex types whose rows every part gets.
        narrow, edge_narrow: per type, attribute name -> the encoding that its rows are stored in, and the resulting error.
        keys: the keys of the vertex types that have them, in the order of the user's ids.
    """

    is_hetero: bool
    graph: TypedGraph
    node_columns: dict[str | None, dict[str, Tensor]]
    edge_columns: dict[EdgeName, dict[str, Tensor]]
    node_frames: dict[str | None, dict[str, Frame]]
    edge_frames: dict[EdgeName, dict[str, Frame]]
    splits: dict[str | None, dict[str, Tensor]]
    edge_splits: dict[EdgeName, dict[str, Tensor]]
    seeds: tuple[str | None, str]
    replicated: frozenset[str | None]
    narrow: dict[str | None, _Stored]
    edge_narrow: dict[EdgeName, _Stored]
    keys: dict[str | None, KeyTable]

    @property
    def starts(self) -> dict[str | None, Tensor]:
        """The user's ids of the seeds, int64 per vertex type."""
        type_, split = self.seeds
        return {
            name: torch.arange(size, device="cpu") if split == "all" else self.splits[name][split]
            for name, size in zip(self.graph.node_types, self.graph.num_vertices)
            if name == type_ or type_ is None
        }

    @property
    def row_bytes(self) -> dict[str | None, int]:
        """Bytes that travel when a batch fetches one vertex from another part, per type: the bytes of its features.

        Features are ``x`` and the table ``tf``. If no type has features, all attributes count. Replicated types have 0.
        """
        features = {
            name: set(feature_columns(columns, self.node_frames[name])) for name, columns in self.node_columns.items()
        }
        has_any = any(features.values())
        return {
            name: 0
            if name in self.replicated
            else sum(
                _nbytes(rows[:1], self.narrow[name].get(column))
                for column, rows in columns.items()
                if column in features[name] or not has_any
            )
            for name, columns in self.node_columns.items()
        }


def _nbytes(rows: Tensor, stored: tuple[Narrow, Loss] | None) -> int:
    """Returns the bytes that these rows take on disk, encoded if ``stored`` gives an encoding."""
    return rows.nbytes if stored is None else len(rows) * stored[0].row_bytes


def read_contents(
    data: Data | HeteroData,
    *,
    split: Mapping[str, Any] | None = None,
    edge_split: Mapping[Any, Any] | None = None,
    seeds: str | tuple[str, str] = "train",
    replicate: Iterable[str] | None = None,
    time_attr: str | None = None,
    store_as: Mapping[Any, str] | None = None,
) -> Contents:
    """Reads and checks what a directory stores of ``data``. Arguments and errors are as in :func:`salientpp.partition`."""
    is_hetero = isinstance(data, HeteroData)
    if is_hetero or time_attr is not None:
        # Copies the lists without the arrays that only sampling needs.
        timed = TypedGraph.from_data(data, time_attr=time_attr)
        relations = tuple(Relation(r.source, r.target, r.indptr, r.indices, r.edge_id) for r in timed.relations)
        no_times = (None,) * len(timed.node_types)
        graph = TypedGraph(timed.node_types, timed.num_vertices, timed.edge_types, relations, no_times)
    else:
        graph = TypedGraph.of(Graph.from_data(data))
    nodes, edges = collect_attributes(data, graph)
    node_columns = {name: of_type.columns for name, of_type in nodes.items()}
    node_frames = {name: of_type.frames for name, of_type in nodes.items()}
    narrow, edge_narrow = _read_narrow(store_as, nodes, edges, time_attr)
    if is_hetero and split is not None:
        split = by_type(split, graph.node_types, "split", "node")
    splits = {}
    for (name, store), size in zip(node_stores(data).items(), graph.num_vertices):
        own = split if name is None or split is None else split.get(name, {})
        splits[name] = collect_splits(store, own, node_columns[name].get("y"), size, name)
    of_edges: Mapping[Any, Any] = {}
    if edge_split is not None:
        of_edges = by_type(edge_split, graph.edge_types, "edge_split", "edge") if is_hetero else {None: edge_split}
    edge_splits = {
        name: read_splits(of_edges.get(name, {}), relation.indices.numel(), "edge_split", "edge", name)
        for name, relation in zip(graph.edge_types, graph.relations)
    }
    return Contents(
        is_hetero=is_hetero,
        graph=graph,
        node_columns=node_columns,
        edge_columns={name: of_type.columns for name, of_type in edges.items()},
        node_frames=node_frames,
        edge_frames={name: of_type.frames for name, of_type in edges.items()},
        splits=splits,
        edge_splits=edge_splits,
        seeds=find_seeds(seeds, splits, is_hetero),
        replicated=_choose_replicated(replicate, node_columns, narrow, is_hetero),
        narrow=narrow,
        edge_narrow=edge_narrow,
        keys=collect_keys(data, graph),
    )


def _read_narrow(
    store_as: Any, nodes: Mapping[str | None, Collected], edges: Mapping[EdgeName, Collected], time_attr: str | None
) -> tuple[dict[str | None, _Stored], dict[EdgeName, _Stored]]:
    """Reads the user's ``store_as``. Returns per vertex type and per edge type: attribute name -> its encoding, and how much that changes the rows."""
    # The names of vertex types are strings, and those of edge types are triples. A homogeneous graph has every name once.
    every: list[tuple[Any, Collected]] = [*nodes.items(), *edges.items()]
    known = {(type_, name): rows for type_, each in every for name, rows in each.columns.items()}
    tables = {(type_, name): frame for type_, each in every for name, frame in each.frames.items()}
    shapes = {column: (rows.dtype, rows.shape[1:]) for column, rows in known.items()}
    given = formats_of_columns("store_as", store_as, tables, shapes)
    of_nodes: dict[Any, _Stored] = {type_: {} for type_ in nodes}
    of_edges: dict[Any, _Stored] = {type_: {} for type_ in edges}
    formats: Mapping[Any, Narrow] = read_formats("store_as", given, shapes, "node or edge attributes")
    for (type_, name), narrow in formats.items():
        if name == time_attr:
            raise ValueError(
                f"store_as: {name!r} is time_attr, which decides how batches are drawn, so it is stored as it is; leave it out"
            )
        found = of_edges if type_ in edges and name in edges[type_].columns else of_nodes
        found[type_][name] = narrow, _loss((type_, name), narrow, known[type_, name])
    return of_nodes, of_edges


def _loss(column: Column | EdgeColumn, narrow: Narrow, rows: Tensor) -> Loss:
    loss, first = Loss(), 0
    for piece in rows.split(max(1, _PIECE // max(1, narrow.columns))):
        decoded = torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
        index = torch.arange(len(piece), device="cpu")
        narrow.put(EncodedRows(TensorRows(piece.contiguous()), narrow), index, decoded)
        at = loss.add(piece, decoded)
        if at is not None:
            raise ValueError(
                f"{place(column[0])}.{column[1]} cannot be stored as {narrow.format}: a value in row {first + at} is not finite, or too large for the "
                "format; replace the value, or store the attribute as bf16"
            )
        first += len(piece)
    return loss


def _choose_replicated(
    replicate: Iterable[str] | None,
    columns: Mapping[str | None, Mapping[str, Tensor]],
    narrow: Mapping[str | None, Mapping[str, tuple[Narrow, Loss]]],
    is_hetero: bool,
) -> frozenset[str | None]:
    """Returns the types whose rows every part gets: those in ``replicate``, or by default those whose rows take few bytes."""
    if replicate is not None:
        chosen = [replicate] if isinstance(replicate, str) else list(replicate)
        if chosen and not is_hetero:
            raise ValueError(
                f"replicate names types of a HeteroData, got {chosen[0]!r}; rows of a homogeneous graph are cached by a loader's replication_factor"
            )
        for name in chosen:
            if name not in columns:
                raise ValueError(
                    f"replicate must name node types of the data ({', '.join(map(repr, columns))}), got {name!r}{did_you_mean(name, columns)}"
                )
        return frozenset(chosen)
    nbytes = {
        name: sum(_nbytes(rows, narrow[name].get(column)) for column, rows in own.items())
        for name, own in columns.items()
    }
    most = min(_REPLICATED_BYTES, _REPLICATED_SHARE * sum(nbytes.values()))
    return frozenset(name for name, size in nbytes.items() if is_hetero and 0 < size <= most)
