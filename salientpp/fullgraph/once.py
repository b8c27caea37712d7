"""Makes a second derivative of a distributed model raise an error instead of giving a wrong result.

The second derivative would lack the parts that travelled between ranks. ``torch.autograd.function.once_differentiable`` raises too, but only if autograd
reaches its node. And ``torch.autograd.grad`` with ``inputs`` skips nodes that do not lead to these inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the ``backward`` of a ``torch.autograd.Function``, so that a second derivative through it raises an error.

    If the results of ``backward`` depend on tensors besides the gradients, it must list them in ``ctx.others``.

    Raises:
        RuntimeError: in a second derivative.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *gradients)
        others = ctx.__dict__.pop("others", [])
        if not torch.is_grad_enabled():
            return results
        found = results if isinstance(results, tuple) else (results,)
        places = [place for place, each in enumerate(found) if isinstance(each, Tensor)]
        given = [each for each in (*gradients, *others) if isinstance(each, Tensor) and each.requires_grad]
        if not given or not places:
            return results
        tied = dict(zip(places, _Once.apply(len(places), *(found[place] for place in places), *given)))
        found = tuple(tied.get(place, each) for place, each in enumerate(found))
        return found if isinstance(results, tuple) else found[0]

    return once


class _Once(torch.autograd.Function):
    """Returns its first ``number`` tensors, and makes autograd believe that they depend on all given ones. Its backward raises the error."""

    @staticmethod
    def forward(ctx: Any, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.detach() for each in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "second derivatives of a distributed model are not supported, because gradients that travelled between ranks cannot be differentiated again; "
            "leave out create_graph=True, or compute second derivatives of model.module on a whole graph"
        )
