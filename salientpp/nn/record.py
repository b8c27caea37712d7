"""Finds the plan of a model, which says what rows each layer needs, by recording one forward pass on a whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import Aggregation, HeteroLinear
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.models import rev_gnn

from salientpp.containers import tensors_of
from salientpp.nn.layer_call import arguments_of, can_cut, edges_in
from salientpp.nn.layers import GRAPH_NORMS, Replaced, layer_of, remove_hooks
from salientpp.nn.sizes import NEW, counts_are_shapes, counts_in
from salientpp.nn.trace import Recorder, TrimPlan
from salientpp.nn.undo import Noted, note, runs_in, undo_noted
from salientpp.sampling.hops import Hops

#: Name prefixes of modules that compute statistics over all rows they get.
_NORMS = (*GRAPH_NORMS, "BatchNorm", "SyncBatchNorm", "DiffGroupNorm", "LayerNorm")

#: Activations inside layers. Layers of PyG share them as default arguments, also across models, which other threads may be calling.
_SHARED = (torch.nn.ReLU, torch.nn.Sigmoid)

#: Files whose functions call layers in the forward and again in the backward.
_CALL_AGAIN = frozenset([torch.utils.checkpoint.__file__, rev_gnn.__file__])
#: Functions through which rows leave torch or that tell how much memory they take, and functions that compute or change gradients of rows.
_READS = frozenset(["numpy", "__array__", "__dlpack__", "tolist", "data_ptr", "storage", "untyped_storage"])
_NBYTES = torch.Tensor.nbytes.__get__  # type: ignore[attr-defined]
_GRADIENTS = frozenset(["grad", "backward", "register_hook", "register_post_accumulate_grad_hook"])


@dataclass(frozen=True)
class Recorded:
    """Plan of a model and what its recording call showed.

    Attributes:
        plan: rows that each layer needs.
        trusting: a plan that assumes that no unknown use of a number of rows, as in ``len(h)``, does harm. Equal to ``plan`` if every
            use is known.
        functions: names of torch's functions between layers, in order.
        out: what the model returned.
    """

    plan: TrimPlan
    trusting: TrimPlan
    functions: tuple[str, ...]
    out: Any


def record(
    model: torch.nn.Module,
    hops: Hops,
    norms_are_row_wise: bool,
    frame: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Recorded:
    """Finds the rows that each layer needs, by one call of the model. Returns the plan.

    The call is like any other: with gradients where they are enabled, and with the model's hooks. Its effects are undone only within
    :func:`~salientpp.nn.rehearsal.rehearsal`.

    Args:
        hops: hops of the batch.
        norms_are_row_wise: True treats normalisations between layers as if they computed each row separately.
        frame: the Python frame that calls the model.
        args, kwargs: arguments of the model.
    """
    recorder = Recorder(min(counts[0] for counts in hops.num_nodes.values()), frame)
    keep_hops = functools.partial(recorder.propagate, length=0)
    seen: dict[torch.nn.Module, dict[str, Any]] = {}
    for path, module in model.named_modules():
        if isinstance(module, MessagePassing):
            seen[module] = {
                "forward": functools.partial(_call, recorder, module, path, hops, module.forward),
                "propagate": functools.partial(_seen, recorder.propagate, module.propagate),
                "edge_updater": functools.partial(_seen, keep_hops, module.edge_updater),
            }
            for part in module.modules():
                if not isinstance(part, (MessagePassing, Aggregation)) and type(part) not in _SHARED:
                    seen[part] = {"forward": functools.partial(_seen, recorder.part, part.forward)}
        elif norms_are_row_wise and type(module).__name__.startswith(_NORMS):
            seen[module] = {"forward": functools.partial(_seen, keep_hops, module.forward)}
        elif may_be_row_wise(module):
            otherwise = seen.get(module, {}).get("forward", module.forward)
            seen[module] = {"forward": functools.partial(_row_wise, recorder, module, module.forward, otherwise)}
    values = [(vars(module), name, value) for module, given in seen.items() for name, value in given.items()]
    functions = _Functions(recorder)
    remove = functools.partial(remove_hooks, model, (functions.begin, functions.end))
    note(remove)
    try:
        model.register_forward_pre_hook(functions.begin, prepend=True)
        model.register_forward_hook(functions.end)
        with Replaced(values), recorder, functions:
            out = model(*args, **kwargs)
    finally:
        undo_noted(remove)
    trusting = recorder.plan(out, trusts_readings=True)
    return Recorded(recorder.plan(out), trusting, tuple(functions.names), out)


# --- modules that work on each row separately -------------------------------------------------------------------


#: Classes of modules that work on each row separately for some arguments, although their operations do not show it.
_ROW_WISE = (torch.nn.RNNBase, torch.nn.MultiheadAttention, torch.nn.RNNCellBase, torch.nn.Bilinear, HeteroLinear)


def may_be_row_wise(module: torch.nn.Module) -> bool:
    """True for modules, such as RNNs, that may compute each row separately although their operations do not show it."""
    if not isinstance(module, _ROW_WISE):
        return False
    home = getattr(getattr(module.forward, "__func__", None), "__module__", None) or ""
    return home.startswith(("torch.", "torch_geometric."))


def may_be_replaced(module: torch.nn.Module) -> bool:
    """True for modules whose forward a trimmed call may replace, by their class."""
    return isinstance(module, (MessagePassing, *_ROW_WISE))


def is_row_wise(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if this call of a module computes each row of its first dimension separately."""
    given = [*args, *kwargs.values()]
    tensors = list(tensors_of(given))
    if not given or not isinstance(given[0], Tensor):
        return False  # for example a packed sequence
    if isinstance(module, torch.nn.RNNBase):
        return module.batch_first and len(tensors) == 1 and given[0].dim() == 3
    if isinstance(module, torch.nn.MultiheadAttention):
        masks = [mask for mask in (kwargs.get("attn_mask"), *args[5:6]) if mask is not None]
        rows = [
            each for each in (*args[:3], *(kwargs.get(name) for name in ("query", "key", "value"))) if each is not None
        ]
        return module.batch_first and not masks and all(each.dim() == 3 for each in rows)
    if isinstance(module, HeteroLinear):
        return given[0].dim() == 2
    return all(each.dim() >= 2 for each in tensors)


