"""Measures training: steps alone, whole epochs with the loader, and the peak memory of a step. Writes results/train.json.

    python benchmarks/bench_train.py [--graphs generated facebook_pages debian_full] [--data FOLDER]
        [--models GraphSAGE GCN GIN GAT GATv2] [--shapes 3x256 2x64] [--rounds 5] [--seconds 25]

A case is a graph, a shape (layers, hidden channels, fanouts) and a model of PyG's layers, trained with Adam on the CPU. Its contenders run in one process and
take turns: PyG's loader with the model as users write it; the same with layers that are trimmed by hand, on ``edge_index`` and on ``SparseTensor``; our loader
with the model as users write it; our loader with ``salientpp.nn.trim(model)``.

* Steps: forward, backward and Adam on a batch that was drawn before and that the contender sees once. All loaders have the same seeds; each draws its own
  neighbours. Medians of rounds. A case that would take longer than ``--seconds`` gets fewer rounds, two at least.
* Peak memory: how far the resident bytes of the process rise during one step (Linux).
* Epochs: loader with ``--workers`` workers, and steps. A turn is an epoch that is left after some batches, the first one as warm-up; figures are medians
  of the turns' means. Waiting is the time inside ``next()``.
* Losses: of the first batch, with the parameters that the plain model has. A difference of more than 1e-4 stops the run. GCN trimmed by hand
  is known to differ, because degrees then lack the edges that were cut; that difference is recorded.
* Floor, for GraphSAGE: the dense products of the rows that the seeds need, activations, loss and Adam, without anything sparse.

Real graphs, made symmetric, lie in the folder of ``SALIENTPP_TEST_DATA``.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.typing
from common import PYG, generated, pyg_loader, reset_peak, resident_bytes, settle, spread, write_results
from torch import Tensor
from torch.nn import Linear, Module, ModuleList, ReLU, Sequential
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import trim_to_layer

import salientpp
import salientpp.nn
from salientpp.datasets import load_dataset

HEADS = 4
TOLERANCE = 1e-4  # of float32 losses that are equal but for rounding


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    fanouts: list[int]


SHAPES = {"3x256": Shape(3, 256, [15, 10, 5]), "2x64": Shape(2, 64, [10, 10])}


# --- models -------------------------------------------------------------------------------------------------


def attention(layer: type[Module], width_in: int, width_out: int, last: bool) -> Module:
    if last:
        return layer(width_in, width_out, heads=HEADS, concat=False)
    return layer(width_in, width_out // HEADS, heads=HEADS)


#: Name -> the layer from one width to another; the third argument says whether it is the model's last one.
MODELS: dict[str, Callable[[int, int, bool], Module]] = {
    "GraphSAGE": lambda width_in, width_out, last: SAGEConv(width_in, width_out),
    "GCN": lambda width_in, width_out, last: GCNConv(width_in, width_out),
    "GIN": lambda width_in, width_out, last: GINConv(
        Sequential(Linear(width_in, width_out), ReLU(), Linear(width_out, width_out))
    ),
    "GAT": functools.partial(attention, GATConv),
    "GATv2": functools.partial(attention, GATv2Conv),
}


class Plain(Module):
    """A model as users write it."""

    def __init__(self, model: str, columns: int, shape: Shape, classes: int) -> None:
        super().__init__()
        widths = [columns, *[shape.hidden] * (shape.layers - 1), classes]
        last = shape.layers - 1
        self.convs = ModuleList(
            MODELS[model](*pair, layer == last) for layer, pair in enumerate(itertools.pairwise(widths))
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)


class Products(Module):
    """Products of a GraphSAGE's weights with the rows that the seeds need; a row stands for the mean of its neighbours."""

    def __init__(self, columns: int, shape: Shape, classes: int) -> None:
        super().__init__()
        pairs = list(itertools.pairwise([columns, *[shape.hidden] * (shape.layers - 1), classes]))
        self.of_neighbors = ModuleList(Linear(*pair) for pair in pairs)
        self.of_targets = ModuleList(Linear(*pair, bias=False) for pair in pairs)

    def forward(self, batch: Data) -> Tensor:
        x = batch.x
        for layer, targets in enumerate(targets_of_layers(batch)):
            x = x[:targets]
            x = self.of_neighbors[layer](x) + self.of_targets[layer](x)
            x = x.relu() if layer < len(self.of_targets) - 1 else x
        return x


def targets_of_layers(batch: Data) -> list[int]:
    """How many rows the seeds need of each layer's output, the first layer first."""
    return list(itertools.accumulate(batch.num_sampled_nodes[:-1]))[::-1]


# --- forward passes -----------------------------------------------------------------------------------------


def as_written(model: Module, batch: Data) -> Tensor:
    return model(batch.x, edge_index_of(batch))[: batch.batch_size]


