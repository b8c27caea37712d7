"""How do batches come with sums in the place of rows, and which loaders can give such batches?

A batch is drawn, what it lacks is looked up, and :mod:`salientpp.ways.sums.plan` decides which of its rows come whole: first of those that other ranks
have, then,
for a device, of those that the host has. Vertices and edges that sums replace
leave the batch before it is made, so later steps see a smaller batch that wants sums too. The user's model adds them by :func:`salientpp.nn.merge_partial`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput
from torch_geometric.sampler.base import SubgraphType

from salientpp.batch.template import PartitionTemplate
from salientpp.engine.pipeline import traced
from salientpp.engine.source import BatchSource
from salientpp.engine.stages import BatchStages, Finished, IdsRead, RowsSent, Sampled, Wanted
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.exchange import HOST_SUMS, SOURCES, SUMS, WEIGHTS
from salientpp.store.fetch import Column, Taken
from salientpp.store.narrow import WIDE
from salientpp.store.rows import take_rows
from salientpp.store.thread_groups import Balance
from salientpp.store.tiers import NO_IDS, Places
from salientpp.ways.sums.fetch import FetchWithSums, HostSums, host_sums_of, sums_of
from salientpp.ways.sums.marked import EDGE_WEIGHTS, EDGES, ROWS, Delivered, mark
from salientpp.ways.sums.plan import Sums, Wire


class Partial(NamedTuple):
    """``batch.partial``: what other ranks, and for a device the host, have made of rows that the batch does not have.

    Attributes:
        target: int64 [m], positions in the batch of the vertices whose neighbours these are; a vertex occurs once for each part, and each kind of the host's
            memory, that has some of them.
        value: [m, ...], their sum, mean or maximum, of the dtype of ``x``.
        count: int64 [m], how many they are, a neighbour that was drawn twice counted twice.
        reduction: 'sum', 'mean' or 'max'.
        weight: the batch's attribute with the weights of its edges, if the rows were multiplied by theirs first; a mean is over their number nevertheless.
    """

    target: Tensor
    value: Tensor
    count: Tensor  # type: ignore[assignment]  # a tuple's method has this name
    reduction: str
    weight: str | None = None


@dataclass(frozen=True, eq=False)
class Summed(Sampled):
    """
    Attributes:
        sums: what other ranks are asked for beside rows.
        weight: of the rows in them, as words that travel, so many for each; None: they have none.
        here: what the host sums up for the device; None: nothing.
    """

    sums: Sums | None = None
    weight: Tensor | None = None
    here: HostSums | None = None

    @property
    def from_others(self) -> Mapping[str | None, Wanted | Places]:
        sums = self.sums
        assert sums is not None  # it comes last only because fields of a Sampled have defaults
        wanted: dict[str | None, Wanted | Places] = {
            **self.places,
            SUMS: Wanted(sums.size, sums.groups, NO_IDS),
            SOURCES: Wanted(sums.source, sums.sources, NO_IDS),
        }
        if self.weight is not None:
            words = self.weight.numel() // max(1, sums.source.numel())
            wanted[WEIGHTS] = Wanted(self.weight, sums.sources * words, NO_IDS)
        return wanted


@dataclass
class PartialStages(BatchStages):
    """The ten stages of a rank whose batches have sums.

    Attributes:
        reduction: 'sum', 'mean' or 'max'.
        weight: the attribute with the weights of edges, and it, [E] or [E, 1]; None: rows are summed as they are.
        wire: what travels for a row, an id and a weight.
        asks: this rank asks for sums where they are fewer bytes; it serves the others' requests in any case.
        sums_here: the host sums up what it has where that is fewer bytes to copy to a device.
        balance: has rows packed and sums made by two groups of threads.
    """

    reduction: str = "sum"
    weight: tuple[str, Tensor] | None = None
    wire: Wire | None = None
    asks: bool = True
    sums_here: bool = False
    balance: Balance | None = None

    def prepare(self, index: int, mfg: SamplerOutput | HeteroSamplerOutput, num_seeds: int) -> Sampled:
        assert isinstance(mfg, SamplerOutput)  # check_partial has refused others
        assert self.wire is not None  # it comes late only because fields of the ten stages have defaults
        tiers, here = self.fetch.tiers[None], None
        left, sums = sums_of(mfg, tiers, self.wire, self.asks)
        weight = self._weight_of(sums)
        if self.sums_here:
            left, here = host_sums_of(left, tiers, self.wire)
            here = dataclasses.replace(here, weight=self._weight_of(here.sums))
        sampled = self._prepared(index, left, num_seeds, self.fetch.look_up({None: left.node}))
        return Summed(
            **{field.name: getattr(sampled, field.name) for field in dataclasses.fields(Sampled)},
            sums=sums,
            weight=None if weight is None else self.fetch.exchange.words_of(weight),
            here=here,
        )

    def _work_on_host_rows(self, state: IdsRead) -> Taken:
        here = state.sampled.here if isinstance(state.sampled, Summed) else None
        if here is None:
            return super()._work_on_host_rows(state)
        assert self.balance is not None  # it comes late only because fields of the ten stages have defaults
        pack_rows = functools.partial(super()._work_on_host_rows, state)
        taken, sums = self.balance.both(pack_rows, functools.partial(self._sum_host_rows, state, here))
        return dataclasses.replace(taken, own={**taken.own, **sums})

    def _sum_host_rows(self, state: IdsRead, here: HostSums) -> dict[Column, Tensor]:
        assert isinstance(self.fetch, FetchWithSums)  # the loader has made it so
        with traced(self.trace, "worker: sum_host_rows", state.index):
            return self.fetch.take_host_sums(here)

    def _weight_of(self, sums: Sums) -> Tensor | None:
        """Of the rows in sums, as it travels."""
        if self.weight is None:
            return None
        assert sums.edge is not None  # the edges of a partitioned graph have ids
        ((type_, name),) = self.fetch.columns
        dtype = self.fetch.exchange.weight_dtype(self.fetch.tiers[type_].home.rows[name].dtype)
        return take_rows(self.weight[1], sums.edge).view(-1).to(dtype)

    def _complete(self, batch: Data | HeteroData, sampled: Sampled, arrived: Mapping[Column, Tensor]) -> None:
        assert isinstance(sampled, Summed) and sampled.sums is not None
        ((_, name),) = self.fetch.columns
        sums, here, to_device = sampled.sums, sampled.here, self.fetch.own.to_device
        target, value, count = sums.target, arrived[SUMS, name], sums.size
        if here is not None:
            target, count = torch.cat([target, here.sums.target]), torch.cat([count, here.sums.size])
            value = torch.cat([value, arrived[HOST_SUMS, name]])
            with self.fetch.counting:
                self.fetch.counts[HOST_SUMS, "cpu"] += here.sums.size.numel()
        value = value if self.builder.dtype is None else value.to(self.builder.dtype)
        weight = None if self.weight is None else self.weight[0]
        batch.partial = Partial(to_device(target), value, to_device(count), self.reduction, weight)

    def assemble(self, state: RowsSent) -> Finished:
        finished = super().assemble(state)
        if finished.batch is not None:
            self._mark(finished.batch)
        return finished

    def _mark(self, batch: Data | HeteroData) -> None:
        """Mark the tensors that a model would use wrongly without :func:`salientpp.nn.merge_partial`."""
        nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
        delivered = Delivered(
            batch.partial, len(edges), int(batch.batch_size), sum(nodes), tuple(itertools.accumulate(edges))
        )
        roles = {"edge_index": EDGES, self.fetch.columns[0][1]: ROWS}
        if self.weight is not None:
            roles[self.weight[0]] = EDGE_WEIGHTS
        for name, role in roles.items():
            batch[name] = mark(batch[name], delivered, role, given=True)


def weights_of(source: BatchSource, name: str | None) -> tuple[str, Tensor] | None:
    """The edge attribute that rows in sums are multiplied by, if any."""
    return None if name is None else (name, _edge_rows(source)[name])


def _edge_rows(source: BatchSource) -> Mapping[str, Tensor]:
    assert isinstance(source.template, PartitionTemplate)  # check_partial has refused others
    return source.template.edge_rows[None]


def asked_beside_rows(reduction: Any, weight: Any) -> tuple[str, ...]:
    """By these arguments of a loader; wrong ones are refused later."""
    if reduction is None:
        return ()
    return (SUMS, SOURCES) if weight is None else (SUMS, SOURCES, WEIGHTS)


def wire_of(source: BatchSource, weight: str | None) -> Wire:
    """What travels for a row of such batches."""
    exchange, (column,) = source.exchange, source.exchanged
    weight_bytes = 0 if weight is None else exchange.weight_dtype(source.rows_of(column).dtype).itemsize
    return Wire(source.row_bytes[None], exchange.id_bytes, weight_bytes)


def check_partial(data: Any, source: BatchSource, given: Any, weight: Any) -> None:
    """Raise ValueError where a loader's batches cannot have sums, or not with these weights."""
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
    if weight is not None:
        edge_rows = _edge_rows(source)
        if not isinstance(weight, str) or weight not in edge_rows:
            known = ", ".join(edge_rows) or "none"
            raise ValueError(
                f"partial_weight must name an edge attribute of {data.root}, which has {known}; got {weight!r}"
            )
        rows = edge_rows[weight]
        if rows.numel() != rows.size(0) or rows.dtype == torch.bool or rows.is_complex():
            dtype = str(rows.dtype).removeprefix("torch.")
            raise ValueError(
                f"partial_weight={weight!r} must be one real number per edge, [{rows.size(0)}], got {dtype} {list(rows.shape)}"
            )
