"""How do ranks talk, and how does one learn that another has failed?

:class:`Comm` is a process group of the package's own, beside the user's initialised default group and over its key-value store, so that
its collectives never interleave with those of DDP. One rank needs no initialisation: it is the case
``Comm.size == 1``, where every collective is a copy.

**On lease.** Connecting costs threads and descriptors, and taking a connection apart would have to wait for the others. So groups are kept:
a Comm leases one, which is free again when nothing refers to the Comm any more. Ranks let go at different times. So each says,
when a Comm is made, which of its groups are free, and all take the lowest that is free on every rank, or else make a new one: of two living
Comms collectives never interleave. A group on which something failed is nobody's any more.

**Waiting.** Every wait is bounded by the time-out and broken into slices. Between slices a rank looks for a
failure note in the job's key-value store: a rank that fails in mid-epoch, or whose script ends with an error, leaves one (who, where, why),
so the others stop within a second and can say whose fault it was, rather than wait for the time-out. Who has read it says so in the store.
Where that ends with a rank's process, as with rank 0's without torchrun, the process of a rank that knows of a failure ends no sooner than all
others have read the note, are gone, or had two seconds for it.

**Two groups.** What the host makes and reads (counts, ids, agreements) travels over gloo, always: then the host never waits for a device
to learn what it is to do, and a lost rank is noticed as above. If the default group has NCCL and the loader a CUDA device, rows
travel over a second group, of NCCL; there the wait is the stream's, not the host's, and NCCL's watchdog keeps the time.

**Who is missing?** A killed rank leaves no note, but its connections close. A collective then fails on every other rank, and each finds
out whose connection it was by trying to send a byte to everyone; that needs no store, which may have gone with the rank. A rank that is
silent has open connections; but whoever waits for longer than a slice says so in the store, so after the time-out the silent ones
are those that do not wait. Short waits touch no store.

**Threads.** The collectives of one Comm must be started by one thread at a time and in the same order on every
rank; waiting may happen anywhere.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from salientpp.ops import bytes_of
from salientpp.processes import connecting, forks
from salientpp.ranks import greeting

#: Seconds between two looks for a failure note while waiting.
_SLICE_SECONDS = 0.5

#: Collectives that are held a little longer than their users hold them, and how long gloo's thread may take to let go of one.
_HELD = 4
_LET_GO_SECONDS = 0.05

_GRACE = timedelta(seconds=5)

#: How long a look into the key-value store may take.
_STORE_SECONDS = 5.0

#: How long, after a failure, the process that hosts the store stays for the others to read of it, and how often it looks whether they have.
_STAY_SECONDS = 2.0
_STAY_PAUSE = 0.05

#: How long a rank whose group could not be made waits to hear from the others that could not make it either.
_ROLL_SECONDS = 2.0

#: From so many groups on lease on, before another is leased, garbage is collected: loaders may be in it.
_MANY_LEASED = 4

DEFAULT_TIMEOUT = timedelta(minutes=5)


class RankFailure(RuntimeError):
    """Another rank failed, left or stopped answering; the text says which, where and why."""


@dataclass(frozen=True, eq=False)
class Pending:
    """A collective under way: ``wait`` returns its output, or raises :class:`RankFailure`."""

    comm: Comm
    output: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """Of a tensor on the host this waits until it is there; on a device the current stream waits, not the host."""
        if self.work is not None and self.output.device.type != "cpu":
            self.work.wait()
        elif self.work is not None:
            self.comm._wait(self.work)
        return self.output


@dataclass(eq=False)
class Groups:
    """The connections of one Comm at a time.

    Attributes:
        host: what travels from host to host, over gloo.
        device: what travels from device to device, over NCCL; None where that goes over ``host``.
        number: the same on all ranks, and no other group of these ranks has it.
        free: no Comm has it.
        broken: something failed; then it is kept for ever, because destroying it would wait for collectives that others no longer join.
        under_way: collectives on the host that nobody has seen the end of.
        held: collectives that are held a little longer than their users hold them.
    """

    host: Any  # a ProcessGroupGloo, of whose collectives torch's type stubs say nothing
    device: dist.ProcessGroup | None = None
    number: int = 0
    free: bool = False
    broken: bool = False
    under_way: set[dist.Work] = field(default_factory=set)
    held: deque[dist.Work] = field(default_factory=lambda: deque(maxlen=_HELD))

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


class Comm:
    """A process group with sizes and uneven all-to-all.

    Attributes:
        rank, size: this rank's number in the group, and how many there are. Texts name ranks by these numbers.
        device: where rows must be to be exchanged: the CPU, or a CUDA device under NCCL. All else is exchanged from the CPU.
        timeout: the longest wait for other ranks.
        of: goes behind the number of a rank, and says which numbers are meant where they are not the job's.
    """

    made = False  # whether any group was
    living: ClassVar[weakref.WeakSet[Comm]] = weakref.WeakSet()

    def __init__(
        self,
        groups: Groups | None,
        timeout: timedelta,
        device: torch.device | None = None,
        roll: _Roll | None = None,
        within: Comm | None = None,
        numbers: Sequence[int] = (),
    ) -> None:
        self._groups = groups
        self._within, self._ranks = within, (0,) if roll is None else roll.ranks
        self._numbers = numbers or range(len(self._ranks))  # in texts
        self.timeout = timeout
        self._forks = forks()
        device = device or torch.device("cpu")
        over_host = groups is None or groups.device is None
        self.device = torch.device("cpu") if over_host else device
        # What comes over gloo goes on to the device.
        self._pins = device.type != "cpu" and over_host
        self.rank = 0 if groups is None else groups.host.rank()
        self.size = 1 if groups is None else groups.host.size()
        self.of: str = within.of if within is not None else "" if roll is None else roll.of
        self._store = None if groups is None else _job_store()
        self._probes: list[dist.Work] = []
        # Notes are this Comm's, not its groups': those that have the groups next shall not find them.
        prefix = "salientpp" if roll is None else roll.prefix
        self._note, self._waiting = f"{prefix}/failure", f"{prefix}/waiting"
        self._litter = [] if roll is None else roll.keys_of_this_rank
        self._stays = False
        if groups is not None:
            Comm.made = True
            self.living.add(self)
            weakref.finalize(self, groups.give_back).atexit = False

    @classmethod
    def create(
        cls,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        device: torch.device | None = None,
        error: Exception | None = None,
    ) -> Comm:
        """Connections between the ranks of ``process_group`` (None: the default group, if initialised), in its order.

        Collective: every rank of that group calls it, in the same order; other ranks do not.

        Args:
            timeout: the longest that a collective may take.
            device: the loader's device; where the default group has NCCL, a CUDA device exchanges its rows itself.
            error: this rank's mistake, by which it can make none: raised here, after the others were told.

        Raises:
            RankFailure: ranks did not come within the time-out; the text names them.
            DifferentVersions: the ranks run different versions of this package; see :mod:`salientpp.ranks.greeting`.
            ValueError: ``process_group`` is none, or this rank is not in it; or another rank has made a mistake.
        """
        _check_default_group()
        try:
            ranks = _members(process_group)
        except ValueError as mistake:
            go_astray(mistake)
            raise
        if len(ranks) == 1:
            if error is not None:
                raise error
            return cls(None, timeout)
        over_nccl = (
            device is not None and device.type == "cuda" and "nccl" in str(dist.get_backend_config(process_group))
        )
        circle = _Circle.of(ranks)
        _own_up(ranks, circle)
        # new_group wants all ranks of the job.
        over = "nccl" if over_nccl and ranks == tuple(range(dist.get_world_size())) else "gloo"
        roll = _Roll(ranks, circle)
        if error is not None:
            roll.tell(_words(error))
            raise error
        return cls(_lease(roll, circle, over, timeout), timeout, device, roll)

    def among(self, ranks: Sequence[int]) -> Comm:
        """Connections between some of these ranks, in ascending order; over gloo, between hosts' memories alone.

        Collective among them. Who waits there for a rank hears of a failure anywhere in this Comm, and texts name ranks by this one's numbers.

        Raises:
            RankFailure: as :meth:`create`.
        """
        if len(ranks) == 1:
            return Comm(None, self.timeout)
        members = tuple(self._ranks[rank] for rank in ranks)
        circle = _Circle.of(members)
        circle.has_compared = True  # as members of this Comm
        roll = _Roll(members, circle)
        return Comm(_lease(roll, circle, "gloo", self.timeout), self.timeout, None, roll, self, ranks)

    # --- collectives --------------------------------------------------------------------------------------

    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        empty: Callable[[Sequence[int], torch.dtype], Tensor] | None = None,
    ) -> Pending:
        """Start to exchange rows: ``send_counts[r]`` consecutive rows go to rank r, ``recv_counts[r]`` come from it.

        Args:
            send: [sum(send_counts), ...] of any dtype, contiguous, on the CPU or on ``self.device``.
            empty: (shape, dtype) -> an uninitialised tensor for what arrives on the CPU; None: torch's. Not asked where a device takes it from there.

        Returns:
            Pending [sum(recv_counts), ...], ordered by source rank.
        """
        on_host = send.device.type == "cpu"
        self.check_process()
        shape = (sum(recv_counts), *send.shape[1:])
        if empty is not None and on_host and not self._pins:
            recv = empty(shape, send.dtype)
        else:
            recv = torch.empty(shape, dtype=send.dtype, device=send.device, pin_memory=self._pins and on_host)
        groups = self._groups
        if groups is None:
            recv.copy_(send)
            return Pending(self, recv, None)
        # Bytes, because a backend's table of dtypes is shorter than torch's.
        row_bytes = recv.element_size()
        for size in recv.shape[1:]:
            row_bytes *= size
        received, sent = bytes_of(recv), bytes_of(send)
        recv_bytes, send_bytes = (
            [count * row_bytes for count in recv_counts],
            [count * row_bytes for count in send_counts],
        )
        if not on_host:
            work = dist.all_to_all_single(received, sent, recv_bytes, send_bytes, group=groups.device, async_op=True)
            return Pending(self, recv, work)
        work = groups.host.alltoall_base(received, sent, recv_bytes, send_bytes, dist.AllToAllOptions())
        groups.under_way.add(work)
        # gloo's thread lets go of a collective a moment after `wait` has returned. Were it the last to hold it, it would need the
        # interpreter to free the tensors, and abort the process if that is exiting.
        groups.held.append(work)
        return Pending(self, recv, work)

    def gather_facts(
        self,
        facts: dict[str, Any],
        error: Exception | None = None,
        task: str = "make its loader",
        kind: type[Exception] = ValueError,
    ) -> list[dict[str, Any]]:
        """Every rank's ``facts`` (JSON values), by rank; blocks. For agreement at construction, not for data.

        Args:
            error: why this rank could not do its ``task``.
            kind: of another rank's error here.

        Raises:
            Exception: ``error`` itself; of this ``kind``, what the first rank says that has one, on every rank that has none.
            DifferentVersions: the ranks tell facts of different names.
        """
        if self.size > 1:
            told = [None if error is None else f"{type(error).__name__}: {error}", facts]
            text = torch.frombuffer(bytearray(json.dumps(told, default=repr).encode()), dtype=torch.uint8)
            lengths = [length for (length,) in self.gather_numbers([text.numel()])]
            answers = self.all_to_all(text.repeat(self.size), [text.numel()] * self.size, lengths).wait()
            self._clean_up()
            everyone = [json.loads(bytes(piece.tolist())) for piece in answers.split(lengths)]
        try:
            if error is not None:
                raise error
        finally:
            error = None  # else this frame and the traceback would hold each other
        if self.size == 1:
            return [facts]
        for rank, (words, _) in enumerate(everyone):
            if words is not None:
                raise kind(f"rank {rank}{self.of} could not {task}: {words}")
        greeting.check_names([theirs for _, theirs in everyone], self.of)
        return [theirs for _, theirs in everyone]

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's ``numbers`` (equally many, 64 bits), by rank; blocks."""
        message = torch.tensor([list(numbers)] * self.size, dtype=torch.int64, device="cpu")
        return self.all_to_all(message, [1] * self.size, [1] * self.size).wait().tolist()

    def _clean_up(self) -> None:
        """Every rank has been in a collective, so all have read what this one wrote into the store when they met."""
        keys, self._litter = self._litter, []
        if keys:
            self._ask_store(lambda store: [store.delete_key(key) for key in keys])

    # --- forks --------------------------------------------------------------------------------------------

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the rank that made the group: the connections are that one's."""
        return self._groups is not None and self._forks != forks()

    def check_process(self) -> None:
        """Raise where the group is another process's."""
        if self.is_inherited:
            raise RuntimeError(
                f"this process was forked from rank {self.rank}, whose connections to the other ranks it cannot use; iterate in the rank itself, "
                "or start this process with the 'spawn' method and make what it needs there"
            )

    # --- failure ------------------------------------------------------------------------------------------

    def report_failure(self, text: str) -> None:
        """Leave a note for the others; the first one counts. Never raises."""
        self._abandon()
        if self._within is not None:
            return self._within.report_failure(text)
        self._leave_note(text)
        self._stay(time.monotonic() + _STAY_SECONDS)

    def _leave_note(self, text: str) -> None:
        def leave(store: dist.Store) -> None:
            store.compare_set(self._note, "", json.dumps({"rank": self.rank, "text": text}))
            store.set(self._read_key(self.rank), "")

        self._ask_store(leave)

    def check_script(self) -> None:
        """Tell the others, and raise, if this rank's script has ended with an error while a thread still serves them.

        Otherwise they might be waiting for this process to end (in a collective of their own) and it for them.
        """
        text = self._early_end()
        if text is not None:
            self.report_failure(text)
            raise RankFailure(text)

    def _early_end(self) -> str | None:
        words = None if threading.main_thread().is_alive() else _script_error()
        return None if words is None else f"rank {self._numbers[self.rank]} ended early: {words}"

    @classmethod
    def leave_at_exit(cls) -> None:
        """If the script has ended with an error, tell those who do not know: their next epoch may have begun before this rank's answers ended."""
        until = time.monotonic() + _STAY_SECONDS
        told = []
        for comm in list(cls.living):
            text = None if comm._within is not None or comm.is_inherited else comm._early_end()
            knows = comm._groups is not None and comm._groups.broken
            if text is not None and not knows and any(map(comm._reaches, comm._others)):
                comm._leave_note(text)
                told.append(comm)
        for comm in told:
            comm._stay(until)

    def failure(self) -> RankFailure | None:
        """What another rank has reported, if any."""
        if self._within is not None:
            return self._within.failure()
        note = self._ask_store(self._read_note)
        if note is None or note["rank"] == self.rank:
            return None
        self._stay(time.monotonic() + _STAY_SECONDS)
        return RankFailure(note["text"])

    def _read_note(self, store: dist.Store) -> Any:
        if not store.check([self._note]):
            return None
        note = json.loads(store.get(self._note))
        store.set(self._read_key(self.rank), "")
        return note

    def _read_key(self, rank: int) -> str:
        """There when that rank knows of the failure."""
        return f"{self._note}/read/{rank}"

    def _stay(self, until: float) -> None:
        """There is a note. If the store ends with this process, let it end only when the others have read the note, are gone, or had time to."""
        if self._stays or self._store is None or self.is_inherited or not greeting.is_hosted_here(self._store):
            return
        self._stays = True
        staying = threading.Thread(
            target=self._ask_store, args=(lambda store: self._await_readers(store, until),), name="salientpp-stay"
        )
        if threading.main_thread().is_alive():
            with contextlib.suppress(RuntimeError):  # no more threads
                staying.start()  # the interpreter waits for it, also in processes of multiprocessing, which call no `atexit`
        else:
            staying.run()

    def _await_readers(self, store: dist.Store, until: float) -> None:
        others = self._others
        while others and time.monotonic() < until:
            time.sleep(_STAY_PAUSE)
            others = [rank for rank in others if not store.check([self._read_key(rank)]) and self._reaches(rank)]

    def _ask_store(self, question: Callable[[dist.Store], Any]) -> Any:
        """The answer, or None. The store may be gone with the rank that hosts it, or that rank may be stopped."""
        if self._store is None or self.is_inherited:
            return None
        answer: Future[Any] = Future()
        asking = threading.Thread(
            target=_answer, args=(answer, question, self._store), name="salientpp-store", daemon=True
        )
        try:
            asking.start()
        except RuntimeError:  # the interpreter is exiting and starts no more threads
            _answer(answer, question, self._store)
        try:
            return answer.result(_STORE_SECONDS)
        except FutureTimeout:
            self._store = None  # a stuck look-up holds the store's lock: ask no more
        except Exception:
            pass
        return None

    def _lost(self, error: Exception) -> RankFailure:
        """The failure to raise when a collective broke: which connections are closed?"""
        # At once, before others that have found it out end too.
        gone = [self._numbers[rank] for rank in self._others if not self._reaches(rank)]
        time.sleep(_SLICE_SECONDS)  # a lost connection may precede the note of the rank that went down
        failure = self.failure()
        if failure is None:
            its = "its connection is" if len(gone) == 1 else "their connections are"
            failure = RankFailure(
                f"{_ranks(gone)}{self.of} went away, {its} closed; look there first"
                if gone
                else f"a rank went away: {error}"
            )
            self.report_failure(str(failure))
        return failure

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _reaches(self, rank: int) -> bool:
        if self._groups is None:
            return True
        try:
            # Nobody receives it: the collectives are over. A closed connection refuses at once, an open one takes a byte.
            self._probes.append(self._groups.host.send([torch.zeros(1, dtype=torch.uint8, device="cpu")], rank, 0))
        except RuntimeError:
            return False
        return True

    def _silent(self) -> RankFailure:
        """The failure to raise after the time-out: who does not wait?"""
        if self._within is not None:
            self._abandon()
            return self._within._silent()
        time.sleep(_SLICE_SECONDS)  # for those that have only just begun to
        failure = self.failure()
        if failure is not None:
            return failure
        others = self._others
        keys = [f"{self._waiting}/{rank}" for rank in others]
        waiting = self._ask_store(lambda store: [store.check([key]) for key in keys])
        seconds = f"within {self.timeout.total_seconds():g} s"
        if waiting is None:
            text = f"no answer from another rank {seconds}, nor from the job's key-value store (which rank 0 or torchrun hosts)"
        elif all(waiting):
            text = f"no answer {seconds} though every rank waits; is the network between them up?"
        else:
            text = f"no answer from {_ranks([rank for rank, waits in zip(others, waiting) if not waits])}{self.of} {seconds}"
        self.report_failure(text)
        return RankFailure(text)

    def _abandon(self) -> None:
        if self._groups is not None:
            self._groups.abandon()

    def _wait(self, work: dist.Work) -> None:
        try:
            self._wait_in_slices(work)
        except RankFailure:
            self._abandon()
            raise
        # After Ctrl-C it remains under way, until somebody waits to the end.
        if self._groups is not None:
            self._groups.under_way.discard(work)

    def _wait_in_slices(self, work: dist.Work) -> None:
        self.check_process()
        deadline = time.monotonic() + self.timeout.total_seconds()
        told = False
        while True:
            try:
                work.wait(timedelta(seconds=_SLICE_SECONDS))
                break
            except RuntimeError:
                self.check_script()
                if self._groups is not None and self._groups.broken:  # by another thread, which has told the others why
                    raise RankFailure(f"rank {self._numbers[self.rank]} has ended this") from None
                failure = self.failure()
                if failure is None and work.is_completed():
                    try:
                        work.wait(timedelta(seconds=_SLICE_SECONDS))
                        break  # it was only late
                    except RuntimeError as broken:
                        raise self._lost(broken) from broken
                if failure is not None:
                    raise failure from None
                if time.monotonic() >= deadline:
                    raise self._silent() from None
                if not told:
                    told = True
                    self._ask_store(lambda store: store.set(self._waiting_key, "1"))
        if told:
            self._ask_store(lambda store: store.delete_key(self._waiting_key))

    @property
    def _waiting_key(self) -> str:
        """There while this rank waits for long, for whomever."""
        return f"{self._waiting}/{self.rank}" if self._within is None else self._within._waiting_key


