"""Measures the sampler, compared with its peers. Writes results/sampler.json.

    python benchmarks/bench_sampler.py [--vertices 2400000] [--degree 43.75]

Peers, if installed: PyG's NeighborSampler with pyg-lib and torch-sparse. Figures are CPU seconds per sampled edge; samplers take turns.
"""

from __future__ import annotations

import argparse

import torch
from common import PYG, PyGSampler, generated, take_turns, write_results
from torch_geometric.sampler import NodeSamplerInput

from salientpp import ops
from salientpp.graph.csc import Graph

FANOUTS = [15, 10, 5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, nargs="+", default=[100_000, 500_000, 2_400_000])
    parser.add_argument("--degree", type=float, default=43.75, help="mean number of directed edges per vertex")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for num_vertices in arguments.vertices:
        data = generated(num_vertices, arguments.degree, num_features=1)
        graph = Graph.from_data(data)
        seeds = data.train_mask.nonzero().flatten()
        batches = [seeds[torch.randperm(seeds.numel())[: arguments.batch_size]] for _ in range(arguments.batches)]

        def ours(map_budget: int = ops.MAP_BUDGET_BYTES) -> int:
            return sum(
                # PyG's samplers also return positions of edges, and its loader turns them into the user's edge ids.
                ops.sample_neighbors(graph.indptr, graph.indices, None, batch, FANOUTS, i, False, map_budget)[2].numel()
                for i, batch in enumerate(batches)
            )

        candidates = {"salientpp": ours, "salientpp, hash map": lambda: ours(0)}
        for name in PYG:
            peer = PyGSampler(name, data, num_neighbors=FANOUTS)
            candidates[name] = lambda peer=peer: sum(
                peer.sample_from_nodes(NodeSamplerInput(input_id=None, node=batch)).row.numel() for batch in batches
            )
        for name, timing in take_turns(candidates, arguments.repeats).items():
            edges = timing.pop("last")
            rows.append(
                {
                    "vertices": num_vertices,
                    "edges": graph.num_edges,
                    "sampler": name,
                    "sampled_edges": edges,
                    "cpu_ns_per_edge": timing["cpu_seconds"]["median"] / edges * 1e9,
                    **timing,
                }
            )
            print(
                f"{num_vertices:>9,} vertices  {name:22} {rows[-1]['cpu_ns_per_edge']:8.1f} ns per sampled edge",
                flush=True,
            )
    write_results("sampler", rows, fanouts=FANOUTS, batch_size=arguments.batch_size)


if __name__ == "__main__":
    main()
