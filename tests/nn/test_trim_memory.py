"""Laws of the memory of a trimmed model: its steps use again what earlier steps freed, and a comparison keeps nothing."""

from __future__ import annotations

import os
import resource
import statistics
import sys
from types import SimpleNamespace
from typing import Any

import distributed
import pytest
import torch
import torch_geometric.nn as pyg
from own_pages import has_own_pages, needs_counts_of_blocks
from torch import nn
from trimmed import batch_of, graph, network

import salientpp
from salientpp import ops
from salientpp.datasets import synthetic

#: More bytes than a step frees, and fewer than the largest block that is kept.
LARGE = 512 << 20


def large_step() -> tuple[nn.Module, Any]:
    """Returns a trimmed model and a batch for which it makes tables of more than 32 MiB."""
    data = synthetic(num_vertices=60_000, num_features=8)
    batch = batch_of(data, [15, 10, 2], input_nodes=torch.arange(1500), batch_size=1500)
    assert batch.edge_index.hops.num_nodes[None][2] * 256 * 4 > 32 << 20
    return salientpp.nn.trim(pyg.GraphSAGE(8, 256, num_layers=3, out_channels=3)), batch


def step(model: nn.Module, batch: Any) -> None:
    model.zero_grad()
    model(batch.x, batch.edge_index)[: batch.batch_size].square().mean().backward()


def _faults_of_steps(rank: int) -> float:
    """Returns the median of the page faults of five steps after the comparisons in calls 1 and 4."""
    model, batch = large_step()
    faults = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step(model, batch)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(faults[5:])


@needs_counts_of_blocks
def test_later_steps_touch_no_new_pages():
    [faults] = distributed.run(_faults_of_steps, 1)
    pages_of_a_table = (32 << 20) // resource.getpagesize()
    assert faults < pages_of_a_table  # a step makes several such tables


def _own_pages_by_call(rank: int) -> list[bool]:
    """Tells whether large blocks have pages of their own: before a model's first call, after it, where memory must return, and for a user's limit."""
    model, batch = large_step()
    found = [has_own_pages(LARGE)]
    step(model, batch)
    found.append(has_own_pages(LARGE))
    ops.return_freed_blocks()
    found.append(has_own_pages(LARGE))
    step(model, batch)
    found.append(has_own_pages(LARGE))
    ops.end_return_of_freed_blocks()
    found.append(has_own_pages(LARGE))
    ops.keep_freed_blocks(False)
    found.append(has_own_pages(LARGE))
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    ops.keep_freed_blocks(True)
    found.append(has_own_pages(LARGE))
    return found


@needs_counts_of_blocks
def test_a_trimmed_model_keeps_freed_blocks_unless_others_want_them_returned():
    assert distributed.run(_own_pages_by_call, 1) == [[True, False, True, True, False, True, True]]


def test_a_c_library_that_refuses_the_limit_gets_its_largest(monkeypatch):
    options = {-3: 128 << 10}

    def mallopt(option: int, value: int) -> int:
        if option == -3 and value > 32 << 20:
            return 0
        options[option] = value
        return 1

    monkeypatch.setattr(
        sys.modules["salientpp.ops.memory"].ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt)
    )
    for name in ("_keeping", "_asking"):
        monkeypatch.setattr(sys.modules["salientpp.ops.memory"], name, 0)
    ops.keep_freed_blocks(True)
    assert options == {-3: 32 << 20, -1: -1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "1000000"),
        ("GLIBC_TUNABLES", "glibc.malloc.check=0:glibc.malloc.mmap_threshold=1000000"),
    ],
)
def test_limits_of_the_user_stay_and_nothing_is_returned_between_comparisons(monkeypatch, name, value):
    def called(*args: int) -> int:
        raise AssertionError("the C library was asked")

    memory = sys.modules["salientpp.ops.memory"]
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=called, malloc_trim=called))
    monkeypatch.setattr(memory, "_keeping", False)
    monkeypatch.setattr(memory, "_held_bytes", lambda: 1 << 40)
    monkeypatch.setenv(name, value)
    ops.keep_freed_blocks(True)
    ops.return_growth()


def _own_pages_in_comparisons(rank: int) -> list[bool]:
    """Tells whether large blocks have pages of their own in each call of the model's forward, in two calls with a comparison and one without."""
    model, batch = large_step()
    found: list[bool] = []
    model.convs[0].register_forward_pre_hook(lambda conv, args: found.append(has_own_pages(LARGE)))
    for _ in range(2):
        step(model, batch)
        found.append(has_own_pages(LARGE))
    return found


@needs_counts_of_blocks
def test_blocks_of_a_comparison_return_to_the_system():
    """The plain model's tables have other sizes than those of a trimmed step, and would fragment its memory."""
    [found] = distributed.run(_own_pages_in_comparisons, 1)
    *compared, own, after, other, end = found
    assert compared and all(compared) and not any((own, after, other, end)), found


def test_freed_memory_returns_to_the_system_every_eight_calls_if_the_process_has_grown(monkeypatch):
    """Batches differ in size, so that kept blocks fit fewer and fewer tables. Taking the pages again would slow steps with small tables."""
    made: list[int] = []
    returned: list[int] = []
    model, batch = salientpp.nn.trim(network()), batch_of(graph())
    memory = sys.modules["salientpp.ops.memory"]
    held = {9: 900, 17: 1100, 25: 1200, 33: 500, 41: 800}  # MiB, by call
    monkeypatch.setattr(memory, "_held", 700 << 20)
    monkeypatch.setattr(memory, "_held_bytes", lambda: held[len(made)] << 20)
    monkeypatch.setattr(memory, "return_freed_memory", lambda: returned.append(len(made)))
    monkeypatch.setattr(sys.modules["salientpp.nn.trim"], "keep_freed_blocks", lambda keep: None)
    for number in range(1, 42):
        made.append(number)
        model(batch.x, batch.edge_index)
    assert returned == [17, 41]
