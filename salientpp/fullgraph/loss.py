"""Loss and accuracy over the vertices of all ranks. A rank computes the gradient of its own share; a distributed model sums these gradients over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from salientpp.fullgraph.distribute import DistributedModel
from salientpp.fullgraph.exchange import Ranks
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.once import once_differentiable
from salientpp.fullgraph.product import wide
from salientpp.fullgraph.watch import watch_backward


def loss_mean(losses: Tensor, of: LocalGraph | DistributedModel, weight: Tensor | None = None) -> Tensor:
    """Returns the mean of all ranks' losses, the same number on every rank. Collective; call ``backward()`` on it on every rank.

    Args:
        losses: [m, ...], losses of this rank's training vertices (``reduction="none"``); m may be 0.
        of: the graph or the distributed model, whose ranks all take part.
        weight: weights of the losses, in the same shape, or None. With weights, the mean is ``sum(weight * losses) / sum(weight)``.

    Returns:
        A scalar. It is NaN if no rank has a training vertex, like torch's mean of an empty tensor.
    """
    if not isinstance(losses, Tensor) or losses.dim() == 0:
        raise ValueError(
            "losses must be a tensor [m, ...], one loss for each of this rank's training vertices (reduction='none'), got "
            f"{'a scalar' if isinstance(losses, Tensor) else type(losses).__name__}; the mean over all ranks does not follow from the means of the ranks"
        )
    ranks = of.job
    values = losses if weight is None else losses * weight
    dtype = wide(values.dtype)  # bfloat16 would round a count of 257 to 256
    count = torch.tensor(losses.numel(), device="cpu") if weight is None else weight.detach().sum(dtype=dtype)
    mean = _Mean.apply(values.sum(dtype=dtype), count.to(values.device, dtype), ranks).to(values.dtype)
    watch_backward([mean], ranks)
    return mean


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, ranks: Ranks) -> Tensor:
        both = ranks.sum_up(torch.stack([total.detach(), count]), "loss")
        ctx.count = both[1]
        return both[0] / both[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient / ctx.count, None, None


@torch.no_grad()
def accuracy(prediction: Tensor, y: Tensor, of: LocalGraph | DistributedModel) -> float:
    """Returns the fraction of correct predictions over all ranks. Collective.

    Args:
        prediction: [m] classes, or [m, C] scores.
        y: [m] classes.
    """
    classes = prediction.argmax(-1) if prediction.dim() > 1 else prediction
    right = torch.tensor([int((classes == y).sum()), y.numel()], dtype=torch.float64, device=of.job.device)
    right, number = of.job.sum_up(right, "score").tolist()
    return right / number if number else float("nan")
