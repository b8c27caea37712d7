"""How do ranks talk, and how does one learn that another has failed?

:class:`Comm` is a process group of the package's own, made from the user's initialised default group, so that
its collectives never interleave with those of DDP. One rank needs no initialisation: it is the case
``Comm.size == 1``, where every collective is a copy.

**Waiting.** Every wait is bounded by the time-out and broken into slices. Between slices a rank looks for a
failure note in the job's key-value store: a rank that fails in mid-epoch leaves one (who, where, why), so the
others stop within a second and can say whose fault it was, rather than wait for the time-out. (Under NCCL the wait is the
stream's, not the host's, and its watchdog keeps the time.)

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
from collections import deque
from collections.abc import Sequence
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
        if self.work is not None:
            self.comm._wait(self.work)
        return self.output


class Comm:
    """A process group with sizes and uneven all-to-all.

    Attributes:
        rank, size: this rank's number in the group, and how many there are.
        device: where the tensors of a collective must be: the CPU, or a CUDA device under NCCL.
        timeout: the longest wait for other ranks.
    """

    made = False  # whether any group was

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta, device: torch.device) -> None:
        self._group = group
        self.timeout = timeout
        self.device = device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._sliced = group is not None and device.type == "cpu"
        Comm.made |= group is not None
        self._store = _job_store() if group is not None else None
        self._held: deque[dist.Work] = deque(maxlen=_HELD)
        self._abandoned = False
        self._note = f"salientpp/failure/{group.group_name}" if group is not None else ""

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
            device: the loader's device; under NCCL it is where collectives run.
        """
        cpu = torch.device("cpu")
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None, timeout, cpu)
        ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
        if dist.get_world_size(process_group) == 1:
            return cls(None, timeout, cpu)
        # The backend's own time-out comes a little later, so that ours, whose text says more, is the one met.
        group = dist.new_group(ranks, timeout=timeout + _GRACE)
        # A group made without a device map serves CPU tensors over gloo where it can.
        over_nccl = dist.get_backend(group) == "nccl"
        if over_nccl and (device is None or device.type != "cuda"):
            raise ValueError(
                f"the process group's backend is NCCL, which moves CUDA tensors only, but device is {device or cpu}; "
                'pass device="cuda", or initialise with backend="cpu:gloo,cuda:nccl"'
            )
        return cls(group, timeout, device if over_nccl else cpu)

    # --- collectives --------------------------------------------------------------------------------------

    def all_to_all(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Pending:
        """Start to exchange rows: ``send_counts[r]`` consecutive rows go to rank r, ``recv_counts[r]`` come from it.

        Args:
            send: [sum(send_counts), ...] of any dtype, on ``self.device``, contiguous.

        Returns:
            Pending [sum(recv_counts), ...], ordered by source rank.
        """
        recv = send.new_empty((sum(recv_counts), *send.shape[1:]))
        if self.size == 1:
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
            group=self._group,
            async_op=True,
        )
        # gloo's thread lets go of a collective a moment after `wait` has returned. Were it the last to hold it, it would need the
        # interpreter to free the tensors, and abort the process if that is exiting.
        self._held.append(work)
        return Pending(self, recv, work)

    def gather_facts(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's ``facts`` (JSON values), by rank; blocks. For agreement at construction, not for data."""
        if self.size == 1:
            return [facts]
        text = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8).to(self.device)
        lengths = [length for length, in self.gather_numbers([text.numel()])]
        everyone = self.all_to_all(text.repeat(self.size), [text.numel()] * self.size, lengths).wait().cpu()
        return [json.loads(bytes(piece.tolist())) for piece in everyone.split(lengths)]

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's ``numbers`` (equally many, 64 bits), by rank; blocks."""
        message = torch.tensor([list(numbers)] * self.size, dtype=torch.int64, device=self.device)
        return self.all_to_all(message, [1] * self.size, [1] * self.size).wait().tolist()

    # --- failure ------------------------------------------------------------------------------------------

    def report_failure(self, text: str) -> None:
        """Leave a note for the others; the first one counts. Never raises."""
        self._abandon()
        if self._store is None:
            return
        try:
            self._store.compare_set(self._note, "", json.dumps({"rank": self.rank, "text": text}))
        except Exception:  # the store may be gone with rank 0; the others then meet the time-out
            pass

    def check_script(self) -> None:
        """Tell the others, and raise, if this rank's script has ended with a traceback while a thread still serves them.

        Otherwise they might be waiting for this process to end (in a collective of their own) and it for them.
        """
        error = getattr(sys, "last_value", None)
        if error is not None and not threading.main_thread().is_alive():
            text = f"rank {self.rank} ended in mid-epoch: {type(error).__name__}: {error}"
            self.report_failure(text)
            raise RankFailure(text)

    def failure(self) -> RankFailure | None:
        """What another rank has reported, if any."""
        if self._store is None:
            return None
        try:
            if not self._store.check([self._note]):
                return None
            note = json.loads(self._store.get(self._note))
        except Exception:
            return None
        return None if note["rank"] == self.rank else RankFailure(note["text"])

    def _abandon(self) -> None:
        """Keep the group for ever: destroying it would wait for collectives that other ranks no longer join."""
        if self._group is not None and not self._abandoned:
            self._abandoned = True
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _wait(self, work: dist.Work) -> None:
        if not self._sliced:
            work.wait()
            return
        try:
            self._wait_in_slices(work)
        except RankFailure:
            self._abandon()
            raise

    def _wait_in_slices(self, work: dist.Work) -> None:
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            try:
                work.wait(timedelta(seconds=_SLICE_SECONDS))
                return
            except RuntimeError as error:
                self.check_script()
                failure = self.failure()
                if failure is None and work.is_completed():
                    # A lost connection may precede the note of the rank that went down.
                    time.sleep(_SLICE_SECONDS)
                    failure = self.failure()
                if failure is not None:
                    raise failure from None
                if work.is_completed():
                    raise RankFailure(f"a rank went away: {error}") from error
                if time.monotonic() >= deadline:
                    raise RankFailure(f"no answer from another rank within {self.timeout.total_seconds():g} s") from None


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
