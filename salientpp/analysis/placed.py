"""Puts a graph and its ranks in place: which rows each host holds, and which seeds each rank visits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput

from salientpp.analysis.batches import Batches
from salientpp.analysis.dry import Rank
from salientpp.graph.csc import Graph
from salientpp.graph.typed import TypedGraph
from salientpp.partitioning.numbering import number_vertices, relabel
from salientpp.partitioning.options import PartitionOptions
from salientpp.partitioning.workload import assign_for
from salientpp.progress import Progress
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ranks.placement import Placement
from salientpp.sampling.schedule import Schedule, share_size
from salientpp.sampling.seeds import part_edges, part_nodes
from salientpp.store.directory.contents import collect_splits
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.narrow import read_formats
from salientpp.vip.policies import Workload

#: Upper bound on ranks that are given; each is counted by itself.
MOST_RANKS = 1024


@dataclass(frozen=True, eq=False)
class Parted:
    """A graph in parts: a dataset directory, or one type of vertices in memory under new ids.

    Attributes:
        books: by vertex type, which ids each part owns.
        row_bytes: by vertex type, of a row of ``x`` as it travels.
        quality: of the partition.
        part: the directory, or None.
        graph: the topology of one type of vertices.
        original_id: int64 [N], of one type of vertices.
        seeds: in memory, by part, int64 global ids.
        vip: in memory, by part the inclusion probabilities float32 [N] of ``known_for`` (fanouts and batch size), or None.
    """

    books: Mapping[str | None, PartitionBook]
    num_edges: int
    row_bytes: Mapping[str | None, int]
    quality: Mapping[str, Any]
    part: PartitionedGraph | None = None
    graph: Graph | None = None
    original_id: Tensor | None = None
    seeds: Sequence[Tensor] = ()
    vip: Sequence[Tensor | None] = ()
    known_for: tuple[list[int], int] | None = None

    @classmethod
    def of_directory(cls, part: PartitionedGraph, row_bytes: Mapping[str | None, int]) -> Parted:
        graph = None if part.is_hetero else part.graph
        ids = None if part.is_hetero else part.original_id(torch.arange(part.num_vertices, device="cpu"))
        return cls(part.books, part.num_edges, row_bytes, part.description.quality, part, graph, ids)

    @property
    def num_parts(self) -> int:
        return next(iter(self.books.values())).num_parts

    @property
    def replicated(self) -> frozenset[str | None]:
        """Vertex types whose rows every part has."""
        return frozenset() if self.part is None else self.part.replicated

    @property
    def row_books(self) -> dict[str | None, PartitionBook]:
        """The books of vertex types whose rows travel."""
        found = {type_: book for type_, book in self.books.items() if type_ not in self.replicated}
        if self.books.keys() == {None}:
            return found
        found = {type_: book for type_, book in found.items() if self.row_bytes[type_]}
        if not found:
            raise ValueError("no type of vertices has rows of x that would travel, so there is nothing to count")
        return found

    def joined(self, offsets: Sequence[int]) -> Parted:
        """The same graph whose part i is the parts ``offsets[i]`` to ``offsets[i + 1] - 1``."""
        if self.part is not None:
            view = self.part.whole.joined([self.part.offsets[first] for first in offsets], None)
            return replace(self, part=view, books=view.books)
        bounds = list(pairwise(offsets))
        return replace(
            self,
            books={None: PartitionBook(self.books[None].offsets[list(offsets)])},
            seeds=[torch.cat(list(self.seeds[first:last])) for first, last in bounds],
            vip=[self.vip[first] if last - first == 1 else None for first, last in bounds],
        )

    def topology(self, batches: Batches) -> Graph | TypedGraph:
        if self.graph is not None and batches.time_attr is None and batches.weight_attr is None:
            return self.graph
        assert self.part is not None  # others have plain batches
        return self.part.typed_graph(batches.time_attr, batches.weight_attr)

    def inputs(self, part_id: int, batches: Batches) -> NodeSamplerInput | EdgeSamplerInput:
        """The seeds of a part."""
        if self.part is None:
            return NodeSamplerInput(None, self.seeds[part_id], None, None)
        if not batches.link:
            return part_nodes(self.part, part_id, batches.seeds, None, None)[0]
        stored = part_edges(self.part, part_id, batches.seeds)
        time = stored.attribute(batches.edge_label_time)
        return EdgeSamplerInput(stored.edge_id, stored.ends[0], stored.ends[1], None, time, stored.type_)

    def workload(self, part_id: int, batches: Batches) -> Workload:
        """What a part's cache is planned by; of plain batches from one type of vertices."""
        fanouts, batch_size = batches.num_neighbors, batches.batch_size
        assert batch_size is not None and self.graph is not None  # filled; one type
        if self.part is not None:
            return self.part.workload(part_id, self.part.split(batches.seeds, part_id), fanouts, batch_size)
        known = self.vip[part_id] if (list(fanouts), batch_size) == self.known_for else None
        return Workload(self.graph, self.books[None], part_id, self.seeds[part_id], fanouts, batch_size, vip=known)


