"""One epoch on one rank: which thread drives the pipeline, and how the rank leaves the epoch.

``next()`` advances the pipeline in the caller's thread. After this rank's last batch, an early ``break`` or an exception, a background thread answers the
other ranks until all have finished or left. It runs none of the user's code, and the next epoch waits for it.

If threads share an iterator, each batch goes to exactly one of them. With several ranks, a loader has one epoch at a time, and a second thread
that begins one gets an error. A forked child can continue its copy of an epoch if there is one rank. With several ranks it gets an error, because the
connections belong to the parent.
"""

from __future__ import annotations

import atexit
import copy
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NoReturn

from torch_geometric.data import Data
from typing_extensions import Self

from salientpp.engine.counters import MOST_TIMES, Counters, EpochTimes
from salientpp.engine.epochs import Draws, TurnsOfEpoch
from salientpp.engine.pipeline import Pipeline, StageError
from salientpp.engine.producer import ByHand, Producer
from salientpp.engine.request import Request
from salientpp.engine.spans import flush_all
from salientpp.engine.stages import LAST_STAGE, Finished
from salientpp.engine.state import Disagreement, Point, Reached, Resume, first_point
from salientpp.engine.trace import traced
from salientpp.processes import Lock, lazy, outside_inference
from salientpp.ranks.failure import RankFailure
from salientpp.ranks.standstill import expect, join


