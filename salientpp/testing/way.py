"""Tests (laws) that every way must pass. A way is a method that moves fewer bytes for the same batches, such as a cache.

The test of a way subclasses :class:`WayLaws` and provides ``options``, with which a loader uses the way. Every loader runs on 1, 2 and 4 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import SAGEConv

import salientpp
from salientpp import NeighborLoader
from salientpp.engine.way import Price, TiersByType
from salientpp.loader.construction import ways_of
from salientpp.loader.values import Options
from salientpp.nn import merge_partial
from salientpp.testing.comparison import differences
from salientpp.testing.graphs import random_data
from salientpp.testing.ranks import run_ranks
from salientpp.ways.planner.trials import Trials
from salientpp.ways.sums.way import SumsOfRows

RANKS = (1, 2, 4)
FANOUTS, BATCH, WIDTH = [5, 4], 16, 6


@dataclass(frozen=True)
class Found:
    """Observations of one rank about a loader that uses a way, or several together.

    Attributes:
        wrong: differences from the batches of a loader without the way, each with the number of its batch.
        fetched, copied: bytes per batch, as the planner's price predicts and as counted.
        seconds: seconds per batch, as the price predicts.
        remote_rows: numbers of rows from other ranks, with the way and without.
        unlike_plan: where the tiers and the price of the loader differ from those that a plan computes without moving rows.
    """

    wrong: list[str]
    fetched: tuple[float, float]
    copied: tuple[float, float]
    seconds: float
    remote_rows: tuple[int, int]
    unlike_plan: list[str]


def directory(folder: Path, num_parts: int, topology: str = "whole") -> str:
    """Makes a graph with real features whose batches need rows of other parts."""
    data = random_data(1500, 9000, seed=2)
    data.x = torch.rand(1500, WIDTH, generator=torch.Generator().manual_seed(1))
    salientpp.partition(data, num_parts, folder, FANOUTS, BATCH, refine=False, topology=topology)
    return str(folder)


def compare(rank: int, root: str, several: list[dict[str, Any]]) -> list[Found]:
    """Runs two epochs of a loader with each of these options beside a loader without them. Returns what this rank observed for each."""
    return [_compare(root, options) for options in several]


def _compare(root: str, options: dict[str, Any]) -> Found:
    part = salientpp.load(root)
    same: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "seed": 3}
    plain = NeighborLoader(part, FANOUTS, "train", ranks_per_host=1, **same)
    loader = NeighborLoader(part, FANOUTS, "train", **{"ranks_per_host": 1, **options}, **same)
    price, wrong, number = loader.engine.price(), [], 0
    for _ in range(2):
        for ours, want in zip(loader, plain, strict=True):
            wrong += [f"batch {number}: {name}" for name in _unlike(ours, want)]
            number += 1
    stats, row_bytes = loader.stats(), WIDTH * 4
    counted = stats.by_type[None]["bytes_received"] / number, (stats.rows_host + stats.rows_cache) * row_bytes / number
    remote = stats.rows_remote + stats.rows_partial, plain.stats().rows_remote
    unlike = _unlike_plan(loader, options, price)
    return Found(
        wrong, (price.fetched[None], counted[0]), (price.copied[None], counted[1]), price.seconds, remote, unlike
    )


def _unlike_plan(loader: NeighborLoader, given: dict[str, Any], price: Price) -> list[str]:
    """Lists the differences between a loader and a plan with the same ways. In a plan, ways choose which rows to hold, but no row is fetched."""
    basis = loader.engine.basis
    options = Options(**given).checked(basis.device)
    # Sums are chosen last, because they see the copies of all ways in an engine.
    ways = sorted(ways_of(options, []), key=lambda way: isinstance(way, SumsOfRows))
    with basis.remembering():
        chosen, tiers = Trials(basis).price(ways, 1e-7)
    found = [] if _members(tiers) == _members(loader.engine.producer.fetch.tiers) else ["tiers"]
    for name in ("fetched", "copied", "requests", "lists"):
        ours, want = getattr(chosen, name), getattr(price, name)
        numbers = [(ours[None], want[None])] if isinstance(ours, dict) else [(ours, want)]
        found += [f"{name}: chosen {a}, placed {b}" for a, b in numbers if abs(a - b) > 1e-6 * (1 + max(a, b))]
    return found


def _members(tiers: TiersByType) -> list[Any]:
    """Returns the ids of the rows that each tier holds copies of, to compare two engines."""
    return [
        (type_, tier.name, tier.memory, tier.members.ids.tolist())
        for type_, of_type in tiers.items()
        for tier in [*of_type.near, *of_type.copies]
        if tier.members is not None and len(tier.members)
    ]


def _unlike(ours: Any, want: Any) -> list[str]:
    """Lists the differences of two batches. If some rows came as sums, it compares a first layer's outputs and the seeds instead."""
    if "partial" not in ours:
        return differences(ours, want)
    wrong = [] if torch.equal(ours.n_id[: ours.batch_size], want.n_id[: want.batch_size]) else ["seeds"]
    return wrong if torch.allclose(_first_layer(ours), _first_layer(want), atol=1e-5) else [*wrong, "sums"]


def _first_layer(batch: Any) -> Tensor:
    torch.manual_seed(0)
    conv = merge_partial(SAGEConv(WIDTH, 3))
    with torch.no_grad():
        return conv(batch.x, batch.edge_index)[: sum(batch.num_sampled_nodes[:-1])].clone()


class WayLaws:
    """Tests of one way. Subclass it and set ``options``.

    Attributes:
        options: options of a loader that uses the way.
        band: largest allowed difference of predicted and counted bytes, as a fraction of the counted ones. A difference
            of up to four rows is always allowed.
    """

    options: ClassVar[dict[str, Any]]
    band: ClassVar[float] = 0.15

    @classmethod
    def options_on(cls, num_ranks: int) -> dict[str, Any]:
        """Returns the options of a loader on ``num_ranks`` ranks. Override it if they depend on this number."""
        return cls.options

    @pytest.fixture(scope="class", params=RANKS, ids=lambda number: f"{number} ranks")
    @classmethod
    def found(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
        root = directory(tmp_path_factory.mktemp("way") / "parts", request.param)
        ranks = run_ranks(compare, request.param, root, [cls.options_on(request.param)])
        return [found for (found,) in ranks]

    def test_batches_equal_those_without_the_way(self, found: list[Found]) -> None:
        assert [each.wrong for each in found] == [[]] * len(found)

    def test_the_price_equals_the_count(self, found: list[Found]) -> None:
        for each in found:
            for expected, counted in (each.fetched, each.copied):
                assert abs(expected - counted) <= max(self.band * counted, 4 * WIDTH * 4), (expected, counted)
            assert each.seconds > 0

    def test_a_plan_expects_what_the_engine_expects(self, found: list[Found]) -> None:
        assert [each.unlike_plan for each in found] == [[]] * len(found)

    def test_no_more_rows_are_fetched(self, found: list[Found]) -> None:
        for each in found:
            assert each.remote_rows[0] <= each.remote_rows[1]
