"""Padding of batches to a few size classes, for models that are compiled for fixed shapes (``pad='bucket'``).

docs/reference/batch.md describes a padded batch. Padding vertices follow the real ones, at least one of each type. Padding edges join only padding
vertices, in the order of their targets. So no message from padding reaches a real vertex, and real degrees are unchanged.

The classes come from a trial: just before the first batch is delivered, :data:`TRIAL` batches of the loader's seeds are drawn with keys of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from salientpp.batch.template import PartitionTemplate
from salientpp.engine.basis import Basis
from salientpp.engine.source import BatchSource
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.schedule import Turn
from salientpp.store.buffers import BufferPool

#: Number of batches from whose sizes the classes are computed.
TRIAL = 16

#: The trial's draws use the keys of this epoch. Users' epochs count up from 0, and single batches count down from -1.
TRIAL_EPOCH = -(2**61)

#: Sizes are rounded up to one of this number of steps between a power of two and the next. It is also the smallest size.
_STEPS = 32

#: Attributes that padding adds to a batch.
_MASKS = ("node_mask", "edge_mask")

#: Numbers of vertices and of edges by type. A graph without types has the types None and _EDGES.
Sizes = dict[Any, int]


@dataclass(frozen=True)
class Classes:
    """Sizes that batches are padded to, smallest first. Each class is at least as large as the one before, in every type."""

    sizes: Sequence[Sizes]

    @classmethod
    def of(cls, trial: Iterable[Sizes], types: Iterable[Any]) -> Classes:
        """Makes the classes from the sizes of some batches, in which a type may be missing; ``types`` lists all."""
        batches = list(trial)
        seen = {type_: sorted(sizes.get(type_, 0) for sizes in batches) or [0] for type_ in types}
        median = {type_: rounded_up(sizes[len(sizes) // 2]) for type_, sizes in seen.items()}
        return cls([median, {type_: rounded_up(sizes[-1]) for type_, sizes in seen.items()}])

    def fitting(self, sizes: Sizes) -> Sizes:
        """Returns the smallest class that holds ``sizes``."""
        for of_class in self.sizes:
            if _fits(sizes, of_class):
                return of_class
        largest, factor = self.sizes[-1], 1.0
        while not _fits(sizes, of_class):
            factor *= 1.25
            of_class = {type_: rounded_up(int(size * factor)) for type_, size in largest.items()}
        return of_class


def rounded_up(size: int) -> int:
    """Rounds a size up to a grid with :data:`_STEPS` steps from a power of two to the next (which adds at most 3 %), and to at least :data:`_STEPS`."""
    step = 1 << max(0, size.bit_length() - 1 - (_STEPS.bit_length() - 1))
    return max(_STEPS, -(-size // step) * step)


def _fits(sizes: Sizes, of_class: Sizes) -> bool:
    return all(size <= of_class[type_] for type_, size in sizes.items())


@dataclass(eq=False)
class Padding:
    """Pads the batches of one loader."""

    data: Any  # as given to the loader
    source: BatchSource
    classes: Classes
    _buffers: BufferPool = field(default_factory=BufferPool)

    def __call__(self, batch: Data | HeteroData) -> Data | HeteroData:
        """Pads the batch in place. Its new tensors share no memory with others.

        Raises:
            ValueError: an attribute is not a dense tensor, or has the name of a mask.
        """
        typed = isinstance(batch, HeteroData)
        nodes = {type_: batch[type_] for type_ in batch.node_types} if typed else {None: batch._store}
        edges = {type_: batch[type_] for type_ in batch.edge_types} if typed else {_EDGES: batch._store}
        # A batch's store of a type lacks n_id if no seed can reach the type, and edge_index if the data has no edges of the type.
        num_vertices = {type_: store.n_id.numel() if "n_id" in store else 0 for type_, store in nodes.items()}
        ends_of = {type_: store.get("edge_index") for type_, store in edges.items()}
        num_edges = {type_: 0 if of is None else of.size(1) for type_, of in ends_of.items()}
        # One padding vertex of every type, which padding edges join.
        sizes = self.classes.fitting({**{type_: number + 1 for type_, number in num_vertices.items()}, **num_edges})
        for type_, store in edges.items():
            if typed and ends_of[type_] is None:
                continue
            ends = [(num_vertices[end], sizes[end]) for end in ((type_[0], type_[2]) if typed else (None, None))]
            self._fill_edges(batch, store, num_edges[type_], sizes[type_], ends)
        for type_, store in nodes.items():
            self._fill_vertices(batch, store, num_vertices[type_], sizes[type_])
        return batch

    def _fill_edges(self, batch: Any, store: BaseStorage, number: int, size: int, ends: list[tuple[int, int]]) -> None:
        template = self.source.template
        stored = template.edge_rows[store._key] if isinstance(template, PartitionTemplate) else ()
        for name in self._attributes(store, {"e_id", *stored}, "edge"):
            self._fill(batch, store, name, number, size)
        edge_index = store.edge_index
        place = torch.arange(size - number, device=edge_index.device)
        padding = [first + place * (last - first) // max(1, size - number) for first, last in ends]
        store.edge_index = torch.cat([edge_index, torch.stack(padding).to(edge_index.dtype)], dim=1)
        store.edge_mask = _mask(number, size, edge_index.device)

    def _fill_vertices(self, batch: Any, store: BaseStorage, number: int, size: int) -> None:
        exchanged = [name for owner, name in self.source.exchanged if owner == store._key]
        for name in self._attributes(store, {"n_id", *exchanged}, "node"):
            self._fill(batch, store, name, number, size)
        device = next((store[name].device for name in store if isinstance(store[name], Tensor)), None)
        store.node_mask = _mask(number, size, device)
        if "num_nodes" in store:
            store.num_nodes = size

    def _attributes(self, store: BaseStorage, names: set[str], kind: str) -> list[str]:
        """Returns the names of the batch's attributes that are in ``names``, or have an entry per vertex (``kind`` 'node') or edge ('edge') of the data."""
        if isinstance(self.data, (Data, HeteroData)):
            whole = self.data._store if store._key is None else self.data[store._key]
            names |= {name for name in list(whole) if getattr(whole, f"is_{kind}_attr")(name)}
        names -= {"num_nodes", "edge_index"}
        return [name for name in list(store) if name in names and store[name] is not None]

    def _fill(self, batch: Any, store: BaseStorage, name: str, number: int, size: int) -> None:
        value = store[name]
        if name in _MASKS:
            raise ValueError(f"pad='bucket' sets {name}, but the data has an attribute of this name; rename it")
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested:
            kind = value.layout if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"pad='bucket' can pad dense tensors only, got {name}: {kind}; delete the attribute, or leave pad out"
            )
        dim = batch.__cat_dim__(name, value, store)
        shape = list(value.shape)
        if not isinstance(dim, int) or shape[dim] != number:
            return  # an attribute whose length is not the number of vertices or edges is whole in every batch
        shape[dim] = size
        if value.device.type == "cpu" and not value.requires_grad:
            out = self._buffers.empty(shape, value.dtype)
            out.narrow(dim, 0, number).copy_(value)
        else:
            out = torch.cat([value, value.new_empty(shape).narrow(dim, number, size - number)], dim)
        rest = out.detach().narrow(dim, number, size - number)
        if name in ("n_id", "e_id"):
            rest.fill_(-1)
        else:
            rest.zero_()
        store[name] = out.pin_memory() if torch.accelerator.is_available() and value.is_pinned() else out


