"""Draws batches with PyG's or the user's sampler, or with a bidirectional one. Only the last gets a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_geometric.sampler import BaseSampler

from salientpp.engine.drawing.method import DrawingMethod
from salientpp.sampling.bidirectional_sampler import BidirectionalNeighborSampler
from salientpp.sampling.schedule import BatchKeys


class Given(DrawingMethod):
    @classmethod
    def suits(cls, sampler: BaseSampler) -> bool:
        return True

    def excludes(self) -> Mapping[str, str]:
        return {"shared_draws_block": "only draws of salientpp.NeighborSampler can be shared"}

    def arguments(self, keys: BatchKeys, only_vertices: bool) -> dict[str, Any]:
        return {}


class Bidirectional(Given):
    """Draws with this package's :class:`~salientpp.BidirectionalNeighborSampler`, which takes a key."""

    @classmethod
    def suits(cls, sampler: BaseSampler) -> bool:
        return isinstance(sampler, BidirectionalNeighborSampler)

    def arguments(self, keys: BatchKeys, only_vertices: bool) -> dict[str, Any]:
        return {"key": keys.batch}
