"""Adds up values over neighbour lists that the ranks of a job hold together. Each rank reads only its own lists.

Every rank sums for its own seeds. So K ranks sweep K different vectors at the same time. A rank sends each owner of lists the values of the targets of these
lists. The owner sums its lists, and returns the sums of the vertices that occur in them, some vertices at a time. A rank adds the owners' sums in a fixed
order. So the result is the same in every run.

Ranks that hold the same lists divide them. A rank needs memory for a few vectors over all vertices, and for its lists twice: by target and by source.

Every method is collective: all ranks call it, in the same order, with functions that mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat

import numpy as np
import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.part import PartGraph, PartLists
from salientpp.graph.relation import Relation
from salientpp.ids import first_outside
from salientpp.processes import lazy
from salientpp.ranks.comm import Comm
from salientpp.vip.list_sums import ListPiece, ListSums, Weigh, sum_lists, transpose

#: Number of edges whose ids are translated at once.
_CHUNK = 2**20

#: Number of vertices whose sums travel in one message; a multiple of 8. A sum takes 8 bytes.
_CHUNK_VERTICES = 2**16

#: What a rank is about to do, for errors.
_TASK = "sum over its lists"

_NOTHING = torch.empty(0, dtype=torch.float64, device="cpu")


@dataclass(frozen=True, eq=False)
class _Owned:
    """Describes the neighbour lists over which one rank sums, on behalf of all ranks.

    The vertices that occur in these lists are their sources. They are numbered from 0 over all vertex types, in ascending order of type and id.

    Attributes:
        targets: per vertex type the range of ids whose lists the rank sums; an empty slice for types that are no targets.
        bits: uint8, one bit for each vertex of all types: 1 if the vertex occurs in these lists.
        chunks: range of the source numbers in each run of :data:`_CHUNK_VERTICES` vertices.
    """

    targets: list[slice]
    bits: Tensor
    chunks: list[slice]

    @property
    def target_sizes(self) -> list[int]:
        return [ids.stop - ids.start for ids in self.targets]

    @property
    def chunk_sizes(self) -> list[int]:
        return [numbers.stop - numbers.start for numbers in self.chunks]

    def sources(self, chunk: int) -> Tensor:
        """Returns the sources in a chunk, ascending int64. Their ids count the vertices of all types, one type after another."""
        first = chunk * _CHUNK_VERTICES
        some = self.bits[first // 8 : (first + _CHUNK_VERTICES) // 8]
        return torch.from_numpy(np.unpackbits(some.numpy())).nonzero().flatten().add_(first)


@dataclass(frozen=True, eq=False)
class _Division:
    """Tells which neighbour lists this rank sums, and which the other ranks sum.

    Attributes:
        pieces: the lists of this rank.
        by_source: per piece its transpose, (indptr, targets), with sources numbered among this rank's sources of their type. If edges have weights: the
            piece's own lists, (indptr, sources), with sources numbered in the same way.
        num_sources: per vertex type the number of this rank's sources.
        owned: lists of each rank.
    """

    pieces: list[ListPiece]
    by_source: list[tuple[Tensor, Tensor]]
    num_sources: list[int]
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
    def pieces(self) -> Sequence[ListPiece]:  # type: ignore[override]  # read-only
        return self._division.pieces

    # --- preparation --------------------------------------------------------------------------------------

    @lazy
    def _division(self) -> _Division:
        """The division of the lists among the ranks, made on first use. Collective: an error on one rank is raised on every rank."""
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
        occurs = torch.zeros(sum(self.num_vertices), dtype=torch.bool, device="cpu")
        with comm.together(_TASK, RuntimeError):
            of_types = occurs.split(self.num_vertices)
            for piece in pieces:
                _mark_sources(piece, of_types[self.ends[piece.number][0]])
            by_source = [_by_source(piece, of_types[self.ends[piece.number][0]]) for piece in pieces]
        by_type = {target: of_relation for (_, target), of_relation in zip(self.ends, shares)}
        nothing = [(0, 0)] * comm.size
        targets = [by_type.get(type_, nothing) for type_ in range(len(self.node_types))]
        owned = [
            _Owned([slice(*of_type[rank]) for of_type in targets], *told)
            for rank, told in enumerate(self._told(occurs))
        ]
        num_sources = [int(of_type.count_nonzero()) for of_type in occurs.split(self.num_vertices)]
        return _Division(pieces, by_source, num_sources, owned)

    @lazy
    def _by_target(self) -> list[Tensor]:
        """Sources of each piece's edges, numbered among this rank's sources. Without weights, each list ascends."""
        return [
            lists[1] if piece.has_weights else transpose(*lists, piece.relation.indptr.numel() - 1)[1]
            for piece, lists in zip(self.pieces, self._division.by_source)
        ]

    def _told(self, occurs: Tensor) -> list[tuple[Tensor, list[slice]]]:
        """Tells all ranks this rank's sources, ``occurs`` bool [N]. Returns every rank's ``bits`` and ``chunks``."""
        sizes = [int(some.count_nonzero()) for some in occurs.split(_CHUNK_VERTICES)]
        bounds = [list(accumulate(of_rank, initial=0)) for of_rank in self._comm.gather_numbers(sizes)]
        bits = torch.from_numpy(np.packbits(occurs.numpy()))
        size, counts = self._comm.size, [bits.numel()] * self._comm.size
        told = self._comm.all_to_all(bits.repeat(size), counts, counts).wait().view(size, -1)
        return [(own, [slice(*pair) for pair in pairwise(ends)]) for own, ends in zip(told, bounds)]

    @property
    def _mine(self) -> _Owned:
        return self._division.owned[self._comm.rank]

    # --- sums ---------------------------------------------------------------------------------------------

    def to_sources(self, value: Sequence[Tensor], weigh: Weigh) -> list[Tensor]:
        mine = self._mine
        total = torch.zeros(sum(self.num_vertices), dtype=torch.float64, device="cpu")

        def request(owner: _Owned) -> Tensor | None:
            pieces = [of_type[ids] for of_type, ids in zip(value, owner.targets)]
            return _joined(pieces) if any(bool(piece.any()) for piece in pieces) else None

        def answer(asked: Tensor) -> Iterator[Tensor]:
            q = asked.split(mine.target_sizes)
            weighed = []
            for place, piece in enumerate(self.pieces):
                target = self.ends[piece.number][1]
                weighed.append(weigh(place, q[target][_within(piece, mine.targets[target])]))
            del asked, q
            if any(piece.has_weights for piece in self.pieces):
                whole = self._sums_of(weighed, slice(0, sum(self._division.num_sources)))
                yield from (whole[numbers] for numbers in mine.chunks)
            else:
                yield from (self._sums_of(weighed, numbers) for numbers in mine.chunks)

        sizes = [(sum(owner.target_sizes), owner.chunk_sizes) for owner in self._division.owned]
        for owner, chunk, answered in self._exchange(request, answer, sizes):
            total.index_add_(0, owner.sources(chunk), answered)
        return list(total.split(self.num_vertices))

    def _sums_of(self, weighed: Sequence[Tensor], numbers: slice) -> Tensor:
        """Returns, for some of this rank's sources, the sums over the edges to their targets, float64.

        Args:
            weighed: per piece the result of :data:`Weigh`.
            numbers: numbers of the sources, see :class:`_Owned`. All of them if edges have weights.
        """
        sums, by_source = (
            torch.zeros(numbers.stop - numbers.start, dtype=torch.float64, device="cpu"),
            self._division.by_source,
        )
        bounds = list(pairwise(accumulate(self._division.num_sources, initial=0)))
        for place, piece in enumerate(self.pieces):
            begin, end = bounds[self.ends[piece.number][0]]
            first, last = max(begin, numbers.start), min(end, numbers.stop)
            if first >= last:
                continue
            to, (indptr, ids) = sums[first - numbers.start : last - numbers.start], by_source[place]
            if piece.has_weights:
                to.index_add_(0, ids, weighed[place])
            else:
                indptr = indptr[first - begin : last - begin + 1]
                to += ops.sum_over_lists(indptr - indptr[0], ids[int(indptr[0]) : int(indptr[-1])], weighed[place])
        return sums

    def to_targets(self, value: Sequence[Tensor], scale: Sequence[Tensor], weigh: Weigh) -> list[Tensor]:
        total, mine, width = [torch.zeros_like(of_type) for of_type in value], self._mine, value[0].size(1)
        rows = _joined(value)

        def request(owner: _Owned) -> Tensor | None:
            pieces = [rows.index_select(0, owner.sources(chunk)) for chunk in range(len(owner.chunks))]
            if not any(bool(piece.any()) for piece in pieces):
                return None
            return torch.cat(
                [*(piece.flatten() for piece in pieces), *(q[ids] for q, ids in zip(scale, owner.targets))]
            )

        def answer(asked: Tensor) -> Iterator[Tensor]:
            sums = [torch.zeros(size, width, dtype=torch.float64, device="cpu") for size in mine.target_sizes]
            pieces = asked.split([*(width * size for size in self._division.num_sources), *mine.target_sizes])
            values, q = pieces[: len(value)], pieces[len(value) :]
            for place, piece in enumerate(self.pieces):
                source, target = self.ends[piece.number]
                own = _within(piece, mine.targets[target])
                weighed = weigh(place, q[target][own])
                sums[target][own] += sum_lists(piece, self._by_target[place], values[source].view(-1, width), weighed)
            yield torch.cat(sums).flatten()

        sizes = [
            (width * sum(owner.chunk_sizes) + sum(owner.target_sizes), [width * sum(owner.target_sizes)])
            for owner in self._division.owned
        ]
        for owner, _, answered in self._exchange(request, answer, sizes):
            pieces = answered.split([width * size for size in owner.target_sizes])
            for of_type, ids, more in zip(total, owner.targets, pieces):
                of_type[ids] += more.view(-1, width)
        return total

    def per_list(self, function: Callable[[ListPiece], Tensor]) -> list[Tensor]:
        found, comm = [], self._comm
        for number, (_, target) in enumerate(self.ends):
            values = [function(piece).to(torch.float64) for piece in self.pieces if piece.number == number]
            own = _joined([*values, _NOTHING])
            whole = torch.empty(self.num_vertices[target], dtype=torch.float64, device="cpu")
            for step in range(comm.size):
                to, of = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
                ids = self._division.owned[of].targets[target]
                counts = _at(to, own.numel(), comm.size), _at(of, ids.stop - ids.start, comm.size)
                whole[ids] = comm.all_to_all(own, *counts).wait()
            found.append(whole)
        return found

    def _exchange(
        self,
        request: Callable[[_Owned], Tensor | None],
        answer: Callable[[Tensor], Iterator[Tensor]],
        sizes: Sequence[tuple[int, Sequence[int]]],
    ) -> Iterator[tuple[_Owned, int, Tensor]]:
        """Lets every rank request sums from every owner of lists.

        In each of K rounds, a rank asks one owner and answers one rank. So all connections are busy, and the memory of a round is small.

        Args:
            request: makes the message to an owner, float64 [n]; None if all sums would be 0.
            answer: answers a message [n] with one or more tensors [m]. Their number is the same on all ranks.
            sizes: for each owner, n, and the list of the m of its answers.

        Yields:
            Each owner that this rank asked, the number of an answer from 0, and the answer, float64 [m].
        """
        comm = self._comm
        for step in range(comm.size):
            owner, asking = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
            asked = request(self._division.owned[owner])
            flags = [flag for (flag,) in comm.gather_numbers([int(asked is not None)])]
            if not any(flags):
                continue
            asks, answers = _at(owner, flags[comm.rank], comm.size), _at(asking, flags[asking], comm.size)
            (num_asked, own_sizes), (length, sizes_of_owner) = sizes[comm.rank], sizes[owner]
            send = _NOTHING if asked is None else asked
            came = [flag * num_asked for flag in answers]
            received = comm.all_to_all(send, [flag * length for flag in asks], came).wait()
            replies = answer(received) if flags[asking] else repeat(_NOTHING)
            del asked, send, received
            for chunk, (number, height) in enumerate(zip(own_sizes, sizes_of_owner)):
                counts = [flag * number for flag in answers], [flag * height for flag in asks]
                answered = comm.all_to_all(next(replies), *counts).wait()
                if flags[comm.rank]:
                    yield self._division.owned[owner], chunk, answered


def _at(place: int, number: int, size: int) -> list[int]:
    """Returns a list of length ``size`` that has ``number`` at ``place``, and zeros elsewhere."""
    return [number if other == place else 0 for other in range(size)]


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenates the pieces, without a copy if only one of them has entries."""
    filled = [piece for piece in pieces if piece.numel()]
    return filled[0] if len(filled) == 1 else torch.cat(list(pieces))


