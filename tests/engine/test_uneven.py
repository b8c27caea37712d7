"""Laws of ranks with different numbers of seeds: no distribution of seeds makes a rank wait forever, and training is equivalent."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from pathlib import Path

import distributed
import pytest
import torch
from distributed import NEVER
from graphs import random_data
from rare import rare
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader

sys.path.append(str(Path(__file__).parents[2] / "examples"))


def _directory(root: Path, num_parts: int, **options) -> str:
    salientpp.partition(random_data(**options), num_parts, root, [3, 2], 8)
    return str(root)


# --- any distribution -------------------------------------------------------------------------------------


def _give(rank: int, root: str, cases: list[dict]) -> list:
    """Returns, for each case, the seeds of every batch of two epochs, or the error."""
    part = salientpp.load(root)
    begin, _ = part.book.range_of(rank)
    out = []
    for case in cases:
        options = {name: case[name] for name in ("batch_size", "drop_last", "uneven", "depth", "num_workers")}
        seeds = torch.arange(begin, begin + case["seeds"][rank])
        try:
            loader = NeighborLoader(part, [3, 2], seeds, shuffle=True, seed=case["seed"], timeout=NEVER, **options)
        except ValueError as error:
            out.append(str(error))
            continue
        epochs = [[batch.n_id[: batch.batch_size] - begin for batch in loader] for _ in range(2)]
        assert all(len(epoch) == len(loader) for epoch in epochs)
        out.append([[batch.tolist() for batch in epoch] for epoch in epochs])
    return out


def _cases(world: int, number: int, seed: int) -> list[dict]:
    rng = random.Random(f"{world} {seed}")
    return [
        {
            "seeds": [rng.choice([0, 1, 7, 8, 9, rng.randrange(60)]) for _ in range(world)],
            "batch_size": rng.choice([1, 8, 100]) if rng.random() < 0.5 else rng.randint(1, 20),
            "drop_last": rng.random() < 0.4,
            "uneven": rng.choice(["wrap", "drop", "exact", "exact", "error"]),
            "depth": rng.choice([1, 3, 10]),
            "num_workers": rng.choice([0, 1]),
            "seed": number,
        }
        for number in range(number)
    ]


def _check(case: dict, given: list) -> None:
    """Compares with the definitions of the four modes, counted by hand."""
    seeds, size, uneven = case["seeds"], case["batch_size"], case["uneven"]
    batches = [count // size if case["drop_last"] else -(-count // size) for count in seeds]
    if uneven in ("wrap", "drop") and 0 in seeds and len(seeds) > 1:
        for text in given:
            assert f"rank {seeds.index(0)} has no seeds, so uneven='{uneven}' cannot give it batches" in text
        return
    if uneven == "error" and len(set(batches)) > 1:
        assert all(f"uneven='error', but ranks 0 to {len(seeds) - 1} have {batches} batches" in text for text in given)
        return
    most = max(seeds) // size if case["drop_last"] else -(-max(seeds) // size)
    expected = {"wrap": [most] * len(seeds), "drop": [min(batches)] * len(seeds)}.get(uneven, batches)
    for epoch in range(2):
        assert [len(epochs[epoch]) for epochs in given] == expected
        sizes = [[len(batch) for batch in epochs[epoch]] for epochs in given]
        if uneven == "wrap":
            assert all(size == sizes[0] for size in sizes), (
                "sizes are equal at every step, so DDP's mean is the mean over seeds"
            )
        for count, epochs in zip(seeds, given):
            times = Counter(seed for batch in epochs[epoch] for seed in batch)
            assert set(times) <= set(range(count))
            if uneven != "wrap":
                assert set(times.values()) <= {1}
            if uneven == "exact" and not case["drop_last"]:
                assert len(times) == count


@pytest.mark.parametrize(
    ("world", "number", "seed"),
    [
        (2, 12, 0),
        (3, 6, 0),
        *(pytest.param(w, 150, seed, marks=pytest.mark.faults) for w in (2, 3, 4) for seed in (1, 2)),
    ],
)
def test_any_distribution_of_seeds_gives_the_batches_that_the_mode_promises(tmp_path, world, number, seed):
    cases = _cases(world, number, seed)
    results = distributed.run(_give, world, _directory(tmp_path / "parts", world), cases)
    for case, given in zip(cases, zip(*results), strict=True):
        print(case)
        _check(case, list(given))


def _lengths(rank: int, root: str, plans: list[list[int]]) -> list[int]:
    """Runs loops of any length, different on each rank and in each epoch."""
    loader = NeighborLoader(
        salientpp.load(root), [3, 2], "train", batch_size=4, shuffle=True, uneven="exact", seed=1, timeout=NEVER
    )
    given = []
    for plan in plans:
        given.append(0)
        for _ in loader:
            given[-1] += 1
            if given[-1] >= plan[rank]:
                break
    return given


def test_loops_can_have_different_lengths_on_each_rank_and_in_each_epoch(tmp_path):
    rng = random.Random(5)
    plans = [[rng.randint(1, 7) for _ in range(3)] for _ in range(10)]
    results = distributed.run(_lengths, 3, _directory(tmp_path / "parts", 3), plans)
    assert results == [[plan[rank] for plan in plans] for rank in range(3)]


# --- loops that count their batches -----------------------------------------------------------------------


#: How many batches of a state are skipped, the numbers of seeds, and options.
Counted = tuple[int, list[int], dict]


def _count_each(rank: int, root: str, cases: list[Counted]) -> list[list[tuple[int, float]]]:
    return [_count_batches(rank, root, seeds, options, resumed) for resumed, seeds, options in cases]


def _count_batches(rank: int, root: str, seeds: list[int], options: dict, resumed: int) -> list[tuple[int, float]]:
    """Takes ``len(loader)`` batches, and then runs a collective, in the middle of a training epoch."""
    part = salientpp.load(root)
    begin, _ = part.book.range_of(rank)
    training = NeighborLoader(part, [3, 2], "train", batch_size=4, shuffle=True, seed=1, timeout=NEVER, **options)
    loader = NeighborLoader(
        part, [3, 2], torch.arange(begin, begin + seeds[rank]), batch_size=4, seed=2, timeout=NEVER, **options
    )
    found = []
    for index, _ in enumerate(training):
        if index == 3:
            break
        expected = len(loader)
        if resumed:
            loader.load_state_dict({**loader.state_dict(), "batches": min(resumed, expected)})
            expected -= min(resumed, expected)
        iterator = iter(loader)
        given = [next(iterator).batch_size for _ in range(expected)]
        total = torch.tensor(float(sum(given)))
        torch.distributed.all_reduce(total)
        found.append((len(given), total.item()))
        # The iterator is kept alive, as trainers do.
        assert next(iterator, None) is None
    return found


def test_a_loop_over_len_loader_can_end_in_a_collective(tmp_path):
    """A rank continues to answer others after its last batch, without another request for a batch."""
    cases: list[Counted] = [
        (resumed, seeds, options)
        for resumed in (0, 2)
        for seeds in ([36, 4], [4, 36], [9, 0], [0, 9], [0, 0])
        for options in ({"depth": 1}, {"num_workers": 2, "replication_factor": 0.1})
    ]
    results = distributed.run(_count_each, 2, _directory(tmp_path / "parts", 2), cases)
    for case, found in zip(cases, zip(*results), strict=True):
        resumed, seeds, _ = case
        left = [max(-(-count // 4) - resumed, 0) for count in seeds]
        total = float(sum(max(count - 4 * resumed, 0) for count in seeds))
        assert list(found) == [[(number, total)] * 3 for number in left], case


# --- training is equivalent -------------------------------------------------------------------------------


def _model(num_features: int) -> GraphSAGE:
    torch.manual_seed(0)
    return GraphSAGE(num_features, 8, 2, 7).double()


def _gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch) -> torch.Tensor:
    out = model(batch.x / 400, batch.edge_index)[: batch.batch_size]
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size]).backward()
    gradients = _gradients(model).clone()
    optimizer.step()
    return gradients


def _train(rank: int, root: str, uneven: str) -> list[tuple[list[int], list[float]]]:
    """Returns, for every step, this rank's seeds (the user's ids) and DDP's gradients, which are means over the ranks."""
    part = salientpp.load(root)
    # Without drop_last, the last batch with 'drop' may be smaller on one rank, and its seeds would have a larger weight.
    options = {"uneven": uneven, "drop_last": uneven == "drop", "replication_factor": 0.1}
    loader = NeighborLoader(part, [-1, -1], "train", batch_size=8, shuffle=True, seed=3, **options)
    model = torch.nn.parallel.DistributedDataParallel(_model(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    steps = []
    for batch in loader:
        seeds = part.original_id(batch.n_id[: batch.batch_size]).tolist()
        steps.append((seeds, _step(model, optimizer, batch).tolist()))
    return steps


@pytest.mark.parametrize(("world", "uneven"), [*rare((2, "wrap")), (2, "drop"), (3, "wrap")])
def test_gradients_of_ranks_equal_one_rank_with_the_same_global_batch(tmp_path, world, uneven):
    """Sampling all neighbours is deterministic. So DDP's mean over ranks is the mean over the union of their seeds, at every step."""
    results = distributed.run(_train, world, _directory(tmp_path / "parts", world, dtype=torch.float64), uneven)
    data = random_data(dtype=torch.float64)
    model = _model(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    assert len(results[0]) > 3
    for index, ranks in enumerate(zip(*results, strict=True)):
        union = [seed for seeds, _ in ranks for seed in seeds]
        (batch,) = NeighborLoader(data, [-1, -1], union, batch_size=len(union))
        expected = _step(model, optimizer, batch)
        assert expected.abs().max() > 1e-3
        for _, gradients in ranks:
            torch.testing.assert_close(
                torch.tensor(gradients, dtype=torch.float64), expected, rtol=1e-9, atol=1e-12, msg=f"step {index}"
            )


# --- the example ------------------------------------------------------------------------------------------


def _run_example(rank: int, root: str) -> tuple[list[list[int]], float]:
    import train_exact

    return train_exact.train(root)


def test_the_example_with_join_visits_every_seed_once(tmp_path):
    data = random_data()
    assignment = torch.arange(data.num_nodes) % 3
    train = torch.cat([(assignment == part).nonzero().flatten()[:count] for part, count in enumerate([130, 40, 0])])
    part = salientpp.partition(data, 3, tmp_path / "parts", [10, 5], 32, method=assignment, split={"train": train})
    results = distributed.run(_run_example, 3, str(tmp_path / "parts"))
    assert [[len(seeds) for seeds in epochs] for epochs, _ in results] == [[130] * 2, [40] * 2, [0] * 2]
    for epoch in range(2):
        given = torch.tensor([seed for epochs, _ in results for seed in epochs[epoch]])
        assert sorted(part.original_id(given).tolist()) == train.sort().values.tolist()


def test_leaving_an_epoch_twice_does_not_wait():
    """The answering thread may hold the lock while the other ranks wait for this one, as in Join."""
    iterator = iter(NeighborLoader(random_data(), [2], [1, 2, 3], batch_size=2))
    list(iterator)
    with iterator.run.lock:
        thread = threading.Thread(target=iterator.close)
        thread.start()
        thread.join(distributed.HANG)
        assert not thread.is_alive()


# --- defaults ---------------------------------------------------------------------------------------------


def _each_by_default(rank: int, root: str, cases: list[dict]) -> list[tuple[str, list[int]]]:
    return [_by_default(rank, root, options) for options in cases]


def _by_default(rank: int, root: str, options: dict) -> tuple[str, list[int]]:
    part = salientpp.load(root)
    begin, _ = part.book.range_of(rank)
    loader = NeighborLoader(part, [3, 2], torch.arange(begin, begin + (30, 11)[rank]), batch_size=8, **options)
    return loader.uneven, [seed for batch in loader for seed in batch.n_id[: batch.batch_size].tolist()]


def test_seeds_are_repeated_only_if_they_are_shuffled_or_the_user_asks_for_it(tmp_path):
    cases = [({}, "exact"), ({"shuffle": False}, "exact"), ({"shuffle": True}, "wrap"), ({"uneven": "wrap"}, "wrap")]
    results = distributed.run(_each_by_default, 2, _directory(tmp_path / "parts", 2), [options for options, _ in cases])
    for (options, expected), found in zip(cases, zip(*results), strict=True):
        assert [uneven for uneven, _ in found] == [expected] * 2, options
        assert [len(set(seeds)) for _, seeds in found] == [30, 11], options
        assert [len(seeds) for _, seeds in found] == ([30, 11] if expected == "exact" else [30, 30]), options


@pytest.mark.parametrize("shuffle", [False, True])
def test_shares_of_a_data_are_repeated_only_if_they_are_shuffled(shuffle):
    data = random_data()
    loaders = [
        NeighborLoader(data, [3], torch.arange(11), batch_size=4, share=(i, 2), seed=0, shuffle=shuffle)
        for i in range(2)
    ]
    given = [sum(batch.batch_size for batch in loader) for loader in loaders]
    assert given == ([6, 6] if shuffle else [6, 5])
