"""Measures the cost of partitioners and the quality of their parts. Writes results/partition.json.

    python benchmarks/bench_partition.py [--vertices 500000] [--parts 8] [--ways metis "metis, refined" kaminpar random]

A generated graph (``salientpp.datasets.generate``, average degree 20) is memory-mapped. Each method assigns its vertices in a process of its own,
with all constraints of ``assign_parts``: vertices, in-edges and the seeds of each split. Time is wall-clock and CPU time of the call, child processes
included. Memory is the peak during the call above the resident memory before it, child processes included. All methods include rebalancing, and METIS
includes the symmetrised graph. *Predicted rows* are the rows that an epoch of all parts fetches from other parts without a cache, by vertex inclusion
probability, for fanouts 15,10,5 and batches of 1024.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from common import children, process_figures, reset_peak, resident_bytes, write_results
from large_graph import generate

from salientpp.datasets import load_dataset
from salientpp.graph.csc import Graph
from salientpp.partitioning.options import PartitionOptions
from salientpp.partitioning.workload import assign_for
from salientpp.vip.inclusion import inclusion_probability

FANOUTS, BATCH_SIZE = [15, 10, 5], 1024
#: Label -> options.
WAYS = {
    "metis, equal weights": PartitionOptions("metis", "equal", refine=False),
    "metis": PartitionOptions("metis", refine=False),
    "metis, refined": PartitionOptions("metis", refine=True),
    "kaminpar, equal weights": PartitionOptions("kaminpar", "equal", refine=False),
    "kaminpar": PartitionOptions("kaminpar", refine=False),
    "kaminpar, refined": PartitionOptions("kaminpar", refine=True),
    "random": PartitionOptions("random"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, nargs="+", default=[100_000, 500_000])
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the way that the child process measures
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
            for way in arguments.ways:
                command = [__file__, "--one", way, "--graph", str(folder / "g"), "--parts", str(arguments.parts)]
                done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{way} failed: {done.stderr}")
                rows.append({"vertices": vertices, "way": way, **json.loads(done.stdout.splitlines()[-1])})
                print(rows[-1], flush=True)
        finally:
            shutil.rmtree(folder)
    write_results("partition", rows, parts=arguments.parts)


def measure(way: str, root: str, num_parts: int) -> dict:
    data = load_dataset(f"converted:{root}")
    graph = Graph.from_data(data)
    seed_sets = {split: data[f"{split}_mask"].nonzero().flatten() for split in ("train", "val", "test")}
    train = seed_sets["train"]
    reset_peak()
    before, started, cpu = resident_bytes(), time.perf_counter(), process_figures()["cpu_seconds"]
    with Watch() as watch:
        found = assign_for(
            graph, num_parts, WAYS[way], splits=seed_sets, seeds=train, num_neighbors=FANOUTS, batch_size=BATCH_SIZE
        )
    figures = {
        "edges": graph.num_edges,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": process_figures()["cpu_seconds"] - cpu,
        # The system records the peak of this process alone. METIS blocks all other threads, so none can watch.
        "peak_bytes": max(watch.peak_bytes, resident_bytes(peak=True)) - before,
        "edge_cut_fraction": found.edge_cut_fraction,
        "largest_load": max(found.balance.values()),
    }
    own = [train[found.assignment[train] == part] for part in range(num_parts)]
    vip = inclusion_probability(graph, own, FANOUTS, BATCH_SIZE)
    rows = (float(vip[part][found.assignment != part].double().sum()) for part in range(num_parts))
    return figures | {"predicted_rows": sum(-(-len(seeds) // BATCH_SIZE) * row for seeds, row in zip(own, rows))}


class Watch:
    """Peak resident memory of this process and its children, together, during the ``with`` block."""

    def __enter__(self) -> Watch:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            self.peak_bytes = max(
                self.peak_bytes, sum(process_figures(pid)["resident_bytes"] for pid in ("self", *children()))
            )

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


if __name__ == "__main__":
    main()
