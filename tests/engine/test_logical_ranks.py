"""Laws of logical ranks: an epoch's batches are the same on any number of ranks, and a run continues with the next round on any other number."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import distributed
import pytest
import torch
import torch.distributed as dist
from distributed import NEVER
from graphs import random_data
from one_process import TYPED_FANOUTS, typed_data
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.ranks.placement import Placement
from salientpp.sampling.schedule import Schedule, Turns, share_size

FANOUTS, BATCH = [4, 3], 8

#: Parts, logical ranks, and the numbers of ranks that may share them.
LAYOUTS = [(4, 4, (4, 3, 2, 1)), (8, 8, (3, 1)), (8, 4, (3, 1)), (2, 4, (4, 2, 1))]
LAYOUT = pytest.mark.parametrize(
    ("parts", "logical_ranks", "worlds"), LAYOUTS, ids=lambda value: str(value).replace(" ", "") if value else ""
)


def directory(root: Path, num_parts: int, seeds: list[int] | None = None) -> str:
    """Writes parts with 9 to 20 training seeds each, or with the given numbers of seeds."""
    data = random_data(300, 1500, edge_attributes=True)
    assignment = torch.arange(data.num_nodes) % num_parts
    counts = seeds or [9 + 11 * part % 12 for part in range(num_parts)]
    train = torch.cat([(assignment == part).nonzero().flatten()[:count] for part, count in enumerate(counts)])
    salientpp.partition(data, num_parts, root, FANOUTS, BATCH, method=assignment, split={"train": train})
    return str(root)


def rank_loader(root: str, **options) -> NeighborLoader:
    options = {"batch_size": BATCH, "shuffle": True, "seed": 7, "timeout": NEVER, **options}
    return NeighborLoader(salientpp.load(root), options.pop("num_neighbors", FANOUTS), "train", **options)


def digest(batch) -> tuple:
    """Returns the contents of a batch, with the rows of its vertices and edges."""
    return tuple(batch[name].tolist() for name in ("n_id", "edge_index", "e_id", "input_id", "y", "x", "edge_attr"))


def _each(check: Callable[[int, str, dict], None], rank: int, root: str, cases: list[dict]) -> None:
    """Checks each case, and names the one that fails."""
    for options in cases:
        try:
            check(rank, root, options)
        except AssertionError as error:
            raise AssertionError(f"with {options}: {error}") from error


def by_round(per_rank: list[list[list]], first: int = 0) -> list[list]:
    """Returns, for each round, the batches of all logical ranks in order. ``per_rank`` has the rounds of each rank, each a list."""
    assert len({len(rounds) for rounds in per_rank}) == 1, "every rank gets the same number of rounds"
    return [[batch for of_rank in rounds for batch in of_rank] for rounds in zip(*per_rank)][first:]


# --- ticks --------------------------------------------------------------------------------------------------


def _turns(
    parts: int, logical_ranks: int, world: int, seeds: list[int], uneven: str, joined: bool = False
) -> list[Turns]:
    ranks = [Placement(rank, world, parts, num_logical_ranks=logical_ranks) for rank in range(world)]
    one = ranks[0]
    sizes = [sum(seeds[part] for part in one.parts_of_unit(unit)) for unit in range(one.num_units)]
    counts = [
        share_size(size, place, one.logical_ranks_per_unit)
        for size in sizes
        for place in range(one.logical_ranks_per_unit)
    ]

    def schedule(logical_rank: int) -> Schedule:
        unit, place = one.unit_of(logical_rank), one.place_of(logical_rank)
        return Schedule(
            sizes[unit], unit, place, one.logical_ranks_per_unit, counts, logical_rank, 4, True, False, uneven, 1
        )

    by_rank = [rank.logical_ranks for rank in ranks]
    return [Turns([schedule(logical_rank) for logical_rank in rank.logical_ranks], by_rank, joined) for rank in ranks]


@pytest.mark.parametrize("uneven", ["wrap", "exact", "drop"])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_deliver_the_batches_of_a_round_in_its_last_ticks(uneven, joined, seed):
    rng = random.Random(seed)
    parts = rng.randint(1, 8)
    logical_ranks = rng.choice([parts, 2 * parts, rng.randint(1, parts)])
    seeds = [rng.randint(1, 30) for _ in range(parts)]
    whole = None
    for world in range(1, min(parts, logical_ranks) + 1):
        ranks = _turns(parts, logical_ranks, world, seeds, uneven, joined)
        given = [turns.of_epoch(3) for turns in ranks]
        assert len({(turns.num_ticks, turns.num_rounds) for turns in ranks}) == 1
        assert [len(of_rank) for of_rank in given] == [turns.num_batches for turns in ranks]
        assert max((turn.tick for of_rank in given for turn in of_rank), default=-1) + 1 == ranks[0].num_ticks
        for turns, of_rank in zip(ranks, given):
            ticks = [turn.tick for turn in of_rank]
            assert ticks == sorted(set(ticks))
            for index, turn in enumerate(of_rank):
                assert turns.round_after(index) == turn.round
                assert turns.batches_before(turn.round) == [t.round for t in of_rank].index(turn.round)
        for number in range(ranks[0].num_rounds):
            ends = {
                max(turn.tick for turn in of_rank if turn.round == number)
                for of_rank in given
                if any(turn.round == number for turn in of_rank)
            }
            assert len(ends) == 1, "all ranks finish a round in the same tick"
            following = [turn.tick for of_rank in given for turn in of_rank if turn.round > number]
            assert all(tick > max(ends) for tick in following)
        batches = {
            (turn.round, logical_rank): positions.tolist()
            for of_rank in given
            for turn in of_rank
            for logical_rank, positions in turn.pieces
        }
        whole = whole or batches
        assert batches == whole, "the batches of a logical rank do not depend on the number of ranks"
        if world == logical_ranks:
            assert [[turn.tick for turn in of_rank] for of_rank in given] == [
                list(range(len(of_rank))) for of_rank in given
            ]


# --- the same batches on any number of ranks ----------------------------------------------------------------


def _rounds(rank: int, root: str, options: dict, epochs: int = 2) -> list[list[list]]:
    loader, part = rank_loader(root, **options), salientpp.load(root)

    def checked(batch) -> tuple:
        assert torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))
        assert torch.equal(batch.y, part.original_id(batch.n_id[: batch.batch_size]) % 7)
        return digest(batch)

    return [[[checked(batch) for batch in batches] for batches in loader.rounds()] for _ in range(epochs)]


def _rounds_of_each(rank: int, root: str, cases: list[dict]) -> list[list[list[list]]]:
    return [_rounds(rank, root, options) for options in cases]


@LAYOUT
def test_batches_of_a_round_do_not_depend_on_the_number_of_ranks(tmp_path, parts, logical_ranks, worlds):
    root = directory(tmp_path / "parts", parts)
    modes, whole = ("wrap", "exact"), None
    for world, more in zip(worlds, itertools.cycle([{}, {"depth": 1}, {"num_workers": 1, "replication_factor": 0.2}])):
        cases = [{"logical_ranks": logical_ranks, "uneven": uneven, **more} for uneven in modes]
        found = {
            uneven: [by_round([epochs[epoch] for epochs in ranks]) for epoch in range(2)]
            for uneven, ranks in zip(modes, zip(*distributed.run(_rounds_of_each, world, root, cases)), strict=True)
        }
        whole = whole or found
        for uneven in modes:
            assert found[uneven] == whole[uneven], (world, uneven)
    for uneven in modes:
        assert len(whole[uneven][0]) > 1 and len(whole[uneven][0][0]) == logical_ranks


def _rounds_on_hosts(rank: int, root: str, cases: list[dict]) -> list[list[list[list]]]:
    found = _rounds_of_each(rank, root, cases)
    _each(_side_by_side, rank, root, cases)
    return found


def test_ranks_of_a_host_share_rows_without_changing_batches(tmp_path):
    root = directory(tmp_path / "parts", 6)
    cases = [{"logical_ranks": 6, "uneven": uneven} for uneven in ("wrap", "exact")]
    (alone,) = distributed.run(_rounds_of_each, 1, root, cases)
    # 4 ranks with 1 or 2 logical ranks each. The ranks of a host share a cache.
    hosts = {"ranks_per_host": 2, "replication_factor": 0.2}
    on_hosts = distributed.run(_rounds_on_hosts, 4, root, [{**options, **hosts} for options in cases])
    for options, ranks, want in zip(cases, zip(*on_hosts), alone, strict=True):
        assert [by_round([epochs[at] for epochs in ranks]) for at in range(2)] == want, options


def _plain(rank: int, root: str, options: dict) -> tuple[list, list, int]:
    loader = rank_loader(root, **options)
    given = [digest(batch) for batch in loader]
    loader.set_epoch(0)
    return given, [digest(batch) for batches in loader.rounds() for batch in batches], len(loader)


def test_an_epoch_has_the_batches_of_its_rounds_in_order(tmp_path):
    root = directory(tmp_path / "parts", 4)
    for given, rounds, length in distributed.run(_plain, 3, root, {"logical_ranks": 4}):
        assert given == rounds and len(given) == length
    # If ranks and logical ranks are equally many, logical ranks change nothing.
    assert distributed.run(_plain, 4, root, {"logical_ranks": 4}) == distributed.run(_plain, 4, root, {})


# --- stopping and continuing --------------------------------------------------------------------------------


def _stop(rank: int, root: str, options: dict, epoch: int, stop: int) -> tuple[dict, list[list]]:
    """Returns the state after ``stop`` complete rounds, and these rounds."""
    loader = rank_loader(root, **options)
    loader.set_epoch(epoch)
    given = []
    rounds = iter(loader.rounds())
    for _ in range(stop):
        given.append([digest(batch) for batch in next(rounds)])
    return loader.state_dict(), given


def _go_on(rank: int, root: str, cases: list[tuple[dict, dict]], epochs: int) -> list[list[list[list]]]:
    """Continues from each state, with a loader of its own. A case has the loader's options and a state."""
    found = []
    for options, state in cases:
        loader = rank_loader(root, **options)
        loader.load_state_dict(state)
        found.append([])
        for epoch in range(state["epoch"], epochs):
            loader.set_epoch(epoch)
            found[-1].append([[digest(batch) for batch in batches] for batches in loader.rounds()])
    return found


