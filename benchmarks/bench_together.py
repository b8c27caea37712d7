"""Compares strategies of training deep models on hosts with several ranks. Writes results/together.json. Needs root and iproute2.

    python benchmarks/bench_together.py [--data FOLDER] [--only facebook_pages GraphSAGE-14] [--strategies halo private]

Two hosts of 2 or 4 ranks are emulated by network namespaces (benchmarks/cluster.py) with links of a set rate. Ranks of one host do not use the link. A cell is
a graph, a number of ranks and a model. In each cell every strategy (benchmarks/strategies.py) trains the same model for the same number of epochs, in processes
of its own. The first epoch is warm-up. Then the model is evaluated on the test vertices with all neighbours.

* Seconds: median of the epochs, from barrier to barrier.
* Bytes: received by both hosts over their links in an epoch, with all headers, rows and gradients.
* Rows: received by a rank from ranks of other hosts, and of its own host, summed over the ranks. Gradients of rows, which travel back, are not counted.
* Computed: output rows of all layers, summed over layers and ranks. Each is computed forward and backward.
* Memory: resident bytes of the largest rank at its peak in the epochs, less those before the graph was opened. Memory that ranks share counts on each of them.
* Gradient error of a strategy with the whole graph: norm of the difference from the exact gradient in the first step, divided by the norm of the latter.
  It is computed if the strategy 'halo' is measured too.

Graphs are made symmetric. METIS divides the vertices among the hosts, and those of a host among its ranks. All ranks share the cores of one machine: the
network is slowed, computation is not.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import Cluster, bytes_received, unavailable
from common import reset_peak, resident_bytes, write_results
from strategies import STRATEGIES, Network, Setting, missing
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp.datasets import load_dataset, synthetic
from salientpp.fullgraph import accuracy, distribute, local

HOSTS = 2
FANOUTS = {3: [15, 10, 5], 7: [4] * 7, 14: [2] * 14}
TRAINED = 1000  # seconds until a strategy counts as stuck
EXACT = "halo"  # the strategy whose gradient is exact


@dataclass(frozen=True)
class Cell:
    """A graph, ranks and a model. All strategies train it for ``epochs``, the first of which is warm-up."""

    graph: str
    ranks_per_host: int
    model: str
    layers: int
    epochs: int

    @property
    def is_ranked(self) -> bool:
        """True if preloading of one hop is also measured with a low fanout."""
        return self.layers == 3 and self.ranks_per_host == 2

    def __str__(self) -> str:
        return f"{self.graph} {HOSTS}x{self.ranks_per_host} {self.model}-{self.layers}"


CELLS = [
    *(Cell(graph, 2, "GraphSAGE", 3, 10) for graph in ("generated", "tolokers", "facebook_pages")),
    Cell("debian_full", 2, "GraphSAGE", 3, 4),
    *(Cell(graph, 2, "GAT", 3, 4) for graph in ("generated", "tolokers", "facebook_pages")),
    Cell("debian_full", 2, "GAT", 3, 2),
    *(Cell(graph, 2, "GraphSAGE", 7, 4) for graph in ("generated", "tolokers", "facebook_pages")),
    Cell("debian_full", 2, "GraphSAGE", 7, 2),
    *(Cell(graph, 2, "GraphSAGE", 14, 4) for graph in ("generated", "tolokers", "facebook_pages")),
    Cell("debian_full", 2, "GraphSAGE", 14, 2),
    *(Cell(graph, 4, "GraphSAGE", 3, 4) for graph in ("generated", "tolokers", "facebook_pages", "debian_full")),
    *(Cell(graph, 4, "GraphSAGE", 7, 4) for graph in ("generated", "facebook_pages")),
    *(Cell(graph, 4, "GAT", 3, 4) for graph in ("generated", "tolokers", "facebook_pages")),
    Cell("facebook_pages", 4, "GraphSAGE", 14, 4),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("SALIENTPP_TEST_DATA", "."), help="folder of the real graphs")
    parser.add_argument("--only", nargs="*", default=[], help="words; cells whose name has all of them are measured")
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--vertices", type=int, default=20_000, help="vertices of the generated graph")
    parser.add_argument("--megabytes-per-second", type=float, default=20, help="MB/s of each link, each way")
    parser.add_argument("--batches", type=int, default=4, help="batches of a rank in an epoch")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--alpha", type=float, default=0.16, help="replication factor of the caches")
    parser.add_argument("--epochs", type=int, help="epochs of every cell, instead of each cell's own number")
    parser.add_argument("--results", default="together", help="name of the result file")
    arguments = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        raise SystemExit(reason)
    multiprocessing.set_forkserver_preload(["torch", "torch_geometric.nn", "salientpp.fullgraph"])
    names = []
    for name in arguments.strategies:
        lacking = missing(name)
        if lacking is None:
            names.append(name)
        else:
            print(f"{name}: skipped, because this version lacks {lacking}", flush=True)
    cells = [cell for cell in CELLS if all(word in str(cell).split() for word in arguments.only)]
    if not cells:
        raise SystemExit("no cell has all words of --only; the cells are " + ", ".join(map(str, CELLS)))
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        graphs = Graphs(Path(folder), arguments)
        for cell in cells:
            for row in measured(cell, graphs, names, arguments):
                rows.append(row)
                tell(row, time.perf_counter() - began)
                write_results(  # keeps finished rows
                    arguments.results, rows, megabytes_per_second=arguments.megabytes_per_second, hidden=arguments.hidden, alpha=arguments.alpha,
                    batches=arguments.batches, vertices=arguments.vertices, hosts=HOSTS, fanouts=FANOUTS, skipped=sorted({*STRATEGIES} - {*names}),
                    load_average=os.getloadavg()[0], minutes=(time.perf_counter() - began) / 60,
                )  # fmt: skip


class Graphs:
    """The graphs of the cells, opened and divided once for each number of ranks."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self._folder, self._arguments = folder, arguments
        self._hosts: dict[str, Tensor] = {}
        self._opened: tuple[str, Data] | None = None

    def root(self, graph: str, ranks_per_host: int) -> Path:
        """Returns the directory of a graph in parts; ranks h R to h R + R - 1 are on host h."""
        root = self._folder / f"{graph}-{ranks_per_host}"
        if not root.exists():
            data = self._open(graph)
            if graph not in self._hosts:
                self._hosts[graph] = self._divide(data, HOSTS)
            host = self._hosts[graph]
            assignment = host * ranks_per_host
            for number in range(HOSTS):
                of_host = (host == number).nonzero().flatten()
                assignment[of_host] += self._divide(data.subgraph(of_host), ranks_per_host)
            salientpp.partition(data, HOSTS * ranks_per_host, root, method=assignment)
        return root

    def _open(self, graph: str) -> Data:
        if self._opened is None or self._opened[0] != graph:
            if graph == "generated":
                data = synthetic(num_vertices=self._arguments.vertices, train_fraction=0.5, community_size=500)
            else:
                data = load_dataset(f"npz:{Path(self._arguments.data) / graph}.npz", undirected=True)
            if graph == "tolokers":  # the scales of its columns differ by orders of magnitude
                data.x = (data.x - data.x.mean(0)) / data.x.std(0)
            self._opened = graph, data
        return self._opened[1]

    def _divide(self, data: Data, parts: int) -> Tensor:
        """Returns the parts that METIS assigns to the vertices, int64 [N]."""
        with tempfile.TemporaryDirectory() as folder:
            part = salientpp.partition(data, parts, Path(folder) / "parts", refine=False)
            assignment = torch.empty(data.num_nodes, dtype=torch.int64)
            for number in range(parts):
                assignment[part.original_id(part.split("all", number))] = number
        return assignment


