"""Draws from the neighbour lists that this host holds, for vertices in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.relation import Relation
from salientpp.store.rows import RowSource, take_rows
from salientpp.store.tiers import NO_IDS


class HopDraw(NamedTuple):
    """Key and options of the draws of one hop. With the same values, every rank draws the same neighbours for a vertex.

    Attributes:
        key: key of the batch's draws.
        hop: number of the hop; 0 is next to the seeds.
        fanouts: neighbours per vertex, for each relation; -1 takes all.
        replace, last, shared, window: as in :class:`~salientpp.sampling.topology.DrawOptions`.
    """

    key: int
    hop: int
    fanouts: tuple[int, ...]
    replace: bool
    last: bool
    shared: bool
    window: int | float | None = None


class Reads(NamedTuple):
    """Numbers of neighbour lists that were read for a batch, for statistics: ``own`` by this rank, ``remote`` by other ranks on its behalf."""

    own: int = 0
    remote: int = 0

    def plus(self, more: Reads) -> Reads:
        return Reads(*map(sum, zip(self, more)))


@dataclass(frozen=True, eq=False)
class Vertices:
    """Vertices of one type whose neighbour lists are read; tensors are int64 [m].

    Attributes:
        ids: global ids.
        tree: the tree of each vertex; None if the batch has no trees.
        now: the time of each tree's seed; None without times.
        since: the time at which each tree's time window begins; None without a window. No packet holds it,
            because it follows from ``now``.
    """

    ids: Tensor
    tree: Tensor | None = None
    now: Tensor | None = None
    since: Tensor | None = None

    def at(self, position: Tensor) -> Vertices:
        others = (self.tree, self.now, self.since)
        return Vertices(self.ids[position], *(None if column is None else column[position] for column in others))

    @property
    def columns(self) -> list[Tensor]:
        """The tensors by which a packet describes these vertices."""
        return [column for column in (self.ids, self.tree, self.now) if column is not None]


@dataclass(frozen=True, eq=False)
class Drawn:
    """Edges that were drawn from the neighbour lists of m vertices, one list after the other.

    Attributes:
        count: int64 [m], number of edges drawn from each list.
        source: [e], the sources of the edges, as global ids; from :meth:`Lists.edges_between`, as positions in its
            ``members``. The dtype is uint8, uint16, int32 or int64, as for ``offset``.
        offset: [e], numbers of the edges in the whole graph, minus the ``base`` of their list. None: not wanted.
        base: int64 [m], or [1] if all lists have the same base. None only without ``offset``.
        first: int64 [m], number of the first edge of each whole list. None: not wanted.
        rows: attribute name -> rows [e, ...] of the edges, if they were drawn for a rank that does not hold these rows.
    """

    count: Tensor
    source: Tensor
    offset: Tensor | None = None
    base: Tensor | None = None
    first: Tensor | None = None
    rows: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def number(self) -> Tensor:
        """Numbers of the edges in the whole graph, int64 [e]. Each access computes them."""
        return merged_numbers(self.count.numel(), [(None, self)])


#: Draws of one holder of lists for m of the vertices that draw: positions int64 [m] of these among all (None: all, in order), and the drawn edges.
Group = tuple[Tensor | None, Drawn]


@dataclass(frozen=True, eq=False)
class Lists:
    """Neighbour lists of one relation, in one set of arrays.

    Attributes:
        relation: the arrays. The index of a list in them is called its place.
        number: number of the relation in the graph.
        first_edge: number of the first edge of these arrays, whose edges are numbered consecutively.
        attributes: attribute name -> rows of the edges. Row i belongs to edge ``first_row + i``.
        first_row: see ``attributes``.
    """

    relation: Relation
    number: int
    first_edge: int
    attributes: Mapping[str, RowSource] = field(default_factory=dict)
    first_row: int = 0

    def draw(self, place: Tensor, of: Vertices, hop: HopDraw, keeps_edges: bool, with_rows: bool) -> Drawn:
        """Draws neighbours of some vertices from their lists.

        Args:
            place: int64 [m], the index in the arrays of each vertex's list.
            of: the m vertices.
            keeps_edges: False: only ``count`` and ``source`` are wanted.
            with_rows: add the attributes of the edges, and ``first``.
        """
        lists = self.relation
        time = lists.edge_time if lists.source_time is None else lists.source_time
        count, source, position = ops.draw_from_lists(
            lists.indptr, lists.indices, lists.edge_weight, None if of.now is None else time, place, of.ids, of.tree, of.now,
            hop.fanouts[self.number], hop.key, hop.hop, self.number, lists.source,
            replace=hop.replace, last=hop.last, shared=hop.shared, since=of.since,
        )  # fmt: skip
        return self._numbered(place, Drawn(count, source, position), with_rows) if keeps_edges else Drawn(count, source)

    def edges_between(
        self, place: Tensor, of: Vertices, members: Vertices, num_sources: int, num_trees: int, with_rows: bool
    ) -> Drawn:
        """Finds the edges of an induced subgraph: those in the lists at ``place`` whose source is among the ``members`` of the same tree.

        With times, it finds only edges that the tree's seed may see, by the time of the edge or of its source.
        """
        lists = self.relation
        time = lists.edge_time if lists.source_time is None else lists.source_time
        timed = time is not None and of.now is not None
        count, row, position = ops.edges_between(
            lists.indptr, lists.indices, time if timed else None, place, of.tree, of.now if timed else None,
            members.ids, members.tree, num_sources, num_trees, since=of.since if timed else None,
        )  # fmt: skip
        return self._numbered(place, Drawn(count, row, position), with_rows)

    @cached_property
    def _base(self) -> Tensor:
        return torch.tensor([self.first_edge], dtype=torch.int64, device="cpu")

    def _numbered(self, place: Tensor, drawn: Drawn, with_rows: bool) -> Drawn:
        """Converts the positions in ``drawn.offset``, which count in this object's arrays, to numbers of edges. ``with_rows`` adds their attributes."""
        position, ids = drawn.offset, self.relation.edge_id
        assert position is not None  # as the caller made it
        stored = position if ids is None else ids[position].to(torch.int64)
        if not with_rows:
            return Drawn(drawn.count, drawn.source, stored, self._base)
        shift = self.first_edge - self.first_row
        row = stored + shift if self.attributes and shift else stored
        rows = {name: take_rows(rows, row) for name, rows in self.attributes.items()}
        return Drawn(drawn.count, drawn.source, stored, self._base, self.relation.indptr[place] + self.first_edge, rows)


