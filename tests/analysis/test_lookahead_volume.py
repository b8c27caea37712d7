"""Laws of counting with lookahead: counts equal what the planner does with the loaders' batches."""

from __future__ import annotations

import json
import re

import pytest
import torch
from graphs import random_data
from one_process import typed_data
from rare import rare

import salientpp
from salientpp import ops
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.cli import main
from salientpp.sampling.schedule import batch_keys, order_key
from salientpp.vip.policies import plan_cache
from salientpp.ways.lookahead.forecast import Blocks, ListSizes
from salientpp.ways.lookahead.planner import Planner
from salientpp.ways.lookahead.shape import plan_rows

FANOUTS, BATCH = [4, 3], 8
ALPHAS = [0.0, 0.3, 0.8, 4.0]


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    root = tmp_path_factory.mktemp("ahead") / "parts"
    data = random_data(600, 3600)
    data.x = torch.rand(600, 64)
    salientpp.partition(data, 2, root, FANOUTS, BATCH)
    return salientpp.load(root)


def _needs(part, rank: int, epochs: int, block: int, shared: bool) -> list[torch.Tensor]:
    """Returns the distinct remote ids of every batch of a rank."""
    seeds = [part.split("train", other) for other in range(part.num_parts)]
    most, own = max(map(torch.numel, seeds)), seeds[rank]
    begin, end = part.book.range_of(rank)
    found = []
    for epoch in range(epochs):
        order = ops.permutation(own.numel(), order_key(3, epoch, rank))
        order = order[torch.arange(most) % own.numel()] if own.numel() < most else order
        for index, positions in enumerate(order.split(BATCH)):
            key = batch_keys(3, epoch, rank, index, block).draws
            graph = part.graph
            n_id = ops.sample_neighbors(graph.indptr, graph.indices, None, own[positions], FANOUTS, key, shared=shared)[
                0
            ]
            found.append(n_id[(n_id < begin) | (n_id >= end)].unique())
    return found


