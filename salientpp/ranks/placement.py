"""Placement: the seeds that a rank visits, the rows that it holds, and the ranks that it asks for other rows.

A dataset directory has K parts, each a contiguous range of ids. W ranks on some hosts train on it.

* **Seeds.** An epoch's batches belong to S logical ranks. S is fixed for a run's whole life, while W may change (by default S = W). A logical rank draws its
  seeds from a **unit**. If S >= K, a unit is one part, which S / K logical ranks share. If S < K, a unit is several neighbouring parts joined.
* **Rows.** All parts that the ranks of one host serve lie on that host, and every rank there reads them. Together they are one **row part**. A request for
  rows of another row part goes to the rank there with the same place in its row part as the asking rank. This spreads the load.

* **Cooperation.** If the ranks of a host compute each batch together, a host visits seeds as one rank: its ranks have the same logical ranks.
* **Storage ranks.** The last ranks of a job may only store. They divide the row parts among themselves and visit no seeds. The other ranks train: they divide
  the seeds, and hold no rows. Their row part is the last one, and it is empty.

The logical ranks of a rank, the ranks of a host, and the parts of a rank or host are consecutive, in torchrun's order.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

#: Upper bound on ``logical_ranks`` if it exceeds the number of ranks. A rank's schedules take time and memory for
#: the product of two numbers: its own logical ranks, and all logical ranks.
MOST_LOGICAL_RANKS = 2**14


def runs(number: int, groups: int) -> list[int]:
    """Divides items into consecutive groups of nearly equal size. Returns where each begins, and ``number`` at the end."""
    return [group * number // groups for group in range(groups + 1)]


def _run(number: int, groups: int, group: int) -> tuple[int, int]:
    """Returns the first item of one of the groups that :func:`runs` makes, and the item after its last."""
    return group * number // groups, (group + 1) * number // groups


@dataclass(frozen=True)
class Placement:
    """Placement of one rank in a group that serves K parts.

    Attributes:
        rank: number of the rank, in [0, ``world_size``).
        world_size: W, the number of ranks in the group.
        num_parts: K, the number of parts of the directory.
        num_logical_ranks: S, the number of logical ranks; 0 means :attr:`num_visitors`.
        ranks_by_host: number of ranks on each host, in the order of the ranks. Empty: every rank is its own host.
        cooperates: True if the ranks of a host visit their seeds together, as one rank.
        num_storage_ranks: number of ranks, the last ones, that hold the rows and visit no seeds; 0: every rank does both.

    Raises:
        ValueError: ranks, logical ranks, parts and hosts do not fit each other.
    """

    rank: int
    world_size: int
    num_parts: int
    num_logical_ranks: int = 0
    ranks_by_host: tuple[int, ...] = ()
    cooperates: bool = False
    num_storage_ranks: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks_by_host", tuple(self.ranks_by_host) or (1,) * self.world_size)
        if sum(self.ranks_by_host) != self.world_size or min(self.ranks_by_host) < 1:
            raise ValueError(
                f"ranks_by_host must be numbers >= 1 that add up to the {self.world_size} ranks, got {list(self.ranks_by_host)}"
            )
        self._check_storage_ranks()
        ranks, parts = self.num_visitors, self.num_parts
        object.__setattr__(self, "num_logical_ranks", self.num_logical_ranks or ranks)
        if self.cooperates and len(set(self.ranks_by_host)) > 1:
            raise ValueError(
                f"hosts whose ranks cooperate need equally many ranks, got {list(self.ranks_by_host)} ranks; start the same number of ranks on every host"
            )
        logical_ranks = self.num_logical_ranks
        each, world = (
            ("hosts", f"{ranks} cooperating hosts do") if self.cooperates else ("ranks", f"world size {ranks} does")
        )
        if logical_ranks > max(MOST_LOGICAL_RANKS, ranks):
            raise ValueError(
                f"logical ranks must be at most {MOST_LOGICAL_RANKS:,}, or equal to the number of ranks, got {logical_ranks:,}; pass the largest "
                "number of ranks that the run may have"
            )
        if ranks > parts and ranks % parts != 0:
            raise ValueError(
                f"{world} not fit {parts} parts: with more {each} than parts, every part must be served by the same number "
                f"of {each}; start at most {parts} {each} or a multiple of {parts}, or partition into {ranks} parts"
            )
        if logical_ranks > parts and logical_ranks % parts != 0:
            raise ValueError(
                f"logical_ranks={logical_ranks} does not fit {parts} parts: with more logical ranks than parts, every part must have the same number of them; "
                f"use at most {parts} logical ranks or a multiple of {parts}"
            )
        if ranks > logical_ranks:
            raise ValueError(
                f"logical_ranks={logical_ranks} is less than the {ranks} {each}, so some {each} would have no batches; start at most {logical_ranks} {each}"
            )
        if ranks > parts and logical_ranks % ranks != 0:
            raise ValueError(
                f"logical_ranks={logical_ranks} does not fit {ranks} {each}: with more {each} than the {parts} parts, all {each} must have the same number of "
                f"logical ranks; start a number of {each} that divides {logical_ranks}, or at most {parts} {each}"
            )
        spans = self._parts_by_host
        for host, (here, following) in enumerate(pairwise(spans)):
            if here and here != following and following.start < here.stop:
                raise ValueError(
                    f"hosts {host} and {host + 1} would share a part but not all of their parts (parts {here.start} to {here.stop - 1} and "
                    f"{following.start} to {following.stop - 1}); the {self.ranks_by_host[host]} ranks of a host must serve whole parts, or all serve the same "
                    "part; start the same number of ranks on every host, or pass ranks_per_host=1"
                )

    def _check_storage_ranks(self) -> None:
        number = self.num_storage_ranks
        if not number:
            return
        if not 0 < number < self.world_size:
            raise ValueError(
                f"storage_ranks must leave at least one of the {self.world_size} ranks to train, got {number}; start more ranks, or pass fewer storage ranks"
            )
        if number > self.num_parts and number % self.num_parts:
            raise ValueError(
                f"storage_ranks={number} does not fit {self.num_parts} parts: with more storage ranks than parts, every part must be stored by the same number "
                f"of ranks; use at most {self.num_parts} storage ranks or a multiple of {self.num_parts}"
            )
        if self.cooperates:
            raise ValueError(
                "cooperate= is for ranks that hold rows, but the ranks that train hold none with storage_ranks; leave one out"
            )
        if self.num_trainers not in self._first_ranks:
            raise ValueError(
                f"ranks_by_host={list(self.ranks_by_host)} puts ranks that train and ranks that store on one host, and they would share its memory; pass "
                "ranks_per_host=1"
            )

    # --- logical ranks and seeds ----------------------------------------------------------------------------------

    @property
    def num_trainers(self) -> int:
        """Number of ranks that visit seeds: the first ones."""
        return self.world_size - self.num_storage_ranks

    @property
    def num_training_hosts(self) -> int:
        """Number of hosts whose ranks visit seeds."""
        return sum(first < self.num_trainers for first in self._first_ranks[:-1])

    @property
    def num_visitors(self) -> int:
        """Number of ranks among which seeds are divided; of hosts, if the ranks of a host cooperate."""
        return len(self.ranks_by_host) if self.cooperates else self.num_trainers

    @property
    def visitor(self) -> int:
        """Number of this rank, or of its host if the ranks of a host cooperate, among :attr:`num_visitors`."""
        return self.host if self.cooperates else self.rank

    @property
    def num_units(self) -> int:
        return min(self.num_logical_ranks, self.num_parts)

    @property
    def logical_ranks_per_unit(self) -> int:
        return self.num_logical_ranks // self.num_units

    @property
    def logical_ranks(self) -> range:
        return self.logical_ranks_of(self.rank)

    def logical_ranks_of(self, rank: int) -> range:
        """Returns a rank's logical ranks: all those of one or several units, or an equal share of those of one unit. A storage rank has none."""
        if rank >= self.num_trainers and not self.cooperates:
            return range(self.num_logical_ranks, self.num_logical_ranks)
        visitor = self.host_of(rank) if self.cooperates else rank
        if self.num_visitors > self.num_units:
            share = self.num_logical_ranks // self.num_visitors
            return range(visitor * share, (visitor + 1) * share)
        first, last = _run(self.num_units, self.num_visitors, visitor)
        return range(first * self.logical_ranks_per_unit, last * self.logical_ranks_per_unit)

    def unit_of(self, logical_rank: int) -> int:
        return logical_rank // self.logical_ranks_per_unit

    def place_of(self, logical_rank: int) -> int:
        """Returns the index of a logical rank among those that draw from the same unit (parts), in [0, ``logical_ranks_per_unit``)."""
        return logical_rank % self.logical_ranks_per_unit

    def parts_of_unit(self, unit: int) -> range:
        return range(*_run(self.num_parts, self.num_units, unit))

    @property
    def own_parts(self) -> range:
        """Parts whose seeds this rank's logical ranks visit."""
        return self.parts_of(self.rank)

    def parts_of(self, rank: int) -> range:
        """Returns the parts whose seeds a rank's logical ranks visit."""
        logical_ranks = self.logical_ranks_of(rank)
        if not logical_ranks:
            return range(self.num_parts, self.num_parts)
        first, last = self.unit_of(logical_ranks[0]), self.unit_of(logical_ranks[-1])
        return range(self.parts_of_unit(first).start, self.parts_of_unit(last).stop)

    @cached_property
    def _visits(self) -> list[range]:
        return [*dict.fromkeys(map(self.parts_of, range(self.world_size)))]

    @property
    def own_offsets(self) -> tuple[int, ...]:
        """Offsets of the ranges of parts whose seeds some rank visits: the first part of each range, then the number of parts."""
        return (*(parts.start for parts in self._visits), self.num_parts)

    @property
    def own_part(self) -> int:
        """Index in :attr:`own_offsets` of the range whose seeds this rank visits."""
        return self._visits.index(self.own_parts)

    # --- hosts and rows -----------------------------------------------------------------------------------

    @cached_property
    def _first_ranks(self) -> list[int]:
        """First rank of each host, and the number of ranks at the end."""
        return [0, *accumulate(self.ranks_by_host)]

    @cached_property
    def _parts_by_host(self) -> list[range]:
        return [
            range(self._stored_by(first).start, self._stored_by(last - 1).stop)
            for first, last in pairwise(self._first_ranks)
        ]

    def _stored_by(self, rank: int) -> range:
        """Returns the parts of whose rows a rank needs its host to hold: those whose seeds it visits, or those that it stores."""
        if not self.num_storage_ranks:
            return self.parts_of(rank)
        if rank < self.num_trainers:
            return range(self.num_parts, self.num_parts)
        groups = min(self.num_storage_ranks, self.num_parts)
        return range(*_run(self.num_parts, groups, (rank - self.num_trainers) * groups // self.num_storage_ranks))

    @cached_property
    def host(self) -> int:
        return self.host_of(self.rank)

    def host_of(self, rank: int) -> int:
        return bisect_right(self._first_ranks, rank) - 1

    @property
    def ranks_of_host(self) -> range:
        return range(*self._first_ranks[self.host : self.host + 2])

    @cached_property
    def row_parts(self) -> list[range]:
        """The row parts: for each group of parts whose rows one host holds together, its range of parts. That of ranks without rows is last."""
        return sorted(dict.fromkeys(self._parts_by_host), key=lambda parts: parts.start)

    @cached_property
    def row_offsets(self) -> tuple[int, ...]:
        """Offsets of :attr:`row_parts`: the first part of each range, then K."""
        return (*(parts.start for parts in self.row_parts), self.num_parts)

    @property
    def part_id(self) -> int:
        """Index in :attr:`row_parts` of the parts whose rows this rank's host holds."""
        return self.row_parts.index(self._parts_by_host[self.host])

    @property
    def num_caches(self) -> int:
        """Number by which a replication factor α is divided: a cache on a host holds α N / ``num_caches`` rows.

        It is the number of row parts, or with storage ranks the number of hosts that train.
        """
        return self.num_training_hosts if self.num_storage_ranks else len(self.row_parts)

    @property
    def holds_own_part(self) -> bool:
        """True if this rank visits the seeds of one part, and its host holds exactly this part."""
        return len(self.own_parts) == 1 and self.row_parts[self.part_id] == self.own_parts

    @cached_property
    def _ranks_by_part(self) -> list[range]:
        found = []
        for parts in self.row_parts:
            hosts = [host for host, its in enumerate(self._parts_by_host) if its == parts]
            found.append(range(self._first_ranks[hosts[0]], self._first_ranks[hosts[-1] + 1]))
        return found

    @property
    def ranks_of_part(self) -> range:
        """Ranks that serve the same rows as this rank: all ranks of the hosts that hold the same parts."""
        return self._ranks_by_part[self.part_id]

    @property
    def ranks_per_part(self) -> int:
        """Number of ranks that serve the same rows as this rank."""
        return len(self.ranks_of_part)

    @property
    def place(self) -> int:
        """Index of this rank among the ranks that serve the same rows, in [0, ``ranks_per_part``)."""
        return self.rank - self.ranks_of_part.start

    def server_of(self, part_id: int) -> int:
        """Returns the rank that this rank asks for rows of ``row_parts[part_id]``. It depends on :attr:`place`, to spread the load."""
        ranks = self._ranks_by_part[part_id]
        return ranks[self.place % len(ranks)]


def parts_of(rank: int, world_size: int, num_parts: int) -> range:
    """Returns the parts that a rank serves. They are several if there are fewer ranks than parts."""
    return range(rank * num_parts // world_size, -((rank + 1) * num_parts // -world_size))