def _row_wise(
    recorder: Recorder,
    module: torch.nn.Module,
    forward: Callable[..., Any],
    otherwise: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if recorder.unseen(lambda: is_row_wise(module, args, kwargs)) and recorder.are_rows([args, kwargs]):
        return recorder.propagate([args, kwargs], lambda: forward(*args, **kwargs), length=0)
    return recorder.quietly(lambda: otherwise(*args, **kwargs))


class _Functions(Noted, TorchFunctionMode):
    """Reports to a recorder what a model does between its layers, where torch's operations do not show it.

    It reports tensors that leave torch, whose rows Python may use in any way; numbers of rows that become values; and
    gradients that are computed or changed by hooks.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.names: list[str] = []
        self._depth = 0

    def begin(self, *_: Any) -> None:
        """Starts the list of functions, as a forward pre-hook. A nested call of the model continues it."""
        self._depth += 1

    def end(self, *_: Any) -> None:
        """Ends the list of functions, as a forward hook. Later calls by backward hooks are not part of it."""
        self._depth -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self._recorder
        if recorder.is_suspended:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if recorder.is_between and self._depth:
            self.names.append(name_of_function(func))
        if name in _READS or name in _GRADIENTS or func == _NBYTES:
            recorder.read([args, kwargs])
        recorder.see_gradients([args, kwargs])
        counts = list(counts_in([args, kwargs])) if recorder.counts_rows else []
        is_shape = bool(counts) and counts_are_shapes(name, args, kwargs)
        for count in counts:
            count.use() if is_shape else count.need_all()
        out = func(*args, **kwargs)
        if not recorder.counts_rows:
            return out
        if is_shape and (name in NEW or name == "arange"):
            recorder.follow_shaped(out, counts[0])
        return self._of_shape(func, name, args, kwargs, out)

    def _of_shape(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        """Returns ``out``; a shape or a number of rows is replaced by one that reports its use."""
        if name not in ("size", "__len__", "numel", "nelement") and func != torch.Tensor.shape.__get__:  # type: ignore[attr-defined]
            return out
        shape = self._recorder.shape_of(args[0])
        # Over ranks, the check of rows has given a number that reports its use there.
        if shape is None or type(out) not in (int, torch.Size):
            return out
        if name in ("numel", "nelement"):
            return shape.numel()
        if name == "__len__":
            next(iter(shape))  # Python makes a plain number of it, so its use stays unknown
            return out
        return shape if isinstance(out, tuple) else shape[kwargs.get("dim", args[1] if len(args) > 1 else 0)]


@functools.lru_cache(1 << 12)
def name_of_function(func: Any) -> str:
    """Returns the name of one of torch's functions. Equal functions have equal names in all processes."""
    of = getattr(func, "__self__", None)  # the property, for ``__get__``
    return f"{getattr(of, '__name__', '')}.{getattr(func, '__name__', func)}"


def _has_all_rows(arguments: dict[str, Any], hops: Hops) -> bool:
    """True if a layer gets one row for each vertex of the batch, so that the model has added and removed none."""
    relation = edges_in(list(arguments.values()))[0].relation
    source, target = (None, None) if relation is None else (relation[0], relation[-1])
    x = arguments.get("x")
    if isinstance(x, (tuple, list)):
        types = [(source, x[0]), (target, x[-1])]
    else:
        types = list(x.items()) if isinstance(x, dict) else [(source, x)]
    return all(rows.size(0) == hops.num_nodes[type_][-1] for type_, rows in types if isinstance(rows, torch.Tensor))


def is_called_again(until: Any) -> bool:
    """Returns True if a function inside frame ``until`` repeats the running call in the backward, as checkpoints do."""
    return runs_in(_CALL_AGAIN, until)


def _seen(seen: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return seen([args, kwargs], lambda: original(*args, **kwargs))


def _call(
    recorder: Recorder,
    conv: MessagePassing,
    path: str,
    hops: Hops,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs a layer in a recording, and reports its call to the recorder."""
    if recorder.is_inside:
        return forward(*args, **kwargs)
    facts, arguments = layer_of(conv), recorder.unseen(lambda: arguments_of(conv, args, kwargs))
    cuts = recorder.unseen(lambda: can_cut(conv, forward, arguments, hops) and _has_all_rows(arguments or {}, hops))
    if facts is None or not cuts or is_called_again(recorder.frame):
        return recorder.whole_call(path, [args, kwargs], lambda: forward(*args, **kwargs))
    rows = [value for name, value in (arguments or {}).items() if not name.startswith("edge")]
    number = recorder.begin_call(path, [args, kwargs], rows)
    if facts.hops is None:
        out = forward(*args, **kwargs)
    else:
        length = facts.hops if isinstance(facts.hops, int) else getattr(conv, facts.hops)
        out = recorder.propagate([args, kwargs], lambda: forward(*args, **kwargs), length)
    recorder.end_call(number, rows, out)
    return out
