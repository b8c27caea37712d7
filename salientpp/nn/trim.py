"""Trimmed models, whose layers compute only the rows that the seeds of a batch need."""

from __future__ import annotations

import sys
import threading
from typing import Any, Literal, TypeVar

import torch
from torch.nn.parameter import is_lazy
from torch_geometric.nn.conv import MessagePassing

from salientpp.nn.layer_call import edges_in
from salientpp.nn.record import record
from salientpp.nn.run import Run
from salientpp.nn.trace import Plan
from salientpp.nn.unchanged import change_inside, change_of
from salientpp.sampling.hops import Hops, demand

Model = TypeVar("Model", bound=torch.nn.Module)
Norms = Literal["all rows", "needed rows"]

#: Attribute of a model that holds its :class:`Trimming`.
_ATTRIBUTE = "_salientpp_trimmed"

#: ``run``: the running forward pass of a trimmed model in this thread; ``frame``: the Python frame that called the model.
_thread = threading.local()


def trim(model: Model, norms: Norms = "all rows") -> Model:
    """Makes a model compute only the rows that the seeds of a batch need. The training loop stays unchanged.

    On a batch of one of this package's loaders, each message-passing layer computes only the rows that later layers need for the seeds. It computes them as
    products over the edges grouped by target. ``out[:batch_size]`` and all gradients equal those of the plain model up to rounding. ``out`` may have fewer
    rows than the batch has vertices, but always has the rows of the seeds. On any other graph (the whole one, a batch of another loader, edges that a
    transform has changed) the model runs as before.

    The first batch of each mode (training, evaluation) is computed twice, first without gradients, to find the rows that each layer needs. Buffers and the
    state of the random number generators are restored. Dropout draws other numbers than in the plain model, because it draws for fewer rows.

    Call it on the whole model that is given ``batch.x`` and ``batch.edge_index``, before or after the model is moved, copied, loaded or wrapped in
    ``DistributedDataParallel``. Unknown layers, layers that get other edges, and operations over all rows of a batch get all rows. Under
    ``torch.compile`` the model runs untrimmed; compile the parts between the layers instead.

    Args:
        model: a model of PyG's layers, for one type of vertices or several. It must call the same layers in the same order for every batch.
        norms: rows over which normalisations, such as ``BatchNorm`` in training, compute their statistics. 'all rows': all vertices of the batch, as in
            the plain model; the layers before them then compute all rows. 'needed rows': only the rows that the seeds need; this is faster, but
            results differ.

    Returns:
        The model. Its parameters, buffers and their names are unchanged.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: it has no message-passing layer, or ``norms`` has another value.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"trim needs a torch.nn.Module, got {type(model).__name__}")
    if not any(isinstance(module, MessagePassing) for module in model.modules()):
        raise ValueError(
            f"trim needs a model with layers of PyG's MessagePassing, got {type(model).__name__} without any"
        )
    if norms not in ("all rows", "needed rows"):
        raise ValueError(f"norms must be 'all rows' or 'needed rows', got {norms!r}")
    demand.hops = True
    if getattr(model, _ATTRIBUTE, None) is None:
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)
        model.register_forward_hook(_after_forward, always_call=True)
    setattr(model, _ATTRIBUTE, Trimming(norms))
    return model


class Trimming:
    """State of a trimmed model. It has a plan for each combination of modes and arguments that the order of the model's layers may depend on."""

    def __init__(self, norms: Norms) -> None:
        self.norms = norms
        self.plans: dict[Any, Plan] = {}
        # The thread of a running forward pass, during which layers are replaced.
        self.caller: threading.Thread | None = None

    def __reduce__(self) -> Any:
        return _with_plans, (self.norms, self.plans)


def _with_plans(norms: Norms, plans: dict[Any, Plan]) -> Trimming:
    trimmed = Trimming(norms)
    trimmed.plans.update(plans)
    return trimmed


# --- hooks: module-level functions, so that copies of a model keep them ----------------------------------------


def _before_forward(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or _is_running():  # a running model may contain this one
        return
    trimmed: Trimming = getattr(model, _ATTRIBUTE)
    if trimmed.caller is not None and trimmed.caller is not threading.current_thread() and trimmed.caller.is_alive():
        raise RuntimeError(
            f"{type(model).__name__} was called while another thread runs it; a trimmed model takes one call at a time; give each thread its own copy"
        )
    demand.hops = True  # trim() may have run in another process, which saved the model
    hops = _hops_of(args, kwargs)
    if hops is None or hops.share is not None:  # a distributed model trims the share of a batch itself
        return
    if all(counts[0] == counts[-1] for counts in hops.num_nodes.values()):  # all vertices are seeds
        return
    key = key_of(model, args, kwargs)
    if key not in trimmed.plans and any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        return  # lazy parameters get their shapes in this call
    _thread.frame = sys._getframe(1)
    trimmed.caller = threading.current_thread()
    try:
        if key not in trimmed.plans:
            trimmed.plans[key] = record(model, hops, trimmed.norms == "needed rows", _thread.frame, args, kwargs)
        run = Run(model, trimmed.plans[key], hops, _thread.frame)
        run.__enter__()
    except BaseException:
        _thread.frame, trimmed.caller = None, None
        raise
    _thread.run = run


def _after_forward(model: torch.nn.Module, args: Any, out: Any) -> None:
    run: Run | None = getattr(_thread, "run", None)
    if run is not None and run.model is model:
        _end(run)


def _end(run: Run) -> None:
    _thread.run = _thread.frame = None
    getattr(run.model, _ATTRIBUTE).caller = None
    run.__exit__(None, None, None)


def _is_running() -> bool:
    """Returns True if a trimmed model is being called in this thread. Ends a run that an interrupt left behind, because torch calls no hooks then."""
    begun, run = getattr(_thread, "frame", None), getattr(_thread, "run", None)
    frame: Any = sys._getframe() if begun is not None else None
    while frame is not None and frame is not begun:
        frame = frame.f_back
    if frame is None and run is not None:
        _end(run)
    return frame is not None


def trimming_of(model: torch.nn.Module) -> Trimming | None:
    """Returns the state that :func:`trim` has given a model, or None."""
    return getattr(model, _ATTRIBUTE, None)


def key_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the key of a call's plan in :attr:`Trimming.plans`."""
    modes = tuple((module.training, _is_unchanged(module)) for module in model.modules())
    return modes, *map(_choice, args), *((name, _choice(each)) for name, each in kwargs.items())


def _is_unchanged(module: torch.nn.Module) -> bool:
    """Returns True unless a module is a layer that was changed, which gets all rows."""
    return not isinstance(module, MessagePassing) or (change_of(module) is None and change_inside(module) is None)


def _choice(value: Any) -> Any:
    """Returns what a model may branch on: the value of a bool, str or None; the type of any other argument."""
    return value if value is None or isinstance(value, (bool, str)) else type(value)


def _hops_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hops | None:
    """Returns the hops of the batch whose edges a model was given; None without such edges, or with edges of two batches."""
    batches = [dict(store.items()) for value in args if hasattr(value, "stores") for store in value.stores]
    found = {id(edges.hops): edges.hops for edges in edges_in([args, kwargs, batches])}
    return next(iter(found.values())) if len(found) == 1 else None