def merged_sources(size: int, groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """Merges the draws of some holders of lists, in the order of the ``size`` vertices that drew. Returns the count of each list and the sources, int64."""
    if len(groups) == 1 and groups[0][0] is None and groups[0][1].source.dtype == torch.int64:
        return groups[0][1].count, groups[0][1].source
    return _merged(size, groups, [drawn.source for _, drawn in groups])


def merged_numbers(size: int, groups: Sequence[Group]) -> Tensor:
    """Returns the numbers of the edges in the order of :func:`merged_sources`, int64 [e]. All draws must have ``offset``."""
    return _merged(size, groups, [_given(of.offset) for _, of in groups], [_given(of.base) for _, of in groups])[1]


def merged(size: int, groups: Sequence[Group]) -> Drawn:
    """Merges draws as :func:`merged_sources` does, with their attributes. The draws must hold the same fields, and attributes of the same names."""
    if len(groups) == 1 and groups[0][0] is None:
        return groups[0][1]
    count, source = merged_sources(size, groups)
    if not groups or groups[0][1].offset is None:
        return Drawn(count, source)
    first = torch.zeros(size, dtype=torch.int64, device="cpu")
    for position, drawn in groups:
        first[slice(None) if position is None else position] = _given(drawn.first)
    edges = torch.arange(source.numel(), device="cpu").split([drawn.source.numel() for _, drawn in groups])
    names = groups[0][1].rows
    order = _merged(size, groups, edges)[1] if names else NO_IDS
    rows = {name: torch.cat([drawn.rows[name] for _, drawn in groups])[order] for name in names}
    return Drawn(count, source, merged_numbers(size, groups), first.new_zeros(1), first, rows)


def _merged(
    size: int, groups: Sequence[Group], value: Sequence[Tensor], base: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    if not groups:
        return torch.zeros(size, dtype=torch.int64, device="cpu"), NO_IDS
    position, count = [position for position, _ in groups], [drawn.count for _, drawn in groups]
    return ops.merge_lists(size, position, count, value, base)


def _given(column: Tensor | None) -> Tensor:
    assert column is not None  # the callers ask only for columns that were drawn
    return column
