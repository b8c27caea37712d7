"""Queues of operations, one per stream, and the order in which they are executed.

A stream executes its entries in their order. Between streams only waits give an order. Every other order is allowed, and a seed selects one. The first
time it is used, each stream gets one of three tempers from the seed:

* **late**: an entry is executed only when somebody needs its result;
* **eager**: an entry is executed as soon as it is queued, unless the stream waits for another stream;
* **changing**: after each operation that the host queues, on any stream, the stream executes a random number of entries.

A missing wait between an eager and a late stream then shows as a wrong value. Threads share one scheduler. If one thread queues everything, a seed always
gives the same order.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes

_FIRST = 6  # the default stream, the four streams of a pipeline, and one more
LATE, EAGER, CHANGING = "late", "eager", "changing"


@dataclass(frozen=True)
class Wait:
    """Entry that blocks a stream until ``queue`` has executed its first ``number`` entries."""

    queue: Queue
    number: int

    @property
    def is_over(self) -> bool:
        return self.queue.num_done >= self.number


@dataclass(eq=False)
class Queue:
    """Entries of one stream.

    Attributes:
        temper: when entries are executed: late, eager or changing.
        num_queued, num_done: number of entries that were queued and executed since the start.
    """

    temper: str
    entries: deque[Wait | Callable[[], None]] = field(default_factory=deque)
    num_queued: int = 0
    num_done: int = 0


class DeviceFault(RuntimeError):
    """An operation failed when it was executed. As with CUDA, the next synchronisation reports it."""


class Scheduler:
    """All queues of the device.

    Attributes:
        lock: held while entries are queued or executed.
        on_turn: called with the lock held, before an entry is queued and before the host synchronises.
        sync_is_error: True if a synchronisation of the host is an error.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.on_turn: Callable[[], None] = lambda: None
        self.sync_is_error = False
        self.restart(0)

    def restart(self, seed: int) -> None:
        """Executes all entries, and chooses the order of later entries."""
        with self.lock:
            for queue in getattr(self, "_queues", []):
                self._execute(queue, queue.num_queued)
            self._seed, self._random = seed, random.Random(seed)
            self._queues: list[Queue] = []
            self._fault: Exception | None = None
            self.num_syncs = 0

    def new_queue(self) -> Queue:
        with self.lock:
            number = len(self._queues)
            tempers = (LATE, EAGER, CHANGING)
            # Seed 0 makes every stream late, and seed 1 every stream eager.
            temper = tempers[self._seed] if self._seed < 2 else random.Random(f"{self._seed} {number}").choice(tempers)
            self._queues.append(queue := Queue(temper))
            return queue

    def add(self, queue: Queue, entry: Wait | Callable[[], None]) -> None:
        """Queues an entry. Executes what the tempers of the streams demand."""
        with self.lock:
            self.on_turn()
            self.push(queue, entry)
            self._advance()

    def push(self, queue: Queue, entry: Wait | Callable[[], None]) -> None:
        """Queues an entry, and executes nothing."""
        queue.entries.append(entry)
        queue.num_queued += 1

    def synchronize(self, queue: Queue, number: int | None = None, counts: bool = True) -> None:
        """Executes the first ``number`` entries of a queue (None: all), and the entries of other queues that they wait for.

        Args:
            counts: False if the host does not have to wait for the device.

        Raises:
            RuntimeError: synchronisation is forbidden.
            DeviceFault: an operation has failed.
        """
        with self.lock:
            if counts:
                self.count_sync()
            self.on_turn()
            self._execute(queue, queue.num_queued if number is None else number)
            if self._fault is not None:
                raise DeviceFault(str(self._fault)) from self._fault

    def count_sync(self) -> None:
        if self.sync_is_error:
            raise RuntimeError("called a synchronizing operation while set_sync_debug_mode is 'error'")
        self.num_syncs += 1

    def synchronize_all(self) -> None:
        """Executes everything. Raises as :meth:`synchronize`."""
        with self.lock:
            self.count_sync()
            for queue in list(self._queues):
                self.synchronize(queue, counts=False)

    def _execute(self, queue: Queue, number: int) -> None:
        pending = [(queue, number)]
        while pending:
            queue, number = pending[-1]
            if queue.num_done >= number:
                pending.pop()
            elif (wait := queue.entries[0]) and isinstance(wait, Wait) and not wait.is_over:
                pending.append((wait.queue, wait.number))
            else:
                self._step(queue)

    def _advance(self) -> None:
        has_moved = True
        random_steps = {id(queue): self._random.randrange(4) for queue in self._queues if queue.temper == CHANGING}
        while has_moved:
            has_moved = False
            for queue in self._queues:
                steps = queue.num_queued if queue.temper == EAGER else random_steps.get(id(queue), 0)
                while steps and queue.entries and self._is_free(queue):
                    self._step(queue)
                    steps, has_moved = steps - 1, True
                if queue.temper == CHANGING:
                    random_steps[id(queue)] = steps

    def _is_free(self, queue: Queue) -> bool:
        entry = queue.entries[0]
        return not isinstance(entry, Wait) or entry.is_over

    def _step(self, queue: Queue) -> None:
        entry = queue.entries.popleft()
        queue.num_done += 1
        if isinstance(entry, Wait):
            return
        try:
            with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
                entry()
        except Exception as error:
            self._fault = self._fault or error


def _temper(seed: int, number: int) -> str:
    """Returns the temper of a stream, by the order in which streams are first used.

    Seed 0 makes every stream late, and seed 1 every stream eager. The next seeds make one of the first streams differ from all others.
    """
    if seed < 2 + 2 * _FIRST:
        one_differs, by_default = (seed - 2) // 2 == number and seed >= 2, (LATE, EAGER)[seed % 2]
        return {LATE: EAGER, EAGER: LATE}[by_default] if one_differs else by_default
    return random.Random(f"{seed} {number}").choice((LATE, EAGER, CHANGING))


scheduler = Scheduler()
