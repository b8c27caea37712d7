"""Measures an epoch on the whole graph by layout and by plan, over hosts with links of a set rate. Writes results/fullgraph.json.

    python benchmarks/bench_fullgraph.py [npz:GRAPH.npz ...] [--vertices 20000] [--rate 20e6] [--epochs 3]

Every host is a network namespace (cluster.py; needs root). All hosts share this machine's cores, so the network is slowed and computation is shared. Layouts
train a 2-layer GCN on a graph with communities, partitioned by METIS, on 4 and on 8 hosts, and in one process with the whole graph. Plans train a 3-layer
GraphSAGE on a graph of low and on one of high degree, on 4 hosts. Both are also measured on the graphs that are named, on 4 hosts. Words are those that the
rank with most traffic receives in an epoch. 'auto' and 'cut' are the minimum cut.
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
from salientpp.datasets import load_dataset, synthetic
from salientpp.fullgraph import distribute, local, loss_mean, plan_for

LAYOUTS = {
    4: ["halo", "cover", "auto", "1d", "1.5d:2", "grid:2x2", "2d"],
    8: ["halo", "cover", "auto", "1d", "1.5d:2", "1.5d:4", "grid:2x4", "grid:4x2", "3d"],
}
PLANS = ["fetch", "cache", "recompute", "sum", "cut"]
COLUMNS, HIDDEN, CLASSES = 64, 64, 8


def network(kind: str, columns: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return GCN(columns, HIDDEN, 2, CLASSES) if kind == "gcn" else GraphSAGE(columns, HIDDEN, 3, CLASSES)


def epochs_of(model: Any, part: Any, epochs: int) -> list[float]:
    """Returns the seconds of each epoch, after one warm-up epoch."""
    epoch_of(model, part)
    if hasattr(part, "ranks"):
        part.ranks.received.clear()
    return [epoch_of(model, part) for _ in range(epochs)]


def epoch_of(model: Any, part: Any) -> float:
    """Returns the seconds of one epoch."""
    begin = time.perf_counter()
    out = model(part.x, part.edge_index)
    losses = F.cross_entropy(out, part.y % CLASSES, reduction="none")
    (loss_mean(losses, part) if hasattr(part, "ranks") else losses.mean()).backward()
    model.zero_grad()
    return time.perf_counter() - begin


def measure_layouts(rank: int, root: str, names: list[str], epochs: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    part, rows = local(salientpp.load(root), dtype=torch.float32), []
    for name in names:
        begin = time.perf_counter()
        model = distribute(network("gcn", part.x.size(1)), part, layout=name)
        made = time.perf_counter() - begin
        seconds = statistics.median(epochs_of(model, part, epochs))
        words = sum(part.ranks.received.values()) / epochs
        row = {"layout": name, "seconds": seconds, "words": words, "bytes": resident_bytes(peak=True)}
        rows.append({**row, "seconds to make": made})
    return rows


def measure_plans(rank: int, root: str, names: list[str], epochs: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    part = local(salientpp.load(root), dtype=torch.float32)
    model = network("sage", part.x.size(1))
    begin = time.perf_counter()
    cut = plan_for(model, part)
    made = time.perf_counter() - begin
    constants = cut.problem.costs.constants
    plans = [cut if name == "cut" else plan_for(model, part, kind=name, constants=constants) for name in names]
    models = [distribute(model, part, plan) for plan in plans]
    seconds: list[list[float]] = [[] for _ in names]
    words = [0.0] * len(names)
    for turn in range(
        20
    ):  # in turns, so that other work on the machine affects all candidates; short ones run more often
        for number, each in enumerate(models):
            part.ranks.received.clear()
            seconds[number].append(epoch_of(each, part))
            words[number] = sum(part.ranks.received.values())
        taken = part.ranks.comm.gather_numbers([int(sum(map(sum, seconds)))])
        if turn == 0:
            seconds = [[] for _ in names]
        elif turn >= epochs and max(taken)[0] >= 8:
            break
    return [
        {
            "plan": name,
            "taken": plan.name,
            "seconds": statistics.median(taken),
            "words": moved,
            "predicted": plan.summary(),
            **({"seconds to make": made} if plan is cut else {}),
        }
        for name, taken, moved, plan in zip(names, seconds, words, plans)
    ]


def slowest(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the largest value over ranks, for each candidate."""
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
    parser.add_argument("graphs", nargs="*", metavar="npz:GRAPH.npz")
    parser.add_argument("--vertices", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=20e6, help="bytes per second of a link, each way")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    if (reason := unavailable()) is not None:
        raise SystemExit(reason)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)

        def measure(function: Any, data: Data, hosts: int, names: list[str], facts: dict[str, Any]) -> None:
            root = Path(folder) / str(len(rows))
            salientpp.partition(data, hosts, root, [10, 10], 256, refine=False)
            with Cluster(hosts, bytes_per_second=arguments.rate) as cluster:
                found = slowest(cluster.run(function, str(root), names, arguments.epochs))
            for row in found:
                rows.append({"hosts": hosts, **facts, **row})
                print(rows[-1], flush=True)
            write_results("fullgraph", rows, vertices=arguments.vertices, bytes_per_second=arguments.rate)

        def measure_alone(data: Data, facts: dict[str, Any]) -> None:
            data.x = data.x.float()
            seconds = statistics.median(epochs_of(network("gcn", data.x.size(1)), data, arguments.epochs))
            rows.append({"hosts": 1, **facts, "layout": "one process", "seconds": seconds})

        data = made(arguments.vertices, 20)
        measure_alone(data, {})
        for hosts, names in LAYOUTS.items():
            measure(measure_layouts, data, hosts, names, {})
        for degree in (3, 60):
            measure(measure_plans, made(arguments.vertices // 4, degree), 4, PLANS, {"average degree": degree})
        for graph in arguments.graphs:
            data, facts = load_dataset(graph, undirected=True), {"graph": Path(graph.partition(":")[2]).stem}
            measure_alone(data, facts)
            measure(measure_layouts, data, 4, LAYOUTS[4], facts)
            measure(measure_plans, data, 4, PLANS, facts)


if __name__ == "__main__":
    main()
