"""How does a rank get rows that other ranks own?

Three all-to-alls a batch: **counts** (how many rows I want from you), **ids** (which), **rows**. Each is started
by one function and finished by another, so that the pipeline can do other work in between.

With the counts travels one more number: whether the sender has left the epoch. A rank with fewer batches, or one
that broke off, goes on answering the others with requests for nothing, and all stop together once all have left.
That is why no rank waits for one that has finished.

With several ranks per part, a request for part p goes to the rank of p that has the asker's place inside its
part, which spreads the load (:mod:`salientpp.plan.placement`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp.comm import Comm, Pending
from salientpp.ids import first_outside
from salientpp.plan.partition_book import PartitionBook
from salientpp.plan.placement import Placement
from salientpp.store.buffers import BufferPool
from salientpp.store.cache import FeatureCache
from salientpp.store.rows import RowSource, empty_rows, take_rows
from salientpp.store.tiers import IdSet

#: The cache is filled by requests for about this many bytes of rows, so that filling needs little memory.
FILL_CHUNK_BYTES = 64 * 2**20


@dataclass
class Traffic:
    """What this rank exchanged with others, in bytes of all kinds and in feature rows."""

    bytes_sent: int = 0
    bytes_received: int = 0
    rows_sent: int = 0
    rows_received: int = 0


@dataclass(frozen=True, eq=False)
class PendingCounts:
    wanted: list[int]
    leaving: bool
    pending: Pending


@dataclass(frozen=True, eq=False)
class Counts:
    """Rows wanted from each rank and asked for by each rank, and whether every rank has left the epoch."""

    wanted: list[int]
    asked: list[int]
    all_left: bool


class Exchange:
    """Rows by request between the ranks of a group.

    Args:
        comm: the ranks that serve the parts.
        book: who owns what.

    Raises:
        ValueError: the number of ranks is no multiple of the number of parts.
    """

    def __init__(self, comm: Comm, book: PartitionBook) -> None:
        self.comm = comm
        self.book = book
        self.placement = Placement(comm.rank, comm.size, book.num_parts)
        self.traffic = Traffic()
        self._buffers = BufferPool()  # for rows that arrive
        # int32 ids halve the bytes of a request.
        self._wire_dtype = torch.int32 if book.num_vertices < 2**31 else torch.int64

    @property
    def part_id(self) -> int:
        return self.placement.part_id

    def send_counts(self, remote_counts: Tensor, leaving: bool) -> PendingCounts:
        """Start to tell every rank how many rows are wanted from it.

        Args:
            remote_counts: int64 [K], by part.
            leaving: this rank has no further batches of its own in this epoch.
        """
        wanted = [0] * self.comm.size
        for part, count in enumerate(remote_counts.tolist()):
            wanted[self.placement.server_of(part)] = count
        message = torch.tensor([[count, int(leaving)] for count in wanted])
        ones = [1] * self.comm.size
        pending = self.comm.all_to_all(message, ones, ones)
        others = message[1:].nbytes  # one of the messages is to itself
        self.traffic.bytes_sent += others
        self.traffic.bytes_received += others
        return PendingCounts(wanted, leaving, pending)

    def read_counts(self, counts: PendingCounts) -> Counts:
        """Wait for what the others want from this rank."""
        received = counts.pending.wait().tolist()
        return Counts(counts.wanted, [count for count, _ in received], all(left for _, left in received))

    def send_ids(self, counts: Counts, remote_id: Tensor) -> Pending:
        """Start to send the wanted global ids, int64 [sum(wanted)], grouped by owner."""
        ids = remote_id.to(self._wire_dtype)
        return self._send(ids, counts.wanted, counts.asked)

    def read_ids(self, counts: Counts, pending: Pending) -> Tensor:
        """Wait for the ids that the others want; gives rows of this rank's part, int64 [sum(asked)].

        Raises:
            RuntimeError: a rank asks for a row that this part does not own.
        """
        begin, end = self.book.range_of(self.part_id)
        row = pending.wait().to(torch.int64) - begin
        at = first_outside(row, end - begin)
        if at is not None:
            asker = int(torch.searchsorted(torch.tensor(counts.asked).cumsum(0), at, right=True))
            raise RuntimeError(
                f"rank {asker} asked rank {self.comm.rank} for vertex {int(row[at]) + begin}, but part {self.part_id} "
                f"owns [{begin}, {end}); start all ranks on the same dataset directory"
            )
        return row

    def send_rows(self, counts: Counts, rows: Tensor) -> Pending:
        """Start to send the rows asked for, [sum(asked), ...]; pending are the rows wanted, [sum(wanted), ...]."""
        pending = self._send(rows, counts.asked, counts.wanted)
        self.traffic.rows_sent += rows.size(0)
        self.traffic.rows_received += pending.output.size(0)
        return pending

    def _send(self, tensor: Tensor, send_counts: list[int], recv_counts: list[int]) -> Pending:
        pending = self.comm.all_to_all(tensor, send_counts, recv_counts, self._buffers.empty)
        self.traffic.bytes_sent += tensor.nbytes
        self.traffic.bytes_received += pending.output.nbytes
        return pending

    def fetch_cache(self, home: Mapping[str, RowSource], members: IdSet) -> FeatureCache:
        """Fetch the rows of ``members`` (global ids of other parts) from their owners, in bounded chunks.

        Collective: all ranks call it, each with its own members and the rows of its own part by attribute.
        """
        rows = {name: empty_rows(source, len(members)) for name, source in home.items()}
        row_bytes = sum(empty_rows(source, 1).nbytes for source in home.values())
        chunk = max(1, FILL_CHUNK_BYTES // max(1, row_bytes))
        first = 0
        while True:
            ids = members.ids[first : first + chunk]  # ascending, hence grouped by owner
            wanted = torch.bincount(self.book.owner(ids), minlength=self.book.num_parts)
            counts = self.read_counts(self.send_counts(wanted, leaving=first + chunk >= len(members)))
            asked = self.read_ids(counts, self.send_ids(counts, ids))
            for name, source in home.items():
                served = take_rows(source, asked).to(self.comm.device)
                rows[name][first : first + chunk] = self.send_rows(counts, served).wait()
            first += chunk
            if counts.all_left:  # the rank with the most members is done too
                return FeatureCache(members, rows)
