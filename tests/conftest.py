"""What every test needs before torch is loaded, and how many examples property tests try."""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# Kernels on tiny graphs are many short parallel regions. On a busy machine a thread that spins while it waits takes the
# core from the one it waits for; asleep, it makes the tests several times faster. Results do not change.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Their assertions are to say what was compared, as those of tests do.
pytest.register_assert_rewrite("batches", "command_line", "directories", "one_process")


@pytest.fixture(autouse=True)
def _environment_of_the_next_test():
    """Libraries that tests use leave variables behind, such as MASTER_PORT; a rank of a later test would look for others there."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def _demand_of_the_next_module():
    """Trimmed models ask that batches of their process know their hops; batches of other tests are those of processes without such models."""
    yield
    hops = sys.modules.get("salientpp.sampling.hops")
    if hops is not None:
        hops.demand.hops = False
        hops.demand.lists.clear()


# Examples share the folder of their test and name subfolders themselves; a slow machine is no fault.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}
settings.register_profile("default", derandomize=True, max_examples=60, **_COMMON)
# The nightly run draws new examples every time; a failure prints the decorator that makes it again.
settings.register_profile("nightly", max_examples=2000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