@pytest.mark.parametrize(
    ("parts", "logical_ranks", "worlds", "uneven"), [(4, 4, (4, 3, 2, 1), "wrap"), (8, 4, (3, 1), "exact")]
)
def test_a_run_continues_with_the_next_round_on_any_number_of_ranks(tmp_path, parts, logical_ranks, worlds, uneven):
    root = directory(tmp_path / "parts", parts)
    rng = random.Random(f"{parts}{logical_ranks}{uneven}")
    options = {"logical_ranks": logical_ranks, "uneven": uneven}
    whole = [by_round([[*epoch] for epoch in epochs]) for epochs in zip(*distributed.run(_rounds, 1, root, options))]
    saved: dict[int, list[dict]] = {}
    for before in worlds:
        stop = rng.randint(1, len(whole[0]) - 1)
        stopped = distributed.run(_stop, before, root, options, 0, stop)
        assert by_round([given for _, given in stopped]) == whole[0][:stop]
        saved[before] = [state for state, _ in stopped]
        for state in saved[before]:
            assert (state["round"], state["ranks"], state["logical_ranks"]) == (stop, before, logical_ranks)
    for after in worlds:
        # Without logical_ranks=, a loader takes the state's number if all ranks keep their parts.
        few = {"uneven": uneven}
        cases = [
            (rng.choice([options, few]) if parts == logical_ranks else options, rng.choice(states))
            for states in saved.values()
        ]
        again = zip(*distributed.run(_go_on, after, root, cases, 2))
        for (more, state), ranks in zip(cases, again, strict=True):
            found = [by_round([epochs[at] for epochs in ranks]) for at in range(2)]
            assert found == [whole[0][state["round"] :], whole[1]], (state["ranks"], after, more)


