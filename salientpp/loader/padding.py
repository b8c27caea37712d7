"""Padding of batches to few sizes, for models that are compiled for fixed shapes (``pad='bucket'`` and ``pad='fixed'``).

docs/reference/batch.md describes a padded batch. Padding vertices follow the real ones, at least one of each type. Padding edges join only padding
vertices, in the order of their targets. So no message from padding reaches a real vertex, and real degrees are unchanged.

The sizes are chosen just before the first batch is delivered. For 'bucket', :data:`TRIAL` trial batches are drawn, whose keys no batch of an epoch has. For
'fixed', there is one size, from :mod:`salientpp.loader.forecast`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage

from salientpp.batch.template import PartitionTemplate
from salientpp.engine.basis import Basis
from salientpp.engine.epochs import Draws, Order
from salientpp.engine.pipeline import tensors_in
from salientpp.engine.producer import Producer
from salientpp.engine.source import BatchSource
from salientpp.loader.batch_sizes import EDGES, TRIAL_EPOCH, Classes, sizes_of, types_of
from salientpp.loader.forecast import forecast_sizes
from salientpp.loader.static_buffers import StaticBuffers
from salientpp.processes import Lock
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.schedule import Turn
from salientpp.sampling.topology import ids_by_type
from salientpp.store.buffers import BufferPool
from salientpp.store.rows import empty_rows

#: Number of batches from whose sizes the classes are computed.
TRIAL = 16

#: A fixed size is a multiple of this number, so that rows of every dtype begin and end at a multiple of 8 bytes.
_GRAIN = 8

#: Attributes that padding adds to a batch.
_MASKS = ("node_mask", "edge_mask")


@dataclass(eq=False)
class Padding:
    """Pads the batches of one loader. A copy has its own counts and buffers.

    Attributes:
        data: the data as given to the loader.
        draws: the seed and epoch of the trial that gave the sizes. A loaded state may have another seed.
        static: the tensors that hold every batch. None: every batch gets tensors of its own.
        num_padded, num_overflows: number of batches padded, and of those among them that were larger than every size chosen in advance.
    """

    data: Any
    source: BatchSource
    classes: Classes
    draws: Draws
    static: StaticBuffers | None = None
    num_padded: int = 0
    num_overflows: int = 0
    _buffers: BufferPool = field(default_factory=BufferPool)
    _lock: Lock = field(default_factory=Lock)  # several threads may each drive an epoch

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "static": None if self.static is None else StaticBuffers(),
            "num_padded": 0,
            "num_overflows": 0,
            "_lock": Lock(),
        }

    def reset_counts(self) -> None:
        with self._lock:
            self.num_padded = self.num_overflows = 0

    def __call__(self, batch: Data | HeteroData) -> Data | HeteroData:
        """Pads the batch in place. Its new tensors share no memory with others, unless they are static.

        Raises:
            ValueError: an attribute is not a dense tensor, has the name of a mask, or needs a gradient although buffers are static.
        """
        typed = isinstance(batch, HeteroData)
        nodes = {type_: batch[type_] for type_ in batch.node_types} if typed else {None: batch._store}
        edges = {type_: batch[type_] for type_ in batch.edge_types} if typed else {EDGES: batch._store}
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
        if self.static is not None:
            self.static.hold(batch, self.data)
        with self._lock:
            self.num_padded += 1
            self.num_overflows += sizes not in self.classes.sizes
        return batch

    def _fill_edges(self, batch: Any, store: BaseStorage, number: int, size: int, ends: list[tuple[int, int]]) -> None:
        template = self.source.template
        stored = template.edge_rows[store._key] if isinstance(template, PartitionTemplate) else ()
        for name in self._attributes(store, {"e_id", *stored}, "edge"):
            self._fill(batch, store, name, number, size)
        edge_index = store.edge_index
        place = torch.arange(size - number, device=edge_index.device)
        padded = self._empty(store, "edge_index", [2, size], edge_index.dtype, edge_index.device)
        padded[:, :number] = edge_index
        for row, (first, last) in zip(padded, ends):
            row[number:] = first + place * (last - first) // max(1, size - number)
        store.edge_index = padded
        self._set_mask(store, "edge_mask", number, size, edge_index.device)

    def _fill_vertices(self, batch: Any, store: BaseStorage, number: int, size: int) -> None:
        exchanged = [name for owner, name in self.source.exchanged if owner == store._key]
        for name in self._attributes(store, {"n_id", *exchanged}, "node"):
            self._fill(batch, store, name, number, size)
        device = next((store[name].device for name in store if isinstance(store[name], Tensor)), None)
        self._set_mask(store, "node_mask", number, size, device or torch.device("cpu"))
        if "num_nodes" in store:
            store.num_nodes = size

    def _attributes(self, store: BaseStorage, names: set[str], kind: str) -> list[str]:
        """Returns the names of the attributes to pad: those with a row per vertex (``kind`` 'node') or edge ('edge') in the data, and those in ``names``."""
        if isinstance(self.data, (Data, HeteroData)):
            whole = self.data._store if store._key is None else self.data[store._key]
            names |= {name for name in list(whole) if getattr(whole, f"is_{kind}_attr")(name)}
        names -= {"num_nodes", "edge_index"}
        return [name for name in list(store) if name in names and store[name] is not None]

    def _fill(self, batch: Any, store: BaseStorage, name: str, number: int, size: int) -> None:
        value = store[name]
        if name in _MASKS:
            raise ValueError(f"pad sets {name}, but the data has an attribute of this name; rename it")
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested:
            kind = value.layout if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"pad can fill up dense tensors only, got {name}: {kind}; delete the attribute, or leave pad out"
            )
        dim = batch.__cat_dim__(name, value, store)
        shape = list(value.shape)
        if not isinstance(dim, int) or shape[dim] != number:
            return  # an attribute whose length is not the number of vertices or edges is whole in every batch
        shape[dim] = size
        if value.requires_grad:
            if self.static is not None:
                self.static.check(name, value)
            out = torch.cat([value, value.new_empty(shape).narrow(dim, number, size - number)], dim)
        else:
            out = self._empty(store, name, shape, value.dtype, value.device)
            out.narrow(dim, 0, number).copy_(value)
        rest = out.detach().narrow(dim, number, size - number)
        if name in ("n_id", "e_id"):
            rest.fill_(-1)
        else:
            rest.zero_()
        store[name] = out.pin_memory() if torch.accelerator.is_available() and value.is_pinned() else out

    def _set_mask(self, store: BaseStorage, name: str, number: int, size: int, device: torch.device) -> None:
        mask = self._empty(store, name, [size], torch.bool, device)
        mask[:number] = True
        mask[number:] = False
        store[name] = mask

    def _empty(
        self, store: BaseStorage, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Returns a tensor with arbitrary contents, into which the caller writes the padded attribute."""
        if self.static is not None:
            return self.static.tensor(store._key, name, shape, dtype, device)
        if device.type == "cpu":
            return self._buffers.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=device)


