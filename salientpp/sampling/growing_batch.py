"""Batch that grows hop by hop, from draws that several ranks make from their neighbour lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from salientpp import ops
from salientpp.ids import first_outside
from salientpp.sampling.edge_rows import EdgeRows
from salientpp.sampling.held_lists import Drawn, Group, Reads, Vertices, merged_numbers, merged_sources
from salientpp.sampling.requests import Ends
from salientpp.sampling.topology import ByType, DrawOptions, Mfg, Topology, as_sample, first_trees
from salientpp.store.tiers import NO_IDS


@dataclass(eq=False)
class GrowingBatch:
    """Batch that grows hop by hop while it is drawn. Lists below have one entry per vertex type, or per relation.

    Attributes:
        topology: the names and numbers of vertices.
        ends: source and target type of each relation.
        num_trees: number of trees, which is the number of seeds.
        n_id, tree: per type int64 [n], the vertices so far, and the trees that they belong to. Without trees, ``tree`` is empty.
        tree_time: int64 [num_trees], the time of each tree's seed. None without times.
        tree_since: int64 [num_trees], the time at which each tree's time window begins. None without a time window.
        first: per type, the position in ``n_id`` of the first vertex that the next hop expands.
        edge_index: per relation int64 [2, e], positions of the edges' sources and targets in ``n_id``.
        groups: per relation, the draws of all hops, with the positions of their vertices in ``n_id``.
        num_nodes, num_edges: numbers of vertices per type, and of edges per relation, in each hop.
        arrived: per relation, the draws of other ranks that came with attributes of edges.
        reads: numbers of the neighbour lists that were read, of this host and of other ranks.
        list_bytes: bytes of the packets with requests to draw from other ranks' neighbour lists, and of the answers.
    """

    topology: Topology
    ends: Sequence[Ends]
    num_trees: int
    n_id: list[Tensor]
    tree: list[Tensor]
    tree_time: Tensor | None
    tree_since: Tensor | None
    first: list[int]
    edge_index: list[Tensor]
    groups: list[list[Group]]
    num_nodes: list[list[int]]
    num_edges: list[list[int]]
    arrived: list[list[Drawn]]
    reads: Reads = field(default_factory=Reads)
    list_bytes: int = 0

    @classmethod
    def begin(
        cls, topology: Topology, ends: Sequence[Ends], seeds: ByType, options: DrawOptions, seed_time: ByType | None
    ) -> GrowingBatch:
        """Returns a batch that holds its seeds.

        Raises:
            RuntimeError: a seed is out of range.
            ValueError: edges have times and the seeds do not.
        """
        names = list(topology.num_vertices)
        n_id = [seeds.get(name, NO_IDS) for name in names]
        for ids, size in zip(n_id, topology.num_vertices.values()):
            at = first_outside(ids, size)
            if at is not None:
                raise RuntimeError(f"seeds[{at}] must be in [0, {size}), got {int(ids[at])}")
        first_tree, total = first_trees(seeds)
        tree, tree_time = [], None
        if options.disjoint:
            tree = [first_tree.get(name, 0) + torch.arange(ids.numel(), device="cpu") for name, ids in zip(names, n_id)]
        if topology.clock is not None:
            tree_time = torch.empty(total, dtype=torch.int64, device="cpu")
            for name, ids, of_type in zip(names, n_id, tree):
                times = topology.time_of_seeds(name, ids, seed_time)
                if times is not None:
                    tree_time[of_type] = times
        groups, num_edges, arrived = ([[] for _ in ends] for _ in range(3))  # type: ignore[var-annotated]
        edge_index = [NO_IDS.new_empty((2, 0)) for _ in ends]
        num_nodes = [[ids.numel()] for ids in n_id]
        return cls(
            topology, ends, total, n_id, tree, tree_time, topology.since(tree_time, options.window), [0] * len(n_id), edge_index, groups, num_nodes,
            num_edges, arrived,
        )  # fmt: skip

    def vertices(self, type_: int, first: int = 0) -> Vertices:
        """Returns the vertices of a type from position ``first`` in ``n_id`` on."""
        ids, tree = self.n_id[type_][first:], self.tree[type_][first:] if self.tree else None
        now, since = (
            None if time is None or tree is None else time[tree] for time in (self.tree_time, self.tree_since)
        )
        return Vertices(ids, tree, now, since)

    @property
    def frontier(self) -> list[Vertices]:
        """The vertices that the next hop expands, by type."""
        return [self.vertices(type_, first) for type_, first in enumerate(self.first)]

    def join(self, drawn: Sequence[Sequence[Group]]) -> None:
        """Adds the edges and new vertices of a hop. ``drawn``: for each relation, the draws of those frontier vertices that have its target type."""
        begin, size = self.first, [ids.numel() for ids in self.n_id]
        lists = [merged_sources(size[target] - begin[target], of) for of, (_, target) in zip(drawn, self.ends)]
        self.n_id, self.tree, self.edge_index = ops.join_drawn(
            self.n_id, self.tree, begin, [count for count, _ in lists], [source for _, source in lists],
            [source for source, _ in self.ends], [target for _, target in self.ends],
            list(self.topology.num_vertices.values()), self.num_trees, edge_index=self.edge_index,
        )  # fmt: skip
        self.first = size
        for number, (of, (_, source)) in enumerate(zip(drawn, lists)):
            self.num_edges[number].append(source.numel())
            target = self.ends[number][1]
            self.groups[number] += [(_moved(position, begin[target], size[target]), group) for position, group in of]
        for of_type, ids, before in zip(self.num_nodes, self.n_id, size):
            of_type.append(ids.numel() - before)

    def replace_edges(self, found: Sequence[Sequence[Group]]) -> None:
        """Replaces the edges by ``found``: per relation, edges into all vertices of its target type, with sources as positions in ``n_id``."""
        self.first = [ids.numel() for ids in self.n_id]
        self.groups = [list(of) for of in found]
        for number, (of, (_, target)) in enumerate(zip(found, self.ends)):
            count, source = merged_sources(self.first[target], of)
            self.edge_index[number] = torch.stack(
                [source, torch.arange(count.numel(), device="cpu").repeat_interleave(count)]
            )

    def finished(self, options: DrawOptions, only_vertices: bool) -> Mfg:
        """Returns the sample in PyG's class, with three more attributes: ``reads`` and ``list_bytes`` for statistics, and ``edge_rows``.

        ``edge_rows`` has, by edge type, the edge attributes that other ranks sent with their draws.
        """
        edges: list[Tensor | None] = [None] * len(self.ends)
        if not only_vertices:
            edges = [merged_numbers(self.first[target], of) for of, (_, target) in zip(self.groups, self.ends)]
        out: Any = as_sample(
            self.topology, options, self.n_id, self.tree, self.edge_index, edges, self.num_nodes, self.num_edges
        )
        out.reads, out.list_bytes = self.reads, self.list_bytes
        types = self.topology.edge_types
        out.edge_rows = {name: EdgeRows.of(drawn) for name, drawn in zip(types, self.arrived) if drawn}
        return out


def _moved(position: Tensor | None, begin: int, end: int) -> Tensor | None:
    """Converts positions that count from vertex ``begin`` to positions among all ``end`` vertices. ``position=None`` means each vertex from ``begin`` on."""
    if begin == 0:
        return position
    return torch.arange(begin, end, device="cpu") if position is None else position + begin
