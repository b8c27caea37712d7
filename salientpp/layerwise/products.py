"""Runs a layer that is a sum or a mean, over all vertices of a part.

The rank reads the rows of sources block by block, in their order, and adds them to the sums of their targets. A block holds rows of the rank's own
part, or rows of other parts that the rank fetches. :mod:`salientpp.layerwise.split` has the formula.

The rank holds the sums of a group of targets in memory while it reads all blocks. Without a limit on memory, all targets are one group. Each remote
row then travels once for each layer, however many batches would need it. With several groups, the rank reads all blocks once for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.mapped import releaser
from salientpp.layerwise.split import Split, completed, scaled
from salientpp.store.rows import RowSource, TensorRows, empty_rows, take_rows
from salientpp.store.target_lists import TargetLists

#: Most bytes of a block of rows that are converted or fetched, without a limit on memory.
BLOCK_BYTES = 2**28

#: Edges whose sources are looked up at once.
_CHUNK_EDGES = 2**22


@dataclass(frozen=True, eq=False)
class Places:
    """Edges into the vertices of a part. Each source is given as a place: 0 to n - 1 for the part's own vertices, then the vertices of ``halo``.

    Attributes:
        indptr: int64 [n + 1].
        place: [e], places of the sources.
        num_own: n.
        halo: int64 [h], ascending: ids of the vertices of other parts that edges come from.
    """

    indptr: Tensor
    place: RowSource
    num_own: int
    halo: Tensor

    @classmethod
    def of(cls, lists: TargetLists, ranges: Sequence[tuple[int, int]], num_vertices: int) -> Places:
        """Finds the places of the sources of all edges into the vertices of ``ranges``. If the part is the whole graph, the ids are the places."""
        indptr, begin = lists.indptr, lists.first_target
        num_own = indptr.numel() - 1
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        if num_own == num_vertices:
            return cls(indptr, lists.indices, num_own, nothing)
        seen = torch.zeros(num_vertices, dtype=torch.bool, device="cpu")
        spans = [(int(indptr[first]), int(indptr[last])) for first, last in ranges]
        pieces = [(a, min(a + _CHUNK_EDGES, last)) for first, last in spans for a in range(first, last, _CHUNK_EDGES)]
        for first, last in pieces:
            seen[_entries(lists.indices, first, last).to(torch.int64)] = True
        seen[begin : begin + num_own] = False
        halo = seen.nonzero().flatten()
        del seen
        place = torch.zeros(int(indptr[-1]), dtype=torch.int32, device="cpu")
        for first, last in pieces:
            source = _entries(lists.indices, first, last).to(torch.int64)
            is_own = (source >= begin) & (source < begin + num_own)
            place[first:last] = torch.where(is_own, source - begin, torch.searchsorted(halo, source) + num_own)
        return cls(indptr, TensorRows(place), num_own, halo)

    def into(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Returns the edges into the targets [first, last): row pointers int64 [m + 1], which begin at 0, and the places [e] of the sources."""
        indptr = self.indptr[first : last + 1]
        return indptr - indptr[0], _entries(self.place, int(indptr[0]), int(indptr[-1]))


def _entries(rows: RowSource, first: int, last: int) -> Tensor:
    if isinstance(rows, TensorRows):
        return rows.tensor[first:last]
    return take_rows(rows, torch.arange(first, last, device="cpu"))


