"""Measures what a word (element of a row), an edge and a vertex cost on these machines, to choose layouts and plans.

All ranks measure at the same time, because they also train at the same time. The measurement takes a fraction of a second. The slowest rank counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from salientpp.fullgraph.exchange import Route
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.problem import Constants
from salientpp.fullgraph.product import Sparse, multiplied
from salientpp.ways.planner.rates import wait_for_device

#: Rows and columns of the timed products, and number of repetitions.
_ROWS, _WIDTH, _TIMES = 4096, 64, 5


def measured_constants(graph: LocalGraph) -> Constants:
    """Measures the cost of a word, an edge and a vertex on these machines. All ranks get equal values. Collective."""
    ranks, size = graph.ranks, graph.ranks.size
    dtype = graph.x.dtype if "x" in graph.node_rows and graph.x.is_floating_point() else torch.float32
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS, _WIDTH, generator=draw, device="cpu").to(ranks.device, dtype)
    ends = torch.randint(_ROWS, (2, 8 * _ROWS), generator=draw, device="cpu").to(ranks.device)
    matrix = Sparse.of(ends[0], ends[1], rows.new_ones(ends.size(1)), (_ROWS, _ROWS)).forth
    weight = rows[:_WIDTH].clone()
    edge = _seconds(lambda: multiplied(matrix, rows), ranks.device) / (ends.size(1) * _WIDTH)
    vertex = _seconds(lambda: rows @ weight, ranks.device) / (_ROWS * _WIDTH * _WIDTH)
    word = 0.0
    if size > 1:
        each = _ROWS // size
        every = torch.arange(each, device=ranks.device)
        nothing, everything = (Route(every[:count].repeat(size), [count] * size, [count] * size) for count in (0, each))
        with torch.no_grad():
            exchange = _seconds(lambda: ranks.fetch(rows, nothing, "calibration"), ranks.device)
            full = _seconds(lambda: ranks.fetch(rows, everything, "calibration"), ranks.device)
        word = max(full - exchange, 0.0) / (each * (size - 1) * _WIDTH)
    measured = ranks.gather_numbers("calibrate", [int(1e15 * each) for each in (edge, vertex, word)])
    return Constants(*(max(column) / 1e15 for column in zip(*measured)))


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """Runs ``action`` several times, and returns the seconds of the fastest run."""
    least = float("inf")
    for _ in range(_TIMES):
        begin = time.perf_counter()
        action()
        wait_for_device(device)
        least = min(least, time.perf_counter() - begin)
    return least
