"""Forward pass of a model whose layers compute only the rows that are needed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch_geometric.nn.conv import MessagePassing

from salientpp.batch.edges import BatchEdges
from salientpp.containers import mapped, tensors_of
from salientpp.nn.layer_call import LayerCall, arguments_of, can_cut
from salientpp.nn.layers import Replaced
from salientpp.nn.record import is_called_again, is_row_wise, may_be_row_wise, name_of_function
from salientpp.nn.trace import Call, TrimPlan
from salientpp.nn.undo import Noted
from salientpp.sampling.hops import Hops
from salientpp.ways.sums.marked import BROADCASTING


def _functions(names: str) -> frozenset[Any]:
    """Returns torch's functions, methods and operators of these names, with their in-place variants."""
    owners, forms = (torch, Tensor, torch.nn.functional), ("{}", "{}_", "__{}__", "__i{}__", "__r{}__")
    found = [getattr(owner, form.format(name), None) for owner in owners for name in names.split() for form in forms]
    return frozenset(function for function in found if callable(function))


#: Functions of several tensors that work on each row separately, and broadcast.
_ALIGNED = _functions(
    f"{BROADCASTING} max min fmax fmin fmod remainder atan2 hypot logaddexp xlogy copysign xor logical_xor "
    "cosine_similarity pairwise_distance"
)
#: Functions that do not broadcast, and functions that may join columns.
_EQUAL = _functions("stack bmm baddbmm bilinear")
_JOINS = _functions("cat concat concatenate")
#: Tensor classes without operations of their own.
_PLAIN = (Tensor, torch.nn.Parameter, BatchEdges)


def _joins_columns(tensors: Any, dim: int = 0, **_: Any) -> bool:
    ndim = max((each.dim() for each in tensors_of(tensors)), default=0)
    return ndim > 0 and isinstance(dim, int) and dim % ndim != 0


