"""Changes that users make to layers of PyG: methods on the instance, hooks, other modules, replaced functions. Tests apply each to several layers."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense import Linear

Change = Callable[[Any], contextlib.AbstractContextManager[None]]


def set_on(path: str, make: Callable[[Any], Any]) -> Change:
    """Sets an attribute of a layer, or of a module inside it, to ``make(old value)``."""

    @contextlib.contextmanager
    def change(conv: Any) -> Iterator[None]:
        *path_to, name = path.split(".")
        owner = conv
        for each in path_to:
            owner = getattr(owner, each)
        own = owner._modules if name in owner._modules else vars(owner)
        old = own.get(name)
        own[name] = make(getattr(owner, name))
        try:
            yield
        finally:
            if old is None:
                del own[name]
            else:
                own[name] = old

    return change


def method(name: str, wrap: Callable[[Any], Any]) -> Change:
    """Replaces a method on the instance by one that changes the result of the class's method."""

    def make(old: Any) -> Any:
        def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
            return wrap(old.__func__(self, *args, **kwargs))

        return types.MethodType(changed, old.__self__)

    return set_on(name, make)


def hook(path: str, register: str, function: Callable[..., Any]) -> Change:
    @contextlib.contextmanager
    def change(conv: Any) -> Iterator[None]:
        owner = conv.get_submodule(path) if path else conv
        handle = getattr(owner, register)(function)
        try:
            yield
        finally:
            handle.remove()

    return change


def for_all_modules(register: Callable[..., Any], function: Callable[..., Any]) -> Change:
    @contextlib.contextmanager
    def change(_: Any) -> Iterator[None]:
        handle = register(function)
        try:
            yield
        finally:
            handle.remove()

    return change


def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Change:
    return lambda _: mock.patch.object(owner, name, make(getattr(owner, name)))


def once(change: Callable[[Any], Any]) -> Change:
    """A change that is not undone."""

    @contextlib.contextmanager
    def changed(conv: Any) -> Iterator[None]:
        if not hasattr(conv, "_is_changed"):
            change(conv)
        conv._is_changed = True
        yield

    return changed


# --- modules ----------------------------------------------------------------------------------------------------


class SumAggregation(pyg.SumAggregation):
    """Has the name of PyG's class, and computes something else."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 3 * super().forward(*args, **kwargs)


class Centred(pyg.SumAggregation):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out = super().forward(*args, **kwargs)
        return out - out.mean(0)


class Twice(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Adapter(nn.Module):
    def __init__(self, lin: nn.Module) -> None:
        super().__init__()
        self.lin, self.down = lin, nn.Linear(lin.in_channels, 2).double()
        self.up = nn.Linear(2, lin.out_channels).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.up(self.down(x).relu())


class Rounding(nn.Module):
    """Quantises its input, as code for quantised training does."""

    def __init__(self, lin: nn.Module) -> None:
        super().__init__()
        self.lin = lin

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x + (x.mul(4).round() / 4 - x).detach())


class Counting(nn.Module):
    """Scales its rows by the number of its calls."""

    def __init__(self, lin: nn.Module) -> None:
        super().__init__()
        self.lin = lin
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.lin(x) * self.calls


class Squared(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * weight.abs()


def _with_subclass(lin: Any) -> Any:
    other = Twice(lin.in_channels, lin.out_channels, bias=lin.bias is not None).double()
    other.load_state_dict(lin.state_dict())
    return other


def _linear(lin: Any) -> nn.Module:
    return nn.Linear(lin.in_channels, lin.out_channels).double()


def _mlp(lin: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(lin.in_channels, 5), nn.Tanh(), nn.Linear(5, lin.out_channels)).double()


class DoubledProducts(nn.Parameter):
    """Weight of a linear map whose product with it is doubled, as weights that quantise have products of their own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * out if func is nn.functional.linear else out


class DoublingProducts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is nn.functional.linear else out


def _doubled_weight(lin: Any) -> Any:
    other = Linear(lin.in_channels, lin.out_channels, bias=lin.bias is not None).double()
    other.load_state_dict(lin.state_dict())
    other.weight = DoubledProducts(other.weight.detach())
    return other


@contextlib.contextmanager
def _of_subclass(conv: Any) -> Iterator[None]:
    kind = type(conv)
    conv.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, *args: 2 * kind.forward(self, *args)})
    try:
        yield
    finally:
        conv.__class__ = kind


def _normed(lin: Any) -> nn.Module:
    return nn.Sequential(lin, nn.LayerNorm(lin.out_channels)).double()


def _double(*given: Any) -> Any:
    """Forward hook of a module, of the messages or of an aggregation."""
    return 2 * given[-1]


