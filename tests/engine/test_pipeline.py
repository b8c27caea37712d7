"""Laws of `salientpp.engine.pipeline`, tested with stages that know no graphs: order, depth, errors, seconds."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from salientpp.engine.pipeline import Pipeline, Stage, StageError, tensors_in
from salientpp.engine.trace import Trace

CPU = torch.device("cpu")
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 4, 7, 9, 10, 50])


@dataclasses.dataclass(frozen=True)
class State:
    """A batch in the pipeline, with the stages that it has passed."""

    index: int
    visited: tuple[int, ...] = ()


def stage(number: int, log: list, *, fails_at: int | None = None) -> Stage:
    def run(state: State) -> State:
        log.append((number, state.index))
        if state.index == fails_at:
            raise OSError(f"no row {state.index}")
        return State(state.index, (*state.visited, number))

    return Stage(f"do_step{number}", run, stream=("a", "b", "c")[number % 3])


def pipeline_of(num_stages: int, depth: int, log: list, **options) -> Pipeline:
    return Pipeline([stage(i, log) for i in range(num_stages)], depth=depth, device=CPU, **options)


def run_through(pipeline: Pipeline, num_batches: int) -> list[State]:
    results = []
    for i in range(num_batches):
        results.append(pipeline.tick(State(i)))
    while pipeline.in_flight:
        results.append(pipeline.tick())
    return [result for result in results if result is not None]


# --- order ------------------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("num_batches", [0, 1, 3, 30])
def test_results_come_in_order_and_pass_every_stage_once(depth, num_batches):
    results = run_through(pipeline_of(10, depth, []), num_batches)
    assert results == [State(i, tuple(range(10))) for i in range(num_batches)]


@DEPTHS
@pytest.mark.parametrize("num_stages", [1, 2, 5, 10])
def test_a_batch_leaves_depth_ticks_after_it_entered(depth, num_stages):
    pipeline = pipeline_of(num_stages, depth, [])
    latency = min(depth, num_stages)
    results = [pipeline.tick(State(i)) for i in range(20)]
    assert results[: latency - 1] == [None] * (latency - 1)
    assert [result.index for result in results[latency - 1 :]] == list(range(20 - latency + 1))


@DEPTHS
@pytest.mark.parametrize("num_stages", [1, 2, 5, 10])
def test_a_held_batch_leaves_one_tick_after_its_last_stage(depth, num_stages):
    log: list = []
    pipeline = pipeline_of(num_stages, depth, log, hold=True)
    latency = min(depth, num_stages)
    latency += latency > 1
    for tick in range(20):
        before = len(log)
        result = pipeline.tick(State(tick))
        if tick < latency - 1:
            assert result is None
        else:
            assert result == State(tick - latency + 1, tuple(range(num_stages)))
        if latency > 1 and tick >= latency - 1:
            assert (num_stages - 1, result.index) not in log[before:], "its last stage ran in the tick before"
    drained = [pipeline.tick() for _ in range(latency)]
    assert [state.index for state in drained if state is not None] == list(
        range(20 - latency + 1, 20)
    ) and pipeline.in_flight == 0


@pytest.mark.parametrize("hold", [False, True])
@DEPTHS
def test_num_past_is_the_largest_number_of_batches_past_a_stage(depth, hold):
    entered = set()
    stages = [stage(i, []) for i in range(10)]
    original = stages[6].run
    stages[6] = Stage("here", lambda state: entered.add(state.index) or original(state), "a")
    pipeline = Pipeline(stages, depth=depth, device=CPU, hold=hold)
    most = 0
    for tick in range(30):
        result = pipeline.tick(State(tick))
        # During a tick, the batch that the tick delivers still counts.
        most = max(most, len(entered))
        entered.discard(result.index if result is not None else None)
    assert most == pipeline.num_past("here")


@DEPTHS
@pytest.mark.parametrize("num_stages", [1, 2, 5, 10])
def test_the_largest_number_of_batches_in_flight_is_the_depth(depth, num_stages):
    # Counted inside the stages: a batch is in flight from its first stage to its last.
    begun, ended, most = set(), set(), 0

    def first(state):
        nonlocal most
        begun.add(state.index)
        most = max(most, len(begun - ended))
        return state

    def last(state):
        ended.add(state.index)
        return state

    stages = [
        Stage("begin", first, "a"),
        *(Stage(f"do_step{i}", lambda s: s, "a") for i in range(num_stages)),
        Stage("end", last, "a"),
    ]
    pipeline = Pipeline(stages, depth=depth, device=CPU)
    effective = min(depth, num_stages + 2)
    for i in range(30):
        assert pipeline.in_flight <= effective
        pipeline.tick(State(i))
        assert pipeline.in_flight == min(i + 1, effective - 1)
    while pipeline.in_flight:
        pipeline.tick()
    assert begun == ended == set(range(30))
    # The oldest batch moves first, so it has left before the newest enters.
    assert most == max(1, effective - 1)


@DEPTHS
@pytest.mark.parametrize("waits", [0, 1, 5])
def test_as_many_later_batches_as_wait_have_passed_the_stages_ahead(depth, waits):
    log: list = []
    ahead = [[stage(20, log)], [], [stage(21, log)]]
    pipeline = pipeline_of(10, depth, log, ahead=ahead, waits=waits)
    assert run_through(pipeline, 20) == [State(i, (20, 21, *range(10))) for i in range(20)]
    for index in range(20):
        begun = log.index((0, index))
        drawn = sum(number == 21 for number, _ in log[:begun])
        assert drawn == min(20, index + 1 + waits)


@DEPTHS
def test_states_between_two_ticks_can_be_replaced(depth):
    pipeline = pipeline_of(10, depth, [], ahead=[[stage(20, [])]], waits=4)
    results = [pipeline.tick(State(i)) for i in range(7)]
    pipeline.replace(lambda state: State(state.index + 100, state.visited))
    delivered = sum(result is not None for result in results)
    while pipeline.in_flight:
        results.append(pipeline.tick())
    expected = [State(i if i < delivered else i + 100, (20, *range(10))) for i in range(7)]
    assert [result for result in results if result is not None] == expected


def test_a_tick_moves_the_oldest_batch_first():
    log = []
    pipeline = pipeline_of(3, 3, log)
    for i in range(3):
        pipeline.tick(State(i))
    assert log == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]


def test_depth_one_finishes_each_batch_before_the_next_begins():
    log = []
    run_through(pipeline_of(4, 1, log), 3)
    assert log == [(s, b) for b in range(3) for s in range(4)]


@pytest.mark.parametrize("num_stages, depth", [(10, 4), (10, 3), (10, 7), (5, 2), (5, 50), (1, 1)])
def test_stages_are_divided_into_runs_of_nearly_equal_length(num_stages, depth):
    log = []
    pipeline = pipeline_of(num_stages, depth, log)
    pipeline.tick(State(0))
    lengths = [len(log)]
    while pipeline.in_flight:
        before = len(log)
        pipeline.tick()
        lengths.append(len(log) - before)
    assert len(lengths) == min(depth, num_stages) and sum(lengths) == num_stages
    assert min(lengths) >= 1 and max(lengths) - min(lengths) <= 1


@DEPTHS
def test_every_stage_sees_the_batches_in_order(depth):
    # So ranks that run the same pipeline start their collectives in the same order.
    log = []
    run_through(pipeline_of(10, depth, log), 25)
    for number in range(10):
        assert [index for n, index in log if n == number] == list(range(25))


@DEPTHS
def test_the_order_of_steps_depends_only_on_depth_and_number_of_batches(depth):
    first, second = [], []
    run_through(pipeline_of(10, depth, first), 12)
    run_through(pipeline_of(10, depth, second), 12)
    assert first == second and len(first) == 120


def test_a_tick_without_a_new_batch_only_moves_the_others():
    log = []
    pipeline = pipeline_of(4, 4, log)
    assert [pipeline.tick() for _ in range(6)] == [None] * 6 and log == []
    # A tick without a batch leaves a gap, which moves through the pipeline too.
    assert [pipeline.tick(item) and "out" for item in (State(0), None, State(1), None, None, None, None)] == [
        None,
        None,
        None,
        "out",
        None,
        "out",
        None,
    ]


def test_a_drained_pipeline_accepts_batches_again():
    pipeline = pipeline_of(5, 3, [])
    assert [result.index for result in run_through(pipeline, 4)] == [0, 1, 2, 3]
    assert pipeline.in_flight == 0
    assert [result.index for result in run_through(pipeline, 4)] == [0, 1, 2, 3]


@DEPTHS
def test_steps_with_several_stages_and_without_stages_keep_the_depth(depth):
    log: list = []
    pipeline = pipeline_of(4, depth, log, steps=[1, 0, 2, 0, 1])
    latency = min(depth, 5)
    results = [pipeline.tick(State(i)) for i in range(20)]
    assert [result.index for result in results[latency - 1 :]] == list(range(20 - latency + 1))
    assert results[: latency - 1] == [None] * (latency - 1)
    assert all(result.visited == (0, 1, 2, 3) for result in results[latency - 1 :])


def test_a_step_without_stages_is_a_tick_in_which_a_batch_waits():
    log: list = []
    pipeline = pipeline_of(4, 10, log, steps=[1, 0, 2, 0, 1])
    seen = []
    for item in [State(0), *[None] * 4]:
        pipeline.tick(item)
        seen.append([number for number, _ in log])
    assert seen == [[0], [0], [0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]
    with pytest.raises(ValueError, match="^the steps must have 4 stages together, got 3$"):
        pipeline_of(4, 10, log, steps=[1, 2])


@DEPTHS
def test_a_tick_ends_once_after_all_batches_have_moved(depth):
    log: list = []
    pipeline = pipeline_of(4, depth, log, end_tick=lambda: log.append("end"))
    ticks = 0
    for item in [State(0), State(1), None, State(2), *[None] * 6]:
        pipeline.tick(item)
        ticks += 1
        assert log[-1] == "end" and log.count("end") == ticks
    assert len(log) == ticks + 3 * 4


def test_an_error_at_the_end_of_a_tick_names_the_batch_that_moved_last():
    def fail() -> None:
        if pipeline.in_flight == 2:
            raise OSError("no network")

    pipeline = pipeline_of(3, 3, [], rank=4, end_tick=fail)
    pipeline.tick(State(0))
    with pytest.raises(StageError, match="^rank 4, batch 1, stage do_step0: no network$") as caught:
        pipeline.tick(State(1))
    assert isinstance(caught.value.__cause__, OSError) and pipeline.in_flight == 0
    with pytest.raises(StageError, match="no network"):
        pipeline.tick()


def test_the_last_stage_may_return_anything():
    for value in (7, "text", torch.ones(2), [1, {"a": torch.ones(1)}]):
        pipeline = Pipeline(
            [Stage("keep", lambda s: s, "a"), Stage("finish", lambda s, value=value: value, "b")], depth=2, device=CPU
        )
        assert pipeline.tick(State(0)) is None
        assert pipeline.tick() is value


def test_tensors_are_found_in_every_kind_of_state():
    dense, square = torch.arange(3), torch.eye(3)
    kinds = {"coo": square.to_sparse_coo(), "csr": square.to_sparse_csr(), "csc": square.to_sparse_csc()}
    found = {name: list(tensors_in([{"a": sparse}, (dense, "text")])) for name, sparse in kinds.items()}
    for name, parts in found.items():
        assert all(part.layout == torch.strided for part in parts) and parts[-1] is dense, name
        assert torch.equal(parts[-2], torch.ones(3)), name
    assert {name: len(parts) for name, parts in found.items()} == {"coo": 3, "csr": 4, "csc": 4}


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 4, 10])
@pytest.mark.parametrize("failing_stage", [0, 5, 9])
def test_an_error_names_rank_batch_and_stage_and_ends_the_pipeline(depth, failing_stage):
    log = []
    stages = [stage(i, log, fails_at=2 if i == failing_stage else None) for i in range(10)]
    pipeline = Pipeline(stages, depth=depth, device=CPU, rank=3)
    results, failed = [], None
    for i in range(30):
        try:
            results.append(pipeline.tick(State(i)))
        except StageError as error:
            failed = error
            break
    assert str(failed) == f"rank 3, batch 2, stage do_step{failing_stage}: no row 2"
    assert isinstance(failed.__cause__, OSError)
    # Earlier batches came out as usual, or were lost with the failing one. No later batch came out.
    assert [result.index for result in results if result is not None] in ([], [0], [0, 1])
    # No batch is in flight, and no stage runs any more.
    steps = len(log)
    assert pipeline.in_flight == 0
    for item in (None, State(7), None):
        with pytest.raises(StageError, match=rf"rank 3, batch 2, stage do_step{failing_stage}: no row 2"):
            pipeline.tick(item)
    assert len(log) == steps


def test_batches_ahead_of_a_failing_one_move_first():
    # The oldest batch moves first: when batch 2 fails in the first stage, batches 0 and 1 have already moved in that tick.
    log = []
    pipeline = Pipeline([stage(0, log, fails_at=2), stage(1, log), stage(2, log)], depth=3, device=CPU)
    pipeline.tick(State(0))
    pipeline.tick(State(1))
    with pytest.raises(StageError, match="rank 0, batch 2, stage do_step0"):
        pipeline.tick(State(2))
    assert log == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]


def test_a_stage_error_is_a_runtime_error():
    assert issubclass(StageError, RuntimeError)


@pytest.mark.parametrize("depth", [0, -1, -10])
def test_a_depth_below_one_is_refused(depth):
    with pytest.raises(ValueError, match=rf"depth must be >= 1, got {depth}"):
        pipeline_of(3, depth, [])


# --- seconds ----------------------------------------------------------------------------------------------


def test_seconds_are_recorded_by_stage():
    def slow(state):
        time.sleep(0.02)
        return state

    pipeline = Pipeline([Stage("wait_rows", slow, "a"), Stage("start_copy", lambda s: s, "b")], depth=2, device=CPU)
    assert pipeline.seconds == {"wait_rows": 0.0, "start_copy": 0.0}
    run_through(pipeline, 5)
    assert pipeline.seconds["wait_rows"] >= 5 * 0.02
    assert 0 < pipeline.seconds["start_copy"] < pipeline.seconds["wait_rows"]


# --- torch's profiler -------------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
def test_stages_are_ranges_of_torchs_profiler_while_it_runs(traced):
    pipeline = pipeline_of(3, 2, [], trace=Trace() if traced else None)
    run_through(pipeline, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_through(pipeline, 5)
    run_through(pipeline, 1)
    ranges = {event.key: event.count for event in profile.key_averages() if event.key.startswith("salientpp::")}
    assert ranges == {f"salientpp::{stage.name}": 5 for stage in pipeline.stages}
