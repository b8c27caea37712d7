"""Stand-ins for torch's samplers, by which other libraries tell how a loader orders its seeds.

The loader never iterates them; ``set_epoch`` on them sets the loader's epoch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data


class OfLoader:
    """A stand-in for the sampler of a loader.

    Args:
        loader: an :class:`~salientpp.loader.engine_loader.EngineLoader`.
        *args: of torch's class.
    """

    def __init__(self, loader: Any, *args: Any) -> None:
        super().__init__(*args)
        self.belong_to(loader)

    def belong_to(self, loader: Any) -> None:
        """A copy of a loader has a copy of its sampler."""
        self._loader = weakref.ref(loader)  # a strong reference would be a cycle

    def _living_loader(self) -> Any:
        loader = self._loader()
        if loader is None:
            raise ReferenceError("the loader whose seeds these are is gone")
        return loader

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, or of one that was begun and not yet asked for a batch: Lightning calls ``iter`` first."""
        self._living_loader().set_next_epoch(epoch)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_loader"}


class ShuffledSampler(OfLoader, torch.utils.data.RandomSampler):
    """Of a loader with ``shuffle``."""


class OrderedSampler(OfLoader, torch.utils.data.SequentialSampler):
    """Of a loader without ``shuffle``."""


class RanksSampler(OfLoader, torch.utils.data.DistributedSampler):
    """Positions that a rank of a partitioned graph visits in the loader's next epoch.

    It is torch's ``DistributedSampler`` so that Lightning sees that the ranks have shared the seeds already.
    """

    def __init__(self, loader: Any) -> None:
        self.belong_to(loader)  # torch's has sizes of its own

    def __iter__(self) -> Iterator[int]:
        positions = self._living_loader().next_positions()
        return iter(torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *positions]).tolist())

    def __len__(self) -> int:
        return sum(positions.numel() for positions in self._living_loader().next_positions())