def group_rank(process_group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """This process's number among the ranks of a group (None: the default group), and how many there are; 0 of 1 without any.

    Raises:
        ValueError: it is no process group, or this process is not in it.
    """
    ranks = _members(process_group)
    return (0 if len(ranks) == 1 else ranks.index(dist.get_rank())), len(ranks)


def _default_group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def _members(process_group: Any) -> tuple[int, ...]:
    """The ranks of a group, numbers of the default group, in the group's order; (0,) where torch.distributed is not initialised."""
    is_initialized = dist.is_available() and dist.is_initialized()
    if process_group is None:
        return tuple(range(dist.get_world_size())) if is_initialized else (0,)
    if not is_initialized:
        raise ValueError("process_group= needs torch.distributed, which is not initialised (or no more)")
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process_group must be a group that this rank is in, but rank {dist.get_rank()} is not in it; only its members call this"
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(f"process_group must be a torch.distributed.ProcessGroup or None, got {process_group!r}")
    try:
        ranks = tuple(dist.get_process_group_ranks(process_group))
    except (KeyError, ValueError, RuntimeError):
        raise ValueError(
            "process_group must be a group of this job, got one that torch.distributed does not know (any more)"
        ) from None
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"process_group must be a group that this rank is in, got ranks {list(ranks)} on rank {dist.get_rank()}"
        )
    return ranks


