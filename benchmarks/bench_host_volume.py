"""Counts the rows that ranks of a host save by sharing their rows and a cache. Writes results/host_volume.json.

    python benchmarks/bench_host_volume.py synthetic:num_vertices=400000 npz:GRAPH.npz ...

The simulation counts exactly the rows that a run fetches. It compares three things:

* Rows from other hosts per epoch with a private cache for each rank, and with one cache of the same memory per host.
* 16 parts joined to 8, 4 and 2 ranks, compared with directories that have one part per rank.
* A second level of METIS, which cuts the part of each host once more for its ranks, compared with ranks that split the seeds of their host's part.

Directed graphs are made symmetric, as users of sampled training commonly do.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import write_results
from torch import Tensor
from torch_geometric.data import Data
from tqdm import tqdm

from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.analysis.result import Analysis, Volume
from salientpp.datasets import load_dataset
from salientpp.graph.csc import Graph
from salientpp.partitioning.options import PartitionOptions
from salientpp.partitioning.workload import assign_for
from salientpp.store.directory.given_splits import collect_splits

FANOUTS, BATCH = [15, 10, 5], 64
ALPHAS = [0, 0.16, 0.32]
HOSTS = [(2, 2), (2, 4), (8, 4)]  # number of hosts, ranks per host
STORED, JOINED = 16, (8, 4, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=BATCH)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dataset in tqdm(arguments.datasets):
        data = load_dataset(dataset, undirected=True) if dataset.startswith("npz:") else load_dataset(dataset)
        name = Path(dataset.partition(":")[2]).stem if dataset.startswith("npz:") else "generated"
        batches = Batches(FANOUTS, arguments.batch_size, epochs=arguments.epochs)
        options: dict[str, Any] = dict(batches=batches, ways=Ways(["vip"], ALPHAS), name=name)
        for hosts, per_host in HOSTS:
            ranks = hosts * per_host
            cut = assignment(data, ranks, arguments.batch_size)
            flat = analyze(data, parts=ranks, ranks_per_host=per_host, method=cut, **options)
            rows += figures("hosts", flat, hosts=hosts, per_host=per_host)
            show(flat, f"{hosts} x {per_host}")
            # One part per host: its ranks split its seeds, or METIS cuts it again.
            top = assignment(data, hosts, arguments.batch_size)
            shared = analyze(data, parts=hosts, ranks=ranks, ranks_per_host=per_host, method=top, **options)
            nested = second_level(data, top, hosts, per_host, arguments.batch_size)
            two = analyze(data, parts=ranks, ranks_per_host=per_host, method=nested, **options)
            rows += figures("a part per host, seeds split", shared, hosts=hosts, per_host=per_host)
            rows += figures("a part per host, cut again", two, hosts=hosts, per_host=per_host)
            show(shared, "  seeds split")
            show(two, "  cut again")
        stored = assignment(data, STORED, arguments.batch_size)
        for number in JOINED:
            joined = analyze(data, parts=STORED, ranks=number, method=stored, **options)
            own = analyze(data, parts=number, method=assignment(data, number, arguments.batch_size), **options)
            rows += figures("16 parts joined", joined, ranks=number) + figures("cut into as many", own, ranks=number)
            show(joined, f"{STORED} parts on {number} ranks")
            show(own, f"{number} parts")
    write_results("host_volume", rows, fanouts=FANOUTS, batch_size=arguments.batch_size, epochs=arguments.epochs)


def assignment(data: Data, parts: int, batch_size: int) -> Tensor:
    """Assigns vertices by METIS with VIP weights, without refinement. Returns int64 [N]."""
    graph = Graph.from_data(data)
    splits = collect_splits(data, None, data.get("y"), graph.num_vertices)
    return assign_for(
        graph,
        parts,
        PartitionOptions("metis", refine=False),
        splits=splits,
        seeds=splits["train"],
        num_neighbors=FANOUTS,
        batch_size=batch_size,
    ).assignment


def second_level(data: Data, top: Tensor, hosts: int, per_host: int, batch_size: int) -> Tensor:
    """Cuts each of the ``hosts`` parts into ``per_host`` pieces. Returns int64 [N]; pieces of a host have consecutive numbers."""
    nested = torch.empty_like(top)
    for host in range(hosts):
        ids = (top == host).nonzero().flatten()
        inside = data.subgraph(ids)
        nested[ids] = host * per_host + assignment(inside, per_host, batch_size)
    return nested


def figures(what: str, analysis: Analysis, **sizes: int) -> list[dict[str, Any]]:
    return [
        {
            "graph": analysis.dataset,
            "what": what,
            **sizes,
            "alpha": shared.replication_factor,
            "private_rows": private.remote_rows_per_epoch,
            "shared_rows": shared.remote_rows_per_epoch,
            "predicted_shared_rows": shared.predicted_rows_per_epoch,
        }
        for shared, private in both(analysis)
    ]


def both(analysis: Analysis) -> list[tuple[Volume, Volume]]:
    """Pairs the counts with one cache per host and with private caches. For hosts with one rank both are the same."""
    shared = analysis.of(way="cache")
    return list(zip(shared, analysis.of(way="private cache") or shared))


def show(analysis: Analysis, what: str) -> None:
    print(
        f"{analysis.dataset:16} {what:24}"
        + "".join(
            f" | α={shared.replication_factor:g}: private {private.rows or 0:,.0f} shared {shared.rows or 0:,.0f}"
            for shared, private in both(analysis)
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
