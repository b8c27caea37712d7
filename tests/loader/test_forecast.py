"""Laws of forecasts: mean and deviation near those of many batches, shares of larger batches near the counts, and exact cases."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from graphs import random_data, real_data
from padded import typed
from scipy import stats
from torch_geometric.data import Data

import salientpp
from salientpp import NeighborLoader
from salientpp.loader import forecast as module
from salientpp.loader.batch_sizes import EDGES, sizes_of, types_of
from salientpp.loader.forecast import Forecast, forecast_sizes
from salientpp.sampling.schedule import Turn

GRAPH = random_data(3000, 15_000, seed=1)


def forecast_of(loader: NeighborLoader, shuffled: bool = True) -> dict:
    basis = loader.engine.basis
    return forecast_sizes(basis, basis.epochs.order, types_of(loader.data), shuffled)


def counted(loader: NeighborLoader, number: int) -> dict:
    """Counts the sizes of batches of the loader's epochs, without the last of each epoch: float64 [number] by type."""
    basis, sizes = loader.engine.basis, []
    for epoch in count():
        for turn in basis.epochs.order.of_epoch(epoch)[:-1]:
            sizes.append(sizes_of(basis.source.drawing.draw(basis.epochs.pieces(epoch, turn))))
        if len(sizes) >= number:
            break
    return {
        type_: torch.tensor([each.get(type_, 0) for each in sizes], dtype=torch.float64)
        for type_ in types_of(loader.data)
    }


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("fanouts, batch_size", [([8], 40), ([5, 5], 40), ([4, 3, 2], 100)])
def test_mean_and_deviation_are_near_those_of_many_batches(fanouts, batch_size, shuffle):
    loader = NeighborLoader(GRAPH, fanouts, GRAPH.train_mask, batch_size=batch_size, shuffle=shuffle, seed=5)
    seen = counted(loader, 1500)
    for type_, found in forecast_of(loader, shuffle).items():
        deviation = float(seen[type_].std())
        assert found.mean == pytest.approx(float(seen[type_].mean()), abs=0.2 * deviation)
        assert found.deviation == pytest.approx(deviation, rel=0.15)


def test_every_type_of_a_typed_graph_is_forecast():
    data = typed()
    loader = NeighborLoader(data, [4, 3], "paper", batch_size=20, shuffle=True, seed=1)
    seen, found = counted(loader, 1000), forecast_of(loader)
    assert set(found) == {*data.node_types, *data.edge_types}
    for type_, sizes in seen.items():
        deviation = float(sizes.std())
        assert found[type_].mean == pytest.approx(float(sizes.mean()), abs=0.2 * deviation + 1e-9)
        assert found[type_].deviation == pytest.approx(deviation, rel=0.15, abs=1e-9)


@pytest.mark.parametrize("sigmas", [2.0, 3.0])
def test_shares_of_larger_batches_are_within_a_factor_of_two_of_the_counts(sigmas):
    data = real_data("facebook_pages")
    loader = NeighborLoader(data, [10, 5], data.train_mask, batch_size=64, shuffle=True, seed=0)
    seen, number = counted(loader, 6000), 6000
    for type_, found in forecast_of(loader).items():
        expected = stats.pearson3.sf(sigmas, found.skewness) * number
        larger = int((seen[type_][:number] > found.above(sigmas)).sum())
        # Two standard deviations of the count's own noise are allowed besides the factor.
        assert 0.5 * expected - 2 * expected**0.5 <= larger <= 2.0 * expected + 2 * expected**0.5
        assert not (seen[type_] > found.above(6.0)).any()


def test_edges_of_one_hop_depend_only_on_the_seeds_so_the_trial_adds_no_error():
    degree = torch.bincount(GRAPH.edge_index[1], minlength=GRAPH.num_nodes)
    seeds = GRAPH.train_mask.nonzero().flatten()
    of_seed = degree[seeds].clamp(max=6).double()
    loader = NeighborLoader(GRAPH, [6], seeds, batch_size=30, shuffle=True, seed=2)
    found = forecast_of(loader)[EDGES]
    variance = 30 * (1 - 30 / seeds.numel()) * float(of_seed.var())  # sampling without replacement
    assert found.mean == pytest.approx(30 * float(of_seed.mean()), rel=2e-3)
    assert found.deviation == pytest.approx(variance**0.5, rel=0.06)


