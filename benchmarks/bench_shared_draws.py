"""Measures what shared draws save and cost. Writes results/shared_draws.json.

    python benchmarks/bench_shared_draws.py [--graphs facebook_pages debian_full generated] [--data FOLDER] [--vertices 500000]

For each graph it compares independent draws, 'batch', and both with blocks. It records vertices and edges of a batch, CPU seconds to draw it, and the
number of distinct vertices of a block of batches. Real graphs lie in the folder of `SALIENTPP_TEST_DATA`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from common import generated, write_results

from salientpp import ops
from salientpp.datasets.load import load_dataset
from salientpp.graph.csc import Graph
from salientpp.sampling.schedule import batch_keys
from salientpp.sampling.stored import GraphTopology
from salientpp.sampling.topology import DrawOptions

FANOUTS = [15, 10, 5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=["facebook_pages", "debian_full", "generated"])
    parser.add_argument("--data", default=os.environ.get("SALIENTPP_TEST_DATA", "."))
    parser.add_argument("--vertices", type=int, default=500_000, help="vertices of the generated graph")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="batch size on the real graphs; the generated graph has 1,024"
    )
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.graphs:
        real = name != "generated"
        data = (
            load_dataset(f"npz:{Path(arguments.data) / name}.npz") if real else generated(arguments.vertices, 43.75, 1)
        )
        graph = Graph.from_data(data)
        batch_size = arguments.batch_size if real else 1024
        seeds = data.train_mask.nonzero().flatten()
        order = seeds[ops.permutation(seeds.numel(), 1)]
        batches = order.split(batch_size)[: arguments.block if real else 8]
        for shared, block in ((None, 1), ("batch", 1), (None, arguments.block), ("batch", arguments.block)):
            topology, options = GraphTopology(graph), DrawOptions([FANOUTS], shared=shared is not None)
            seconds = []
            for epoch in range(arguments.repeats):  # each with other draws, because a thread remembers its draws
                needed = torch.zeros(graph.num_vertices, dtype=torch.bool)
                drawn = vertices = edges = 0.0
                for index, batch in enumerate(batches):
                    begin = time.process_time()
                    out = topology.sample({None: batch}, batch_keys(3, epoch, 0, index, block).draws, options)
                    drawn += time.process_time() - begin
                    needed[out.node] = True
                    vertices, edges = vertices + out.node.numel(), edges + out.edge.numel()
                seconds.append(drawn / len(batches))
            rows.append(
                {
                    "graph": name,
                    "vertices": graph.num_vertices,
                    "edges": graph.num_edges,
                    "batch_size": batch_size,
                    "batches": len(batches),
                    "shared_draws": shared,
                    "draw_block": block,
                    "vertices_per_batch": vertices / len(batches),
                    "edges_per_batch": edges / len(batches),
                    "distinct_vertices": int(needed.sum()),
                    "cpu_ms_per_batch": sorted(1e3 * s for s in seconds)[len(seconds) // 2],
                }
            )
            print(
                f"{name:15} shared {shared!s:6} block {block:3}  {vertices / len(batches):10,.0f} vertices per batch, "
                f"{rows[-1]['distinct_vertices']:9,} distinct in {len(batches)}, {rows[-1]['cpu_ms_per_batch']:7.2f} ms",
                flush=True,
            )
    write_results("shared_draws", rows, fanouts=FANOUTS, block=arguments.block)


if __name__ == "__main__":
    main()
