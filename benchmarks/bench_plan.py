"""Compares epochs that the planner predicts with epochs that are measured. Writes results/plan.json. Needs root and iproute2.

    python benchmarks/bench_plan.py npz:facebook_pages.npz npz:debian_full.npz generated [--hosts 2 4 8] [--rates 5 20 100]

Hosts of one rank each are emulated by network namespaces (benchmarks/cluster.py) with links of a set rate. For every graph, number of hosts and rate, the
constants are measured as ``salientpp calibrate`` does, with the training step. From them the planner predicts an epoch for every combination of ways and four
budgets of memory. Then each combination trains epochs, in turns: a trimmed GraphSAGE under DDP, whose gradients cross the same links.

A setting is a graph, a number of hosts, a rate and a budget. All ranks share the cores of one machine: the network is slowed, computation is not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import Cluster, unavailable
from common import spread, write_results
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import load_dataset, synthetic
from salientpp.ways.planner.calibrate import calibrate
from salientpp.ways.planner.choices import Budget, Choice
from salientpp.ways.planner.machines import Machines
from salientpp.ways.planner.plan import Line, best_of, lines_of, slowest

FANOUTS, BATCH = [10, 10], 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+", help="npz:FILE, or generated")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", type=float, nargs="+", default=[5, 20, 100], help="MB/s of a link, each way")
    parser.add_argument(
        "--alphas", type=float, nargs="+", default=[0.05, 0.16, 0.4, 1.0], help="budgets, as shares of a part's rows"
    )
    parser.add_argument("--batches", type=int, default=32, help="batches of a rank in an epoch")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--calibrate", type=float, default=6.0, help="seconds to measure the constants of a setting")
    parser.add_argument("--results", default="plan", help="name of the result file")
    arguments = parser.parse_args()
    missing = unavailable()
    if missing:
        raise SystemExit(missing)
    rows: list[dict[str, Any]] = []
    for graph in arguments.graphs:
        for hosts in arguments.hosts:
            data, name = opened(graph), Path(graph.partition(":")[2] or graph).stem
            keep_seeds(data, hosts * arguments.batches * BATCH)
            with tempfile.TemporaryDirectory() as folder:
                part = salientpp.partition(data, hosts, Path(folder) / "parts", FANOUTS, BATCH, refine=False)
                with Cluster(hosts, arguments.rates[0] * 1e6) as cluster:
                    by_rank = cluster.run(measure, cluster, str(part.root), arguments, seconds=3000)
            for row in by_rank[0]:
                rows.append({"graph": name, "hosts": hosts, **row})
                tell(rows[-1])
            write_results(
                arguments.results, rows, fanouts=FANOUTS, batch_size=BATCH, batches=arguments.batches, hidden=arguments.hidden,
                turns=arguments.turns, load_average=os.getloadavg()[0],
            )  # fmt: skip
    summarise(rows)


def opened(graph: str) -> Data:
    if graph != "generated":
        return load_dataset(graph, undirected=True)
    data = synthetic(num_vertices=100_000, average_degree=20, num_features=1, train_fraction=0.3)
    data.x = torch.randn(100_000, 64, generator=torch.Generator().manual_seed(0))
    return data


def keep_seeds(data: Data, number: int) -> None:
    """Leaves at most ``number`` training vertices."""
    seeds = data.train_mask.nonzero().flatten()
    order = torch.randperm(seeds.numel(), generator=torch.Generator().manual_seed(0))
    data.train_mask = torch.zeros_like(data.train_mask)
    data.train_mask[seeds[order[:number]]] = True


def measure(rank: int, cluster: Cluster, root: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each setting and combination; the rows of rank 0 hold the figures of the slowest rank."""
    part = salientpp.load(root)
    torch.manual_seed(0)
    model = GraphSAGE(part.num_features, arguments.hidden, num_layers=len(FANOUTS), out_channels=part.num_classes)
    plain = DistributedDataParallel(salientpp.nn.trim(model))
    merged = DistributedDataParallel(salientpp.nn.merge_partial(salientpp.nn.trim(model)))
    # Each rank receives a share of every gradient twice: to add up, and as the sum.
    gradients = 2 * (1 - 1 / part.num_parts) * sum(each.nbytes for each in model.parameters())
    budgets = [round(alpha * rows_of(part) / part.num_parts) for alpha in arguments.alphas]
    loaders: dict[tuple[int, Choice], NeighborLoader] = {}
    for budget in budgets:
        for choice in Budget(budget, all_rows=budget, sums="mean").choices():
            loaders[budget, choice] = make_loader(part, choice)
    basis = make_loader(part, Choice(sums="mean")).engine.basis
    found = []
    for rate in arguments.rates:
        if rank == 0:
            cluster.set_rate(rate * 1e6)
        dist.barrier()
        begun = time.perf_counter()
        machines = calibrate(basis, step_of(plain), seconds=arguments.calibrate, gradient_bytes=gradients)
        calibrating = time.perf_counter() - begun
        for budget, alpha in zip(budgets, arguments.alphas):
            choices = [choice for of_budget, choice in loaders if of_budget == budget]
            lines, _ = lines_of(basis, choices, machines)
            everyone: list[list[Line]] = [[] for _ in range(part.num_parts)]
            dist.all_gather_object(everyone, lines)
            expected = slowest(everyone)
            chosen = best_of(expected).choice
            seconds: dict[Choice, list[float]] = {choice: [] for choice in choices}
            for turn in range(arguments.turns + 1):
                for choice in choices if turn % 2 else reversed(choices):
                    taken = epoch(loaders[budget, choice], merged if choice.sums else plain, turn)
                    if turn:  # the first turn is warm-up
                        seconds[choice].append(taken)
            for line in expected:
                received = torch.tensor([loaders[budget, line.choice].stats().bytes_received / (arguments.turns + 1)])
                dist.all_reduce(received, dist.ReduceOp.MAX)
                found.append(
                    row_of(
                        rate,
                        alpha,
                        budget,
                        line,
                        line.choice == chosen,
                        seconds[line.choice],
                        float(received),
                        machines,
                        calibrating,
                    )
                )
            for choice in choices:
                loaders[budget, choice].reset_stats()
    return found


