"""The device on which these tests run, and batches copied from it.

It is a GPU if torch finds one. Otherwise it is the simulated device, which executes operations in an order that a number selects.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator

import pytest
import torch
from cuda_sanitizer import ignore_empty_tensors
from torch_geometric.data.data import BaseData

from tests import simulated_device

#: True if the tests run on the simulated device. FAIL_WITHOUT_CUDA=1 forbids it.
SIMULATES = not torch.cuda.is_available() and os.environ.get("FAIL_WITHOUT_CUDA") != "1"

#: Orders of operations in which each test runs on the simulated device.
ORDERS = range(2)

if os.environ.get("TORCH_CUDA_SANITIZER"):
    ignore_empty_tensors()


def need_cuda() -> torch.device:
    """The first GPU. Without one, the test is skipped, or fails if FAIL_WITHOUT_CUDA=1 is set."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if SIMULATES:
        pytest.skip("needs a GPU")
    pytest.fail("FAIL_WITHOUT_CUDA=1 is set, but torch finds no GPU", pytrace=False)


def find_device(order: int = 0) -> torch.device:
    """The device of this process's tests, with the given order of operations if it is simulated. Ranks call it too."""
    if not SIMULATES:
        return need_cuda()
    device = simulated_device.install()
    simulated_device.seed(order)
    return device


def on_cpu(batches: Iterable[BaseData], held: int = 2) -> Iterator[BaseData]:
    """Yields batches copied to the CPU, each when ``held`` later ones have been delivered. A copy makes the host wait for the device."""
    waiting: deque[BaseData] = deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > held:
            yield waiting.popleft().to("cpu")
    while waiting:
        yield waiting.popleft().to("cpu")
