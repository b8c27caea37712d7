"""Two ranks on the simulated device give the batches of the CPU, over gloo and through pinned memory, and between devices."""

from __future__ import annotations

import distributed
import pytest
from rare import rare

from tests.simulated_device.ranks import RANK_SCENARIOS, failing_seeds, rank_directory

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("orders", [range(10), *rare(range(10, 20))], ids=str)
@pytest.mark.parametrize("name", RANK_SCENARIOS)
def test_batches_on_two_ranks_are_right_in_every_order(name, orders, tmp_path):
    assert distributed.run(failing_seeds, 2, rank_directory(tmp_path), name, orders) == [[], []]
