"""Measures what fewer messages and later waits save on networks with a delay. Writes results/messages.json. Needs root and iproute2.

    python benchmarks/bench_messages.py [--hosts 2 4] [--delays 0.1 1 5] [--turns 7]

Hosts of one rank each are emulated by network namespaces (benchmarks/cluster.py). Links have a rate and a delay. The same epoch is loaded in three ways, in
turns:

* ``plain``: counts, ids and rows are a message each, a batch awaits them in the next tick, and gloo has its two threads.
* ``apart``: as many messages. A batch awaits them two ticks later, and gloo has as many threads as may be in use.
* ``merged``: also, the counts and ids of a tick leave in one message, as the package sends them.

Each is timed twice: batches alone, and with training of a small GraphSAGE under DDP, whose gradients cross the same links. Batches are compared.

All ranks share the cores of one machine: the network is delayed, computation is not.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from cluster import Cluster, unavailable
from common import spread, write_results
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import synthetic
from salientpp.ranks import roll
from salientpp.ranks.mail import Mail

FANOUTS, FEATURES, HIDDEN = [10, 5], 32, 32
KINDS = ["plain", "apart", "merged"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.1, 1, 5], help="milliseconds from host to host")
    parser.add_argument("--megabits-per-second", type=float, default=1000, help="rate of each link, each way")
    parser.add_argument("--vertices", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=100, help="batches of a rank in an epoch")
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    missing = unavailable()
    if missing:
        raise SystemExit(missing)
    data = synthetic(num_vertices=arguments.vertices, num_features=FEATURES)
    rows: list[dict[str, Any]] = []
    for hosts in arguments.hosts:
        with tempfile.TemporaryDirectory() as folder:
            root = str(Path(folder) / "parts")
            salientpp.partition(data, hosts, root, FANOUTS, arguments.batch_size, refine=False)
            for delay in arguments.delays:
                rate = arguments.megabits_per_second * 1e6 / 8
                with Cluster(hosts, rate, delay=delay / 1e3) as cluster:
                    by_rank = cluster.run(
                        measure, root, arguments.turns, arguments.batches, arguments.batch_size, arguments.alpha,
                        seconds=1200,
                    )  # fmt: skip
                rows += [{"hosts": hosts, "delay_ms": delay, **row} for row in by_rank[0]]
                for row in rows[-2:]:
                    times = ", ".join(f"{row[kind]['median']:.3f} s {kind}" for kind in KINDS)
                    faster = row["times_faster"]
                    print(
                        f"{hosts} hosts, {delay:g} ms (round trip {row['round_trip_ms']:.2f} ms), {row['work']:8}: {times}; merged is "
                        f"{faster['median']:.2f} times faster than plain ({faster['low']:.2f} to {faster['high']:.2f})",
                        flush=True,
                    )
        write_results(  # keeps finished rows
            "messages", rows, fanouts=FANOUTS, features=FEATURES, hidden=HIDDEN, vertices=arguments.vertices, batch_size=arguments.batch_size,
            batches=arguments.batches, alpha=arguments.alpha, megabits_per_second=arguments.megabits_per_second, turns=arguments.turns,
        )  # fmt: skip


def measure(rank: int, root: str, turns: int, batches: int, batch_size: int, alpha: float) -> list[dict[str, Any]]:
    part = salientpp.load(root)
    torch.manual_seed(0)
    model = GraphSAGE(FEATURES, HIDDEN, num_layers=len(FANOUTS), out_channels=part.num_classes)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seeds = part.split("train", rank)[: batches * batch_size]
    options: dict[str, Any] = dict(batch_size=batch_size, shuffle=True, seed=0, num_workers=1, replication_factor=alpha)
    loader = NeighborLoader(part, FANOUTS, seeds, **options)
    with patch.object(roll, "_THREADS", 2):
        plain = NeighborLoader(part, FANOUTS, seeds, **options)
    plain.engine.producer.stages.steps = [1] * len(plain.engine.producer.stages.list())
    loaders = {"plain": plain, "apart": loader, "merged": loader}
    works = ["loading", "training"]
    seconds: dict[tuple[str, str], list[float]] = {(work, kind): [] for work in works for kind in KINDS}
    figures: dict[str, dict[str, Any]] = {}
    for turn in range(turns + 1):
        for kind, loader in loaders.items():
            exchange = loader.engine.basis.source.exchange
            exchange.mail = Mail(exchange.comm, kind == "merged", exchange.buffers.empty)
            for work in works:
                loader.set_epoch(0)
                loader.reset_stats()
                dist.barrier()
                started = time.perf_counter()
                total = 0
                for batch in loader:
                    if work == "loading":
                        total += int(batch.n_id.sum()) + int(batch.edge_index.sum())
                        continue
                    out = parallel(batch.x, batch.edge_index)[: batch.batch_size]
                    optimizer.zero_grad()
                    cross_entropy(out, batch.y[: batch.batch_size]).backward()
                    optimizer.step()
                dist.barrier()
                if turn:  # the first turn is warm-up
                    seconds[work, kind].append(time.perf_counter() - started)
                elif work == "loading":
                    stats = loader.stats()
                    figures[kind] = {
                        "sum": total,
                        "bytes_sent": stats.bytes_sent,
                        "control_messages": stats.control_messages,
                        "row_messages": stats.row_messages,
                    }
    assert len({figures[kind]["sum"] for kind in KINDS}) == 1, "all kinds give the same batches"
    return [
        {
            "work": work,
            "batches": len(loader),
            "round_trip_ms": round_trip(rank) * 1e3,
            **{kind: spread(seconds[work, kind]) for kind in KINDS},
            "times_faster": spread([before / merged for before, merged in zip(seconds[work, "plain"], seconds[work, "merged"])]),
            "control_messages": {kind: figures[kind]["control_messages"] for kind in KINDS},
            "row_messages": {kind: figures[kind]["row_messages"] for kind in KINDS},
            "bytes_sent": figures["merged"]["bytes_sent"],
        }
        for work in works
    ]  # fmt: skip


def round_trip(rank: int, repeats: int = 20) -> float:
    """Returns the seconds in which a short message goes from rank 0 to rank 1 and back."""
    token = torch.zeros(1)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        for sender in (0, 1):
            if rank == sender:
                dist.send(token, 1 - sender)
            elif rank == 1 - sender:
                dist.recv(token, sender)
    seconds = (time.perf_counter() - started) / repeats
    dist.barrier()
    return seconds


if __name__ == "__main__":
    main()