def _own(rank: int, root: str, cases: list[tuple[dict, list[int]]]) -> list[tuple[dict, list]]:
    """Stops in the middle of a round, for each case: options, and how many batches each rank takes. Returns the states and the remaining batches."""
    found = []
    for options, stops in cases:
        loader = rank_loader(root, **options)
        whole = [digest(batch) for batch in loader]
        loader.set_epoch(0)
        for _ in itertools.islice(loader, stops[rank]):
            pass
        found.append((loader.state_dict(), whole[stops[rank] :]))
    return found


def _own_rest(rank: int, root: str, cases: list[tuple[dict, list[int]]], stopped: list[list]) -> list[list]:
    """Returns the batches after the states of this rank."""
    found = []
    for (options, _), (state, _) in zip(cases, stopped[rank], strict=True):
        loader = rank_loader(root, **options)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        found.append([digest(batch) for batch in loader])
    return found


def test_the_same_number_of_ranks_continues_in_the_middle_of_a_round(tmp_path):
    root = directory(tmp_path / "parts", 8)
    rng = random.Random(8)
    cases = [
        ({"logical_ranks": 8, "uneven": uneven}, [rng.randint(0, 6) for _ in range(3)])
        for uneven in ("wrap", "exact")
        for _ in range(3)
    ]
    stopped = distributed.run(_own, 3, root, cases)
    for rank, found in enumerate(distributed.run(_own_rest, 3, root, cases, stopped)):
        for case, rest, (_, expected) in zip(cases, found, stopped[rank], strict=True):
            assert rest == expected, (rank, case)


