"""Reads the topology of a dataset directory, with times and weights for sampling, and the original ids of vertices.

The topology is stored whole or in parts. Either can be read part by part, or as a whole graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from salientpp.graph.csc import Graph
from salientpp.graph.typed import TypedGraph
from salientpp.ids import as_tensor, check_range, first_outside
from salientpp.processes import lazy
from salientpp.store.directory.columns import StoredRows, edge_column, stored_rows, vertex_column, whole
from salientpp.store.directory.description import (
    PARTS,
    Description,
    EdgeName,
    EdgeType,
    VertexType,
    words_of_type,
)
from salientpp.store.directory.files import Arrays, DatasetError
from salientpp.store.directory.manifest import check_is_there, parts_there
from salientpp.suggestions import did_you_mean


class Topology:
    """Reads the neighbour lists and original ids of a dataset directory. All views of a directory share this object."""

    def __init__(self, arrays: Arrays, description: Description) -> None:
        self.arrays, self.description = arrays, description

    @lazy
    def lists(self) -> dict[EdgeName, tuple[Tensor, Tensor]]:
        """Neighbour lists per edge type: ``indptr`` int64 [N of the target type + 1], ``indices`` [E] of source ids.

        Lists that are stored in parts are concatenated in memory.
        """
        return {edges.name: self._whole_lists(edges) for edges in self.description.edge_types}

    def _whole_lists(self, edges: EdgeType) -> tuple[Tensor, Tensor]:
        pieces = [self._lists_in_file(edges, piece) for piece in self._files_of_all(edges)]
        if len(pieces) == 1:
            return pieces[0]
        starts = [indptr[:-1] + begin for (indptr, _), (begin, _) in zip(pieces, edges.pieces)]
        end = torch.tensor([edges.num_edges], device="cpu")
        return torch.cat([*starts, end]), torch.cat([indices for _, indices in pieces])

    def _lists_in_file(self, edges: EdgeType, piece: int) -> tuple[Tensor, Tensor]:
        return self.arrays.open(edges.indptr_file(piece)), self.arrays.open(edges.indices_file(piece))

    def _files_of_all(self, edges: EdgeType) -> range:
        """Returns the numbers of the files with the lists of all parts. Raises DatasetError if a host's copy lacks one."""
        pieces = range(len(edges.pieces))
        for piece in pieces if self.description.topology == PARTS else ():
            check_is_there(self.arrays.root, piece)
        return pieces

    def column(self, edges: EdgeType, name: str) -> StoredRows:
        """Returns an attribute's rows [E, ...] for all edges, in the order of the lists."""
        files = self._files_of_all(edges)
        return stored_rows(edges, name, [edge_column(self.arrays, edges, name, piece) for piece in files])

    def edges_into(self, edges: EdgeType, stored: range) -> tuple[int, int]:
        """Returns (first, end): the edges ``first`` to ``end - 1`` lead into the consecutive parts ``stored``."""
        first, last = stored.start, stored.stop
        if edges.edge_offsets is not None:
            return edges.edge_offsets[first], edges.edge_offsets[last]
        offsets, (indptr, _) = self.description.vertices(edges.target).offsets, self.lists[edges.name]
        return int(indptr[offsets[first]]), int(indptr[offsets[last]])

    def lists_of_part(self, edges: EdgeType, part_id: int) -> tuple[Tensor, Tensor]:
        """Returns the lists of a part on disk: ``indptr`` int64 [n + 1], from 0, and memory-mapped ``indices`` [e]."""
        if edges.edge_offsets is not None:
            return self._lists_in_file(edges, part_id)
        indptr, indices = self.lists[edges.name]
        first, end = self.description.vertices(edges.target).book.range_of(part_id)
        own = indptr[first : end + 1]
        return own - own[0], indices[int(own[0]) : int(own[-1])]

    def column_of_part(self, edges: EdgeType, name: str, part_id: int) -> Tensor:
        """Returns memory-mapped rows [e, ...] of the edges of :meth:`lists_of_part`. Encoded rows stay encoded."""
        if edges.edge_offsets is not None:
            return edge_column(self.arrays, edges, name, part_id)
        begin, end = self.edges_into(edges, range(part_id, part_id + 1))
        return edge_column(self.arrays, edges, name, 0)[begin:end]

    @lazy
    def graph(self) -> Graph:
        """Neighbour lists of a homogeneous graph. They were checked when written, so this does not read them."""
        return Graph.trusted(*self.lists[None])

    def typed_graph(self, time_attr: str | None, weight_attr: str | None) -> TypedGraph:
        """Returns the neighbour lists with times and weights; see :meth:`salientpp.PartitionedGraph.typed_graph`."""
        named = self.description
        self.check_attributes(time_attr, weight_attr)
        node_time = {} if time_attr is None else self.node_times(time_attr)
        edge_time = {} if time_attr is None else self._edge_columns(time_attr)
        weight = {} if weight_attr is None else self._edge_columns(weight_attr)
        try:
            return TypedGraph.from_lists(
                {type_.name: type_.num_vertices for type_ in named.node_types},
                self.lists,
                time_attr=time_attr,
                node_time=node_time,
                edge_time=edge_time,
                weight=weight,
                is_sorted=time_attr is not None and time_attr == named.time_attr,
            )
        except ValueError as error:
            raise type(error)(f"{self.arrays.root}: {error}") from None

    def check_attributes(self, time_attr: str | None, weight_attr: str | None) -> None:
        """Raises ValueError unless ``time_attr`` names times of vertices or of edges, and ``weight_attr`` names weights of edges.

        Both must be stored exactly, because they decide how batches are drawn.
        """
        known = [name for type_ in self.description.types for name in type_.attributes]
        of_nodes = any(time_attr in type_.attributes for type_ in self.description.node_types)
        of_edges = any(time_attr in type_.attributes for type_ in self.description.edge_types)
        if time_attr is not None and of_nodes and of_edges:
            raise ValueError(
                f"time_attr={time_attr!r} is both a node-level and an edge-level attribute; give one of them another name"
            )
        if time_attr is not None and not of_nodes and not of_edges:
            raise ValueError(
                f"The time attribute {time_attr!r} is neither a node-level or edge-level attribute{did_you_mean(time_attr, known)}"
            )
        if weight_attr is not None and not any(
            weight_attr in edges.attributes for edges in self.description.edge_types
        ):
            raise ValueError(
                f"weight_attr must name an edge attribute, but no edges have an attribute {weight_attr!r}{did_you_mean(weight_attr, known)}"
            )
        self._check_is_exact("time_attr", time_attr, self.description.types)
        self._check_is_exact("weight_attr", weight_attr, self.description.edge_types)

    def _check_is_exact(self, argument: str, name: str | None, types: Iterable[VertexType | EdgeType]) -> None:
        """Raises ValueError if the attribute ``name``, which decides how batches are drawn, is stored encoded."""
        for type_ in types:
            narrow = None if name is None or name not in type_.attributes else type_.narrow(name)
            if narrow is not None:
                raise ValueError(
                    f"{argument}={name!r} decides how batches are drawn, but {self.arrays.root} stores {name!r}{words_of_type(type_.name)} as {narrow.format}; "
                    f"partition again without {name!r} in store_as"
                )

    @lazy
    def original_ids(self) -> dict[str | None, Tensor]:
        """The user's ids, int64 [N] per vertex type: entry i is the id that vertex i has in the user's data."""
        return {type_.name: self.arrays.open(type_.original_id_file) for type_ in self.description.node_types}

    @lazy
    def _reverse(self) -> dict[str | None, Tensor]:
        """Global ids, int64 [N] per vertex type: entry i is the id of the user's vertex i. :meth:`global_ids` fills it."""
        return {}

    def user_ids(self, n_id: Tensor, type_: str | None) -> Tensor:
        """Translates global ids to the user's ids; see :meth:`salientpp.PartitionedGraph.original_id`."""
        if n_id.numel() and (n_id.dtype == torch.bool or n_id.is_floating_point() or n_id.is_complex()):
            raise ValueError(f"n_id must be integer ids of this graph, got {n_id.dtype}")
        ids, original = n_id.cpu().to(torch.int64), self.original_ids[type_]
        at = first_outside(ids, original.numel(), begin=-1)
        if at is not None:
            raise ValueError(
                f"n_id must be in [0, {original.numel()}){words_of_type(type_)}, or -1 for padding, got {int(ids.flatten()[at])} at position {at}"
            )
        is_vertex = ids >= 0
        if bool(is_vertex.all()):
            return original[ids].to(n_id.device)
        found = torch.full(ids.shape, -1, dtype=torch.int64, device="cpu")
        found[is_vertex] = original[ids[is_vertex]]
        return found.to(n_id.device)

    def global_ids(self, ids: Tensor, type_: str | None) -> Tensor:
        """Translates the user's ids to global ids; see :meth:`salientpp.PartitionedGraph.directory_id`."""
        must = "ids must be integer ids of the data that was partitioned"
        given = as_tensor(ids, must)
        if given.numel() and (given.dtype == torch.bool or given.dtype.is_floating_point or given.dtype.is_complex):
            raise ValueError(f"{must}, got {given.dtype}")
        flat, original = given.cpu().to(torch.int64).flatten(), self.original_ids[type_]
        check_range(flat, original.numel(), f"{must}{words_of_type(type_)},")
        if type_ not in self._reverse:
            reverse = torch.empty_like(original)
            reverse[original] = torch.arange(original.numel(), device="cpu")
            self._reverse[type_] = reverse
        return self._reverse[type_][flat].view(given.shape).to(given.device)

    def _edge_columns(self, name: str) -> dict[EdgeName, Tensor]:
        """Returns the rows [E, ...] of an attribute, for every edge type that has it."""
        types = self.description.edge_types
        return {type_.name: whole(self.column(type_, name)) for type_ in types if name in type_.attributes}

    def node_times(self, time_attr: str) -> dict[str | None, Tensor]:
        """Returns the times of all vertices, int or float [N], for every vertex type that has them."""
        root, arrays = self.arrays.root, self.arrays
        there, times = parts_there(root), {}
        for type_ in self.description.node_types:
            if time_attr not in type_.attributes:
                continue
            if time_attr == self.description.time_attr:
                times[type_.name] = arrays.open(type_.time_file(time_attr), type_.attributes[time_attr]["dtype"])
                continue
            stored = range(self.description.num_parts)
            missing = sorted(set(stored) - there) if there is not None and not type_.replicated else []
            if missing:
                raise DatasetError(
                    f"{root} is a copy without part {missing[0]}; every rank needs the times {time_attr!r} of the part's vertices{words_of_type(type_.name)} "
                    f"for sampling; partition with time_attr={time_attr!r}, which stores them whole, or open the original directory"
                )
            parts = range(1) if type_.replicated else stored
            times[type_.name] = torch.cat([vertex_column(arrays, type_, time_attr, part_id) for part_id in parts])
        return times
