"""One epoch on one rank: who drives the pipeline, and how the rank leaves.

``next()`` moves the pipeline on, in the caller's thread. After this rank's last batch, an early ``break`` or an exception, a background thread answers the
other ranks until all have finished or left. It runs none of the user's code, and the next epoch waits for it.

Threads that share an iterator get each batch once between them. On several ranks a loader has one epoch at a time, and a second thread that begins one gets
an error. A forked child goes on with its copy of an epoch of one process; on several ranks it gets an error, because the connections are the parent's.
"""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn

from torch_geometric.data import Data
from typing_extensions import Self

from salientpp.engine.pipeline import StageError, traced
from salientpp.engine.producer import ByHand, Producer
from salientpp.engine.stages import LAST_STAGE, Finished, Request
from salientpp.engine.state import Disagreement, Point, Reached, Resume, first_point
from salientpp.ops import join_key
from salientpp.processes import Lock, lazy
from salientpp.ranks.failure import RankFailure
from salientpp.sampling.schedule import Turn


@dataclass
class Counters:
    """What the epochs of an engine have done.

    Attributes:
        lock: guards the numbers, since threads may drive an epoch each.
        seconds_waiting: between being asked for batches and giving them.
        seconds_by_stage: of the thread that drives the pipeline.
        failure: what went wrong while an epoch answered the other ranks in the background.
    """

    lock: Lock
    batches: int = 0
    seconds_waiting: float = 0.0
    seconds_by_stage: dict[str, float] = field(default_factory=dict)
    failure: BaseException | None = None

    def reset(self, stages: Iterable[str]) -> None:
        with self.lock:
            self.batches, self.seconds_waiting = 0, 0.0
            self.seconds_by_stage = dict.fromkeys(stages, 0.0)

    def count_batch(self, seconds: float) -> None:
        """One more was given, ``seconds`` after it was asked for."""
        with self.lock:
            self.batches += 1
            self.seconds_waiting += seconds

    def count_stages(self, seconds: Mapping[str, float]) -> None:
        with self.lock:
            for name, spent in seconds.items():
                self.seconds_by_stage[name] += spent


