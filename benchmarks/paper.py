"""Runs the tables and figures of Kaler et al., SALIENT++ (MLSys 2023, arXiv:2305.03152) on emulated hosts. Writes results/paper_*.json.

    python benchmarks/paper.py                                          # everything, on the generated graph
    python benchmarks/paper.py steps alpha --graphs generated npz:GRAPH.npz --hosts 4

* ``steps``: Table 1, Figures 4, 5 and 8. Full replication, partitioned, pipelined, cached; every graph, every number of hosts.
* ``alpha``: Figure 7. Over the replication factor; generated graph, 4 hosts.
* ``lookahead``: beyond the paper. α = 0.32 with lookahead, and with shared draws; every graph, more than 2 hosts.
* ``partial``: beyond the paper. Owners send sums of neighbours instead of rows, with and without caches; every graph, more than 2 hosts.
* ``slow``: Figure 9. VIP by formula and by simulation, over the replication factor, on a network of half the rate.
* ``device``: Figure 6. Rows copied from host to device over the GPU fraction, in VIP order and in file order.
* ``evaluation``: beyond the paper. Time to accuracy with the evaluation of each epoch, in three ways; every graph, 4 hosts.
* ``accuracy``: test accuracy of several ranks, and of one rank with the same global batch.

Hosts are network namespaces (benchmarks/cluster.py), so this needs root and iproute2. Every line of every table is a configuration of the same loader. Full
replication is a cache with room for every row, and a policy that caches every row ('vip' leaves out rows with probability 0).

The rate of the links is chosen by measurement, for each graph and number of hosts. Fetching all remote rows of an epoch then takes ``--ratio`` times as long as
training an epoch with all rows local and an unlimited network.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_volume import first_seeds
from cluster import Cluster, unavailable
from common import spread, write_results
from evaluation import WAYS, Evaluator, seconds_to
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.datasets import load_dataset
from salientpp.nn import merge_partial

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import train_sage

#: A graph with heavy hubs and few seeds. In ogbn-papers100M, the paper's largest graph, about 1 % of the vertices are seeds.
GENERATED = "synthetic:num_vertices=400000,exponent=2.1,num_features=128,train_fraction=0.015,val_fraction=0.005,test_fraction=0.02"
FANOUTS, BATCH_SIZE, SEED = [15, 10, 5], 32, 0
#: Width of the model. Moving bytes takes the same cores, so a wide model keeps that a small part of the computation. A batch of a small graph fetches little,
#: and the gradients of a wide model would be as many bytes.
HIDDEN, HIDDEN_OTHERS = {"generated": 128}, 32
#: Most vertices of the real graphs are training vertices; an epoch takes this many of them, chosen at random.
MOST_SEEDS = 6000
#: Number of test vertices, chosen at random.
MOST_TESTED = 2000
PAPERS_ALPHAS = [0.08, 0.16, 0.32]
ALPHAS = [0.0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0]
SLOW_ALPHAS = [0.04, 0.08, 0.16, 0.32, 0.64, 1.0]
BETAS = [0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0]
#: The rate of the links is corrected until the ratio of communication to computation is this close to ``--ratio``.
MOST_CORRECTIONS, CLOSE_ENOUGH = 5, 0.03
#: Batches per block of shared draws, in the table of lookahead.
BLOCK = 64
TABLES = ["steps", "alpha", "lookahead", "partial", "slow", "device", "evaluation", "accuracy"]


@dataclass(frozen=True)
class Configuration:
    """A line of a table: arguments of the loader, and the way the graph was partitioned."""

    step: str
    replication_factor: float
    depth: int = 10
    policy: str = "vip"
    lookahead: int | str = 0
    shared_draws: str | None = None
    draw_block: int = 1
    partial_aggregation: str | None = None
    refine: bool = False  # an argument of partitioning, not of the loader

    def loader(self, part: salientpp.PartitionedGraph) -> NeighborLoader:
        return NeighborLoader(
            part,
            FANOUTS,
            "train",
            batch_size=BATCH_SIZE,
            shuffle=True,
            seed=SEED,
            num_workers=1,
            timeout=120,
            replication_factor=self.replication_factor,
            depth=self.depth,
            policy=self.policy,
            lookahead=self.lookahead,
            shared_draws={"vertices": self.shared_draws, "block": self.draw_block},
            partial_aggregation=self.partial_aggregation,
        )

    @property
    def draws(self) -> dict[str, Any]:
        """Options that decide which vertices the batches have."""
        return {"shared_draws": self.shared_draws, "draw_block": self.draw_block}


def full_replication(num_hosts: int) -> Configuration:
    # α = K - 1 is enough for parts of equal size; a smaller part lacks a little more.
    return Configuration("full replication", float(num_hosts), policy="random")


def the_steps(num_hosts: int) -> list[Configuration]:
    return [
        full_replication(num_hosts),
        Configuration("partitioned features", 0.0, depth=1),
        Configuration("pipelined communication", 0.0),
        *(Configuration("feature caching", alpha) for alpha in PAPERS_ALPHAS),
    ]


def the_lookahead(num_hosts: int) -> list[Configuration]:
    shared: dict[str, Any] = {"shared_draws": "batch", "draw_block": BLOCK}
    return [
        full_replication(num_hosts),
        replace(full_replication(num_hosts), step="full replication, shared draws", **shared),
        Configuration("feature caching", 0.32),
        Configuration("lookahead", 0.32, lookahead="auto"),
        Configuration("lookahead, shared draws", 0.32, lookahead="auto", **shared),
        Configuration("lookahead, shared draws, refined parts", 0.32, lookahead="auto", refine=True, **shared),
    ]


def the_partial(num_hosts: int) -> list[Configuration]:
    rows = [Configuration("rows", alpha) for alpha in (0.0, 0.16)]
    return [
        full_replication(num_hosts),
        *(each for of in rows for each in (of, replace(of, step="rows and sums", partial_aggregation="mean"))),
    ]


# --- what a rank does --------------------------------------------------------------------------------------


class Trainer:
    """A GraphSAGE under DDP, and its epochs."""

    def __init__(self, part: salientpp.PartitionedGraph, hidden: int) -> None:
        torch.manual_seed(SEED)
        bare = GraphSAGE(part.num_features, hidden, len(FANOUTS), part.num_classes)
        self.model = DistributedDataParallel(merge_partial(bare))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.005)

    def train(self, loader: NeighborLoader, most_batches: int | None = None) -> float:
        """Returns the seconds of an epoch, or of its first batches, until every rank is done."""
        dist.barrier()
        started = time.perf_counter()
        for batch in islice(loader, most_batches):
            out = train_sage.forward(self.model, batch)
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        dist.barrier()
        return time.perf_counter() - started


def fetch(loader: NeighborLoader) -> float:
    """Returns the seconds of an epoch without training."""
    dist.barrier()
    started = time.perf_counter()
    for _ in loader:
        pass
    dist.barrier()
    return time.perf_counter() - started


def train_and_evaluate(
    rank: int, cluster: Cluster, root: str, whole: str, hidden: int, epochs: int, ratio: float
) -> dict[str, Any]:
    """Trains with a cache. After each epoch the same model is evaluated in every way. Returns facts, and lists by epoch.

    ``whole`` is a file with the whole graph.
    """
    part = salientpp.load(root)
    trainer = Trainer(part, hidden)
    loader = Configuration("feature caching", 0.32).loader(part)
    facts = calibrate(rank, cluster, part, trainer, ratio, 1)
    trainer = Trainer(part, hidden)
    data = torch.load(whole, mmap=True, weights_only=False)
    evaluator = Evaluator(part, data, loader.cache, BATCH_SIZE)
    evaluator.warm_up(trainer.model)
    found: dict[str, Any] = {"train_seconds": [], **{way: [] for way in WAYS}}
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        found["train_seconds"].append(everywhere(trainer.train(loader)))
        for way in WAYS:
            found[way].append(evaluator.measure(way, trainer.model))
    return {**found, "facts": facts}


def everywhere(value: float) -> float:
    """Returns the largest value over all ranks."""
    values = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return float(values)


def measure(
    rank: int,
    cluster: Cluster,
    roots: dict[str, str],
    hidden: int,
    configurations: list[Configuration],
    turns: int,
    ratio: float,
    slowdown: float,
    untimed: int,
) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """Finds the rate, then trains with every configuration in turn. Returns facts, and each turn's measurements by configuration, ``untimed`` first."""
    parts = {refine: salientpp.load(root) for refine, root in roots.items()}
    part = parts[Configuration.refine]
    trainer = Trainer(part, hidden)
    loaders = [
        configuration.loader(parts[configuration.refine]) for configuration in configurations
    ]  # caches are filled while the network is fast
    facts = calibrate(rank, cluster, part, trainer, ratio, slowdown)
    for loader, configuration in zip(loaders, configurations):
        if not configuration.lookahead:  # the content of a cache that looks ahead depends on all earlier epochs
            trainer.train(loader, most_batches=3)
    measured: list[list[dict[str, Any]]] = [[] for _ in configurations]
    for turn in range(untimed + turns):
        for loader, results in zip(loaders, measured):
            loader.reset_stats()
            loader.set_epoch(turn)
            seconds = trainer.train(loader)
            results.append({"seconds": seconds, **asdict(loader.stats()), "memory": loader.memory_used()})
    return facts, measured


