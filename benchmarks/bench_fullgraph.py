"""What does an epoch on the whole graph take, by layout and by plan, over hosts with links of a set rate? Writes results/fullgraph.json.

    python benchmarks/bench_fullgraph.py [--vertices 20000] [--rate 20e6] [--epochs 3]

Every host is a network namespace (cluster.py; needs root); all share this machine's cores, so the network is slowed and computation is shared. Layouts train
a GCN of two layers on a graph with communities, partitioned by METIS, on 4 and on 8 hosts, beside one process with the whole graph. Plans train a GraphSAGE of
three layers on a graph of low and on one of high degree, on 4 hosts. Words are those that came to the rank that got most, in an epoch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cluster import Cluster, unavailable
from common import resident_bytes, write_results
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GraphSAGE

import salientpp
from salientpp.datasets import synthetic
from salientpp.fullgraph import calibrate, distribute, local, loss_mean, plan_for

LAYOUTS = {
    4: ["halo", "cover", "1d", "1.5d:2", "grid:2x2", "2d"],
    8: ["halo", "cover", "1d", "1.5d:2", "1.5d:4", "grid:2x4", "grid:4x2", "3d"],
}
PLANS = ["fetch", "cache", "recompute", "hybrid"]
COLUMNS, HIDDEN, CLASSES = 64, 64, 8


def network(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return GCN(COLUMNS, HIDDEN, 2, CLASSES) if kind == "gcn" else GraphSAGE(COLUMNS, HIDDEN, 3, CLASSES)


def epochs_of(model: Any, part: Any, epochs: int) -> list[float]:
    """Seconds of each epoch; one before them warms up."""
    seconds = []
    for epoch in range(epochs + 1):
        if epoch == 1 and hasattr(part, "ranks"):
            part.ranks.received.clear()
        begin = time.perf_counter()
        out = model(part.x, part.edge_index)
        losses = F.cross_entropy(out, part.y % CLASSES, reduction="none")
        (loss_mean(losses, part) if hasattr(part, "ranks") else losses.mean()).backward()
        model.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def measure_layouts(rank: int, root: str, names: list[str], epochs: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    part, rows = local(salientpp.load(root)), []
    for name in names:
        model = distribute(network("gcn"), part, layout=name)
        seconds = statistics.median(epochs_of(model, part, epochs))
        words = sum(part.ranks.received.values()) / epochs
        rows.append({"layout": name, "seconds": seconds, "words": words, "bytes": resident_bytes(peak=True)})
    return rows


def measure_plans(rank: int, root: str, names: list[str], epochs: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    part, rows = local(salientpp.load(root)), []
    constants = calibrate(part)
    for name in names:
        plan = plan_for(distribute(network("sage"), part), kind=name, constants=constants)
        graph = plan.apply()
        seconds = statistics.median(epochs_of(distribute(network("sage"), graph), graph, epochs))
        words = sum(graph.ranks.received.values()) / epochs
        rows.append({"plan": name, "seconds": seconds, "words": words, "predicted": plan.summary()})
    return rows


def slowest(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each candidate, what the rank with the most has."""
    found = []
    for rows in zip(*ranks):
        one = dict(rows[0])
        for key in ("seconds", "words", "bytes"):
            if key in one:
                one[key] = max(row[key] for row in rows)
        if "predicted" in one:
            one["predicted"] = {key: max(row["predicted"][key] for row in rows) for key in one["predicted"]}
        found.append(one)
    return found


def made(vertices: int, degree: float) -> Data:
    data = synthetic(num_vertices=vertices, average_degree=degree, num_features=1)
    data.x = torch.randn(vertices, COLUMNS, generator=torch.Generator().manual_seed(0))
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=20e6, help="bytes per second of a link")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    if (reason := unavailable()) is not None:
        raise SystemExit(reason)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = made(arguments.vertices, 20)
        torch.set_num_threads(1)
        seconds = statistics.median(epochs_of(network("gcn"), data, arguments.epochs))
        rows.append({"hosts": 1, "layout": "one process", "seconds": seconds})
        for hosts, names in LAYOUTS.items():
            root = str(Path(folder) / f"layouts-{hosts}")
            salientpp.partition(data, hosts, root, [10, 10], 256)
            with Cluster(hosts, bytes_per_second=arguments.rate) as cluster:
                found = slowest(cluster.run(measure_layouts, root, names, arguments.epochs))
            rows += [{"hosts": hosts, **row} for row in found]
        for degree in (3, 60):
            root = str(Path(folder) / f"plans-{degree}")
            salientpp.partition(made(arguments.vertices // 4, degree), 4, root, [10, 10], 256)
            with Cluster(4, bytes_per_second=arguments.rate) as cluster:
                found = slowest(cluster.run(measure_plans, root, PLANS, arguments.epochs))
            rows += [{"hosts": 4, "average degree": degree, **row} for row in found]
    for row in rows:
        print(row)
    write_results("fullgraph", rows, vertices=arguments.vertices, bytes_per_second=arguments.rate)


if __name__ == "__main__":
    main()