#: Type of the edges of a graph without types.
_EDGES = "edges"


def _mask(number: int, size: int, device: torch.device | None) -> Tensor:
    return torch.arange(size, device=device) < number


def padding_of(data: Any, basis: Basis, turns: Sequence[Turn]) -> Padding:
    """Makes the padding of a loader, with size classes from a trial of some turns of an epoch. The result depends only on the seed and the data."""
    turns = turns[:-1] or turns  # the last batch may be smaller
    chosen = turns[:: -(-len(turns) // TRIAL) or 1]
    keys = basis.epochs.keys
    trial = (
        [(positions, keys(TRIAL_EPOCH, number, logical_rank)) for logical_rank, positions in turn.pieces]
        for number, turn in enumerate(chosen)
    )
    sizes = (sizes_of(basis.source.draw_joined(pieces)) for pieces in trial)
    return Padding(data, basis.source, Classes.of(sizes, types_of(data)))


def sizes_of(mfg: SamplerOutput | HeteroSamplerOutput) -> Sizes:
    """Returns the size of a batch of this MFG, with one padding vertex of every sampled type."""
    if isinstance(mfg, HeteroSamplerOutput):
        return {
            **{type_: n_id.numel() + 1 for type_, n_id in mfg.node.items()},
            **{type_: row.numel() for type_, row in mfg.row.items() if row is not None},
        }
    return {None: mfg.node.numel() + 1, _EDGES: mfg.row.numel()}


def types_of(data: Any) -> list[Any]:
    """Returns the types of vertices and of edges."""
    typed = isinstance(data, HeteroData) or getattr(data, "is_hetero", False)
    return [*data.node_types, *data.edge_types] if typed else [None, _EDGES]


def check_padding(data: Any, source: BatchSource, custom_cls: type | None) -> None:
    """Raises an error if batches of this loader cannot be padded."""
    why = None
    if not isinstance(source.sampler, NeighborSampler):
        why = "is not available with neighbor_sampler=: sizes come from a trial, which would change the sampler's later draws"
    elif isinstance(data, tuple) or custom_cls is not None:
        why = "is for a Data, a HeteroData or a partitioned graph, not for a FeatureStore and GraphStore"
    elif source.sampler.disjoint:
        why = "is not available with disjoint or time_attr: padding vertices belong to no tree"
    if why is not None:
        raise NotImplementedError(f"pad='bucket' {why}; leave pad out")
    if isinstance(data, (Data, HeteroData)):
        for store in data.stores:
            owner = "data" if store._key is None else f"data[{store._key!r}]"
            if store.get("adj_t") is not None:
                raise NotImplementedError(
                    f"pad='bucket' needs edges as edge_index, but {owner} has adj_t; convert it (torch_geometric.utils.to_edge_index), or leave pad out"
                )
            taken = [name for name in ("n_id", "e_id", *_MASKS) if name in store]
            if taken:
                raise ValueError(f"pad='bucket' sets {taken[0]}, but {owner} has an attribute of this name; rename it")
