"""Writes the spans of a loader's epochs to a file of JSON lines, one file for each loader of each rank.

The fields have the names that TorchTitan uses in its structured logs (torchtitan/observability/structured_logger): ``rank``, ``source``, ``step``,
``time_us``, ``log_type``, ``log_type_name``, ``value`` and others. A span is one line, written when it ends: its name ends with ``_end``, ``time_us`` is
its end, and ``value`` its milliseconds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from salientpp.engine.trace import WORKER, Trace
from salientpp.files import what_to_do
from salientpp.processes import Lock, after_fork

#: Environment variable with the folder of the files.
VARIABLE = "SALIENTPP_TRACE_DIR"

#: Largest number of spans that wait to be written, and the seconds after which they are written at the latest by the next span.
_MOST_WAITING, _SECONDS = 4096, 1.0

#: Share of the time that spans may take, and the seconds in which one is recorded before it is written. Recording finds the processor's caches cold.
_MOST_COST, _SPAN_SECONDS = 0.01, 3e-6

#: Fewest spans from which their cost is judged, and the largest distance of recorded batches.
_FEWEST, _MOST_EVERY = 256, 1024

#: Names of the spans of threads that work on one subject. Any other thread beside the pipeline draws.
_NAMES = {f"{WORKER}gather_host_rows": "gather", f"{WORKER}sum_host_rows": "sums"}

#: Beginnings of the names of threads that work beside the one that drives the pipeline.
_THREADS = ("salientpp-sample", "salientpp-gather")

_numbers = itertools.count()

#: All files, whose last spans are written when the interpreter ends.
_files: weakref.WeakSet[SpanFile] = weakref.WeakSet()


class SpanFile(Trace):
    """Trace that is written to a file while the epochs run. A failing disk ends the file, and not the training.

    If batches are so short that this would take more than 1 % of the time, only every second, fourth, ... batch is written.

    Args:
        folder: folder of the file. It is created.
        rank: number of this rank.

    Raises:
        ValueError: the folder cannot be created.

    Attributes:
        is_begun: True if the file has its first line, which describes the loader. Before, spans are dropped, as in a forked process that goes on with an
            epoch of its parent.
    """

    def __init__(self, folder: str | Path, rank: int) -> None:
        super().__init__()
        self._folder, self._rank = Path(folder).absolute(), rank
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{VARIABLE} must be a folder that this process can write, got {str(folder)!r} ({error.strerror}); "
                f"{what_to_do(error, 'choose another folder, or unset the variable')}"
            ) from error
        self._lock = Lock()
        self._begin_file()
        after_fork(self)
        _files.add(self)

    def _begin_file(self) -> None:
        self._waiting: deque[tuple[str, int, float, float, str]] = deque()
        self.is_begun = self._failed = False
        self.every = 1
        self._flushed = time.perf_counter()
        self._to_unix = time.time() - time.perf_counter()
        host, pid = socket.gethostname(), os.getpid()
        name = f"loader.global_rank_{self._rank}.{re.sub(r'[^A-Za-z0-9_-]', '_', host)}-{pid}-{next(_numbers)}.jsonl"
        self._path = self._folder / name
        local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", ""))
        common = {
            "rank": self._rank,
            "global_rank": self._rank,
            "local_rank": int(local) if local.isdecimal() else 0,
            "source": "loader",
            "host_name": host,
            "pid": pid,
        }
        self._common = json.dumps(common)[:-1] + ", "
        self._line = self._common.replace("%", "%%") + (
            '"log_type": "event", "log_type_name": "%s_end", "task_name": "%s", "step": %d, "value": %.4f, "time_us": %d}\n'
        )

    def _after_fork(self) -> None:
        self._begin_file()  # the lines that wait belong to the parent

    def __reduce__(self) -> tuple[Any, ...]:
        return SpanFile, (str(self._folder), self._rank)  # a copy of a loader has its own file

    def add(self, track: str, index: int, started: float, ended: float) -> None:
        if not self.is_begun or index % self.every:
            return
        self._waiting.append((track, index, started, ended, threading.current_thread().name))
        if len(self._waiting) > _MOST_WAITING or ended - self._flushed > _SECONDS:
            self.flush()

    def note(self, name: str, context: Mapping[str, Any], event: str | None = None) -> None:
        """Writes a line without a duration, after the spans that wait.

        Args:
            context: JSON values; others are written as their ``repr``.
            event: the field ``event_name``.
        """
        self.is_begun = True
        line = {
            "log_type": "instant",
            "log_type_name": name,
            "event_name": event,
            "time_us": int(time.time() * 1e6),
            "context": context,
        }
        self.flush(self._common + json.dumps(line, default=repr)[1:] + "\n")

    def flush(self, line: str = "") -> None:
        """Writes the spans that wait, and then ``line``."""
        with self._lock:
            begun = time.perf_counter()
            elapsed, self._flushed = begun - self._flushed, begun
            lines, offset = [], self._to_unix
            while self._waiting:
                track, index, started, ended, thread = self._waiting.popleft()
                name = _NAMES.get(track, "draw") if track.startswith(WORKER) else track
                task = thread if thread.startswith(_THREADS) else "main"
                lines.append(self._line % (name, task, index, (ended - started) * 1e3, int((ended + offset) * 1e6)))
            if self._failed or not (lines or line):
                return
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write("".join(lines) + line)
                self._adapt(len(lines), time.perf_counter() - begun, elapsed)
            except OSError as error:
                self._failed = True
                words = f"spans are no longer written to {self._path} ({error.strerror}); {what_to_do(error, 'check the disk')}"
                with contextlib.suppress(Warning):  # raised if the user has turned warnings into errors
                    warnings.warn(words, UserWarning, stacklevel=2)

    def _adapt(self, number: int, seconds: float, elapsed: float) -> None:
        """Chooses which batches are recorded next, after ``number`` spans of the ``elapsed`` seconds were written in ``seconds``."""
        cost = (seconds + number * _SPAN_SECONDS) / max(elapsed, 1e-9)
        if cost > _MOST_COST and number >= _FEWEST:
            self.every = min(2 * self.every, _MOST_EVERY)
        elif cost < _MOST_COST / 4 and self.every > 1:
            self.every //= 2


def flush_all() -> None:
    """Writes the spans that wait, of all files. Called when the interpreter ends, after the epochs were left."""
    for file in list(_files):
        file.flush()