def _one_state(rank: int, root: str, options: dict, stops: list[tuple[int, int]]) -> list[tuple[int, list, list, list]]:
    """Loads the state of one rank, saved after some batches, on all ranks, for each pair of both. Returns the round of the state and what follows."""
    loader = rank_loader(root, **options)
    given = []
    epochs = [[[digest(batch) for batch in batches] for batches in loader.rounds()] for _ in range(2)]
    for saving, stop in stops:
        loader.set_epoch(0)
        for _ in itertools.islice(loader, stop):
            pass
        state = [loader.state_dict()]
        dist.broadcast_object_list(state, saving)
        loader.load_state_dict(state[0])
        batches = [digest(batch) for batch in loader]
        loader.load_state_dict(state[0])
        rounds = [[digest(batch) for batch in batches] for batches in loader.rounds()]
        given.append((state[0]["round"], batches, rounds, epochs[state[0]["epoch"]]))
    return given


def _one_state_of_each(rank: int, cases: list[tuple[str, dict]], stops: list[tuple[int, int]]) -> list[list]:
    return [_one_state(rank, root, options, stops) for root, options in cases]


def test_all_ranks_continue_with_the_round_of_one_ranks_state(tmp_path):
    """Also the rank that saved the state, although it had given a part of this round: otherwise the ranks would take different numbers of steps."""
    modes = [("wrap", [17, 29]), ("drop", [17, 29]), ("exact", [17, 40]), ("exact", [33, 0])]
    roots = [directory(tmp_path / str(at), 2, seeds) for at, (_, seeds) in enumerate(modes)]
    cases = [
        (root, {"logical_ranks": {"number": 4, "join": joined}, "uneven": uneven})
        for root, (uneven, _) in zip(roots, modes)
        for joined in (False, True)
    ]
    stops = [(rank, stop) for rank in range(2) for stop in range(4)]
    for of_rank in distributed.run(_one_state_of_each, 2, cases, stops):
        for case, of_case in zip(cases, of_rank, strict=True):
            for (saving, stop), (number, batches, rounds, whole) in zip(stops, of_case, strict=True):
                assert rounds == whole[number:], (case, saving, stop)
                expected = [batch for of_round in whole[number:] for batch in of_round]
                assert batches == expected, (case, saving, stop)


