"""Measures training: steps alone, whole epochs with the loader, and the peak memory of a step. Writes results/train.json.

    python benchmarks/bench_train.py [--graphs generated facebook_pages debian_full] [--data FOLDER]
        [--models GraphSAGE GCN GIN GAT GATv2] [--shapes 3x256 2x64] [--rounds 5] [--turns 2]

A case is a graph, a shape (layers, hidden channels, fanouts) and a model of PyG's layers, trained with Adam on the CPU. Its contenders run in one process and
take turns:

* PyG's loader with the model as users write it;
* the same with layers trimmed by hand, on ``edge_index`` and on ``SparseTensor``;
* our loader with the model as users write it;
* our loader with ``salientpp.nn.trim(model)``.

Measurements:

* Steps: forward, backward and Adam on a batch that was drawn before. All loaders have the same seeds; each draws its own neighbours. Medians of rounds. A
  trimmed model makes the process keep freed memory, so its timed step follows another one. Other contenders begin after the kept memory was returned.
* Epochs: loader with ``--workers`` workers, and steps. A turn is an epoch that is left after some batches, of which the first is warm-up. Figures are medians
  of the turns' means. Waiting is the time inside ``next()``.
* Peak memory: the rise of the process's resident bytes during one step (Linux).
* Losses: losses of one batch with the parameters of the plain model. A difference of more than 1e-4 stops the run. GCN trimmed by hand is known to differ,
  because its degrees lack the edges that were cut; that difference is recorded.
* Floor, for GraphSAGE: the dense products of the rows that the seeds need, activations, loss and Adam, without anything sparse.

Cases that take longer than ``--seconds`` and ``--epoch-seconds`` allow get fewer rounds, turns and batches. All defaults together take 25 minutes on two cores;
``--graphs facebook_pages --shapes 2x64`` takes two. Real graphs, made symmetric, lie in the folder of ``SALIENTPP_TEST_DATA``.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
from salientpp.ops import keep_freed_blocks

HEADS = 4
REAL = ["facebook_pages", "debian_full"]
TOLERANCE = 1e-4  # difference of float32 losses that are equal except for rounding


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


#: Name -> function that makes a layer from one width to another. Its third argument says whether the layer is the model's last.
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
    """Returns the number of rows that the seeds need of each layer's output, the first layer first."""
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
    """A loader and a model that are trained.

    Attributes:
        loader: a key of the loaders: ``"salientpp"``, ``"PyG"`` or ``"PyG, adj_t"``.
        forward: (model, batch) -> rows of the seeds.
        by_hand: the user has to rewrite the model for it.
        prepare: turns the plain model into the model to train.
    """

    name: str
    loader: str
    forward: Callable[[Any, Data], Tensor]
    by_hand: bool = False
    prepare: Callable[[Any], Module] = lambda model: model


FLOOR = Contender("dense products", "salientpp", products)


def contenders_of(model: str) -> list[Contender]:
    """Returns all contenders whose libraries are installed, the package's own first."""
    found = [
        Contender("salientpp, nn.trim", "salientpp", as_written, prepare=salientpp.nn.trim),
        Contender("salientpp", "salientpp", as_written),
    ]
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


def graphs_of(data: Data) -> dict[str, Data]:
    """Returns the graph in the form that each loader takes."""
    graphs = {"salientpp": data}
    if PYG:
        graphs["PyG"] = data
    if PYG and torch_geometric.typing.WITH_TORCH_SPARSE:
        graphs["PyG, adj_t"] = ToSparseTensor()(copy.copy(data))
    return graphs


def loaders_of(graphs: dict[str, Data], seeds: Tensor, shape: Shape, **options: Any) -> dict[str, Any]:
    """Returns one loader for each key that contenders name."""
    loaders = {
        name: salientpp.NeighborLoader(graph, shape.fanouts, seeds, **options)
        if name == "salientpp"
        else pyg_loader(PYG[0], graph, shape.fanouts, seeds, **options)
        for name, graph in graphs.items()
    }
    settle()
    return loaders


class Trainee:
    """A contender with a model and an optimizer of its own."""

    def __init__(self, contender: Contender, model: Module) -> None:
        self.contender = contender
        self.model = contender.prepare(copy.deepcopy(model))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def gradients(self, batch: Data) -> Tensor:
        """Computes gradients and returns the loss."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.contender.forward(self.model, batch), batch.y[: batch.batch_size])
        loss.backward()
        return loss.detach()

    def step(self, batch: Data) -> float:
        loss = self.gradients(batch)
        self.optimizer.step()
        return loss.item()

    def take_turn(self) -> None:
        """Lets the process keep freed memory if this contender's own code does that, and returns what others have kept."""
        keep_freed_blocks(False)
        keep_freed_blocks(self.keeps_memory)

    @property
    def keeps_memory(self) -> bool:
        return self.contender.prepare is salientpp.nn.trim


# --- measurements -------------------------------------------------------------------------------------------


