"""Measures the CPU time of each step of a batch. Writes results/batch.json.

    python benchmarks/bench_batch.py [--vertices 2400000] [--features 100]

One loader without workers runs on one thread. The time of a step is that thread's CPU time; the remainder is the loader itself, Python included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

import torch
from common import generated, settle, write_results

from salientpp import NeighborLoader

FANOUTS = [15, 10, 5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=2_400_000)
    parser.add_argument("--degree", type=float, default=43.75)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=31)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = generated(arguments.vertices, arguments.degree, arguments.features)
    loader = NeighborLoader(data, FANOUTS, data.train_mask, batch_size=arguments.batch_size, shuffle=True)
    settle()
    spent: dict[str, float] = defaultdict(float)

    def timed(function, name):
        def call(*args):
            started = time.thread_time()
            try:
                return function(*args)
            finally:
                spent[name(*args) if callable(name) else name] += time.thread_time() - started

        return call

    builder, fetch = loader.engine.producer.builder, loader.engine.producer.fetch
    loader.engine.producer.workers.draw = timed(loader.engine.producer.workers.draw, "sampling")
    fetch.look_up = timed(fetch.look_up, "look-up")
    fetch.own.take = timed(
        fetch.own.take, lambda tiers, name, plan: "gathering x" if name == "x" else "gathering labels and masks"
    )
    builder.template.build = timed(builder.template.build, "assembling")
    builder.add_batch_attributes = timed(builder.add_batch_attributes, "assembling")
    steps: dict[str, list[float]] = defaultdict(list)
    vertices, edges, given = [], [], 0
    while given < arguments.batches + 3:
        started, iterator = time.process_time(), iter(loader)
        spent.clear()
        for batch in iterator:
            total = time.process_time() - started
            given += 1
            if 3 < given <= arguments.batches + 3:
                for name in ("sampling", "look-up", "gathering x", "gathering labels and masks", "assembling"):
                    steps[name].append(spent[name])
                steps["loader and Python"].append(total - sum(spent.values()))
                steps["all"].append(total)
                vertices.append(batch.num_nodes)
                edges.append(batch.edge_index.size(1))
            elif given > arguments.batches + 3:
                break
            del batch
            started = time.process_time()
            spent.clear()
    whole = statistics.median(steps["all"])
    rows = []
    for name, seconds in steps.items():
        median = statistics.median(seconds)
        rows.append(
            {
                "step": name,
                "cpu_ns": median * 1e9,
                "share": median / whole,
                "quartiles_ns": [q * 1e9 for q in statistics.quantiles(seconds, n=4)],
            }
        )
        print(f"{name:28} {median * 1e3:8.3f} ms {median / whole:6.1%}")
    write_results(
        "batch",
        rows,
        vertices=arguments.vertices,
        edges=data.num_edges,
        features=arguments.features,
        fanouts=FANOUTS,
        batch_size=arguments.batch_size,
        repeats=arguments.batches,
        batch_vertices=statistics.median(vertices),
        batch_edges=statistics.median(edges),
    )


if __name__ == "__main__":
    main()
