"""Settings that every test needs before torch is imported, and the number of examples of property tests."""

import gc
import os
import sys

import pytest

try:
    import hypothesis
except ModuleNotFoundError:  # `make gpu-check` runs on machines without it
    hypothesis = None

# Kernels on tiny graphs run many short parallel regions. On a busy machine a waiting thread that spins takes the core
# from the thread that it waits for. Sleeping threads make the tests several times faster. Results do not change.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A partition makes 40 files safe, each of which waits for the disk. No test cuts the power. A closed descriptor is still an error.
os.fsync = os.fstat

# Assertions in these modules then show the compared values, as assertions in tests do.
pytest.register_assert_rewrite("batches", "command_line", "directories", "one_process")


def pytest_collectstart() -> None:
    """Pauses the garbage collector. Imports and the collection of tests make millions of objects, and next to no garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Hides the modules and the tests from the garbage collector, which would visit them hundreds of times."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _templates() -> None:
    import templates  # noqa: F401  not above, because xdist's controller runs no test and does not import PyG


@pytest.fixture(autouse=True)
def _environment_of_the_next_test():
    """Restores the environment. Libraries leave variables such as MASTER_PORT, and a rank of a later test would connect there."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def _demand_of_the_next_module():
    """Resets the demand of trimmed models for hops, so that the next module sees batches of a process without trimmed models."""
    yield
    hops = sys.modules.get("salientpp.sampling.hops")
    if hops is not None:
        hops.demand.hops = False


def _choose_examples() -> None:
    """Sets the number of examples of property tests."""
    settings, check = hypothesis.settings, hypothesis.HealthCheck
    # Examples share the folder of their test and create subfolders. A slow machine is not a failure.
    common = {"deadline": None, "suppress_health_check": [check.function_scoped_fixture, check.too_slow]}
    settings.register_profile("default", derandomize=True, max_examples=60, **common)
    # The nightly run draws new examples each time. A failure prints the decorator that reproduces it.
    settings.register_profile("nightly", max_examples=2000, print_blob=True, **common)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


if hypothesis is not None:
    _choose_examples()