class TrimmedRun(Noted, TorchFunctionMode):
    """Context of a model's forward pass on a batch whose hops are known.

    Between layers, for example in skip connections, an operation may get tensors with different numbers of rows of one batch. If it works on each row
    separately, it gets the rows that all these tensors have.

    Args:
        plan: rows that each layer needs. None: the model runs as the plain one.
        hops: hops of the batch.
        frame: the Python frame that calls the model.
        modules: paths and modules of the model, at least those for which :func:`may_be_replaced` holds. None: all.

    Attributes:
        functions: names of torch's functions that the model has called between its layers, in order.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: TrimPlan | None,
        hops: Hops,
        frame: Any,
        modules: Iterable[tuple[str, torch.nn.Module]] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.functions: list[str] = []
        self._frame = frame
        self._plan = plan
        self.hops = hops
        self._next = 0
        self._is_inside = False
        self._numbers = {count for counts in hops.num_nodes.values() for count in counts}
        self._numbers_but_1 = self._numbers - {1}
        modules = model.named_modules() if modules is None else modules
        forwards = self._forwards(modules) if plan is not None else ()
        self._calls = Replaced([(vars(module), "forward", call) for module, call in forwards])

    def _forwards(
        self, modules: Iterable[tuple[str, torch.nn.Module]]
    ) -> Iterator[tuple[torch.nn.Module, Callable[..., Any]]]:
        """Yields each module whose forward is replaced in this pass, with the replacement."""
        for path, module in modules:
            if isinstance(module, MessagePassing):
                yield module, functools.partial(self._call, module, path, module.forward)
            elif may_be_row_wise(module):
                yield module, functools.partial(self._row_wise, module, module.forward)

    def __enter__(self) -> TrimmedRun:
        self._calls.__enter__()
        if self._plan is not None:
            super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._plan is not None:
            super().__exit__(*raised)
        self._calls.__exit__(None, None, None)

    @torch.compiler.disable  # compiled code of a trimmed model calls this method and does not contain it
    def _call(self, conv: MessagePassing, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:  # a layer inside a layer
            return forward(*args, **kwargs)
        plan = self._plan or ()
        name, call = type(self.model).__name__, plan[self._next] if self._next < len(plan) else None
        if call is None or call.layer != path:
            raise RuntimeError(
                f"{name} called layer {path!r}, where it called {'no layer' if call is None else repr(call.layer)} before; a trimmed model must call the "
                "same layers in the same order for every batch; do not use salientpp.nn.trim on this model"
            )
        self._next += 1
        self._is_inside = True
        try:
            if call.is_whole:
                return forward(*args, **kwargs)
            is_plain = all(type(each) in _PLAIN for each in tensors_of((*args, *kwargs.values())))
            # Without torch functions, this mode and the check for subclasses cost nothing.
            with torch._C.DisableTorchFunction() if is_plain else contextlib.nullcontext():
                layer = self._cut(conv, call, forward, args, kwargs)
                if is_plain and layer.is_aligned:
                    return layer.run(forward)
            return layer.run(forward)
        finally:
            self._is_inside = False

    def _cut(self, conv: MessagePassing, call: Call, forward: Callable[..., Any], args: Any, kwargs: Any) -> LayerCall:
        """Returns the call of a layer on the needed rows only. Raises RuntimeError if the layer cannot be cut."""
        name, arguments = type(self.model).__name__, arguments_of(conv, args, kwargs)
        if arguments is None or not can_cut(conv, forward, arguments, self.hops):
            raise RuntimeError(
                f"{type(conv).__name__} ({call.layer}) was given the batch's edges when {name} was first called, but other edges or further arguments now; a "
                "trimmed model must use the same edges in every call; do not use salientpp.nn.trim on this model"
            )
        if is_called_again(self._frame):
            raise RuntimeError(
                f"{type(conv).__name__} ({call.layer}) of {name} is called by torch.utils.checkpoint, but was called without it while gradients were off; "
                "the backward would give the layer all edges but only some rows; remove the checkpoint, which saves less memory in a trimmed model, "
                "or do not use salientpp.nn.trim"
            )
        return self._layer(conv, call, arguments)

    def _layer(self, conv: MessagePassing, call: Call, arguments: dict[str, Any]) -> LayerCall:
        return LayerCall(conv, call, arguments, self.hops)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_inside:
            self.functions.append(name_of_function(func))
        if func in _ALIGNED:
            args, kwargs = self._aligned(args, kwargs, self._numbers_but_1)  # a single row broadcasts to any number
        elif func in _EQUAL or (func in _JOINS and _joins_columns(*args, **kwargs)):
            args, kwargs = self._aligned(args, kwargs, self._numbers)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            numbers = sorted({each.size(0) for each in tensors_of([args, kwargs]) if each.dim()} & self._numbers)
            if len(numbers) < 2:
                raise
            raise type(error)(
                f"{getattr(func, '__name__', func)} of {type(self.model).__name__} was given tensors with {' and '.join(map(str, numbers))} rows of "
                f"one batch ({error}); each layer of a trimmed model computes only the rows that later layers need; give this function tensors of one layer "
                "only, or do not use salientpp.nn.trim on this model"
            ) from error

    @torch.compiler.disable
    def _row_wise(self, module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._is_inside = self._is_inside, True
        try:
            if is_row_wise(module, args, kwargs):
                args, kwargs = self._aligned(args, kwargs, self._numbers, same_ndim=False)
            return forward(*args, **kwargs)
        finally:
            self._is_inside = before

    def _aligned(self, args: Any, kwargs: Any, numbers: set[int], same_ndim: bool = True) -> Any:
        """Cuts an operation's tensors to equally many rows of the batch, so that they can be combined. Returns the new arguments.

        Args:
            numbers: a tensor has rows of the batch if its number of rows is one of these.
            same_ndim: only tensors with the most dimensions are cut.
        """
        rows = [each for each in tensors_of([args, kwargs]) if each.dim() and each.size(0) in numbers]
        ndim = max((each.dim() for each in rows), default=0)
        counts = {each.size(0) for each in rows if each.dim() == ndim or not same_ndim}
        if len(counts) < 2:
            return args, kwargs
        least = min(counts)

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            is_row = value.dim() and value.size(0) in numbers and (value.dim() == ndim or not same_ndim)
            return value[:least] if is_row else value

        return mapped(args, cut), mapped(kwargs, cut)