@dataclass(frozen=True, eq=False)
class Unparted:
    """What is needed of a ``Data``: the rest may be freed while METIS wants the memory."""

    graph: Graph
    splits: dict[str, Tensor]
    seeds: Tensor | None
    row_bytes: int
    parts: int

    def parted(self, options: PartitionOptions, batches: Batches, progress: Progress) -> Parted:
        """Partition in memory, for these batches."""
        graph, chosen, fanouts, batch_size = self.graph, self.seeds, batches.num_neighbors, batches.batch_size
        assert batch_size is not None  # filled
        num_seeds = graph.num_vertices if chosen is None else chosen.numel()
        options, _ = options.decided(num_parts=self.parts, num_edges=graph.num_edges, num_seeds=num_seeds)
        # METIS lets no other Python thread run, so a clock on the screen stands still with it.
        is_metis = isinstance(options.method, str) and options.method == "metis"
        progress.begin("partitioning (METIS stops the clock)" if is_metis else "partitioning")
        assigned = assign_for(
            graph, self.parts, options, splits=self.splits, seeds=chosen, num_neighbors=fanouts, batch_size=batch_size
        )
        numbering = number_vertices(graph, assigned, chosen, fanouts, batch_size)
        new_id = numbering.new_id()
        seed_ids = (torch.arange(graph.num_vertices, device="cpu") if chosen is None else new_id[chosen]).sort().values
        owner = numbering.book.owner(seed_ids)
        return Parted(
            {None: numbering.book},
            graph.num_edges,
            {None: self.row_bytes},
            {"edge_cut_fraction": assigned.edge_cut_fraction, "balance": assigned.balance},
            graph=relabel(graph, numbering),
            original_id=numbering.order,
            seeds=[seed_ids[owner == part_id] for part_id in range(self.parts)],
            vip=list(numbering.vip),
            known_for=(list(fanouts), batch_size),
        )


def open_graph(
    data: Data | PartitionedGraph, parts: int | None, batches: Batches, send_as: Mapping[Any, str] | None = None
) -> Parted | Unparted:
    """What an analysis needs of a graph.

    Raises:
        ValueError: ``parts``, ``batches`` or ``send_as`` do not fit it.
    """
    if isinstance(data, PartitionedGraph):
        if parts not in (None, data.num_parts):
            raise ValueError(
                f"{data.root} has {data.num_parts} parts, got parts={parts}; leave it out, or partition again"
            )
        return Parted.of_directory(data, sent_row_bytes(data, send_as))
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
    return Unparted(graph, splits, None if seeds == "all" else splits[seeds], row_bytes, parts)


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


def placed(ranks: int | None, num_parts: int, ranks_per_host: int | Sequence[int] = 1) -> list[Placement]:
    """Every rank's placement; None ranks are as many as parts.

    Raises:
        ValueError: the numbers do not fit each other, or there are too many ranks.
    """
    if ranks is not None and ranks > MOST_RANKS:
        raise ValueError(f"rows can be counted for at most {MOST_RANKS:,} ranks, got {ranks:,}")
    ranks = num_parts if ranks is None else ranks
    if isinstance(ranks_per_host, int):
        if ranks_per_host < 1 or ranks % ranks_per_host:
            raise ValueError(f"ranks_per_host must be >= 1 and divide the {ranks} ranks, got {ranks_per_host}")
        ranks_per_host = [ranks_per_host] * (ranks // ranks_per_host)
    by_host = tuple(ranks_per_host)
    return [Placement(rank, ranks, num_parts, ranks_by_host=by_host) for rank in range(ranks)]


@dataclass(frozen=True, eq=False)
class Job:
    """Ranks on hosts, and the graph as they see it.

    Attributes:
        graph: its parts are those that ranks visit.
        held: by vertex type whose rows travel, which ids each host's rows are of.
        placements: of the ranks.
    """

    graph: Parted
    held: Mapping[str | None, PartitionBook]
    placements: Sequence[Placement]

    @classmethod
    def of(cls, parted: Parted, placements: Sequence[Placement]) -> Job:
        rows = list(placements[0].row_offsets)
        held = {type_: PartitionBook(book.offsets[rows]) for type_, book in parted.row_books.items()}
        return cls(parted.joined(placements[0].own_offsets), held, placements)

    @property
    def hosts(self) -> list[range]:
        """The ranks of each host."""
        return [*dict.fromkeys(placement.ranks_of_host for placement in self.placements)]

    @property
    def shares(self) -> bool:
        """A host has several ranks."""
        return max(self.placements[0].ranks_by_host) > 1

    @property
    def is_simple(self) -> bool:
        """Every rank is a host and has a part of its own, of one type of vertices."""
        return not self.shares and self.graph.books.keys() == {None} and self.graph.num_parts == len(self.placements)

    def ranks(self, batches: Batches) -> list[Rank]:
        """The ranks' batches: the loaders' by default. Where ranks have no seeds, loaders serve them with uneven='exact'."""
        sampler, negatives = batches.sampler(self.graph.topology(batches)), batches.negatives
        inputs = [self.graph.inputs(unit, batches) for unit in range(self.graph.num_parts)]
        sizes = [(each.row if isinstance(each, EdgeSamplerInput) else each.node).numel() for each in inputs]
        shares = [
            (sizes[each.own_part], each.own_part, each.place_of(each.rank), each.slots_per_unit)
            for each in self.placements
        ]
        counts = [share_size(number, place, places) for number, _, place, places in shares]
        uneven, batch_size = "exact" if 0 in counts else "wrap", batches.batch_size
        assert batch_size is not None  # filled
        return [
            Rank(
                each.rank,
                sampler,
                inputs[each.own_part],
                Schedule(*share, counts, each.rank, batch_size, True, False, uneven, batches.seed),
                {type_: book.range_of(each.part_id) for type_, book in self.held.items()},
                negatives,
                batches.draw_block,
            )
            for each, share in zip(self.placements, shares)
        ]