def _mark_sources(piece: ListPiece, occurs: Tensor) -> None:
    """Sets ``occurs`` bool [N] to True at the sources of these lists."""
    for ids in piece.relation.indices.split(_CHUNK):
        if first_outside(ids, occurs.numel()) is not None:
            raise RuntimeError(f"indices is corrupt: it must hold ids in [0, {occurs.numel()})")
        occurs[ids.to(torch.int64)] = True


def _by_source(piece: ListPiece, occurs: Tensor) -> tuple[Tensor, Tensor]:
    """Makes the entry of a piece in :attr:`_Division.by_source`. ``occurs`` bool [N]: True for the sources of all of this rank's lists."""
    relation, size = piece.relation, occurs.numel()
    if not piece.has_weights:
        indptr, targets = transpose(relation.indptr, relation.indices, size)
        # Lists between two sources are empty, so a list ends where the next source's list begins.
        return torch.cat([indptr[:-1][occurs], indptr[-1:]]), targets
    place = torch.cumsum(occurs, 0, dtype=torch.int32 if size < 2**31 else torch.int64).sub_(1)
    sources = torch.empty(relation.indices.shape, dtype=place.dtype, device="cpu")
    for to, ids in zip(sources.split(_CHUNK), relation.indices.split(_CHUNK)):
        to.copy_(place[ids.to(torch.int64)])
    return relation.indptr, sources


