"""Measures batches as the graph grows, and memory over a long run. Writes results/growth.json and results/long.json.

    python benchmarks/bench_growth.py [--vertices 2300 ... 2400000]
    python benchmarks/bench_growth.py --long 20000

Growth: for each size and loader, a process loads the graph, notes its resident memory, makes a loader and runs whole epochs of a few batches. The cost is CPU
time per sampled edge of an epoch. Memory is the peak of resident memory above the inputs, construction included. Peers, if installed: PyG's NeighborLoader with
pyg-lib and torch-sparse. Features are one float32, so that the graph grows and not the features.

Long: N batches over many epochs, with two sampling threads. Every 500 batches it records resident memory, open descriptors and threads. Exits with status 1 if
one of them grows in the last half of the run (resident memory: by more than 1 %).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from common import PYG, generated, pyg_loader, reset_peak, resident_bytes, write_results

from salientpp import NeighborLoader

FANOUTS = [15, 10, 5]
BATCH_SIZE = 1024
EVERY = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, nargs="+", default=[2_300, 20_000, 100_000, 500_000, 2_400_000])
    parser.add_argument("--degree", type=float, default=43.75)
    parser.add_argument("--batches", type=int, default=3, help="batches per epoch")
    parser.add_argument("--repeats", type=int, default=7, help="timed epochs, after one for warm-up")
    parser.add_argument("--long", type=int, metavar="N", help="run N batches on one small graph instead")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the loader that the child process measures
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.long is not None:
        sys.exit(run_long(arguments.long))
    if arguments.one is not None:
        print(
            json.dumps(
                measure(arguments.one, arguments.vertices[0], arguments.degree, arguments.batches, arguments.repeats)
            )
        )
        return
    rows = []
    for num_vertices in arguments.vertices:
        generated(
            num_vertices, arguments.degree, 1
        )  # made here, so that no measured process keeps memory from making it
        for loader in ["salientpp", *PYG]:
            command = [
                sys.executable,
                __file__,
                "--one",
                loader,
                "--vertices",
                num_vertices,
                "--degree",
                arguments.degree,
                "--batches",
                arguments.batches,
                "--repeats",
                arguments.repeats,
            ]
            out = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            if out.returncode:
                raise RuntimeError(f"the process of {loader} with {num_vertices} vertices failed: {out.stderr}")
            rows.append(json.loads(out.stdout.splitlines()[-1]))
            row = rows[-1]
            print(
                f"{num_vertices:>9,} vertices {row['edges']:>11,} edges  {loader:22} {row['cpu_ns_per_edge']:8.1f} ns per sampled edge  "
                f"{row['peak_bytes_per_vertex']:9.1f} bytes per vertex",
                flush=True,
            )
    write_results("growth", rows, fanouts=FANOUTS, batch_size=BATCH_SIZE, degree=arguments.degree)


def measure(name: str, num_vertices: int, degree: float, batches: int, repeats: int) -> dict:
    """Measures one row, in a process that has done nothing else."""
    kind = NeighborLoader if name == "salientpp" else partial(pyg_loader, name)
    # The first batch of any graph loads code pages and thread pools. They do not count as memory of this graph.
    next(iter(kind(generated_tiny(), [2, 2], batch_size=4)))
    data = generated(num_vertices, degree, 1)
    # The epoch has exactly the batches to be timed, so no pipeline works ahead of them or delivers batches made before.
    train = data.train_mask.nonzero().flatten()
    size = min(BATCH_SIZE, train.numel())
    seeds = torch.cat([train[torch.randperm(train.numel())[:size]] for _ in range(batches)])
    reset_peak()
    inputs = resident_bytes()
    started = time.process_time()
    loader = kind(data, FANOUTS, seeds, batch_size=size)
    construction = time.process_time() - started
    costs, edges = [], []
    for turn in range(repeats + 1):
        started = time.process_time()
        sampled = sum(batch.edge_index.size(1) for batch in loader)
        if turn:
            costs.append((time.process_time() - started) / sampled * 1e9)
            edges.append(sampled)
    extra = resident_bytes(peak=True) - inputs
    return {
        "vertices": num_vertices,
        "edges": data.num_edges,
        "loader": name,
        "cpu_ns_per_edge": statistics.median(costs),
        "quartiles": statistics.quantiles(costs, n=4),
        "sampled_edges": statistics.median(edges),
        "repeats": len(costs),
        "construction_cpu_seconds": construction,
        "peak_bytes": extra,
        "peak_bytes_per_vertex": extra / num_vertices,
        "resident_bytes_per_vertex": (resident_bytes() - inputs) / num_vertices,
    }


def generated_tiny():
    from salientpp.datasets import synthetic

    return synthetic(num_vertices=100, average_degree=4.0, num_features=1, community_size=50)


def run_long(batches: int) -> int:
    data = generated(50_000, 20, 16)
    loader = NeighborLoader(data, [5, 3], data.train_mask, batch_size=64, shuffle=True, num_workers=2)
    rows, given, started = [], 0, time.perf_counter()
    while given < batches:
        for _ in loader:
            given += 1
            if given % EVERY == 0:
                rows.append(
                    {
                        "batches": given,
                        "seconds": time.perf_counter() - started,
                        "resident_bytes": resident_bytes(),
                        **handles(),
                    }
                )
            if given == batches:
                break
    half = [row for row in rows if row["batches"] >= batches / 2]
    if len(half) < 2:
        raise SystemExit(f"--long must be at least {4 * EVERY}, got {batches}")
    at = [row["batches"] for row in half]
    slope = statistics.linear_regression(at, [row["resident_bytes"] for row in half]).slope
    growth = {"resident memory": slope * (at[-1] - at[0]) / half[0]["resident_bytes"]}
    for name in ("descriptors", "threads"):
        growth[name] = half[-1][name] / half[0][name] - 1
    flat = growth["resident memory"] <= 0.01 and growth["descriptors"] <= 0 and growth["threads"] <= 0
    print(
        f"{batches:,} batches in {rows[-1]['seconds']:.0f} s; last half: {slope:+.2f} bytes per batch, "
        + ", ".join(f"{name} {value:+.2%}" for name, value in growth.items())
        + ("" if flat else ": NOT FLAT")
    )
    write_results(
        "long",
        rows,
        vertices=data.num_nodes,
        fanouts=[5, 3],
        batch_size=64,
        workers=2,
        bytes_per_batch=slope,
        growth_of_last_half=growth,
    )
    return 0 if flat else 1


def handles() -> dict[str, int]:
    threads = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Threads"))
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": int(threads.split()[1])}


if __name__ == "__main__":
    main()
