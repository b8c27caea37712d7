"""Measures the rows that refinement by VIP saves. Writes results/refine.json.

    python benchmarks/bench_refine.py npz:GRAPH.npz ... [--parts 4 8] [--batch-size 256] [--epochs 2]

Directed graphs are made symmetric. Rows are the rows that an epoch of all parts fetches from other parts, with a cache of the rows that VIP ranks highest. They
are predicted by VIP and counted on sampled batches, for fanouts 15,10,5. CPU seconds include the whole assignment and its child processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import process_figures, write_results

from salientpp.datasets import load_dataset
from salientpp.graph.csc import Graph
from salientpp.partitioning.options import PartitionOptions
from salientpp.partitioning.workload import assign_for
from salientpp.store.directory.given_splits import collect_splits
from salientpp.vip.accesses import count_accesses, shuffled_batches
from salientpp.vip.inclusion import inclusion_probability

FANOUTS, ALPHAS = [15, 10, 5], [0, 0.16, 0.32]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--methods", nargs="+", default=["metis", "kaminpar"])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # on one thread KaMinPar's parts are the same in every run
    rows: list[dict[str, Any]] = []
    for dataset in arguments.datasets:
        is_file = dataset.startswith("npz:")
        data = load_dataset(dataset, undirected=True) if is_file else load_dataset(dataset)
        graph = Graph.from_data(data)
        splits = collect_splits(data, None, data.get("y"), graph.num_vertices)
        for parts in arguments.parts:
            for method in arguments.methods:
                for refine in (False, True):
                    started = process_figures()["cpu_seconds"]
                    found = assign_for(
                        graph, parts, PartitionOptions(method, refine=refine),
                        splits=splits, seeds=splits["train"], num_neighbors=FANOUTS, batch_size=arguments.batch_size
                    )  # fmt: skip
                    rows.append(
                        {
                            "dataset": Path(dataset.partition(":")[2]).stem if is_file else dataset,
                            "vertices": graph.num_vertices,
                            "parts": parts,
                            "method": method,
                            "refine": refine,
                            "cpu_seconds": process_figures()["cpu_seconds"] - started,
                            "edge_cut_fraction": found.edge_cut_fraction,
                            "largest_load": max(found.balance.values()),
                            **rows_of(graph, found.assignment, parts, splits["train"], arguments),
                        }
                    )
                    print(rows[-1], flush=True)
    write_results("refine", rows, alphas=ALPHAS, batch_size=arguments.batch_size, epochs=arguments.epochs)


def rows_of(
    graph: Graph, assignment: torch.Tensor, parts: int, seeds: torch.Tensor, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Returns predicted and counted rows of an epoch, for each replication factor."""
    own = [seeds[assignment[seeds] == part] for part in range(parts)]
    vip = inclusion_probability(graph, own, FANOUTS, arguments.batch_size)
    predicted, counted = [0.0] * len(ALPHAS), [0.0] * len(ALPHAS)
    for part, ids in enumerate(own):
        batches = shuffled_batches(ids, arguments.batch_size, part, arguments.epochs)
        accesses = count_accesses(graph, batches, FANOUTS)
        remote = (assignment != part).nonzero().flatten()
        ranked = remote[torch.sort(vip[part][remote], descending=True, stable=True).indices]
        for i, alpha in enumerate(ALPHAS):
            left = ranked[int(alpha * graph.num_vertices / parts) :]
            predicted[i] += max(1.0, ids.numel() / arguments.batch_size) * float(vip[part][left].double().sum())
            counted[i] += float(accesses[left].sum()) / arguments.epochs
    return {"predicted_rows": predicted, "counted_rows": counted}


if __name__ == "__main__":
    main()