def _shares(lists: ListSums, spans: Sequence[Sequence[Sequence[int]]]) -> list[list[tuple[int, int]]]:
    """Divides the lists among the ranks that hold them. Returns, by relation and rank, a range of targets.

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
                f"the ranks together must hold the neighbour lists of all targets [0, {size}) of edge type {lists.edge_types[number]}, and the ranges of two "
                f"ranks must be equal or disjoint; got the ranges {held}; start ranks that serve all parts"
            )
        if shares[-1] != by_type.setdefault(target, shares[-1]):
            raise ValueError(
                f"a rank must hold the neighbour lists of the same {lists.node_types[target]!r} vertices for all edge types, but edge type "
                f"{lists.edge_types[number]} has the ranges {held}"
            )
    return shares


def _run(first: int, last: int, place: int, number: int) -> tuple[int, int]:
    """Divides the range [``first``, ``last``) evenly into ``number`` runs, and returns the bounds of run ``place``."""
    return first + place * (last - first) // number, first + (place + 1) * (last - first) // number


def _cut(number: int, lists: PartLists, first: int, last: int) -> ListPiece | None:
    """Returns the part of a relation's lists with targets in ``[first, last)``; None if it is empty."""
    begin = max(first - lists.first_target, 0)
    end = min(last - lists.first_target, lists.num_targets)
    if begin >= end:
        return None
    whole = lists.relation
    indptr = whole.indptr[begin : end + 1]
    edges = slice(int(indptr[0]), int(indptr[-1]))
    weight = None if whole.edge_weight is None else whole.edge_weight[edges]
    relation = Relation(whole.source, whole.target, indptr - indptr[0], whole.indices[edges], edge_weight=weight)
    return ListPiece(number, relation, lists.first_target + begin)


def _within(piece: ListPiece, targets: slice) -> slice:
    """Returns the range of a piece's targets as positions in the range ``targets``."""
    return slice(piece.targets.start - targets.start, piece.targets.stop - targets.start)
