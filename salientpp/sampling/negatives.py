"""Negative examples of edges, drawn as PyG draws them, with draws fixed by a key."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.sampler import NegativeSampling

#: Largest number of weights that torch.multinomial takes.
_MOST_MULTINOMIAL = 2**24

#: Weight tensor -> (its version, its cumulative sums), for tensors with more weights than torch.multinomial takes.
_SUMS = WeakTensorKeyDictionary()


class KeyedNegatives:
    """PyG's negative sampling with draws that are a pure function of a key."""

    def __init__(self, negatives: NegativeSampling, key: int) -> None:
        self._negatives = negatives
        self._generator = torch.Generator().manual_seed(key)
        self.amount, self.is_binary, self.is_triplet = negatives.amount, negatives.is_binary, negatives.is_triplet

    def sample(self, num_samples: int, endpoint: str, num_nodes: int) -> Tensor:
        weight = self._negatives.src_weight if endpoint == "src" else self._negatives.dst_weight
        if weight is None:
            return torch.randint(num_nodes, (num_samples,), generator=self._generator, device="cpu")
        if weight.numel() != num_nodes:
            raise ValueError(
                f"{endpoint}_weight of neg_sampling must have {num_nodes} entries, one per vertex, got {weight.numel()}"
            )
        if num_nodes > _MOST_MULTINOMIAL:
            return _drawn_by_weight(weight, num_samples, endpoint, self._generator)
        try:
            chances = weight.cpu() if weight.is_floating_point() else weight.cpu().double()
            return torch.multinomial(chances, num_samples, replacement=True, generator=self._generator)
        except RuntimeError as error:
            raise _bad_weights(weight, endpoint) from error


def _bad_weights(weight: Tensor, endpoint: str) -> ValueError:
    least, most = (weight.min().item(), weight.max().item()) if weight.numel() else ("nothing", "nothing")
    return ValueError(
        f"{endpoint}_weight of neg_sampling must hold numbers >= 0, finite and not all 0, got {least} to {most}"
    )


def _drawn_by_weight(weight: Tensor, num_samples: int, endpoint: str, generator: torch.Generator) -> Tensor:
    """Draws positions, int64 [num_samples], each in proportion to its weight, for any number of weights.

    Raises:
        ValueError: a weight is negative or not finite, or all are 0.
    """
    version, sums = _SUMS.get(weight, (None, None))
    if sums is None or version != weight._version:
        on_cpu = weight.detach().cpu().to(torch.float64)
        if not bool((on_cpu >= 0).all()) or not 0 < float(on_cpu.sum()) < float("inf"):
            raise _bad_weights(on_cpu, endpoint)
        sums = on_cpu.cumsum(0)
        _SUMS[weight] = weight._version, sums
    total = sums[-1]
    drawn = torch.rand(num_samples, dtype=torch.float64, generator=generator, device="cpu") * total
    drawn.clamp_(max=torch.nextafter(total, torch.zeros_like(total)))  # the product may have been rounded up
    return torch.searchsorted(sums, drawn, right=True)