def calibrate(
    rank: int, cluster: Cluster, part: salientpp.PartitionedGraph, trainer: Trainer, ratio: float, slowdown: float
) -> dict[str, Any]:
    """Sets the rate of the links at which communication takes ``ratio`` times as long as computation, divided by ``slowdown``."""
    full = full_replication(part.num_parts).loader(part)
    bare = Configuration("pipelined communication", 0.0).loader(part)
    trainer.train(full, most_batches=3)
    compute = statistics.median(trainer.train(full) for _ in range(3))
    bare.reset_stats()
    fetch(bare)
    stats = bare.stats()
    num_bytes = everywhere(max(stats.bytes_sent, stats.bytes_received))
    compute = everywhere(compute)
    rate = num_bytes / (ratio * compute)
    for _ in range(MOST_CORRECTIONS):
        # A transfer does not always fill its link, so the first rate is too low. Correct it by the measured time.
        if rank == 0:
            cluster.set_rate(rate)
        communication = everywhere(fetch(bare))
        chosen, rate = rate, rate * communication / (ratio * compute)
        if abs(communication / (ratio * compute) - 1) < CLOSE_ENOUGH:
            break
    if rank == 0 and slowdown != 1:
        cluster.set_rate(chosen / slowdown)
    return {
        "compute_seconds": compute,
        "communication_seconds": communication,
        "ratio": communication / compute,
        "link_bytes_per_second": chosen / slowdown,
        "busiest_link_bytes": int(num_bytes),
        "slowdown": slowdown,
        "batches_per_epoch": len(bare),
    }


