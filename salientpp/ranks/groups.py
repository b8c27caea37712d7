"""Keeps connections between ranks open, so that one Comm after the other uses them.

Connecting costs threads and file descriptors, and closing a connection would have to wait for the other ranks. So a :class:`Groups` becomes free when nothing
refers to its Comm any more. Ranks release groups at different times. So all ranks take the free group with the lowest number that is free on every rank, or
make a new one.

Data that the host makes and reads (counts, ids, agreements) always travels over gloo. So the host never waits for a device before it reads this data, and
it notices a lost rank. If the default group has NCCL and the loader a CUDA device, rows travel over a second group, with NCCL, and the device's
stream waits for them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from salientpp.processes import forks
from salientpp.ranks.job import Job

#: Number of the latest collectives that are kept alive after they have ended.
_HELD = 4

#: If this many groups are leased, garbage is collected before another is leased, because it may contain loaders.
_MANY_LEASED = 4


@dataclass(eq=False)
class Groups:
    """Connections that one Comm at a time uses.

    Attributes:
        host: gloo group, for data between host memories.
        device: NCCL group, for data between devices. None: that data goes over ``host``.
        number: number of the group among all groups of the same ranks. All these ranks give it the same number.
        broken: True after a failure. The group is then kept alive forever, because destroying it would wait for collectives that other ranks never join.
        under_way: collectives of ``host`` whose end no caller has waited for.
        held: collectives of ``host`` that ended last, kept alive for a while (:meth:`end` says why).
        made: True if this process has made at least one :class:`Groups`.
    """

    host: Any  # a ProcessGroupGloo; torch's type stubs lack its collectives
    device: dist.ProcessGroup | None = None
    number: int = 0
    free: bool = False
    broken: bool = False
    under_way: set[dist.Work] = field(default_factory=set)
    held: deque[dist.Work] = field(default_factory=lambda: deque(maxlen=_HELD))
    made: ClassVar[bool] = False

    def __post_init__(self) -> None:
        Groups.made = True
        self.rank: int = self.host.rank()
        self._forks = forks()
        self._probes: list[dist.Work] = []

    def give_back(self) -> None:
        """Marks the groups as free, because their Comm is gone. It may run in any thread, at any time."""
        if self.under_way:
            self.abandon()
        self.free = not self.broken

    def abandon(self) -> None:
        if not self.broken:
            self.broken = True
            for group in (self.host, self.device):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def end(self, work: dist.Work) -> None:
        """Records that a collective of ``host`` has ended.

        gloo's thread releases a collective a moment after `wait` has returned. If it held the last reference, it would need the interpreter to free
        the tensors, and would abort the process if the interpreter is exiting. So the latest collectives are kept.
        """
        if work in self.under_way:  # otherwise another caller has waited for it
            self.held.append(work)
            self.under_way.discard(work)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.host.size()) if rank != self.rank]

    def reaches(self, rank: int) -> bool:
        """True if the connection to a rank is open. Call it only when the collectives are over."""
        try:
            # No rank receives this byte. A closed connection raises at once, an open one accepts the byte.
            self._probes.append(self.host.send([torch.zeros(1, dtype=torch.uint8, device="cpu")], rank, 0))
        except RuntimeError:
            return False
        return True

    @property
    def is_inherited(self) -> bool:
        """True if this process was forked from the rank that made the group."""
        return self._forks != forks()

    def check_process(self) -> None:
        """Raises RuntimeError if the group belongs to another process."""
        if self.is_inherited:
            raise RuntimeError(
                f"this process was forked from rank {self.rank}, whose connections to the other ranks it cannot use; iterate in the rank itself, "
                "or start this process with the 'spawn' method and construct loaders there"
            )


class Circle:
    """Keeps what this process knows about one set of ranks across their Comms: their connections and their earlier mistakes.

    Attributes:
        groups: connections of these ranks, by number.
        told: for each rank, the number of its mistakes that this process was told of. Each kept the rank from making a Comm.
        has_compared: True if these ranks have compared their greetings; see :mod:`salientpp.ranks.greeting`.
    """

    #: The circles by job and by ranks.
    known: ClassVar[weakref.WeakKeyDictionary[Job, dict[tuple[int, ...], Circle]]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.groups: dict[int, Groups] = {}
        self.told: Counter[int] = Counter()
        self.has_compared = False
        self._many = _MANY_LEASED

    @classmethod
    def of(cls, job: Job, ranks: tuple[int, ...]) -> Circle:
        return cls.known.setdefault(job, {}).setdefault(ranks, cls())

    def free(self, over: str) -> list[int]:
        """Returns the numbers of the groups that no loader uses and that exchange rows ``over`` this backend, ascending."""
        if self._num_leased() >= self._many:
            gc.collect()
            # Raise the limit above the groups still in use, so that they do not cost a collection each time.
            self._many = max(_MANY_LEASED, 2 * self._num_leased())
        self.groups = {number: groups for number, groups in self.groups.items() if not groups.broken}
        return sorted(
            number
            for number, groups in self.groups.items()
            if groups.free and (groups.device is not None) == (over == "nccl")
        )

    def _num_leased(self) -> int:
        return sum(not groups.free and not groups.broken for groups in self.groups.values())


def _leave_to_parent() -> None:
    """Keeps all groups alive in a forked child. Destroying a group would wait for its threads, which exist only in the parent."""
    Groups.made = False
    for circles in Circle.known.values():
        for circle in circles.values():
            for groups in circle.groups.values():
                groups.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
