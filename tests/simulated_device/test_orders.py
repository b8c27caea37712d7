"""Batches on the simulated device equal those on the CPU, in more than 200 orders of the device's operations.

Orders 0 to 13 make the streams late and eager in turn. Each scenario runs in these, and in others that no other scenario has. One scenario runs in 200 orders.
"""

from __future__ import annotations

import pytest
import torch

from tests.simulated_device.scenarios import SCENARIOS

pytestmark = pytest.mark.simulated
FEW, MANY = 8, 200


def orders_of(name: str) -> list[int]:
    if name == "depth 10":
        return list(range(MANY))
    first = 14 + FEW * list(SCENARIOS).index(name)
    return [*range(14), *range(first, first + FEW)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_batches_are_right_in_every_order(device, name, tmp_path):
    run = SCENARIOS[name](tmp_path)
    wrong = {}
    for number in orders_of(name):
        try:
            run(number)
        except Exception as error:
            wrong[number] = str(error)
    assert wrong == {}


@pytest.mark.parametrize(
    "name", ["depth 10", "zero copy", "no rows on the device", "narrow rows", "typed", "own tensors"]
)
def test_the_host_never_waits_for_the_device(device, name, tmp_path):
    """The scenario of the name, with an error for each synchronisation while the pipeline works."""
    from salientpp.engine.pipeline import Pipeline

    run, tick = SCENARIOS[name](tmp_path), Pipeline.tick

    def without_synchronisation(self, item=None):
        torch.simulated.set_sync_debug_mode("error")
        try:
            return tick(self, item)
        finally:
            torch.simulated.set_sync_debug_mode("default")

    Pipeline.tick = without_synchronisation
    try:
        for number in range(4):
            run(number)
    finally:
        Pipeline.tick = tick