def _lease(roll: _Roll, circle: _Circle, over: str, timeout: timedelta) -> Groups:
    """Connections that are free on every rank of the roll, or new ones."""
    number = roll.agree(over, circle.free(over), timeout)
    groups = circle.groups.get(number)
    if groups is None:
        with connecting():
            groups = circle.groups[number] = _connect(roll, number, over, timeout)
    groups.free = False
    # The backend's own time-out comes a little later, so that ours, whose text says more, is the one met.
    groups.host._set_default_timeout(timeout + _GRACE)
    return groups


def _connect(roll: _Roll, number: int, over: str, timeout: timedelta) -> Groups:
    """New connections; all ranks are here already."""
    store = dist.PrefixStore(f"{roll.prefix}/gloo", _job_store())
    try:
        # A backend alone, not dist.new_group's: that would want every rank of the job, find a name that ranks with other groups may
        # not find, and be wrapped by torch's debugging, which keeps the time-out from it. gloo tries to connect five times, each
        # for as long as it would wait in a collective.
        host = dist.ProcessGroupGloo(store, roll.rank, len(roll.ranks), max(timeout / 5, timedelta(seconds=2)))
    except RuntimeError as error:
        missing = roll.missing("after", _ROLL_SECONDS)
        raise RankFailure(f"{_ranks(missing) or 'a rank'}{roll.of} went away while a loader was made") from error
    roll.missing("after", 0)
    device = None
    if over == "nccl":
        # Its kernels are few and small, and the pipeline waits for them: they go before the model's.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        device = dist.new_group(timeout=timeout + _GRACE, backend="nccl", pg_options=options)
    return Groups(host, device, number)


