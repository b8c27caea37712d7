"""Samplers without a loader: each joins a topology and the options of its draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from salientpp import Graph
from salientpp.graph.typed import TypedGraph
from salientpp.sampling.stored import GraphTopology, TypedTopology
from salientpp.sampling.topology import DrawOptions


@dataclass(frozen=True, eq=False)
class Sampler:
    """Draws from a graph with one vertex type and one edge type; ``fanouts`` has one entry per hop."""

    graph: Graph
    fanouts: Sequence[int]
    replace: bool = False
    shared: bool = False

    def sample(self, seeds: Tensor, key: int) -> SamplerOutput:
        options = DrawOptions([self.fanouts], self.replace, shared=self.shared)
        return GraphTopology(self.graph).sample({None: seeds}, key, options)


@dataclass(frozen=True, eq=False)
class TypedSampler:
    """Draws from a graph with several types; ``fanouts`` has one list per relation."""

    graph: TypedGraph
    fanouts: Sequence[Sequence[int]]
    replace: bool = False
    disjoint: bool = False
    last: bool = False
    induced: bool = False
    shared: bool = False

    def sample(
        self, seeds: Mapping[str | None, Tensor], key: int, seed_time: Mapping[str | None, Tensor] | None = None
    ) -> SamplerOutput | HeteroSamplerOutput:
        options = DrawOptions(self.fanouts, self.replace, self.disjoint, self.last, self.induced, self.shared)
        return TypedTopology(self.graph).sample(seeds, key, options, seed_time)