def _mistaken(rank: int, root: str, options: dict, states: list[dict]) -> list[str]:
    """Returns the errors of loading the states, each of which leaves the loader as it was."""
    loader, texts = rank_loader(root, **options), []
    before = loader.state_dict()
    for state in states:
        with pytest.raises(ValueError, match="cannot load this state") as caught:
            loader.load_state_dict(state)
        assert loader.state_dict() == before
        texts.append(str(caught.value))
    return texts


def test_a_state_with_other_logical_ranks_is_refused(tmp_path):
    root = directory(tmp_path / "parts", 8)
    ((state, _),) = distributed.run(_stop, 1, root, {"logical_ranks": 4}, 0, 1)
    for (text,) in distributed.run(_mistaken, 3, root, {}, [state]):
        assert (
            "with its 4 logical ranks, these 3 ranks would serve other parts than this loader's; make the loader with logical_ranks=4"
            in text
        )
    for (text,) in distributed.run(_mistaken, 2, root, {"logical_ranks": 8}, [state]):
        assert "logical_ranks: expected 8, got 4" in text
    changes: list[tuple[dict, str]] = [
        ({"round": 99}, "round must be in [0, 5], got 99"),
        ({"logical_ranks": 5}, "with its 5 logical ranks, these 2 ranks would serve other parts"),
        ({"logical_ranks": 1, "ranks": 1}, "it has 1 logical ranks; logical_ranks=1 is less than the 2 ranks"),
        ({"logical_ranks": 0}, "ranks must be in [1, 1), got 1; the state was altered or is damaged"),
        (
            {"logical_ranks": 2**31},
            "logical ranks must be at most 16,384, or equal to the number of ranks, got 2,147,483,648",
        ),
        ({"logical_ranks": 2**200}, "logical ranks must be at most 16,384, or equal to the number of ranks"),
        (
            {"logical_ranks": 10**6, "ranks": 2},
            "logical ranks must be at most 16,384, or equal to the number of ranks, got 1,000,000",
        ),
        ({"ranks": 0}, "ranks must be in [1, 5), got 0"),
        ({"ranks": 2**31}, "ranks must be in [1, 5), got 2147483648"),
        ({"rank": -1}, "rank must be in [0, 1), got -1"),
        ({"rank": 2**63}, "rank must be in [0, 1), got 9223372036854775808"),
        ({"round": -1}, "round must be in [0, 5], got -1"),
        ({"batches": -1}, "batches must be in [0, "),
        ({"epoch": 2**63}, "epoch must be in [0, "),
    ]
    for texts in distributed.run(_mistaken, 2, root, {}, [{**state, **change} for change, _ in changes]):
        for (_, words), text in zip(changes, texts, strict=True):
            assert words in text


def _arguments(rank: int, root: str, cases: list[dict]) -> list[str]:
    texts = []
    for case in cases:
        with pytest.raises(ValueError) as caught:
            rank_loader(root, **case)
        texts.append(str(caught.value))
    return texts


def test_invalid_logical_ranks_are_refused(tmp_path):
    root = directory(tmp_path / "parts", 4)
    cases = [
        {"logical_ranks": 0},
        {"logical_ranks": 1},
        {"logical_ranks": 6},
        {"logical_ranks": 2.5},
        {"logical_ranks": {"join": 1}},
        {"logical_ranks": 2**40},
    ]
    words = [
        "logical_ranks must be an integer >= 1 (number of logical ranks) or None, got 0",
        "logical_ranks=1 is less than the 2 ranks",
        "logical_ranks=6 does not fit 4 parts",
        "logical_ranks must be an integer >= 1",
        "logical_ranks['join'] must be True or False, got 1",
        "logical ranks must be at most 16,384, or equal to the number of ranks, got 1,099,511,627,776",
    ]
    for texts in distributed.run(_arguments, 2, root, cases):
        assert all(word in text for word, text in zip(words, texts, strict=True)), texts
    data = random_data()
    for options in ({"logical_ranks": 2}, {"logical_ranks": {"join": True}}):
        with pytest.raises(
            ValueError, match="applies only to a partitioned graph, whose ranks share an epoch's batches"
        ):
            NeighborLoader(data, [2], **options)