class _Circle:
    """What this process knows of the Comms that the same ranks have made.

    Attributes:
        calls: how many they have made or begun to make.
        groups: those made for them, by number.
        told: by rank, how many mistakes have been heard of that it made elsewhere.
        has_compared: these ranks have compared their greetings, see :mod:`salientpp.ranks.greeting`.
    """

    #: By default group: after `destroy_process_group` all begins anew.
    known: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], _Circle]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self) -> None:
        self.calls = 0
        self.groups: dict[int, Groups] = {}
        self.told: Counter[int] = Counter()
        self.has_compared = False
        self._many = _MANY_LEASED

    @classmethod
    def of(cls, ranks: tuple[int, ...]) -> _Circle:
        return cls.known.setdefault(_default_group(), {}).setdefault(ranks, cls())

    def free(self, over: str) -> list[int]:
        """The groups that nobody has, ascending."""
        if self._num_leased() >= self._many:
            gc.collect()
            self._many = max(
                _MANY_LEASED, 2 * self._num_leased()
            )  # those that live shall not cost a collection each time
        self.groups = {number: groups for number, groups in self.groups.items() if not groups.broken}
        return sorted(
            number
            for number, groups in self.groups.items()
            if groups.free and (groups.device is not None) == (over == "nccl")
        )

    def _num_leased(self) -> int:
        return sum(not groups.free and not groups.broken for groups in self.groups.values())


