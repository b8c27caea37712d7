"""Draws from the neighbour lists that this host holds, for vertices in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.relation import Relation
from salientpp.store.rows import RowSource, take_rows
from salientpp.store.tiers import NO_IDS


class HopDraw(NamedTuple):
    """The numbers that fix the draws of one hop, beside the vertices.

    Attributes:
        key: key of the batch's draws.
        hop: number of the hop; 0 is next to the seeds.
        fanouts: neighbours per vertex, for each relation; -1 takes all.
        replace, last, shared: as in :class:`~salientpp.sampling.topology.DrawOptions`.
    """

    key: int
    hop: int
    fanouts: tuple[int, ...]
    replace: bool
    last: bool
    shared: bool


class Reads(NamedTuple):
    """Numbers of vertices whose lists were read for a batch of this rank, by the place of the lists: own part, copies, other ranks."""

    own: int = 0
    copied: int = 0
    remote: int = 0

    def plus(self, more: Reads) -> Reads:
        return Reads(*map(sum, zip(self, more)))


@dataclass(frozen=True, eq=False)
class Vertices:
    """Vertices of one type, int64 [m], whose lists are read.

    Attributes:
        ids: global ids.
        tree: the tree of each vertex; None if the batch has no trees.
        now: the time of each tree's seed; None without times.
    """

    ids: Tensor
    tree: Tensor | None = None
    now: Tensor | None = None

    def at(self, position: Tensor) -> Vertices:
        """Returns the vertices at these positions."""
        tree, now = (None if column is None else column[position] for column in (self.tree, self.now))
        return Vertices(self.ids[position], tree, now)

    @property
    def columns(self) -> list[Tensor]:
        """The tensors that are not None."""
        return [column for column in (self.ids, self.tree, self.now) if column is not None]


@dataclass(frozen=True, eq=False)
class Members(Vertices):
    """Vertices of a batch between which edges are searched. ``now`` is None."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """Edges that were drawn from the lists of m vertices, list after list.

    Attributes:
        count: int64 [m], edges of each list.
        source: int64 [e], global ids of the sources; for edges between members, their positions among the members.
        number: int64 [e], numbers of the edges in the whole graph. None: not wanted.
        first: int64 [m], number of the first edge of each whole list. None: not wanted.
        rows: attribute name -> rows [e, ...] of the edges, as far as the drawing rank does not hold them.
    """

    count: Tensor
    source: Tensor
    number: Tensor | None = None
    first: Tensor | None = None
    rows: Mapping[str, Tensor] = field(default_factory=dict)


#: The arrays of a :class:`~salientpp.graph.relation.Relation` with one entry per edge, as far as the lists of a part have them.
COLUMNS = ("indices", "edge_id", "edge_weight", "edge_time", "source_time")


@dataclass(frozen=True, eq=False)
class WholeLists:
    """The lists of m vertices of one relation, list after list.

    Attributes:
        first: int64 [m], number of the first edge of each list.
        columns: values [e] of the edges, for names in :data:`COLUMNS`. ``edge_id`` is the number of an edge minus that of the first edge of its list.
        rows: attribute name -> rows [e, ...] in the order of the edges' numbers.
    """

    first: Tensor
    columns: Mapping[str, Tensor]
    rows: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists of one relation in one set of arrays.

    Attributes:
        relation: the arrays. Their rows are called places.
        number: number of the relation in the graph.
        first_edge: number of the first edge of these arrays, if their edges are numbered consecutively.
        firsts: int64 [places], number of the first edge of each list, if edges are numbered consecutively only inside a list. None: ``first_edge`` counts.
        attributes: attribute name -> rows of the edges. Row i belongs to edge ``first_row + i``, or with ``firsts`` to edge i of these arrays.
        first_row: see ``attributes``.
    """

    relation: Relation
    number: int
    first_edge: int
    firsts: Tensor | None = None
    attributes: Mapping[str, RowSource] = field(default_factory=dict)
    first_row: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays and of the attributes in memory."""
        rows = sum(getattr(rows, "nbytes", 0) for rows in self.attributes.values())
        return self.relation.nbytes + rows + (0 if self.firsts is None else self.firsts.nbytes)

    def draw(self, place: Tensor, of: Vertices, hop: HopDraw, keeps_edges: bool, with_rows: bool) -> Drawn:
        """Draws from the lists at ``place``, int64 [m], for these vertices.

        Args:
            keeps_edges: False: only ``count`` and ``source`` are wanted.
            with_rows: add the attributes of the edges.
        """
        lists = self.relation
        time = lists.edge_time if lists.source_time is None else lists.source_time
        count, source, position = ops.draw_from_lists(
            lists.indptr, lists.indices, lists.edge_weight, None if of.now is None else time, place, of.ids, of.tree, of.now,
            hop.fanouts[self.number], hop.key, hop.hop, self.number, lists.source,
            replace=hop.replace, last=hop.last, shared=hop.shared,
        )  # fmt: skip
        return self._finished(place, count, source, position, with_rows) if keeps_edges else Drawn(count, source)

    def edges_between(
        self, place: Tensor, of: Vertices, members: Members, num_sources: int, num_trees: int, with_rows: bool
    ) -> Drawn:
        """Finds all edges of the lists at ``place`` whose source is a member of the same tree, and visible at that time."""
        lists = self.relation
        time = lists.edge_time if lists.source_time is None else lists.source_time
        timed = time is not None and of.now is not None
        count, row, position = ops.edges_between(
            lists.indptr, lists.indices, time if timed else None, place, of.tree, of.now if timed else None,
            members.ids, members.tree, num_sources, num_trees,
        )  # fmt: skip
        return self._finished(place, count, row, position, with_rows)

    def whole(self, place: Tensor) -> WholeLists:
        """Returns the lists at ``place``, int64 [m], with everything that draws from them need."""
        lists, begin = self.relation, self.relation.indptr[place]
        count = lists.indptr[place + 1] - begin
        position = (begin - (count.cumsum(0) - count)).repeat_interleave(count)
        position += torch.arange(position.numel(), device="cpu")
        columns = {name: array[position] for name in COLUMNS if (array := getattr(lists, name)) is not None}
        # The lists of a part number their edges consecutively, so an attribute's rows of one list are consecutive too.
        columns["edge_id"] = columns.get("edge_id", position) - begin.repeat_interleave(count)
        rows = {
            name: take_rows(rows, position + self.first_edge - self.first_row) for name, rows in self.attributes.items()
        }
        return WholeLists(begin + self.first_edge, columns, rows)

    def _finished(self, place: Tensor, count: Tensor, source: Tensor, position: Tensor, with_rows: bool) -> Drawn:
        lists = self.relation
        stored = position if lists.edge_id is None else lists.edge_id[position].to(torch.int64)
        begin = lists.indptr[place]
        if self.firsts is None:
            first, number = begin + self.first_edge, stored + self.first_edge
            row = number - self.first_row
        else:
            first, row = self.firsts[place], stored
            number = stored + (first - begin).repeat_interleave(count, output_size=stored.numel())
        rows = {name: take_rows(rows, row) for name, rows in self.attributes.items()} if with_rows else {}
        return Drawn(count, source, number, first, rows)


def nothing_drawn(size: int) -> Drawn:
    """Returns the draws of vertices that draw nothing."""
    return Drawn(torch.zeros(size, dtype=torch.int64, device="cpu"), NO_IDS, NO_IDS, NO_IDS)


def merged(size: int, groups: Sequence[tuple[Tensor | None, Drawn]]) -> Drawn:
    """Puts draws from several holders in the order of the vertices.

    Args:
        size: number of vertices.
        groups: positions of the vertices int64 [m], and their draws. None: all vertices in order, as the only group.

    Returns:
        The draws. They have ``number``, ``first`` and ``rows`` only if all groups have them.
    """
    if len(groups) == 1 and groups[0][0] is None:
        return groups[0][1]
    count = torch.zeros(size, dtype=torch.int64, device="cpu")
    for position, drawn in groups:
        count[position] = drawn.count
    start = count.cumsum(0) - count
    places = []
    for position, drawn in groups:
        before = start[position] - (drawn.count.cumsum(0) - drawn.count)
        at = before.repeat_interleave(drawn.count, output_size=drawn.source.numel())
        places.append(at.add_(torch.arange(at.numel(), device="cpu")))
    draws = [drawn for _, drawn in groups]
    source = _put_together([drawn.source for drawn in draws], places)
    assert source is not None  # all draws have sources
    names = draws[0].rows if all(drawn.rows.keys() == draws[0].rows.keys() for drawn in draws) else ()
    rows = {name: _put_together([drawn.rows[name] for drawn in draws], places) for name in names}
    positions = [NO_IDS if position is None else position for position, _ in groups]
    return Drawn(
        count,
        source,
        _put_together([drawn.number for drawn in draws], places),
        _put_together([drawn.first for drawn in draws], positions, size),
        {name: of_edges for name, of_edges in rows.items() if of_edges is not None},
    )


def _put_together(pieces: Sequence[Tensor | None], places: Sequence[Tensor], size: int | None = None) -> Tensor | None:
    """Returns one tensor with the rows of each piece at its places; None if a piece is missing. ``size`` None: the number of all rows."""
    there = [piece for piece in pieces if piece is not None]
    if len(there) < len(pieces):
        return None
    number = sum(piece.size(0) for piece in there) if size is None else size
    out = there[0].new_zeros((number, *there[0].shape[1:]))
    for piece, place in zip(there, places):
        out[place] = piece
    return out
