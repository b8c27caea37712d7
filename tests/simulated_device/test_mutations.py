"""Each wait, record and event of the package is needed: without it, a scenario fails in some order.

The tests find these guards in the source (:mod:`tests.simulated_device.mutations`) and remove one at a time. So a new guard that no scenario needs fails here:
either a scenario is missing, or the guard is needless. The guards are listed below by file and function.

* ``store/fetch.py``, ``_tensors``, and ``store/rows.py``, ``hold_for_stream``: rows that a stream reads in place outlive their loader.
* ``engine/pipeline.py``, ``tick``: the caller's stream waits for the last stage, and the batch is recorded on it.
* ``engine/pipeline.py``, ``_run``: a stage's stream waits for the stage before, its inputs are recorded on it, and its end is an event.
* ``engine/pipeline.py``, ``record_stream``: a tensor is recorded on a stream.
* ``engine/pipeline.py``, ``tensors_in``: tensors are found in tensors, dictionaries, lists, dataclasses, ``SparseTensor``, ``TensorFrame``,
  objects with ``to_dict``, and the lists of a batch's edges.
* ``engine/stages.py``, ``_drawn``, ``assemble``: the user's own tensors on the device are read on the default stream.
* ``engine/stages.py``, ``copy_to_device``, ``assemble``, ``_wait_for_default_stream``: what was read there is waited for, and recorded.
* ``sampling/device_topology.py``, ``sample``: a sampling thread waits for the copy of its sample.
* ``ranks/comm.py``, ``Pending.wait``: the current stream waits for rows that arrive on the device.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import distributed
import pytest

from tests.simulated_device import install
from tests.simulated_device.mutations import NO_GUARDS, Guard, guards, removed
from tests.simulated_device.ranks import failing_seeds, rank_directory
from tests.simulated_device.scenarios import SCENARIOS

pytestmark = pytest.mark.simulated

#: Number of orders in which a scenario may show a missing guard.
MOST_ORDERS = 20

#: Part of a guard's name -> the scenario that is tried first. All others are tried after it.
SHOWN_BY = {
    "sampling.device_topology": "samples",
    "_drawn:": "own tensors",
    "copy_to_device:": "own tensors on a side stream",
    "assemble:": "replaced rows",
    "_wait_for_default_stream: current": "own tensors on a side stream",
    "_wait_for_default_stream: record_stream": "replaced rows",
    "vars(state.storage)": "sparse adjacency",
    "state.feat_dict": "tables",
    "lists.moved()": "training of a trimmed model",
    "tensors_in(value) (1)": "sums",
    "hold_for_stream: rows.record": "the loader ends first",
    "hold_for_stream: rows[:1]": "the loader ends first, zero copy",
    "_tensors:": "the loader ends first",
}


@functools.cache
def prepared(name: str) -> Callable[[int], None]:
    return SCENARIOS[name](Path(tempfile.mkdtemp()))


def fault_without(guard: Guard) -> str | None:
    """Returns the first scenario and order that fail without the guard."""
    if guard.module == "ranks.comm":  # only rows between devices need it
        root = rank_directory(Path(tempfile.mkdtemp()))
        results = distributed.run(failing_seeds, 2, root, "rows between devices", range(MOST_ORDERS), guard)
        return next((found[0] for found in results if found), None)
    if (
        ".synchronize(" in guard.text
    ):  # without it, kernels of the host may read ids of poison, which can end the process
        (result,) = distributed.run(_fault_in_process, 1, guard, may_fail=True)
        return result.text if isinstance(result, distributed.Failed) else result
    return _first_fault(guard)


def _fault_in_process(rank: int, guard: Guard) -> str | None:
    install()
    return _first_fault(guard)


def _first_fault(guard: Guard) -> str | None:
    likely = [name for part, name in SHOWN_BY.items() if part in str(guard)]
    for name in dict.fromkeys([*likely, *SCENARIOS]):
        run = prepared(name)
        with removed(guard):
            for number in range(MOST_ORDERS):
                try:
                    run(number)
                except Exception as error:
                    return f"{name}, order {number}: {error}"
    return None


@pytest.mark.parametrize("guard", guards(), ids=str)
def test_a_scenario_fails_without_the_guard(device, guard):
    fault = fault_without(guard)
    assert fault is not None, f"no scenario needs this guard; add a scenario, or delete the guard: {guard}"
    print(fault)


def test_the_list_of_guards_is_complete():
    found = guards()
    assert len(found) == len(set(found)) > 15
    for guard in found:
        folder, file = guard.module.split(".")
        assert f"``{folder}/{file}.py``" in __doc__ and f"{guard.function}``" in __doc__, (
            f"not in the docstring: {guard}"
        )
    assert all(reason for reason in NO_GUARDS.values())


def test_a_removed_guard_returns(device):
    from salientpp.engine.pipeline import Pipeline

    before = Pipeline._run
    with removed(next(guard for guard in guards() if guard.function == "_run")):
        assert Pipeline._run is not before
    assert Pipeline._run is before
