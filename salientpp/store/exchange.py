"""Gets rows that other ranks own.

Three all-to-alls a batch, however many types of vertices and attributes there are: **counts** (how many rows of each type I want from
you), **ids** (which), **rows**. Each is started by one function and finished by another, so that the pipeline can do other work in between.

With the counts travels one more number: whether the sender has left the epoch. A rank with fewer batches, or one
that broke off, goes on answering the others with requests for nothing, and all stop together once all have left.
That is why no rank waits for one that has finished.

Parts are here **row parts**: what lies together at a host. With several ranks per row part, a request for part p goes to the rank of p that has the
asker's place inside its part, which spreads the load (:mod:`salientpp.ranks.placement`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from salientpp.ids import first_outside
from salientpp.ops import bytes_of
from salientpp.ranks.comm import Comm, Pending
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ranks.placement import Placement
from salientpp.store.buffers import BufferPool
from salientpp.store.cache import FeatureCache
from salientpp.store.narrow import Column
from salientpp.store.rows import RowSource, empty_rows, take_rows
from salientpp.store.tiers import NO_IDS, IdSet

#: The cache is filled by requests for about this many bytes of rows, so that filling needs little memory.
FILL_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Message:
    """What ranks of a graph with one type of vertices ask one another for beside rows.

    Attributes:
        name: stands where types have their names, so it must be none of a type.
        has_ids: it holds global ids of vertices that the asked part owns; otherwise words, which arrive as they were sent.
    """

    name: str
    has_ids: bool


@dataclass
class Traffic:
    """What this rank exchanged with others, in bytes of all kinds and in feature rows.

    ``row_bytes_received`` is by vertex type, of rows alone.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    rows_received: int = 0
    row_bytes_received: Counter[str | None] = field(default_factory=Counter)


@dataclass(frozen=True, eq=False)
class PendingCounts:
    wanted: list[list[int]]
    pending: Pending


@dataclass(frozen=True, eq=False)
class Counts:
    """By rank and vertex type, rows wanted from each and asked for by each; and whether every rank has left the epoch."""

    wanted: list[list[int]]
    asked: list[list[int]]
    all_left: bool


@dataclass(frozen=True, eq=False)
class PendingRows:
    """Rows on their way: those of one column as they are, or those of several as bytes, by rank and then by column.

    Attributes:
        like: by column, an empty tensor of its dtype and the shape of its rows.
        sizes: rows by rank, and by column in that order.
    """

    pending: Pending | None
    like: Mapping[Column, Tensor]
    sizes: list[list[int]]

    def wait(self) -> dict[Column, Tensor]:
        """The rows wanted of each column, by rank."""
        if self.pending is None:
            return {}
        arrived = self.pending.wait()
        if len(self.like) == 1:
            return dict.fromkeys(self.like, arrived)
        widths = [row_bytes(like) for like in self.like.values()]
        pieces = arrived.split([size * width for of_rank in self.sizes for size, width in zip(of_rank, widths)])
        return {
            column: torch.cat(pieces[place :: len(widths)]).view(like.dtype).view(-1, *like.shape[1:])
            if widths[place]
            else like.new_empty((sum(of_rank[place] for of_rank in self.sizes), *like.shape[1:]))
            for place, (column, like) in enumerate(self.like.items())
        }


