"""Measures how a batch is divided among the ranks of a host: the balance, the rows that travel, and the time. Writes results/split.json.

    python benchmarks/bench_split.py synthetic:num_vertices=200000 npz:GRAPH.npz ...

Batches of one of two hosts are drawn and divided by three owner maps: the two of `split_by`, and one at random. Nothing is trained. Times are seconds of a
single thread's own work, so that other processes disturb them little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import write_results
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput
from tqdm import tqdm

from salientpp import NeighborSampler
from salientpp.datasets import load_dataset
from salientpp.engine.drawing.owners import Expected, make_owners
from salientpp.graph.csc import Graph
from salientpp.partitioning.assign import assign_parts
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ranks.placement import Placement
from salientpp.sampling.divided_batch import shares_of
from salientpp.store.directory.given_splits import collect_splits

FANOUTS, BATCH = [15, 10, 5], 256
HOSTS, RANKS = 2, (2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--batches", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for dataset in tqdm(arguments.datasets):
        is_file = dataset.startswith("npz:")
        data = load_dataset(dataset, undirected=True) if is_file else load_dataset(dataset)
        name = Path(dataset.partition(":")[2]).stem if is_file else "generated"
        for ranks in RANKS:
            rows += [{"graph": name, "ranks": ranks, **row} for row in measure(data, ranks, arguments.batches)]
    for row in rows:
        print(row)
    write_results("split", rows, fanouts=FANOUTS, batch_size=BATCH, hosts=HOSTS, batches=arguments.batches)


def measure(data: Data, ranks: int, batches: int) -> list[dict[str, Any]]:
    """Divides batches of the first host by each owner map."""
    parts = HOSTS * ranks
    plain = Graph.from_data(data)
    train = collect_splits(data, None, data.get("y"), plain.num_vertices)["train"]
    part = assign_parts(plain, parts, seed_sets={"train": train}).assignment
    number = part.argsort(stable=True).argsort()
    graph = Graph.from_edge_index(number[data.edge_index], plain.num_vertices)
    book = PartitionBook(torch.cat([torch.zeros(1, dtype=torch.int64), part.bincount(minlength=parts).cumsum(0)]))
    seeds = number[train]
    seeds = seeds[seeds < book.range_of(ranks - 1)[1]].sort().values
    expected = Expected.of(graph, seeds, FANOUTS, BATCH * ranks)
    placement = Placement(0, parts, parts, 0, (ranks,) * HOSTS)
    generator = torch.Generator().manual_seed(0)
    maps: dict[str, Callable[[], Tensor]] = {
        "random": lambda: torch.randint(ranks, (graph.num_vertices,), generator=generator),
        "rows": lambda: make_owners("rows", graph, book, placement, expected),
        "vip": lambda: make_owners("vip", graph, book, placement, expected),
    }
    found = []
    for split_by, make in maps.items():
        owner, seconds = timed(make)
        found.append({"split_by": split_by, "seconds": seconds, **divided(graph, seeds, owner, ranks, batches)})
    return found


def divided(graph: Graph, seeds: Tensor, owner: Tensor, ranks: int, batches: int) -> dict[str, float]:
    """Draws and divides batches. Excesses are the load of the fullest rank over the mean, minus 1: over all batches, and on average in a batch."""
    sampler, generator = NeighborSampler(graph, FANOUTS), torch.Generator().manual_seed(1)
    loads = {name: torch.zeros(batches, ranks) for name in ("rows", "edges")}
    halo, times = 0, {"draw": [], "divide": []}
    for key in range(batches):
        chosen = seeds[torch.randperm(seeds.numel(), generator=generator)[: BATCH * ranks]]
        given = NodeSamplerInput(None, chosen)
        mfg, seconds = timed(lambda given=given, key=key: sampler.sample_from_nodes(given, key=key))
        times["draw"].append(seconds)
        shares, seconds = timed(lambda mfg=mfg: shares_of(mfg, owner[mfg.node], ranks))
        times["divide"].append(seconds)
        for place, share in enumerate(shares):
            loads["rows"][key, place], loads["edges"][key, place] = share.share.num_own, share.row.numel()
            halo += sum(share.share.recv_counts)
    result = {"batch_rows": float(loads["rows"].sum() / batches), "batch_edges": float(loads["edges"].sum() / batches)}
    for name, load in loads.items():
        result[f"{name}_excess"] = float(load.sum(0).max() / load.sum(0).mean()) - 1.0
        result[f"{name}_excess_of_batch"] = float((load.max(1).values / load.mean(1)).mean()) - 1.0
    result |= {f"{name}_seconds": float(torch.tensor(values).median()) for name, values in times.items()}
    return {**result, "halo": halo / float(loads["rows"].sum())}


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.thread_time()
    result = function()
    return result, time.thread_time() - begin


if __name__ == "__main__":
    main()
