"""Measures what a shared cache per host saves over a network. Writes results/hosts.json. Needs root and iproute2.

    python benchmarks/bench_hosts.py synthetic:num_vertices=200000 npz:GRAPH.npz ...

It emulates 2 hosts of 2 ranks by network namespaces (benchmarks/cluster.py) with links of a set rate. Ranks of one host do not use the link. The same
batches are drawn in turns with private caches, and with one cache of the same memory per host. An epoch is timed twice: batches alone, and with training
of a GraphSAGE. Bytes are counted on the hosts' links, with all headers. With private caches, rows from other hosts are counted by simulation,
because loaders also count rows from other ranks of the host.

All ranks share the cores of one machine: the network is slowed, computation is not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import Cluster, bytes_received, unavailable
from common import write_results
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.datasets import load_dataset

HOSTS, PER_HOST = 2, 2
FANOUTS, BATCH = [15, 10, 5], 64
ALPHAS = [0.0, 0.16, 0.32]
WAYS: dict[str, dict[str, Any]] = {
    "private": {"ranks_per_host": 1},
    "shared": {"ranks_per_host": PER_HOST},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--megabytes-per-second", type=float, default=25, help="MB/s of each link, each way")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument(
        "--seed-fraction", type=float, default=1.0, help="share of the training vertices that are seeds"
    )
    arguments = parser.parse_args()
    missing = unavailable()
    if missing:
        raise SystemExit(missing)
    rows = []
    for dataset in arguments.datasets:
        data = load_dataset(dataset, undirected=True) if dataset.startswith("npz:") else load_dataset(dataset)
        name = Path(dataset.partition(":")[2]).stem if dataset.startswith("npz:") else "generated"
        if arguments.seed_fraction < 1:
            data.train_mask &= (
                torch.rand(data.num_nodes, generator=torch.Generator().manual_seed(0)) < arguments.seed_fraction
            )
        with tempfile.TemporaryDirectory() as folder:
            part = salientpp.partition(data, HOSTS * PER_HOST, Path(folder) / "parts", FANOUTS, BATCH, refine=False)
            counted = analyze(part, Batches(epochs=1), Ways(["vip"], ALPHAS), ranks_per_host=PER_HOST)
            private = {
                volume.replication_factor: volume.remote_rows_per_epoch for volume in counted.of(way="private cache")
            }
            with Cluster(HOSTS, arguments.megabytes_per_second * 1e6, PER_HOST) as cluster:
                by_rank = cluster.run(measure, str(part.root), arguments.turns, arguments.hidden, seconds=3000)
        for figures in zip(*by_rank, strict=True):
            first = figures[0]
            fetched = sum(of_rank["fetched"] for of_rank in figures)
            row = {
                "graph": name,
                "alpha": first["alpha"],
                "way": first["way"],
                "rows_from_other_hosts": private[first["alpha"]] if first["way"] == "private" else fetched,
                "megabytes": sum(of_rank["bytes"] for of_rank in figures[::PER_HOST]) / 1e6,
                "seconds_fetching": max(of_rank["fetching"] for of_rank in figures),
                "seconds_training": max(of_rank["training"] for of_rank in figures),
            }
            rows.append(row)
            print(
                f"{name:16} α = {row['alpha']:4} {row['way']:8} {row['rows_from_other_hosts']:12,.0f} rows {row['megabytes']:8.1f} MB "
                f"{row['seconds_fetching']:6.2f} s fetching {row['seconds_training']:6.2f} s training",
                flush=True,
            )
    write_results(
        "hosts",
        rows,
        hosts=HOSTS,
        ranks_per_host=PER_HOST,
        fanouts=FANOUTS,
        batch_size=BATCH,
        megabytes_per_second=arguments.megabytes_per_second,
        seed_fraction=arguments.seed_fraction,
        turns=arguments.turns,
        hidden=arguments.hidden,
    )


def measure(rank: int, root: str, turns: int, hidden: int) -> list[dict[str, Any]]:
    part = salientpp.load(root)
    torch.manual_seed(0)
    features = part.num_features
    model = GraphSAGE(features, hidden, num_layers=len(FANOUTS), out_channels=part.num_classes)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    found = []
    for alpha in ALPHAS:
        loaders = {
            way: NeighborLoader(
                part,
                FANOUTS,
                "train",
                batch_size=BATCH,
                shuffle=True,
                seed=0,
                num_workers=1,
                dtype=torch.float32,
                replication_factor=alpha,
                **options,
            )
            for way, options in WAYS.items()
        }
        figures: dict[str, dict[str, list[float]]] = {
            way: {"fetching": [], "training": [], "bytes": [], "fetched": []} for way in WAYS
        }
        for turn in range(turns + 1):
            for way, loader in loaders.items():
                loader.set_epoch(0)  # the epoch that the analysis counts
                loader.reset_stats()
                dist.barrier()
                before, started = bytes_received(), time.perf_counter()
                for _ in loader:
                    pass
                fetched = loader.stats().rows_remote
                dist.barrier()
                seconds, received = time.perf_counter() - started, bytes_received() - before
                loader.set_epoch(0)
                dist.barrier()
                started = time.perf_counter()
                for batch in loader:
                    loss = torch.nn.functional.cross_entropy(
                        parallel(batch.x, batch.edge_index)[: batch.batch_size], batch.y
                    )
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                dist.barrier()
                if turn:  # the first turn is warm-up
                    taken = figures[way]
                    taken["fetching"].append(seconds)
                    taken["training"].append(time.perf_counter() - started)
                    taken["bytes"].append(received)
                    taken["fetched"].append(fetched)
        found += [
            {"alpha": alpha, "way": way, **{name: statistics.median(values) for name, values in taken.items()}}
            for way, taken in figures.items()
        ]
    return found


if __name__ == "__main__":
    main()