def row_of(
    rate: float,
    alpha: float,
    budget: int,
    line: Line,
    is_chosen: bool,
    seconds: list[float],
    received: float,
    machines: Machines,
    calibrating: float,
) -> dict[str, Any]:
    cost = line.cost
    return {
        "megabytes_per_second": rate,
        "alpha": alpha,
        "budget_bytes": budget,
        "way": line.choice.words,
        "chosen": is_chosen,
        "predicted": cost.seconds,
        "seconds": spread(seconds),
        "predicted_bytes": cost.bytes_in,
        "bytes": received,
        "causes": {"training": cost.training, "loading": cost.loading, "waiting": cost.waiting, "link": cost.link},
        "machines": {**machines.to_dict(), "about": {}, "seconds_to_calibrate": calibrating},
    }


def rows_of(part: Any) -> int:
    """Returns the bytes of all rows of the graph."""
    return sum(type_.num_vertices * type_.row_bytes("x") for type_ in part.description.node_types)


def make_loader(part: Any, choice: Choice) -> NeighborLoader:
    return NeighborLoader(
        part, FANOUTS, "train", batch_size=BATCH, shuffle=True, seed=0, num_workers=1, dtype=torch.float32, **as_given(choice)
    )  # fmt: skip


def as_given(choice: Choice) -> dict[str, Any]:
    """Returns the options of a choice, with bytes as text, because a number would mean α."""
    options = {name: value for name, value in choice.options.items() if value}
    if "replication_factor" in options:
        options["replication_factor"] = f"{options['replication_factor']}B"
    return options


def step_of(model: torch.nn.Module) -> Callable[[Any], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size]).backward()
        optimizer.step()

    return step


def epoch(loader: NeighborLoader, model: torch.nn.Module, number: int) -> float:
    """Trains an epoch. Returns its seconds on the slowest rank."""
    loader.set_epoch(number)
    step = step_of(model)
    dist.barrier()
    begun = time.perf_counter()
    for batch in loader:
        step(batch)
    dist.barrier()
    return time.perf_counter() - begun


def tell(row: dict[str, Any]) -> None:
    seconds = row["seconds"]["median"]
    print(
        f"{row['graph']:15} {row['hosts']} hosts {row['megabytes_per_second']:5g} MB/s α = {row['alpha']:<5g} {row['way']:14} "
        f"{row['predicted']:6.2f} s predicted, {seconds:6.2f} s ({row['predicted'] / seconds - 1:+4.0%}), "
        f"{row['predicted_bytes'] / 1e6:.2f} MB predicted, {row['bytes'] / 1e6:.2f} MB{'  chosen' if row['chosen'] else ''}",
        flush=True,
    )


def settings(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Returns the rows of each setting."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["graph"], row["hosts"], row["megabytes_per_second"], row["alpha"]), []).append(row)
    return list(found.values())


def summarise(rows: list[dict[str, Any]]) -> None:
    errors = [abs(row["predicted"] / row["seconds"]["median"] - 1) for row in rows]
    losses = []
    against = []
    for of_setting in settings(rows):
        chosen = next(row for row in of_setting if row["chosen"])["seconds"]["median"]
        losses.append(chosen / min(row["seconds"]["median"] for row in of_setting) - 1)
        against.append(chosen / next(row for row in of_setting if row["way"] == "cache")["seconds"]["median"] - 1)
    print(
        f"{len(rows)} epochs: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}. {len(losses)} settings: chosen within 5 % of the best "
        f"in {sum(loss <= 0.05 for loss in losses)}, largest loss {max(losses):.1%}, against the static cache {max(against):+.1%} at most"
    )


if __name__ == "__main__":
    main()
