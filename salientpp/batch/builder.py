"""Makes the batch that the user gets of what was sampled and gathered and of what the data holds at that time.

A ``Data`` may be written to while batches of it are under way. What it held is noted when a batch is begun, and compared when it is given; a batch
that is no longer as the data is gets made anew, but for the rows that are still right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.batch.contents import Contents
from salientpp.batch.edges import mark_edges
from salientpp.batch.template import DataTemplate, PartitionTemplate, StoreTemplate
from salientpp.sampling.hops import demand
from salientpp.sampling.topology import Mfg
from salientpp.store.fetch import Column, Fetch


@dataclass
class BatchBuilder:
    """Makes the batches of one loader of MFGs and rows.

    Attributes:
        fetch, template: bring the rows; turn an MFG and its rows into a batch.
        add_batch_attributes: sets what PyG's loader sets beside the attributes.
        device: where batches are delivered.
        pin_memory: put finished batches of the CPU into pinned host memory.
        dtype: of delivered ``x``; None: as it is stored.
        own: columns whose rows come from a source of the user's, and not from the data.
        held: what the data held when the tiers were made of it; None where it cannot change.
        marks_sizes: tell ``torch.compile`` which sizes change.
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

    def contents(self) -> Contents | None:
        """What the data holds now; None where it cannot change."""
        return self.template.contents()

    def brought(self, contents: Contents | None) -> Sequence[Column]:
        """The columns that the tiers have as the data had them then. What was replaced since the tiers were made is not theirs to bring."""
        if contents is None or contents is self.held:
            return self.fetch.columns
        return [column for column in self.fetch.columns if self._brings(column, contents)]

    def current(self, contents: Contents | None) -> Sequence[Column]:
        """Of these, the columns whose rows would be as the data had them then; copies on the device may be older."""
        if contents is None or contents is self.held:
            return self.fetch.columns
        return [column for column in self.fetch.columns if self.has_current(column, contents, contents)]

    def build(self, mfg: Mfg, rows: Mapping[Column, Tensor], contents: Contents | None) -> Data | HeteroData:
        """The batch, with these rows and everything else of what the data held at that time. For any thread."""
        batch = self.template.build(mfg, rows, contents)
        self.add_batch_attributes(batch, mfg)
        if demand.hops:
            mark_edges(batch, mfg)
        return batch

    def build_anew(self, mfg: Mfg, rows: Mapping[Column, Tensor], contents: Contents | None) -> Data | HeteroData:
        """The same in the caller's thread, on the device where batches are delivered."""
        batch = self.build(mfg, rows, contents)
        return batch if self.device.type == "cpu" else batch.to(self.device)

    def finish(self, batch: Data | HeteroData) -> Data | HeteroData:
        """What is left to do when all rows are there."""
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
        """Whether everything in a batch that was begun ``then`` is as the data holds it now."""
        if then is None or not now.equals(then):
            return False
        return now.equals(self.held) or all(self.has_current(column, then, now) for column in self.fetch.columns)

    def has_current(self, column: Column, then: Contents | None, now: Contents) -> bool:
        """Whether gathered rows of a column are as the data holds them now; copies on the device may be older than the batch."""
        if column in self.own:
            return True
        if not now.has_same(column, then):
            return False
        return now.has_same(column, self.held) if self.fetch.has_copies else self._brings(column, now)

    def _brings(self, column: Column, contents: Contents) -> bool:
        """Whether the tiers hold the very tensor of a column, and it has not become learnable: gathered rows have no gradient."""
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
    """Whether ``torch.compile`` was used in this process; marks that nobody reads cost as much as sampling a small batch."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # loading it would take seconds
    backends = {} if frames is None else getattr(frames, "cached_backends", {0: len})
    return any(map(callable, backends.values()))  # for what is not to be compiled there is a False


def _mark_sizes(batch: Data | HeteroData) -> None:
    """Tell ``torch.compile`` which sizes change from batch to batch, so that it compiles once and not again at the second one."""
    for store in batch.stores:
        for name, value in store.items():
            if isinstance(value, Tensor) and value.dim() and value.layout == torch.strided:
                dim = batch.__cat_dim__(name, value, store)
                if isinstance(dim, int):
                    torch._dynamo.maybe_mark_dynamic(value, dim % value.dim())
