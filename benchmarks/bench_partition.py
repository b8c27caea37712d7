"""What do partitioners cost, and how good are their parts? Writes results/partition.json.

    python benchmarks/bench_partition.py [--vertices 1000000] [--parts 8] [--methods metis kaminpar random]

A generated graph (``salientpp.datasets.generate``, average degree 20) is mapped, and each method assigns its vertices in a process of its own, with all
constraints of ``assign_parts``: vertices, in-edges and the seeds of each split. Time is that of the call, on the clock and of the CPU; memory is what the
call took at most beside what was resident before (VmHWM less VmRSS), in which all methods have the symmetrised graph and the rebalancing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import reset_peak, resident_bytes, write_results

from salientpp.datasets import generate, load_dataset
from salientpp.graph.csc import Graph
from salientpp.plan.partition import assign_parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, nargs="+", default=[100_000, 500_000])
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--methods", nargs="+", default=["metis", "kaminpar", "random"])
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the method, in the process of its own
    parser.add_argument("--graph", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.graph, arguments.parts)))
        return
    rows = []
    for vertices in arguments.vertices:
        folder = Path(tempfile.mkdtemp(prefix="salientpp-partition-"))
        try:
            generate(folder / "g", num_vertices=vertices, num_features=1)
            for method in arguments.methods:
                command = [__file__, "--one", method, "--graph", str(folder / "g"), "--parts", str(arguments.parts)]
                done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{method} failed: {done.stderr}")
                rows.append({"vertices": vertices, "method": method, **json.loads(done.stdout.splitlines()[-1])})
                print(rows[-1], flush=True)
        finally:
            shutil.rmtree(folder)
    write_results("partition", rows, parts=arguments.parts)


def measure(method: str, root: str, num_parts: int) -> dict:
    data = load_dataset(f"converted:{root}")
    graph = Graph.from_data(data)
    seed_sets = {split: data[f"{split}_mask"].nonzero().flatten() for split in ("train", "val", "test")}
    reset_peak()
    before, started, cpu = resident_bytes(), time.perf_counter(), time.process_time()
    found = assign_parts(graph, num_parts, method=method, seed_sets=seed_sets)
    return {
        "edges": graph.num_edges,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": resident_bytes(peak=True) - before,
        "edge_cut_fraction": found.edge_cut_fraction,
        "largest_load": max(found.balance.values()),
    }


if __name__ == "__main__":
    main()