def test_a_batch_of_all_seeds_and_all_neighbours_has_no_deviation():
    loader = NeighborLoader(GRAPH, [-1, -1], torch.arange(20), batch_size=20, shuffle=True, seed=2)
    batch = next(iter(loader))
    found = forecast_of(loader)
    assert found == {None: Forecast(batch.num_nodes + 1.0, 0.0), EDGES: Forecast(float(batch.num_edges), 0.0)}


def test_smaller_batches_at_the_end_of_logical_ranks_do_not_widen_the_forecast(tmp_path):
    salientpp.partition(GRAPH, num_parts=1, root=tmp_path / "part", num_neighbors=[5], batch_size=50)
    part = salientpp.load(tmp_path / "part")
    size = part.split("train", 0).numel()
    options = dict(
        batch_size=size // 4 - 20, shuffle=True, seed=5
    )  # two logical ranks: two whole batches each, and a small one
    one, two = (forecast_of(NeighborLoader(part, [5], "train", logical_ranks=number, **options)) for number in (1, 2))
    assert one.keys() == two.keys()
    for type_ in one:
        assert two[type_].deviation == pytest.approx(one[type_].deviation, rel=0.2)
        assert two[type_].mean == pytest.approx(one[type_].mean, rel=0.02)


def test_draws_in_blocks_have_the_forecast_of_independent_draws():
    options = dict(batch_size=100, shuffle=True, seed=5)
    one, block = (
        forecast_of(NeighborLoader(GRAPH, [5, 5], GRAPH.train_mask, shared_draws={"block": size}, **options))
        for size in (1, 64)
    )
    for type_ in one:
        assert block[type_].mean == pytest.approx(one[type_].mean, abs=0.3 * one[type_].deviation)
        assert block[type_].deviation == pytest.approx(one[type_].deviation, rel=0.25)


def test_seeds_that_explain_less_need_more_trial_batches():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, generator=generator, dtype=torch.float64)
    noise = torch.randn(64, generator=generator, dtype=torch.float64)
    numbers = [module._trial_size(x, x + share * noise) for share in (0.0, 0.3, 3.0)]
    assert numbers[0] == 0 < numbers[1] < numbers[2] <= module.MOST_TRIAL
    assert module._trial_size(x, torch.ones(64, dtype=torch.float64)) == 0


def test_a_loader_without_seeds_expects_nothing():
    data = Data(x=torch.zeros(4, 1), edge_index=torch.tensor([[0, 1], [1, 2]]))
    loader = NeighborLoader(data, [2], torch.empty(0, dtype=torch.int64), batch_size=2)
    assert forecast_of(loader) == {None: Forecast(0.0, 0.0), EDGES: Forecast(0.0, 0.0)}


@pytest.mark.parametrize("bend", [0.0, 0.15])
def test_a_size_that_grows_less_for_larger_x_gets_the_skewness_of_its_curve(bend):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2000, 8, generator=generator, dtype=torch.float64).square().sum(1)  # a skewed distribution
    curve = 50.0 + x - bend * (x - 8.0).square() / 4.0
    y = curve[:300] + 0.2 * torch.randn(300, generator=generator, dtype=torch.float64)
    found = module._forecast(x, x[:300], y)
    assert found.mean == pytest.approx(float(curve.mean()), abs=0.05)
    assert found.deviation == pytest.approx(float(curve.std()), rel=0.02)
    third = float((curve - curve.mean()).pow(3).mean()) / float(curve.std()) ** 3
    assert found.skewness == pytest.approx(third, abs=0.05)


class _ManyTurns:
    """An order of turns that all have the same seeds, except the last one."""

    def __init__(self, number: int) -> None:
        seeds, fewer = [(0, torch.arange(3))], [(0, torch.arange(2))]
        self._turns = [Turn(index, index, seeds) for index in range(number - 1)] + [Turn(number, number, fewer)]

    def of_epoch(self, epoch: int) -> list[Turn]:
        return self._turns


def test_turns_are_chosen_in_linear_time():
    """A pass over all turns for each of these turns would take longer than a hang."""
    chosen = module._some_turns(_ManyTurns(300_000), shuffled=False)
    assert len(chosen) == module._TURNS and all(turn.pieces[0][1].numel() == 3 for turn in chosen)
