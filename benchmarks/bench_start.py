"""Measures start-up: the import, a loader, its first batch. Writes results/start.json.

    python benchmarks/bench_start.py [--vertices 500000 2400000]

Work that runs once in a process is measured in processes of its own, ours and PyG's in turns. This is the import, and the first epoch on a graph of
Cora's size, construction of the loader included. On larger graphs it measures the construction of a loader from a ``Data`` with its first batch,
neighbour lists included, and then the first batch of another epoch. torch has one thread; loaders of larger graphs also run with one thread per core.
The peer is PyG with its preferred backend among those that are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_small import CASES, cora_like
from common import PYG as BACKENDS
from common import generated, pyg_loader, take_turns, write_results

from salientpp import NeighborLoader

FANOUTS = [15, 10, 5]
PYG = BACKENDS[:1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, nargs="+", default=[500_000, 2_400_000])
    parser.add_argument("--degree", type=float, default=43.75)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--first-epoch", nargs=3, help=argparse.SUPPRESS)  # what the child process measures
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.first_epoch:
        name, batch_size, fanouts = arguments.first_epoch
        print(first_epoch(name, int(batch_size), json.loads(fanouts)))
        return
    rows = [*imports(arguments.repeats), *first_epochs(arguments.repeats)]
    for vertices in arguments.vertices:
        rows += first_batches(vertices, arguments.degree, arguments.repeats)
    for found in rows:
        print(f"{found['what']:50} {found['loader']:22} {found['ms']:9.2f} ms  {found['cpu_ms'] or 0:9.2f} of CPU")
    write_results("start", rows, fanouts=FANOUTS)


def row(what: str, name: str, ms: float, cpu_ms: float | None = None) -> dict[str, Any]:
    return {"what": what, "loader": name, "ms": ms, "cpu_ms": cpu_ms}


def imports(repeats: int) -> list[dict[str, Any]]:
    """Measures the import of the package after torch_geometric.loader is imported."""
    code = "import time; import torch_geometric.loader; t = time.perf_counter(); import salientpp; salientpp.NeighborLoader; print(time.perf_counter() - t)"
    seconds = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(repeats + 1)]
    return [row("import, beside torch_geometric.loader", "salientpp", statistics.median(seconds[1:]) * 1e3)]


def first_epochs(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for batch_size, fanouts in CASES[:3]:
        seconds: dict[str, list[float]] = {name: [] for name in ("salientpp", *PYG)}
        for _ in range(repeats):
            for name, of_name in seconds.items():
                command = [sys.executable, __file__, "--first-epoch", name, str(batch_size), json.dumps(fanouts)]
                of_name.append(float(subprocess.check_output(command)))
        what = f"first epoch of a process, batches of {batch_size}, fanouts {fanouts}"
        rows += [row(what, name, statistics.median(of_name) * 1e3) for name, of_name in seconds.items()]
    return rows


def first_epoch(name: str, batch_size: int, fanouts: list[int]) -> float:
    """Returns the seconds of the first epoch, construction of the loader included."""
    data = cora_like(16)
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True}
    started = time.perf_counter()
    loader = (
        NeighborLoader(data, fanouts, **options) if name == "salientpp" else pyg_loader(name, data, fanouts, **options)
    )
    for _ in loader:
        pass
    return time.perf_counter() - started


def first_batches(vertices: int, degree: float, repeats: int) -> list[dict[str, Any]]:
    data = generated(vertices, degree, 128)
    options: dict[str, Any] = {"input_nodes": data.train_mask, "batch_size": 1024, "shuffle": True}
    makers: dict[str, Callable[[], Any]] = {
        "salientpp": lambda: NeighborLoader(data, FANOUTS, **options),
        **{name: lambda name=name: pyg_loader(name, data, FANOUTS, **options) for name in PYG},
    }
    size = f"{vertices:,} vertices, {data.num_edges / 1e6:.1f} M edges"
    passes = take_turns({"one pass over the edges": lambda: int(data.edge_index.sum())}, repeats)
    timings = {f"one pass over the edges (a sum), {size}": passes}
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        timings[f"loader and first batch, {threads} {'thread' if threads == 1 else 'threads'}, {size}"] = take_turns(
            {name: lambda make=make: next(iter(make())).num_nodes for name, make in makers.items()}, repeats
        )
    torch.set_num_threads(1)
    loaders = {name: make() for name, make in makers.items()}
    timings[f"first batch of an epoch, {size}"] = take_turns(
        {name: lambda loader=loader: next(iter(loader)).num_nodes for name, loader in loaders.items()}, repeats
    )
    return [
        row(what, name, of_name["seconds"]["median"] * 1e3, of_name["cpu_seconds"]["median"] * 1e3)
        for what, of_what in timings.items()
        for name, of_name in of_what.items()
    ]


if __name__ == "__main__":
    main()
