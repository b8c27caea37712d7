"""Counts what sums instead of rows save. Writes results/partial.json and results/partial_copies.json.

    python benchmarks/bench_partial.py synthetic:num_vertices=200000 npz:GRAPH.npz ...
    python benchmarks/bench_partial.py --copies synthetic:num_vertices=500000,average_degree=50 --batch-size 1024

The simulation counts exactly the rows, sums and bytes that loaders with partial_aggregation fetch (``--epochs`` epochs of the training split, policy vip; METIS
with VIP weights, not refined). It also measures the cost of choosing: CPU time of one batch's plan and of drawing the batch, in one thread. With ``--copies``
it counts the rows and sums that one machine copies to its device, which holds the first β of the rows in VIP order.

Directed graphs are made symmetric, as users of sampled training commonly do.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import write_results
from tqdm import tqdm

from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.analysis.graph import MemoryGraph, open_graph
from salientpp.datasets import load_dataset
from salientpp.partitioning.options import PartitionOptions
from salientpp.progress import Progress
from salientpp.sampling.stored import GraphTopology
from salientpp.sampling.topology import DrawOptions
from salientpp.store.tiers import Tier, Tiers
from salientpp.ways.sums.moved import sums_of
from salientpp.ways.sums.plan import Wire

FANOUTS = [[25], [15, 10], [15, 10, 5]]
COPIED_FANOUTS = [[10], *FANOUTS]
ALPHAS = [0, 0.16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument(
        "--copies", action="store_true", help="count copies to a device instead of fetched rows; on one machine"
    )
    arguments = parser.parse_args()
    if arguments.copies:
        count_copies(arguments)
        return
    rows: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []
    for dataset in tqdm(arguments.datasets):
        data = load_dataset(dataset, undirected=True) if dataset.startswith("npz:") else load_dataset(dataset)
        name = Path(dataset.partition(":")[2]).stem if dataset.startswith("npz:") else "generated"
        several = [Batches(fanouts, arguments.batch_size, "train", arguments.epochs) for fanouts in FANOUTS]
        partition, row_bytes = open_graph(data, arguments.parts, several[-1])
        assert callable(partition)  # here it is a Data
        parted = partition(PartitionOptions("metis", refine=False), Progress())
        assignment = torch.empty_like(parted.order)
        assignment[parted.order] = parted.parts.owner(torch.arange(parted.parts.num_vertices))
        ways = Ways(["vip"], ALPHAS, sums=True)
        analysis = analyze(data, several, ways, parts=arguments.parts, name=name, method=assignment)
        labels = {
            "graph": name, "vertices": analysis.num_vertices, "edges": analysis.num_edges, "row_bytes": analysis.row_bytes[""]
        }  # fmt: skip
        whole = {(v.num_neighbors, v.replication_factor): v.remote_rows_per_epoch for v in analysis.of(way="cache")}
        for volume in analysis.of(way="sums"):
            summed = volume.summed
            assert summed is not None  # the way is sums
            rows_without = whole[volume.num_neighbors, volume.replication_factor]
            figures = {
                "fanouts": volume.num_neighbors,
                "replication_factor": volume.replication_factor,
                "rows_per_epoch": volume.remote_rows_per_epoch,
                "bytes_per_epoch": summed.bytes_with,
                "rows_per_part": volume.remote_rows_per_rank,
            }
            rows.append({**labels, **figures, **asdict(summed), "rows_without": rows_without})
            print(
                f"{name:16} {volume.num_neighbors!s:12} α={volume.replication_factor:<5g} rows {rows_without:12,.0f} -> {volume.remote_rows_per_epoch:12,.0f} "
                f"and {summed.sums_per_epoch:12,.0f} sums; bytes {summed.bytes_without:15,.0f} -> {summed.bytes_with:15,.0f}: {1 / summed.share:.2f}x",
                flush=True,
            )
        wire = Wire(row_bytes[None], 4)
        costs += [{**labels, **cost(parted, wire, fanouts, arguments.batch_size)} for fanouts in FANOUTS]
        for of_fanouts in costs[-len(FANOUTS) :]:
            print(of_fanouts, flush=True)
    write_results(
        "partial", rows, costs=costs, parts=arguments.parts, batch_size=arguments.batch_size, epochs=arguments.epochs
    )


def count_copies(arguments: argparse.Namespace) -> None:
    """Counts the rows that one machine copies to its device, with and without sums."""
    rows: list[dict[str, Any]] = []
    for dataset in arguments.datasets:
        data = load_dataset(dataset, undirected=True) if dataset.startswith("npz:") else load_dataset(dataset)
        for fanouts in COPIED_FANOUTS:  # each directory has its rows in its own order
            batches = Batches(fanouts, arguments.batch_size, epochs=arguments.epochs)
            analysis = analyze(data, batches, Ways(["vip"], [0], sums=True), parts=1, name=dataset)
            labels = {
                "graph": dataset,
                "vertices": analysis.num_vertices,
                "edges": analysis.num_edges,
                "row_bytes": analysis.row_bytes[""],
            }
            for copies in analysis.copies:
                rows.append({**labels, **asdict(copies)})
                print(
                    f"{dataset} {fanouts!s:12} β={copies.device_fraction:<5g} rows {copies.rows_without:12,.0f} -> {copies.rows_per_epoch:12,.0f} "
                    f"and {copies.sums_per_epoch:12,.0f} sums: {1 / copies.share:.2f}x fewer",
                    flush=True,
                )
    write_results("partial_copies", rows, batch_size=arguments.batch_size, epochs=arguments.epochs)


def cost(parted: MemoryGraph, wire: Wire, fanouts: list[int], batch_size: int, repeats: int = 5) -> dict[str, Any]:
    """Returns the median CPU seconds to draw a batch of part 0 and to choose its sums, without a cache."""
    topology, options = GraphTopology(parted.graph), DrawOptions([fanouts])
    tiers = Tiers(parted.parts, 0, Tier("host", None, {}, False, ""))
    seeds = parted.seeds[0][torch.randperm(parted.seeds[0].numel(), generator=torch.Generator().manual_seed(0))]
    seconds: list[tuple[float, float]] = []
    for key in range(repeats):
        started = time.thread_time()
        mfg = topology.sample({None: seeds[:batch_size]}, key, options)
        drawn = time.thread_time()
        sums_of(mfg, tiers, wire)
        seconds.append((drawn - started, time.thread_time() - drawn))
    draw, choose = (sorted(each)[repeats // 2] for each in zip(*seconds))
    return {"fanouts": fanouts, "draw_cpu_seconds": draw, "choose_cpu_seconds": choose, "batch_edges": mfg.row.numel()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
