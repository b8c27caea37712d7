"""Records the plan of a model in one forward pass on a whole batch. The model and the random number generators stay as they were."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import Aggregation, HeteroLinear
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.models import rev_gnn

from salientpp.nn.layer_call import arguments_of, can_cut, edges_in
from salientpp.nn.layers import layer_of, replaced
from salientpp.nn.rules import tensors_of
from salientpp.nn.trace import Plan, Recorder
from salientpp.sampling.hops import Hops

#: Name prefixes of modules that compute statistics over all rows they get.
_NORMS = (
    "BatchNorm",
    "SyncBatchNorm",
    "GraphNorm",
    "PairNorm",
    "DiffGroupNorm",
    "InstanceNorm",
    "MeanSubtraction",
    "GraphSizeNorm",
    "LayerNorm",
)

#: Files whose functions call layers in the forward and again in the backward.
_CALL_AGAIN = frozenset([torch.utils.checkpoint.__file__, rev_gnn.__file__])
_READS = frozenset(["numpy", "__array__", "__dlpack__", "tolist", "data_ptr"])


def record(
    model: torch.nn.Module,
    hops: Hops,
    norms_are_row_wise: bool,
    frame: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Plan:
    """Records the plan of a model for the batches of a loader, by a call with these arguments. ``frame`` is the Python frame that calls the model."""
    recorder = Recorder(min(counts[0] for counts in hops.num_nodes.values()), frame)
    seen: dict[torch.nn.Module, dict[str, Any]] = {}
    for path, module in model.named_modules():
        if isinstance(module, MessagePassing):
            seen[module] = {
                "forward": functools.partial(_call, recorder, module, path, hops, module.forward),
                "propagate": functools.partial(_seen, recorder.propagate, module.propagate),
                "edge_updater": functools.partial(_seen, recorder.edge_updater, module.edge_updater),
            }
            for part in module.modules():
                if not isinstance(part, (MessagePassing, Aggregation)):
                    seen[part] = {"forward": functools.partial(_seen, recorder.part, part.forward)}
        elif is_row_wise(module) or (norms_are_row_wise and type(module).__name__.startswith(_NORMS)):
            seen[module] = {"forward": functools.partial(_seen, recorder.edge_updater, module.forward)}
    buffers = [(value, value.clone()) for value in model.buffers()]
    devices = {value.device for value in tensors_of([args, kwargs]) if value.device.type != "cpu"}
    forked = torch.random.fork_rng(devices, device_type=next(iter(devices)).type if devices else "cpu")
    others = random.getstate(), np.random.get_state()
    with forked, torch.no_grad():
        values = [(vars(module), name, value) for module, given in seen.items() for name, value in given.items()]
        with replaced(values), recorder, _Reads(recorder):
            out = model.forward(*args, **kwargs)
        for value, before in buffers:
            value.copy_(before)
    random.setstate(others[0])
    np.random.set_state(others[1])
    return recorder.plan(out)


def is_row_wise(module: torch.nn.Module) -> bool:
    """Returns True for modules that work on each row separately although their operations do not show it. All their tensors have a row for each vertex."""
    if isinstance(module, (torch.nn.RNNBase, torch.nn.MultiheadAttention)):
        return module.batch_first
    return isinstance(module, (torch.nn.RNNCellBase, torch.nn.Bilinear, HeteroLinear))


class _Reads(TorchFunctionMode):
    """Tells a recorder which tensors leave torch. Python may then use their rows in any way."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            self._recorder.read(args)
        return func(*args, **(kwargs or {}))


def _has_all_rows(arguments: dict[str, Any], hops: Hops) -> bool:
    """Returns True if a layer gets one row for each of the batch's vertices: the model has neither added nor removed rows."""
    relation = edges_in(list(arguments.values()))[0].relation
    source, target = (None, None) if relation is None else (relation[0], relation[-1])
    x = arguments.get("x")
    if isinstance(x, (tuple, list)):
        types = [(source, x[0]), (target, x[-1])]
    else:
        types = list(x.items()) if isinstance(x, dict) else [(source, x)]
    return all(rows.size(0) == hops.num_nodes[type_][-1] for type_, rows in types if isinstance(rows, torch.Tensor))


def is_called_again(until: Any) -> bool:
    """Returns True if a function that ``until`` has called, such as a checkpoint, will call the layer again in the backward. Such a layer is not cut."""
    frame: Any = sys._getframe()
    while frame is not None and frame is not until:
        if frame.f_code.co_filename in _CALL_AGAIN:
            return True
        frame = frame.f_back
    return False


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
    """Runs a layer's call and reports it to the recorder."""
    if recorder.is_inside:
        return forward(*args, **kwargs)
    facts, arguments = layer_of(conv), arguments_of(conv, args, kwargs)
    cuts = recorder.unseen(lambda: can_cut(conv, forward, arguments, hops))
    if facts is None or not cuts or is_called_again(recorder.frame) or not _has_all_rows(arguments or {}, hops):
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
