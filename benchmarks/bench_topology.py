"""Measures what a topology in parts costs and saves, compared with a topology on every host. Writes results/topology.json.
Needs root and iproute2.

    python benchmarks/bench_topology.py [--hosts 4 8] [--links 20:1 100:0.1 100:1 100:5] [--turns 5]

Hosts of one rank each are emulated by network namespaces (benchmarks/cluster.py), with links of a rate and a delay. One partition of a generated graph is
written in both forms. A loader over each form gives the same batches, in turns: batches alone, and with training of a trimmed GraphSAGE under DDP, whose
gradients cross the same links. Sums over all batches are compared.

CPU seconds count all threads of a rank's process, and are means over the ranks. The ratio is the median over turns of the ratio in one
turn.

All ranks share the cores of one machine: the network is delayed, computation is not. So CPU seconds of the ranks add up where they would not on hosts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from cluster import Cluster, unavailable
from common import spread, train, write_results
from mapped import resident_lists
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import synthetic

FANOUTS, FEATURES = [15, 10, 5], 128
FORMS, WORKS = ("whole", "parts"), ("loading", "training")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8])
    parser.add_argument(
        "--links",
        nargs="*",
        default=["20:1", "100:0.1", "100:1", "100:5"],
        help="MB/s, milliseconds to a host, and turns (the value of --turns)",
    )
    parser.add_argument(
        "--depths",
        type=int,
        nargs="*",
        default=[1, 3],
        help="depths beside the default, for the first number of hosts and --depth-link",
    )
    parser.add_argument("--depth-link", default="100:1")
    parser.add_argument("--vertices", type=int, default=200_000)
    parser.add_argument("--degree", type=float, default=20.0)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--batches", type=int, default=40, help="batches of a rank in an epoch")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--alpha", type=float, default=0.16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--results", default="topology", help="name of the result file")
    arguments = parser.parse_args()
    missing = unavailable()
    if missing:
        raise SystemExit(missing)
    data = synthetic(
        num_vertices=arguments.vertices, average_degree=arguments.degree, num_features=FEATURES, train_fraction=0.4
    )
    cases = [(link, 10, hosts) for link in arguments.links for hosts in arguments.hosts]
    cases += [(arguments.depth_link, depth, arguments.hosts[0]) for depth in arguments.depths]
    rows: list[dict[str, Any]] = []
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        roots = {hosts: {form: f"{folder}/{hosts}-{form}" for form in FORMS} for hosts in arguments.hosts}
        for hosts, of_hosts in roots.items():
            salientpp.partition(data, hosts, of_hosts["whole"], FANOUTS, arguments.batch_size, refine=False)
            salientpp.rewrite_topology(of_hosts["whole"], of_hosts["parts"], "parts")
        for link, depth, hosts in cases:
            rate, delay, *given = (float(number) for number in link.split(":"))
            turns = int(given[0]) if given else arguments.turns
            with Cluster(hosts, rate * 1e6, delay=delay / 1e3) as cluster:
                by_rank = cluster.run(measure, roots[hosts], arguments, depth, turns, seconds=1200)
            of_link = {"hosts": hosts, "megabytes_per_second": rate, "delay_ms": delay, "depth": depth}
            rows += [{**of_link, "edges": data.num_edges, **row} for row in together(by_rank)]
            for row in rows[-len(WORKS) :]:
                tell(row)
            loads.append(os.getloadavg()[0])
            write_results(  # keeps finished rows
                arguments.results, rows, fanouts=FANOUTS, features=FEATURES, hidden=arguments.hidden, vertices=arguments.vertices,
                degree=arguments.degree, batch_size=arguments.batch_size, batches=arguments.batches, alpha=arguments.alpha, load_averages=loads,
            )  # fmt: skip


def tell(row: dict[str, Any]) -> None:
    ratio, cpu = row["ratio"], row["cpu_ratio"]
    print(
        f"{row['hosts']} hosts, {row['megabytes_per_second']:g} MB/s, {row['delay_ms']:g} ms, depth {row['depth']}, {row['work']:8}: "
        f"{row['whole']['seconds']['median']:.2f} s whole, {row['parts']['seconds']['median']:.2f} s parts, ratio {ratio['median']:.3f} "
        f"({ratio['low']:.3f} to {ratio['high']:.3f}), CPU ratio {cpu['median']:.3f}, bytes {row['byte_ratio']:.3f}, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def measure(
    rank: int, roots: dict[str, str], arguments: argparse.Namespace, depth: int, turns: int
) -> list[dict[str, Any]]:
    """Returns a row for each work, with the figures of this rank."""
    loaders = {form: make_loader(root, rank, arguments, depth) for form, root in roots.items()}
    torch.manual_seed(0)
    classes = salientpp.load(roots["whole"]).num_classes
    model = salientpp.nn.trim(GraphSAGE(FEATURES, arguments.hidden, num_layers=len(FANOUTS), out_channels=classes))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seconds: dict[tuple[str, str], list[float]] = {(work, form): [] for work in WORKS for form in FORMS}
    cpu: dict[tuple[str, str], list[float]] = {(work, form): [] for work in WORKS for form in FORMS}
    figures: dict[str, dict[str, Any]] = {}
    for turn in range(turns + 1):
        for work in WORKS if turn else WORKS[:1]:  # the first turn is warm-up
            for form in FORMS if turn % 2 else reversed(FORMS):
                loader = loaders[form]
                loader.set_epoch(0)
                loader.reset_stats()
                dist.barrier()
                started, cpu_started = time.perf_counter(), time.process_time()
                if work == "loading":
                    total = sum(int(batch.n_id.sum()) + int(batch.edge_index.sum()) for batch in loader)
                else:
                    train(parallel, optimizer, loader)
                dist.barrier()
                if turn:
                    seconds[work, form].append(time.perf_counter() - started)
                    cpu[work, form].append(time.process_time() - cpu_started)
                else:
                    figures[form] = {"sum": total, **traffic(loader)}
    assert figures["whole"]["sum"] == figures["parts"]["sum"], "both forms give the same batches"
    for form, root in roots.items():
        figures[form]["topology_bytes"] = loaders[form].memory_used()["graph"]
        figures[form]["resident_bytes"] = resident_lists(root)
    return [
        {
            "work": work,
            **{
                form: {**figures[form], "seconds": seconds[work, form], "cpu_seconds": cpu[work, form]}
                for form in FORMS
            },
        }
        for work in WORKS
    ]


def make_loader(root: str, rank: int, arguments: argparse.Namespace, depth: int) -> NeighborLoader:
    part = salientpp.load(root)
    seeds = part.split("train", rank)[: arguments.batches * arguments.batch_size]
    return NeighborLoader(
        part, FANOUTS, seeds, batch_size=arguments.batch_size, shuffle=True, seed=0, num_workers=1, depth=depth,
        replication_factor=arguments.alpha,
    )  # fmt: skip


def traffic(loader: NeighborLoader) -> dict[str, Any]:
    """Returns the messages and the received bytes of an epoch of this rank, by kind."""
    stats, counted = loader.stats(), loader.engine.basis.source.exchange.traffic
    rows, lists = sum(counted.row_bytes_received.values()), stats.list_bytes_received
    return {
        "batches": stats.batches,
        "control_messages": stats.control_messages,
        "row_messages": stats.row_messages,
        "row_bytes": rows,
        "list_bytes": lists,
        "other_bytes": stats.bytes_received - rows - lists,
    }


def together(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns a row for each work: means over the ranks of counts and CPU seconds, and the seconds of rank 0, which waits for all."""
    rows = []
    for of_ranks in zip(*by_rank, strict=True):
        row: dict[str, Any] = {"work": of_ranks[0]["work"]}
        cpu = {
            form: [sum(turn) / len(turn) for turn in zip(*(of_rank[form]["cpu_seconds"] for of_rank in of_ranks))]
            for form in FORMS
        }
        seconds = {form: of_ranks[0][form]["seconds"] for form in FORMS}
        for form in FORMS:
            counts = [name for name in of_ranks[0][form] if name not in ("sum", "seconds", "cpu_seconds")]
            means = {name: sum(of_rank[form][name] for of_rank in of_ranks) / len(of_ranks) for name in counts}
            row[form] = {**means, "seconds": spread(seconds[form]), "cpu_seconds": spread(cpu[form])}
        row["ratio"] = spread([parts / whole for whole, parts in zip(seconds["whole"], seconds["parts"])])
        row["cpu_ratio"] = spread([parts / whole for whole, parts in zip(cpu["whole"], cpu["parts"])])
        received = {form: sum(row[form][f"{kind}_bytes"] for kind in ("row", "list", "other")) for form in FORMS}
        row["byte_ratio"] = received["parts"] / received["whole"]
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