def trimmed(model: Plain, batch: Data) -> Tensor:
    """PyG's ``trim_to_layer`` before each layer, on ``edge_index`` or ``adj_t``."""
    x, edges = batch.x, batch.adj_t if "adj_t" in batch else batch.edge_index
    nodes_of_hops, edges_of_hops = batch.num_sampled_nodes, batch.num_sampled_edges
    for layer, conv in enumerate(model.convs):
        x, edges, _ = trim_to_layer(layer, nodes_of_hops, edges_of_hops, x, edges)
        x = conv(x, edges)
        x = x.relu() if layer < len(model.convs) - 1 else x
    return x[: batch.batch_size]


def bipartite(model: Plain, batch: Data) -> Tensor:
    """One bipartite graph per layer, cut out of ``adj_t``: only rows that the seeds need are computed."""
    x, adj_t = batch.x, batch.adj_t
    for layer, (conv, targets) in enumerate(zip(model.convs, targets_of_layers(batch))):
        x = conv((x, x[:targets]), adj_t[:targets].sparse_resize((targets, x.size(0))))
        x = x.relu() if layer < len(model.convs) - 1 else x
    return x


def normalised_before(model: Plain, batch: Data) -> Tensor:
    """A GCN whose edge weights are computed once for the whole batch: then trimming ``adj_t`` is exact."""
    batch = copy.copy(batch)
    batch.adj_t = gcn_norm(batch.adj_t, num_nodes=batch.num_nodes, dtype=batch.x.dtype)
    return trimmed(model, batch)


def products(model: Products, batch: Data) -> Tensor:
    return model(batch)


def edge_index_of(batch: Data) -> Tensor:
    if "adj_t" not in batch:
        return batch.edge_index
    target, source, _ = batch.adj_t.coo()
    return torch.stack([source, target])


# --- contenders ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """Who trains.

    Attributes:
        loader: a key of the loaders: ``"salientpp"``, ``"PyG"`` or ``"PyG, adj_t"``.
        forward: (model, batch) -> rows of the seeds.
        by_hand: the user has to rewrite the model for it.
        prepare: what is made of the plain model before training.
    """

    name: str
    loader: str
    forward: Callable[[Any, Data], Tensor]
    by_hand: bool = False
    prepare: Callable[[Any], Module] = lambda model: model


FLOOR = "dense products"


def contenders_of(model: str) -> list[Contender]:
    """All contenders that this machine has the libraries for; the package's own ones first."""
    found = [Contender("salientpp", "salientpp", as_written)]
    if hasattr(salientpp.nn, "trim"):
        found.insert(0, Contender("salientpp, nn.trim", "salientpp", as_written, prepare=salientpp.nn.trim))
    if PYG:
        found.append(Contender("PyG", "PyG", as_written))
        found.append(Contender("PyG, trim_to_layer", "PyG", trimmed, by_hand=True))
    if PYG and torch_geometric.typing.WITH_TORCH_SPARSE:
        found.append(Contender("PyG, SparseTensor, trim_to_layer", "PyG, adj_t", trimmed, by_hand=True))
        found.append(Contender("PyG, SparseTensor, bipartite", "PyG, adj_t", bipartite, by_hand=True))
        if model == "GCN":
            name = "PyG, SparseTensor, normalised before"
            found.append(Contender(name, "PyG, adj_t", normalised_before, by_hand=True, prepare=without_norm))
    return found


def without_norm(model: Plain) -> Plain:
    for conv in model.convs:
        conv.normalize = conv.add_self_loops = False
    return model


def loaders_of(data: Data, seeds: Tensor, shape: Shape, **options: Any) -> dict[str, Any]:
    """One loader for each key that contenders name."""
    loaders: dict[str, Any] = {"salientpp": salientpp.NeighborLoader(data, shape.fanouts, seeds, **options)}
    if PYG:
        loaders["PyG"] = pyg_loader(PYG[0], data, shape.fanouts, seeds, **options)
    if PYG and torch_geometric.typing.WITH_TORCH_SPARSE:
        adj_t = ToSparseTensor()(copy.copy(data))
        loaders["PyG, adj_t"] = pyg_loader(PYG[0], adj_t, shape.fanouts, seeds, **options)
    settle()
    return loaders


class Trainee:
    """A contender with a model and an optimizer of its own."""

    def __init__(self, contender: Contender, model: Module) -> None:
        self.contender = contender
        self.model = contender.prepare(copy.deepcopy(model))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def loss(self, batch: Data) -> Tensor:
        return F.cross_entropy(self.contender.forward(self.model, batch), batch.y[: batch.batch_size])

    def step(self, batch: Data) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()


# --- measurements -------------------------------------------------------------------------------------------


def without_end(loader: Any) -> Iterator[Data]:
    while True:
        yield from loader


