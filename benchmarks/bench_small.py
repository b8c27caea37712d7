"""Measures a batch of a small graph, where the fixed cost of a batch counts most. Writes results/small.json.

    python benchmarks/bench_small.py [--workers 0 2]

The graph has Cora's size: 2,708 vertices and about 10,000 edges. It has few float32 features, or Cora's 1,433, which every loader copies at the speed of the
memory. Epochs cover all vertices, and loaders take turns. Figures are wall and CPU time per batch, worker processes included. Peers, if installed: PyG's
NeighborLoader with pyg-lib and torch-sparse.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch
from bench_loader import cpu_seconds
from common import ours_and_pygs, write_results
from torch_geometric.data import Data

CASES = [(32, [10, 10]), (256, [10, 10]), (1024, [15, 10, 5]), (32, [5])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, nargs="+", default=[16, 1433])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        {"features": features, "workers": workers, "batch_size": batch_size, "fanouts": fanouts, **of_loader}
        for features in arguments.features
        for workers in arguments.workers
        for batch_size, fanouts in CASES
        for of_loader in compare(cora_like(features), batch_size, fanouts, workers, arguments.repeats)
    ]
    data = cora_like(1)
    write_results("small", rows, vertices=data.num_nodes, edges=data.num_edges)


def compare(data: Data, batch_size: int, fanouts: list[int], workers: int, repeats: int) -> list[dict]:
    """Returns a row for each loader."""
    options = {"persistent_workers": workers > 0, "num_workers": workers}
    loaders = ours_and_pygs(data, fanouts, batch_size=batch_size, input_nodes=None, **options)
    # If an epoch has few batches, several epochs form a turn.
    epochs = max(1, 50 * batch_size // data.num_nodes)
    times = {name: [] for name in loaders}
    for turn in range(repeats + 1):
        for name in loaders:
            of_turn = time_epochs(loaders[name], epochs)
            if turn:
                times[name].append(of_turn)
    loaders.clear()
    gc.collect()  # otherwise the workers of a later loader inherit these and complain
    rows = []
    for name, of_loader in times.items():
        wall, cpu = (statistics.median(values) for values in zip(*of_loader))
        rows.append(
            {"loader": name, "us_per_batch": wall * 1e6, "cpu_us_per_batch": cpu * 1e6, "turns": len(of_loader)}
        )
        print(
            f"{data.num_node_features:5} features  {workers} workers  batch {batch_size:5} {fanouts!s:12} {name:22} {wall * 1e6:8.0f} us  "
            f"{cpu * 1e6:8.0f} us of CPU",
            flush=True,
        )
    return rows


def cora_like(num_features: int) -> Data:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(2708, (2, 5278), generator=generator)
    data = Data(edge_index=torch.cat([edge_index, edge_index.flip(0)], dim=1), num_nodes=2708)
    data.x = torch.randn(2708, num_features, generator=generator)
    data.y = torch.randint(7, (2708,), generator=generator)
    data.train_mask = torch.rand(2708, generator=generator) < 0.05
    return data


def time_epochs(loader, epochs: int) -> tuple[float, float]:
    """Returns wall and CPU seconds per batch."""
    batches = 0
    started, cpu = time.perf_counter(), cpu_seconds()
    for _ in range(epochs):
        batches += sum(1 for _ in loader)
    return (time.perf_counter() - started) / batches, (cpu_seconds() - cpu) / batches


if __name__ == "__main__":
    main()
