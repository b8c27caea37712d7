"""Ranks that a key-value store connects: those of the default process group, or those of a session with storage hosts.

Everything that ranks know of each other (connections, mistakes, messages) belongs to one job. A process may take part in several: in that of its default group,
which its launcher started, and in a session for each graph that it reads from storage hosts.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any, ClassVar

import torch.distributed as dist

from salientpp.processes import forks
from salientpp.ranks.members import default_group, is_parents_group, members_of

#: The store's key for the text about a process of a job that is lost.
_LOST = "salientpp/lost"

#: Seconds in which a process of a session must have heard why the session's store is gone.
_NEWS_SECONDS = 0.5


class Job:
    """Ranks of one job, and this process's number among them.

    Attributes:
        store: key-value store that all ranks reach.
        rank, size: number of this process, and number of ranks.
        name: name of the session; empty for the ranks of the default process group.
        address: address of the network interface over which this rank talks to the others; None: gloo's choice.
        of: text that errors append to a rank's number; empty for the ranks of the default process group.
        keeper: who has made the store, for errors.
        is_watched: True if processes that are lost are told of. So it is in a session, and in a job with storage ranks.
        heard: what this process knows of a process of the job that is lost; None: nothing.
        launched: number of this process and number of processes as its launcher counts them. (-1, 0): no launcher started it as a rank of this job.
    """

    _default: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, Job]] = weakref.WeakKeyDictionary()

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        name: str = "",
        address: str | None = None,
        launched: tuple[int, int] = (-1, 0),
        of: str = "",
        keeper: str = "rank 0 or torchrun",
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.name, self.address, self.launched, self.of = name, address, launched, of
        self.is_watched = bool(name)
        self.heard: str | None = None
        self.keeper = keeper
        self._forks = forks()

    @classmethod
    def default(cls) -> Job | None:
        """Returns the job of the default process group; None if torch.distributed is not initialised. After `destroy_process_group` it is another one."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = default_group()
        found = cls._default.get(group)
        if found is None:
            place = dist.get_rank(), dist.get_world_size()
            found = cls._default.setdefault(group, cls(default_store(), *place, launched=place))
        return found

    @property
    def belongs_to_parent(self) -> bool:
        """True if this process was forked from the rank that takes part in the job."""
        return self._forks != forks() if self.name else is_parents_group()

    def tell_lost(self, text: str, store: dist.Store | None = None) -> None:
        """Tells the ranks that meet to make a Comm that a process of the job is lost. The first text counts. Never raises.

        Args:
            store: another connection to the store; None: :attr:`store`.
        """
        self.heard = self.heard or text
        with contextlib.suppress(RuntimeError):  # the store is gone
            self.heard = (store or self.store).compare_set(_LOST, "", text).decode()

    def lost(self, store: dist.Store | None = None) -> str | None:
        """Returns what was told with :meth:`tell_lost`, here or on another rank, or None.

        Args:
            store: another connection to the store; None: :attr:`store`.

        Raises:
            DistError: the store is gone.
        """
        store = store or self.store
        if self.heard is None and self.is_watched and store.check([_LOST]):
            self.heard = store.get(_LOST).decode()
        return self.heard

    def reason_of_lost_store(self) -> str:
        """Returns why the store does not answer any more. A session's process may hear of a loss a moment after the store, so it waits for that."""
        until = time.monotonic() + _NEWS_SECONDS
        while self.name and self.heard is None and time.monotonic() < until:
            time.sleep(0.01)
        if self.name:
            reason = (
                self.heard or f"{self.keeper} went away, and with it the session's key-value store; look there first"
            )
            return f"{reason}; the session has ended, so call salientpp.load again"
        return f"the job's key-value store (which {self.keeper} hosts) went away while loaders were made"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def members(self, process_group: Any) -> tuple[int, ...]:
        """Returns the ranks of a group in its order; None: all ranks of the job. ValueError: ``process_group`` is not a group with this rank."""
        return self.ranks if self.name else members_of(process_group)

    def check_process(self) -> None:
        """Raises RuntimeError in a process that was forked from one of several ranks."""
        if self.belongs_to_parent and self.name:
            raise RuntimeError(
                f"this process was forked from rank {self.rank}, whose session with storage hosts it cannot use; call salientpp.load in this process, or "
                "construct loaders in the rank itself"
            )
        if self.belongs_to_parent and self.size > 1:
            raise RuntimeError(
                f"this process was forked from rank {self.rank}, whose process group it cannot use; construct loaders of a partitioned graph in the "
                "ranks themselves, or start this process with the 'spawn' method or before torch.distributed is initialised"
            )


def default_store() -> dist.Store:
    """Returns the default group's key-value store, which rank 0 or torchrun hosts."""
    return dist.distributed_c10d._get_default_store()
