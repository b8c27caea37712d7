"""Moves several batches through stages at once, in the caller's thread.

One stage starts slow work (a collective, a worker thread, a copy on a stream), and the next stage waits for it, without polling. All ranks run the stages in
the same order, so they start their collectives in the same order. On an accelerator, streams wait for the event of the previous stage, and tensors that cross
streams are recorded on the stream that uses them. So this module never makes the host wait for the device.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch_geometric.typing import TensorFrame

from salientpp.batch.contents import is_sparse_tensor
from salientpp.batch.edges import BatchEdges
from salientpp.engine.trace import Trace, in_stage


class StageError(RuntimeError):
    """A stage failed. The text names rank, batch and stage. The original error is chained."""

    @classmethod
    def of(cls, error: BaseException, rank: int, index: int, stage: str) -> StageError:
        return cls(f"rank {rank}, batch {index}, stage {stage}: {str(error) or type(error).__name__}")


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of a batch in the pipeline.

    Attributes:
        run: makes the next state from the previous one. States are frozen dataclasses (or objects with ``to_dict``), and have an ``index``, the number of
            the batch. The last stage may return anything.
        stream: name of a device stream. Stages of the same stream run one after the other.
    """

    name: str
    run: Callable[[Any], Any]
    stream: str


class Pipeline:
    """Carries batches through stages, up to ``depth`` at once.

    The steps of a batch are divided into ``depth`` runs of consecutive steps. A tick carries each batch through one run. Streams have high priority: their
    kernels are few and short, and run before the model's.

    Args:
        steps: number of stages in each step. A step without stages is a tick in which a batch only waits, for example for the network. None: one stage
            in each.
        depth: number of batches in flight. Values above the number of steps have no further effect.
        rank: number of the rank, for errors.
        trace: receives a span per stage and batch.
        hold: if True, deliver a batch one tick after its last stage. Its last kernels and copies then overlap with the training step of the batch
            before. No effect with ``depth=1``.
        ahead: runs of stages before the others. With ``depth`` > 1, each takes a tick, and its batches do not count as in flight for ``depth``.
        waits: number of batches that wait between the runs in ``ahead`` and the others. When one goes on, this number of later ones have passed ``ahead``.
        end_tick: called at the end of every tick, when all batches have moved on. Its errors name the batch that moved last.

    Attributes:
        failure: the error because of which the pipeline refuses further work, or None.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        depth: int,
        steps: Sequence[int] | None = None,
        device: torch.device,
        rank: int = 0,
        trace: Trace | None = None,
        hold: bool = False,
        ahead: Sequence[Sequence[Stage]] = (),
        waits: int = 0,
        end_tick: Callable[[], None] | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be >= 1, got {depth}")
        if not stages:
            raise ValueError("a pipeline must have at least one stage, got none")
        steps = [1] * len(stages) if steps is None else steps
        if sum(steps) != len(stages):
            raise ValueError(f"the steps must have {len(stages)} stages together, got {sum(steps)}")
        self.depth = min(depth, len(steps))
        self.rank = rank
        bounds = [sum(steps[: round(i * len(steps) / self.depth)]) for i in range(self.depth + 1)]
        runs = [list(stages[a:b]) for a, b in pairwise(bounds)]
        first = [stage for run in ahead for stage in run]
        if self.depth > 1:
            self._runs = [*map(list, ahead), *([] for _ in range(waits)), *runs]
        else:
            self._runs = [first, *([] for _ in range(waits)), *runs] if waits else [[*first, *runs[0]]]
        self.stages = [*first, *stages]
        self.seconds = {stage.name: 0.0 for stage in self.stages}
        if hold and self.depth > 1:
            self._runs.append([])
        self._waiting: list[Any] = [None] * len(self._runs)  # [i]: state and event of the batch that enters run i next
        self._device_module = torch.get_device_module(device)
        options = {} if device.type == "cpu" else {"device": device, "priority": -1}
        self._streams = {stage.stream: self._device_module.Stream(**options) for stage in self.stages}
        self._device = device
        self._trace = trace
        self._end_tick = end_tick
        self._has_streams = device.type != "cpu"
        self.failure: StageError | None = None

    def num_past(self, stage: str) -> int:
        """Returns how many batches can be past the beginning of this stage without being delivered."""
        return len(self._runs) - next(i for i, run in enumerate(self._runs) if any(step.name == stage for step in run))

    @property
    def in_flight(self) -> int:
        """Number of batches that have entered and have not been delivered."""
        return sum(state is not None for state in self._waiting)

    def replace(self, function: Callable[[Any], Any]) -> None:
        """Replaces the state of every batch in flight by ``function(state)``, between two ticks."""
        for i, waiting in enumerate(self._waiting):
            if waiting is not None:
                self._waiting[i] = function(waiting[0]), waiting[1]

    def tick(self, item: Any = None) -> Any:
        """Moves every batch one step forward, and takes in ``item`` as a new batch (None: no new batch).

        Returns:
            The last stage's result for the batch that leaves the pipeline, or None.

        Raises:
            StageError: a stage failed, now or in an earlier tick.
        """
        if self.failure is not None:
            raise self.failure
        result = None
        last = (0, "none")  # number of the batch that moved last, and its stage
        self._waiting[0] = None if item is None else (item, None)
        # Oldest batch first: it must leave a run before the next one enters.
        for i in reversed(range(len(self._runs))):
            waiting, self._waiting[i] = self._waiting[i], None
            if waiting is None:
                continue
            state, event = waiting
            for stage in self._runs[i]:
                last = (state.index, stage.name)
                state, event = self._run(stage, state, event)
            if i + 1 < len(self._runs):
                self._waiting[i + 1] = (state, event)
            else:
                result = state
                if self._has_streams:  # the caller's stream waits, but the host does not
                    current = self._device_module.current_stream(self._device)
                    current.wait_event(event)
                    record_stream(state, current)
        if self._end_tick is not None:
            try:
                self._end_tick()
            except BaseException as error:
                self._fail(error, *last)
        return result

    def _run(self, stage: Stage, state: Any, event: Any) -> tuple[Any, Any]:
        started = time.perf_counter()
        stream = self._streams[stage.stream]
        try:
            with self._device_module.stream(stream), in_stage(stage.name, state.index, self._trace):
                if event is not None and self._has_streams:
                    stream.wait_event(event)
                    record_stream(state, stream)
                following = stage.run(state)
                event = self._device_module.Event()
                event.record(stream)
        except BaseException as error:
            self._fail(error, state.index, stage.name)
        self.seconds[stage.name] += time.perf_counter() - started
        return following, event

    def _fail(self, error: BaseException, index: int, stage: str) -> NoReturn:
        """Refuses further work and raises the failure of a stage, also after Ctrl-C, because the batch's state is then undefined."""
        self._waiting = [None] * len(self._runs)
        self.failure = StageError.of(error, self.rank, index, stage)
        if isinstance(error, Exception):
            raise self.failure from error
        raise error


