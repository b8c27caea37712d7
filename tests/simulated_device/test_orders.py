"""Batches on the simulated device equal those on the CPU, in many orders of the device's operations.

Orders 0 to 13 make the streams late and eager in turn. Each scenario runs in these, and in others that no other scenario has. One scenario runs in more orders.
Further orders are rare cases.
"""

from __future__ import annotations

import pytest
import torch
from rare import rare

from tests.simulated_device.scenarios import SCENARIOS

pytestmark = pytest.mark.simulated

#: Numbers of orders that only one scenario has, and of all orders of the scenario with the most: in each run, and in a rare one.
FEW, MANY = {"some": 2, "further": 8}, {"some": 60, "further": 200}


def orders_of(name: str, which: str) -> list[int]:
    if name == "depth 10":
        return list(range(MANY[which]))
    first = 14 + FEW["further"] * list(SCENARIOS).index(name)
    return [*range(14), *range(first, first + FEW[which])]


@pytest.mark.parametrize("which", ["some", *rare("further")])
@pytest.mark.parametrize("name", SCENARIOS)
def test_batches_are_right_in_every_order(device, name, which, tmp_path):
    run = SCENARIOS[name](tmp_path)
    wrong = {}
    for number in orders_of(name, which):
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