def measured(cell: Cell, graphs: Graphs, names: list[str], arguments: argparse.Namespace) -> Any:
    """Yields a row for each strategy of a cell."""
    root = graphs.root(cell.graph, cell.ranks_per_host)
    part = salientpp.load(root)
    seeds = sum(part.split("train", number).numel() for number in range(part.num_parts))
    batch_size = math.ceil(seeds / (part.num_parts * arguments.batches))
    names = [name for name in names if cell.is_ranked or not name.endswith("few")]
    setting = Setting(
        HOSTS, cell.ranks_per_host, cell.model, cell.layers, arguments.hidden, FANOUTS[cell.layers], batch_size, arguments.alpha
    )  # fmt: skip
    epochs = arguments.epochs or cell.epochs
    sizes = {"vertices": part.num_vertices, "edges": part.num_edges, "train": seeds, "batch_size": batch_size}
    exact: Tensor | None = None
    with Cluster(HOSTS, arguments.megabytes_per_second * 1e6, cell.ranks_per_host) as cluster:
        for name in names:
            row = {**asdict(cell), "epochs": epochs, **sizes, "strategy": name}
            try:
                of_ranks = cluster.run(train, str(root), name, setting, epochs, seconds=TRAINED)
            except Exception as error:
                yield {**row, "error": f"{type(error).__name__}: {error}"}
            else:
                row |= combined(of_ranks, cell.ranks_per_host)
                gradient = of_ranks[0]["gradient"]
                exact = gradient if name == EXACT else exact
                if gradient is not None and exact is not None:
                    row["gradient_error"] = float((gradient - exact).norm() / exact.norm())
                yield row


