"""Measures inclusion probabilities, compared with torch formulations. Writes results/vip.json.

    python benchmarks/bench_vip.py [--vertices 2400000] [--parts 8]

Peers compute the same recurrence in float32, part by part, in three ways. The first is the paper's formula as it stands, with a factor (``log1p``,
``scatter_add``) per edge. The second goes edge by edge with one logarithm per vertex, which all its edges share. The third is a product of torch's
CSR matrix with these logarithms. Figures are ns per edge and hop, for all parts.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from common import generated, reset_peak, resident_bytes, take_turns, write_results

from salientpp import inclusion_probability
from salientpp.graph.csc import Graph

FANOUTS = [15, 10, 5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=2_400_000)
    parser.add_argument("--degree", type=float, default=43.75)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--peer-parts", type=int, default=1, help="number of parts that the peers compute; their time is scaled up"
    )
    arguments = parser.parse_args()
    data = generated(arguments.vertices, arguments.degree, num_features=1)
    graph = Graph.from_data(data)
    seeds = data.train_mask.nonzero().flatten()
    del data
    seed_sets = list(seeds[torch.randperm(seeds.numel())].tensor_split(arguments.parts))
    transposed = graph.transpose()
    rows = []

    # Code that the first call reads from disk does not count as memory of this graph.
    inclusion_probability(Graph.from_edge_index(torch.tensor([[0], [1]])), torch.tensor([0]), FANOUTS, 1)
    reset_peak()
    before = resident_bytes()
    inclusion_probability(graph, seed_sets, FANOUTS, arguments.batch_size)
    extra = resident_bytes(peak=True) - before
    print(f"peak memory above the graph: {extra / graph.num_vertices / arguments.parts:.2f} bytes per vertex and part")

    target = torch.repeat_interleave(torch.arange(graph.num_vertices), graph.in_degree())
    source = graph.indices.long()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrix = torch.sparse_csr_tensor(
            transposed.indptr,
            transposed.indices.long(),
            torch.ones(graph.num_edges),
            (graph.num_vertices, graph.num_vertices),
        )
    degree = graph.in_degree().clamp(min=1).float()

    def recurrence(seeds: torch.Tensor, log_product) -> torch.Tensor:
        reached = torch.zeros(graph.num_vertices)
        reached[seeds] = min(1.0, arguments.batch_size / seeds.numel())
        frontier, included = reached, torch.zeros(graph.num_vertices)
        for fanout in FANOUTS:
            frontier = (1 - torch.exp(log_product(fanout, frontier))) * (1 - reached).clamp(min=0)
            reached, included = reached + frontier, included + frontier
        return included

    def log_miss(fanout: int, frontier: torch.Tensor, degree: torch.Tensor) -> torch.Tensor:
        return torch.log1p(-((fanout / degree).clamp(max=1.0) * frontier).clamp(max=1 - 1e-7))

    def formula(fanout: int, frontier: torch.Tensor) -> torch.Tensor:
        return torch.zeros(graph.num_vertices).scatter_add_(
            0, source, log_miss(fanout, frontier[target], degree[target])
        )

    def edge_wise(fanout: int, frontier: torch.Tensor) -> torch.Tensor:
        return torch.zeros(graph.num_vertices).scatter_add_(0, source, log_miss(fanout, frontier, degree)[target])

    def product(fanout: int, frontier: torch.Tensor) -> torch.Tensor:
        return matrix @ log_miss(fanout, frontier, degree)

    peers = {
        "torch, the formula per edge": formula,
        "torch, one logarithm per vertex": edge_wise,
        "torch.sparse CSR": product,
    }
    for threads in (1, 2):
        torch.set_num_threads(threads)
        candidates = {"salientpp": lambda: inclusion_probability(graph, seed_sets, FANOUTS, arguments.batch_size)}
        for name, log_product in peers.items():
            candidates[name] = lambda f=log_product: [recurrence(s, f) for s in seed_sets[: arguments.peer_parts]]
        for name, timing in take_turns(candidates, arguments.repeats).items():
            timing.pop("last")
            scale = 1 if name == "salientpp" else arguments.parts / arguments.peer_parts
            seconds = timing["seconds"]["median"] * scale
            ns = seconds / graph.num_edges / len(FANOUTS) * 1e9
            rows.append(
                {"vip": name, "threads": threads, "seconds": seconds, "ns_per_edge_and_hop": ns, "timing": timing}
            )
            print(
                f"{threads} threads  {name:31} {seconds:8.2f} s  {ns:7.2f} ns per edge and hop, {arguments.parts} parts",
                flush=True,
            )
    write_results(
        "vip",
        rows,
        vertices=graph.num_vertices,
        edges=graph.num_edges,
        parts=arguments.parts,
        extra_bytes_per_vertex_and_part=extra / graph.num_vertices / arguments.parts,
    )


if __name__ == "__main__":
    main()
