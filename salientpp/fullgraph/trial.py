"""Measures what a word (element of a row), an edge and a vertex cost on these machines, alone and in training steps of a model.

All ranks measure at the same time, because they also train at the same time. The slowest rank counts. The costs in a step follow from the differences
between five kinds of steps, which the ranks time:

* the plain step;
* a step with one vertex of another rank cached;
* a step with every second vertex of the halo cached;
* a step like the one before, which also recomputes one layer of some of the cached vertices. This adds at most about
  as many edges as the rank has;
* a step in which all edges come from vertices of the same rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.model import DistributedModel
from salientpp.fullgraph.outputs import output_tensors
from salientpp.fullgraph.problem import Constants
from salientpp.fullgraph.product import Sparse, multiplied
from salientpp.store.rows import TensorRows
from salientpp.ways.planner.rates import measure_link, seconds_of, wait_for_device

#: Timed repetitions after a warm-up: their minimum and maximum number, and the seconds after which none is started.
_LEAST, _MOST, _ENOUGH = 3, 30, 5.0

#: Rows and columns of the timed products. Seconds of a measurement of the link, and the most bytes that a rank sends in an exchange.
_ROWS, _WIDTH = 4096, 64
_LINK = 0.05, 4 * 2**20


def measured_constants(graph: LocalGraph) -> Constants:
    """Measures the cost of a word, an edge and a vertex on these machines. All ranks get equal values. Collective."""
    ranks, alone = graph.ranks, kernel_constants(graph)
    if ranks.size == 1:
        return alone
    link = measure_link(ranks.comm, {*range(ranks.size)} - {ranks.rank}, *_LINK).link
    return replace(alone, word=_dtype_of(graph).itemsize / link.bytes_per_second)


def kernel_constants(graph: LocalGraph) -> Constants:
    """Measures an edge and a vertex in single kernels, like :func:`measured_constants`. The cost of a word is 0. Collective."""
    ranks, draw = graph.ranks, torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS, _WIDTH, generator=draw, device="cpu").to(ranks.device, _dtype_of(graph))
    ends = torch.randint(_ROWS, (2, 8 * _ROWS), generator=draw, device="cpu").to(ranks.device)
    matrix = Sparse.of(ends[0], ends[1], rows.new_ones(ends.size(1)), (_ROWS, _ROWS)).forth
    weight = rows[:_WIDTH].clone()
    edge = min(seconds_of(lambda: multiplied(matrix, rows), ranks.device)) / (ends.size(1) * _WIDTH)
    vertex = min(seconds_of(lambda: rows @ weight, ranks.device)) / (_ROWS * _WIDTH * _WIDTH)
    measured = ranks.gather_numbers("calibrate", [int(1e15 * each) for each in (edge, vertex, 0.0)])
    return Constants(*(max(column) / 1e15 for column in zip(*measured)))


def _dtype_of(graph: LocalGraph) -> torch.dtype:
    return graph.x.dtype if "x" in graph.node_rows and graph.x.is_floating_point() else torch.float32


def step_times(model: DistributedModel, arguments: Sequence[Any]) -> Constants:
    """Times the five kinds of steps of a model with layout='halo'. Its gradients stay unchanged. Collective.

    Returns:
        Seconds of whole items, for :meth:`Costs.timed`. A vertex is a cached one, with its rows at all layers. An edge leads into a vertex of which one
        layer is recomputed. Noise may make the seconds negative.
    """
    graph = model.graph
    half = graph.outer[::2].contiguous()
    edges_in = int(graph.others.degrees(half).sum())
    deeper = torch.zeros_like(half)
    deeper[:: max(1, -(-edges_in // max(1, graph.edge_index.size(1))))] = 1
    if not can_recompute(graph, arguments):
        deeper.zero_()
    plans = [(half[:1], deeper[:1] * 0), (half, deeper * 0), (half, deeper)]
    parts = [graph, *(graph.planned(*plan) for plan in plans), without_halo(graph)]
    models = [model, *(DistributedModel(model.module, part) for part in parts[1:])]
    rounds = _in_turns(models, arguments)
    words = [width * (2 if backward else 1) for width, backward, _ in model.seen]
    sizes = [(part.inner.numel(), part.edge_index.size(1), _words_of(part, words)) for part in parts]
    most = [max(column) for column in zip(*graph.ranks.gather_numbers("plan_for", [*chain(*sizes)]))]
    return times_of(rounds, most[0::3], most[1::3], most[2::3])


def can_recompute(graph: LocalGraph, arguments: Sequence[Any]) -> bool:
    """Returns True on all ranks if a plan may recompute vertices. Collective.

    It may not if an argument of the model has rows of edges, but is no attribute of the part: the recomputed vertices' edges would lack rows.
    """
    known = [graph.edge_index, *graph.edge_tensors.values(), *graph.node_rows.values()]
    edges = graph.edge_index.size(1)
    others = [each for each in arguments if isinstance(each, Tensor) and not any(each is tensor for tensor in known)]
    found = [each.dim() > 0 and each.size(0) == edges and edges != graph.num_own for each in others]
    return not any(any(each) for each in graph.ranks.gather_numbers("plan_for", [any(found)]))


def _in_turns(models: Sequence[DistributedModel], arguments: Sequence[Any]) -> list[list[float]]:
    """Returns, for each repetition, the seconds of a step of each model. Collective.

    Models take turns, so that other load affects all equally. The first repetition, a warm-up, is left out.
    """
    ranks = models[0].ranks
    rounds: list[list[float]] = []
    while len(rounds) <= _LEAST or (len(rounds) <= _MOST and sum(map(sum, rounds)) < _ENOUGH):
        taken = [int(1e9 * _step(model, arguments)) for model in models]
        rounds.append([max(column) / 1e9 for column in zip(*ranks.gather_numbers("plan_for", taken))])
    return rounds[1:]


def times_of(
    rounds: Sequence[Sequence[float]], vertices: Sequence[int], edges: Sequence[int], words: Sequence[int]
) -> Constants:
    """Computes the time of one vertex, edge and word from timed steps.

    Args:
        rounds: seconds of the five kinds of steps, for each repetition.
        vertices, edges, words: numbers of kept vertices, edges and arriving words in each kind of step.
    """
    # Other load changes slowly, so a difference within one repetition contains less of it than a difference between medians.
    less = lambda a, b: statistics.median(each[a] - each[b] for each in rounds)  # noqa: E731
    whole, one, half, deeper, bare = range(5)
    word = less(whole, bare) / max(1, words[whole] - words[bare])
    other = lambda a, b: less(a, b) - (words[a] - words[b]) * word  # noqa: E731
    vertex = other(half, one) / max(1, vertices[half] - vertices[one])
    return Constants(
        vertex=vertex,
        edge=other(deeper, half) / max(1, edges[deeper] - edges[half]),
        word=word,
        kept=other(one, whole) - vertices[one] * vertex,
    )


def _words_of(part: LocalGraph, words: Sequence[int]) -> int:
    """Returns the number of words that arrive in a step. ``words``: for each hop, the words of one row and its gradient."""
    received = [hop.route.num_received for hop in part.hops]
    return sum(number * received[min(hop, len(received) - 1)] for hop, number in enumerate(words))


def without_halo(graph: LocalGraph) -> LocalGraph:
    """Makes a part like ``graph``, whose edges all come from own vertices. Its steps show the time without travelling rows. Collective."""
    number, edges = graph.n_id.numel(), graph.lists.into(graph.n_id)
    begin = graph.offsets[graph.ranks.rank]
    lists = replace(
        graph.lists,
        indptr=torch.nn.functional.pad(torch.bincount(edges.target, minlength=number).cumsum(0), (1, 0)),
        indices=TensorRows(edges.source % max(1, number) + begin),
        first_target=begin,
        edge_id=edges.row,
        is_whole=False,
    )
    return LocalGraph(graph.ranks, lists, graph.offsets, graph.node_rows, {}, base=graph)


def _step(model: DistributedModel, arguments: Sequence[Any]) -> float:
    """Runs a training step that all ranks begin together, and returns its seconds on this rank."""
    ranks = model.ranks
    before = ranks.received.copy()
    parameters = [each for each in model.module.parameters() if each.requires_grad]
    ranks.gather_numbers("plan_for", [0])
    begin = time.perf_counter()
    with torch.enable_grad():
        out = model(*arguments)
        outs = [each for each in output_tensors(out) if each.is_floating_point() and each.requires_grad]
        if parameters:
            torch.autograd.grad(outs, parameters, [*map(torch.ones_like, outs)], allow_unused=True)
    wait_for_device(ranks.device)
    seconds = time.perf_counter() - begin
    ranks.received = before
    return seconds
