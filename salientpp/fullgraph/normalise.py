"""Batch normalisation over the vertices of all ranks, and symmetric normalisation (``gcn_norm``) with degrees from the owners."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric import utils

from salientpp.fullgraph.exchange import total
from salientpp.fullgraph.kept import Kept
from salientpp.fullgraph.product import wide
from salientpp.fullgraph.rank_graph import RankGraph


def batch_norm(norm: _BatchNorm, rows: Tensor, graph: RankGraph, is_again: bool = False) -> Tensor:
    """Normalises this rank's ``rows`` [num_inner, C] by the statistics of all ranks' vertices, each counted once.

    Args:
        is_again: True if the backward repeats a call, so that the norm's running statistics must not change again.
    """
    norm._check_input_dim(rows)
    has_none = norm.running_mean is None and norm.running_var is None
    if not (norm.training or has_none):  # torch reads existing statistics in evaluation, whatever `track_running_stats`
        return torch.nn.functional.batch_norm(
            rows, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
        )
    if rows.dim() != 2 or rows.size(0) != graph.num_inner:
        raise ValueError(
            f"{type(norm).__name__} must get one row for each of the {graph.num_inner} vertices here, [{graph.num_inner}, C], got {list(rows.shape)}"
        )
    if norm.weight is not None and norm.weight.numel() != rows.size(1):  # one element would be broadcast
        raise RuntimeError(f"weight should contain {rows.size(1)} elements not {norm.weight.numel()}")
    given = rows.dtype
    rows = rows.to(wide(given))
    own, number = rows[: graph.num_counted], graph.num_vertices
    if number == 1:  # as torch, which says "when training" in evaluation too
        raise ValueError(f"Expected more than 1 value per channel when training, got {number} vertices in all")
    mean = total(own.sum(0), graph.averaging) / max(1, number)
    variance = total((own - mean).square().sum(0), graph.averaging) / max(1, number)
    if norm.training and norm.track_running_stats and not is_again:
        _track(norm, mean, variance, number)
    rows = (rows - mean) * (variance + norm.eps).rsqrt()
    if norm.weight is not None:
        rows = rows * norm.weight if norm.bias is None else rows * norm.weight + norm.bias
    return rows.to(given)


@torch.no_grad()
def _track(norm: _BatchNorm, mean: Tensor, variance: Tensor, number: int) -> None:
    """Updates a norm's running statistics as torch does in training, by the ``mean`` [C] and ``variance`` [C] of ``number`` vertices."""
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    if (norm.running_mean is None) != (norm.running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")
    if norm.running_mean is None or norm.running_var is None or not number:
        return
    part = norm.momentum
    if part is None:
        part = 1.0 / float(norm.num_batches_tracked) if norm.num_batches_tracked is not None else 0.0
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), part)
    norm.running_var.lerp_((variance * number / (number - 1)).to(norm.running_var.dtype), part)


class Helpers:
    """Replacements of PyG's helper functions, such as ``gcn_norm``, that layers call on a rank, which lacks edges of the graph.

    ``kept`` caches their results.
    """

    def __init__(self, graph: RankGraph) -> None:
        # The graph may hold this object. Without a cycle, the graph of a batch is freed with its last use.
        self._graph_of = weakref.ref(graph)
        self.kept = Kept()

    @property
    def _graph(self) -> RankGraph:
        graph = self._graph_of()
        assert graph is not None  # the caller uses it
        return graph

    def is_static(self, tensor: Tensor | None) -> bool:
        """True if a tensor is equal in all steps: None, an attribute of the graph, or computed from such attributes."""
        if tensor is None or tensor is self._graph.edge_index:
            return True
        columns = self._graph.edge_tensors.values()
        return self.kept.has(tensor) or any(tensor is each for each in columns if not each.requires_grad)

    def by_name(self) -> dict[str, Callable[..., Any]]:
        adding = utils.add_self_loops, utils.add_remaining_self_loops  # without num_nodes, they would miss vertices
        loops = {each.__name__: partial(each, num_nodes=self._graph.num_inner) for each in adding}
        return {"gcn_norm": self.gcn_norm, **loops}

    def gcn_norm(
        self,
        edge_index: Any,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes what PyG's function computes on the whole graph. Degrees of halo vertices come from their owners."""
        graph, form = self._graph, ("gcn_norm", improved, add_self_loops, dtype)

        def weighted(index: Tensor, weight: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
            if add_self_loops:
                index, weight = utils.add_remaining_self_loops(index, weight, 2.0 if improved else 1.0, number)
            return index, torch.ones(index.size(1), dtype=dtype, device=index.device) if weight is None else weight

        def roots(index: Tensor, weight: Tensor | None, number: int) -> Tensor:
            index, weight = weighted(index, weight, number)
            root = utils.scatter(weight, index[1], 0, number, "sum").pow(-0.5)
            return root.masked_fill(root == float("inf"), 0)

        def make() -> tuple[Tensor, Tensor]:
            root = graph.of_whole_halo(graph.over_all_edges(roots, edge_index, edge_weight, form))
            index, weight = weighted(edge_index, edge_weight, graph.num_inner)
            return index, root[index[0]] * weight * root[index[1]]

        if self.is_static(edge_index) and self.is_static(edge_weight):
            return self.kept.of([edge_index, edge_weight], form, make)
        return make()
