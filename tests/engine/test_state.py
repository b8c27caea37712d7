"""Laws of resuming: a run that was stopped anywhere continues in new processes, with the batches that it would have delivered."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from forked_python import python
from graphs import random_data
from rare import rare

import salientpp
from salientpp import NeighborLoader
from salientpp.engine.run import Run
from salientpp.engine.state import Disagreement, Point, first_point

FANOUTS, BATCH, EPOCHS = [5, 3], 16, 3


@pytest.fixture(scope="module")
def data():
    return random_data(edge_attributes=True)


def make(data, **options) -> NeighborLoader:
    options = {"input_nodes": data.train_mask, "batch_size": BATCH, "shuffle": True, "seed": 7, **options}
    return NeighborLoader(data, options.pop("num_neighbors", FANOUTS), options.pop("input_nodes"), **options)


def digest(batch) -> tuple:
    return (
        batch.n_id.tolist(),
        batch.edge_index.tolist(),
        batch.e_id.tolist(),
        batch.input_id.tolist(),
        batch.y.tolist(),
        batch.x.tolist(),
    )


def whole_run(loader: NeighborLoader) -> list[list]:
    return [[digest(batch) for batch in loader] for _ in range(EPOCHS)]


def through(state: dict[str, Any], form: str) -> dict[str, Any]:
    """Returns the state after saving it to a file and loading it again."""
    if form == "json":
        return json.loads(json.dumps(state))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# --- one process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["json", "torch.save"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_run_stopped_after_any_batch_continues_bit_for_bit(data, epoch, form):
    whole = whole_run(make(data))
    others = itertools.cycle(
        [
            {"num_workers": 2},
            {"depth": 1},
            {"depth": 3, "num_workers": 1},
            {"device_rows": 0.5, "prefetch_factor": None},
        ]
    )
    for stop in range(len(whole[0]) + 1):
        first = make(data)
        first.set_epoch(epoch)
        iterator = iter(first)
        assert [digest(next(iterator)) for _ in range(stop)] == whole[epoch][:stop]
        state = through(first.state_dict(), form)
        assert (state["epoch"], state["batches"], state["seed"]) == (epoch, stop, 7)
        resumed = make(data, **next(others))
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state, "the state is loaded, but the epoch has not begun"
        assert [digest(batch) for batch in resumed] == whole[epoch][stop:]
        assert [digest(batch) for batch in resumed] == whole[epoch + 1]


def test_a_new_process_continues_bit_for_bit(data, tmp_path):
    program = """