class _Roll:
    """Which ranks are here to make a Comm, and which groups can they take? torch's own errors would not say who is missing.

    Attributes:
        ranks: of the default group, in the group's order; ``rank`` is this process's number among them.
        prefix: of what concerns this Comm in the store.
        of: after a rank's number, says which numbers are meant.
    """

    def __init__(self, ranks: tuple[int, ...], circle: _Circle) -> None:
        self.ranks, self.rank = ranks, ranks.index(dist.get_rank())
        self._circle = circle
        self._store = _job_store()
        circle.calls += 1
        self._number = circle.calls
        are_all = ranks == tuple(range(dist.get_world_size()))
        self.prefix = f"salientpp/{'all' if are_all else '-'.join(map(str, ranks))}/{self._number}"
        self.of = "" if are_all else f" of the process_group of ranks {list(ranks)}"

    @property
    def keys_of_this_rank(self) -> list[str]:
        return [self._keys(call)[self.rank] for call in ("before", "after")]

    def _keys(self, call: str) -> list[str]:
        return [f"{self.prefix}/{call}/{rank}" for rank in range(len(self.ranks))]

    def tell(self, mistake: str, astray: bool = False) -> None:
        """Let all who come know of this rank's mistake, in place of an answer; ``astray``: see :func:`go_astray`."""
        _try(lambda: self._store.compare_set(f"{self.prefix}/error", "", json.dumps([self.rank, mistake, astray])))

    def agree(self, over: str, free: list[int], timeout: timedelta) -> int:
        """Answer, and hear the others; the number of the group to take or to make.

        Args:
            over: how rows of this rank travel, 'gloo' or 'nccl'.
            free: numbers of the groups that are free here.

        Raises:
            DifferentVersions: the ranks run different versions of this package.
        """
        if not self._circle.has_compared:
            with _store_needed():
                greeting.greet(self._store, self.ranks[self.rank])
        missing = self.missing("before", timeout.total_seconds(), json.dumps([over, free]))
        if missing:
            raise RankFailure(
                f"{_ranks(missing)}{self.of} did not come to make a loader within {timeout.total_seconds():g} s; "
                "every rank makes its loaders in the same order: look at its output first"
            )
        # An answer of another version may mean anything, so this comes before the answers are read.
        self._compare_greetings()
        with _store_needed():
            answers = [json.loads(self._store.get(key)) for key in self._keys("before")]
        for rank, (way, _) in enumerate(answers):
            if way != answers[0][0]:
                raise ValueError(
                    f"all ranks must exchange rows in the same way, got {answers[0][0]} on rank 0 and {way} on rank {rank}{self.of}; "
                    "give every rank a device of the same kind"
                )
        everywhere = set.intersection(*(set(numbers) for _, numbers in answers))
        return min(everywhere, default=self._number)

    def missing(self, call: str, seconds: float, answer: str = "") -> list[int]:
        """Answer a call of the roll, and wait for the others to; the ranks that have not within that time.

        Raises:
            RankFailure: the store is gone.
            ValueError: a rank has made a mistake, by which it does not come.
        """
        keys = self._keys(call)
        started, pause = time.monotonic(), 0.005
        with _store_needed():
            self._store.set(keys[self.rank], answer)
            # Looking now and then, because a wait of torch's store complains on stderr when it ends without an answer.
            while time.monotonic() < started + seconds and not self._store.check(keys):
                if call == "before":
                    # A rank of another version may never answer, but it has greeted.
                    if not self._circle.has_compared and greeting.have_greeted(self._store, self.ranks):
                        self._compare_greetings()
                    self._look_for_mistakes(keys, also_astray=time.monotonic() > started + _SLICE_SECONDS)
                time.sleep(pause)
                pause = min(2 * pause, _SLICE_SECONDS)
            return [rank for rank, key in enumerate(keys) if seconds and not self._store.check([key])]

    def _compare_greetings(self) -> None:
        if not self._circle.has_compared:
            with _store_needed():
                greeting.compare_greetings(self._store, self.ranks, self.ranks[self.rank], self.of)
            self._circle.has_compared = True

    def _look_for_mistakes(self, keys: list[str], also_astray: bool) -> None:
        told = self._circle.told
        if self._store.check([f"{self.prefix}/error"]):
            rank, text, astray = json.loads(self._store.get(f"{self.prefix}/error"))
            told[rank] += astray
            raise ValueError(f"rank {rank}{self.of} could not make its loader: {text}")
        for rank, key in enumerate(keys) if also_astray else ():
            astray_key = _astray_key(self.ranks[rank])
            if not self._store.check([key]) and self._store.check([astray_key]):
                count, text = json.loads(self._store.get(astray_key))
                if count > told[rank]:
                    told[rank] += 1
                    raise ValueError(f"rank {rank}{self.of} could not make its loader: {text}")


