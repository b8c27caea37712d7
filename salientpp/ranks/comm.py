"""Collectives between the ranks of a job.

:class:`Comm` has its own process group, separate from the user's default group, so its collectives never interleave with those of DDP. A single rank needs no
initialisation: its collectives are copies. Only one thread at a time may start collectives of a Comm, in the same order on every rank. Any thread may wait
for them.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.overrides
from torch import Tensor

from salientpp.ops import bytes_of
from salientpp.ranks import greeting
from salientpp.ranks.facts import Told
from salientpp.ranks.failure import FailureNotes
from salientpp.ranks.groups import Groups
from salientpp.ranks.job import Job
from salientpp.ranks.members import members_of
from salientpp.ranks.roll import GRACE, Roll, go_astray, own_up, words_of
from salientpp.ranks.standstill import Progress
from salientpp.ranks.waiting import wait_for

DEFAULT_TIMEOUT = timedelta(minutes=5)

#: Longest wait for a rank that computes for others, see :meth:`Comm.patient`.
_PATIENCE = timedelta(days=7)


@dataclass(frozen=True, eq=False)
class Pending:
    """A collective in progress. ``wait`` returns its output, or raises :class:`RankFailure`."""

    comm: Comm
    output: Tensor
    work: dist.Work | None
    number: int = 0  # among the collectives of the host

    def wait(self) -> Tensor:
        """Waits for the output, and returns it. If the output is on a device, the device's current stream waits, and not the host."""
        if self.work is not None and self.output.device.type != "cpu":
            self.work.wait()
        elif self.work is not None:
            self.comm._wait(self.work, self.number)
        return self.output


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    """Opens a context without torch function modes, because a collective would keep them alive, and with them a model."""
    modes = []
    while torch._C._len_torch_function_stack():  # also counts modes that are disabled at the moment
        modes.append(torch.overrides._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch.overrides._push_mode(mode)


def _has_nccl(process_group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """True if the group exchanges data between devices of this type over NCCL."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(process_group).split(","))
    return backends.get(device.type) == "nccl"


class Comm:
    """Process group in which the ranks of a loader exchange rows and facts. Each rank may send another number of rows to each other rank.

    Attributes:
        rank, size: number of this rank in the group, and number of ranks. Error texts name ranks by these numbers.
        device: device of exchanged rows: the loader's device if they travel over NCCL, otherwise the CPU. Everything else is exchanged from the CPU.
        job: the job of these ranks; None for a single process.
        of: text that errors append to a rank's number. It names the process group if the number is not the job's rank; else it is empty.
        groups: torch's groups of these ranks. None: a single process.
        number: number of this Comm among those that the same ranks have made; 0 for a single process.
        progress: the collectives that this rank has started. Callers say there what the next ones are for.
        seconds_waited: time for which threads of this rank have waited for collectives on the host.
        on_wait: called with the begin and the end of such a wait, as times of ``time.perf_counter``; None: not called.
    """

    def __init__(
        self,
        groups: Groups | None,
        timeout: timedelta,
        device: torch.device | None = None,
        roll: Roll | None = None,
        within: Comm | None = None,
        numbers: Sequence[int] = (),
    ) -> None:
        self.groups = groups
        self._within = within  # kept alive: its notes are used here, and no other Comm may lease its groups
        self.job: Job | None = None if roll is None else roll.job
        self._ranks = (0,) if roll is None else roll.ranks
        self._numbers = numbers or range(len(self._ranks))  # the numbers by which error texts name the ranks
        self.timeout = timeout
        self.seconds_waited = 0.0
        self.on_wait: Callable[[float, float], None] | None = None
        device = device or torch.device("cpu")
        over_host = groups is None or groups.device is None
        self.device = torch.device("cpu") if over_host else device
        # Pinned, because rows that arrive over gloo are then copied to the device.
        self._pins = device.type != "cpu" and over_host
        self.rank = 0 if groups is None else groups.rank
        self.size = 1 if groups is None else groups.host.size()
        self.number = 0 if roll is None else roll.number
        self.of: str = within.of if within is not None else "" if roll is None else roll.of
        prefix = "salientpp" if roll is None else roll.prefix
        self.notes: FailureNotes = FailureNotes(groups, self.job, prefix, self.of) if within is None else within.notes
        self.progress = Progress() if roll is None else roll.progress
        self.progress.failure_key = self.notes.key
        if within is not None:
            self.progress.circle = within.progress.circle
        self._litter = [] if roll is None else roll.keys_of_this_rank
        if groups is not None:
            weakref.finalize(self, groups.give_back).atexit = False

    @classmethod
    def create(
        cls,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        device: torch.device | None = None,
        error: Exception | None = None,
        over_host: bool = False,
        job: Job | None = None,
    ) -> Comm:
        """Creates the connections between the ranks of ``process_group`` (None: all ranks of the job), in its order.

        Collective: every rank of that group calls it, in the same order; other ranks do not.

        Args:
            timeout: maximum time of a collective.
            device: device of the loader. If the default group has NCCL for devices of its type, the device exchanges its rows itself.
            over_host: rows travel between host memories, also if devices could exchange them.
            job: the job of the ranks. None: that of the default group, or a single process.
            error: this rank's mistake, because of which it cannot create a Comm. It is raised here after the other ranks were told.

        Raises:
            RankFailure: some ranks did not arrive within the timeout; the text names them.
            DifferentVersions: the ranks run different versions of this package; see :mod:`salientpp.ranks.greeting`.
            ValueError: ``process_group`` is not a valid group, this rank is not in it, or another rank has made a mistake.
        """
        job = job or Job.default()
        if job is not None:
            job.check_process()
        try:
            ranks = members_of(process_group) if job is None else job.members(process_group)
        except ValueError as mistake:
            go_astray(mistake)
            raise
        if job is None or len(ranks) == 1:
            if error is not None:
                raise error
            return cls(None, timeout)
        own_up(job, ranks)
        over_nccl = not over_host and device is not None and _has_nccl(process_group, device)
        # new_group must be called by all ranks of the job.
        over = "nccl" if over_nccl and ranks == job.ranks else "gloo"
        roll = Roll(job, ranks)
        if error is not None:
            roll.tell(words_of(error))
            raise error
        return cls(roll.lease(over, timeout), timeout, device, roll)

    def among(self, ranks: Sequence[int], between_devices: bool = False) -> Comm:
        """Creates connections between some of these ranks, in ascending order.

        Collective among those ranks. A rank that waits in the new Comm also notices failures in this Comm. Error texts use this Comm's rank numbers.

        Args:
            between_devices: if devices exchange the rows of this Comm, they exchange those of the new one too. Otherwise rows travel between host memories.
        """
        if len(ranks) == 1:
            return Comm(None, self.timeout)
        members = tuple(self._ranks[rank] for rank in ranks)
        assert self.job is not None  # several ranks have a job
        roll = Roll(self.job, members, self.notes)
        roll.circle.has_compared = True  # its ranks compared greetings when they created this Comm
        numbers = [self._numbers[rank] for rank in ranks]
        over_nccl = between_devices and self.device.type != "cpu"
        groups = roll.lease("nccl" if over_nccl else "gloo", self.timeout)
        return Comm(groups, self.timeout, self.device if over_nccl else None, roll, self, numbers)

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers by which error texts name these ranks. Ranks that :meth:`among` has chosen keep their numbers in the original Comm."""
        return self._numbers

    # --- collectives --------------------------------------------------------------------------------------

    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        empty: Callable[[Sequence[int], torch.dtype], Tensor] | None = None,
    ) -> Pending:
        """Starts to exchange rows: ``send_counts[r]`` consecutive rows go to rank r, and ``recv_counts[r]`` rows come from it.

        Args:
            send: [sum(send_counts), ...] of any dtype, contiguous, on the CPU or on ``self.device``.
            empty: (shape, dtype) -> an uninitialised tensor for rows that arrive on the CPU. None: torch's. Not called
                if a device copies the rows from the CPU's memory.

        Returns:
            Pending [sum(recv_counts), ...], ordered by source rank.

        Raises:
            RankFailure: a rank has failed before, also if the user has caught the error.
        """
        on_host = send.device.type == "cpu"
        self.check_process()
        shape = (sum(recv_counts), *send.shape[1:])
        if empty is not None and on_host and not self._pins:
            recv = empty(shape, send.dtype)
        else:
            recv = torch.empty(shape, dtype=send.dtype, device=send.device, pin_memory=self._pins and on_host)
        groups = self.groups
        if groups is None:
            recv.copy_(send)
            return Pending(self, recv, None)
        self.notes.check()
        # As bytes, because a backend supports fewer dtypes than torch.
        row_bytes = math.prod(recv.shape[1:]) * recv.element_size()
        received, sent = bytes_of(recv), bytes_of(send)
        recv_bytes = [count * row_bytes for count in recv_counts]
        send_bytes = [count * row_bytes for count in send_counts]
        with _without_modes():
            if not on_host:
                device = groups.device
                work = dist.all_to_all_single(received, sent, recv_bytes, send_bytes, group=device, async_op=True)
                return Pending(self, recv, work)
            number = self.progress.start()
            work = groups.host.alltoall_base(received, sent, recv_bytes, send_bytes, dist.AllToAllOptions())
        groups.under_way.add(work)
        return Pending(self, recv, work, number)

    @contextlib.contextmanager
    def together(self, task: str, kind: type[Exception] = ValueError) -> Iterator[Told]:
        """Opens a context for a step that all ranks take or none takes. Collective when the block ends, even by an error.

        If the block has collectives, either all ranks must reach them or none.

        Raises:
            Exception: on a rank whose block raised, that error itself. On the others, a ``kind`` with the text of the first rank that has an error.
            DifferentVersions: the ranks have facts with different names.
        """
        told = Told()
        try:
            yield told
        except Exception as error:
            self._gather({}, error, task, kind)
        except BaseException as error:  # Ctrl-C
            self.report_failure(f"rank {self.rank}{self.of} could not {task}: {type(error).__name__}")
            raise
        told.everyone = self._gather(told.mine, None, task, kind)

    def gather_facts(
        self, facts: dict[str, Any], task: str = "make its loader", kind: type[Exception] = ValueError
    ) -> list[dict[str, Any]]:
        """Gathers the ``facts`` (JSON values) of all ranks, in the order of the ranks; blocks. For agreement, not for data. See :meth:`together`."""
        return self._gather(facts, None, task, kind)

    def _gather(
        self, facts: dict[str, Any], error: Exception | None, task: str, kind: type[Exception]
    ) -> list[dict[str, Any]]:
        if self.size > 1:
            self.progress.task = f"to {task}"
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
            error = None  # otherwise this frame and the traceback would keep each other alive
        if self.size == 1:
            return [facts]
        for rank, (words, _) in enumerate(everyone):
            if words is not None:
                raise kind(f"rank {rank}{self.of} could not {task}: {words}")
        greeting.check_names([theirs for _, theirs in everyone], self.of)
        return [theirs for _, theirs in everyone]

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gathers the ``numbers`` of all ranks (equally many, 64 bits), in the order of the ranks; blocks."""
        message = torch.tensor([list(numbers)] * self.size, dtype=torch.int64, device="cpu")
        return self.all_to_all(message, [1] * self.size, [1] * self.size).wait().tolist()

    def _clean_up(self) -> None:
        """Deletes this rank's keys from the store. Called after a collective, when all ranks must have read them."""
        keys, self._litter = self._litter, []
        if keys and self.notes.store is not None:
            self.notes.store.ask(lambda store: [store.delete_key(key) for key in keys])

    def _wait(self, work: dist.Work, number: int) -> None:
        if self.groups is None:
            return
        started = time.perf_counter()
        wait_for(work, number, self.progress, self.groups, self.notes, self._numbers, self.timeout)
        ended = time.perf_counter()
        self.seconds_waited += ended - started
        if self.on_wait is not None:
            self.on_wait(started, ended)

    # --- forks --------------------------------------------------------------------------------------------

    @property
    def is_inherited(self) -> bool:
        """True if this process was forked from the rank that made the group. The connections belong to that rank."""
        return self.groups is not None and self.groups.is_inherited

    def check_process(self) -> None:
        """Raises RuntimeError in a process that was forked from this rank, because connections belong to the rank."""
        if self.groups is not None:
            self.groups.check_process()

    # --- failure ------------------------------------------------------------------------------------------

    def report_failure(self, text: str) -> None:
        """Leaves a failure note for the other ranks. They read only the first note that any rank left. Never raises."""
        if self.groups is not None:
            self.groups.abandon()
        self.notes.report(text)

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Opens a context with a very long timeout, for collectives that some rank begins late. The others wait for it as long as it lives."""
        before = self.timeout
        try:
            self.be_patient()
            yield
        finally:
            self.timeout = before
            if self.groups is not None:
                self.groups.host._set_default_timeout(before + GRACE)

    @contextlib.contextmanager
    def reporting(self, action: str) -> Iterator[None]:
        """Wraps an ``action`` of this rank, for which other ranks may wait in their next collective. An error, also Ctrl-C, is reported to them."""
        try:
            yield
        except BaseException as error:
            self.report_failure(f"rank {self.rank}{self.of} could not {action}: {words_of(error)}")
            raise

    def be_patient(self) -> None:
        """Makes this rank wait for others as long as they live."""
        self.timeout = _PATIENCE
        if self.groups is not None:
            self.groups.host._set_default_timeout(_PATIENCE)

    def check_script(self) -> None:
        """Tells the other ranks, and raises, if this rank's script has ended with an error while a thread still serves them."""
        self.notes.check_script()