def _differ(rank: int, root: str) -> str:
    with pytest.raises(ValueError) as caught:
        rank_loader(root, logical_ranks=4 if rank else 8)
    return str(caught.value)


def test_all_ranks_raise_if_their_logical_ranks_differ(tmp_path):
    for text in distributed.run(_differ, 2, directory(tmp_path / "parts", 4)):
        assert "all ranks must have the same logical_ranks, got 8 on rank 0 and 4 on rank 1" in text


def _leave(rank: int, root: str, plan: list[list[int]]) -> list[list]:
    """Leaves rounds early, after a different number on each rank and in each epoch."""
    loader = rank_loader(root, logical_ranks=8, uneven="exact")
    found = []
    for stops in plan:
        rounds = iter(loader.rounds())
        found.append([[digest(batch) for batch in batches] for batches in itertools.islice(rounds, stops[rank])])
        rounds.close()
        assert list(rounds) == []
    return found


def test_each_rank_can_leave_rounds_at_a_different_point(tmp_path):
    root = directory(tmp_path / "parts", 8)
    rng = random.Random(2)
    plan = [[rng.randint(0, 4) for _ in range(3)] for _ in range(6)]
    whole = distributed.run(_rounds, 3, root, {"logical_ranks": 8, "uneven": "exact"}, 6)
    for rank, found in enumerate(distributed.run(_leave, 3, root, plan)):
        assert found == [epoch[: stops[rank]] for epoch, stops in zip(whole[rank], plan)]


# --- training -----------------------------------------------------------------------------------------------


def _model() -> GraphSAGE:
    torch.manual_seed(0)
    return GraphSAGE(3, 8, 2, 7).double()


def _train_each(rank: int, root: str, cases: list[dict]) -> list[list[list[float]]]:
    return [_train(rank, root, options) for options in cases]


def _train(rank: int, root: str, options: dict) -> list[list[float]]:
    """Returns the gradients of every round, and finally the parameters. A gradient is the sum over the batches of all logical ranks, on any rank."""
    loader, model = rank_loader(root, dtype=torch.float64, uneven="exact", **{"logical_ranks": 4, **options}), _model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    found = []
    for batches in loader.rounds():
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for batch in batches:
            out = model(batch.x / 300, batch.edge_index)[: batch.batch_size]
            torch.nn.functional.cross_entropy(out, batch.y, reduction="sum").backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).tolist())
        optimizer.step()
    return [*found, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()]


def test_any_number_of_ranks_takes_the_same_optimizer_steps(tmp_path):
    root = directory(tmp_path / "parts", 4)
    expected = torch.tensor(distributed.run(_train, 4, root, {})[0], dtype=torch.float64)
    cases = [{"logical_ranks": {"number": 4, "join": joined}} for joined in (False, True)]
    for world in (3, 1):
        for of_rank in distributed.run(_train_each, world, root, cases):
            for found in of_rank:
                torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=1e-10)


# --- joined -------------------------------------------------------------------------------------------------


