"""Random batches for caches that know the next batches."""

from __future__ import annotations

import torch

from salientpp.ways.lookahead.planner import Planner
from salientpp.ways.lookahead.shape import Shape


def random_batches(number: int, num_ids: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Batches drawn with random probabilities, each in random order, and these probabilities."""
    draw = torch.Generator().manual_seed(seed)
    prior = torch.rand(num_ids, generator=draw) ** 4
    prior[torch.rand(num_ids, generator=draw) < 0.05] = 0.0
    batches = []
    for _ in range(number):
        ids = (torch.rand(num_ids, generator=draw) < prior).nonzero().flatten()
        batches.append(ids[torch.randperm(ids.numel(), generator=draw)])
    return batches, prior


def upcoming(planner: Planner, lists: list[torch.Tensor]):
    return lambda: lists[planner.known] if planner.known < len(lists) else None


def roomy(window: int, slots: int) -> Shape:
    return Shape(window, slots, 10**9)
