"""Connections between ranks, which one Comm after another leases.

Connecting costs threads and descriptors, and taking a connection apart would have to wait for the others. So a :class:`Groups` is free again when nothing
refers to its Comm any more. Ranks let go at different times, so all take the lowest that is free on every rank, or make a new one.

What the host makes and reads (counts, ids, agreements) always travels over gloo, so that it never waits for a device to learn what it is to do, and
notices a lost rank. If the default group has NCCL and the loader a CUDA device, rows travel over a second group, of NCCL, where the stream waits.
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
from salientpp.ranks.members import default_group

#: Collectives that are held a little longer than their users hold them.
_HELD = 4

#: From so many groups on lease on, before another is leased, garbage is collected: loaders may be in it.
_MANY_LEASED = 4


@dataclass(eq=False)
class Groups:
    """The connections of one Comm at a time.

    Attributes:
        host: what travels from host to host, over gloo.
        device: what travels from device to device, over NCCL; None where that goes over ``host``.
        number: the same on all ranks, and no other group of these ranks has it.
        broken: something failed; then it is kept for ever, because destroying it would wait for collectives that others no longer join.
        under_way: collectives on the host that nobody has seen the end of.
        made: this process has made any.
    """

    host: Any  # a ProcessGroupGloo, of whose collectives torch's type stubs say nothing
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
        """The Comm is gone. May run in any thread, at any time."""
        if self.under_way:
            self.abandon()
        self.free = not self.broken

    def abandon(self) -> None:
        if not self.broken:
            self.broken = True
            for group in (self.host, self.device):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.host.size()) if rank != self.rank]

    def reaches(self, rank: int) -> bool:
        """Whether the connection to a rank is open. Of use when the collectives are over."""
        try:
            # Nobody receives it. A closed connection refuses at once, an open one takes a byte.
            self._probes.append(self.host.send([torch.zeros(1, dtype=torch.uint8, device="cpu")], rank, 0))
        except RuntimeError:
            return False
        return True

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the rank that made the group."""
        return self._forks != forks()

    def check_process(self) -> None:
        """Raise where the group is another process's."""
        if self.is_inherited:
            raise RuntimeError(
                f"this process was forked from rank {self.rank}, whose connections to the other ranks it cannot use; iterate in the rank itself, "
                "or start this process with the 'spawn' method and make what it needs there"
            )


class Circle:
    """What this process knows of the Comms that the same ranks have made.

    Attributes:
        calls: how many they have made or begun to make.
        told: by rank, how many mistakes have been heard of that it made elsewhere.
        has_compared: these ranks have compared their greetings, see :mod:`salientpp.ranks.greeting`.
    """

    #: By default group: after `destroy_process_group` all begins anew.
    known: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Circle]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self) -> None:
        self.calls = 0
        self.groups: dict[int, Groups] = {}
        self.told: Counter[int] = Counter()
        self.has_compared = False
        self._many = _MANY_LEASED

    @classmethod
    def of(cls, ranks: tuple[int, ...]) -> Circle:
        return cls.known.setdefault(default_group(), {}).setdefault(ranks, cls())

    def free(self, over: str) -> list[int]:
        """The groups that nobody has, ascending."""
        if self._num_leased() >= self._many:
            gc.collect()
            # Those that live shall not cost a collection each time.
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
    """In a forked child: taking a group down here would wait for its threads, which are not in this process."""
    Groups.made = False
    for circles in Circle.known.values():
        for circle in circles.values():
            for groups in circle.groups.values():
                groups.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