def count_device_rows(rank: int, root: str, betas: list[float]) -> list[tuple[int, int]]:
    """Counts the rows of an epoch that are copied from host to device for each β, in VIP order and in file order."""
    part = salientpp.load(root)
    begin, end = part.book.range_of(rank)
    accesses = torch.zeros(end - begin, dtype=torch.int64)
    in_vip_order = []
    for beta in betas:
        loader = NeighborLoader(
            part, FANOUTS, "train", batch_size=BATCH_SIZE, shuffle=True, seed=SEED, device_rows=beta
        )
        accesses.zero_()
        for batch in loader:
            own = batch.n_id[(batch.n_id >= begin) & (batch.n_id < end)]
            accesses[own - begin] += 1
        in_vip_order.append(loader.stats().rows_host)
    in_file_order = by_file(part, accesses, begin, end)
    return [(rows, int(in_file_order[int(beta * (end - begin)) :].sum())) for beta, rows in zip(betas, in_vip_order)]


def by_file(part: salientpp.PartitionedGraph, values: Tensor, begin: int, end: int) -> Tensor:
    """Returns ``values`` of the part's rows in the order of the user's ids."""
    return values[part.original_id(torch.arange(begin, end)).argsort()]


def train_and_test(rank: int, root: str, batch_size: int, alpha: float, seed: int, epochs: int) -> float:
    """Returns the test accuracy after training, for random vertices, with (20, 20, 20) neighbours sampled through the same cache."""
    part = salientpp.load(root)
    torch.manual_seed(seed)
    options = {"seed": seed, "num_workers": 1}
    train = NeighborLoader(
        part, FANOUTS, "train", batch_size=batch_size, shuffle=True, replication_factor=alpha, **options
    )
    test = NeighborLoader(
        part, [20, 20, 20], "test", batch_size=batch_size, uneven="exact", cache=train.cache, **options
    )
    model = DistributedDataParallel(GraphSAGE(part.num_features, 64, len(FANOUTS), part.num_classes, dropout=0.3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(epochs):
        train_sage.train_epoch(model, train, optimizer, "")
    return train_sage.accuracy(model, test, torch.device("cpu"))


# --- tables ------------------------------------------------------------------------------------------------


class Datasets:
    """The graphs, and their dataset directories for each number of hosts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.data, self.root = cache(self._data), cache(self._root)

    def _data(self, graph: str) -> Data:
        data = (
            load_dataset(graph, undirected=True)
            if graph.startswith("npz:")
            else load_dataset(GENERATED if graph == "generated" else graph)
        )
        data.x = data.x.float()
        data.train_mask, data.test_mask = (
            first_seeds(data.train_mask, MOST_SEEDS),
            first_seeds(data.test_mask, MOST_TESTED),
        )
        return data

    def file(self, graph: str) -> str:
        """Writes the whole graph to a file, which processes may map."""
        path = self._folder / f"{name_of(graph)}.pt"
        torch.save(self.data(graph), path)
        return str(path)

    def _root(self, graph: str, num_hosts: int, refine: bool = Configuration.refine) -> str:
        root = self._folder / f"{name_of(graph)}-{num_hosts}{'-refined' if refine else ''}"
        salientpp.partition(
            self.data(graph), num_hosts, root, FANOUTS, BATCH_SIZE, method="metis", refine=refine, seed=SEED
        )
        return str(root)


def name_of(graph: str) -> str:
    kind, _, rest = graph.partition(":")
    return Path(rest).stem if kind == "npz" else kind


def timed(
    datasets: Datasets,
    graph: str,
    num_hosts: int,
    configurations: list[Configuration],
    arguments: argparse.Namespace,
    slowdown: float = 1,
    untimed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Returns a row for every configuration. Rows are counted in the ``untimed`` epochs and in the timed ones."""
    kinds = dict.fromkeys([Configuration.refine, *(configuration.refine for configuration in configurations)])
    roots = {refine: datasets.root(graph, num_hosts, refine) for refine in kinds}
    hidden = HIDDEN.get(name_of(graph), HIDDEN_OTHERS)
    with Cluster(num_hosts) as cluster:
        by_rank = cluster.run(
            measure,
            cluster,
            roots,
            hidden,
            configurations,
            arguments.turns,
            arguments.ratio,
            slowdown,
            untimed,
            seconds=1500,
        )
    facts = by_rank[0][0]
    print(
        f"{name_of(graph)}, {num_hosts} hosts: " + ", ".join(f"{name} {value:,.4g}" for name, value in facts.items()),
        flush=True,
    )
    parts = {refine: salientpp.load(root) for refine, root in roots.items()}
    predicted = count_rows(parts, configurations, untimed + arguments.turns)
    row_bytes = 4 * parts[Configuration.refine].num_features
    for index, configuration in enumerate(configurations):
        of_rank = [measured[index] for _, measured in by_rank]
        ranks = [turns[untimed:] for turns in of_rank]
        rows = statistics.mean(sum(turn["rows_remote"] for turn in turns) for turns in zip(*of_rank))
        by_turn = [max(turn["seconds"] for turn in turns) for turns in zip(*ranks)]
        row = {
            "graph": name_of(graph),
            "hosts": num_hosts,
            "hidden": hidden,
            **asdict(configuration),
            "seconds": spread(by_turn),
            "seconds_by_turn": by_turn,
            "remote_rows": rows,
            "sums": mean_of(of_rank, "rows_partial") * num_hosts,
            **predicted[configuration].of(row_bytes, num_hosts, facts["batches_per_epoch"]),
            "bytes": mean_of(of_rank, "bytes_received") * num_hosts,
            "feature_bytes": sum(
                turns[0]["memory"].get(tier, 0) for turns in ranks for tier in ("host", "cache", "lookahead")
            ),
            "partitioned_bytes": sum(turns[0]["memory"]["host"] for turns in ranks),
            "seconds_waiting": mean_of(ranks, "seconds_waiting"),
            "seconds_by_stage": {
                stage: statistics.mean(turn["seconds_by_stage"][stage] for turns in ranks for turn in turns)
                for stage in ranks[0][0]["seconds_by_stage"]
            },
            **facts,
        }
        print(
            f"  {configuration.step}, α = {configuration.replication_factor:g}, {configuration.policy}: {row['seconds']['median']:.2f} s, "
            f"{rows:,.0f} rows, predicted {row['predicted_rows']:,.0f}, {row['sums']:,.0f} sums",
            flush=True,
        )
        yield row


def count_rows(
    parts: dict[str, salientpp.PartitionedGraph], configurations: list[Configuration], epochs: int
) -> dict[Configuration, Predicted]:
    """Counts what an epoch fetches without a network, by configuration. Returns means over the first ``epochs``."""
    found: dict[Configuration, Predicted] = {}
    for configuration in configurations:
        if configuration in found:
            continue
        alike = [
            other
            for other in configurations
            if (other.refine, other.draws, other.lookahead, other.partial_aggregation)
            == (configuration.refine, configuration.draws, configuration.lookahead, configuration.partial_aggregation)
        ]
        counted = analyze(
            parts[configuration.refine],
            Batches(FANOUTS, BATCH_SIZE, epochs=epochs, seed=SEED, **configuration.draws),
            Ways(
                sorted({other.policy for other in alike}),
                [other.replication_factor for other in alike],
                lookahead=configuration.lookahead or None,
                sums=configuration.partial_aggregation is not None,
            ),
        )
        rows = {(v.policy, v.replication_factor): Predicted(v.remote_rows_per_epoch) for v in counted.of(way="cache")}
        if configuration.lookahead:
            rows = {
                ("vip", v.replication_factor): Predicted(v.remote_rows_per_epoch) for v in counted.of(way="lookahead")
            }
        if configuration.partial_aggregation:
            rows = {
                ("vip", v.replication_factor): Predicted(
                    v.remote_rows_per_epoch, (v.summed.sums_per_epoch, v.summed.sources_per_epoch)
                )
                for v in counted.of(way="sums")
            }
        found |= {other: rows[other.policy, other.replication_factor] for other in alike}
    return found


def mean_of(ranks: list[list[dict[str, Any]]], name: str) -> float:
    return statistics.mean(turn[name] for turns in ranks for turn in turns)


@dataclass(frozen=True)
class Predicted:
    """Predicted rows that all ranks receive in an epoch, and with sums the sums and the rows in them."""

    rows: float
    sums: tuple[float, float] | None = None

    def of(self, row_bytes: int, num_hosts: int, num_batches: int) -> dict[str, float]:
        """Returns rows, sums and bytes. Each row, sum and row in a sum adds a 4-byte id; each batch and pair of ranks adds 16 or 32 bytes of counts."""
        sums, sources = self.sums or (0.0, 0.0)
        counts = num_batches * num_hosts * (num_hosts - 1) * (16 if self.sums is None else 32)
        number = (self.rows + sums) * (row_bytes + 4) + 4 * sources + counts
        return {"predicted_rows": self.rows, "predicted_sums": sums, "predicted_bytes": number}


def run_steps(datasets: Datasets, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        row
        for graph in arguments.graphs
        for num_hosts in arguments.hosts
        for row in timed(datasets, graph, num_hosts, the_steps(num_hosts), arguments)
    ]


def run_alpha(datasets: Datasets, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    configurations = [full_replication(4), *(Configuration("feature caching", alpha) for alpha in ALPHAS)]
    return list(timed(datasets, arguments.graphs[0], 4, configurations, arguments))


def run_lookahead(datasets: Datasets, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        row
        for graph in arguments.graphs
        for num_hosts in arguments.hosts
        if num_hosts > 2  # with fewer hosts the network is not the bottleneck
        for row in timed(datasets, graph, num_hosts, the_lookahead(num_hosts), arguments, untimed=1)
    ]


def run_partial(datasets: Datasets, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        row
        for graph in arguments.graphs
        for num_hosts in arguments.hosts
        if num_hosts > 2
        for row in timed(datasets, graph, num_hosts, the_partial(num_hosts), arguments, untimed=1)
    ]


def run_slow(datasets: Datasets, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    configurations = [
        Configuration("feature caching", alpha, policy=policy)
        for alpha in SLOW_ALPHAS
        for policy in ("vip", "simulation")
    ]
    return list(timed(datasets, arguments.graphs[0], 4, configurations, arguments, slowdown=2))


def run_device(datasets: Datasets, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for graph in arguments.graphs:
        root = datasets.root(graph, 4)
        with Cluster(4) as cluster:
            counted = cluster.run(count_device_rows, root, BETAS)
        part = salientpp.load(root)
        for index, beta in enumerate(BETAS):
            expected = [expected_device_rows(part, part_id, beta) for part_id in range(4)]
            rows.append(
                {
                    "graph": name_of(graph),
                    "hosts": 4,
                    "gpu_fraction": beta,
                    "rows_vip_order": sum(rank[index][0] for rank in counted),
                    "rows_file_order": sum(rank[index][1] for rank in counted),
                    "expected_vip_order": sum(vip for vip, _ in expected),
                    "expected_file_order": sum(by_file for _, by_file in expected),
                }
            )
            print(rows[-1], flush=True)
    return rows


def expected_device_rows(part: salientpp.PartitionedGraph, part_id: int, beta: float) -> tuple[float, float]:
    """Sums inclusion probabilities: rows of an epoch that a part copies to its device, in VIP order (the directory's) and in file order."""
    begin, end = part.book.range_of(part_id)
    seeds = part.split("train", part_id)
    per_part = [part.split("train", other).numel() for other in range(part.num_parts)]
    first = int(beta * (end - begin))
    totals = torch.zeros(2, dtype=torch.float64)
    # Batches of an epoch: full batches and a smaller last one, as many as the part with most seeds has.
    full, rest = divmod(max(per_part), BATCH_SIZE)
    for count, size in ((full, BATCH_SIZE), (1, rest)):
        if count and size:
            chance = (
                salientpp.inclusion_probability(part.graph, seeds, FANOUTS, size, include_seeds=True)[
                    begin:end
                ].double()
                * count
            )
            totals += torch.stack([chance[first:].sum(), by_file(part, chance, begin, end)[first:].sum()])
    return float(totals[0]), float(totals[1])


def run_evaluation(datasets: Datasets, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for graph in arguments.graphs:
        whole, hidden = datasets.file(graph), HIDDEN.get(name_of(graph), HIDDEN_OTHERS)
        root = datasets.root(graph, 4)
        with Cluster(4) as cluster:
            by_rank = cluster.run(
                train_and_evaluate, cluster, root, whole, hidden, arguments.epochs, arguments.ratio, seconds=1500
            )
        found = by_rank[0]
        reached = max(each["val"] for each in found[WAYS[0]]) - 0.005
        for way in WAYS:
            epochs = found[way]
            evaluate = [each["seconds"] for each in epochs]
            at, seconds = seconds_to(reached, found["train_seconds"], evaluate, [each["val"] for each in epochs])
            total = [train + each for train, each in zip(found["train_seconds"], evaluate)]
            rows.append(
                {
                    "graph": name_of(graph),
                    "hosts": 4,
                    "hidden": hidden,
                    "way": way,
                    "train_seconds": found["train_seconds"],
                    "evaluation_seconds": evaluate,
                    "seconds_per_epoch": statistics.median(total),
                    "val_accuracy": [each["val"] for each in epochs],
                    "test_accuracy": [each["test"] for each in epochs],
                    "bytes_by_host": [
                        statistics.mean(rank[way][epoch]["bytes"] for rank in by_rank) for epoch in range(len(epochs))
                    ],
                    "target": reached,
                    "epochs_to_target": at,
                    "seconds_to_target": seconds,
                    **found["facts"],
                }
            )
            print(rows[-1], flush=True)
    return rows


def run_accuracy(datasets: Datasets, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for graph in arguments.graphs:
        for seed in range(arguments.seeds):
            for num_hosts, alpha in ((1, 0.0), (4, 0.32)):
                started = time.perf_counter()
                with Cluster(num_hosts) as cluster:
                    accuracy = cluster.run(
                        train_and_test,
                        datasets.root(graph, num_hosts),
                        4 * BATCH_SIZE // num_hosts,
                        alpha,
                        seed,
                        arguments.epochs,
                    )[0]
                rows.append(
                    {
                        "graph": name_of(graph),
                        "hosts": num_hosts,
                        "replication_factor": alpha,
                        "seed": seed,
                        "epochs": arguments.epochs,
                        "test_accuracy": accuracy,
                        "seconds": time.perf_counter() - started,
                    }
                )
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"any of {', '.join(TABLES)}; none: all")
    parser.add_argument(
        "--graphs",
        nargs="+",
        default=["generated"],
        metavar="GRAPH",
        help="generated, npz:FILE, ...; alpha and slow take the first",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        nargs="+",
        default=[2, 4, 8],
        help="number of hosts of steps, lookahead and partial; the others take 4",
    )
    parser.add_argument("--turns", type=int, default=3, help="epochs of each configuration, taking turns")
    parser.add_argument("--ratio", type=float, default=2.1, help="communication without a cache divided by computation")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of accuracy and evaluation")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of accuracy")
    arguments = parser.parse_args()
    unknown = set(arguments.tables) - set(TABLES)
    if unknown:
        parser.error(f"TABLE must be among {', '.join(TABLES)}, got {', '.join(sorted(unknown))}")
    reason = unavailable()
    if reason is not None:
        sys.exit(f"no hosts can be emulated here: {reason}")
    multiprocessing.set_forkserver_preload(["torch", "torch_geometric.nn", "salientpp"])
    workload = {
        "fanouts": FANOUTS,
        "batch_size": BATCH_SIZE,
        "most_seeds": MOST_SEEDS,
        "most_tested": MOST_TESTED,
        "generated": GENERATED,
    }
    with tempfile.TemporaryDirectory() as folder:
        datasets = Datasets(Path(folder))
        for table in arguments.tables or TABLES:
            started = time.perf_counter()
            rows = globals()[f"run_{table}"](datasets, arguments)
            write_results(
                f"paper_{table}",
                rows,
                **workload,
                ratio_wanted=arguments.ratio,
                took_seconds=round(time.perf_counter() - started),
            )


if __name__ == "__main__":
    main()