class Rounds:
    """Batches of every loader, epoch after epoch. Each round has the next batch of each loader, all with the same seeds."""

    def __init__(self, loaders: dict[str, Any]) -> None:
        self._sources = {name: itertools.chain.from_iterable(itertools.repeat(of)) for name, of in loaders.items()}
        self._sizes: dict[str, list[tuple[int, int]]] = {name: [] for name in loaders}

    def next(self) -> dict[str, Data]:
        batches = {name: next(source) for name, source in self._sources.items()}
        for name, batch in batches.items():
            self._sizes[name].append((sum(batch.num_sampled_nodes), sum(batch.num_sampled_edges)))
        return batches

    def mean_sizes(self, loader: str) -> dict[str, int]:
        rows, edges = (round(statistics.mean(each)) for each in zip(*self._sizes[loader]))
        return {"batch_rows": rows, "batch_edges": edges}


def errors_of(trainees: list[Trainee], batches: dict[str, Data]) -> dict[str, str]:
    """Returns the errors of contenders by hand that cannot run. The others have run every operator once after this."""
    errors = {}
    for trainee in trainees:
        try:
            trainee.gradients(batches[trainee.contender.loader])
        except Exception as error:
            if not trainee.contender.by_hand:
                raise
            errors[trainee.contender.name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return errors


def first_round(trainees: list[Trainee], plain: Module, batches: dict[str, Data]) -> dict[str, dict[str, Any]]:
    """Measures the peak memory of each contender's step, and the difference of its loss from the plain model's on the same batch.

    Raises:
        RuntimeError: a loss differs that should not.
    """
    with torch.no_grad():
        expected = {
            name: F.cross_entropy(as_written(plain, batch), batch.y[: batch.batch_size]).item()
            for name, batch in batches.items()
        }
    figures: dict[str, dict[str, Any]] = {}
    for trainee in trainees:
        contender, batch = trainee.contender, batches[trainee.contender.loader]
        trainee.optimizer.zero_grad()
        gc.collect()
        trainee.take_turn()
        reset_peak()
        before = resident_bytes()
        loss = trainee.step(batch)
        figures[contender.name] = {"step_peak_bytes": resident_bytes(peak=True) - before}
        if contender == FLOOR:
            continue
        difference = abs(loss - expected[contender.loader])
        figures[contender.name]["loss_difference"] = difference
        known = contender.forward is trimmed and isinstance(plain.convs[0], GCNConv)
        if difference > TOLERANCE and not known:
            raise RuntimeError(
                f"{contender.name}: expected the plain model's loss {expected[contender.loader]:.6f}, got {loss:.6f}"
            )
    return figures


def time_round(trainees: list[Trainee], batches: dict[str, Data], first: int) -> dict[str, float]:
    """Returns the seconds of each contender's step. Each round begins with another contender, because the first finds cold caches."""
    times = {}
    first %= len(trainees)
    for trainee in trainees[first:] + trainees[:first]:
        trainee.take_turn()
        if trainee.keeps_memory:  # as after the other steps of an epoch
            trainee.step(batches[trainee.contender.loader])
        started = time.perf_counter()
        trainee.step(batches[trainee.contender.loader])
        times[trainee.contender.name] = time.perf_counter() - started
    return times


def time_epoch(trainee: Trainee, loader: Any, batches: int) -> tuple[float, float]:
    """Returns the mean seconds of a batch after the first, and the seconds of these spent inside ``next()``."""
    trainee.take_turn()
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
    trainees: list[Trainee], loaders: dict[str, Any], allowed: int, arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Returns the times of each contender's epochs.

    Args:
        allowed: number of batches of each contender that the time allows, warm-up included.
    """
    turns = max(1, min(arguments.turns, allowed // 3))
    batches = max(1, min(arguments.batches, allowed // turns - 1))
    times: dict[str, list[tuple[float, float]]] = {trainee.contender.name: [] for trainee in trainees}
    for _ in range(turns):
        for trainee in trainees:
            times[trainee.contender.name].append(time_epoch(trainee, loaders[trainee.contender.loader], batches))
    figures = {}
    for contender in (trainee.contender for trainee in trainees):
        seconds, waited = zip(*times[contender.name])
        figures[contender.name] = {
            "seconds_per_epoch": statistics.median(seconds) * len(loaders[contender.loader]),
            "seconds_per_batch": spread(list(seconds)),
            "seconds_waiting_per_batch": statistics.median(waited),
            "batches_per_turn": min(batches, len(loaders[contender.loader]) - 1),
        }
    return figures


def measure(graphs: dict[str, Data], model: str, shape: Shape, arguments: argparse.Namespace) -> dict[str, list[dict]]:
    """Returns the rows of a case, its floor, and the contenders that cannot run with their errors."""
    torch.manual_seed(0)
    data = graphs["salientpp"]
    widths = (data.x.size(1), shape, int(data.y.max()) + 1)
    if int(data.train_mask.sum()) <= arguments.batch_size:
        raise SystemExit(
            f"an epoch must have 2 batches or more: give a --batch-size below {int(data.train_mask.sum())}"
        )
    plain = Plain(model, *widths)
    trainees = [Trainee(contender, plain) for contender in contenders_of(model)]
    seeds = data.train_mask.nonzero().flatten()
    seeds = seeds[torch.randperm(seeds.numel(), generator=torch.Generator().manual_seed(0))]
    errors = errors_of(trainees, Rounds(loaders_of(graphs, seeds, shape, batch_size=64)).next())
    trainees = [trainee for trainee in trainees if trainee.contender.name not in errors]
    floors = [Trainee(FLOOR, Products(*widths))] if model == "GraphSAGE" else []
    batches = Rounds(loaders_of(graphs, seeds, shape, batch_size=arguments.batch_size))
    began = time.perf_counter()
    steps = first_round([*trainees, *floors], plain, batches.next())
    rounds = max(2, min(arguments.rounds, int(arguments.seconds / (time.perf_counter() - began))))
    times = [time_round([*trainees, *floors], batches.next(), first=number) for number in range(rounds)]
    for name, row in steps.items():
        row["step_seconds"] = spread([of_round[name] for of_round in times])
    loaders = loaders_of(
        graphs, seeds, shape, batch_size=arguments.batch_size, shuffle=True, num_workers=arguments.workers
    )
    seconds = arguments.epoch_seconds * (3 if model == "GraphSAGE" else 1)
    of_round = sum(steps[trainee.contender.name]["step_seconds"]["median"] for trainee in trainees)
    epochs = time_epochs(trainees, loaders, int(seconds / of_round), arguments)
    rows = []
    for contender in (trainee.contender for trainee in trainees):
        row: dict[str, Any] = {"contender": contender.name, "by_hand": contender.by_hand}
        rows.append(row | batches.mean_sizes(contender.loader) | steps[contender.name] | epochs[contender.name])
    return {
        "rows": rows,
        "floors": [{"contender": floor.contender.name, **steps[floor.contender.name]} for floor in floors],
        "left_out": [{"contender": name, "error": error} for name, error in errors.items()],
    }


def report(found: dict[str, list[dict]]) -> None:
    for row in found["rows"] + found["floors"]:
        text = f"  {row['contender']:38} step {row['step_seconds']['median'] * 1e3:8.1f} ms, {row['step_peak_bytes'] / 1e6:6,.0f} MB"
        if "seconds_per_epoch" in row:
            text += f"  epoch {row['seconds_per_epoch']:7.2f} s  loss off by {row['loss_difference']:.1e}"
            text += f"  ({row['batch_rows']:,} rows, {row['batch_edges']:,} edges)"
        print(text, flush=True)
    for row in found["left_out"]:
        print(f"  {row['contender']:38} left out: {row['error']}", flush=True)


def opened(name: str, arguments: argparse.Namespace) -> Data:
    if name == "generated":
        return generated(arguments.vertices, arguments.degree, arguments.features)
    data = load_dataset(f"npz:{Path(arguments.data) / name}.npz", undirected=True)
    data.x = data.x.float()
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--graphs",
        nargs="+",
        help="default: the generated one, and facebook_pages and debian_full if their files exist",
    )
    parser.add_argument("--data", default=os.environ.get("SALIENTPP_TEST_DATA", "."))
    parser.add_argument("--vertices", type=int, default=200_000, help="vertices of the generated graph")
    parser.add_argument("--degree", type=float, default=20)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2, help="workers of the loaders, in epochs")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of steps, after the warm-up")
    parser.add_argument("--seconds", type=float, default=15, help="time for the steps of a case; at least 2 rounds")
    parser.add_argument("--turns", type=int, default=2, help="turns of epochs")
    parser.add_argument("--batches", type=int, default=4, help="batches of a turn, after the warm-up")
    parser.add_argument(
        "--epoch-seconds", type=float, default=35, help="time for the epochs of a case; 3 times that for GraphSAGE"
    )
    arguments = parser.parse_args()
    if not hasattr(
        torch.ops.pyg, "softmax_csr"
    ):  # pyg-lib 0.9.0 wraps this operator, but its wheel may lack it: PyG then fails, on SparseTensor
        torch_geometric.typing.WITH_SOFTMAX = False
    there = [name for name in REAL if (Path(arguments.data) / f"{name}.npz").is_file()]
    results: dict[str, list[dict]] = {"rows": [], "floors": [], "left_out": []}
    for graph in arguments.graphs or ["generated", *there]:
        data = opened(graph, arguments)
        sizes = {"vertices": data.num_nodes, "edges": data.num_edges, "features": data.x.size(1)}
        graphs = graphs_of(data)
        for name, model in itertools.product(arguments.shapes, arguments.models):
            began = time.perf_counter()
            found = measure(graphs, model, SHAPES[name], arguments)
            print(f"{graph}, {model}, {name}: {time.perf_counter() - began:.0f} s", flush=True)
            report(found)
            case = {"graph": graph, "model": model, **asdict(SHAPES[name]), **sizes}
            for kind, rows in found.items():
                results[kind] += [{**case, **row} for row in rows]
    write_results(
        "train",
        **results,
        heads=HEADS,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
