"""Laws of epochs on a device: loops that end early, states saved in mid-epoch, and several loaders at once."""

from __future__ import annotations

from itertools import islice

import pytest
from batches import assert_same_batches, make

from .devices import on_cpu

WAYS = {"device_rows": 0.3, "num_workers": 2}


@pytest.mark.parametrize("depth", [1, 4, 10])
def test_a_loop_that_ends_early_leaves_the_next_epoch_right(device, data, depth):
    options = {"input_nodes": data.train_mask, "batch_size": 16}
    plain, loader = make(data, **options), make(data, device=device, depth=depth, **WAYS, **options)
    for stop in (1, 3):
        want = list(plain)
        assert_same_batches(list(islice(on_cpu(loader, held=0), stop)), want[:stop])
    assert_same_batches(list(on_cpu(loader)), list(plain))


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("source", ["data", "part"])
def test_a_run_stopped_in_mid_epoch_continues_on_the_device(device, data, part, source, stop):
    graph, nodes = (data, data.train_mask) if source == "data" else (part, "train")
    options = {"input_nodes": nodes, "batch_size": 16}
    want = list(make(graph, **options))
    first = make(graph, device=device, **WAYS, **options)
    batches = iter(first)
    assert_same_batches([next(batches).to("cpu") for _ in range(stop)], want[:stop])
    second = make(graph, device=device, depth=3, **WAYS, **options)
    second.load_state_dict(first.state_dict())
    assert_same_batches(list(on_cpu(second)), want[stop:])


def test_loaders_that_take_turns_do_not_disturb_each_other(device, data):
    options = {"input_nodes": data.train_mask, "batch_size": 16}
    loaders = [make(data, device=device, seed=seed, **WAYS, **options) for seed in (1, 2)]
    pairs = list(zip(*loaders, strict=True))
    for seed, got in zip((1, 2), zip(*pairs, strict=True)):
        assert_same_batches(list(on_cpu(got)), list(make(data, seed=seed, **options)))
