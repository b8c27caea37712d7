"""Laws of each way, of a way from outside the package, and of every pair that may be used together."""

from __future__ import annotations

import dataclasses
import re
from itertools import combinations
from typing import Any

import distributed
import pytest
import torch
from rare import rare

import salientpp
from salientpp import NeighborLoader
from salientpp.engine.basis import Basis
from salientpp.engine.way import TiersByType, Way
from salientpp.loader.values import EXCLUDED, named
from salientpp.store.cache import FeatureCache
from salientpp.store.tiers import IdSet, Tier
from salientpp.testing.way import WayLaws, compare, directory


class EveryThird(Way):
    """Way from outside the package: copies of every third row of the graph."""

    name = "every third"

    def choose(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        number = basis.source.part.num_vertices
        copies = Tier("cache", IdSet.of(torch.arange(0, number, 3), number), {}, basis.zero_copy, "cache")
        return {None: dataclasses.replace(tiers[None], copies=[*tiers[None].copies, copies])}

    def place(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        part = basis.source.part
        members = IdSet.of(torch.arange(0, part.num_vertices, 3), part.num_vertices)
        rows = torch.cat([part.node_rows(number)["x"] for number in range(part.num_parts)])[members.ids]
        cached = FeatureCache(members, {"x": rows}).tiers(basis.zero_copy)
        return {None: dataclasses.replace(tiers[None], copies=[*tiers[None].copies, *cached])}


CACHE = {"replication_factor": 0.2}
WAYS: dict[str, dict[str, Any]] = {
    "cache": CACHE,
    "host": {**CACHE, "ranks_per_host": 2},
    "files": {"read_ahead": 400_000},
    "device": {"device_rows": 0.4},
    "lookahead": {**CACHE, "lookahead": 6},
    "sums": {"partial_aggregation": "mean"},
    "outside": {"ways": [EveryThird()]},
}


class TestCache(WayLaws):
    options = WAYS["cache"]


class TestHostCache(WayLaws):
    options = WAYS["host"]

    @classmethod
    def options_on(cls, num_ranks: int) -> dict[str, Any]:
        return {**cls.options, "ranks_per_host": min(2, num_ranks)}


class TestReadAhead(WayLaws):
    options = WAYS["files"]


class TestDeviceRows(WayLaws):
    options = WAYS["device"]


class TestLookahead(WayLaws):
    options = WAYS["lookahead"]


class TestSums(WayLaws):
    options = WAYS["sums"]


class TestOutside(WayLaws):
    options = WAYS["outside"]


# --- pairs ------------------------------------------------------------------------------------------------

#: Ways that are options in the table.
OPTION = {
    "cache": "replication_factor",
    "host": "ranks_per_host",
    "files": "read_ahead",
    "device": "device_rows",
    "lookahead": "lookahead",
    "sums": "partial_aggregation",
    "outside": "ways",
}


def excluded(one: str, other: str) -> bool:
    return bool({(OPTION[one], OPTION[other]), (OPTION[other], OPTION[one])} & set(EXCLUDED))


PAIRS = [pair for pair in combinations(WAYS, 2) if not excluded(*pair)]


@pytest.fixture(scope="module", params=[*rare(1), 2, *rare(4)], ids=lambda number: f"{number} ranks")
def of_pairs(request, tmp_path_factory):
    """Observations of each rank about each pair."""
    root = directory(tmp_path_factory.mktemp("pairs") / "parts", request.param)
    several = [{**WAYS[one], **WAYS[other]} for one, other in PAIRS]
    for options in several:
        if "ranks_per_host" in options:
            options["ranks_per_host"] = min(2, request.param)
    return distributed.run(compare, request.param, root, several)


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=map("-".join, PAIRS))
def test_batches_of_a_pair_equal_those_without_it(of_pairs, number):
    for of_rank in of_pairs:
        assert of_rank[number].wrong == []


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=map("-".join, PAIRS))
def test_the_price_of_a_pair_equals_the_count(of_pairs, number):
    for of_rank in of_pairs:
        for expected, counted in (of_rank[number].fetched, of_rank[number].copied):
            assert abs(expected - counted) <= max(WayLaws.band * counted, 100), (expected, counted)


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=map("-".join, PAIRS))
def test_a_plan_expects_of_a_pair_what_the_engine_expects(of_pairs, number):
    for of_rank in of_pairs:
        assert of_rank[number].unlike_plan == []


# --- over a topology in parts -------------------------------------------------------------------------------

OVER_PARTS = [*((name,) for name in WAYS), *PAIRS]


@pytest.fixture(scope="module", params=[*rare(2), 4], ids=lambda number: f"{number} ranks")
def over_parts(request, tmp_path_factory):
    """Observations of each rank about each way and each pair, if the topology is stored in parts."""
    root = directory(tmp_path_factory.mktemp("divided") / "parts", request.param, "parts")
    several = [{key: value for name in names for key, value in WAYS[name].items()} for names in OVER_PARTS]
    return distributed.run(compare, request.param, root, several)


@pytest.mark.parametrize("number", range(len(OVER_PARTS)), ids=map("-".join, OVER_PARTS))
def test_batches_over_parts_equal_those_without_the_ways(over_parts, number):
    for of_rank in over_parts:
        found = of_rank[number]
        assert found.wrong == [] and found.remote_rows[0] <= found.remote_rows[1]


@pytest.mark.parametrize("number", range(len(OVER_PARTS)), ids=map("-".join, OVER_PARTS))
def test_the_price_over_parts_equals_the_count(over_parts, number):
    for of_rank in over_parts:
        for expected, counted in (of_rank[number].fetched, of_rank[number].copied):
            assert abs(expected - counted) <= max(WayLaws.band * counted, 100), (expected, counted)


@pytest.mark.parametrize("number", range(len(OVER_PARTS)), ids=map("-".join, OVER_PARTS))
def test_a_plan_over_parts_expects_what_the_engine_expects(over_parts, number):
    for of_rank in over_parts:
        assert of_rank[number].unlike_plan == []


def test_only_lookahead_and_sums_exclude_each_other():
    assert [pair for pair in combinations(WAYS, 2) if excluded(*pair)] == [("lookahead", "sums")]


# --- ways that exclude each other --------------------------------------------------------------------------

GIVEN = {
    "lookahead": 3, "transform_sampler_output": id, "partial_aggregation": "sum", "pad": "bucket", "send_as": {"x": "fp16"},
    "read_ahead": 1000, "device_rows_zero_copy": True, "cooperate": "host", "logical_ranks_join": True,
}  # fmt: skip


@pytest.mark.parametrize("pair", EXCLUDED, ids=" ".join)
def test_a_pair_of_the_table_is_refused_with_its_reason(pair, tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "refused"
    if not root.exists():
        directory(root, 1)
    one, other = pair
    given = {name: GIVEN[name] for name in pair}
    for lead, key in (("device_rows", "zero_copy"), ("logical_ranks", "join")):
        if f"{lead}_{key}" in given:
            given[lead] = {key: given.pop(f"{lead}_{key}")}
    with pytest.raises(ValueError, match=f"^{one}=.* excludes {re.escape(named(other))}: ") as refused:
        NeighborLoader(salientpp.load(root), [3, 2], "train", **given)
    assert EXCLUDED[pair] in str(refused.value)