def _side_by_side(rank: int, root: str, options: dict) -> None:
    """Compares a joined batch with the batches of its logical ranks."""
    number = options.get("logical_ranks", 4)
    apart, joined = (
        rank_loader(root, **{**options, "logical_ranks": {"number": number, "join": join}}) for join in (False, True)
    )
    part = salientpp.load(root)
    model = _model().eval()
    rounds, number = iter(apart.rounds()), 0
    for batch, batches in zip(joined, rounds):
        number += 1
        assert torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))
        assert batch.batch_size == sum(one.batch_size for one in batches)
        sizes = [one.batch_size for one in batches]
        seeds = batch.n_id[: batch.batch_size].split(sizes)
        assert [ids.tolist() for ids in seeds] == [one.n_id[: one.batch_size].tolist() for one in batches]
        for name in ("input_id", "y"):
            assert batch[name].tolist() == torch.cat([one[name] for one in batches]).tolist()
        if "num_sampled_nodes" in batches[0]:
            for name in ("num_sampled_nodes", "num_sampled_edges"):
                assert batch[name] == [sum(hop) for hop in zip(*(one[name] for one in batches))]
        assert batch.num_nodes == sum(one.num_nodes for one in batches)

        def edges(one):
            """Returns edges with the ids of the whole graph, and their attributes."""
            ends = one.n_id[one.edge_index].T.tolist()
            return sorted(zip(map(tuple, ends), one.e_id.tolist(), one.edge_attr.tolist()))

        assert edges(batch) == sorted(edge for one in batches for edge in edges(one))
        if "batch" in batch:
            trees = torch.cat([one.batch + sum(sizes[:at]) for at, one in enumerate(batches)])
            assert batch.batch.bincount().tolist() == trees.bincount().tolist()
            assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])
        out = model(batch.x.double() / 300, batch.edge_index)[: batch.batch_size]
        single = [model(one.x.double() / 300, one.edge_index)[: one.batch_size] for one in batches]
        torch.testing.assert_close(out, torch.cat(single), rtol=0, atol=1e-12)
    assert number == len(joined) and not any(rounds), "the rounds after this rank's last batch are empty"
    assert joined.stats().rows_remote <= apart.stats().rows_remote


def _each_of_one_type(rank: int, root: str, cases: list[dict]) -> None:
    _each(_side_by_side, rank, root, cases)


@pytest.mark.parametrize("world", [2, 3])
def test_a_joined_batch_is_the_disjoint_union_of_its_logical_ranks_batches(tmp_path, world):
    cases = [
        {},
        {"disjoint": True, "depth": 2, "uneven": "drop"},
        {"subgraph_type": "bidirectional"},
        {"subgraph_type": "induced", "num_workers": 1},
        {"replication_factor": 0.3, "drop_last": True},
        {"replace": True, "num_neighbors": [3, 2, 2]},
    ]
    distributed.run(_each_of_one_type, world, directory(tmp_path / "parts", 4), cases)


def _fetched(rank: int, root: str) -> tuple[int, int]:
    loader = rank_loader(root, logical_ranks={"number": 4, "join": True})
    begin, end = salientpp.load(root).book.range_of(rank)
    distinct = 0
    for batch in loader:
        ids = batch.n_id.unique()
        distinct += int(((ids < begin) | (ids >= end)).sum())
    return distinct, loader.stats().rows_remote


def test_a_joined_batch_fetches_a_row_once(tmp_path):
    for distinct, fetched in distributed.run(_fetched, 2, directory(tmp_path / "parts", 4)):
        assert distinct == fetched > 0


def _typed(rank: int, root: str, options: dict) -> None:
    options = {"batch_size": BATCH, "shuffle": True, "seed": 7, "timeout": NEVER, **options}
    apart, joined = (
        NeighborLoader(
            salientpp.load(root),
            TYPED_FANOUTS,
            ("paper", "train"),
            logical_ranks={"number": 4, "join": join},
            **options,
        )
        for join in (False, True)
    )
    number = 0
    for batch, batches in zip(joined, apart.rounds()):
        number += 1
        for type_ in batch.node_types:
            ids = [one[type_].n_id for one in batches if type_ in one.node_types]
            assert sorted(batch[type_].n_id.tolist()) == sorted(torch.cat(ids).tolist())
            if "x" in batch[type_]:
                rows = [one[type_].x for one in batches if type_ in one.node_types]
                assert sorted(batch[type_].x.tolist()) == sorted(torch.cat(rows).tolist())
            if batches[0][type_].get("num_sampled_nodes") is not None:
                numbers = [one[type_].num_sampled_nodes for one in batches]
                assert batch[type_].num_sampled_nodes == [sum(hop) for hop in zip(*numbers)]
        assert batch["paper"].batch_size == sum(one["paper"].batch_size for one in batches)
        seeds = torch.cat([one["paper"].n_id[: one["paper"].batch_size] for one in batches])
        assert torch.equal(batch["paper"].n_id[: batch["paper"].batch_size], seeds)
        for name in batch.edge_types:
            source, _, target = name

            def edges(one):
                row, col = one[name].edge_index
                return sorted(zip(one[source].n_id[row].tolist(), one[target].n_id[col].tolist()))

            assert edges(batch) == sorted(edge for one in batches for edge in edges(one))
    assert number == len(joined) > 0


