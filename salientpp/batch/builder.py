"""Builds the user's batch from sampled vertices and edges, gathered rows, and the data's attributes at that moment.

The user may write to a ``Data`` while batches of it are in flight. The builder records the data's contents when a batch is begun, and compares them when the
batch is delivered. If they differ, it builds the batch again, and keeps the rows that are still current.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.batch.contents import Contents
from salientpp.batch.edges import mark_edges
from salientpp.batch.template import DataTemplate, PartitionTemplate, StoreTemplate
from salientpp.sampling.hops import Asked, demand
from salientpp.sampling.topology import Mfg
from salientpp.store.fetch import Column, Fetch
from salientpp.store.frames import Frame, put_tables_together


@dataclass
class BatchBuilder:
    """Builds the batches of one loader from samples (MFGs) and their rows.

    Attributes:
        fetch: fetches the rows.
        template: turns an MFG and its rows into a batch.
        add_batch_attributes: sets the attributes that PyG's loader adds to those of the data.
        device: device of the delivered batches.
        pin_memory: if True, put finished CPU batches into pinned host memory.
        dtype: dtype of the delivered ``x``. None: as stored.
        own: columns (vertex type, attribute name) whose rows come from a user's source instead of the data.
        held: contents of the data when the rows that ``fetch`` reads were taken from it. None: the data cannot change.
        marks_sizes: if True, tell ``torch.compile`` which sizes change.
        frames: by type and attribute name, the tables whose columns are gathered.
    """

    fetch: Fetch
    template: DataTemplate | StoreTemplate | PartitionTemplate
    add_batch_attributes: Callable[[Data | HeteroData, Mfg], None]
    device: torch.device
    pin_memory: bool = False
    dtype: torch.dtype | None = None
    own: Collection[Column] = ()
    held: Contents | None = None
    marks_sizes: bool = True
    frames: Mapping[Any, Mapping[str, Frame]] = field(default_factory=dict)
    _asked: Asked = field(default_factory=set, init=False)

    def contents(self) -> Contents | None:
        """Returns the current contents of the data. None: the data cannot change."""
        return self.template.contents()

    def brought(self, contents: Contents | None) -> Sequence[Column]:
        """Returns the columns that :attr:`fetch` can serve: those whose tensors are still in the data."""
        if contents is None or contents is self.held:
            return self.fetch.columns
        return [column for column in self.fetch.columns if self._brings(column, contents)]

    def current(self, contents: Contents | None) -> Sequence[Column]:
        """Returns the columns whose rows, as :attr:`fetch` serves them, equal those in ``contents``.

        A column that was written to is missing if a device holds older copies of its rows.
        """
        if contents is None or contents is self.held:
            return self.fetch.columns
        return [column for column in self.fetch.columns if self.has_current(column, contents, contents)]

    def build(self, mfg: Mfg, rows: Mapping[Column, Tensor], contents: Contents | None) -> Data | HeteroData:
        """Builds the batch from these rows and from the other attributes in ``contents``. Any thread may call it."""
        batch = self.template.build(mfg, rows, contents)
        self.add_batch_attributes(batch, mfg)
        if demand.hops or getattr(mfg, "share", None) is not None:
            mark_edges(batch, mfg, self._asked)
        return batch

    def build_anew(self, mfg: Mfg, rows: Mapping[Column, Tensor], contents: Contents | None) -> Data | HeteroData:
        """Builds a batch again, because the user has changed the data since, and moves it to :attr:`device`. Runs in the caller's thread."""
        batch = self.build(mfg, rows, contents)
        return batch if self.device.type == "cpu" else batch.to(self.device)

    def finish(self, batch: Data | HeteroData) -> Data | HeteroData:
        """Completes a batch once all its rows are set: tables, dtype, pinned memory and marks for ``torch.compile``."""
        for store in batch.stores if self.frames else ():
            put_tables_together(store, self.frames.get(store._key, {}))
        batch = self.in_dtype(batch)
        if self.pin_memory:
            batch = batch.pin_memory()
        if self.marks_sizes and _has_compiled():
            _mark_sizes(batch)
        return batch

    def in_dtype(self, batch: Data | HeteroData) -> Data | HeteroData:
        if self.dtype is not None:
            for store in batch.node_stores:
                if isinstance(store.get("x"), Tensor):
                    store.x = store.x.to(self.dtype)
        return batch

    def is_current(self, then: Contents | None, now: Contents) -> bool:
        """True if everything in a batch that was begun with the contents ``then`` equals the contents ``now``."""
        if then is None or not now.equals(then):
            return False
        return now.equals(self.held) or all(self.has_current(column, then, now) for column in self.fetch.columns)

    def has_current(self, column: Column, then: Contents | None, now: Contents) -> bool:
        """True if rows that were gathered when the data had the contents ``then`` equal those in ``now``."""
        if column in self.own:
            return True
        if not now.has_same(column, then):
            return False
        return now.has_same(column, self.held) if self.fetch.has_copies else self._brings(column, now)

    def _brings(self, column: Column, contents: Contents) -> bool:
        """True if :attr:`fetch` reads the very tensor that ``contents`` has for the column, and this tensor needs no gradient."""
        value = contents.value(column)
        if column in self.own:
            return True
        return (
            isinstance(value, Tensor)
            and self.held is not None
            and value is self.held.value(column)
            and not value.requires_grad
        )


def _has_compiled() -> bool:
    """True if this process has used ``torch.compile``. If not, batches need no marks, which take as long as sampling."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # importing it would take seconds
    backends = {} if frames is None else getattr(frames, "cached_backends", {0: len})
    return any(map(callable, backends.values()))  # a function that is excluded from compilation has the value False


def _mark_sizes(batch: Data | HeteroData) -> None:
    """Tells ``torch.compile`` which sizes change between batches, so that it compiles once and not again for the second batch."""
    for store in batch.stores:
        for name, value in store.items():
            if isinstance(value, Tensor) and value.dim() and value.layout == torch.strided:
                dim = batch.__cat_dim__(name, value, store)
                if isinstance(dim, int):
                    torch._dynamo.maybe_mark_dynamic(value, dim % value.dim())
