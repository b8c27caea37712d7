"""Opens what every rank needs whole of a dataset directory: the topology, with the times and weights that sampling needs, and the original ids."""

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
    """The neighbour lists and original ids of a dataset directory. All views of a directory share one."""

    def __init__(self, arrays: Arrays, description: Description) -> None:
        self._arrays, self._description = arrays, description

    @lazy
    def lists(self) -> dict[EdgeName, tuple[Tensor, Tensor]]:
        """Per edge type ``indptr`` int64 [N of the target type + 1] and ``indices`` [E], ids of the source type."""
        return {
            type_.name: (self._arrays.open(type_.indptr_file), self._arrays.open(type_.indices_file))
            for type_ in self._description.edge_types
        }

    @lazy
    def graph(self) -> Graph:
        """The lists of a homogeneous graph; validated when they were written, so not read again here."""
        return Graph.trusted(*self.lists[None])

    def typed_graph(self, time_attr: str | None, weight_attr: str | None) -> TypedGraph:
        """The lists with times and weights, see :meth:`salientpp.PartitionedGraph.typed_graph`."""
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
            raise ValueError(f"weight_attr names the edge weights, but no edges have an attribute {weight_attr!r}")
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
        """Per type int64 [N]: by the global id, the user's."""
        return {type_.name: self._arrays.open(type_.original_id_file) for type_ in self._description.node_types}

    @lazy
    def _reverse(self) -> dict[str | None, Tensor]:
        """Per type in use int64 [N]: by the user's id, the global one."""
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
        """An attribute of all edge types that have it."""
        types = self._description.edge_types
        return {type_.name: edge_column(self._arrays, type_, name) for type_ in types if name in type_.attributes}

    def _node_times(self, time_attr: str) -> dict[str | None, Tensor]:
        """Per type that has them int or float [N], whole files, or put together from those of all parts."""
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
                    f"{root} is a copy without part {missing[0]}, whose vertices{words_of_type(type_.name)} have times {time_attr!r} that every rank "
                    f"needs in order to draw; partition with time_attr={time_attr!r}, which stores them whole, or open the directory that it was copied from"
                )
            parts = range(1) if type_.replicated else stored
            times[type_.name] = torch.cat([vertex_column(arrays, type_, time_attr, part_id) for part_id in parts])
        return times
