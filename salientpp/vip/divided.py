"""Sums over neighbour lists that the ranks of a job hold together: each rank reads only its own lists.

Every rank sums for its own seeds. So K ranks sweep K different vectors at the same time. A rank sends each owner of lists the values of the targets of these
lists. The owner sums its lists, and returns the sums of the vertices that occur in them. A rank adds the owners' sums in a fixed order. So the result is the
same in every run.

Ranks that hold the same lists divide them. A rank keeps some vectors of all vertices. It keeps its lists twice: as they are, and by source.

Every method is collective: all ranks call it, in the same order, with functions that mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.part import PartGraph, PartLists
from salientpp.graph.relation import Relation
from salientpp.ids import first_outside
from salientpp.processes import lazy
from salientpp.ranks.comm import Comm
from salientpp.vip.list_sums import ListSums, Piece, Weigh, sum_lists, transpose

#: Number of edges whose ids are translated at once.
_CHUNK = 2**20

#: What a rank is about to do, for errors.
_TASK = "sum over its lists"

_NOTHING = torch.empty(0, dtype=torch.float64, device="cpu")


@dataclass(frozen=True, eq=False)
class _Owned:
    """Lists that one rank sums for all ranks.

    Attributes:
        targets: per vertex type the range of ids whose lists it sums; an empty slice for types that are no targets.
        sources: per vertex type the ids that occur in its lists, ascending int32 or int64.
    """

    targets: list[slice]
    sources: list[Tensor]

    @property
    def target_sizes(self) -> list[int]:
        return [ids.stop - ids.start for ids in self.targets]

    @property
    def source_sizes(self) -> list[int]:
        return [ids.numel() for ids in self.sources]


@dataclass(frozen=True, eq=False)
class _Division:
    """Lists that this rank sums, and those that the others sum.

    Attributes:
        pieces: the lists of this rank.
        by_source: per piece its transpose, with sources numbered in the order of ``owned``. If edges have weights: the piece's lists, with the
            same numbers.
        owned: lists of each rank.
    """

    pieces: list[Piece]
    by_source: list[tuple[Tensor, Tensor]]
    owned: list[_Owned]


class DividedListSums(ListSums):
    """Sums over the lists of a graph whose topology is divided among the ranks of ``comm``.

    The lists are divided and arranged when they are first needed.

    Args:
        graph: the lists that this rank holds. Several ranks may hold the same lists.

    Raises:
        ValueError: when the lists are divided: the ranks do not hold all lists, or two ranks hold ranges that overlap and differ.
        RuntimeError: when the lists are divided: a rank has a source that is out of range.
    """

    def __init__(self, comm: Comm, graph: PartGraph) -> None:
        self._comm, self._graph = comm, graph
        self.node_types, self.num_vertices, self.edge_types = graph.node_types, graph.num_vertices, graph.edge_types
        self.ends = tuple((lists[0].relation.source, lists[0].relation.target) for lists in graph.lists)

    @property
    def pieces(self) -> Sequence[Piece]:  # type: ignore[override]  # read-only
        return self._division.pieces

    # --- preparation --------------------------------------------------------------------------------------

    @lazy
    def _division(self) -> _Division:
        """The lists of all ranks. Collective: an error on one rank is raised on every rank."""
        comm, graph = self._comm, self._graph
        spans = [[lists[0].first_target, lists[-1].first_target + lists[-1].num_targets] for lists in graph.lists]
        facts = comm.gather_facts({"lists": spans}, task=_TASK)
        shares = _shares(self, [fact["lists"] for fact in facts])
        pieces = [
            piece
            for number, lists in enumerate(graph.lists)
            for each in lists
            if (piece := _cut(number, each, *shares[number][comm.rank])) is not None
        ]
        sources: list[Tensor] = []
        by_source: list[tuple[Tensor, Tensor]] = []
        error: Exception | None = None
        try:
            places, sources = map(
                list, zip(*(self._used_sources(pieces, type_) for type_ in range(len(self.node_types))))
            )
            by_source = [_by_source(piece, places[self.ends[piece.number][0]]) for piece in pieces]
            del places
        except Exception as raised:
            error = raised
        try:
            comm.gather_facts({}, error, _TASK, RuntimeError)
        finally:
            error = None  # otherwise this frame and the traceback would reference each other
        by_type = {target: of_relation for (_, target), of_relation in zip(self.ends, shares)}
        nothing = [(0, 0)] * comm.size
        targets = [by_type.get(type_, nothing) for type_ in range(len(self.node_types))]
        owned = [
            _Owned([slice(*of_type[rank]) for of_type in targets], told)
            for rank, told in enumerate(self._told(sources))
        ]
        return _Division(pieces, by_source, owned)

    def _used_sources(self, pieces: Sequence[Piece], type_: int) -> tuple[Tensor, Tensor]:
        """Returns a table from the ids of a type to places among the ids that these lists contain, [N], and these ids ascending."""
        size = self.num_vertices[type_]
        dtype = torch.int32 if size < 2**31 else torch.int64
        occurs = torch.zeros(size, dtype=torch.bool, device="cpu")
        for piece in pieces:
            if self.ends[piece.number][0] == type_:
                for ids in piece.relation.indices.split(_CHUNK):
                    if first_outside(ids, size) is not None:
                        raise RuntimeError(f"indices is corrupt: it must hold ids in [0, {size})")
                    occurs[ids.to(torch.int64)] = True
        return torch.cumsum(occurs, 0, dtype=dtype).sub_(1), occurs.nonzero().flatten().to(dtype)

    @lazy
    def _by_target(self) -> list[Tensor]:
        """Sources of each piece's edges, numbered among this rank's sources. Without weights, each list ascends."""
        return [
            lists[1] if piece.has_weights else transpose(*lists, piece.relation.indptr.numel() - 1)[1]
            for piece, lists in zip(self.pieces, self._division.by_source)
        ]

    def _told(self, sources: list[Tensor]) -> list[list[Tensor]]:
        """Returns the ``sources`` of every rank."""
        sizes = self._comm.gather_numbers([ids.numel() for ids in sources])
        found: list[list[Tensor]] = [[] for _ in sizes]
        for type_, ids in enumerate(sources):
            counts = [of_rank[type_] for of_rank in sizes]
            send = ids.repeat(self._comm.size)
            pieces = self._comm.all_to_all(send, [ids.numel()] * self._comm.size, counts).wait().split(counts)
            for rank, piece in enumerate(pieces):
                found[rank].append(piece)
        return found

    @property
    def _mine(self) -> _Owned:
        return self._division.owned[self._comm.rank]

    # --- sums ---------------------------------------------------------------------------------------------

    def to_sources(self, value: Sequence[Tensor], weigh: Weigh) -> list[Tensor]:
        total, by_source, mine = self.zeros(), self._division.by_source, self._mine

        def request(owner: _Owned) -> Tensor | None:
            pieces = [of_type[ids] for of_type, ids in zip(value, owner.targets)]
            return torch.cat(pieces) if any(bool(piece.any()) for piece in pieces) else None

        def answer(asked: Tensor) -> Tensor:
            q = asked.split(mine.target_sizes)
            sums = [torch.zeros(size, dtype=torch.float64, device="cpu") for size in mine.source_sizes]
            for place, piece in enumerate(self.pieces):
                source, target = self.ends[piece.number]
                weighed = weigh(place, q[target][_within(piece, mine.targets[target])])
                if piece.has_weights:
                    sums[source].index_add_(0, by_source[place][1], weighed)
                else:
                    sums[source] += ops.sum_over_lists(*by_source[place], weighed)
            return torch.cat(sums)

        sizes = [(sum(owner.target_sizes), sum(owner.source_sizes)) for owner in self._division.owned]
        for owner, answered in self._exchange(request, answer, sizes):
            for of_type, ids, more in zip(total, owner.sources, answered.split(owner.source_sizes)):
                of_type.index_add_(0, ids, more)
        return total

    def to_targets(self, value: Sequence[Tensor], scale: Sequence[Tensor], weigh: Weigh) -> list[Tensor]:
        total, mine, width = [torch.zeros_like(of_type) for of_type in value], self._mine, value[0].size(1)

        def request(owner: _Owned) -> Tensor | None:
            pieces = [of_type.index_select(0, ids) for of_type, ids in zip(value, owner.sources)]
            if not any(bool(piece.any()) for piece in pieces):
                return None
            return torch.cat(
                [*(piece.flatten() for piece in pieces), *(q[ids] for q, ids in zip(scale, owner.targets))]
            )

        def answer(asked: Tensor) -> Tensor:
            sums = [torch.zeros(size, width, dtype=torch.float64, device="cpu") for size in mine.target_sizes]
            pieces = asked.split([*(width * size for size in mine.source_sizes), *mine.target_sizes])
            values, q = pieces[: len(value)], pieces[len(value) :]
            for place, piece in enumerate(self.pieces):
                source, target = self.ends[piece.number]
                rows = _within(piece, mine.targets[target])
                weighed = weigh(place, q[target][rows])
                sums[target][rows] += sum_lists(piece, self._by_target[place], values[source].view(-1, width), weighed)
            return torch.cat(sums).flatten()

        sizes = [
            (width * sum(owner.source_sizes) + sum(owner.target_sizes), width * sum(owner.target_sizes))
            for owner in self._division.owned
        ]
        for owner, answered in self._exchange(request, answer, sizes):
            pieces = answered.split([width * size for size in owner.target_sizes])
            for of_type, ids, more in zip(total, owner.targets, pieces):
                of_type[ids] += more.view(-1, width)
        return total

    def per_list(self, function: Callable[[Piece], Tensor]) -> list[Tensor]:
        found = []
        for number, (_, target) in enumerate(self.ends):
            values = [function(piece).to(torch.float64) for piece in self.pieces if piece.number == number]
            own = torch.cat([_NOTHING, *values])
            counts = [owner.target_sizes[target] for owner in self._division.owned]
            send = own.repeat(self._comm.size)
            received = self._comm.all_to_all(send, [own.numel()] * self._comm.size, counts).wait().split(counts)
            whole = torch.empty(self.num_vertices[target], dtype=torch.float64, device="cpu")
            for owner, piece in zip(self._division.owned, received):
                whole[owner.targets[target]] = piece
            found.append(whole)
        return found

    def _exchange(
        self,
        request: Callable[[_Owned], Tensor | None],
        answer: Callable[[Tensor], Tensor],
        sizes: Sequence[tuple[int, int]],
    ) -> Iterator[tuple[_Owned, Tensor]]:
        """Lets every rank ask every owner.

        In each of K rounds, a rank asks one owner and answers one rank. So all connections are busy, and the memory of a round is small.

        Args:
            request: float64 [n] that this rank asks an owner; None if all sums would be 0.
            answer: answers a request [n] with [m].
            sizes: n and m for each owner.

        Yields:
            Each owner that this rank asked, and its answer, float64 [m].
        """
        comm = self._comm
        for step in range(comm.size):
            owner, asking = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
            asked = request(self._division.owned[owner])
            flags = [flag for (flag,) in comm.gather_numbers([int(asked is not None)])]
            if not any(flags):
                continue
            asks, answers = _at(owner, flags[comm.rank], comm.size), _at(asking, flags[asking], comm.size)
            (num_asked, num_answered), (length, height) = sizes[comm.rank], sizes[owner]
            send = _NOTHING if asked is None else asked
            received = comm.all_to_all(send, [flag * length for flag in asks], [flag * num_asked for flag in answers])
            reply = answer(received.wait()) if flags[asking] else _NOTHING
            del asked, send, received
            answered = comm.all_to_all(
                reply, [flag * num_answered for flag in answers], [flag * height for flag in asks]
            )
            if flags[comm.rank]:
                yield self._division.owned[owner], answered.wait()
            else:
                answered.wait()


def _at(place: int, number: int, size: int) -> list[int]:
    """Returns a list of ``size`` zeros, but with ``number`` at ``place``."""
    return [number if other == place else 0 for other in range(size)]


def _by_source(piece: Piece, place: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an entry of :attr:`_Division.by_source`. ``place`` [N] has the numbers of the sources."""
    relation = piece.relation
    sources = torch.empty(relation.indices.shape, dtype=place.dtype, device="cpu")
    for to, ids in zip(sources.split(_CHUNK), relation.indices.split(_CHUNK)):
        to.copy_(place[ids.to(torch.int64)])
    if piece.has_weights:
        return relation.indptr, sources
    return transpose(relation.indptr, sources, int(place[-1]) + 1 if place.numel() else 0)


