"""How do batches come with sums in the place of rows, and which loaders can give such batches?

A batch is drawn, what it lacks is looked up, and :mod:`salientpp.plan.sums` decides which of its rows come whole. Vertices and edges that sums replace
leave the batch before it is made, so later steps see a smaller batch that wants sums too. The user's model adds them by :func:`salientpp.nn.merge_partial`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput
from torch_geometric.sampler.base import SubgraphType

from salientpp.minibatch.neighbor_sampler import NeighborSampler
from salientpp.minibatch.source import BatchSource
from salientpp.minibatch.stages import BatchStages, Finished, RowsSent, Sampled, Wanted
from salientpp.plan.sums import Sums, Wire
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.exchange import SOURCES, SUMS
from salientpp.store.fetch import Column
from salientpp.store.narrow import WIDE
from salientpp.store.sums import sums_of
from salientpp.store.tiers import NO_IDS, Places


class Partial(NamedTuple):
    """``batch.partial``: what other ranks have made of rows that the batch does not have.

    Attributes:
        target: int64 [m], positions in the batch of the vertices whose neighbours these are; a vertex occurs once for each part that has some of them.
        value: [m, ...], their sum, mean or maximum, of the dtype of ``x``.
        count: int64 [m], how many they are, a neighbour that was drawn twice counted twice.
        reduction: 'sum', 'mean' or 'max'.
    """

    target: Tensor
    value: Tensor
    count: Tensor  # type: ignore[assignment]  # a tuple's method has this name
    reduction: str


@dataclass(frozen=True, eq=False)
class Summed(Sampled):
    """``sums``: what other ranks are asked for beside rows."""

    sums: Sums | None = None

    @property
    def from_others(self) -> Mapping[str | None, Wanted | Places]:
        sums = self.sums
        assert sums is not None  # it comes last only because fields of a Sampled have defaults
        return {
            **self.places,
            SUMS: Wanted(sums.size, sums.groups, NO_IDS),
            SOURCES: Wanted(sums.source, sums.sources, NO_IDS),
        }


@dataclass
class PartialStages(BatchStages):
    """The ten stages of a rank whose batches have sums.

    Attributes:
        reduction: 'sum', 'mean' or 'max'.
        wire: what travels for a row and for an id.
        asks: this rank asks for sums where they are fewer bytes; it serves the others' requests in any case.
    """

    reduction: str = "sum"
    wire: Wire | None = None
    asks: bool = True

    def prepare(self, index: int, mfg: SamplerOutput | HeteroSamplerOutput, num_seeds: int) -> Sampled:
        assert isinstance(mfg, SamplerOutput)  # check_partial has refused others
        assert self.wire is not None  # it comes late only because fields of the ten stages have defaults
        left, sums = sums_of(mfg, self.fetch.tiers[None], self.wire, self.asks)
        sampled = self._prepared(index, left, num_seeds, self.fetch.look_up({None: left.node}))
        return Summed(**{field.name: getattr(sampled, field.name) for field in dataclasses.fields(Sampled)}, sums=sums)

    def _complete(self, batch: Data | HeteroData, sampled: Sampled, arrived: Mapping[Column, Tensor]) -> None:
        assert isinstance(sampled, Summed) and sampled.sums is not None
        ((_, name),) = self.fetch.columns
        sums, to_device = sampled.sums, self.fetch.own.to_device
        value = arrived[SUMS, name]
        value = value if self.builder.dtype is None else value.to(self.builder.dtype)
        batch.partial = Partial(to_device(sums.target), value, to_device(sums.size), self.reduction)

    def assemble(self, state: RowsSent) -> Finished:
        finished = super().assemble(state)
        if finished.batch is not None:
            batch = finished.batch
            x = batch[self.fetch.columns[0][1]]
            # By this merge_partial knows whose edges and rows a layer is given.
            batch.edge_index.salientpp_partial = (batch.partial, x, x._version)
        return finished


def check_partial(data: Any, source: BatchSource, given: Any) -> None:
    """Raise ValueError where a loader's batches cannot have sums."""
    words = f"partial_aggregation={given!r}"
    if not isinstance(data, PartitionedGraph):
        raise ValueError(
            f"{words} is for a partitioned graph, whose rows travel between ranks; rows of an object in memory do not, so leave it out"
        )
    sampler = source.sampler
    assert isinstance(sampler, NeighborSampler)  # a partitioned graph takes no other
    if sampler.is_hetero or data.is_hetero:
        raise ValueError(f"{words} is for graphs with one type of vertices, and {data.root} has several; leave it out")
    if sampler.subgraph_type != SubgraphType.directional:
        raise ValueError(
            f"{words} replaces edges of the last hop by sums, which batches with subgraph_type={sampler.subgraph_type.value!r} need; leave one of them out"
        )
    if sampler.disjoint:
        raise ValueError(
            f"{words} excludes disjoint trees and times: there the last hop's vertices are many trees'; leave one of them out"
        )
    if len(source.exchanged) != 1:
        names = [name for _, name in source.exchanged]
        raise ValueError(
            f"{words} sums one attribute that every sampled vertex gets, got gather={names}; pass one name"
        )
    (column,) = source.exchanged
    if column in source.narrow:
        raise ValueError(
            f"{words} sums rows as they are, and those of {column[1]!r} travel as {source.narrow[column].format} (store_as, send_as); leave one of them out"
        )
    if source.rows_of(column).dtype not in WIDE:
        dtype = str(source.rows_of(column).dtype).removeprefix("torch.")
        raise ValueError(
            f"{words} sums floating-point rows (float64, float32, float16, bfloat16), and those of {column[1]!r} are {dtype}; leave it out"
        )
