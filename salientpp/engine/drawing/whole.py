"""Draws batches with this package's sampler, from neighbour lists that this process holds."""

from __future__ import annotations

from typing import Any

from torch_geometric.sampler import BaseSampler, NodeSamplerInput
from torch_geometric.sampler.base import SubgraphType

from salientpp.engine.drawing.method import DrawingMethod
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.schedule import BatchKeys


class Whole(DrawingMethod):
    sampler: NeighborSampler

    @classmethod
    def suits(cls, sampler: BaseSampler) -> bool:
        return isinstance(sampler, NeighborSampler)

    def why_whole(self) -> str | None:
        sampler, inputs = self.sampler, self.seeds.inputs
        if not isinstance(inputs, NodeSamplerInput) or inputs.input_type is not None:
            return "the graph has several vertex types; leave cooperate out"
        if type(sampler) is not NeighborSampler:
            return super().why_whole()
        if sampler.subgraph_type != SubgraphType.directional:
            return f"subgraph_type={sampler.subgraph_type.value!r} adds edges that do not follow hops; pass subgraph_type='directional'"
        if sampler.disjoint:
            return "each seed grows a tree of its own, and a vertex may be in several trees; leave disjoint and time_attr out"
        return None

    def arguments(self, keys: BatchKeys, only_vertices: bool) -> dict[str, Any]:
        named: dict[str, Any] = {"key": keys.batch}
        if keys.draws != keys.batch:
            named["draw_key"] = keys.draws
        # A user's subclass may override a method that would take this argument.
        if only_vertices and type(self.sampler) is NeighborSampler:
            named["only_vertices"] = True
        return named