@pytest.mark.parametrize(
    ("lookahead", "shared", "block"),
    [
        *((1, None, 1), (5, "batch", 4), (17, None, 1), ("auto", None, 1), ("auto", "batch", 4)),
        *rare((1, "batch", 4), (5, None, 1), (17, "batch", 4)),
    ],
)
def test_counts_equal_the_rows_that_the_planner_leaves(part, lookahead, shared, block):
    batches = Batches(epochs=2, seed=3, shared_draws=shared, draw_block=block)
    # The choice of a window for blocks takes seconds.
    alphas = [0.0, 0.3, 4.0] if (lookahead, shared) == ("auto", "batch") else ALPHAS
    analysis = analyze(part, batches, Ways(["vip"], alphas, lookahead=lookahead))
    static = {volume.replication_factor: volume for volume in analysis.of(way="cache")}
    for rank in range(2):
        needs = _needs(part, rank, 12, block, shared is not None)
        per_epoch = len(needs) // 12
        lists = [ops.code_ids(ids, 600) for ids in needs]
        workload = part.workload(rank, part.split("train", rank), FANOUTS, BATCH, False)
        agreeing = Blocks.of(workload, block, per_epoch, shared is not None)
        for found in analysis.of(way="lookahead"):
            alpha = found.replication_factor
            members = plan_cache(part.vip(rank), part.book, rank, alpha)
            trial = ListSizes.of(lists[: per_epoch : -(-per_epoch // 8)], 600)
            plan = plan_rows(
                lookahead, part.vip(rank), part.book, rank, members.numel(), 256, lambda trial=trial: trial, lambda own=agreeing: own
            )  # fmt: skip
            if plan is None:
                rows = sum(int((~torch.isin(ids, members)).sum()) for ids in needs[: 2 * per_epoch])
                assert found.ahead.windows[rank] == 0 and found.ahead.slots[rank] == members.numel()
            else:
                planner, rows = Planner(plan[0], part.vip(rank), plan[1]), 0
                for ids in needs[: 2 * per_epoch]:
                    rows += planner.plan(ids, lambda own=planner: lists[own.known]).fetched_place.numel()
                assert (found.ahead.windows[rank], found.ahead.slots[rank]) == (plan[0].window, plan[0].num_slots)
            assert found.remote_rows_per_rank[rank] == rows / 2
    for found in analysis.of(way="lookahead"):
        assert found.ahead.refused is None
        assert found.remote_rows_per_epoch == sum(found.remote_rows_per_rank)
        if found.replication_factor in (0.0, 4.0):  # lookahead cannot save anything
            assert found.remote_rows_per_epoch == static[found.replication_factor].remote_rows_per_epoch
            assert found.ahead.windows == (0, 0)
        elif lookahead == "auto" and found.replication_factor == 0.3:
            assert found.remote_rows_per_epoch < static[found.replication_factor].remote_rows_per_epoch


def test_a_wrong_window_is_refused(part):
    with pytest.raises(ValueError, match="lookahead must be an integer in"):
        analyze(part, Batches(epochs=1), Ways(lookahead=-1))


def test_shared_draws_are_counted_as_they_are_drawn(part):
    analysis = analyze(
        part,
        Batches(epochs=2, seed=3, shared_draws="batch", draw_block=4),
        Ways(replication_factors=[0.3], policies=["vip"]),
    )
    (volume,) = analysis.of(way="cache")
    for rank in range(2):
        members = plan_cache(part.vip(rank), part.book, rank, 0.3)
        needs = _needs(part, rank, 2, 4, True)
        assert volume.remote_rows_per_rank[rank] == sum(int((~torch.isin(ids, members)).sum()) for ids in needs) / 2


def test_without_a_count_the_result_is_a_forecast(part):
    few = Batches(epochs=1)
    for analysis in (
        analyze(part, few, Ways(["vip"], ALPHAS)),
        analyze(part, few, Ways(["vip"], ALPHAS, lookahead=4), predict_only=True),
    ):
        for found in analysis.of(way="lookahead"):
            assert found.remote_rows_per_epoch is None and found.ahead.best_share <= found.ahead.predicted_share + 0.02
    counted = analyze(part, Batches(epochs=6), Ways(["vip"], ALPHAS, lookahead=4))
    rows = {volume.replication_factor: volume.remote_rows_per_epoch for volume in counted.of(way="cache")}
    found = counted.of(way="lookahead")[1]
    assert found.ahead.predicted_share == pytest.approx(found.remote_rows_per_epoch / rows[0.3], abs=0.06)
    assert counted.to_dict()["results"][-1]["ahead"]["reach"] is None  # everything fits; JSON has no infinity


def test_a_window_that_uses_up_the_memory_is_reported_and_not_counted(part):
    small, large = analyze(
        part, Batches(epochs=1), Ways(replication_factors=[0.02, 0.8], policies=["vip"], lookahead=40)
    ).of(way="lookahead")
    assert "lookahead=40 needs" in small.ahead.refused and small.ahead.windows == (0, 0)
    assert large.ahead.refused is None and large.ahead.windows == (40, 40)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shared_draws": "all"}, "shared_draws must be 'batch' or None, got 'all'"),
        ({"draw_block": 0}, "draw_block must be an integer >= 1"),
    ],
)
def test_wrong_draws_are_refused(part, options, text):
    with pytest.raises(ValueError, match=text):
        analyze(part, Batches(epochs=1, **options))


def test_for_blocks_of_batches_the_forecast_is_a_share_of_the_count(part):
    """The probabilities do not give the rows of a static cache for such batches."""
    batches = Batches(epochs=2, seed=3, shared_draws="batch", draw_block=4)
    analysis = analyze(part, batches, Ways(["vip"], [0.3, 0.8], lookahead=4))
    for volume, found in zip(analysis.of(way="cache"), analysis.of(way="lookahead")):
        # The ratio of forecast rows to counted rows equals the ratio of the shares.
        counted_share = found.remote_rows_per_epoch / volume.remote_rows_per_epoch
        assert 0.6 < found.ahead.predicted_share / counted_share < 1.6
        assert found.ahead.best_share <= found.ahead.predicted_share + 0.02


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_counts_with_lookahead(part, tmp_path, capsys):
    given = [
        "--policies",
        "vip",
        "--epochs",
        "1",
        "--replication-factors",
        "0.3,0.8",
        "--json",
        str(tmp_path / "a.json"),
    ]
    draws = ["--lookahead", "4", "--shared-draws", "batch", "--draw-block", "4"]
    assert main(["analyze", str(part.root), *given, *draws]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    expected = analyze(
        part,
        Batches(epochs=1, shared_draws="batch", draw_block=4),
        Ways(replication_factors=[0.3, 0.8], policies=["vip"], lookahead=4),
    )
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["results"] == json.loads(json.dumps(expected.to_dict()["results"]))
    assert {**written["draws"], "shared_draws": "batch", "draw_block": 4, "lookahead": 4} == written["draws"]
    rows = [ahead.remote_rows_per_epoch for ahead in expected.of(way="lookahead")]
    share = rows[0] / expected.results[0].remote_rows_per_epoch
    assert f"counted {share:.3f}" in shown and "worth knowing, T*" in shown


def test_details_have_a_forecast_of_lookahead(part, capsys):
    few = ["--policies", "vip", "--replication-factors", "0.3", "--details"]
    assert main(["analyze", str(part.root), "--predict-only", *few]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "expected to be fetched by machines that know their next batches (lookahead=auto)" in shown
    assert "counted" not in shown and "lookahead='auto' is expected to fetch" in shown


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--lookahead", "-1"], "lookahead must be an integer in"),
        (["--shared-draws", "all"], "shared_draws must be 'batch' or None, got 'all'"),
        (["--draw-block", "0"], "draw_block must be an integer >= 1"),
        (["--lookahead", "4", "--disjoint"], "--lookahead cannot be combined with --disjoint: .*leave one of them out"),
        (["--draw-block", "4", "--ranks-per-host", "2"], "--draw-block cannot be combined with --ranks-per-host: .*leave one of them out"),
    ],
)  # fmt: skip
def test_the_command_refuses_impossible_counts(part, capsys, given, text):
    assert main(["analyze", str(part.root), "--epochs", "1", *given]) == 2
    error = capsys.readouterr().err
    assert re.search(text, error) and error.count("\n") == 1


@pytest.mark.parametrize("given", [["--lookahead", "4"], ["--shared-draws", "batch"], ["--draw-block", "4"]])
def test_the_command_says_what_to_do_with_several_types(tmp_path, capsys, given):
    fanouts = {type_: [2, 2] for type_ in typed_data().edge_types}
    salientpp.partition(typed_data(), 2, tmp_path / "typed", fanouts, 8, seeds=("paper", "train"))
    assert main(["analyze", str(tmp_path / "typed"), "--epochs", "1", *given]) == 2
    error = capsys.readouterr().err
    assert re.search(
        f"{given[0]} needs a graph with one vertex type, .* has several; leave it out. .*loader.stats", error
    )


def test_the_command_asks_for_a_number_of_batches_or_auto(part, capsys):
    with pytest.raises(SystemExit):
        main(["analyze", str(part.root), "--lookahead", "all"])
    assert "expected a number of batches or auto, got 'all'" in capsys.readouterr().err