class Exchange:
    """Rows by request between the ranks of a group.

    Args:
        comm: the ranks that serve the parts.
        books: by vertex type, which row part owns what. A type that every rank has whole is one of a single part, and its rows never travel.
        placement: of this rank.
        messages: what is asked for beside rows, the same on all ranks.

    Attributes:
        types: those whose rows may travel, and the names of the messages.
        wire_dtype: of ids and words in a request.
        buffers: where the memory of rows that arrive comes from.
    """

    def __init__(
        self,
        comm: Comm,
        books: Mapping[str | None, PartitionBook],
        placement: Placement,
        messages: Sequence[Message] = (),
    ) -> None:
        self.comm = comm
        self.types = [type_ for type_, book in books.items() if book.num_parts == len(placement.row_parts)]
        self._books = [books[type_] for type_ in self.types]
        self.types += [message.name for message in messages]
        self._books += [books[None] for _ in messages]
        self._words = frozenset(message.name for message in messages if not message.has_ids)
        self._named = {message.name for message in messages} | {None}
        self.placement, self.part_id = placement, placement.part_id
        self.traffic = Traffic()
        self.buffers = BufferPool()
        # int32 ids halve the bytes of a request.
        narrow = all(book.num_vertices < 2**31 for book in self._books)
        self.wire_dtype = torch.int32 if narrow else torch.int64

    def part_of(self, type_: str | None) -> int:
        """The part, in the type's book, whose rows this rank has: its own, or the only one."""
        return self.part_id if type_ in self.types else 0

    def send_counts(self, remote_counts: Mapping[str | None, Tensor], leaving: bool) -> PendingCounts:
        """Start to tell every rank how many rows are wanted from it.

        Args:
            remote_counts: by vertex type int64 [K], by part; a type may be missing.
            leaving: this rank has no further batches of its own in this epoch.
        """
        wanted = [[0] * len(self.types) for _ in range(self.comm.size)]
        for place, type_ in enumerate(self.types):
            for part, count in enumerate(remote_counts[type_].tolist() if type_ in remote_counts else ()):
                wanted[self.placement.server_of(part)][place] = count
        message = torch.tensor([[*counts, int(leaving)] for counts in wanted], device="cpu")
        ones = [1] * self.comm.size
        pending = self.comm.all_to_all(message, ones, ones)
        others = message[1:].nbytes  # one of the messages is to itself
        self.traffic.bytes_sent += others
        self.traffic.bytes_received += others
        return PendingCounts(wanted, pending)

    def read_counts(self, counts: PendingCounts) -> Counts:
        """Wait for what the others want from this rank."""
        received = counts.pending.wait().tolist()
        return Counts(counts.wanted, [of_rank[:-1] for of_rank in received], all(of_rank[-1] for of_rank in received))

    def send_ids(self, counts: Counts, remote_id: Mapping[str | None, Tensor]) -> Pending:
        """Start to send the wanted global ids of each type, int64, grouped by owner."""
        if not self.types:  # no rows travel, as where all parts are on one host
            return Pending(self.comm, NO_IDS, None)
        by_type = [remote_id.get(type_, NO_IDS).to(self.wire_dtype) for type_ in self.types]
        ids = by_type[0] if len(by_type) == 1 else _by_rank(by_type, counts.wanted, self.wire_dtype)
        return self._send(ids, _sums(counts.wanted), _sums(counts.asked))

    def read_ids(self, counts: Counts, pending: Pending) -> dict[str | None, Tensor]:
        """Wait for the ids that the others want; gives rows of this rank's part, int64, by type and in it by rank; of messages without
        ids the words that were sent.

        Raises:
            RuntimeError: a rank asks for a row that this part does not own.
        """
        rows: dict[str | None, Tensor] = {}
        arrived = pending.wait().to(torch.int64)
        by_type = [arrived] if len(self.types) == 1 else _by_type(arrived, counts.asked, len(self.types))
        for place, (book, type_, ids) in enumerate(zip(self._books, self.types, by_type)):
            if type_ in self._words:
                rows[type_] = ids
                continue
            begin, end = book.range_of(self.part_id)
            row = ids - begin
            at = first_outside(row, end - begin)
            if at is not None:
                asked = torch.tensor([of_rank[place] for of_rank in counts.asked], device="cpu")
                asker = int(torch.searchsorted(asked.cumsum(0), at, right=True))
                vertex = "vertex" if type_ in self._named else f"{type_!r} vertex"
                raise RuntimeError(
                    f"rank {asker} asked rank {self.comm.rank} for {vertex} {int(row[at]) + begin}, but part {self.part_id} "
                    f"owns [{begin}, {end}); start all ranks on the same dataset directory"
                )
            rows[type_] = row
        return rows

    def send_rows(self, counts: Counts, rows: Mapping[Column, Tensor]) -> PendingRows:
        """Start to send the rows asked for, by column of types that travel; pending are the rows wanted, of the same columns."""
        if not rows:
            return PendingRows(None, {}, [])
        places = [self.types.index(type_) for type_, _ in rows]
        wanted = [[of_rank[place] for place in places] for of_rank in counts.wanted]
        asked = [[of_rank[place] for place in places] for of_rank in counts.asked]
        like = {column: of_column[:0] for column, of_column in rows.items()}
        if len(rows) == 1:
            pending = self._send(next(iter(rows.values())), _sums(asked), _sums(wanted))
        else:
            widths = [row_bytes(of_column) for of_column in like.values()]
            send = [bytes_of(of_column) for of_column in rows.values()]
            asked_bytes, wanted_bytes = (
                [[n * width for n, width in zip(of_rank, widths)] for of_rank in sizes] for sizes in (asked, wanted)
            )
            pending = self._send(_by_rank(send, asked_bytes, torch.uint8), _sums(asked_bytes), _sums(wanted_bytes))
        self.traffic.rows_received += sum(_sums(wanted))
        for place, (column, of_column) in enumerate(like.items()):
            number = sum(of_rank[place] for of_rank in wanted)
            self.traffic.row_bytes_received[column[0]] += number * row_bytes(of_column)
        return PendingRows(pending, like, wanted)

    def _send(self, tensor: Tensor, send_counts: list[int], recv_counts: list[int]) -> Pending:
        pending = self.comm.all_to_all(tensor, send_counts, recv_counts, self.buffers.empty)
        self.traffic.bytes_sent += tensor.nbytes
        self.traffic.bytes_received += pending.output.nbytes
        return pending

    def fetch_cache(self, type_: str | None, home: Mapping[str, RowSource], members: IdSet) -> FeatureCache:
        """Copies of the rows of ``members``, global ids of other parts; collective as :meth:`fetch_rows`."""
        rows = {name: empty_rows(source, len(members)) for name, source in home.items()}
        self.fetch_rows(type_, home, members.ids, rows)
        return FeatureCache(members, rows)

    def fetch_rows(
        self, type_: str | None, home: Mapping[str, RowSource], members: Tensor, rows: Mapping[str, Tensor]
    ) -> None:
        """Write the rows of ``members``, ascending global ids of other parts, int64, to ``rows`` [len(members), ...], in bounded chunks.

        Collective: all ranks call it for the same type, each with its own members and the rows of its own part by attribute.
        """
        of_all = sum(empty_rows(source, 1).nbytes for source in home.values())
        chunk = max(1, FILL_CHUNK_BYTES // max(1, of_all))
        book = self._books[self.types.index(type_)]
        first = 0
        while True:
            ids = members[first : first + chunk]  # ascending, hence grouped by owner
            wanted = {type_: torch.bincount(book.owner(ids), minlength=book.num_parts)}
            counts = self.read_counts(self.send_counts(wanted, leaving=first + chunk >= len(members)))
            asked = self.read_ids(counts, self.send_ids(counts, {type_: ids}))[type_]
            served = {(type_, name): take_rows(source, asked).to(self.comm.device) for name, source in home.items()}
            for (_, name), arrived in self.send_rows(counts, served).wait().items():
                rows[name][first : first + chunk] = arrived
            first += chunk
            if counts.all_left:  # the rank with the most members is done too
                return


def row_bytes(rows: Tensor) -> int:
    """Of one row."""
    return math.prod(rows.shape[1:]) * rows.element_size()


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(of_rank) for of_rank in counts]


def _by_rank(pieces: Sequence[Tensor], counts: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    """Several 1-dimensional tensors, each by rank, as one that is by rank; ``counts`` are by rank and tensor."""
    split = [piece.split([of_rank[place] for of_rank in counts]) for place, piece in enumerate(pieces)]
    return torch.cat(
        [of_piece[rank] for rank in range(len(counts)) for of_piece in split]
        or [torch.empty(0, dtype=dtype, device="cpu")]
    )


def _by_type(tensor: Tensor, counts: Sequence[Sequence[int]], number: int) -> list[Tensor]:
    """The reverse of :func:`_by_rank`."""
    pieces = tensor.split([count for of_rank in counts for count in of_rank])
    return [torch.cat(pieces[place::number]) for place in range(number)]
