"""Exchanges rows between ranks: each rank fetches the rows that other ranks own.

Ranks exchange three things for a batch, for any number of vertex types and attributes:

* **counts**: the number of rows of each type wanted from each rank;
* **ids**: the ids of these rows;
* **rows**: the rows themselves.

One function starts each exchange and another finishes it, so that the pipeline can work in between. In one tick of the
pipeline, the counts and ids of all batches leave together, in one message (:mod:`salientpp.ranks.mail`). Rows are a
message of their own, because they may travel between devices.

The counts carry one more number: whether the sender has left the epoch. A rank that has fewer batches, or that left its loop early, goes on
answering the others and requests nothing itself. All ranks stop together once all have left. So no rank waits for a rank that has finished.

Parts here are **row parts**: the rows that one host holds together. A row part may have several ranks. A request for part p then goes to the rank of p
that has the same place inside its part as the asking rank, which spreads the load (:mod:`salientpp.ranks.placement`).
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
from salientpp.ranks.mail import Letter, Mail
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ranks.placement import Placement
from salientpp.store.buffers import BufferPool
from salientpp.store.cache import FeatureCache
from salientpp.store.narrow import Column
from salientpp.store.rows import RowSource, empty_rows, take_rows
from salientpp.store.tiers import NO_IDS, IdSet

#: Upper and lower bound of the bytes per request while a cache is filled, and the number of requests to aim at between these bounds.
_MOST_FILL_BYTES, _LEAST_FILL_BYTES, _FILL_CHUNKS = 64 * 2**20, 2**20, 16


def _fill_chunk_bytes(num_bytes: int) -> int:
    """Returns the bytes per request when a cache of ``num_bytes`` is filled: few, so that filling takes little memory."""
    return min(_MOST_FILL_BYTES, max(_LEAST_FILL_BYTES, num_bytes // _FILL_CHUNKS))


@dataclass(frozen=True)
class Message:
    """Declares a kind of request for something other than rows, such as sums of rows. Only for a graph with one vertex type.

    Attributes:
        name: name of the kind. It is used as if it were a vertex type's name, so no vertex type may have it.
        has_ids: True if the request holds global ids of vertices that the asked part owns. False if it holds words: other
            integers, which arrive as they were sent.
    """

    name: str
    has_ids: bool


@dataclass
class Traffic:
    """Counters of what this rank exchanged with other ranks: messages, bytes of all kinds, and bytes of feature rows.

    ``rows_sent`` counts rows that this rank sent, each with all its columns. ``row_messages`` counts the all-to-alls of rows;
    :class:`~salientpp.ranks.mail.Mail` counts all others. ``row_bytes_received`` counts only rows, by vertex type. ``list_bytes_sent`` and
    ``list_bytes_received`` count requests to draw from another rank's neighbour lists, and the answers. ``list_rounds`` counts how often a batch made
    this rank send such requests.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    rows_sent: int = 0
    row_messages: int = 0
    row_bytes_received: Counter[str | None] = field(default_factory=Counter)
    list_bytes_sent: int = 0
    list_bytes_received: int = 0
    list_rounds: int = 0


@dataclass(frozen=True, eq=False)
class PendingCounts:
    wanted: list[list[int]]
    letter: Letter


@dataclass(frozen=True, eq=False)
class Counts:
    """Numbers of rows that ranks exchange for a batch: ``wanted`` by this rank from each rank, and ``asked`` of it by each rank.

    ``wanted[r][t]`` is for rank r and vertex type t. ``all_left`` is True if no rank has more batches in this epoch.
    """

    wanted: list[list[int]]
    asked: list[list[int]]
    all_left: bool


