"""Laws of a budget of device memory: batches equal those without it, and copies on the device stay within it."""

from __future__ import annotations

import pytest
from batches import differences, make

from salientpp.ways.planner.machines import Link, Machines

from .devices import on_cpu

MACHINES = Machines(between=Link(1e5), to_device=1e5)


@pytest.mark.parametrize("budget", [0, 900, "1MB"])
@pytest.mark.parametrize("source", ["data", "part"])
def test_rows_on_the_device_stay_within_the_budget(device, data, part, source, budget):
    graph, nodes = (data, data.train_mask) if source == "data" else (part, "train")
    loader = make(graph, input_nodes=nodes, device=device, memory={"device": budget, "machines": MACHINES})
    for want, got in zip(make(graph, input_nodes=nodes), on_cpu(loader), strict=True):
        assert differences(got, want) == []
    plan, num_bytes = loader.plan(), 10**6 if budget == "1MB" else budget
    row_bytes = sum(loader.engine.basis.source.row_bytes.values())
    whole = loader.engine.basis.source.books[None].num_vertices * row_bytes
    held = sum(len(tier.members) for tier in loader.engine.producer.fetch.tiers[None].near if tier.members) * row_bytes
    assert min(num_bytes, whole) - row_bytes < held <= num_bytes
    assert plan.device_memory == num_bytes and plan.saves is None
    assert (plan.device_saves is None) == (num_bytes == 0)
    assert plan.lines[0].cost.seconds <= plan.lines[-1].cost.seconds
    text = str(plan)
    assert "copies on the device: " in text or budget == 0


def test_a_copy_of_a_loader_has_the_plan(device, data):
    import copy

    loader = make(data, device=device, memory={"device": 900, "machines": MACHINES})
    again = copy.copy(loader)
    assert again.plan().chosen == loader.plan().chosen
    for want, got in zip(on_cpu(loader), on_cpu(again), strict=True):
        assert differences(got, want) == []


def test_a_sampler_of_the_user_is_refused(device, data):
    with pytest.raises(
        ValueError, match="memory= must know an epoch's batches in advance, but your sampler decides them"
    ):
        make(data, device=device, memory={"device": 900, "machines": MACHINES}, sampler=range(20), shuffle=False)