def record_stream(state: Any, stream: Any) -> None:
    """Delays the reuse of a state's device memory after its tensors are freed, until ``stream`` has done the work that it has then."""
    for tensor in tensors_in(state):
        if tensor.device.type != "cpu":
            tensor.record_stream(stream)


def tensors_in(state: Any) -> Iterator[Tensor]:
    """Yields all dense tensors in a batch's state: in dataclasses, lists, dictionaries, sparse tensors and objects with ``to_dict``.

    For the edges of a batch, it also yields the grouped edge lists that were copied to devices.
    """
    if isinstance(state, Tensor):
        yield from [state] if state.layout == torch.strided else _parts_of(state)
        if isinstance(state, BatchEdges):
            for lists in state.hops.made_lists().values():
                yield from lists.moved()
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(state) and not isinstance(state, type):
        for field in dataclasses.fields(state):
            yield from tensors_in(getattr(state, field.name))
    elif isinstance(state, TensorFrame):
        yield from tensors_in([list(state.feat_dict.values()), state.y])
    elif is_sparse_tensor(state):
        yield from tensors_in(list(vars(state.storage).values()))
    elif hasattr(state, "to_dict"):
        yield from tensors_in(state.to_dict())


def _parts_of(tensor: Tensor) -> list[Tensor]:
    """Returns the dense tensors of a sparse tensor. Operations on memory, such as ``record_stream``, accept only these."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