@dataclass(frozen=True, eq=False)
class PendingRows:
    """Rows that other ranks are sending to this one. Several columns travel as one tensor of bytes, grouped by rank and then by column.

    Attributes:
        like: for each column, an empty tensor with its dtype and row shape.
        sizes: number of rows, by rank and then by column in the order of ``like``.
    """

    pending: Pending | None
    like: Mapping[Column, Tensor]
    sizes: list[list[int]]

    def wait(self) -> dict[Column, Tensor]:
        """Waits for the rows. Returns those of each column, in the order of the ranks that sent them."""
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
    """Sends and receives counts, ids and rows for the batches of one rank. All ranks of the group call it in the same order.

    Args:
        comm: communication between the ranks that serve the parts.
        books: by vertex type, the partition book of its row parts. A replicated type, whose rows every rank has, has a book with a single part; its
            rows never travel.
        placement: placement of this rank.
        messages: kinds of requests for something other than rows, the same on all ranks.

    Attributes:
        types: vertex types whose rows may travel, then the names of the messages.
        wire_dtype: dtype of the ids and words in a request.
        buffers: pool that provides memory for arriving rows.
        mail: carries counts and ids. The pipeline flushes it at the end of a tick.
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
        self.mail = Mail(comm, empty=self.buffers.empty)
        # int32 ids halve the bytes of a request.
        narrow = all(book.num_vertices < 2**31 for book in self._books)
        self.wire_dtype = torch.int32 if narrow else torch.int64

    def part_of(self, type_: str | None) -> int:
        """Returns the part whose rows of this type the rank holds: its own part, or 0 for a replicated type."""
        return self.part_id if type_ in self.types else 0

    def post(self, tensor: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Letter:
        """Posts a CPU tensor (:meth:`Mail.post`), and counts its bytes, except those from this rank to itself."""
        letter = self.mail.post(tensor, send_counts, recv_counts)
        to_itself = send_counts[self.comm.rank] * row_bytes(tensor)
        self.traffic.bytes_sent += tensor.nbytes - to_itself
        self.traffic.bytes_received += letter.nbytes_received - to_itself
        return letter

    def reset_traffic(self) -> None:
        self.traffic, self.mail.messages = Traffic(), 0

    def send_counts(self, remote_counts: Mapping[str | None, Tensor], leaving: bool) -> PendingCounts:
        """Tells every rank how many of its rows this rank wants.

        Args:
            remote_counts: by vertex type int64 [K], number of rows wanted from each part. Types may be missing.
            leaving: True if this rank has no more batches in this epoch.
        """
        wanted = [[0] * len(self.types) for _ in range(self.comm.size)]
        for place, type_ in enumerate(self.types):
            for part, count in enumerate(remote_counts[type_].tolist() if type_ in remote_counts else ()):
                wanted[self.placement.server_of(part)][place] = count
        message = torch.tensor([[*counts, int(leaving)] for counts in wanted], device="cpu")
        ones = [1] * self.comm.size
        return PendingCounts(wanted, self.post(message, ones, ones))

    def read_counts(self, counts: PendingCounts) -> Counts:
        """Waits for the other ranks' counts. Returns them together with those that this rank sent."""
        received = counts.letter.wait().tolist()
        return Counts(counts.wanted, [of_rank[:-1] for of_rank in received], all(of_rank[-1] for of_rank in received))

    def send_ids(self, counts: Counts, remote_id: Mapping[str | None, Tensor]) -> Letter | None:
        """Tells every rank which rows this rank wants: by type, int64 global ids, grouped by owner."""
        if not self.types:
            return None
        by_type = [remote_id.get(type_, NO_IDS).to(self.wire_dtype) for type_ in self.types]
        ids = by_type[0] if len(by_type) == 1 else _by_rank(by_type, counts.wanted, self.wire_dtype)
        return self.post(ids, _sums(counts.wanted), _sums(counts.asked))

    def read_ids(self, counts: Counts, letter: Letter | None) -> dict[str | None, Tensor]:
        """Waits for the ids that the other ranks want.

        Returns:
            By type, row numbers in this rank's part, int64, in the order of the ranks. For messages without ids, the words that were sent.

        Raises:
            RuntimeError: a rank asked for a row that this part does not own.
        """
        rows: dict[str | None, Tensor] = {}
        arrived = NO_IDS if letter is None else letter.wait().to(torch.int64)
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

    def send_rows(self, counts: Counts, rows: Mapping[Column, Tensor], pool: BufferPool | None = None) -> PendingRows:
        """Starts to send ``rows``, which others requested. The result receives this rank's rows of the same columns.

        Args:
            pool: provides the memory of the arriving rows. None: the pool of the exchange, which keeps it.
        """
        pool = pool or self.buffers
        if not rows:
            return PendingRows(None, {}, [])
        places = [self.types.index(type_) for type_, _ in rows]
        wanted = [[of_rank[place] for place in places] for of_rank in counts.wanted]
        asked = [[of_rank[place] for place in places] for of_rank in counts.asked]
        like = {column: of_column[:0] for column, of_column in rows.items()}
        self.traffic.rows_sent += sum(of_rank[place] for of_rank in counts.asked for place in {*places})
        if len(rows) == 1:
            pending = self._send(next(iter(rows.values())), _sums(asked), _sums(wanted), pool)
        else:
            widths = [row_bytes(of_column) for of_column in like.values()]
            send = [bytes_of(of_column) for of_column in rows.values()]
            asked_bytes, wanted_bytes = (
                [[n * width for n, width in zip(of_rank, widths)] for of_rank in sizes] for sizes in (asked, wanted)
            )
            sent = _by_rank(send, asked_bytes, torch.uint8)
            pending = self._send(sent, _sums(asked_bytes), _sums(wanted_bytes), pool)
        for place, (column, of_column) in enumerate(like.items()):
            number = sum(of_rank[place] for of_rank in wanted)
            self.traffic.row_bytes_received[column[0]] += number * row_bytes(of_column)
        return PendingRows(pending, like, wanted)

    def _send(self, tensor: Tensor, send_counts: list[int], recv_counts: list[int], pool: BufferPool) -> Pending:
        pending = self.comm.all_to_all(tensor, send_counts, recv_counts, pool.empty)
        self.traffic.row_messages += self.comm.size > 1
        self.traffic.bytes_sent += tensor.nbytes
        self.traffic.bytes_received += pending.output.nbytes
        return pending

    def fetch_cache(self, type_: str | None, home: Mapping[str, RowSource], members: IdSet) -> FeatureCache:
        """Fetches the rows of a cache, and returns it. ``members``: global ids of vertices of other parts.

        Collective, as :meth:`fetch_rows`.
        """
        rows = {name: empty_rows(source, len(members)) for name, source in home.items()}
        self.fetch_rows(type_, home, members.ids, rows)
        return FeatureCache(members, rows)

    def fetch_rows(
        self, type_: str | None, home: Mapping[str, RowSource], members: Tensor, rows: Mapping[str, Tensor]
    ) -> None:
        """Fetches rows of other parts into ``rows``: attribute name -> [len(members), ...].

        Collective: all ranks call it for one type. Each rank passes the global ids that it wants, ``members``
        (ascending int64), and the rows of its part, ``home``.
        """
        of_all = sum(empty_rows(source, 1).nbytes for source in home.values())
        chunk = max(1, _fill_chunk_bytes(len(members) * of_all) // max(1, of_all))
        pool = BufferPool()  # no later message is as large as a chunk, so its memory must not stay
        first, all_left = 0, False
        while not all_left:  # until the rank with the most members has finished too
            leaving = first + chunk >= len(members)
            some = {name: of_name[first : first + chunk] for name, of_name in rows.items()}
            all_left = self._fetch_chunk(type_, home, members[first : first + chunk], some, leaving, pool)
            first += chunk

    def _fetch_chunk(
        self, type_: str | None, home: Mapping[str, RowSource], ids: Tensor, rows: Mapping[str, Tensor], leaving: bool, pool: BufferPool
    ) -> bool:  # fmt: skip
        """Fetches one chunk for :meth:`fetch_rows` into ``rows``. Returns True if every rank has fetched its last chunk."""
        book = self._books[self.types.index(type_)]
        wanted = {
            type_: torch.bincount(book.owner(ids), minlength=book.num_parts)
        }  # ids ascend, so they are grouped by owner
        counts = self.read_counts(self.send_counts(wanted, leaving=leaving))
        asked = self.read_ids(counts, self.send_ids(counts, {type_: ids}))[type_]
        served = {(type_, name): take_rows(source, asked).to(self.comm.device) for name, source in home.items()}
        for (_, name), arrived in self.send_rows(counts, served, pool).wait().items():
            rows[name].copy_(arrived)
        return counts.all_left


def row_bytes(rows: Tensor) -> int:
    return math.prod(rows.shape[1:]) * rows.element_size()


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(of_rank) for of_rank in counts]


def _by_rank(pieces: Sequence[Tensor], counts: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    """Merges 1-dimensional tensors, each grouped by rank, into one tensor grouped by rank, so that one message carries all.

    ``counts[r][i]`` is the number of entries of tensor i for rank r.
    """
    split = [piece.split([of_rank[place] for of_rank in counts]) for place, piece in enumerate(pieces)]
    return torch.cat(
        [of_piece[rank] for rank in range(len(counts)) for of_piece in split]
        or [torch.empty(0, dtype=dtype, device="cpu")]
    )


def _by_type(tensor: Tensor, counts: Sequence[Sequence[int]], number: int) -> list[Tensor]:
    pieces = tensor.split([count for of_rank in counts for count in of_rank])
    return [torch.cat(pieces[place::number]) for place in range(number)]
