"""The device and the graphs of tests that run on a device."""

from __future__ import annotations

import pytest
import torch
from batches import known_data
from graphs import random_data
from torch_geometric.data import Data

import salientpp

from .devices import ORDERS, SIMULATES, find_device, need_cuda


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs each test on the simulated device in several orders. The marker keeps these tests out of processes of other tests."""
    if SIMULATES and "device" in metafunc.fixturenames:
        orders = getattr(metafunc.module, "ORDERS", ORDERS)
        # The first order makes every stream late, so that a missing wait shows.
        marks = [[pytest.mark.simulated], [pytest.mark.simulated, pytest.mark.rare]]
        orders = [pytest.param(order, id=f"order {order}", marks=marks[order > 0]) for order in orders]
        metafunc.parametrize("device", orders, indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return find_device(getattr(request, "param", 0))


@pytest.fixture
def cuda() -> torch.device:
    return need_cuda()


@pytest.fixture(scope="package")
def data() -> Data:
    return known_data()


@pytest.fixture(scope="package")
def part(data, tmp_path_factory) -> salientpp.PartitionedGraph:
    return salientpp.partition(data, 1, tmp_path_factory.mktemp("device") / "d", [4, 3], 16, method="random")


@pytest.fixture(scope="package")
def large() -> Data:
    """Graph whose batches are megabytes, so that copies and kernels take measurable time."""
    data = random_data(60_000, 900_000, train_fraction=0.5)
    data.x = torch.arange(60_000).view(-1, 1).repeat(1, 100).float()
    return data