@dataclass(frozen=True, eq=False)
class Product:
    """Computes a layer that is a sum or a mean over the vertices of a part: sends rows, adds them up by target, and finishes targets.

    Attributes:
        split: the layer in three steps.
        places: the edges.
        rows: present rows of the part, [n, ...].
        dtype: dtype in which the layer gets ``rows``.
        roots: 1 / sqrt(degree) of the vertex at each place, if ``split`` divides by degrees.
        ranges: targets that this rank computes, as ranges of the part's vertices.
        memory: most bytes of sums and of blocks of rows together; None: no limit.
        fetch: function of the rows that this part's vertices send, and of ids int64 [h] of other parts. It returns the rows [h, ...] that the vertices with
            these ids send. Collective: every rank calls it as often as the others.
        allocate: function from a shape and a dtype to a new tensor, in memory or over a file.
    """

    split: Split
    places: Places
    rows: RowSource
    dtype: torch.dtype
    roots: Tensor | None
    ranges: Sequence[tuple[int, int]]
    memory: int | None
    fetch: Callable[[RowSource, Tensor], Tensor]
    allocate: Callable[[Sequence[int], torch.dtype], Tensor]

    def num_fetches(self) -> int:
        """Returns the number of blocks of remote rows that this rank needs. Ranks that need fewer than others fetch empty blocks."""
        return len(self.groups) * len(self._halo_blocks)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of rows that are read for each group of targets."""
        return -(-self.places.num_own // self._block_rows) + len(self._halo_blocks)

    def run(self, num_fetches: int, store: Callable[[int, int, Tensor], None]) -> None:
        """Computes the next rows and calls ``store(begin, end, rows)`` for each range of targets. Collective.

        ``num_fetches``: the number of fetches of the rank with the most. Every rank fetches that often.
        """
        fetched = 0
        sent = self._sent()
        for group in self.groups:
            sums: list[Tensor | None] = [None] * len(group)
            for at, messages in self._own_blocks(sent):
                self._add(group, sums, at, messages)
            for first, last in self._halo_blocks:
                at = self.places.num_own + first
                self._add(group, sums, at, self._messages(self.fetch(sent, self.places.halo[first:last]), at))
                fetched += 1
            for number, (first, last) in enumerate(group):
                store(first, last, self._finish(sent, first, last, sums[number]))
                sums[number] = None
        for _ in range(fetched, num_fetches):
            self.fetch(sent, self.places.halo[:0])

    def _sent(self) -> RowSource:
        """Returns what the part's own vertices send to other ranks, with a row for each: their rows, or messages that it computes from them."""
        if not self.split.sends_messages:
            return self.rows
        like = self._like
        sent = self.allocate((self.places.num_own, *like.shape[1:]), like.dtype)
        for first in range(0, self.places.num_own, self._block_rows):
            last = min(first + self._block_rows, self.places.num_own)
            sent[first:last] = self.split.messages(self._read(self.rows, first, last))
        return TensorRows(sent)

    # --- groups and blocks ----------------------------------------------------------------------------------

    @property
    def groups(self) -> list[list[tuple[int, int]]]:
        """Groups of ranges of targets, so that the sums of one group fit into memory together."""
        most = self._most_rows(2, self.sent_bytes)
        groups: list[list[tuple[int, int]]] = []
        size = 0
        for first, last in self.ranges:
            if not groups or (most is not None and size + last - first > most):
                groups.append([])
                size = 0
            groups[-1].append((first, last))
            size += last - first
        return groups

    @property
    def _halo_blocks(self) -> list[tuple[int, int]]:
        size, total = self._block_rows, self.places.halo.numel()
        return [(first, min(first + size, total)) for first in range(0, total, size)]

    @property
    def _block_rows(self) -> int:
        """Number of rows of a block, at most those of the part. It takes a quarter of ``memory``: sums take half, and a block may need a second copy."""
        most = self._most_rows(4, self.row_bytes)
        return max(1, min(self.places.num_own, BLOCK_BYTES // self.row_bytes if most is None else most))

    @property
    def _like(self) -> Tensor:
        """Sample message [1, ...], which shows the dtype and the shape of messages."""
        return self.split.messages(empty_rows(self.rows, 1).zero_().to(self.dtype))

    @property
    def sent_bytes(self) -> int:
        """Bytes of a row that a vertex sends to other ranks: a message, or its row in the layer's dtype."""
        return max(1, self._like.nbytes) if self.split.sends_messages else self.row_bytes

    def _most_rows(self, share: int, width: int) -> int | None:
        return None if self.memory is None else max(1, self.memory // share // width)

    @property
    def row_bytes(self) -> int:
        """Bytes of one of the layer's input rows, in the layer's dtype."""
        return max(1, empty_rows(self.rows, 1).to(self.dtype).nbytes)

    def _own_blocks(self, sent: RowSource) -> Iterator[tuple[int, Tensor]]:
        """Yields blocks of the messages of the part's own vertices, with the place of the first."""
        total = self.places.num_own
        if self.memory is None and isinstance(sent, TensorRows) and self._is_whole(sent):
            if total:
                yield 0, sent.tensor
            return
        for first in range(0, total, self._block_rows):
            last = min(first + self._block_rows, total)
            yield first, self._messages(self._read(sent, first, last), first)

    def _is_whole(self, sent: TensorRows) -> bool:
        """True if the rows ``sent`` are themselves the messages to sum, so that nothing must be computed from them."""
        if self.split.sends_messages:
            return self.roots is None
        return self.roots is None and sent.dtype == self.dtype and self.split.keeps(torch.zeros_like(sent.tensor[:1]))

    def _read(self, source: RowSource, first: int, last: int) -> Tensor:
        """Returns a copy of the part's rows [first, last), in the layer's dtype. Pages of a mapped file are released."""
        piece = _entries(source, first, last)
        if not isinstance(source, TensorRows):
            return piece.to(self.dtype)
        copy = piece.to(self.dtype, copy=True)
        if self.memory is not None:
            releaser(piece)()
        return copy

    def _messages(self, sent: Tensor, at: int) -> Tensor:
        """Computes the messages to sum, from what the sources at the places ``at``, ``at + 1``, ... have sent. Divides by degrees if needed."""
        messages = sent if self.split.sends_messages else self.split.messages(sent.to(self.dtype))
        return messages.contiguous() if self.roots is None else scaled(messages, self.roots[at : at + messages.size(0)])

    # --- sums -----------------------------------------------------------------------------------------------

    def _add(self, group: Sequence[tuple[int, int]], sums: list[Tensor | None], at: int, messages: Tensor) -> None:
        """Adds the messages of the sources at the places ``at``, ``at + 1``, ... to the sums of their targets."""
        end = at + messages.size(0)
        holds_all = at == 0 and end == self.places.num_own + self.places.halo.numel()
        for number, (first, last) in enumerate(group):
            indptr, place = self.places.into(first, last)
            if not holds_all:
                indptr, place = _within(indptr, place, at, end)
            before = sums[number]
            if before is not None and not place.numel():
                continue
            added = ops.sum_listed_rows(indptr, place, None, messages, None)
            sums[number] = added if before is None else before.add_(added)

    def _finish(self, sent: RowSource, first: int, last: int, sums: Tensor | None) -> Tensor:
        assert sums is not None  # a part with targets has at least one block of its own rows
        rows = _entries(self.rows, first, last).to(self.dtype)
        kind = self.split.kind
        needs_own = kind is not None and kind.adds_loops
        own = self._messages(_entries(sent, first, last), first) if needs_own else None
        indptr, place = self.places.into(first, last)
        at = torch.arange(first, last, device="cpu")
        sums = completed(self.split, sums, own, at, indptr, place, self.roots)
        return self.split.finish(rows, sums)


def _within(indptr: Tensor, place: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Keeps the edges whose source is in the block of places [begin, end). Returns row pointers, and places counted from ``begin``."""
    is_inside = (place >= begin) & (place < end)
    before = torch.zeros(place.numel() + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(is_inside, 0, out=before[1:])
    return before[indptr], place[is_inside] - begin
