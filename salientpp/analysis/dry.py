"""Runs epochs dry: draws the batches of a rank and says which rows of other hosts each needs, while no row moves.

:func:`dry` is what all counts stand on. The batches come from the loaders' own schedule, keys and sampler, so what is counted here is what loaders fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.sampler import (
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)

from salientpp.processes import in_order
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.schedule import BatchKeys, Schedule, batch_keys

Out = TypeVar("Out")


@dataclass(frozen=True, eq=False)
class Rank:
    """The batches of one rank.

    Attributes:
        number: of the rank.
        sampler: draws them.
        inputs: the seeds of the rank's unit.
        schedule: which of these each batch has.
        held: by vertex type whose rows travel, the global ids [begin, end) whose rows the rank's host has.
        negatives: how many and which negative examples, where seeds are edges.
        draw_block: so many batches that follow one another draw alike.
    """

    number: int
    sampler: NeighborSampler
    inputs: NodeSamplerInput | EdgeSamplerInput
    schedule: Schedule
    held: Mapping[str | None, tuple[int, int]]
    negatives: NegativeSampling | None = None
    draw_block: int = 1

    @property
    def num_seeds(self) -> int:
        return self.schedule.num_seeds

    @property
    def batch_sizes(self) -> list[int]:
        """Seeds of each batch of an epoch."""
        return [positions.numel() for positions in self.schedule.batches(0)]


@dataclass(frozen=True, eq=False)
class DryBatch:
    """A batch that was drawn, and of which nothing moved.

    Attributes:
        remote: by vertex type whose rows travel, int64, the distinct ids whose rows the host lacks.
        drawn: the sampler's output; without edges unless these were asked for.
    """

    remote: dict[str | None, Tensor]
    drawn: SamplerOutput | HeteroSamplerOutput


def dry(
    rank: Rank,
    epoch: int,
    measure: Callable[[DryBatch], Out],
    *,
    only: Iterable[int] | None = None,
    edges: bool = False,
) -> Iterator[Out]:
    """What ``measure`` says of the batches of one epoch of a rank, in order.

    Args:
        measure: called by several threads, each with another batch.
        only: the numbers of the batches to draw; None: all.
        edges: draw edges too.
    """
    batches, schedule = rank.schedule.batches(epoch), rank.schedule

    def measured(index: int) -> Out:
        keys = batch_keys(schedule.seed, epoch, schedule.slot, index, rank.draw_block)
        return measure(draw(rank, batches[index], keys, edges=edges))

    return in_order(measured, range(len(batches)) if only is None else only, "salientpp-dry")


def draw(rank: Rank, positions: Tensor, keys: BatchKeys, *, edges: bool = False) -> DryBatch:
    """One batch of any of the rank's seeds: those at ``positions`` int64 of its inputs."""
    sampler, inputs = rank.sampler, rank.inputs[positions]
    if isinstance(inputs, EdgeSamplerInput):
        drawn = sampler.sample_from_edges(inputs, rank.negatives, *keys, only_vertices=not edges)
    else:
        drawn = sampler.sample_from_nodes(inputs, *keys, only_vertices=not edges)
    found: Mapping[Any, Tensor] = drawn.node if isinstance(drawn.node, dict) else {None: drawn.node}
    remote = {}
    for type_, (begin, end) in rank.held.items():
        ids = found.get(type_, torch.empty(0, dtype=torch.int64, device="cpu"))
        ids = ids[(ids < begin) | (ids >= end)]
        remote[type_] = ids.unique() if sampler.disjoint else ids  # trees have their own copy of a vertex each
    return DryBatch(remote, drawn)
