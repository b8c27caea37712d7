"""Groups the edges of a sampled batch by target, for the forward pass of a layer, and by source, for its gradients.

A sampler returns edges in ascending order of their targets, so row pointers are enough to group them. A layer then writes one output row per list of edges,
and its gradient writes one row per list by source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp import ops
from salientpp.store.rows import pinned


@dataclass(frozen=True, eq=False)
class EdgeLists:
    """Edges of one relation, grouped by target.

    Attributes:
        indptr: int64 [T + 1]. The edges into target t have the indices indptr[t] to indptr[t + 1] - 1 in the arrays below.
        source: int32 or int64 [E], the source of each edge, in [0, num_sources).
        edge: int32 [E], the column of each edge in the batch's ``edge_index``; -1 for an added self-loop. None: edge i is column i.
        num_sources: S, the number of possible sources.
    """

    indptr: Tensor
    source: Tensor
    edge: Tensor | None
    num_sources: int

    @property
    def num_targets(self) -> int:
        return self.indptr.numel() - 1

    @property
    def by_source(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same edges grouped by source, for gradients: ``indptr`` int64 [S + 1], ``target`` int32 [E] and ``place`` int32 [E].

        ``place`` holds the index of each edge in :attr:`source`, ascending for each source.

        The lists are made on first use. Two threads that ask at the same time may both make them.
        """
        made = self.__dict__.get("_by_source")
        if made is None:
            group = ops.group_by_source if self.indptr.device.type == "cpu" else group_by_source_composed
            with torch.inference_mode(False):
                made = group(self.indptr, self.source, self.num_sources)
            self.__dict__["_by_source"] = made
        return made

    def __getstate__(self) -> dict[str, object]:
        """Returns the state for copies and pickles, without the copies that :meth:`to` made on devices."""
        return {name: value for name, value in self.__dict__.items() if name != "_moved"}

    def num_places(self, num_targets: int) -> int:
        """Returns the number of edges into the first ``num_targets`` targets, without waiting for a device."""
        return int(self.__dict__.get("_host_indptr", self.indptr)[num_targets])

    def sizes(self, num_targets: int) -> Tensor:
        """Returns the number of edges into each of the first ``num_targets`` targets, int64."""
        return self.indptr[1 : num_targets + 1] - self.indptr[:num_targets]

    def targets(self, num_targets: int) -> Tensor:
        """Returns the target of each edge that leads to one of the first ``num_targets`` targets, int64."""
        every = torch.arange(num_targets, device=self.indptr.device)
        return torch.repeat_interleave(every, self.sizes(num_targets), output_size=self.num_places(num_targets))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> EdgeLists:
        """Returns the lists on a device. They are moved once per device, together with lists by source if these exist."""
        device = torch.device(device)
        if device == self.indptr.device:
            return self
        moved: dict[torch.device, EdgeLists] = self.__dict__.setdefault("_moved", {})
        if device not in moved:
            with torch.inference_mode(False):  # training steps use the copies too
                moved[device] = self._copied(lambda array: array.to(device, non_blocking=non_blocking))
        return moved[device]

    def pin_memory(self) -> EdgeLists:
        """Returns the lists in pinned memory, from which a device copies them while the host goes on."""
        return self._copied(pinned)

    def moved(self) -> Iterator[Tensor]:
        """Yields the tensors that :meth:`to` made on devices, so that the loader can tell CUDA streams that they are in use."""
        for lists in self.__dict__.get("_moved", {}).values():
            yield from (array for array in lists._arrays() if array is not None)

    def _arrays(self) -> list[Tensor | None]:
        return [self.indptr, self.source, self.edge, *self.__dict__.get("_by_source", ())]

    def _copied(self, copy: Callable[[Tensor], Tensor]) -> EdgeLists:
        """Returns these lists with copies of their arrays, also of the lists by source if these exist."""
        indptr, source, edge, *by_source = (None if array is None else copy(array) for array in self._arrays())
        lists = EdgeLists(indptr, source, edge, self.num_sources)  # type: ignore[arg-type]
        lists.__dict__["_host_indptr"] = self.__dict__.get("_host_indptr", self.indptr)
        if by_source:
            lists.__dict__["_by_source"] = tuple(by_source)
        return lists


def group_edges(edge_index: Tensor, num_sources: int, num_targets: int) -> EdgeLists | None:
    """Groups edges by target without copying their sources.

    Args:
        edge_index: int64 [2, E] on the CPU, sources and targets.
        num_sources: sources are in [0, num_sources).
        num_targets: targets are in [0, num_targets).

    Returns:
        The lists, or None if targets do not ascend or an id is out of range.
    """
    source, target = edge_index[0].contiguous(), edge_index[1].contiguous()
    indptr = ops.group_by_target(source, target, num_sources, num_targets)
    return EdgeLists(indptr, source, None, num_sources) if indptr.numel() else None


def with_self_loops(lists: EdgeLists) -> EdgeLists:
    """Returns the lists with one self-loop at the end of each. Existing self-loops are removed first.

    The targets must be the first T sources. ``edge`` of a loop is the ``edge`` of the last loop removed from its list, or -1.

    Raises:
        ValueError: there are more targets than sources.
    """
    if lists.num_targets > lists.num_sources:
        raise ValueError(
            f"self-loops need each target to be a source, got {lists.num_targets} targets and {lists.num_sources} sources"
        )
    return EdgeLists(*ops.add_self_loops(lists.indptr, lists.source, lists.edge), lists.num_sources)


def group_by_source_composed(indptr: Tensor, source: Tensor, num_sources: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes :func:`salientpp.ops.group_by_source` with torch's operations, for tensors on any device."""
    sizes = indptr[1:] - indptr[:-1]
    target = torch.repeat_interleave(
        torch.arange(sizes.numel(), device=indptr.device, dtype=torch.int32), sizes, output_size=source.numel()
    )
    sorted_source, place = torch.sort(source, stable=True)
    every = torch.arange(num_sources + 1, device=indptr.device, dtype=source.dtype)
    return torch.searchsorted(sorted_source, every), target[place], place.int()
