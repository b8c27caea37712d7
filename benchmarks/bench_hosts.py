"""What does it save, live, that the ranks of a host share their rows, a cache and their requests? Writes results/hosts.json.

    python benchmarks/bench_hosts.py generated npz:GRAPH.npz [--hosts 2] [--ranks 2] [--rate 20e6]

Emulated hosts (benchmarks/cluster.py: root and iproute2) with several ranks each, and a loader alone, without a model, in three ways of the same memory for
cached rows: every rank by itself, one cache per host, and with that each row fetched once a round. Per epoch of a few seeds: what passed the links, by the kernel's own count,
and seconds, until the last rank had its last batch.
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
from cluster import Cluster, unavailable
from common import write_results
from tqdm import tqdm

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import load_dataset

GENERATED = "synthetic:num_vertices=200000,num_features=128"
FANOUTS, BATCH = [15, 10, 5], 64
#: An epoch takes so many of a rank's seeds, chosen at random.
SEEDS = 640
ALPHAS = [0.16, 0.32]
WAYS: dict[str, dict[str, Any]] = {
    "apart": {"ranks_per_host": 1},
    "one cache per host": {"fetch_once": False},
    "one cache, fetched once": {"fetch_once": True},
}


def received() -> int:
    """Bytes that have come over this host's link."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[0])
    raise RuntimeError("this host has no eth0")


def measure(rank: int, root: str, per_host: int, way: str, alpha: float, epochs: int) -> dict[str, Any]:
    part = salientpp.load(root)
    split = part.split("train")
    seeds = split[torch.randperm(split.numel(), generator=torch.Generator().manual_seed(rank))[:SEEDS]].sort().values
    options = {"ranks_per_host": per_host, **WAYS[way]}
    loader = NeighborLoader(
        part,
        FANOUTS,
        seeds,
        batch_size=BATCH,
        shuffle=True,
        seed=0,
        num_workers=1,
        replication_factor=alpha,
        **options,
    )
    seconds, link = [], []
    for epoch in range(1 + epochs):
        if epoch == 1:
            loader.reset_stats()
        dist.barrier()
        before, started = received(), time.perf_counter()
        for _ in loader:
            pass
        dist.barrier()
        seconds.append(time.perf_counter() - started)
        link.append(received() - before)
    stats = loader.stats()
    return {
        "seconds": seconds[1:],
        "link": link[1:],
        "fetched": stats.rows_fetched / epochs,
        "batches": stats.batches / epochs,
        "digest": int(sum(int(batch.n_id.sum()) for batch in loader)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", help="'generated' or datasets")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--rate", type=float, default=20e6, help="of a host's link, bytes per second")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    missing = unavailable()
    if missing is not None:
        raise SystemExit(missing)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, dataset in enumerate(arguments.datasets):
            data = load_dataset(
                GENERATED if dataset == "generated" else dataset,
                **({"undirected": True} if dataset.startswith("npz:") else {}),
            )
            if dataset != "generated":
                data.x = (
                    torch.arange(float(data.num_nodes)).view(-1, 1).repeat(1, 128)
                )  # as wide as the generated graph's
            root = Path(folder) / str(number)
            salientpp.partition(data, arguments.hosts * arguments.ranks, root, FANOUTS, BATCH)
            name = "generated" if dataset == "generated" else Path(dataset.partition(":")[2]).stem
            for alpha in tqdm(ALPHAS, desc=name):
                digests = set()
                for way in WAYS:
                    with Cluster(arguments.hosts, arguments.rate, arguments.ranks) as cluster:
                        of_ranks = cluster.run(
                            measure, str(root), arguments.ranks, way, alpha, arguments.epochs, seconds=1800
                        )
                    digests.add(tuple(each["digest"] for each in of_ranks))
                    seconds = [max(of_epoch) for of_epoch in zip(*(each["seconds"] for each in of_ranks))]
                    link = [sum(of_epoch) for of_epoch in zip(*(each["link"] for each in of_ranks[:: arguments.ranks]))]
                    rows.append(
                        {
                            "graph": name,
                            "hosts": arguments.hosts,
                            "ranks_per_host": arguments.ranks,
                            "bytes_per_second": arguments.rate,
                            "alpha": alpha,
                            "way": way,
                            "rows_fetched": sum(each["fetched"] for each in of_ranks),
                            "link_megabytes": round(statistics.median(link) / 1e6, 3),
                            "seconds": round(statistics.median(seconds), 3),
                            "seconds_least": round(min(seconds), 3),
                            "seconds_most": round(max(seconds), 3),
                        }
                    )
                    print(rows[-1], flush=True)
                assert len(digests) == 1, "the same batches in every way"
    write_results("hosts", rows, fanouts=FANOUTS, batch_size=BATCH, seeds_per_rank=SEEDS, epochs=arguments.epochs)


if __name__ == "__main__":
    main()
