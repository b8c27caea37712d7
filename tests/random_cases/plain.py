"""The batches that a random job must give: those of the plainest loader of one process, whose data is in memory.

Its order of seeds and its keys are computed here from the documented rules, for each logical rank. Its batches come from a loader without options over the
whole graph, whose sampler draws with these keys.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import reference
import torch
from torch import Tensor
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput

from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.sampling.schedule import BatchKeys
from salientpp.sampling.union import disjoint_union

#: First field of the keys of orders, draws and blocks of draws.
ORDER, DRAWS, BLOCK = 1, 2, 4


def key_of(*fields: int) -> int:
    """Returns the key of some numbers, as a signed integer."""
    key = 0
    for number in fields:
        key = reference.join_key(key, number)
    return key - 2**64 if key >= 2**63 else key


def runs(number: int, groups: int) -> list[range]:
    """Divides items into consecutive runs, as even as possible."""
    bounds = [group * number // groups for group in range(groups + 1)]
    return [range(*bounds[group : group + 2]) for group in range(groups)]


@dataclass(frozen=True)
class Layout:
    """Placement of logical ranks and parts on ranks.

    Attributes:
        parts, ranks, logical_ranks: K, W and S; S is 0 if it was not given.
        hosts: number of ranks of each host.
        cooperates: whether a host visits its seeds as one rank.
    """

    parts: int
    ranks: int
    logical_ranks: int = 0
    hosts: tuple[int, ...] = ()
    cooperates: bool = False

    @property
    def host_of(self) -> list[int]:
        return [host for host, size in enumerate(self.hosts or (1,) * self.ranks) for _ in range(size)]

    @property
    def visitors(self) -> int:
        return len(self.hosts) if self.cooperates and self.hosts else self.ranks

    @property
    def total(self) -> int:
        return self.logical_ranks or self.visitors

    @property
    def units(self) -> list[range]:
        """Parts of each unit, a group of parts from which logical ranks draw their seeds."""
        return runs(self.parts, min(self.total, self.parts))

    @property
    def per_unit(self) -> int:
        """Number of logical ranks of a unit."""
        return self.total // len(self.units)

    def logical_ranks_of(self, rank: int) -> range:
        visitor = self.host_of[rank] if self.cooperates else rank
        if self.visitors > len(self.units):
            share = self.total // self.visitors
            return range(visitor * share, (visitor + 1) * share)
        own = runs(len(self.units), self.visitors)[visitor]
        return range(own.start * self.per_unit, own.stop * self.per_unit)

    def units_of(self, rank: int) -> range:
        own = self.logical_ranks_of(rank)
        return range(own[0] // self.per_unit, own[-1] // self.per_unit + 1)

    def parts_of(self, rank: int) -> range:
        own = self.units_of(rank)
        return range(self.units[own[0]].start, self.units[own[-1]].stop)

    def parts_of_host(self, rank: int) -> range:
        """Parts whose rows lie on the host of a rank."""
        host = self.host_of
        of = [self.parts_of(other) for other in range(self.ranks) if host[other] == host[rank]]
        return range(of[0].start, of[-1].stop)


@dataclass(frozen=True)
class Order:
    """Order of the seeds.

    Attributes:
        sizes: number of seeds of each unit.
        seed, shuffle, batch_size, drop_last, uneven: as in the loader.
        num_given: number of batches of each logical rank, instead of ``batch_size``.
        given: positions of each batch of an epoch, from a user's sampler.
    """

    layout: Layout
    sizes: Sequence[int]
    seed: int
    shuffle: bool
    batch_size: int
    drop_last: bool
    uneven: str
    num_given: int | None = None
    given: Sequence[Sequence[int]] | None = None

    @property
    def numbers(self) -> list[int]:
        """Number of seeds of each logical rank."""
        per_unit = self.layout.per_unit
        return [len(range(place, size, per_unit)) for size in self.sizes for place in range(per_unit)]

    def _count(self, seeds: int) -> int:
        if self.num_given is not None:
            return self.num_given
        return seeds // self.batch_size if self.drop_last else -(-seeds // self.batch_size)

    def batches_of(self, epoch: int, logical_rank: int) -> list[list[int]]:
        """Returns positions in the unit's seeds, batch by batch."""
        per_unit = self.layout.per_unit
        unit, place = divmod(logical_rank, per_unit)
        order = (
            reference.permutation(self.sizes[unit], key_of(ORDER, self.seed, epoch, unit))
            if self.shuffle
            else list(range(self.sizes[unit]))
        )
        order = list(order)[place::per_unit]
        if self.uneven == "wrap" and order:
            order = [order[i % len(order)] for i in range(max(self.numbers))]
        if self.num_given is not None:
            return [piece.tolist() for piece in torch.tensor(order).tensor_split(self.num_given)]
        count = min(map(self._count, self.numbers)) if self.uneven == "drop" else self._count(len(order))
        return [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)][:count]

    def turns(self, epoch: int, rank: int, joined: bool) -> list[list[tuple[int, int, list[int]]]]:
        """Returns the batches of a rank in order, each as its pieces: logical rank, number of the round, positions in the unit's seeds."""
        if self.given is not None:
            return [[(0, index, list(positions))] for index, positions in enumerate(self.given)]
        own = {
            logical_rank: self.batches_of(epoch, logical_rank) for logical_rank in self.layout.logical_ranks_of(rank)
        }
        rounds = [
            [(logical_rank, index, batches[index]) for logical_rank, batches in own.items() if index < len(batches)]
            for index in range(max(map(len, own.values()), default=0))
        ]
        return rounds if joined else [[piece] for pieces in rounds for piece in pieces]


