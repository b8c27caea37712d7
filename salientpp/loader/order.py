"""Delivers batches in the order of a sampler that the user gave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from salientpp.engine.epochs import Order
from salientpp.ids import as_tensor
from salientpp.sampling.schedule import Turn


class GivenOrder:
    """Order of the user's ``batch_sampler``, or of the one that torch makes from the user's ``sampler``; see :class:`~salientpp.engine.epochs.Order`.

    The sampler's batches may depend on what the user's loop has done so far, and the sampler may never end. So each
    batch is read only when it is requested.

    Args:
        own: the order that the loader would have without the sampler, for estimates.
    """

    num_rounds = num_ticks = None

    def __init__(self, batches: Iterable[Any], num_seeds: int, own: Order) -> None:
        self._batches, self._num_seeds, self._own = batches, num_seeds, own

    @property
    def num_batches(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # raises TypeError, as torch does, if the sampler has no length

    @property
    def batches_of_logical_rank(self) -> int:
        return self.num_batches

    @property
    def batches_by_rank(self) -> list[int]:
        return [self.num_batches]

    def of_epoch(self, epoch: int) -> Iterator[Turn]:
        for index, batch in enumerate(self._batches):
            yield Turn(index, index, [(0, checked_positions(batch, self._num_seeds, "a batch of the sampler"))])

    def trial(self) -> Sequence[Turn]:
        return self._own.trial()

    def round_after(self, batches: int) -> int:
        return batches

    def batches_before(self, number: int) -> int:
        return number

    def with_seed(self, seed: int) -> GivenOrder:
        return GivenOrder(self._batches, self._num_seeds, self._own.with_seed(seed))


def checked_positions(index: Any, num_inputs: int, name: str) -> Tensor:
    """Returns int64 [B] positions among the seeds, given positions or a mask."""
    index = as_tensor(index, f"{name} must hold positions of seeds, or a mask of them")
    if index.is_meta:
        raise ValueError(f"{name} must hold positions of seeds, or a mask of them, got Tensor without values")
    index = index.cpu().flatten()
    if index.dtype == torch.bool:
        if index.numel() != num_inputs:
            raise ValueError(
                f"{name} as a mask must have an entry per seed, expected {num_inputs}, got {index.numel()}"
            )
        return index.nonzero().flatten()
    if index.numel() and (index.dtype.is_floating_point or index.dtype.is_complex):  # an empty list becomes float32
        raise ValueError(f"{name} must hold integer positions of seeds, or a mask of them, got {index.dtype}")
    index = index.to(torch.int64)
    bad = ((index < 0) | (index >= num_inputs)).nonzero()
    if bad.numel():
        raise ValueError(
            f"{name} must hold positions of seeds in [0, {num_inputs}), got {int(index[bad[0]])} at place {int(bad[0])}"
        )
    return index
