"""How do ranks talk, and how does one learn that another has failed?

:class:`Comm` is a process group of the package's own, made from the user's initialised default group, so that
its collectives never interleave with those of DDP. One rank needs no initialisation: it is the case
``Comm.size == 1``, where every collective is a copy.

**Waiting.** Every wait is bounded by the time-out and broken into slices. Between slices a rank looks for a
failure note in the job's key-value store: a rank that fails in mid-epoch leaves one (who, where, why), so the
others stop within a second and can say whose fault it was, rather than wait for the time-out.

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
import ctypes
import json
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Seconds between two looks for a failure note while waiting.
_SLICE_SECONDS = 0.5

#: Collectives that are held a little longer than their users hold them, and how long gloo's thread may take to let go of one.
_HELD = 4
_LET_GO_SECONDS = 0.05

_GRACE = timedelta(seconds=5)

#: How long a look into the key-value store may take.
_STORE_SECONDS = 5.0

#: How long a rank whose group could not be made waits to hear from the others that could not make it either.
_ROLL_SECONDS = 2.0

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


class Comm:
    """A process group with sizes and uneven all-to-all.

    Attributes:
        rank, size: this rank's number in the group, and how many there are.
        device: where rows must be to be exchanged: the CPU, or a CUDA device under NCCL. All else is exchanged from the CPU.
        timeout: the longest wait for other ranks.
    """

    made = False  # whether any group was

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: timedelta, device: torch.device | None = None, device_group: dist.ProcessGroup | None = None
    ) -> None:
        self._group = group
        self._device_group = device_group
        self.timeout = timeout
        device = device or torch.device("cpu")
        self.device = torch.device("cpu") if device_group is None else device
        # What comes over gloo goes on to the device.
        self._pins = device.type != "cpu" and device_group is None
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        Comm.made |= group is not None
        self._store = _job_store() if group is not None else None
        self._held: deque[dist.Work] = deque(maxlen=_HELD)
        self._probes: list[dist.Work] = []
        self._abandoned = False
        self._note = f"salientpp/failure/{group.group_name}" if group is not None else ""
        self._waiting = f"salientpp/waiting/{group.group_name}" if group is not None else ""

    @classmethod
    def create(
        cls,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        device: torch.device | None = None,
    ) -> Comm:
        """A new group with the ranks of ``process_group`` (None: the default group, if initialised).

        Collective: every rank of the default group calls it, in the same order.

        Args:
            timeout: the longest that a collective may take.
            device: the loader's device; where the default group has NCCL, a CUDA device exchanges its rows itself.

        Raises:
            RankFailure: ranks did not come within the time-out; the text names them.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None, timeout)
        ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
        if dist.get_world_size(process_group) == 1:
            return cls(None, timeout)
        ranks = list(range(dist.get_world_size())) if ranks is None else ranks
        roll = _Roll(ranks)
        missing = roll.missing("before", timeout.total_seconds())
        if missing:
            raise RankFailure(
                f"{_ranks(missing)} did not come to make a loader within {timeout.total_seconds():g} s; "
                "every rank makes its loaders in the same order: look at its output first"
            )
        try:
            group = _connect(ranks, timeout)
        except RuntimeError as error:
            missing = roll.missing("after", _ROLL_SECONDS)
            raise RankFailure(f"{_ranks(missing) or 'a rank'} went away while a loader was made") from error
        roll.missing("after", 0)
        device_group = None
        if device is not None and device.type == "cuda" and "nccl" in str(dist.get_backend_config(process_group)):
            # Its kernels are few and small, and the pipeline waits for them: they go before the model's.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            device_group = dist.new_group(ranks, timeout=timeout + _GRACE, backend="nccl", pg_options=options)
        return cls(group, timeout, device, device_group)

    # --- collectives --------------------------------------------------------------------------------------

    def all_to_all(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Pending:
        """Start to exchange rows: ``send_counts[r]`` consecutive rows go to rank r, ``recv_counts[r]`` come from it.

        Args:
            send: [sum(send_counts), ...] of any dtype, contiguous, on the CPU or on ``self.device``.

        Returns:
            Pending [sum(recv_counts), ...], ordered by source rank.
        """
        on_host = send.device.type == "cpu"
        recv = torch.empty((sum(recv_counts), *send.shape[1:]), dtype=send.dtype, device=send.device, pin_memory=self._pins and on_host)
        if self._group is None:
            recv.copy_(send)
            return Pending(self, recv, None)
        # Bytes, because a backend's table of dtypes is shorter than torch's.
        row_bytes = recv.element_size()
        for size in recv.shape[1:]:
            row_bytes *= size
        work = dist.all_to_all_single(
            recv.view(-1).view(torch.uint8),
            send.contiguous().view(-1).view(torch.uint8),
            [count * row_bytes for count in recv_counts],
            [count * row_bytes for count in send_counts],
            group=self._group if on_host else self._device_group,
            async_op=True,
        )
        # gloo's thread lets go of a collective a moment after `wait` has returned. Were it the last to hold it, it would need the
        # interpreter to free the tensors, and abort the process if that is exiting.
        if on_host:
            self._held.append(work)
        return Pending(self, recv, work)

    def gather_facts(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's ``facts`` (JSON values), by rank; blocks. For agreement at construction, not for data."""
        if self.size == 1:
            return [facts]
        text = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
        lengths = [length for length, in self.gather_numbers([text.numel()])]
        everyone = self.all_to_all(text.repeat(self.size), [text.numel()] * self.size, lengths).wait()
        return [json.loads(bytes(piece.tolist())) for piece in everyone.split(lengths)]

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's ``numbers`` (equally many, 64 bits), by rank; blocks."""
        message = torch.tensor([list(numbers)] * self.size, dtype=torch.int64)
        return self.all_to_all(message, [1] * self.size, [1] * self.size).wait().tolist()

    # --- failure ------------------------------------------------------------------------------------------

    def report_failure(self, text: str) -> None:
        """Leave a note for the others; the first one counts. Never raises."""
        self._abandon()
        self._ask_store(lambda store: store.compare_set(self._note, "", json.dumps({"rank": self.rank, "text": text})))

    def check_script(self) -> None:
        """Tell the others, and raise, if this rank's script has ended with an error while a thread still serves them.

        Otherwise they might be waiting for this process to end (in a collective of their own) and it for them.
        """
        words = None if threading.main_thread().is_alive() else _script_error()
        if words is not None:
            text = f"rank {self.rank} ended in mid-epoch: {words}"
            self.report_failure(text)
            raise RankFailure(text)

    def failure(self) -> RankFailure | None:
        """What another rank has reported, if any."""
        note = self._ask_store(lambda store: json.loads(store.get(self._note)) if store.check([self._note]) else None)
        return None if note is None or note["rank"] == self.rank else RankFailure(note["text"])

    def _ask_store(self, question: Callable[[dist.Store], Any]) -> Any:
        """The answer, or None. The store may be gone with the rank that hosts it, or that rank may be stopped."""
        if self._store is None:
            return None
        answer = Future()
        asking = threading.Thread(target=_answer, args=(answer, question, self._store), name="salientpp-store", daemon=True)
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
        gone = [rank for rank in range(self.size) if rank != self.rank and not self._reaches(rank)]
        time.sleep(_SLICE_SECONDS)  # a lost connection may precede the note of the rank that went down
        failure = self.failure()
        if failure is None:
            its = "its connection is" if len(gone) == 1 else "their connections are"
            failure = RankFailure(f"{_ranks(gone)} went away, {its} closed; look there first" if gone else f"a rank went away: {error}")
            self.report_failure(str(failure))
        return failure

    def _reaches(self, rank: int) -> bool:
        try:
            # Nobody receives it: the collectives are over. A closed connection refuses at once, an open one takes a byte.
            self._probes.append(dist.isend(torch.zeros(1, dtype=torch.uint8), group=self._group, group_dst=rank))
        except RuntimeError:
            return False
        return True

    def _silent(self) -> RankFailure:
        """The failure to raise after the time-out: who does not wait?"""
        time.sleep(_SLICE_SECONDS)  # for those that have only just begun to
        failure = self.failure()
        if failure is not None:
            return failure
        others = [rank for rank in range(self.size) if rank != self.rank]
        keys = [f"{self._waiting}/{rank}" for rank in others]
        waiting = self._ask_store(lambda store: [store.check([key]) and store.get(key) == b"1" for key in keys])
        seconds = f"within {self.timeout.total_seconds():g} s"
        if waiting is None:
            text = f"no answer from another rank {seconds}, nor from the job's key-value store (which rank 0 or torchrun hosts)"
        elif all(waiting):
            text = f"no answer {seconds} though every rank waits; is the network between them up?"
        else:
            text = f"no answer from {_ranks([rank for rank, waits in zip(others, waiting) if not waits])} {seconds}"
        self.report_failure(text)
        return RankFailure(text)

    def _abandon(self) -> None:
        """Keep the groups for ever: destroying them would wait for collectives that other ranks no longer join."""
        if self._group is not None and not self._abandoned:
            self._abandoned = True
            for group in (self._group, self._device_group):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _wait(self, work: dist.Work) -> None:
        try:
            self._wait_in_slices(work)
        except RankFailure:
            self._abandon()
            raise

    def _wait_in_slices(self, work: dist.Work) -> None:
        deadline = time.monotonic() + self.timeout.total_seconds()
        told = False
        while True:
            try:
                work.wait(timedelta(seconds=_SLICE_SECONDS))
                break
            except RuntimeError as error:
                self.check_script()
                if self._abandoned:  # by another thread, which has told the others why
                    raise RankFailure(f"rank {self.rank} has ended this") from None
                failure = self.failure()
                if failure is None and work.is_completed():
                    try:
                        work.wait(timedelta(seconds=_SLICE_SECONDS))
                        break  # it was only late
                    except RuntimeError as broken:
                        error = broken
                    raise self._lost(error) from error
                if failure is not None:
                    raise failure from None
                if time.monotonic() >= deadline:
                    raise self._silent() from None
                if not told:
                    told = True
                    self._ask_store(lambda store: store.set(f"{self._waiting}/{self.rank}", "1"))
        if told:
            self._ask_store(lambda store: store.set(f"{self._waiting}/{self.rank}", "0"))


def _connect(ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    # The backend's own time-out comes a little later, so that ours, whose text says more, is the one met.
    longest = timeout + _GRACE
    set_timeout = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is None:
        return dist.new_group(ranks, timeout=longest, backend="gloo")
    # gloo tries to connect five times, each for as long as it would wait in a collective. All ranks are here already.
    group = dist.new_group(ranks, timeout=max(timeout / 5, timedelta(seconds=2)), backend="gloo")
    set_timeout(longest, group)
    return group


class _Roll:
    """Which ranks are here to make a group? torch's own errors would not say who is missing."""

    made: Counter[tuple[int, ...]] = Counter()

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._store = _job_store()
        self.made[tuple(ranks)] += 1
        self._prefix = f"salientpp/roll/{'-'.join(map(str, ranks))}/{self.made[tuple(ranks)]}"

    def missing(self, call: str, seconds: float) -> list[int]:
        """Answer a call of the roll, and wait for the others to; the ranks that have not within that time.

        Raises:
            RankFailure: the store is gone.
        """
        if self._store is None:
            return []
        keys = [f"{self._prefix}/{call}/{rank}" for rank in self._ranks]
        deadline, pause = time.monotonic() + seconds, 0.005
        try:
            self._store.set(keys[self._ranks.index(dist.get_rank())], "")
            # Looking now and then, because a wait of torch's store complains on stderr when it ends without an answer.
            while time.monotonic() < deadline and not self._store.check(keys):
                time.sleep(pause)
                pause = min(2 * pause, _SLICE_SECONDS)
            return [rank for rank, key in zip(self._ranks, keys) if seconds and not self._store.check([key])]
        except dist.DistError as error:
            raise RankFailure("the job's key-value store (which rank 0 or torchrun hosts) went away while loaders were made") from error


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""


def _answer(answer: Future, question: Callable[[dist.Store], Any], store: dist.Store) -> None:
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
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None:
        if frame.f_code.co_name == "_bootstrap" and frame.f_globals.get("__name__") == "multiprocessing.process":
            code = frame.f_locals.get("exitcode")
            return f"its process ended with exit code {code}" if code else None
        frame = frame.f_back
    return None


def _linger() -> None:
    """Give gloo's threads time to let go of the last collectives, see ``Comm.all_to_all``."""
    if Comm.made:
        time.sleep(_LET_GO_SECONDS)


atexit.register(_linger)  # on import, so that it runs after whatever users of Comm do at exit


def _job_store() -> dist.Store | None:
    """The default group's key-value store; None where torch hides it, and failures then show as time-outs."""
    try:
        return dist.distributed_c10d._get_default_store()
    except Exception:
        return None
