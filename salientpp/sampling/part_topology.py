"""Topology of a graph that is divided among hosts. The owners of neighbour lists draw from them on behalf of other ranks.

The draws of a vertex depend only on (batch key, hop, relation, tree, vertex). So the owner of a list draws what any other holder of the list would draw,
and batches equal those of a topology that holds all lists.

A batch is drawn in **rounds**. In a round, this rank draws from the lists that it holds, and asks the owners of the other lists, with one packet for each
owner (:mod:`salientpp.sampling.requests`). The round ends when the answers are there. The engine carries the packets
(:mod:`salientpp.engine.drawing.round_stages`).
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.part import PartGraph
from salientpp.ids import first_outside
from salientpp.ranks.partition_book import PartitionBook
from salientpp.sampling.growing_batch import GrowingBatch
from salientpp.sampling.held_lists import (
    Drawn,
    Group,
    HopDraw,
    Lists,
    Reads,
    Vertices,
    merged,
    merged_sources,
)
from salientpp.sampling.requests import Ends, ListRequest, pack_answer, unpack_answer
from salientpp.sampling.topology import ByType, DrawOptions, Mfg, Topology
from salientpp.store.directory.description import EdgeColumn
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.directory.part_topology import PartEdgeRows
from salientpp.store.narrow import Narrow
from salientpp.store.rows import RowSource
from salientpp.store.sent_formats import as_stored, encoded
from salientpp.store.tiers import NO_IDS

Out = TypeVar("Out")

#: Packets by the part that they go to, or that they come from.
Packets = Mapping[int, Tensor]

#: A batch that is drawn in rounds: it yields packets of requests, and is sent the packets of the answers. It begins when it is sent None.
Drawing = Generator[Packets, Packets | None, Mfg]


@dataclass(frozen=True, eq=False)
class _Places:
    """Tells which part holds the neighbour lists of some vertices, and their places there.

    Attributes:
        home: two tensors for the vertices whose lists this host holds: positions among the ``size`` vertices (None:
            all), and numbers in the host's part.
        remote: part -> the same two tensors for the vertices whose lists this part has.
    """

    size: int
    home: tuple[Tensor | None, Tensor]
    remote: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def reads(self) -> Reads:
        home = self.home[1].numel()
        return Reads(home, self.size - home)


class PartTopology(Topology):
    """Topology of a graph of which this host holds some parts.

    Args:
        graph: the lists of these parts.
        books: by vertex type, the partition book of the parts that hosts hold together.
        part_id: number of the part in ``books`` that this host holds. It may join several parts of the directory.
        edge_rows: for each relation, the attributes of the edges in ``graph``. Empty: no attributes.
        seeds_are_held: True if batches start only from vertices of this host's part. The first hop then needs no requests to other hosts.
    """

    def __init__(
        self,
        graph: PartGraph,
        books: Mapping[str | None, PartitionBook],
        part_id: int,
        edge_rows: Sequence[PartEdgeRows] = (),
        seeds_are_held: bool = True,
    ) -> None:
        self.part, self.part_id, self.seeds_are_held = graph, part_id, seeds_are_held
        self.num_vertices = dict(zip(graph.node_types, graph.num_vertices))
        self.edge_types = graph.edge_types
        self.node_time = {name: time for name, time in zip(graph.node_types, graph.node_time) if time is not None}
        self.clock = graph.clock
        self.books = [books[name] for name in graph.node_types]
        self.ends: list[Ends] = [(pieces[0].relation.source, pieces[0].relation.target) for pieces in graph.lists]
        self._stored = [
            [Lists(piece.relation, number, piece.first_edge) for piece in pieces]
            for number, pieces in enumerate(graph.lists)
        ]
        for of_relation, rows in zip(self._stored, edge_rows):
            attributes, first = as_stored(rows.rows), rows.first_edge
            of_relation[:] = [replace(lists, attributes=attributes, first_row=first) for lists in of_relation]
        self._lists = self._stored  # with attributes as they travel
        # For each relation, the first target of each piece.
        self._bounds = [torch.tensor([piece.first_target for piece in pieces], device="cpu") for pieces in graph.lists]
        self.has_weights = any(lists.relation.edge_weight is not None for of in self._lists for lists in of)
        self.has_edge_times = any(lists.relation.edge_time is not None for of in self._lists for lists in of)

    def is_of(self, books: Mapping[str | None, PartitionBook], part_id: int | None) -> bool:
        """Returns True if the topology was made for these parts and this part's host."""
        offsets = [books[name].offsets.tolist() for name in self.part.node_types]
        return part_id == self.part_id and offsets == [book.offsets.tolist() for book in self.books]

    def for_loader(self) -> PartTopology:
        """Returns a copy for one more loader, so that each loader sets its own ``seeds_are_held`` and formats of edge attributes."""
        found = copy.copy(self)
        found.seeds_are_held, found._lists = True, self._stored
        return found

    def send_edges_as(self, sent: Mapping[EdgeColumn, Narrow]) -> None:
        """Sets the formats in which attributes of edges are sent to other ranks. Called before the first batch is drawn."""
        self._lists = [
            [replace(lists, attributes=encoded(lists.attributes, type_, sent)) for lists in of_relation]
            for type_, of_relation in zip(self.edge_types, self._stored)
        ]

    @property
    def is_shared(self) -> bool:
        """True if other hosts hold some of the lists."""
        return any(book.num_parts > 1 for book in self.books)

    @property
    def nbytes(self) -> int:
        """Bytes of the lists of this host's part."""
        return self.part.nbytes

    def arrays(self) -> list[Tensor]:
        return [
            array
            for pieces in self.part.lists
            for piece in pieces
            for array in (piece.relation.indptr, piece.relation.indices)
        ]

    def num_rounds(self, num_hops: int, induced: bool) -> int:
        """Returns how many times a batch with ``num_hops`` hops exchanges requests and answers with other ranks."""
        return max(0, num_hops - self.seeds_are_held) + induced

    def sample(
        self,
        seeds: ByType,
        key: int,
        options: DrawOptions,
        seed_time: ByType | None = None,
        only_vertices: bool = False,
    ) -> Mfg:
        """Samples as :meth:`Topology.sample` says, if this host holds every list that the batch needs.

        Raises:
            RuntimeError: the batch needs a list of another part.
        """
        return drawn_alone(self.drawing(seeds, key, options, seed_time, only_vertices), f"part {self.part_id}")

    # --- for this rank ------------------------------------------------------------------------------------

    def drawing(
        self,
        seeds: ByType,
        key: int,
        options: DrawOptions,
        seed_time: ByType | None = None,
        only_vertices: bool = False,
    ) -> Drawing:
        """Samples as :meth:`Topology.sample` says. The generator yields requests to other ranks and is sent their answers.

        It yields exactly :meth:`num_rounds` times, so it yields empty requests if it needs nothing.

        Raises:
            RuntimeError: a seed is out of range, or ``seeds_are_held`` is wrong.
        """
        batch = GrowingBatch.begin(self, self.ends, seeds, options, seed_time)
        for hop in range(len(options.fanouts[0]) if options.fanouts else 0):
            fanouts = tuple(per_hop[hop] for per_hop in options.fanouts)
            last = options.last and self.clock is not None
            draw = HopDraw(key, hop, fanouts, options.replace, last, options.shared, options.window)
            request = ListRequest(draw, batch.frontier, not only_vertices, (), batch.num_trees)
            drawn = yield from self._round(request, batch, asks=hop > 0 or not self.seeds_are_held)
            batch.join(drawn)
        if options.induced and not only_vertices:
            yield from self.inducing(batch, key, options.window)
        return batch.finished(options, only_vertices)

    def _round(
        self, request: ListRequest, batch: GrowingBatch, asks: bool
    ) -> Generator[Packets, Packets, list[list[Group]]]:
        """Draws for all vertices of a request, from this host's lists and by one exchange. Returns, per relation, a group of edges per holder of lists."""
        places = [self._places(type_, of_type.ids) for type_, of_type in enumerate(request.vertices)]
        asked = self._asked(request, places, batch)
        if asked and not asks:
            raise RuntimeError(
                f"a batch starts from a vertex of part {next(iter(asked))}, but this host holds part {self.part_id}; give each rank seeds of its own part"
            )
        for type_ in {self.ends[number][1] for number in request.relations(self.ends)}:
            batch.reads = batch.reads.plus(places[type_].reads)
        groups: list[list[Group]] = [[] for _ in self.ends]
        for number in request.relations(self.ends):
            groups[number] = self._draws(request, number, places[self.ends[number][1]], with_rows=False)
        if asks:
            packets = {part: own.packed() for part, own in asked.items()}
            answers = yield packets
            batch.list_bytes += sum(packets[part].nbytes + answers[part].nbytes for part in packets)
            for part, own in asked.items():
                numbers = own.relations(self.ends)
                of_part = unpack_answer(answers[part], [self.attributes(number) for number in numbers], own.keeps_edges)
                for number, drawn in zip(numbers, of_part):
                    groups[number].append((places[self.ends[number][1]].remote[part][0], drawn))
                    if drawn.rows:
                        batch.arrived[number].append(drawn)
        return groups

    def _draws(self, request: ListRequest, number: int, places: _Places, with_rows: bool) -> list[Group]:
        """Draws in one relation from the lists that this host holds. ``with_rows`` adds attributes of the edges."""
        vertices, found = request.vertices[self.ends[number][1]], []
        for position, place, lists in self._held(number, places):
            of = vertices if position is None else vertices.at(position)
            found.append((position, self._read(request, lists, place, of, with_rows)))
        return found

    def _read(self, request: ListRequest, lists: Lists, place: Tensor, of: Vertices, with_rows: bool) -> Drawn:
        with_rows = with_rows and request.keeps_edges
        if not request.members:
            return lists.draw(place, of, request.hop, request.keeps_edges, with_rows)
        source = lists.relation.source
        size = self.part.num_vertices[source]
        return lists.edges_between(place, of, request.members[source], size, request.num_trees, with_rows)

    def _places(self, type_: int, ids: Tensor) -> _Places:
        book = self.books[type_]
        if book.num_parts == 1:
            return _Places(ids.numel(), (None, ids))
        position, slot, counts = ops.look_up(ids, book.offsets, self.part_id, [], [])
        remote: dict[int, tuple[Tensor, Tensor]] = {}
        sizes = counts.tolist()
        for part, at, of_part in zip(range(len(sizes)), position[-1].split(sizes), slot[-1].split(sizes)):
            if at.numel():
                remote[part] = at, of_part - book.range_of(part)[0]
        home = (None if position[0].numel() == ids.numel() else position[0]), slot[0]
        return _Places(ids.numel(), home, remote)

    def _held(self, number: int, places: _Places) -> Iterator[tuple[Tensor | None, Tensor, Lists]]:
        """Yields, for each set of arrays: positions of the vertices (None: all) whose lists it has, indices of these lists in it, and the arrays."""
        (position, row), bounds = places.home, self._bounds[number]
        if row.numel() and bounds.numel() == 1:
            yield position, row, self._lists[number][0]
        elif row.numel():
            ids = row + int(bounds[0])
            piece_of = torch.searchsorted(bounds, ids, right=True) - 1
            for piece, lists in enumerate(self._lists[number]):
                at = (piece_of == piece).nonzero().flatten()
                if at.numel():
                    yield at if position is None else position[at], ids[at] - int(bounds[piece]), lists

    def _asked(self, request: ListRequest, places: Sequence[_Places], batch: GrowingBatch) -> dict[int, ListRequest]:
        """Makes the requests to the owners of lists that this host does not hold: part -> request."""
        asked = {}
        for part in sorted({part for place in places for part in place.remote}):
            vertices = []
            for of_type, place in zip(request.vertices, places):
                position, ids = place.remote.get(part, (NO_IDS, NO_IDS))
                at = of_type.at(position)
                vertices.append(Vertices(ids, at.tree, at.now, at.since))
            own = replace(request, vertices=vertices)
            if request.members:
                sources = {self.ends[number][0] for number in own.relations(self.ends)}
                none = Vertices(NO_IDS, NO_IDS if batch.tree else None)
                members = [of if type_ in sources else none for type_, of in enumerate(request.members)]
                own = replace(own, members=members)
            if own.relations(self.ends):
                asked[part] = own
        return asked

    def attributes(self, number: int) -> Mapping[str, RowSource]:
        """Returns the attributes of a relation's edges that this host holds."""
        return self._lists[number][0].attributes

    def reading(self, ids: Tensor) -> Generator[Packets, Packets, tuple[Tensor, Tensor]]:
        """Reads the whole lists of distinct vertices, int64 [m], by one exchange; one vertex type only. Returns the lists' lengths and sources, int64."""
        request = ListRequest(HopDraw(0, 0, (-1,), False, False, False), [Vertices(ids)], False)
        batch = GrowingBatch.begin(self, self.ends, {}, DrawOptions([[]]), None)
        (drawn,) = yield from self._round(request, batch, asks=True)
        return merged_sources(ids.numel(), drawn)

    def inducing(
        self, batch: GrowingBatch, key: int, window: int | float | None = None
    ) -> Generator[Packets, Packets, None]:
        """Replaces the drawn edges by all edges between the batch's vertices. This takes one exchange with other ranks."""
        vertices = [batch.vertices(type_) for type_ in range(len(batch.n_id))]
        members = [Vertices(of_type.ids, of_type.tree) for of_type in vertices]
        hop = HopDraw(key, 0, (-1,) * len(self.ends), False, False, False, window)
        found = yield from self._round(ListRequest(hop, vertices, True, members, batch.num_trees), batch, asks=True)
        batch.replace_edges(found)

    # --- for other ranks ----------------------------------------------------------------------------------

    def answer(self, packet: Tensor) -> Tensor:
        """Draws what another rank requests, and returns the packet of the answer. Several threads may call it.

        Raises:
            RuntimeError: a vertex is not of this host's part, or the lists are damaged.
        """
        request = ListRequest.unpacked(packet, len(self.books))
        vertices, places = [], []
        for name, book, of_type in zip(self.part.node_types, self.books, request.vertices):
            begin, end = book.range_of(self.part_id)
            at = first_outside(of_type.ids, end - begin)
            if at is not None:
                words = "vertex" if name is None else f"{name!r} vertex"
                raise RuntimeError(
                    f"a rank asked for the neighbour list of {words} {int(of_type.ids[at]) + begin}, but part {self.part_id} owns [{begin}, {end}); start all "
                    "ranks on the same dataset directory"
                )
            since = self.since(of_type.now, request.hop.window)
            vertices.append(Vertices(of_type.ids + begin, of_type.tree, of_type.now, since))
            places.append(_Places(of_type.ids.numel(), (None, of_type.ids)))
        request = replace(request, vertices=vertices)
        answer = []
        for number in request.relations(self.ends):
            target = self.ends[number][1]
            drawn = merged(vertices[target].ids.numel(), self._draws(request, number, places[target], with_rows=True))
            if not request.members:
                self._check_sources(number, drawn.source)
            answer.append(drawn)
        return pack_answer(answer, request.keeps_edges)

    def _check_sources(self, number: int, source: Tensor) -> None:
        """Raises an error on the rank that holds damaged lists, not on the one that asked for draws from them."""
        size = self.part.num_vertices[self.ends[number][0]]
        at = first_outside(source, size)
        if at is not None:
            name = self.edge_types[number]
            raise RuntimeError(
                f"the lists {'' if name is None else f'of {name} '}of part {self.part_id} hold vertex {int(source[at])}, expected ids in [0, {size}); its file "
                "is damaged: `salientpp info --verify` finds the file"
            )


def drawn_alone(drawing: Generator[Packets, Packets | None, Out], holder: str = "this host") -> Out:
    """Runs a drawing to its end without other ranks, and returns its result.

    Args:
        holder: the holder of the lists, for errors.

    Raises:
        RuntimeError: the drawing needs a list of another part.
    """
    try:
        while not next(drawing):
            pass
    except StopIteration as end:
        return end.value
    raise RuntimeError(
        f"this batch needs neighbour lists that {holder} does not hold; only a loader that all ranks make together can draw it"
    )


def topology_of_part(part: PartitionedGraph, time_attr: str | None, weight_attr: str | None) -> PartTopology:
    """Returns the topology with the neighbour lists of one part of a dataset directory.

    Args:
        part: the opened part. Several parts on disk may be one part here, if one host holds them.
        time_attr, weight_attr: as in :meth:`salientpp.PartitionedGraph.part_graph`.
    """
    assert part.part_id is not None  # the view was made with a part
    graph, rows = part.part_graph(time_attr, weight_attr), part.part_edge_rows()
    return PartTopology(graph, part.books, part.part_id, [rows[name] for name in graph.edge_types])
