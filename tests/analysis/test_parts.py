"""Laws of the analysis of a topology in parts: its figures equal those of the whole form, and its counts those of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data
from two_forms import in_both_forms

import salientpp
from salientpp import NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches

FANOUTS, BATCH, ALPHA = [5, 3], 16, 0.2
CASES: dict[str, dict[str, Any]] = {
    "one rank for each part": {"ways": {"policies": ["vip", "degree", "simulation"]}},
    "ranks that serve two parts": {"ranks": 2},
    "hosts with two ranks": {"ranks_per_host": 2},
    "lookahead": {"ways": {"lookahead": 2}, "batches": {"shared_draws": "batch"}},
    "edges as seeds": {"batches": {"link": True, "seeds": "all"}},
}


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> list[str]:
    data = random_data(num_vertices=300, num_edges=1500, directed=True)
    data.weight = torch.rand(data.num_edges)
    return in_both_forms(tmp_path_factory.mktemp("forms"), data, 4, FANOUTS, BATCH)


def figures(root: str, case: dict[str, Any], part_id: int | None) -> dict[str, Any]:
    options = dict(case)
    batches = Batches(num_neighbors=FANOUTS, batch_size=BATCH, epochs=1, **options.pop("batches", {}))
    ways = Ways(**{"replication_factors": [0.0, ALPHA], "policies": ["vip"], **options.pop("ways", {})})
    return asdict(analyze(salientpp.load(root, part_id=part_id), batches, ways, name="graph", **options))


@pytest.mark.parametrize("name", CASES)
def test_figures_equal_those_of_the_whole_form(forms, name):
    whole, parts = forms
    expected = figures(whole, CASES[name], None)
    assert figures(parts, CASES[name], None) == expected
    assert figures(parts, CASES[name], 1) == expected, "a view of one part is analysed as the whole job"


def remote_rows(rank: int, root: str) -> int:
    loader = NeighborLoader(
        salientpp.load(root), FANOUTS, "train", batch_size=BATCH, shuffle=True, seed=5, replication_factor=ALPHA
    )
    for _ in loader:
        pass
    return loader.stats().rows_remote


def test_counts_equal_a_run(forms):
    root = forms[1]
    batches = Batches(num_neighbors=FANOUTS, batch_size=BATCH, epochs=1, seed=5)
    analysis = analyze(salientpp.load(root), batches, Ways(replication_factors=[ALPHA], policies=["vip"]))
    (volume,) = analysis.of(way="cache", policy="vip")
    assert volume.remote_rows_per_epoch == sum(distributed.run(remote_rows, 4, root))