def _each_of_several_types(rank: int, root: str, cases: list[dict]) -> None:
    _each(_typed, rank, root, cases)


def test_a_joined_typed_batch_is_the_disjoint_union_of_its_batches(tmp_path):
    cases = [{}, {"disjoint": True, "replication_factor": 0.2}, {"subgraph_type": "induced"}]
    salientpp.partition(
        typed_data(), 4, tmp_path / "typed", TYPED_FANOUTS, BATCH, seeds=("paper", "train"), replicate=("venue",)
    )
    for world in (1, 3):
        distributed.run(_each_of_several_types, world, str(tmp_path / "typed"), cases)


# --- links --------------------------------------------------------------------------------------------------


def _links(rank: int, root: str, cases: list[dict]) -> list[list]:
    """Returns the edges of each logical rank in each round. Also checks that a joined batch has the edges of its logical ranks."""
    part = salientpp.load(root)
    found = []
    for case in cases:
        options = {"batch_size": 6 * BATCH, "shuffle": True, "seed": 7, "timeout": NEVER, **case}
        apart, joined = (
            LinkNeighborLoader(part, FANOUTS, logical_ranks={"number": 4, "join": join}, **options)
            for join in (False, True)
        )
        rounds = []
        for batch, batches in zip(joined, apart.rounds()):
            assert torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))
            names = [
                name
                for name in ("edge_label_index", "src_index", "dst_pos_index", "dst_neg_index")
                if name in batches[0]
            ]
            for name in names:
                ids = torch.cat([one.n_id[one[name]] for one in batches], dim=int(name == "edge_label_index"))
                assert torch.equal(batch.n_id[batch[name]], ids)
            for name in ("edge_label", "input_id"):
                if name in batches[0]:
                    assert torch.equal(batch[name], torch.cat([one[name] for one in batches]))
            if "batch" in batch and "edge_label_index" in names:
                trees = batch.batch[batch.edge_label_index]
                assert torch.equal(trees[0], trees[1])
            assert batch.num_edges == sum(one.num_edges for one in batches)
            rounds.append([(one.input_id.tolist(), one.n_id.tolist(), one.edge_index.tolist()) for one in batches])
        assert len(rounds) == len(joined) > 0
        found.append(rounds)
    return found


def test_edge_seeds_belong_to_logical_ranks(tmp_path):
    root = directory(tmp_path / "parts", 4)
    cases = [
        {},
        {"neg_sampling": "binary"},
        {"neg_sampling": {"mode": "triplet", "amount": 2}},
        {"neg_sampling": "binary", "disjoint": True},
        {"neg_sampling": "triplet", "subgraph_type": "induced"},
    ]
    whole = distributed.run(_links, 1, root, cases)
    ranks = distributed.run(_links, 3, root, cases)
    for at in range(len(cases)):
        assert by_round([of_rank[at] for of_rank in ranks]) == whole[0][at]


def _own_pairs(rank: int, root: str) -> str:
    with pytest.raises(ValueError) as caught:
        LinkNeighborLoader(salientpp.load(root), FANOUTS, torch.tensor([[1, 2], [3, 4]]), logical_ranks=4)
    return str(caught.value)


def test_the_users_own_pairs_need_one_rank_for_each_logical_rank(tmp_path):
    for text in distributed.run(_own_pairs, 2, directory(tmp_path / "parts", 4)):
        assert "your own seeds do not say which group they belong to; name a split, or start as many ranks" in text