def combined(of_ranks: list[dict[str, Any]], per_host: int) -> dict[str, Any]:
    """Returns the figures of all ranks together."""
    seconds = [max(of_epoch) for of_epoch in zip(*(of_rank["seconds"] for of_rank in of_ranks))]
    received = [sum(of_epoch) for of_epoch in zip(*(of_rank["bytes"] for of_rank in of_ranks[::per_host]))]
    rows = {name: sum(of_rank["rows"][name] for of_rank in of_ranks) for name in of_ranks[0]["rows"]}
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "bytes_between": statistics.median(received),
        "computed": sum(of_rank["computed"] for of_rank in of_ranks),
        **{name: max(of_rank[name] for of_rank in of_ranks) for name in ("memory", "memory_to_make")},
        "seconds_to_make": max(of_rank["made"] for of_rank in of_ranks),
        **{name: of_ranks[0][name] for name in ("accuracy", "largest_class")},
        **rows,
    }


def train(rank: int, root: str, name: str, setting: Setting, epochs: int) -> dict[str, Any]:
    """Trains with one strategy. Returns the figures of this rank."""
    reset_peak()
    before = resident_bytes()
    torch.manual_seed(0)
    part = salientpp.load(root)
    network = Network(setting, part.num_features, part.num_classes)
    begun = time.perf_counter()
    strategy = STRATEGIES[name](part, network, setting)
    made, peak_of_making = time.perf_counter() - begun, resident_bytes(peak=True)
    reset_peak()
    seconds, received = [], []
    for number in range(epochs):
        network.computed = 0
        dist.barrier()
        bytes_before, begun = bytes_received(), time.perf_counter()
        strategy.train_epoch(number)
        dist.barrier()
        if number:  # the first epoch is warm-up
            seconds.append(time.perf_counter() - begun)
            received.append(bytes_received() - bytes_before)
    figures = {
        "seconds": seconds,
        "bytes": received,
        "computed": network.computed,
        "memory": resident_bytes(peak=True) - before,
        "memory_to_make": peak_of_making - before,
        "made": made,
        "rows": strategy.rows(),
    }
    return {**figures, "gradient": strategy.first_gradient if rank == 0 else None, **tested(part, network)}


@torch.no_grad()
def tested(part: Any, network: Network) -> dict[str, float]:
    """Returns the accuracy on the test vertices with all neighbours, and the share of these vertices that are of the class with most training vertices."""
    graph = local(part, dtype=torch.float32)
    model = distribute(network, graph).eval()
    out, y, mask = model(graph.x, graph.edge_index), graph.y, graph.test_mask
    counts = torch.bincount(y[graph.train_mask], minlength=out.size(1))
    dist.all_reduce(counts)
    largest = torch.full_like(y[mask], int(counts.argmax()))
    return {"accuracy": accuracy(out[mask], y[mask], graph), "largest_class": accuracy(largest, y[mask], graph)}


def tell(row: dict[str, Any], seconds: float) -> None:
    cell = f"{seconds:5.0f} s: {row['graph']:14} {HOSTS}x{row['ranks_per_host']} {row['model']}-{row['layers']:<2} {row['strategy']:18}"
    if "error" in row:
        print(f"{cell} failed: {row['error']}", flush=True)
        return
    print(
        f"{cell} {row['seconds']:7.3f} s, {row['bytes_between'] / 1e6:8.2f} MB, {row['rows_between']:10,} rows between, {row['rows_inside']:10,} inside, "
        f"{row['computed']:12,} computed, {row['memory'] / 1e6:6.0f} MB memory, {row['accuracy']:6.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
