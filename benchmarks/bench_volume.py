"""What do cache policies leave to fetch, on which graphs, against which oracle? Writes results/volume.json.

    python benchmarks/bench_volume.py synthetic npz:GRAPH.npz ...

Directed graphs are made symmetric, as users of sampled training commonly do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import write_results
from torch import Tensor
from tqdm import tqdm

from salientpp.analysis.volume import analyze
from salientpp.datasets import load_dataset

FANOUTS = [[15, 10, 5], [20, 20, 20], [5, 5, 5]]
ALPHAS = [0, 0.01, 0.05, 0.1, 0.16, 0.2, 0.5, 1]
POLICIES = ["vip", "vip-hop", "degree", "halo", "wpr", "paths", "simulation", "random", "oracle"]


#: Workloads: (name, share of the vertices that are seeds or None for the training split, batch size). A small, concentrated seed
#: set separates policies; with many seeds and large batches everything is accessed and they nearly tie.
WORKLOADS = [("train", None, 256), ("concentrated", 0.01, 32)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    rows, partitions = [], []
    plan = [
        (dataset, parts, workload, method)
        for dataset in arguments.datasets
        for parts in arguments.parts
        for workload in WORKLOADS
        for method in ("metis-vip", "metis")
    ]
    for dataset, parts, (workload, share, batch_size), method in tqdm(plan):
        data = load_dataset(dataset, undirected=True) if dataset.startswith("npz:") else load_dataset(dataset)
        name = Path(dataset.partition(":")[2]).stem if dataset.startswith("npz:") else dataset
        if share is not None:
            data.train_mask = first_seeds(data.train_mask, int(share * data.num_nodes))
        analysis = analyze(
            data,
            parts,
            name=name,
            method=method,
            fanouts=FANOUTS,
            batch_size=batch_size,
            replication_factors=ALPHAS,
            policies=POLICIES if method == "metis-vip" else ["vip"],
            epochs=arguments.epochs,
        ).to_dict()
        labels = {"dataset": name, "parts": parts, "workload": workload, "batch_size": batch_size}
        facts = {key: analysis[key] for key in ("edge_cut_fraction", "balance", "rows_without_cache")}
        own = [result for result in analysis["results"] if result["policy"] == "vip"]
        left = {f"{r['fanouts']} α={r['replication_factor']}": r["remote_rows_per_epoch"] for r in own}
        partitions.append({**labels, "method": method, **facts, "vip_rows": left})
        if method == "metis-vip":
            rows += [{**labels, **result} for result in analysis["results"]]
    write_results("volume", rows, partitions=partitions, epochs=arguments.epochs)


def first_seeds(mask: Tensor, count: int) -> Tensor:
    """A mask of ``count`` of the seeds, chosen at random."""
    chosen = mask.nonzero().flatten()
    chosen = chosen[torch.randperm(chosen.numel(), generator=torch.Generator().manual_seed(0))[:count]]
    return torch.zeros_like(mask).index_fill_(0, chosen, True)


if __name__ == "__main__":
    main()