def compare_losses(trainees: list[Trainee], plain: Module, batches: dict[str, Data]) -> tuple[dict[str, float], dict]:
    """What each contender's loss is off the plain model's on the same batch, and the errors of those that cannot run.

    Raises:
        RuntimeError: a loss differs that should not.
    """
    differences: dict[str, float] = {}
    errors: dict[str, str] = {}
    for trainee in trainees:
        name, batch = trainee.contender.name, batches[trainee.contender.loader]
        if name == FLOOR:
            continue
        with torch.no_grad():
            expected = F.cross_entropy(as_written(plain, batch), batch.y[: batch.batch_size]).item()
            try:
                got = trainee.loss(batch).item()
            except Exception as error:
                if not trainee.contender.by_hand:
                    raise
                errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                continue
        differences[name] = abs(got - expected)
        known = trainee.contender.forward is trimmed and isinstance(plain.convs[0], GCNConv)
        if differences[name] > TOLERANCE and not known:
            raise RuntimeError(f"{name}: expected the plain model's loss {expected:.6f} on its batch, got {got:.6f}")
    return differences, errors


def time_steps(trainees: list[Trainee], batches: Iterator[dict[str, Data]], most: int, seconds: float) -> dict:
    """Seconds of each contender's step in every round after the warm-up."""
    times: dict[str, list[float]] = {trainee.contender.name: [] for trainee in trainees}
    rounds = most
    for turn in itertools.count():
        if turn > rounds:
            return times
        of_round = next(batches)
        began = time.perf_counter()
        for trainee in trainees:
            started = time.perf_counter()
            trainee.step(of_round[trainee.contender.loader])
            if turn:
                times[trainee.contender.name].append(time.perf_counter() - started)
        if turn == 0:
            rounds = max(2, min(most, int(seconds / (time.perf_counter() - began))))
    raise AssertionError


def peak_bytes(trainee: Trainee, batch: Data) -> int:
    """How far the resident bytes of the process rise in a step."""
    trainee.optimizer.zero_grad()
    gc.collect()
    reset_peak()
    before = resident_bytes()
    trainee.step(batch)
    return resident_bytes(peak=True) - before


def time_epoch(trainee: Trainee, loader: Any, batches: int) -> tuple[float, float]:
    """Mean seconds of a batch after the first, and those of them spent inside ``next()``."""
    seconds, waited, iterator = 0.0, 0.0, iter(loader)
    taken = min(batches + 1, len(loader))
    for number in range(taken):
        started = time.perf_counter()
        batch = next(iterator)
        arrived = time.perf_counter()
        trainee.step(batch)
        if number:
            seconds += time.perf_counter() - started
            waited += arrived - started
        del batch
    return seconds / (taken - 1), waited / (taken - 1)


