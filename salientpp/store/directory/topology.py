"""The data of a dataset directory that every rank needs whole: the topology, times and weights for sampling, and original ids."""

from __future__ import annotations

import torch
from torch import Tensor

from salientpp.graph.csc import Graph
from salientpp.graph.typed import TypedGraph
from salientpp.ids import as_tensor, check_range
from salientpp.processes import lazy
from salientpp.store.directory.columns import edge_column, vertex_column
from salientpp.store.directory.description import Description, EdgeName, words_of_type
from salientpp.store.directory.files import Arrays, DatasetError
from salientpp.store.directory.manifest import parts_there


class Topology:
    """Neighbour lists and original ids of a dataset directory. All views of a directory share this object."""

    def __init__(self, arrays: Arrays, description: Description) -> None:
        self._arrays, self._description = arrays, description

    @lazy
    def lists(self) -> dict[EdgeName, tuple[Tensor, Tensor]]:
        """Neighbour lists per edge type: ``indptr`` int64 [N of the target type + 1], ``indices`` [E] of source ids."""
        return {
            type_.name: (self._arrays.open(type_.indptr_file), self._arrays.open(type_.indices_file))
            for type_ in self._description.edge_types
        }

    @lazy
    def graph(self) -> Graph:
        """The lists of a homogeneous graph. They were validated when written, so they are not read again here."""
        return Graph.trusted(*self.lists[None])

    def typed_graph(self, time_attr: str | None, weight_attr: str | None) -> TypedGraph:
        """Returns the lists with times and weights; see :meth:`salientpp.PartitionedGraph.typed_graph`."""
        named = self._description
        node_time = {} if time_attr is None else self._node_times(time_attr)
        edge_time = {} if time_attr is None else self._edge_columns(time_attr)
        if time_attr is not None:
            if node_time and edge_time:
                raise ValueError(
                    f"time_attr={time_attr!r} is both a node-level and an edge-level attribute; give one of them another name"
                )
            if not node_time and not edge_time:
                raise ValueError(f"The time attribute {time_attr!r} is neither a node-level or edge-level attribute")
        weight = {} if weight_attr is None else self._edge_columns(weight_attr)
        if weight_attr is not None and not weight:
            raise ValueError(f"weight_attr must name an edge attribute, but no edges have an attribute {weight_attr!r}")
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
            raise type(error)(f"{self._arrays.root}: {error}") from None

    @lazy
    def original_ids(self) -> dict[str | None, Tensor]:
        """The user's id of every global id, int64 [N] per type."""
        return {type_.name: self._arrays.open(type_.original_id_file) for type_ in self._description.node_types}

    @lazy
    def _reverse(self) -> dict[str | None, Tensor]:
        """The global id of every user's id, int64 [N] per type, for types whose ids were asked for."""
        return {}

    def global_ids(self, ids: Tensor, type_: str | None) -> Tensor:
        """See :meth:`salientpp.PartitionedGraph.directory_id`."""
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
        """Returns an attribute of every edge type that has it."""
        types = self._description.edge_types
        return {type_.name: edge_column(self._arrays, type_, name) for type_ in types if name in type_.attributes}

    def _node_times(self, time_attr: str) -> dict[str | None, Tensor]:
        """Returns the times of every type that has them, int or float [N]. They come from one file, or are concatenated from all parts."""
        root, arrays = self._arrays.root, self._arrays
        there, times = parts_there(root), {}
        for type_ in self._description.node_types:
            if time_attr not in type_.attributes:
                continue
            if time_attr == self._description.time_attr:
                times[type_.name] = arrays.open(type_.time_file(time_attr), type_.attributes[time_attr]["dtype"])
                continue
            stored = range(self._description.num_parts)
            missing = sorted(set(stored) - there) if there is not None and not type_.replicated else []
            if missing:
                raise DatasetError(
                    f"{root} is a copy without part {missing[0]}; every rank needs the times {time_attr!r} of the part's vertices{words_of_type(type_.name)} "
                    f"for sampling; partition with time_attr={time_attr!r}, which stores them whole, or open the original directory"
                )
            parts = range(1) if type_.replicated else stored
            times[type_.name] = torch.cat([vertex_column(arrays, type_, time_attr, part_id) for part_id in parts])
        return times
