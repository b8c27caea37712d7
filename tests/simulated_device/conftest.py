"""The simulated device for the tests of this folder, in the order in which every stream is late."""

from __future__ import annotations

import pytest
import torch

from tests.simulated_device import install, seed


@pytest.fixture
def device() -> torch.device:
    device = install()
    torch.simulated.set_sync_debug_mode("default")
    seed(0)
    return device
