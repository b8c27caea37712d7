"""How long does an epoch of training take, and how much of it waits for data? Writes results/epoch.json.

    python benchmarks/bench_epoch.py [--vertices 500000] [--hidden 64] [--batches 5]

GraphSAGE (PyG's SAGEConv, three layers) with Adam on the CPU: the same model and batches of the same size on our loader and on PyG's, where
one of its backends is installed. Loaders take turns; every turn is an epoch that is left after ``--batches`` batches (0: a whole
epoch), the first ones as warm-up. Waiting is the time inside ``next()``. Workers are threads here and processes in PyG; they
share the cores with the model.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import torch
from common import generated, ours_and_pygs, write_results
from torch.nn import functional
from torch_geometric.nn import GraphSAGE

FANOUTS = [15, 10, 5]
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=500_000)
    parser.add_argument("--degree", type=float, default=43.75)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=5, help="per turn, after the warm-up; 0: all of an epoch")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    data = generated(arguments.vertices, arguments.degree, arguments.features)
    rows = []
    for workers in arguments.workers:
        torch.manual_seed(0)
        model = GraphSAGE(arguments.features, arguments.hidden, num_layers=3, out_channels=int(data.y.max()) + 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        loaders = ours_and_pygs(data, FANOUTS, batch_size=arguments.batch_size, num_workers=workers)
        times = {name: [] for name in loaders}
        for _ in range(arguments.turns):
            for name, loader in loaders.items():
                times[name] += train(model, optimizer, loader, arguments.batches or None)
        for name, of_kind in times.items():
            seconds = [total for total, _ in of_kind]
            per_batch = statistics.median(seconds)
            share = sum(waiting for _, waiting in of_kind) / sum(seconds)
            rows.append(
                {
                    "loader": name,
                    "workers": workers,
                    "seconds_per_epoch": per_batch * len(loaders[name]),
                    "seconds_per_batch": per_batch,
                    "share_waiting": share,
                    "seconds_waiting_per_batch": share * statistics.mean(seconds),
                    "batches": len(seconds),
                    "quartiles": statistics.quantiles(seconds, n=4),
                }
            )
            print(
                f"{workers} workers  {name:22} {rows[-1]['seconds_per_epoch']:8.1f} s per epoch, {share:6.1%} of it waiting",
                flush=True,
            )
    write_results(
        "epoch",
        rows,
        vertices=arguments.vertices,
        edges=data.num_edges,
        features=arguments.features,
        hidden=arguments.hidden,
        layers=3,
        fanouts=FANOUTS,
        batch_size=arguments.batch_size,
        batches_per_epoch=len(loaders["salientpp"]),
    )


def train(model, optimizer, loader, batches: int | None) -> list[tuple[float, float]]:
    """(seconds, seconds waiting for data) of each batch after the warm-up."""
    times = []
    iterator = iter(loader)
    for _ in itertools.repeat(None) if batches is None else range(WARM_UP + batches):
        started = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            break
        waited = time.perf_counter() - started
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        functional.cross_entropy(out, batch.y[: batch.batch_size]).backward()
        optimizer.step()
        times.append((time.perf_counter() - started, waited))
    return times[WARM_UP:]


if __name__ == "__main__":
    main()