class _Mistakes:
    """What this rank did wrong where it could not know which ranks would wait for it, and how much of it the next ones to meet have been told."""

    made: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, _Mistakes]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.num_told = 0


def go_astray(error: Exception) -> None:
    """Let ranks that wait for this one to make a loader know why it does not come, where its mistake hides who they are.

    It leaves a note, and they look for one. Should this rank go on, it makes up for the call that the others have counted and it
    has not.
    """
    if dist.is_available() and dist.is_initialized() and not _is_parents_group():
        mistakes = _Mistakes.made.setdefault(_default_group(), _Mistakes())
        mistakes.texts.append(_words(error))
        _try(
            lambda: _job_store().set(
                _astray_key(dist.get_rank()), json.dumps([len(mistakes.texts), mistakes.texts[-1]])
            )
        )


def _own_up(ranks: tuple[int, ...], circle: _Circle) -> None:
    mistakes = _Mistakes.made.get(_default_group())
    if mistakes is not None and mistakes.num_told < len(mistakes.texts):
        for text in mistakes.texts[mistakes.num_told :]:
            _Roll(ranks, circle).tell(text, astray=True)
        mistakes.num_told = len(mistakes.texts)
        _try(lambda: _job_store().delete_key(_astray_key(dist.get_rank())))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _astray_key(rank: int) -> str:
    return f"salientpp/astray/{rank}"


