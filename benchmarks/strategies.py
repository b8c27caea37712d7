"""Strategies that train one model on a graph divided over hosts with several ranks each: the whole graph in each step, or batches.

Every strategy is made on all ranks. :data:`STRATEGIES` has them by name.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LayerNorm, Module, ModuleList
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GATConv, SAGEConv

import salientpp
import salientpp.fullgraph
from salientpp import NeighborLoader
from salientpp.fullgraph import LocalGraph, distribute, local, loss_mean

HEADS, LEARNING_RATE = 4, 0.005
#: Most in-neighbours of other hosts that a vertex picks. Recorded results with picks by VIP had other fanouts for random picks, so that equal numbers of
#: rows were preloaded.
FANOUT, FEW = 15, 2


@dataclass(frozen=True)
class Setting:
    """Values that all strategies of a cell share.

    Attributes:
        model: 'GraphSAGE' or 'GAT'.
        batch_size: seeds of a rank in a batch. A cooperative batch has the seeds of all ranks of a host.
        alpha: size of a host's cache of rows, as :class:`salientpp.NeighborLoader` defines it.
    """

    hosts: int
    ranks_per_host: int
    model: str
    layers: int
    hidden: int
    fanouts: list[int]
    batch_size: int
    alpha: float


class Network(Module):
    """Layers of one kind with normalised rows, ReLU and skip connections between them.

    Attributes:
        computed: rows that layers have computed so far, summed over the layers.
    """

    def __init__(self, setting: Setting, columns: int, classes: int) -> None:
        super().__init__()
        widths = [columns, *[setting.hidden] * (setting.layers - 1), classes]
        last = setting.layers - 1
        self.convs = ModuleList(
            _layer(setting.model, *pair, layer == last) for layer, pair in enumerate(itertools.pairwise(widths))
        )
        self.norms = ModuleList(LayerNorm(setting.hidden) for _ in range(last))
        self.computed = 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv, norm in zip(self.convs[:-1], self.norms, strict=True):
            out = norm(self._counted(conv(x, edge_index))).relu()
            # A layer may compute only the first rows, those that the seeds need.
            x = out + x[: out.size(0)] if out.size(1) == x.size(1) else out
        return self._counted(self.convs[-1](x, edge_index))

    def _counted(self, rows: Tensor) -> Tensor:
        self.computed += rows.size(0)
        return rows


def _layer(model: str, columns_in: int, columns_out: int, is_last: bool) -> Module:
    if model == "GraphSAGE":
        return SAGEConv(columns_in, columns_out)
    heads = 1 if is_last else HEADS
    return GATConv(columns_in, columns_out // heads, heads)


class Strategy(Protocol):
    """Trains on this rank, together with the same object on all other ranks. It is made on all of them.

    Attributes:
        first_gradient: gradient of all parameters in the first step, if the strategy uses the whole graph in each step; else None.
    """

    first_gradient: Tensor | None

    def train_epoch(self, number: int) -> None:
        """Uses every training vertex once."""

    def rows(self) -> dict[str, int]:
        """Returns the rows that this rank received in the last epoch: 'rows_between' from other hosts, 'rows_inside' from other ranks of its host.

        'rows_before' are rows that it received from other hosts before the first epoch, beside those of a cache.
        """


class WholeGraph:
    """The whole graph in each step. Rows of the halo travel at each layer.

    Args:
        options: of :func:`salientpp.fullgraph.local`.
    """

    def __init__(self, part: Any, network: Network, setting: Setting, **options: Any) -> None:
        self._network, self._setting = network, setting
        self.graph = local(part, dtype=torch.float32, **options)
        self._model = distribute(network, self.graph)
        self._optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
        self.first_gradient: Tensor | None = None

    def train_epoch(self, number: int) -> None:
        self._optimizer.zero_grad()
        step_over(self._model, self.graph)
        if self.first_gradient is None:
            self.first_gradient = gradient_of(self._network)
        self._optimizer.step()

    def rows(self) -> dict[str, int]:
        hops = self.graph.hops
        routes = [hops[min(layer, len(hops) - 1)].route for layer in range(self._setting.layers)]
        ranks = self._ranks()
        rows = {"rows_between": 0, "rows_inside": 0, "rows_before": getattr(self.graph, "preloaded_rows", 0)}
        host = dist.get_rank() // self._setting.ranks_per_host
        for sender, *counts in zip(ranks, *(route.recv_counts for route in routes), strict=True):
            is_here = sender // self._setting.ranks_per_host == host
            rows["rows_inside" if is_here else "rows_between"] += sum(counts)
        return rows

    def _ranks(self) -> range:
        """Returns the ranks that exchange rows."""
        size, per_host = self.graph.ranks.size, self._setting.ranks_per_host
        if size == dist.get_world_size():
            return range(size)
        first = dist.get_rank() // per_host * per_host
        return range(first, first + size)


def preloading(part: Any, network: Network, setting: Setting, **options: Any) -> WholeGraph:
    """Makes a strategy in which each host keeps vertices of other hosts. Rows travel inside the host only."""
    preload = salientpp.fullgraph.Preload(**options)
    return WholeGraph(part, network, setting, preload=preload, ranks_per_host=setting.ranks_per_host)


class Private:
    """Every rank has batches of its own, and DDP averages the gradients. The ranks of a host share rows and a cache.

    Args:
        trimmed: if True, layers compute only the rows that the seeds need.
    """

    first_gradient = None

    def __init__(self, part: Any, network: Network, setting: Setting, trimmed: bool) -> None:
        self._loader = _loader_of(part, setting)
        self._model = DistributedDataParallel(salientpp.nn.trim(network) if trimmed else network)
        self._optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)

    def train_epoch(self, number: int) -> None:
        self._loader.set_epoch(number)
        self._loader.reset_stats()
        for batch in self._loader:
            self._optimizer.zero_grad()
            seeds = batch.batch_size
            F.cross_entropy(self._model(batch.x, batch.edge_index)[:seeds], batch.y[:seeds]).backward()
            self._optimizer.step()

    def rows(self) -> dict[str, int]:
        return {"rows_between": self._loader.stats().rows_remote, "rows_inside": 0, "rows_before": 0}


class Together:
    """The ranks of a host compute one batch together. Rows of a layer travel inside the host. Caches are as in :class:`Private`.

    Args:
        trimmed: if True, layers compute and exchange only the rows that the seeds need.
    """

    first_gradient = None

    def __init__(self, part: Any, network: Network, setting: Setting, trimmed: bool) -> None:
        self._loader = _loader_of(part, setting, cooperate="host")
        self._model = distribute(salientpp.nn.trim(network) if trimmed else network, self._loader)
        self._optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
        self._layers, self._trimmed = setting.layers, trimmed
        self._inside = 0

    def train_epoch(self, number: int) -> None:
        self._loader.set_epoch(number)
        self._loader.reset_stats()
        self._inside = 0
        for batch in self._loader:
            self._optimizer.zero_grad()
            seeds = batch.batch_size
            out = self._model(batch.x, batch.edge_index)[:seeds]
            losses = F.cross_entropy(out, batch.y[:seeds], reduction="none")
            loss_mean(losses, self._model).backward()
            self._optimizer.step()
            self._inside += self._rows_inside(batch.edge_index.hops.share)

    def _rows_inside(self, share: Any) -> int:
        """Returns the rows of other ranks that the layers of this rank get for a batch."""
        depths = range(self._layers, 0, -1)
        return sum(within[depth if self._trimmed else -1] for within in share.received for depth in depths)

    def rows(self) -> dict[str, int]:
        return {"rows_between": self._loader.stats().rows_remote, "rows_inside": self._inside, "rows_before": 0}


def _loader_of(part: Any, setting: Setting, **options: Any) -> NeighborLoader:
    return NeighborLoader(
        part, setting.fanouts, "train", batch_size=setting.batch_size, shuffle=True, seed=0, num_workers=1, dtype=torch.float32,
        replication_factor=setting.alpha, ranks_per_host=setting.ranks_per_host, **options,
    )  # fmt: skip


def step_over(model: Module, graph: LocalGraph) -> None:
    """Computes the loss of all training vertices and the gradients."""
    mask = graph.train_mask
    out = model(graph.x, graph.edge_index)
    loss_mean(F.cross_entropy(out[mask], graph.y[mask], reduction="none"), graph).backward()


def gradient_of(network: Module) -> Tensor:
    """Returns the gradients of all parameters, one after the other, in float64."""
    return torch.cat([each.grad.double().flatten() for each in network.parameters()])


#: Name -> function that makes a strategy from the part, the model and the setting.
STRATEGIES: dict[str, Callable[[Any, Network, Setting], Strategy]] = {
    "halo": WholeGraph,
    "preload": lambda *given: preloading(*given, hops=given[2].layers),
    "preload, uniform": lambda *given: preloading(*given, hops=1, fanout=FANOUT),
    "preload, uniform, few": lambda *given: preloading(*given, hops=1, fanout=FEW),
    "together": lambda *given: Together(*given, trimmed=False),
    "together, trimmed": lambda *given: Together(*given, trimmed=True),
    "private": lambda *given: Private(*given, trimmed=False),
    "private, trimmed": lambda *given: Private(*given, trimmed=True),
}


def missing(name: str) -> str | None:
    """Returns what this version of the package lacks for a strategy; None if it has everything."""
    if name.startswith("preload") and not hasattr(salientpp.fullgraph, "Preload"):
        return "salientpp.fullgraph.Preload"
    if name.startswith("together") and "cooperate" not in inspect.signature(NeighborLoader).parameters:
        return "NeighborLoader(cooperate=...)"
    return None