class Run:
    """One epoch on this rank: the requests that enter the pipeline, and the thread that drives it. It takes the arguments of :meth:`Engine.run`.

    Attributes:
        lock: held while the epoch is advanced.
        is_gone: True if the epoch has ended and no other rank can request anything in it.
        times: when this rank's batches were requested and delivered.
    """

    unfinished: ClassVar[weakref.WeakSet[Run]] = weakref.WeakSet()

    def __init__(
        self, producer: Producer, counters: Counters, epoch: int, resume: Resume | None = None,
        finish: Callable[[Any], Any] | None = None, by_hand: ByHand | None = None,
    ) -> None:  # fmt: skip
        self._producer, self._counters, self._finish, self._by_hand = producer, counters, finish, by_hand
        self._epochs = copy.copy(producer.basis.epochs)  # a copy: a loaded state changes only the next epoch
        self._most_ahead = producer.most_ahead
        self._epoch, self._resume, self._comm = epoch, resume, producer.basis.comm
        self._pipeline, self._ahead = producer.pipeline(by_hand), deque[Request]()
        self._first = 0 if resume is None else resume.batches  # first batch to deliver
        # Batches given to the sampling threads and to the pipeline, and ticks. Several ranks agree on the first tick; a single rank has a batch in each.
        self._requested = self._placed = self._entered = self._first
        self._is_open = self._comm.size == 1 or self._epochs.order.num_ticks == 0
        self.reached = Reached(epoch, self._first)
        self.times = EpochTimes(epoch, producer.stages.trace)
        self.on_open: Callable[[Draws, Resume | None], None] = _nothing  # called before the ranks agree where it starts
        self.on_end: Callable[[], None] | None = None  # called once, when this rank leaves the epoch
        self.is_gone = self._left = self._all_left = False
        self._attendance, self.lock = producer.attendance(), Lock()  # an iterator may be collected in any thread
        self._user = threading.current_thread()  # the thread that last asked for a batch
        self._answering: threading.Thread | None = None
        self._answered = threading.Event()  # set when the answering thread has ended
        self._failure: BaseException | None = None
        if self._comm.size > 1:
            self.unfinished.add(self)

    @lazy
    def _turns(self) -> TurnsOfEpoch:
        """The seeds of each batch of this rank's epoch, computed at the first ``next()``. Until then, a sampler's epoch may be set, as in torch."""
        return TurnsOfEpoch(self._epochs.order.of_epoch(self._epoch), partial(self._producer.work.add, "seeds"))

    @property
    def _all_entered(self) -> bool:
        """True if every tick in which a batch may enter the pipeline is over."""
        number = self._epochs.order.num_ticks
        return self._turns.at(self._placed) is None if number is None else self._entered == number

    def move_to(self, epoch: int) -> bool:
        """Changes the epoch's number and restarts it, if no batch was requested yet. Returns True if the epoch now has this number."""
        with self.lock:
            begun = self._requested + self._placed > 2 * self._first or (self._comm.size > 1 and self._is_open)
            if self._left or begun or self._failure is not None:
                return False
            if epoch != self._epoch:
                self._epoch, self._first, self._resume = epoch, 0, None
                self._requested = self._placed = self._entered = 0
                self.reached.epoch, self.reached.batches = epoch, 0
                self.times.epoch = epoch
                self.__dict__.pop("_turns", None)
            return True

    def give_round(self) -> list[Data]:
        """Returns this rank's batches of the next round (batch i of every logical rank), maybe none. Raises StopIteration after the last round."""
        reached = self.reached
        if reached.rounds is None:
            reached.rounds = 0 if self._resume is None else self._resume.round
        if self._failure is not None:
            raise self._failure
        turns, number = self._producer.drive(lambda: self._turns), self._epochs.order.num_rounds
        if turns.at(reached.batches) is None if number is None else reached.rounds == number:
            reached.ended = True
            self.leave()
            raise StopIteration
        batches: list[Data] = []
        while not (batches and number is None) and (turn := turns.at(reached.batches)) and turn.round == reached.rounds:
            batches.append(self.give())
        reached.rounds += 1
        return batches

    def give(self) -> Data:
        """Returns the next batch. Raises StopIteration after the last."""
        self._comm.check_process()
        self._user = threading.current_thread()
        return self._producer.drive(self._give)

    def _give(self) -> Data:
        if self._left:
            self._end()  # without the lock: the answering thread holds it while it waits for ranks that may be waiting for this thread
        with self.lock:
            if self.lock.interrupted:
                raise RuntimeError(
                    "this process was forked while another thread was inside next() of this epoch, so the epoch may be in an inconsistent state; "
                    "start a new epoch with iter(loader)"
                )
            batch = self._next_batch()
        self.leave_if_done()
        return batch

    def _end(self) -> NoReturn:
        """Ends the user's loop: raises StopIteration, or the epoch's failure."""
        if self._failure is not None:
            raise self._failure
        self.reached.ended = self.reached.batches == self._turns.size
        self.leave()
        raise StopIteration

    def _next_batch(self) -> Data:
        started = time.perf_counter()
        turn = None if self._failure is not None or self._left else self._turns.at(self.reached.batches)
        if turn is None:
            self._end()
        finished = None
        while finished is None or finished.idle:
            if self._is_open and self._all_entered and not self._pipeline.in_flight:
                raise RuntimeError("a batch of this epoch was lost to Ctrl-C; start a new epoch with iter(loader)")
            finished = self._tick()
        batch = self._transformed(finished, self._producer.stages.deliver(finished))
        self.reached.batches += 1
        self._turns.drop(self.reached.batches)
        (times := self.times).log.extend((started, time.perf_counter(), turn.num_seeds))
        if times.trace is not None or self.reached.batches % MOST_TIMES == 0:
            times.settle(self.reached.batches - 1)
        return batch

    def _transformed(self, finished: Finished, batch: Data) -> Data:
        """Returns the batch after the user's ``transform``, whose time and errors count as those of the last stage."""
        if self._finish is None:  # no stage: the thread that answers other ranks runs none of the user's code
            return batch
        started = time.perf_counter()
        try:
            with traced(self.times.trace, "transform", finished.index):
                batch = self._finish(batch)
        except BaseException as error:
            self._failure = StageError.of(error, self._comm.rank, finished.index, LAST_STAGE)
            self._comm.report_failure(str(self._failure))
            if isinstance(error, Exception):
                raise self._failure from error
            raise
        self._producer.work.take(dict.fromkeys((LAST_STAGE, "transform"), time.perf_counter() - started))
        return batch

    @outside_inference
    def _tick(self) -> Finished | None:
        self._comm.progress.task = self.reached.words(self._left)
        try:
            if not self._is_open:
                self._open()
            finished = self._pipeline.tick(self._next_request())
        except BaseException as error:
            self._failure = self._failure or self._pipeline.failure
            if self._failure is None:  # Ctrl-C arrived between two stages
                stopped = StageError.of(error, self._comm.rank, self._entered, "none")
                self._failure = error if isinstance(error, Exception) else stopped
            if not isinstance(error, Disagreement) and not isinstance(error.__cause__, RankFailure):
                self._comm.report_failure(str(self._failure))
            raise
        self._producer.work.take(self._pipeline.seconds)
        self._all_left |= finished is not None and finished.all_left
        return finished

    def _open(self) -> None:
        """Agrees with all ranks where the epoch starts. If some ranks resume an earlier epoch, first answers their requests in that epoch."""
        _tell_opening(self)
        point = self._point()
        while not self._is_open:
            try:
                everyone = self._comm.gather_numbers(point.numbers())
            except BaseException as error:
                self._failure = StageError.of(error, self._comm.rank, self._first, "open_epoch")
                if isinstance(error, Exception):
                    raise self._failure from error
                raise
            epoch, self._entered = first_point(points := [Point.of(numbers) for numbers in everyone])
            if len({each.by_round for each in points}) > 1:
                # Some ranks begin with the round of another rank's state. That rank may have given a part of this round, and gives it again.
                self._resume = Resume(self._epochs.order.batches_before(point.round), point.round, by_round=True)
                self._first = self._requested = self._placed = self.reached.batches = self._resume.batches
                point = self._point()
            elif epoch == self._epoch:
                self._is_open = True
            else:
                behind = Run(self._producer, self._counters, epoch)
                behind._left, behind._is_open, behind._entered = True, True, self._entered
                while not behind._is_over():
                    self._comm.check_script()
                    behind._tick()
                point = replace(point, resumed=False, by_round=False)

    def _point(self) -> Point:
        turn, ticks = self._turns.at(self._first), self._epochs.order.num_ticks
        start = ticks or 0 if turn is None else turn.tick
        return Point.at(start, self._epochs.draws(self._epoch), self._resume)

    def _next_request(self) -> Request | None:
        """Returns the request for the next tick. A rank that has no batch for a tick in which others have one enters an empty request."""
        if self._all_entered or self._all_left:
            return None
        tick, self._entered = self._entered, self._entered + 1
        placed = None if self._left else self._turns.at(self._placed)
        if placed is None or tick < placed.tick:
            return self._producer.idle_request(tick, placed is None)
        while len(self._ahead) < self._most_ahead and (turn := self._turns.at(self._requested)) is not None:
            draws = replace(self._epochs.draws(self._epoch), epochs=self._epochs)
            self._ahead.append(self._producer.request(draws, turn, self._attendance, self._by_hand))
            self._requested += 1
        self._placed += 1
        return self._ahead.popleft()

    def leave_if_done(self) -> None:
        """Starts to answer the other ranks once this rank has delivered its last batch, because the user may not ask again."""
        if self._comm.size > 1 and self.reached.batches == self._turns.size:
            self.leave()

    def leave(self) -> None:
        """Stops delivering batches. A background thread answers the other ranks until all have left."""
        if self._left:
            return  # without the lock, as in _give
        with self.lock:
            if self._left:
                return
            self._left = self._attendance.has_left = self.times.is_over = True
            if self._comm.is_inherited:
                return
            ended, self.on_end = self.on_end, None
            for request in self._ahead:
                request.sampling.cancel()
            self._ahead.clear()
            if isinstance(self._pipeline, Pipeline):
                self._pipeline.replace(self._producer.without_batch)
            if self._is_over():
                self._let_go()
            else:
                _tell_opening(self)  # in this thread, so that it precedes what the thread does next
                self._answering = threading.Thread(None, self._answer_in_background, "salientpp-answer", daemon=False)
                self._answering.start()
                expect(self._answering)
        if ended is not None:  # an error in it must not keep the other ranks waiting
            ended()

    @property
    def queued(self) -> tuple[int, int]:
        """Numbers of batches that are drawn, or being drawn, before they enter the pipeline, and of batches in it."""
        return len(self._ahead), self._pipeline.in_flight

    @property
    def is_under_way(self) -> bool:
        """True if the pipeline holds batches that may still be delivered."""
        return not self._left and self._failure is None and self._pipeline.in_flight + len(self._ahead) > 0

    def check_thread(self) -> None:
        """Raises RuntimeError if another thread is in this epoch, because a new epoch would end it."""
        is_free = self._left or self._user is threading.current_thread() or not self._user.is_alive()
        if not is_free and self.reached.batches != self._turns.size:
            raise RuntimeError(
                f"thread {self._user.name!r} is in epoch {self._epoch} of this loader, but with several ranks a loader runs one epoch at a time, in the "
                "same order on every rank; share one iterator between the threads, close() the iterator of that epoch first, or make a loader for each thread"
            )

    def _is_over(self) -> bool:
        """True if no other rank can request anything more in this epoch."""
        if self._comm.size == 1 or self._failure is not None:
            return True  # without reading the turns, because asking a sampler for them may fail
        return self._is_open and self._pipeline.in_flight == 0 and (self._all_entered or self._all_left)

    def _answer_in_background(self) -> None:
        # At exit, the main thread waits for this one in a lock. Ctrl-C wakes it only if no other thread receives the signal, as a thread that starts
        # threads may. Asking the store starts threads. Threads started by this one inherit its signal mask.
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
        """Marks the epoch as ended, and drops references to the user's code, which may in turn refer to the engine."""
        self.is_gone = True
        self._finish = self._by_hand = None
        self._producer.return_freed_memory()

    def join(self) -> None:
        """Waits until the other ranks have left too. Raises the error that occurred meanwhile, if any."""
        if self._answering is not None:
            join(self._answering)
            self._answering = None
        elif self._left:  # Ctrl-C arrived before the thread had started
            self._answer()
        if self._failure is not None:
            raise self._failure