def _shares(lists: ListSums, spans: Sequence[Sequence[Sequence[int]]]) -> list[list[tuple[int, int]]]:
    """Returns, by relation and rank, the range of targets whose lists the rank sums. Ranks that hold the same range divide it.

    Args:
        spans: by rank and relation, the range of targets whose lists the rank holds.
    """
    shares: list[list[tuple[int, int]]] = []
    by_type: dict[int, list[tuple[int, int]]] = {}
    for number, (_, target) in enumerate(lists.ends):
        held = [(of_rank[number][0], of_rank[number][1]) for of_rank in spans]
        same = {span: [rank for rank, other in enumerate(held) if other == span] for span in held}
        shares.append([_run(*span, same[span].index(rank), len(same[span])) for rank, span in enumerate(held)])
        reached, size = 0, lists.num_vertices[target]
        for first, last in sorted(share for share in shares[-1] if share[0] < share[1]):
            reached = last if first == reached else -1
        if reached != size:
            raise ValueError(
                f"the ranks must hold the lists of all targets [0, {size}) of edge type {lists.edge_types[number]}, with equal or separate ranges; "
                f"got the ranges {held}; start ranks that serve all parts"
            )
        if shares[-1] != by_type.setdefault(target, shares[-1]):
            raise ValueError(
                f"a rank must hold the lists of the same {lists.node_types[target]!r} vertices for all edge types; edge type {lists.edge_types[number]} has "
                f"the ranges {held}"
            )
    return shares


def _run(first: int, last: int, place: int, number: int) -> tuple[int, int]:
    """Returns run ``place`` of the ``number`` runs, as even as possible, into which a range is divided."""
    return first + place * (last - first) // number, first + (place + 1) * (last - first) // number


def _cut(number: int, lists: PartLists, first: int, last: int) -> Piece | None:
    """Returns the lists of targets in ``[first, last)``; None if there are none."""
    begin = max(first - lists.first_target, 0)
    end = min(last - lists.first_target, lists.num_targets)
    if begin >= end:
        return None
    whole = lists.relation
    indptr = whole.indptr[begin : end + 1]
    edges = slice(int(indptr[0]), int(indptr[-1]))
    weight = None if whole.edge_weight is None else whole.edge_weight[edges]
    relation = Relation(whole.source, whole.target, indptr - indptr[0], whole.indices[edges], edge_weight=weight)
    return Piece(number, relation, lists.first_target + begin)


def _within(piece: Piece, targets: slice) -> slice:
    """Returns the places of a piece's targets among ``targets``."""
    return slice(piece.targets.start - targets.start, piece.targets.stop - targets.start)
