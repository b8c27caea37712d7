"""Partitions a graph in memory, for an analysis that needs no dataset directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from salientpp.analysis.batches import Batches
from salientpp.graph.csc import Graph
from salientpp.partitioning.numbering import number_vertices, relabel
from salientpp.partitioning.options import PartitionOptions
from salientpp.partitioning.workload import assign_for
from salientpp.progress import Progress
from salientpp.ranks.partition_book import PartitionBook
from salientpp.vip.policies import Workload


@dataclass(frozen=True, eq=False)
class MemoryGraph:
    """A graph of one type of vertices in parts, with what :class:`~salientpp.PartitionedGraph` says of topology, seeds and probabilities.

    Attributes:
        graph: under the ids of the parts.
        parts: which ids each part owns.
        seeds: by part, int64 global ids.
        vip: by part, float32 [N], the inclusion probabilities of ``known_for`` (fanouts and batch size).
        order: int64 [N], the user's ids.
        quality: of the partition.
        offsets: the first part of each part of this view, and at the end their number.
        part_id: the part of the view that a rank visits.
    """

    graph: Graph
    parts: PartitionBook
    seeds: Sequence[Tensor]
    vip: Sequence[Tensor]
    known_for: tuple[list[int], int]
    order: Tensor
    quality: Mapping[str, Any]
    offsets: Sequence[int]
    part_id: int | None = None

    is_hetero = False
    replicated: ClassVar[frozenset[str | None]] = frozenset()

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_edges(self) -> int:
        return self.graph.num_edges

    @cached_property
    def books(self) -> dict[str | None, PartitionBook]:
        return {None: PartitionBook(self.parts.offsets[list(self.offsets)])}

    @property
    def row_books(self) -> dict[str | None, PartitionBook]:
        return self.books

    @property
    def whole(self) -> MemoryGraph:
        return self.joined(range(self.parts.num_parts + 1), None)

    def joined(self, offsets: Sequence[int], part_id: int | None) -> MemoryGraph:
        """The view whose part i is the parts ``offsets[i]`` to ``offsets[i + 1] - 1``."""
        return replace(self, offsets=offsets, part_id=part_id)

    def original_id(self, n_id: Tensor) -> Tensor:
        return self.order[n_id]

    def split(self, name: str, part_id: int, type_: None = None) -> Tensor:
        """The seeds of a part, whatever their name."""
        return torch.cat(list(self.seeds[self.offsets[part_id] : self.offsets[part_id + 1]]))

    def workload(
        self, part_id: int, seeds: Tensor, num_neighbors: Sequence[int], batch_size: int, replace: bool = False
    ) -> Workload:
        """What a part's cache is planned by."""
        first, last = self.offsets[part_id], self.offsets[part_id + 1]
        is_known = last - first == 1 and (list(num_neighbors), batch_size) == self.known_for
        vip = self.vip[first] if is_known else None
        return Workload(self.graph, self.books[None], part_id, seeds, num_neighbors, batch_size, replace, vip)


@dataclass(frozen=True, eq=False)
class Unparted:
    """What is needed of a ``Data``: the rest may be freed while METIS wants the memory.

    Attributes:
        splits: balanced between the parts.
        seeds: int64 ids; None: all vertices.
    """

    graph: Graph
    splits: dict[str, Tensor]
    seeds: Tensor | None
    num_parts: int

    def parted(self, options: PartitionOptions, batches: Batches, progress: Progress) -> MemoryGraph:
        """Partition in memory, for these batches."""
        graph, chosen, fanouts, batch_size = self.graph, self.seeds, batches.num_neighbors, batches.batch_size
        assert batch_size is not None  # filled
        num_seeds = graph.num_vertices if chosen is None else chosen.numel()
        options, _ = options.decided(num_parts=self.num_parts, num_edges=graph.num_edges, num_seeds=num_seeds)
        # METIS lets no other Python thread run, so a clock on the screen stands still with it.
        is_metis = isinstance(options.method, str) and options.method == "metis"
        progress.begin("partitioning (METIS stops the clock)" if is_metis else "partitioning")
        assigned = assign_for(
            graph, self.num_parts, options, splits=self.splits, seeds=chosen, num_neighbors=fanouts, batch_size=batch_size
        )  # fmt: skip
        numbering = number_vertices(graph, assigned, chosen, fanouts, batch_size)
        new_id = numbering.new_id()
        seed_ids = (torch.arange(graph.num_vertices, device="cpu") if chosen is None else new_id[chosen]).sort().values
        owner = numbering.book.owner(seed_ids)
        return MemoryGraph(
            relabel(graph, numbering),
            numbering.book,
            [seed_ids[owner == part_id] for part_id in range(self.num_parts)],
            list(numbering.vip),
            (list(fanouts), batch_size),
            numbering.order,
            {"edge_cut_fraction": assigned.edge_cut_fraction, "balance": assigned.balance},
            range(self.num_parts + 1),
        )