#: Changes of how a layer passes messages.
MESSAGES: dict[str, Change] = {
    "message": method("message", lambda out: 2 * out),
    "message by a function": set_on("message", lambda old: lambda *args, **kwargs: old(*args, **kwargs).tanh()),
    "aggregate": method("aggregate", torch.tanh),
    "aggregate over all": method("aggregate", lambda out: out - out.mean(0)),
    "update": method("update", torch.sin),
    "propagate": method("propagate", lambda out: 2 * out),
    "forward of the aggregation": method("aggr_module.forward", lambda out: out * out.abs()),
    "hook of the aggregation": hook("aggr_module", "register_forward_hook", _double),
    "hook of the aggregation over all": hook(
        "aggr_module", "register_forward_hook", lambda module, args, out: out / (1 + out.abs().mean())
    ),
    "hook before the aggregation": hook(
        "aggr_module", "register_forward_pre_hook", lambda module, args: (args[0].tanh(), *args[1:])
    ),
    "hook of the messages": hook("", "register_message_forward_hook", _double),
    "hook before the messages": hook(
        "",
        "register_message_forward_pre_hook",
        lambda module, args: {name: 2 * value if name == "x_j" else value for name, value in args[0].items()},
    ),
    "hook of aggregate": hook("", "register_aggregate_forward_hook", _double),
    "hook before aggregate": hook(
        "",
        "register_aggregate_forward_pre_hook",
        lambda module, args: {name: value.flip(0) if name == "index" else value for name, value in args[0].items()},
    ),
    "hook of propagate": hook("", "register_propagate_forward_hook", _double),
    "another aggregation of one name": set_on("aggr_module", lambda old: SumAggregation()),
    "another aggregation": set_on("aggr_module", lambda old: Centred()),
    "hook for all modules": for_all_modules(
        torch_module.register_module_forward_hook,
        lambda module, args, out: 2 * out if isinstance(module, pyg.aggr.Aggregation) else None,
    ),
    "hook before all modules": for_all_modules(
        torch_module.register_module_forward_pre_hook,
        lambda module, args: (args[0].tanh(), *args[1:]) if isinstance(module, pyg.aggr.Aggregation) else None,
    ),
    "aggregation's class": patched(
        pyg.SumAggregation,
        "forward",
        lambda old: lambda self, *args, **kwargs: 2 * old(self, *args, **kwargs),
    ),
    "MessagePassing's class": patched(
        MessagePassing, "aggregate", lambda old: lambda self, *args, **kwargs: 2 * old(self, *args, **kwargs)
    ),
}

#: Changes of a linear map inside a layer, by a function that makes them from its name.
LINEAR: dict[str, Callable[[str], Change]] = {
    "Linear of torch with bias": lambda lin: set_on(lin, _linear),
    "MLP": lambda lin: set_on(lin, _mlp),
    "adapter": lambda lin: set_on(lin, Adapter),
    "LayerNorm": lambda lin: set_on(lin, _normed),
    "rounding": lambda lin: set_on(lin, Rounding),
    "counter": lambda lin: set_on(lin, Counting),
    "subclass": lambda lin: set_on(lin, _with_subclass),
    "weight of a subclass": lambda lin: set_on(lin, _doubled_weight),
    "forward": lambda lin: method(f"{lin}.forward", torch.tanh),
    "hook": lambda lin: hook(lin, "register_forward_hook", lambda module, args, out: out.sin()),
    "hook over all": lambda lin: hook(lin, "register_forward_hook", lambda module, args, out: out - out.mean(0)),
    "hook before": lambda lin: hook(lin, "register_forward_pre_hook", lambda module, args: (args[0].tanh(),)),
    "backward hook": lambda lin: hook(
        lin, "register_full_backward_hook", lambda module, grads, outs: tuple(g if g is None else 2 * g for g in grads)
    ),
    "parametrised": lambda lin: once(
        lambda conv: parametrize.register_parametrization(conv.get_submodule(lin), "weight", Squared())
    ),
    "weight_norm": lambda lin: once(lambda conv: parametrizations.weight_norm(conv.get_submodule(lin))),
    "spectral_norm": lambda lin: once(lambda conv: parametrizations.spectral_norm(conv.get_submodule(lin))),
    "spectral_norm as a hook": lambda lin: once(lambda conv: torch.nn.utils.spectral_norm(conv.get_submodule(lin))),
    "hook for all linear maps": lambda lin: for_all_modules(
        torch_module.register_module_forward_hook,
        lambda module, args, out: out.sin() if isinstance(module, Linear) else None,
    ),
    "Linear's class": lambda lin: patched(
        Linear, "forward", lambda old: lambda self, x: old(self, x).sin()
    ),
}  # fmt: skip

#: Changes that a model must notice after calls without them.
LATER: dict[str, Change] = {
    "hook before the backward": hook(
        "", "register_full_backward_pre_hook", lambda module, grads: tuple(2 * grad for grad in grads)
    ),
    "another class": _of_subclass,
    "mode of torch functions": lambda conv: DoublingProducts(),
    "weight of a subclass": set_on("lin_l", _doubled_weight),
}
