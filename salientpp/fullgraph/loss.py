"""Loss and accuracy over the vertices of all ranks. A distributed model sums the ranks' gradients of the loss."""

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
    ranks = of.job
    with ranks.preparing("loss_mean"):
        if not isinstance(losses, Tensor) or losses.dim() == 0:
            raise ValueError(
                "losses must be a tensor [m, ...], one loss for each of this rank's training vertices (reduction='none'), got "
                f"{'a scalar' if isinstance(losses, Tensor) else type(losses).__name__}; the mean over all ranks does not follow from the means of the ranks"
            )
        if weight is not None and weight.shape != losses.shape:
            raise ValueError(
                f"weight must have the shape of losses, {list(losses.shape)}, got {list(weight.shape)}; torch would combine each loss with several weights. "
                "Pass weight.expand_as(losses) or weight.view_as(losses)"
            )
        values = losses if weight is None else losses * weight
        if not values.is_floating_point():
            raise ValueError(
                f"losses must be floating-point numbers, got {values.dtype}, which would round their mean; pass losses.float()"
            )
        dtype = wide(values.dtype)  # bfloat16 would round a count of 257 to 256
        count = torch.tensor(losses.numel(), device="cpu") if weight is None else weight.sum(dtype=dtype)
        total, count = values.sum(dtype=dtype), count.to(values.device, dtype)
    mean = _Mean.apply(total, count, ranks).to(values.dtype)
    watch_backward([mean], ranks)
    return mean


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, ranks: Ranks) -> Tensor:
        ctx.both = both = ranks.sum_up(torch.stack([total, count]), "loss")
        return both[0] / both[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        total, count = ctx.both
        return gradient / count, -gradient * total / count.square(), None


@torch.no_grad()
def accuracy(prediction: Tensor, y: Tensor, of: LocalGraph | DistributedModel) -> float:
    """Returns the fraction of correct predictions over all ranks. Collective.

    Args:
        prediction: [m, ...] classes in the shape of ``y``, or [m, ..., C] scores, of which the largest gives the class.
        y: [m, ...] classes. [m, 1], as in the Open Graph Benchmark, is the same as [m].

    Raises:
        ValueError: the shapes do not fit each other, or a prediction of one number per vertex is not a class.
    """
    with of.job.preparing("accuracy"):
        classes, y = _classes_of(prediction, y)
        right = torch.tensor([int((classes == y).sum()), y.numel()], dtype=torch.float64, device=of.job.device)
    right, number = of.job.sum_up(right, "score").tolist()
    return right / number if number else float("nan")


def _classes_of(prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns predicted and true classes in one shape, because torch would broadcast different shapes when it compares them."""
    given = f"got prediction {list(prediction.shape)} and y {list(y.shape)}"
    if y.dim() == 2 and y.size(1) == 1:
        y = y.squeeze(1)
        prediction = prediction.squeeze(1) if prediction.dim() == 3 else prediction
    if prediction.dim() == 2 and prediction.size(1) == 1:
        prediction = prediction.squeeze(1)
    if y.dim() and prediction.shape[:-1] == y.shape:
        return prediction.argmax(-1), y
    if not y.dim() or prediction.shape != y.shape:
        raise ValueError(
            f"prediction must be classes in the shape of y, or scores [..., C] for each entry of y, {given}"
        )
    if prediction.is_floating_point() and not torch.equal(prediction, prediction.round()):
        raise ValueError(
            f"prediction has fractions in the shape of y, so it is neither classes (integers) nor scores [..., C] with one score per class, {given}; if the "
            "model gives one score for two classes, pass `prediction > 0`"
        )
    return prediction, y