def padding_of(
    pad: str, data: Any, basis: Basis, order: Order, *, shuffled: bool, sigmas: float, static: bool
) -> Padding:
    """Makes the padding of a loader. Its sizes depend only on the seed, the data and the arguments of the loader.

    Args:
        pad, sigmas, static: the loader's option ``pad``, and its entries ``sigma`` and ``static``.
        order: the order of the rank's batches.
        shuffled: True if the order differs from epoch to epoch.
    """
    if pad == "bucket":
        classes = tried_classes(data, basis, order.trial())
    else:
        found = forecast_sizes(basis, order, types_of(data), shuffled)
        classes = Classes([{type_: _fixed_size(forecast.above(sigmas)) for type_, forecast in found.items()}])
    return Padding(data, basis.source, classes, basis.epochs.draws(0), StaticBuffers() if static else None)


def _fixed_size(size: float) -> int:
    """Rounds a size up to a multiple of :data:`_GRAIN`, at least one."""
    return max(1, math.ceil(size / _GRAIN)) * _GRAIN


def tried_classes(data: Any, basis: Basis, turns: Sequence[Turn]) -> Classes:
    """Returns size classes from trial batches of an epoch. They depend only on the seed and the data."""
    turns = turns[:-1] or turns  # the last batch may be smaller
    chosen = turns[:: -(-len(turns) // TRIAL) or 1]
    trial = (basis.epochs.pieces(TRIAL_EPOCH, turn, number) for number, turn in enumerate(chosen))
    return Classes.of(basis.source.drawing.draw_each(trial, sizes_of), types_of(data))


def padded_bytes(padding: Padding, producer: Producer, turn: Turn | None) -> tuple[int, int]:
    """Returns the bytes of a padded batch, and the bytes of the batch together with the tensors from which it is made.

    Args:
        turn: the seeds of any batch of an epoch. Their sample is drawn, and rows have arbitrary values. None: this rank
            has no batches.
    """
    basis, builder, fetch, source = producer.basis, producer.builder, producer.fetch, producer.basis.source
    pieces = [] if turn is None else basis.epochs.pieces(TRIAL_EPOCH, turn, 0)
    drawn, contents = basis.source.drawing.draw_each([pieces] if pieces else [], lambda mfg: mfg), builder.contents()
    if not drawn:
        return 0, 0
    (mfg,) = drawn
    n_id = ids_by_type(mfg.node)
    columns = builder.brought(contents)
    like = {column: source.delivered(column) for column in columns}
    rows = {
        column: torch.empty((), dtype=of.dtype, device="cpu").expand(n_id[column[0]].numel(), *of.shape[1:])
        for column, of in like.items()
    }
    seeds = fetch.seed_rows(n_id, sum(positions.numel() for positions, _ in pieces)) if fetch.seed_columns else {}
    batch = dataclasses.replace(padding, static=None)(builder.in_dtype(builder.build(mfg, {**rows, **seeds}, contents)))
    of_batch = sum(value.nbytes for value in tensors_in(batch))
    if basis.on_host:
        return of_batch, of_batch
    # A device also gets the packed rows, and 4 bytes for each vertex that tell the place of its row among them.
    size = padding.classes.sizes[0]
    of_rows = sum(empty_rows(source.rows_of(column), 1).nbytes * size[column[0]] for column in columns)
    return of_batch, of_batch + of_rows + 4 * sum(size[type_] for type_ in source.books)


def check_padding(pad: str, data: Any, source: BatchSource, custom_cls: type | None) -> None:
    """Raises an error if batches of this loader cannot be padded. ``pad`` is the loader's option."""
    why = None
    if not isinstance(source.sampler, NeighborSampler):
        why = "is not available with neighbor_sampler=: sizes come from a trial, which would change the sampler's later draws"
    elif isinstance(data, tuple) or custom_cls is not None:
        why = "is for a Data, a HeteroData or a partitioned graph, not for a FeatureStore and GraphStore"
    elif source.sampler.disjoint:
        why = "is not available with disjoint or time_attr: padding vertices belong to no tree"
    elif pad == "fixed" and source.sampler.topology.graph is None and not source.drawing.is_collective:
        kind = type(source.sampler.topology).__name__
        why = f"computes the size of batches from the edges of the graph, and a {kind} holds no graph"
    elif any(source.frames.values()):
        tables = ", ".join(sorted({name for named in source.frames.values() for name in named}))
        why = f"fills up tensors, but the data has TensorFrame attributes ({tables})"
    if why is not None:
        raise NotImplementedError(f"pad={pad!r} {why}; leave pad out")
    if isinstance(data, (Data, HeteroData)):
        for store in data.stores:
            owner = "data" if store._key is None else f"data[{store._key!r}]"
            if store.get("adj_t") is not None:
                raise NotImplementedError(
                    f"pad={pad!r} needs edges as edge_index, but {owner} has adj_t; convert it (torch_geometric.utils.to_edge_index), or leave pad out"
                )
            taken = [name for name in ("n_id", "e_id", *_MASKS) if name in store]
            if taken:
                raise ValueError(f"pad={pad!r} sets {taken[0]}, but {owner} has an attribute of this name; rename it")