class Run:
    """One epoch on this rank: what enters the pipeline, and who drives it; the arguments are those of :meth:`Engine.run`.

    Attributes:
        lock: whoever holds it moves the epoch on.
        is_gone: it has ended, and no other rank can want anything more in it.
    """

    unfinished: ClassVar[weakref.WeakSet[Run]] = weakref.WeakSet()

    def __init__(
        self, producer: Producer, counters: Counters, epoch: int, resume: Resume | None = None,
        finish: Callable[[Any], Any] | None = None, by_hand: ByHand | None = None,
    ) -> None:  # fmt: skip
        self._producer, self._counters, self._finish, self._by_hand = producer, counters, finish, by_hand
        self._epochs, self._most_ahead = producer.basis.epochs, producer.basis.most_ahead
        self._epoch, self._resume, self._comm = epoch, resume, producer.basis.comm
        self._pipeline = producer.pipeline(by_hand)
        self._ahead: deque[Request] = deque()
        self._first = 0 if resume is None else resume.batches  # batch to be given first
        self._requested = self._first  # batches handed to the sampling threads
        self._placed = self._first  # batches entered into the pipeline
        self._entered = self._first  # ticks; of several ranks the first is agreed on, one alone has a batch in each
        self._is_open = self._comm.size == 1 or self._ticks == 0
        self.reached = Reached(epoch, self._first)
        self.is_gone = self._left = self._all_left = False
        self.lock = Lock()  # an iterator may be shared, and garbage collected in any thread
        self._user = threading.current_thread()  # who asked last
        self._answering: threading.Thread | None = None
        self._answered = threading.Event()  # it has ended
        self._failure: BaseException | None = None
        if self._comm.size > 1:
            self.unfinished.add(self)

    @lazy
    def _turns(self) -> Sequence[Turn]:
        """Asked for by the first ``next()``, as torch does: until then a sampler may get another epoch."""
        return self._epochs.order.of_epoch(self._epoch)

    @lazy
    def _ticks(self) -> int:
        number = self._epochs.order.num_ticks
        return len(self._turns) if number is None else number

    def move_to(self, epoch: int) -> bool:
        """Be another epoch, from its first batch on, if no batch was asked for yet; whether it is that epoch now."""
        with self.lock:
            begun = self._requested + self._placed > 2 * self._first or (self._comm.size > 1 and self._is_open)
            if self._left or begun or self._failure is not None:
                return False
            if epoch != self._epoch:
                self._epoch, self._first, self._resume = epoch, 0, None
                self._requested = self._placed = self._entered = 0
                self.reached.epoch, self.reached.batches = epoch, 0
                self.__dict__.pop("_turns", None)
            return True

    def give_round(self) -> list[Data]:
        """The next round's batches, none if this rank's logical ranks have ended before others; StopIteration after the last round."""
        reached = self.reached
        if reached.rounds is None:
            reached.rounds = 0 if self._resume is None else self._resume.round
        if self._failure is not None:
            raise self._failure
        turns, number = self._producer.drive(lambda: self._turns), self._epochs.order.num_rounds
        last = len(turns)
        if reached.rounds == (last if number is None else number):
            reached.ended = True
            self.leave()
            raise StopIteration
        batches = []
        while reached.batches < last and turns[reached.batches].round == reached.rounds:
            batches.append(self.give())
        reached.rounds += 1
        return batches

    def give(self) -> Data:
        """The next batch; StopIteration after the last."""
        self._comm.check_process()
        self._user = threading.current_thread()
        return self._producer.drive(self._give)

    def _give(self) -> Data:
        if self._left:
            self._end()  # without the lock, which the answering thread holds while it waits for ranks that may be waiting for this thread
        with self.lock:
            if self.lock.interrupted:
                raise RuntimeError(
                    "this process was forked while another thread was inside next() of this epoch, which may be half done; "
                    "start a new one with iter(loader)"
                )
            batch = self._next_batch()
        self.leave_if_done()
        return batch

    def _end(self) -> NoReturn:
        """Raise what ends the user's loop: StopIteration, or what failed."""
        if self._failure is not None:
            raise self._failure
        self.reached.ended = self.reached.batches == len(self._turns)
        self.leave()
        raise StopIteration

    def _next_batch(self) -> Data:
        if self._failure is not None or self._left or self.reached.batches == len(self._turns):
            self._end()
        started = time.perf_counter()
        finished = None
        while finished is None or finished.idle:
            if self._entered == self._ticks and not self._pipeline.in_flight and self._is_open:
                raise RuntimeError("a batch of this epoch was lost to Ctrl-C; start a new one with iter(loader)")
            finished = self._tick()
        batch = self._transformed(finished, self._producer.stages.deliver(finished))
        self.reached.batches += 1
        self._counters.count_batch(time.perf_counter() - started)
        return batch

    def _transformed(self, finished: Finished, batch: Data) -> Data:
        """The batch after the user's ``transform``, whose time and errors count as those of the last stage."""
        # It is no stage, because whoever answers the other ranks runs none of the user's code.
        if self._finish is None:
            return batch
        stage, started = LAST_STAGE, time.perf_counter()
        try:
            with traced(self._producer.stages.trace, stage, finished.index):
                batch = self._finish(batch)
        except BaseException as error:
            self._failure = StageError.of(error, self._comm.rank, finished.index, stage)
            self._comm.report_failure(str(self._failure))
            if isinstance(error, Exception):
                raise self._failure from error
            raise
        self._counters.count_stages({stage: time.perf_counter() - started})
        return batch

    def _tick(self) -> Finished | None:
        try:
            if not self._is_open:
                self._open()
            finished = self._pipeline.tick(self._next_request())
        except BaseException as error:
            self._failure = self._failure or self._pipeline.failure
            if self._failure is None:  # Ctrl-C between two stages
                stopped = StageError.of(error, self._comm.rank, self._entered, "none")
                self._failure = error if isinstance(error, Exception) else stopped
            if not isinstance(error, Disagreement) and not isinstance(error.__cause__, RankFailure):
                self._comm.report_failure(str(self._failure))
            raise
        self._counters.count_stages(self._pipeline.seconds)
        self._pipeline.seconds.update(dict.fromkeys(self._pipeline.seconds, 0.0))
        if finished is not None:
            self._all_left |= finished.all_left
        return finished

    def _open(self) -> None:
        """Agree with the other ranks on the tick to start with. Where they resume an epoch before this one, answer them in it first."""
        start = self._turns[self._first].tick if self._first < len(self._turns) else self._ticks
        epochs, resume = self._epochs, self._resume
        point = Point(
            self._epoch, start, resume is not None, join_key(epochs.seed), 0 if resume is None else resume.round,
            resume is not None and resume.by_round, epochs.placement.num_logical_ranks,
        )  # fmt: skip
        while True:
            try:
                everyone = self._comm.gather_numbers(point.numbers())
            except BaseException as error:
                self._failure = StageError.of(error, self._comm.rank, self._first, "open_epoch")
                if isinstance(error, Exception):
                    raise self._failure from error
                raise
            epoch, self._entered = first_point([Point.of(numbers) for numbers in everyone])
            if epoch == self._epoch:
                self._is_open = True
                return
            behind = Run(self._producer, self._counters, epoch)
            behind._left = behind._is_open = True
            behind._entered = self._entered
            while not behind._is_over():
                self._comm.check_script()
                behind._tick()
            point = replace(point, resumed=False, by_round=False)

    def _next_request(self) -> Request | None:
        """The next tick's batch; a rank without one of its own enters an empty one while others have some."""
        if self._entered == self._ticks or self._all_left:
            return None
        tick = self._entered
        self._entered += 1
        if self._left or self._placed == len(self._turns):
            return self._producer.idle_request(tick, True)
        if tick < self._turns[self._placed].tick:
            return self._producer.idle_request(tick, False)
        while self._requested < len(self._turns) and len(self._ahead) < self._most_ahead:
            self._ahead.append(self._producer.request(self._epoch, self._turns[self._requested], self._by_hand))
            self._requested += 1
        self._placed += 1
        return self._ahead.popleft()

    def leave_if_done(self) -> None:
        """Begin to answer the other ranks once this rank has no more batches to give: its user may not ask again."""
        if self._comm.size > 1 and self.reached.batches == len(self._turns):
            self.leave()

    def leave(self) -> None:
        """Give no more batches; answer the other ranks, in the background, until all have left."""
        if self._left:
            return  # without the lock, as in _give
        with self.lock:
            if self._left:
                return
            self._left = True
            if self._comm.is_inherited:
                return
            for request in self._ahead:
                request.sampling.cancel()
            self._ahead.clear()
            if self._is_over():
                self._let_go()
                return
            self._answering = threading.Thread(target=self._answer_in_background, name="salientpp-answer", daemon=False)
            self._answering.start()

    @property
    def is_under_way(self) -> bool:
        """Whether it has batches in the pipeline that it may still give."""
        return not self._left and self._failure is None and self._pipeline.in_flight + len(self._ahead) > 0

    def leave_at_exit(self) -> None:
        """``leave`` where no thread can be started any more."""
        if self._answering is not None and self._answering.is_alive() and not self._answered.is_set():
            # The interpreter waits for threads before this, unless Ctrl-C ends the wait: then nobody shall wait for the thread. Nor can it be joined
            # any more: Ctrl-C in the moment in which it ends leaves the lock taken that joining waits for.
            self._failure = RankFailure(f"rank {self._comm.rank} ended early: KeyboardInterrupt")
            self._comm.report_failure(str(self._failure))
            self._answered.wait()
        if self._left or self._is_over():
            return
        self._left = True
        self._answer()

    def check_thread(self) -> None:
        """Raise where another thread is in this epoch, which a new one would end."""
        is_free = self._left or self._user is threading.current_thread() or not self._user.is_alive()
        if not is_free and self.reached.batches < len(self._turns):
            raise RuntimeError(
                f"thread {self._user.name!r} is in epoch {self._epoch} of this loader, and on several ranks a loader gives one epoch at a time, in the "
                "same order everywhere; share one iterator between the threads, close() it first, or make a loader for each thread"
            )

    def _is_over(self) -> bool:
        """Whether no other rank can want anything more in this epoch."""
        if self._comm.size == 1 or self._failure is not None:
            return True  # whose turns need not be known: asking a sampler for them may fail
        return self._is_open and self._pipeline.in_flight == 0 and (self._entered == self._ticks or self._all_left)

    def _answer_in_background(self) -> None:
        # A script that has ended waits for this thread in a lock, from which Ctrl-C wakes the main thread only if no other thread takes the
        # signal first: one that starts threads, as asking the store does, may. What this thread starts inherits its mask.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._answer()
        finally:
            self._answered.set()

    def _answer(self) -> None:
        try:
            while not self._is_over():
                self._comm.check_script()
                with self.lock:
                    self._tick()
        except Exception as error:
            self._failure = self._counters.failure = self._failure or error
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """No other rank can want anything more. The user's code may hold the engine that holds this run."""
        self.is_gone = True
        self._finish = self._by_hand = None

    def join(self) -> None:
        """Wait until the others have left too; raises what went wrong meanwhile."""
        if self._answering is not None:
            self._answering.join()
            self._answering = None
        elif self._left:  # Ctrl-C came before the thread had started
            self._answer()
        if self._failure is not None:
            raise self._failure


class Epoch:
    """What ``iter(loader)`` returns: letting go of it leaves the epoch."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Data:
        return self.run.give()

    def close(self) -> None:
        """Leave the epoch early."""
        self.run.leave()

    def __reduce__(self) -> Any:
        raise TypeError(
            "an epoch that is under way cannot be copied or pickled; copy the loader, or save loader.state_dict() and load it into another loader, "
            "whose next iter() goes on from there"
        )

    def __del__(self) -> None:
        # At interpreter exit a thread can no longer be started, and trying may block; then `_leave_at_exit` was before.
        if not sys.is_finalizing():
            self.run.leave()


class Rounds(Epoch):
    """What ``loader.rounds()`` returns: the same epoch, a round at a time."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.lock = Lock()
        self._is_closed = False

    def __next__(self) -> Any:
        with self.lock:
            if self._is_closed:
                raise StopIteration
            return self.run.give_round()

    def close(self) -> None:
        """Leave the epoch early."""
        self._is_closed = True
        super().close()


def _leave_at_exit() -> None:
    """A rank whose script ends in mid-epoch answers the others to the end; one that fails tells them."""
    for run in list(Run.unfinished):
        if not run._comm.is_inherited:
            run.leave_at_exit()


atexit.register(_leave_at_exit)