@contextlib.contextmanager
def _store_needed() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RankFailure(
            "the job's key-value store (which rank 0 or torchrun hosts) went away while loaders were made"
        ) from error


def _try(action: Callable[[], Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the store is gone: the others find that out themselves
        action()


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""


def _answer(answer: Future[Any], question: Callable[[dist.Store], Any], store: dist.Store) -> None:
    try:
        answer.set_result(question(store))
    except Exception as error:
        answer.set_exception(error)


def _script_error() -> str | None:
    """How the main thread ended, if by an error."""
    error = getattr(sys, "last_value", None)  # set when the interpreter has printed a traceback
    if error is not None:
        return f"{type(error).__name__}: {error}"
    # multiprocessing prints, or hands to its parent, the traceback itself. It keeps only the exit code, in the frame in
    # which the main thread now waits for the other threads.
    main_thread = threading.main_thread().ident
    frame = None if main_thread is None else sys._current_frames().get(main_thread)
    while frame is not None:
        if frame.f_code.co_name == "_bootstrap" and frame.f_globals.get("__name__") == "multiprocessing.process":
            code = frame.f_locals.get("exitcode")
            return f"its process ended with exit code {code}" if code else None
        frame = frame.f_back
    return None


def _linger() -> None:
    """Let others know of an error, and give gloo's threads time to let go of the last collectives, see ``Comm.all_to_all``."""
    Comm.leave_at_exit()
    if Comm.made:
        time.sleep(_LET_GO_SECONDS)


atexit.register(_linger)  # on import, so that it runs after whatever users of Comm do at exit


def _job_store() -> dist.Store:
    """The default group's key-value store."""
    return dist.distributed_c10d._get_default_store()


# --- forked children --------------------------------------------------------------------------------------

_parents_groups: list[dist.ProcessGroup] = []


def _leave_to_parent() -> None:
    """In a forked child: the groups are the parent's. Taking one down here would wait for its threads, which are not in this process."""
    Comm.made = False
    for circles in _Circle.known.values():
        for circle in circles.values():
            for groups in circle.groups.values():
                groups.abandon()
    if dist.is_available() and dist.is_initialized():
        _parents_groups.extend(dist.distributed_c10d._world.pg_map)
        for group in _parents_groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _is_parents_group() -> bool:
    """Whether the default group is that of the rank which this process was forked from."""
    return bool(_parents_groups) and any(group is dist.group.WORLD for group in _parents_groups)


def _check_default_group() -> None:
    if _is_parents_group() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"this process was forked from rank {dist.get_rank()}, whose process group it cannot use: loaders of a partitioned graph are made by the ranks "
            "themselves; start this process with the 'spawn' method, or before torch.distributed is initialised"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
