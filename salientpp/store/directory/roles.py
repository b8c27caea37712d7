"""Roles of the ranks in a job with storage ranks: a rank trains, or it only stores."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist

from salientpp.arguments import as_integer
from salientpp.ranks.job import Job
from salientpp.ranks.members import group_rank
from salientpp.ranks.roles import Roles


@dataclass(frozen=True)
class OpenedBy:
    """The ranks that opened a partitioned graph.

    Attributes:
        num_storage_ranks: number of ranks that only store, the last ones of the job; 0: every rank trains and stores.
        session: the job of a session with storage hosts; None: the default process group, or the one that loaders are given.
    """

    num_storage_ranks: int = 0
    session: Job | None = None


def checked_storage_ranks(number: Any, part_id: int | None, process_group: Any) -> int:
    """Returns the number of storage ranks. Raises ValueError if it does not fit the job or the other arguments."""
    found = as_integer(number)
    if found is None or found < 0:
        raise ValueError(f"storage_ranks must be an integer >= 0 (the number of ranks that only store), got {number!r}")
    if not found:
        return 0
    if part_id is not None or process_group is not None:
        name = "part_id" if part_id is not None else "process_group"
        raise ValueError(
            f"storage_ranks={found} divides the parts among the last ranks of the whole job; leave {name} out"
        )
    if group_rank()[1] == 1:
        raise ValueError(
            f"storage_ranks={found} needs a job of at least {found + 1} ranks, got one process; initialise torch.distributed before salientpp.load, or leave "
            "storage_ranks out"
        )
    return found


class WithRoles:
    """Base of a partitioned graph: the roles of the ranks that opened it.

    Attributes:
        opened_by: the ranks that opened it.
        num_parts, part_id: number of parts, and the part that this rank serves.
    """

    opened_by: OpenedBy
    num_parts: int
    part_id: int | None

    _made: ClassVar[weakref.WeakKeyDictionary[Job, dict[int, dist.ProcessGroup]]] = weakref.WeakKeyDictionary()

    def __copy__(self) -> Any:
        """Returns a copy that opens its own files. A graph from storage hosts gives itself: it cannot be changed, and a session has one graph."""
        if self.opened_by.session is not None:
            return self
        made_by = self.__reduce__()
        assert isinstance(made_by, tuple)  # a function and its arguments
        return made_by[0](*made_by[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__copy__()

    @property
    def num_storage_ranks(self) -> int:
        """Number of ranks that only store, the last ones of the job; 0: every rank trains and stores."""
        return self.opened_by.num_storage_ranks

    @property
    def job(self) -> Job | None:
        """The job whose ranks read the graph; None: a single process."""
        return self.opened_by.session or Job.default()

    @property
    def roles(self) -> Roles:
        """Messages between ranks that train and ranks that store.

        Raises:
            ValueError: no rank only stores.
        """
        if self.job is None or not self.num_storage_ranks:
            raise ValueError("roles exist only in a job with storage_ranks; pass storage_ranks= to salientpp.load")
        return Roles.of_job(self.job, self.num_storage_ranks)

    def check_session(self) -> None:
        """Checks that this process may make a loader that storage ranks follow.

        Raises:
            RuntimeError: the process was forked from the one that opened the graph.
            ValueError: a single process opened a session with storage hosts, and is now one of several ranks. Each of them would get all seeds.
        """
        if self.job is not None:
            self.job.check_process()
        now, session = Job.default(), self.opened_by.session
        if session is not None and now is not None and now.size > 1 and session.size - self.num_storage_ranks == 1:
            raise ValueError(
                f"this graph was loaded before torch.distributed was initialised for {now.size} ranks, so every rank would train on all seeds; initialise it "
                "before salientpp.load"
            )

    @property
    def only_stores(self) -> bool:
        """True on a rank that only stores (``storage_ranks``). Its script calls :func:`salientpp.serve` instead of training."""
        return self.num_storage_ranks > 0 and self.part_id == self.num_parts - 1

    @property
    def trainers(self) -> dist.ProcessGroup | None:
        """Process group of the ranks that train, to pass to ``DistributedDataParallel``. None is the default group: then all its ranks train.

        The first use makes the group, which all ranks that train do together.

        Raises:
            ValueError: this rank only stores.
        """
        if not self.num_storage_ranks:
            return None
        if self.only_stores:
            raise ValueError(
                "this rank only stores, so it is not in the group of the ranks that train; call salientpp.serve(part) where part.only_stores is True"
            )
        if self.job is None or self.opened_by.session is not None:
            return None
        made = self._made.setdefault(self.job, {})
        number = self.job.size - self.num_storage_ranks
        if number not in made:
            made[number] = dist.new_group(range(number), use_local_synchronization=True)
        return made[number]