def time_epochs(
    trainees: list[Trainee], loaders: dict[str, Any], of_step: dict[str, float], arguments: argparse.Namespace
) -> dict[str, list[tuple[float, float]]]:
    """(seconds, seconds waiting) per batch of each contender in every turn."""
    round_seconds = sum(of_step[trainee.contender.name] for trainee in trainees)
    fits = int(arguments.seconds / round_seconds)  # batches of each contender, with those that warm up
    turns = max(1, min(arguments.turns, fits // 3))
    batches = max(1, min(arguments.batches, fits // turns - 1))
    times: dict[str, list[tuple[float, float]]] = {trainee.contender.name: [] for trainee in trainees}
    for _ in range(turns):
        for trainee in trainees:
            times[trainee.contender.name].append(time_epoch(trainee, loaders[trainee.contender.loader], batches))
    return times


def measure(data: Data, model: str, shape: Shape, arguments: argparse.Namespace) -> tuple[list[dict], dict, dict]:
    """A case: a row for each contender, the floor, and the errors of contenders that cannot run."""
    torch.manual_seed(0)
    classes = int(data.y.max()) + 1
    plain = Plain(model, data.x.size(1), shape, classes)
    trainees = [Trainee(contender, plain) for contender in contenders_of(model)]
    if model == "GraphSAGE":
        floor = Contender(FLOOR, "salientpp", products)
        trainees.append(Trainee(floor, Products(data.x.size(1), shape, classes)))
    seeds = data.train_mask.nonzero().flatten()
    seeds = seeds[torch.randperm(seeds.numel(), generator=torch.Generator().manual_seed(0))]
    loaders = loaders_of(data, seeds, shape, batch_size=arguments.batch_size)
    sources = {name: without_end(loader) for name, loader in loaders.items()}
    sizes: dict[str, list[tuple[int, int]]] = {name: [] for name in loaders}

    def rounds() -> Iterator[dict[str, Data]]:
        while True:
            drawn = {name: next(source) for name, source in sources.items()}
            for name, batch in drawn.items():
                sizes[name].append((batch.num_nodes, sum(batch.num_sampled_edges)))
            yield drawn

    batches = rounds()
    differences, errors = compare_losses(trainees, plain, next(batches))
    trainees = [trainee for trainee in trainees if trainee.contender.name not in errors]
    seconds = time_steps(trainees, batches, arguments.rounds, arguments.seconds)
    last = next(batches)
    peaks = {trainee.contender.name: peak_bytes(trainee, last[trainee.contender.loader]) for trainee in trainees}
    of_step = {name: statistics.median(times) for name, times in seconds.items()}
    trainees = [trainee for trainee in trainees if trainee.contender.name != FLOOR]
    loaders = loaders_of(
        data, seeds, shape, batch_size=arguments.batch_size, shuffle=True, num_workers=arguments.workers
    )
    epochs = time_epochs(trainees, loaders, of_step, arguments)
    rows = []
    for trainee in trainees:
        name, loader = trainee.contender.name, trainee.contender.loader
        per_batch = statistics.median(total for total, _ in epochs[name])
        drawn = [statistics.mean(each) for each in zip(*sizes[loader])]
        row = {
            "contender": name,
            "by_hand": trainee.contender.by_hand,
            "batch_rows": round(drawn[0]),
            "batch_edges": round(drawn[1]),
            "step_seconds": spread(seconds[name]),
            "step_peak_bytes": peaks[name],
            "loss_difference": differences[name],
            "seconds_per_epoch": per_batch * len(loaders[loader]),
            "seconds_per_batch": per_batch,
            "seconds_waiting_per_batch": statistics.median(waited for _, waited in epochs[name]),
            "turns": len(epochs[name]),
        }
        rows.append(row)
        print(
            f"  {name:38} {row['batch_rows']:8,} rows {row['batch_edges']:8,} edges  step {of_step[name] * 1e3:8.1f} ms, {peaks[name] / 1e6:7.0f} MB  "
            f"epoch {row['seconds_per_epoch']:7.2f} s  loss off by {differences[name]:.1e}",
            flush=True,
        )
    found = {}
    if FLOOR in seconds:
        found = {"step_seconds": spread(seconds[FLOOR]), "step_peak_bytes": peaks[FLOOR]}
        print(f"  {FLOOR:38} step {of_step[FLOOR] * 1e3:8.1f} ms, {peaks[FLOOR] / 1e6:.0f} MB", flush=True)
    return rows, found, errors


def opened(name: str, arguments: argparse.Namespace) -> Data:
    if name == "generated":
        return generated(arguments.vertices, arguments.degree, arguments.features)
    data = load_dataset(f"npz:{Path(arguments.data) / name}.npz", undirected=True)
    data.x = data.x.float()
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=["generated", "facebook_pages", "debian_full"])
    parser.add_argument("--data", default=os.environ.get("SALIENTPP_TEST_DATA", "."))
    parser.add_argument("--vertices", type=int, default=200_000, help="of the generated graph")
    parser.add_argument("--degree", type=float, default=20)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2, help="of the loaders, in epochs")
    parser.add_argument("--rounds", type=int, default=5, help="of steps, after the warm-up")
    parser.add_argument("--turns", type=int, default=3, help="of epochs")
    parser.add_argument("--batches", type=int, default=6, help="of an epoch, after the warm-up")
    parser.add_argument("--seconds", type=float, default=25, help="of a case's steps, and again of its epochs")
    arguments = parser.parse_args()
    if not hasattr(
        torch.ops.pyg, "softmax_csr"
    ):  # pyg-lib 0.9.0 wraps this operator, but its wheel may lack it: PyG then fails, on SparseTensor
        torch_geometric.typing.WITH_SOFTMAX = False
    rows: list[dict] = []
    floors: list[dict] = []
    left_out: list[dict] = []
    for graph in arguments.graphs:
        data = opened(graph, arguments)
        sizes = {"vertices": data.num_nodes, "edges": data.num_edges, "features": data.x.size(1)}
        for name, model in itertools.product(arguments.shapes, arguments.models):
            print(f"{graph}, {model}, {name}", flush=True)
            shape = SHAPES[name]
            found, floor, errors = measure(data, model, shape, arguments)
            case = {"graph": graph, "model": model, "layers": shape.layers, "hidden": shape.hidden}
            rows += [{**case, "fanouts": shape.fanouts, **sizes, **row} for row in found]
            floors += [{**case, **floor}] if floor else []
            left_out += [{**case, "contender": who, "error": error} for who, error in errors.items()]
            for who, error in errors.items():
                print(f"  {who:38} left out: {error}", flush=True)
    write_results(
        "train",
        rows,
        floors=floors,
        left_out=left_out,
        heads=HEADS,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