def _nothing(*_: Any) -> None:
    pass


def _tell_opening(run: Run) -> None:
    told, run.on_open = run.on_open, _nothing
    told(run._epochs.draws(run._epoch), run._resume)


class Epoch:
    """Iterator that ``iter(loader)`` returns. Deleting it leaves the epoch."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Data:
        return self.run.give()

    def close(self) -> None:
        """Leaves the epoch early."""
        self.run.leave()

    def __reduce__(self) -> Any:
        raise TypeError(
            "an epoch in progress cannot be copied or pickled; copy the loader, or save loader.state_dict() and load it into another loader, "
            "whose next iter() continues from there"
        )

    def __del__(self) -> None:
        # At interpreter exit no thread can be started, and trying may block. `_leave_at_exit` has run before.
        if not sys.is_finalizing():
            self.run.leave()


class EpochOfRounds(Epoch):
    """Iterator that ``loader.rounds()`` returns. Each step gives a list of this rank's batches of a round (batch i of every logical rank)."""

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
        self._is_closed = True
        super().close()


def _leave_now(run: Run) -> None:
    """Leaves the epoch when threads can no longer be started."""
    if run._answering is not None and run._answering.is_alive() and not run._answered.is_set():
        # The interpreter normally waits for threads before this point, but Ctrl-C ends that wait. So the thread is stopped by a failure. It cannot
        # be joined: if Ctrl-C arrives just as it ends, the lock that joining waits for stays locked.
        run._failure = RankFailure(f"rank {run._comm.rank} ended early: KeyboardInterrupt")
        run._comm.report_failure(str(run._failure))
        run._answered.wait()
    if run._left or run._is_over():
        return
    run._left = run._attendance.has_left = True
    run._answer()


def _leave_at_exit() -> None:
    """Leaves unfinished epochs. If the script ends normally, the rank answers the others to the end; if it fails, it tells them."""
    try:
        runs = [run for run in Run.unfinished if not run._comm.is_inherited]
        for run in runs:
            _leave_now(run)
        for run in runs:
            ended, run.on_end = run.on_end, None
            if ended is not None:
                ended()
    finally:
        flush_all()


atexit.register(_leave_at_exit)
