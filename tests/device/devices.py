"""The device on which these tests run, and batches copied from it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator

import pytest
import torch
from cuda_sanitizer import ignore_empty_tensors
from torch_geometric.data.data import BaseData

if os.environ.get("TORCH_CUDA_SANITIZER"):
    ignore_empty_tensors()


def need_cuda() -> torch.device:
    """The first GPU. Without one, the test is skipped, or fails if FAIL_WITHOUT_CUDA=1 is set."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if os.environ.get("FAIL_WITHOUT_CUDA") == "1":
        pytest.fail("FAIL_WITHOUT_CUDA=1 is set, but torch finds no GPU", pytrace=False)
    pytest.skip("needs a GPU")


def find_device() -> torch.device:
    """The device of this process's tests. Ranks call it too."""
    return need_cuda()


def on_cpu(batches: Iterable[BaseData], held: int = 2) -> Iterator[BaseData]:
    """Yields batches copied to the CPU, each when ``held`` later ones have been delivered. A copy makes the host wait for the device."""
    waiting: deque[BaseData] = deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > held:
            yield waiting.popleft().to("cpu")
    while waiting:
        yield waiting.popleft().to("cpu")
