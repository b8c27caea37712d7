"""Lists the classes that draw batches. To add one, write it in a new file and list it in :data:`METHODS`."""

from __future__ import annotations

from torch_geometric.sampler import BaseSampler

from salientpp.engine.drawing.given import Bidirectional, Given
from salientpp.engine.drawing.method import DrawingMethod
from salientpp.engine.drawing.ppr import Pagerank, PagerankInRounds
from salientpp.engine.drawing.rounds import InRounds
from salientpp.engine.drawing.whole import Whole
from salientpp.engine.seeds import Seeds
from salientpp.store.exchange import Exchange

#: The first class that suits a loader's sampler draws its batches.
METHODS: list[type[DrawingMethod]] = [PagerankInRounds, InRounds, Pagerank, Whole, Bidirectional, Given]


def method_of(seeds: Seeds, sampler: BaseSampler, exchange: Exchange) -> DrawingMethod:
    return next(method for method in METHODS if method.suits(sampler))(seeds, sampler, exchange)
