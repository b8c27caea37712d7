"""Laws of ``torch.inference_mode()``: a loader that is made or used inside of it gives the same batches there and elsewhere, also for training."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import distributed
import numpy as np
import pytest
import torch
from graphs import random_data

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader

WAYS: list[dict[str, Any]] = [
    {},
    {"read_ahead": "1MiB"},
    {"read_ahead": "1MiB", "num_workers": 1},
    {"replication_factor": 0.3},
    {"replication_factor": 0.3, "lookahead": 4},
    {"replication_factor": 0.3, "lookahead": 4, "num_workers": 1, "read_ahead": "1MiB"},
    {"memory": "40kB"},
    {"pad": "bucket"},
    {"pad": "fixed"},
]


def graph():
    data = random_data(300, 1500, edge_attributes=True)
    data.x = torch.rand(300, 16, generator=torch.Generator().manual_seed(1))
    return data


def assert_trains(loader) -> list[float]:
    """Returns a number of each batch of an epoch, after a backward pass through its rows and a write to them."""
    found, weight = [], torch.ones(16, 1, requires_grad=True)
    for batch in loader:
        (batch.x @ weight).sum().backward()
        found.append(float(batch.x.double().sum()))
        batch.x.add_(1)
    return found


def check(make, **options) -> list[str]:
    """Returns what differs between a loader that is made outside, and one that is made inside and used inside and outside in turns."""
    modes, seen = [], []

    def transform(batch):
        modes.append(torch.is_inference_mode_enabled())
        return batch

    outside = make(transform=None, **options)
    want = [[float(batch.x.double().sum()) for batch in outside] for _ in range(4)]
    with torch.inference_mode():
        loader = make(transform=transform, **options)
        seen.append([float(batch.x.double().sum()) for batch in loader])
    seen.append(assert_trains(loader))
    with torch.inference_mode():
        seen.append([float(batch.x.double().sum()) for batch in loader])
    seen.append(assert_trains(loader))
    number = len(loader)
    wanted_modes = [inside for inside in (True, False, True, False) for _ in range(number)]
    return [*(["batches"] if seen != want else []), *(["modes of transform"] if modes != wanted_modes else [])]


def _on_ranks(rank: int, root: str, kind: type) -> dict[str, list[str]]:
    def make(**options):
        plain = {"batch_size": 40 if kind is NeighborLoader else 400, "shuffle": True, "seed": 3, "uneven": "exact"}
        return kind(salientpp.load(root), [4, 3], "all", **plain, **options)

    ways = WAYS if kind is NeighborLoader else WAYS[:3]
    found = {}
    for options in ways:
        found[str(options)] = check(make, **options)
    return {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize("kind", [NeighborLoader, LinkNeighborLoader])
@pytest.mark.parametrize("topology", ["whole", "parts"])
def test_ranks_may_make_loaders_in_inference_mode(tmp_path, topology, kind):
    salientpp.partition(graph(), 2, tmp_path / "parts", [4, 3], 16, method=torch.arange(300) % 2, topology=topology)
    assert distributed.run(_on_ranks, 2, str(tmp_path / "parts"), kind) == [{}, {}]


def test_data_with_sparse_tensors_may_be_made_in_inference_mode():
    def numbers(loader) -> list[list[float]]:
        return [[*batch.adj_t.values().tolist(), *batch.weights.coalesce().values().tolist()] for batch in loader]

    def make() -> NeighborLoader:
        data = graph()
        data.adj_t = torch.eye(300).to_sparse_csr()
        data.edge_index, data.weights = torch.arange(300).repeat(2, 1), torch.eye(300).to_sparse()
        return NeighborLoader(data, [4, 3], batch_size=64, num_workers=1)

    want = numbers(make())
    with torch.inference_mode():
        loader = make()
        assert numbers(loader) == want
    assert numbers(loader) == want


@pytest.mark.parametrize("options", [{}, {"read_ahead": 10**6}, {"device_rows": 0.3}, {"pad": "bucket"}], ids=str)
def test_one_process_may_make_and_copy_loaders_in_inference_mode(tmp_path, options):
    data = graph()
    np.save(tmp_path / "x.npy", data.x.numpy())
    data.x = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))

    def make(**options):
        return NeighborLoader(data, [4, 3], batch_size=64, shuffle=True, seed=3, **options)

    assert check(make, **options) == []
    want = assert_trains(make(**options))
    for how in (copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))):
        with torch.inference_mode():
            loader = how(make(**options))
        assert assert_trains(loader) == want
