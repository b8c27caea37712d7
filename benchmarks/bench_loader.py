"""Measures the loader's batches per second, compared with PyG's. Writes results/loader.json.

    python benchmarks/bench_loader.py [--vertices 500000 2400000] [--features 128]

A batch is complete: features, labels, ids, ``Data``. Peers, if installed: PyG's NeighborLoader with pyg-lib and torch-sparse. Loaders take turns; the first
batches of each are warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import psutil
import torch
from common import generated, ours_and_pygs, write_results
from torch_geometric.data import Data

FANOUTS = [15, 10, 5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, nargs="+", default=[500_000, 2_400_000])
    parser.add_argument("--degree", type=float, default=43.75)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    arguments = parser.parse_args()
    rows = [
        of_loader
        for vertices in arguments.vertices
        for of_loader in compare(generated(vertices, arguments.degree, arguments.features), arguments)
    ]
    write_results("loader", rows, features=arguments.features, fanouts=FANOUTS, batch_size=arguments.batch_size)


def compare(data: Data, arguments: argparse.Namespace) -> list[dict]:
    """Returns a row for each loader and number of workers."""
    rows = []
    for workers in arguments.workers:
        torch.set_num_threads(max(1, workers))
        loaders = ours_and_pygs(data, FANOUTS, batch_size=arguments.batch_size, num_workers=workers)
        timings = {name: [] for name in loaders}
        for _ in range(arguments.repeats):
            for name, loader in loaders.items():
                timings[name].append(time_batches(loader, arguments.batches))
        for name, of_kind in timings.items():
            wall, cpu = (statistics.median(values) for values in zip(*of_kind))
            rows.append(
                {
                    "vertices": data.num_nodes,
                    "edges": data.num_edges,
                    "loader": name,
                    "workers": workers,
                    "batches_per_second": 1 / wall,
                    "cpu_seconds_per_batch": cpu,
                    "seconds_per_batch": sorted(w for w, _ in of_kind),
                }
            )
            print(
                f"{data.num_nodes:>9,} vertices  {workers} workers  {name:22} {1 / wall:7.2f} batches/s  {cpu:.4f} CPU s per batch",
                flush=True,
            )
    return rows


def time_batches(loader, count: int) -> tuple[float, float]:
    """Returns wall and CPU seconds per batch, worker processes included, once the loader is running."""
    iterator = iter(loader)
    for _ in itertools.islice(iterator, 2):
        pass
    started, cpu = time.perf_counter(), cpu_seconds()
    taken = sum(1 for _ in itertools.islice(iterator, count))
    return (time.perf_counter() - started) / taken, (cpu_seconds() - cpu) / taken


def cpu_seconds() -> float:
    """CPU seconds of this process and its living children."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(t.user + t.system for t in times)


if __name__ == "__main__":
    main()