class Keyed(BaseSampler):
    """Sampler that draws batch after batch with given keys. Each turn is a list of (number of seeds, keys)."""

    def __init__(self, sampler: Any, turns: Iterator[list[tuple[int, BatchKeys]]]) -> None:
        self.sampler, self.turns = sampler, turns

    def sample_from_nodes(self, inputs: Any, **given: Any) -> Any:
        return self._sample("sample_from_nodes", inputs, given)

    def sample_from_edges(self, inputs: Any, neg_sampling: Any = None) -> Any:
        return self._sample("sample_from_edges", inputs, {"neg_sampling": neg_sampling})

    def _sample(self, draw: str, inputs: Any, given: dict[str, Any]) -> Any:
        found, first = [], 0
        for size, keys in next(self.turns):
            piece = inputs[torch.arange(first, first + size)]
            found.append(getattr(self.sampler, draw)(piece, key=keys.batch, draw_key=keys.draws, **given))
            first += size
        if len(found) == 1:
            return found[0]
        return disjoint_union(found, inputs.input_type, isinstance(inputs, EdgeSamplerInput))


@dataclass(frozen=True)
class Plain:
    """The plainest loader.

    Attributes:
        data: the whole graph, in memory.
        sampler: draws from it.
        order, rank: the order of the seeds, and the number of the rank.
        offsets: unit -> position of its first seed among the seeds of the rank.
        block: the entry 'block' of the option ``shared_draws``.
        joined: the entry 'join' of the option ``logical_ranks``.
        link: whether the seeds are edges.
        arguments: seeds of the rank, their times, ids and labels, as arguments of the loader.
    """

    data: Any
    sampler: Any
    order: Order
    rank: int
    offsets: Mapping[int, int]
    block: int
    joined: bool
    link: bool
    arguments: Mapping[str, Any]

    def turns(self, epoch: int) -> list[list[tuple[int, int, list[int]]]]:
        return self.order.turns(epoch, self.rank, self.joined)

    def batches(self, epoch: int) -> list[Any]:
        """Returns the batches of this rank in an epoch."""
        if epoch not in self._cached:
            self._cached[epoch] = self.drawn(epoch, self.turns(epoch))
        return [copy.copy(batch) for batch in self._cached[epoch]]

    def drawn(self, epoch: int, turns: list[list[tuple[int, int, list[int]]]]) -> list[Any]:
        """Returns the batches of some turns, with the keys of an epoch."""
        positions = [[self._offset(lr) + at for lr, _, own in pieces for at in own] for pieces in turns]
        keys = ([(len(own), self._keys(epoch, lr, index)) for lr, index, own in pieces] for pieces in turns)
        kind = LinkNeighborLoader if self.link else NeighborLoader
        sampler = Keyed(self.sampler, keys)
        return list(kind(self.data, [], neighbor_sampler=sampler, batch_sampler=positions, **self.arguments))

    @cached_property
    def _cached(self) -> dict[int, list[Any]]:
        return {}

    def _offset(self, logical_rank: int) -> int:
        return self.offsets[logical_rank // self.order.layout.per_unit]

    def _keys(self, epoch: int, logical_rank: int, index: int) -> BatchKeys:
        seed = self.order.seed
        own = key_of(DRAWS, seed, epoch, logical_rank, index)
        return BatchKeys(own, own if self.block == 1 else key_of(BLOCK, seed, epoch, logical_rank, index // self.block))


def shift_of_labels(labels: Sequence[Tensor | None]) -> int:
    """Returns the number that binary negatives add to the labels of all ranks."""
    least = min((float(label.min()) for label in labels if label is not None and label.numel()), default=None)
    return int(least == 0)