import json, sys
from tests.engine.test_state import digest, make, random_data
data = random_data(edge_attributes=True)
loader = make(data, num_workers=1)
loader.load_state_dict(json.loads(sys.argv[1]))
print(json.dumps([[digest(batch) for batch in loader] for _ in range(2)]))
"""
    loader = make(data)
    whole = whole_run(make(data))
    for _ in itertools.islice(loader, 3):
        pass
    done = subprocess.run(
        [python(), "-c", program, json.dumps(loader.state_dict())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps([whole[0][3:], whole[1]]))


def test_a_state_counts_delivered_batches_inside_and_between_epochs(data):
    loader = make(data, num_workers=2)

    def at() -> tuple[int, int]:
        state = loader.state_dict()
        return state["epoch"], state["batches"]

    assert at() == (0, 0)
    loader.set_epoch(4)
    assert at() == (4, 0)
    iterator = iter(loader)
    assert at() == (4, 0)
    for given, _ in enumerate(iterator, 1):
        assert at() == (4, given), "batches in flight do not count"
    assert at() == (5, 0), "the user was told that the epoch has ended"
    iterator = iter(loader)
    for _ in range(len(loader)):
        next(iterator)
    assert at() == (5, len(loader)), "the user was not told yet that the epoch has ended"
    for _ in itertools.islice(loader, 2):
        pass
    assert at() == (6, 2), "the epoch was left after two batches"
    loader.set_epoch(6)
    assert at() == (6, 0), "the epoch will be repeated"


def test_set_epoch_discards_a_loaded_state_unless_it_names_its_epoch(data):
    whole = whole_run(make(data))
    source = make(data)
    source.set_epoch(1)
    for _ in itertools.islice(source, 3):
        pass
    state = source.state_dict()
    loader = make(data)
    loader.load_state_dict(state)
    loader.set_epoch(1)  # as in `for epoch in range(state["epoch"], epochs)`
    assert [digest(batch) for batch in loader] == whole[1][3:]
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert [digest(batch) for batch in loader] == whole[0]
    assert [digest(batch) for batch in loader] == whole[1], "the discarded state is not used again"
    # A state that is loaded in the middle of an epoch applies to the next iterator. Of several states, the last one applies.
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(make(data).state_dict())
    loader.load_state_dict(state)
    assert digest(next(iterator)) == whole[2][1]
    assert loader.state_dict() == state
    assert [digest(batch) for batch in loader] == whole[1][3:]


def test_resuming_does_not_sample_delivered_batches_again(data):
    source = make(data)
    for _ in itertools.islice(source, 3):
        pass
    sampled = []
    loader = make(data, transform_sampler_output=lambda mfg: sampled.append(mfg.metadata[0].tolist()) or mfg)
    loader.load_state_dict(source.state_dict())
    given = [batch.input_id.tolist() for batch in loader]
    assert sampled == given and len(given) == len(loader) - 3
    assert loader.stats().batches == len(given)


def test_a_loader_without_a_seed_takes_the_seed_of_the_state(data):
    source = make(data, seed=None)
    whole = whole_run(source)
    source.set_epoch(0)
    for _ in itertools.islice(source, 2):
        pass
    loader = make(data, seed=None)
    assert loader.seed != source.seed
    loader.load_state_dict(source.state_dict())
    assert loader.seed == source.seed
    assert [digest(batch) for batch in loader] == whole[0][2:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_that_is_loaded_in_an_epoch_changes_only_the_next_one(data, num_workers):
    loader, other = (make(data, seed=None, num_workers=num_workers) for _ in range(2))
    assert loader.seed != other.seed
    whole = whole_run(make(data, seed=loader.seed))[0]
    next_one = whole_run(make(data, seed=other.seed))[0]
    for taken in (0, 1):
        loader.set_epoch(0)
        iterator = iter(loader)
        first = [digest(next(iterator)) for _ in range(taken)]
        before = loader.state_dict()
        loader.load_state_dict(other.state_dict())
        assert first + [digest(batch) for batch in iterator] == whole
        assert [digest(batch) for batch in loader] == next_one
        loader.load_state_dict(before)


@pytest.mark.parametrize("nodes", [None, [], [5]])
def test_loaders_with_few_or_no_seeds_can_be_resumed(data, nodes):
    whole = whole_run(make(data, input_nodes=nodes))
    loader = make(data, input_nodes=nodes)
    loader.load_state_dict(make(data, input_nodes=nodes).state_dict())
    assert whole_run(loader) == whole


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 8}, "batch_size: expected 8, got 16"),
        ({"num_neighbors": [5, 4]}, r"num_neighbors: expected \[5, 4\], got \[5, 3\]"),
        ({"replace": True}, "replace: expected True, got False"),
        ({"shuffle": False, "uneven": "wrap"}, "shuffle: expected False, got True"),
        ({"drop_last": True}, "drop_last: expected True, got False"),
        ({"uneven": "exact"}, "uneven: expected 'exact', got 'wrap'"),
        ({"input_nodes": [1, 2, 3]}, "input_nodes: expected '[0-9a-f]{16}', got '[0-9a-f]{16}'"),
        ({"seed": 8}, "seed: expected 8, got 7"),
    ],
)
def test_a_state_of_other_arguments_is_refused_without_changing_the_loader(data, options, text):
    state = make(data).state_dict()
    loader = make(data, **options)
    for _ in itertools.islice(loader, 1):
        pass
    before = loader.state_dict()
    with pytest.raises(
        ValueError, match=rf"cannot load this state: .*other data or arguments \({text}\); make the loader"
    ):
        loader.load_state_dict({**state, "epoch": 5})
    assert loader.state_dict() == before
    following = make(data, **options)
    following.set_epoch(1)
    assert [digest(batch) for batch in loader] == [digest(batch) for batch in following]


@pytest.mark.parametrize("change", ["an edge", "a row", "a dtype", "an attribute", "a size"])
def test_a_state_of_other_data_is_refused(data, change):
    other = data.clone()
    if change == "an edge":
        other.edge_index[0, 7] = (other.edge_index[0, 7] + 1) % other.num_nodes
    elif change == "a row":
        other.x[-1] += 1
    elif change == "a dtype":
        other.x = other.x.double()
    elif change == "an attribute":
        other.z = torch.zeros(other.num_nodes)
    else:
        other = random_data(401, edge_attributes=True)
    with pytest.raises(ValueError, match="dataset: expected '[0-9a-f]{16}', got '[0-9a-f]{16}'"):
        make(other, input_nodes=[1, 2]).load_state_dict(make(data, input_nodes=[1, 2]).state_dict())
    make(data.clone(), input_nodes=[1, 2]).load_state_dict(make(data, input_nodes=[1, 2]).state_dict())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: None, "expected a result of state_dict\\(\\), got NoneType"),
        (lambda s: {}, "expected a result of state_dict\\(\\), got a dict with nothing"),
        (lambda s: {"model": 1}, "expected a result of state_dict\\(\\), got a dict with 'model'"),
        (lambda s: {**s, "version": 1}, "expected version 3, got 1; use the version of salientpp that wrote the state"),
        (lambda s: {**s, "epoch": "1"}, "epoch must be an integer, got '1'"),
        (lambda s: {**s, "batches": True}, "batches must be an integer, got True"),
        (lambda s: {**s, "batches": 99}, r"batches must be in \[0, 8\], got 99"),
        (lambda s: {**s, "batches": -1}, r"batches must be in \[0, 8\], got -1"),
        (lambda s: {**s, "round": -1}, r"round must be in \[0, 8\], got -1"),
        (lambda s: {**s, "round": 2**200}, r"round must be in \[0, 8\], got 16"),
        (
            lambda s: {**s, "epoch": -1},
            r"epoch must be in \[0, 4611686018427387904\), got -1; the state was altered or is damaged",
        ),
        (lambda s: {**s, "epoch": 2**64}, r"epoch must be in .*, got 18446744073709551616"),
        (lambda s: {**s, "sampler_epoch": "3"}, "sampler_epoch must be an integer, got '3'"),
        (lambda s: {**s, "seed": None}, "seed must be an integer, got None"),
        (lambda s: {**s, "fingerprint": []}, "fingerprint must be a dict, got list"),
        (lambda s: {**s, "fingerprint": {**s["fingerprint"], "hops": 2}}, "hops: expected None, got 2"),
        (lambda s: {k: v for k, v in s.items() if k != "rank"}, "rank must be an integer, got None"),
        (lambda s: {**s, "rank": 1}, "rank: expected 0, got 1"),
        (lambda s: {**s, "ranks": 2}, "ranks: expected 1, got 2"),
        (lambda s: {**s, "logical_ranks": 2}, "logical_ranks: expected 1, got 2"),
        (lambda s: {**s, "joined": 1}, "joined must be True or False, got 1"),
        (
            lambda s: {**s, "fingerprint": {k: v for k, v in s["fingerprint"].items() if k != "uneven"}},
            "uneven: expected 'wrap', got None",
        ),
    ],
)
def test_an_invalid_state_is_refused_with_a_reason(data, change, text):
    loader = make(data)
    assert len(loader) == 8
    with pytest.raises(ValueError, match=f"cannot load this state: .*{text}"):
        loader.load_state_dict(change(loader.state_dict()))
    assert loader.state_dict() == make(data).state_dict()


# --- the common starting point of the ranks ---------------------------------------------------------------


def test_ranks_resume_at_the_earliest_point_of_any_rank():
    def points(*pairs: tuple[int, int], resumed: bool = True) -> list[Point]:
        return [Point(epoch, start, resumed, 1) for epoch, start in pairs]

    assert first_point(points((2, 5), (2, 3), (2, 9))) == (2, 3)
    assert first_point(points((3, 0), (2, 8), (2, 9))) == (2, 8), "a rank in the next epoch is not considered"
    assert first_point(points((2, 0), (2, 10), resumed=False)) == (2, 0)
    with pytest.raises(
        Disagreement, match="got epoch 2 on rank 1 and epoch 4 on rank 0; load states that were saved together"
    ):
        first_point(points((4, 0), (2, 0)))
    with pytest.raises(
        Disagreement, match="got epoch 0 on rank 0 and epoch 1 on rank 1; call set_epoch with the same number"
    ):
        first_point(points((0, 0), (1, 0), resumed=False))
    with pytest.raises(Disagreement, match="rank 1 has loaded a state and rank 0 has not"):
        first_point([*points((0, 0), resumed=False), *points((0, 3))])
    with pytest.raises(Disagreement, match="rank 1's differs from rank 0's"):
        first_point([*points((0, 0)), Point(0, 0, True, 2)])


# --- several ranks ----------------------------------------------------------------------------------------


def directory(root: Path, seeds_per_part: list[int]) -> str:
    """Writes parts with the given numbers of training seeds."""
    data = random_data()
    assignment = torch.arange(data.num_nodes) % len(seeds_per_part)
    train = torch.cat([(assignment == part).nonzero().flatten()[:count] for part, count in enumerate(seeds_per_part)])
    salientpp.partition(data, len(seeds_per_part), root, FANOUTS, BATCH, method=assignment, split={"train": train})
    return str(root)


def rank_loader(root: str, **options) -> NeighborLoader:
    options = {"batch_size": BATCH, "shuffle": True, "seed": 7, "timeout": 20, **options}
    return NeighborLoader(salientpp.load(root), FANOUTS, "train", **options)


def _run_whole(rank: int, root: str, options: dict) -> list[list]:
    return whole_run(rank_loader(root, **options))


def _stop(rank: int, root: str, options: dict, epoch: int, stops: list[int | None]) -> dict:
    """Returns the state after ``stops[rank]`` batches of an epoch. None: after the end of the epoch."""
    loader = rank_loader(root, **options)
    loader.set_epoch(epoch)
    for _ in itertools.islice(loader, stops[rank]):
        pass
    return through(loader.state_dict(), "json")


def _stop_each(rank: int, root: str, options: dict, epoch: int, plans: list[list[int | None]]) -> list[dict]:
    """Returns the state of each plan, from loaders of their own."""
    return [_stop(rank, root, options, epoch, stops) for stops in plans]


def _resume_each(rank: int, root: str, cases: list[tuple[dict, list[dict]]]) -> list[tuple[list[list], list[list]]]:
    return [_resume(rank, root, options, states) for options, states in cases]


def _resume(rank: int, root: str, options: dict, states: list[dict]) -> tuple[list[list], list[list]]:
    """Returns the batches of the epochs up to the last, and the seeds that were sampled."""
    sampled = []
    loader = rank_loader(
        root, transform_sampler_output=lambda mfg: sampled.append(mfg.metadata[0].tolist()) or mfg, **options
    )
    loader.load_state_dict(states[rank])
    epochs = []
    for epoch in range(states[rank]["epoch"], EPOCHS):
        loader.set_epoch(epoch)
        epochs.append([digest(batch) for batch in loader])
    return epochs, sampled


OTHERS = [
    {"num_workers": 2, "depth": 3},
    {"replication_factor": 0.3, "depth": 1},
    {"device_rows": 0.5, "policy": "degree", "replication_factor": 0.1, "num_workers": 1},
    {},
]


@pytest.mark.parametrize(
    ("seeds", "ranks_per_part", "uneven"),
    [
        ([70, 10], 1, "wrap"),
        ([90, 0, 40], 1, "exact"),
        *rare(([100, 10], 1, "exact"), ([90, 16, 0, 40], 1, "exact")),
        pytest.param([70, 40], 1, "drop", marks=pytest.mark.faults),
        pytest.param([60, 0], 1, "exact", marks=pytest.mark.faults),
        pytest.param([48, 48], 1, "error", marks=pytest.mark.faults),
        pytest.param([90, 33], 2, "wrap", marks=pytest.mark.faults),
        pytest.param([90], 2, "exact", marks=pytest.mark.faults),
    ],
)
def test_ranks_that_stopped_at_any_points_continue_bit_for_bit(tmp_path, seeds, ranks_per_part, uneven):
    root, world = directory(tmp_path / "parts", seeds), len(seeds) * ranks_per_part
    whole = distributed.run(_run_whole, world, root, {"uneven": uneven})
    lengths = [len(epochs[0]) for epochs in whole]
    rng = random.Random(f"{seeds}{uneven}")
    # The ranks stop at the start, after the last batch, after the end of the epoch, at the same batch on all ranks, and at different ones.
    same = min(lengths)
    plans = [[0] * world, list(lengths), [None] * world, [same] * world, [None, *lengths[1:]]]
    plans += [[rng.choice([None, *range(length + 1)]) for length in lengths] for _ in range(2)]
    others = list(itertools.islice(itertools.cycle(OTHERS), len(plans)))
    states = zip(*distributed.run(_stop_each, world, root, {"uneven": uneven}, 1, plans))
    cases = [({"uneven": uneven, **options}, list(of_ranks)) for options, of_ranks in zip(others, states, strict=True)]
    for rank, of_rank in enumerate(distributed.run(_resume_each, world, root, cases)):
        for plan, options, (epochs, sampled) in zip(plans, others, of_rank, strict=True):
            case = f"rank {rank}: stopped after {plan} of {lengths}, resumed with {options}"
            expected = [whole[rank][2]] if plan[rank] is None else [whole[rank][1][plan[rank] :], whole[rank][2]]
            assert epochs == expected, case
            assert sorted(sampled) == sorted(batch[3] for epoch in expected for batch in epoch), (
                f"delivered batches are not sampled again; {case}"
            )


def _load_on_some(rank: int, root: str, states: list[dict | None], epochs: list[int | None]) -> list:
    loader = rank_loader(root)
    if states[rank] is not None:
        loader.load_state_dict(states[rank])
    if epochs[rank] is not None:
        loader.set_epoch(epochs[rank])
    try:
        return [digest(batch) for batch in loader]
    except Disagreement as error:
        return str(error)


def test_an_error_on_every_rank_names_the_rank_without_a_state(tmp_path):
    root = directory(tmp_path / "parts", [50] * 3)
    states = distributed.run(_stop, 3, root, {}, 0, [2] * 3)
    for text in distributed.run(_load_on_some, 3, root, [*states[:2], None], [None] * 3):
        assert text.startswith("all ranks or none must resume, but rank 0 has loaded a state and rank 2 has not")
    for text in distributed.run(_load_on_some, 3, root, states, [None, 2, None]):
        assert text.startswith("all ranks or none must resume, but rank 0 has loaded a state and rank 1 has not")


def test_an_error_on_every_rank_names_ranks_in_different_epochs(tmp_path):
    root = directory(tmp_path / "parts", [50, 50])
    for text in distributed.run(_load_on_some, 2, root, [None, None], [0, 3]):
        assert text.startswith("all ranks must start the same epoch, got epoch 0 on rank 0 and epoch 3 on rank 1")
    early, late = (distributed.run(_stop, 2, root, {}, epoch, [1, 1]) for epoch in (0, 2))
    for text in distributed.run(_load_on_some, 2, root, [early[0], late[1]], [None, None]):
        assert text.startswith(
            "all ranks must start the same epoch, got epoch 0 on rank 0 and epoch 2 on rank 1; load states that were"
        )


def _mended(rank: int, root: str, states: list[dict], in_the_background: bool) -> list[Any]:
    """Begins an epoch although only rank 0 has loaded a state, then another one after all have. Returns the errors and the batches."""
    loader = rank_loader(root)
    if rank == 0:
        loader.load_state_dict(states[rank])
    said: list[Any] = []
    if in_the_background:
        iter(loader)  # dropped, so that a thread begins the epoch and finds the difference
    for _ in range(2 if in_the_background else 1):
        try:
            said.append([digest(batch) for batch in loader])
        except Disagreement as error:
            said.append(str(error)[:35])
    loader.load_state_dict(states[rank])
    return [*said, [digest(batch) for batch in loader]]


def test_a_difference_that_was_mended_is_not_raised_once_more(tmp_path):
    root = directory(tmp_path / "parts", [50, 50])
    whole = distributed.run(_run_whole, 2, root, {})
    states = distributed.run(_stop, 2, root, {}, 0, [2, 2])
    for in_the_background in (False, True):
        for rank, (first, *_, after) in enumerate(distributed.run(_mended, 2, root, states, in_the_background)):
            assert first == "all ranks or none must resume, but ", in_the_background
            assert after == whole[rank][0][2:], in_the_background


def _load_from(rank: int, root: str, cases: list[tuple[list[dict], list[int]]]) -> list[Any]:
    """Continues from states, each with a loader of its own. A case has the states of all ranks, and whose state each rank loads."""
    found: list[Any] = []
    for states, whose in cases:
        loader = rank_loader(root)
        loader.load_state_dict(states[whose[rank]])
        try:
            found.append([digest(batch) for batch in loader])
        except Disagreement as error:
            found.append(str(error))
    return found


def test_the_state_of_any_rank_determines_the_round_to_continue_with(tmp_path):
    root = directory(tmp_path / "parts", [50, 50])
    whole = distributed.run(_run_whole, 2, root, {})
    together, apart = (distributed.run(_stop, 2, root, {}, 0, stops) for stops in ([2, 2], [1, 2]))
    cases = [(together, [1, 0]), (together, [0, 0]), (together, [1, 1]), (apart, [0, 0]), (apart, [1, 1])]
    starts = [2, 2, 2, 1, 2]
    for rank, found in enumerate(distributed.run(_load_from, 2, root, cases)):
        for start, (_, whose), rest in zip(starts, cases, found, strict=True):
            assert rest == whole[rank][0][start:], (start, whose)
    for (text,) in distributed.run(_load_from, 2, root, [(apart, [1, 0])]):
        assert text.startswith(
            "rank 0 has loaded the state of another rank, or of another number of ranks, and continues with step 2 of epoch 0; "
            "rank 1 continues with step 1 of epoch 0; load the state of the same rank"
        )


def _unseeded(rank: int, root: str, states: list[dict] | None) -> Any:
    loader = rank_loader(root, seed=None)
    if states is None:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        return state, [digest(batch) for batch in iterator]
    loader.load_state_dict(states[rank])
    return [digest(batch) for batch in loader]


def test_ranks_without_a_seed_take_the_seed_of_the_state(tmp_path):
    root = directory(tmp_path / "parts", [50, 50])
    states, rest = zip(*distributed.run(_unseeded, 2, root, None))
    assert distributed.run(_unseeded, 2, root, states) == list(rest)


def _loads_early(rank: int, root: str, states: list[dict], options: dict) -> list[list]:
    """Begins an epoch, and loads a state with another seed before the thread that answers the other ranks has begun to run."""
    loader = rank_loader(root, seed=None, **options)
    alike = rank_loader(root, seed=loader.seed, **options)
    whole = [digest(batch) for batch in alike]
    leave_if_done, Run.leave_if_done = Run.leave_if_done, lambda run: None
    iterator: Any = iter(loader)
    loader.load_state_dict(states[rank])
    Run.leave_if_done = leave_if_done
    iterator.run.leave_if_done()
    taken = [digest(batch) for batch in iterator]
    assert taken == whole
    return [digest(batch) for batch in loader]


@pytest.mark.parametrize("options", [*rare({}), {"lookahead": 4, "replication_factor": 0.2}])
def test_a_rank_without_batches_may_load_a_state_before_the_others_have_begun_its_epoch(tmp_path, options):
    root, options = directory(tmp_path / "parts", [50, 0]), {**options, "uneven": "exact"}
    whole = distributed.run(_run_whole, 2, root, options)
    states = distributed.run(_stop, 2, root, options, 1, [0, 0])
    assert distributed.run(_loads_early, 2, root, states, options) == [epochs[1] for epochs in whole]


def _each_one_epoch_apart(rank: int, root: str, cases: list[dict]) -> list[tuple[list, list, str]]:
    return [_one_epoch_apart(rank, root, options) for options in cases]


def _one_epoch_apart(rank: int, root: str, options: dict) -> tuple[list, list, str]:
    """Stops rank 0 before the end of epoch 0 and rank 1 after it, and continues both. Then loads a state on rank 1 only."""
    loader = rank_loader(root, **options)
    number, epochs = len(loader), [[digest(batch) for batch in loader] for _ in range(2)]
    loader.set_epoch(0)
    for _ in itertools.islice(loader, number - 1 if rank == 0 else None):
        pass
    state = loader.state_dict()
    loader = rank_loader(root, **options)
    loader.load_state_dict(state)
    found = [[digest(batch) for batch in loader] for _ in range(2 - rank)]
    if rank == 1:
        loader.load_state_dict(state)
    loader.set_epoch(1)
    try:
        next(iter(loader))
    except Disagreement as error:
        return found, [epochs[0][number - 1 :], epochs[1]][rank:], str(error)
    raise AssertionError("no rank noticed that only some ranks have loaded a state")


@pytest.mark.parametrize(
    ("topology", "cases"),
    [
        ("whole", [{}, {"memory": "20kB"}]),
        ("parts", [{}, {"pad": "bucket"}, {"pad": "bucket", "memory": "20kB"}]),
        *rare(
            ("whole", [{"pad": "bucket"}, {"pad": "bucket", "memory": "20kB"}]),
            ("parts", [{"memory": "20kB"}]),
        ),
    ],
)
def test_ranks_one_epoch_apart_continue_with_every_option(tmp_path, topology, cases):
    """Also with options for which the ranks take steps together before an epoch that resumes."""
    data = random_data()
    train = {"train": torch.arange(100)}
    method = torch.arange(data.num_nodes) % 2
    salientpp.partition(data, 2, tmp_path / "parts", FANOUTS, BATCH, method=method, split=train, topology=topology)
    for of_rank in distributed.run(_each_one_epoch_apart, 2, str(tmp_path / "parts"), cases):
        for options, (found, want, error) in zip(cases, of_rank, strict=True):
            assert found == want, options
            text = "all ranks or none must resume, but rank 1 has loaded a state and rank 0 has not"
            assert error.startswith(text), options
