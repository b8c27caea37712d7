"""Stand-ins for a model's parameters, through which their gradients are summed over the ranks.

While a distributed model runs, its modules have stand-ins instead of their parameters (:meth:`~salientpp.fullgraph.exchange.Ranks.replicated`). A model
can also reach a parameter through a list, a dict or a closure. So :class:`Substituted` gives the stand-in to every torch function that is called with
a parameter. Calls of ``torch.autograd.Function`` or TorchScript bypass even this; :func:`check_gradients` finds them in the autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from salientpp.fullgraph.outputs import output_tensors


class Substituted(TorchFunctionMode):
    """Mode in which torch functions get stand-ins instead of parameters. ``stand_ins``: ``id`` of a parameter -> stand-in."""

    def __init__(self, stand_ins: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._stand_ins = stand_ins

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(
            *(self._of(each) for each in args), **{name: self._of(each) for name, each in (kwargs or {}).items()}
        )

    def _of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._stand_ins.get(id(value), value)
        if isinstance(value, (list, tuple)) and any(id(each) in self._stand_ins for each in value):
            return type(value)([self._stand_ins.get(id(each), each) for each in value])
        return value


def check_gradients(out: Any, model: torch.nn.Module, stand_ins: Mapping[int, Tensor]) -> list[Any]:
    """Checks that gradients of ``out`` reach parameters only through stand-ins. Returns the nodes of autograd's graph.

    Raises:
        ValueError: a gradient would bypass a stand-in, and so the sum over the ranks; the text names the parameter.
    """
    waiting: list[Any] = []
    for tensor in output_tensors(out):
        if id(tensor) in stand_ins and torch.is_grad_enabled():
            raise ValueError(_refusal(model, tensor))
        waiting.append(tensor.grad_fn)
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name == "_ReplicatedBackward":
            continue
        if name == "CheckpointFunctionBackward":
            raise ValueError(
                "torch.utils.checkpoint(..., use_reentrant=True) in the model would keep gradients of parameters from being summed over the ranks; pass "
                "use_reentrant=False"
            )
        variable = getattr(node, "variable", None)
        if id(variable) in stand_ins:
            raise ValueError(_refusal(model, variable))
        waiting.extend(following for following, _ in node.next_functions)
    return [*seen]


def _refusal(model: torch.nn.Module, parameter: Any) -> str:
    path = next(path for path, each in model.named_parameters() if each is parameter)
    return (
        f"the gradient of the parameter {path} would not be summed over the ranks, because rows that depend on it were computed before the model was called, "
        "or because an autograd.Function or a TorchScript function got it from a list, a dict or a closure. Compute such rows in the model's forward, and "
        "pass the parameter to such a function as an attribute of its module"
    )
