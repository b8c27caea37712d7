"""Stops all ranks of a job at the same batch before SLURM ends the job, and requeues the job.

Ranks receive SLURM's signal at slightly different times. A rank that stopped at once would leave the others waiting in DDP. So after each batch the ranks take
the maximum of the signals that they have received. This all-reduce runs during the next batch, and its result is read after that batch, so that no rank waits
for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class Preemption:
    """Notices that SLURM is about to end the job, and makes all ranks stop at the same batch.

    ::

        with salientpp.Preemption() as preemption:
            for batch in loader:
                ...                           # one step of training
                if preemption.should_stop():
                    save(...)                 # model, optimizer, loader.state_dict() of every rank
                    preemption.requeue()
                    break

    The constructor is collective: all ranks of the default process group must call it, if there is one. Enter the object in the main thread.

    Args:
        signals: signals that announce the end; None: SIGUSR1, which ``salientpp slurm`` requests. If a cluster preempts with SIGTERM and a grace
            time, add SIGTERM; then torchrun and scancel need longer to end a rank.

    Attributes:
        stop_signal: the signal for which the ranks have agreed to stop; None before.
    """

    def __init__(self, signals: Sequence[int] | None = None) -> None:
        if signals is None:
            signals = (signal.SIGUSR1,)  # not a default value, because some systems lack it
        self._signals = [signal.Signals(number) for number in signals]
        self._received = 0
        self._agreed = 0
        self._former: dict[int, Any] = {}
        self._work: dist.Work | None = None
        self._word = torch.zeros(1, dtype=torch.int64, device="cpu")
        is_distributed = dist.is_available() and dist.is_initialized()
        self._group = dist.new_group(backend="gloo") if is_distributed and dist.get_world_size() > 1 else None

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "Preemption must be entered in the main thread, because Python delivers signals only there"
            )
        for number in self._signals:
            self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._former.items():
            # None means a handler that was not installed from Python, and cannot be restored from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()
        if kind is None:  # after an error the other ranks may be gone
            self._hear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = max(self._received, number)

    @property
    def stop_signal(self) -> signal.Signals | None:
        return signal.Signals(self._agreed) if self._agreed else None

    def should_stop(self) -> bool:
        """Returns True if the caller should save and stop now. The answer is the same on every rank, at most two batches after the first signal.

        Every rank calls it after each of its batches, equally often. With ``uneven='exact'`` and torch's ``Join``, the loops of the ranks differ in length:
        call it between epochs.

        Raises:
            RuntimeError: another rank went away.
        """
        if self._group is None:
            self._agreed = self._received
        elif not self._agreed:
            self._hear()
            if not self._agreed:
                self._word = torch.tensor([self._received], device="cpu")
                self._work = dist.all_reduce(self._word, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return self._agreed > 0

    def _hear(self) -> None:
        """Waits for the pending all-reduce, if any, and stores the largest signal that any rank has received."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {dist.get_rank()}: another rank went away while the ranks agreed on whether to stop ({error}); "
                "see the output of the rank that ended first, which the launcher names"
            ) from error
        self._work = None
        self._agreed = int(self._word)

    def requeue(self) -> bool:
        """Requeues this SLURM job (``scontrol requeue``) once every rank has called this method.

        SLURM then ends all running processes, perhaps before the method returns. Later it starts the same script again, with ``SLURM_RESTART_COUNT`` one
        higher. After SIGTERM nothing is done: SLURM requeues preempted jobs itself, and a job that a user cancels shall not come back.

        Returns:
            True if the job was requeued; False without SLURM.

        Raises:
            RuntimeError: on rank 0, because SLURM refused. Files that were saved are not affected.
        """
        if self._group is not None:
            dist.barrier(group=self._group)
        job = os.environ.get("SLURM_JOB_ID")
        if job is None or self._agreed == signal.SIGTERM:
            return False
        if self._group is None or dist.get_rank() == 0:
            try:
                done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
                words = (done.stderr or done.stdout).strip() if done.returncode else None
            except OSError as error:
                words = str(error)
            if words is not None:
                raise RuntimeError(
                    f"`scontrol requeue {job}` failed: {words}; submit the job again by hand (#SBATCH --requeue allows requeueing, and "
                    "scontrol must be on the PATH of the compute nodes)"
                )
        return True
