"""Stand-ins for torch's samplers, because other libraries read from the type of a loader's sampler how the loader orders its seeds.

The loader never iterates them; ``set_epoch`` on them sets the loader's epoch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data


class OfLoader:
    """Stand-in for the sampler of a loader.

    Args:
        loader: an :class:`~salientpp.loader.engine_loader.EngineLoader`.
        *args: arguments of torch's class.
    """

    _loader: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, loader: Any, *args: Any) -> None:
        super().__init__(*args)
        self.belong_to(loader)

    def belong_to(self, loader: Any) -> None:
        """Connects this stand-in to its loader. The copy in a copied loader must not refer to the original."""
        self._loader = weakref.ref(loader)  # a strong reference would be a cycle

    def _living_loader(self) -> Any:
        loader = self._loader()
        if loader is None:
            raise ReferenceError(
                "the loader of this sampler has been deleted, or this is a copy of a sampler without its loader; use the sampler of a loader that you keep"
            )
        return loader

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch.

        An epoch that was begun but has given no batch yet is renumbered too, because Lightning calls ``iter`` first.
        """
        self._living_loader().set_next_epoch(epoch)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_loader"}


class ShuffledSampler(OfLoader, torch.utils.data.RandomSampler):
    """Sampler of a shuffling loader. Other libraries check its type."""


class OrderedSampler(OfLoader, torch.utils.data.SequentialSampler):
    """Sampler of a loader that does not shuffle. Other libraries check its type."""


class RanksSampler(OfLoader, torch.utils.data.DistributedSampler):
    """Positions that a rank of a partitioned graph visits in the loader's next epoch.

    The class derives from torch's ``DistributedSampler`` so that Lightning sees that the seeds are already divided among the ranks.
    """

    def __init__(self, loader: Any) -> None:
        self.belong_to(loader)  # without torch's __init__, which sets sizes that do not apply here

    def __iter__(self) -> Iterator[int]:
        positions = self._living_loader().next_positions()
        return iter(torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *positions]).tolist())

    def __len__(self) -> int:
        return sum(positions.numel() for positions in self._living_loader().next_positions())
