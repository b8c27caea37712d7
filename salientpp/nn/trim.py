"""Trimmed models, whose layers compute only the rows that the seeds of a batch need."""

from __future__ import annotations

import copy
import enum
import functools
import itertools
import sys
import threading
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch_geometric.nn.conv import MessagePassing

from salientpp.nn import undo
from salientpp.nn.check import CheckedCall, Results, SameNumbers, first_of, is_sharp, without_dropout
from salientpp.nn.layer_call import edges_in
from salientpp.nn.layers import Replaced, remove_hooks
from salientpp.nn.planned import Attributes, Before, Planned
from salientpp.nn.printed import TRIMMING, print_plain, print_trimmed, print_trimmed_of
from salientpp.nn.record import record
from salientpp.nn.rehearsal import rehearsal
from salientpp.nn.run import TrimmedRun
from salientpp.nn.trace import TrimPlan
from salientpp.nn.unchanged import change_inside, change_of, has_global_hooks, has_other_modes
from salientpp.ops import keep_freed_blocks, return_growth
from salientpp.sampling.hops import Hops, demand
from salientpp.suggestions import suggest_arguments

Model = TypeVar("Model", bound=torch.nn.Module)
Norms = Literal["all rows", "needed rows"]

#: Number of plans above which numbers among the arguments no longer get plans of their own.
MAX_PLANS = 32

#: Numbers inside containers get plans of their own only if they are smaller than this, as dimensions are.
_MAX_CHOICE = 8

#: Number of calls after which freed memory is returned to the system once, if the process has grown.
_KEEPING_CALLS = 8

#: Attribute by which ``torch.jit.script`` asks a module for the module to compile.
_SCRIPTABLE = "__prepare_scriptable__"

#: ``running``: the running forward pass of a trimmed model in this thread.
_thread = threading.local()


@suggest_arguments
def trim(model: Model, norms: Norms = "all rows", check: bool = True) -> Model:
    """Makes a model compute only the rows that the seeds of a batch need. The training loop stays unchanged.

    On a batch of one of this package's loaders, each message-passing layer computes only the rows that later layers need for the seeds. It computes them as
    products over the edges grouped by target. ``out[:batch_size]`` and all gradients equal those of the plain model up to rounding. ``out`` may have fewer
    rows than the batch has vertices, but always has the rows of the seeds. On any other graph (the whole one, a batch of another loader, edges that a
    transform has changed) the model runs as before.

    Before the first batch of each mode (training, evaluation), a rehearsal finds the rows that each layer needs. Its effects on the model, the batch and the
    random number generators are undone. Dropout draws other numbers than in the plain model, because it draws for fewer rows.

    In its first call, and in calls whose number is a power of four, the model compares outputs and gradients with the plain model's. If they differ beyond
    rounding, it warns with the layer's name and computes all rows up to this layer. In every call it notices operations between layers that were not there
    when the plan was made. It then repeats the call with all rows.

    Call it on the whole model that is given ``batch.x`` and ``batch.edge_index``, before or after the model is moved, copied, loaded or wrapped in
    ``DistributedDataParallel``. Unknown layers, layers that get other edges, and operations over all rows of a batch get all rows. Under
    ``torch.compile`` the model runs untrimmed; compile the parts between the layers instead.

    Args:
        model: a model of PyG's layers, for one type of vertices or several. It must call the same layers in the same order for every batch.
        norms: rows over which normalisations, such as ``BatchNorm`` in training, compute their statistics. 'all rows': all vertices of the batch, as in
            the plain model; the layers before them then compute all rows. 'needed rows': only the rows that the seeds need; this is faster, but
            results differ, and nothing is compared with the plain model.
        check: False makes no comparison with the plain model, and repeats no call.

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
    if getattr(model, TRIMMING, None) is None:
        model.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True)
        model.register_forward_hook(_after_forward, with_kwargs=True, always_call=True)
    setattr(model, TRIMMING, Trimming(norms, check, type(model)))
    vars(model)[_SCRIPTABLE] = functools.partial(_plain_copy, model)
    print_trimmed(model)
    return model


@suggest_arguments
def untrim(model: Model) -> Model:
    """Undoes :func:`trim`: the model computes all rows again. A model that was not trimmed stays as it is.

    Args:
        model: the model that was given to ``trim``, or a copy of it. Models inside it that were trimmed on their own stay trimmed.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: the model is being called.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"untrim needs a torch.nn.Module, got {type(model).__name__}")
    trimmed = trimming_of(model)
    if trimmed is None:
        return model
    undo.is_running()  # ends a call that an interrupt left behind
    if trimmed.caller is not None and trimmed.caller.is_alive():
        raise RuntimeError(f"{type(model).__name__} is being called; call untrim after its forward pass")
    _remove(model)
    return model


def _remove(model: torch.nn.Module) -> None:
    """Removes the hooks and attributes of :func:`trim`."""
    remove_hooks(model, (_before_forward, _after_forward))
    for name in (TRIMMING, _SCRIPTABLE):
        vars(model).pop(name, None)
    print_plain(model)


def _plain_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Returns a model with the same modules and parameters that is not trimmed. ``torch.jit.script`` asks for it, because it compiles a module's hooks."""
    copied = copy.copy(model)
    for name, value in [*vars(copied).items()]:
        if name.startswith("_forward_") and isinstance(value, dict):
            vars(copied)[name] = copy.copy(value)
    _remove(copied)
    return copied


class Trimming:
    """State of a trimmed model. It has a plan for each combination of modes and arguments that the order of the model's layers may depend on."""

    def __init__(self, norms: Norms, check: bool = True, kind: type[torch.nn.Module] = torch.nn.Module) -> None:
        self.norms, self.check, self.kind = norms, check, print_trimmed_of(kind)
        self.plans: dict[Any, Planned] = {}
        self.attributes: Attributes | None = None
        # The thread of a running forward pass, during which layers are replaced.
        self.caller: threading.Thread | None = None

    def __reduce__(self) -> Any:
        return _with_plans, (self.norms, self.check, self.plans, self.kind)


def _with_plans(
    norms: Norms, check: bool, plans: dict[Any, Planned], kind: type[torch.nn.Module] = torch.nn.Module
) -> Trimming:
    trimmed = Trimming(norms, check, kind)
    trimmed.plans.update(plans)
    return trimmed


@dataclass
class _Running:
    run: TrimmedRun
    key: Any
    planned: Planned
    before: Before | None  # None: the call is never repeated
    given: tuple[tuple[Any, ...], dict[str, Any]]
    raised: BaseException | None  # that the caller is handling
    depth: int = 0  # of the calls that the model makes of itself


# --- hooks: module-level functions, so that copies of a model keep them ----------------------------------------


def _before_forward(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _is_followed():
        return
    if undo.is_running():  # a running model may contain this one, or be this one
        running: _Running | None = getattr(_thread, "running", None)
        if running is not None and running.run.model is model:
            running.depth += 1
        return
    trimmed: Trimming = getattr(model, TRIMMING)
    if trimmed.caller is not None and trimmed.caller is not threading.current_thread() and trimmed.caller.is_alive():
        raise RuntimeError(
            f"{type(model).__name__} was called while another thread runs it; a trimmed model takes one call at a time; give each thread its own copy"
        )
    if not _is_first(model) or has_global_hooks() or has_other_modes():  # another hook may have changed the arguments
        return
    demand.hops = True  # trim() may have run in another process, which saved the model
    hops = _hops_of(args, kwargs)
    if hops is None or hops.share is not None:  # a distributed model trims the share of a batch itself
        return
    if all(counts[0] == counts[-1] for counts in hops.num_nodes.values()):  # all vertices are seeds
        return
    if trimmed.attributes is not None and not trimmed.attributes.are_of(model):  # a shallow copy of a trimmed model
        trimmed = Trimming(trimmed.norms, trimmed.check, trimmed.kind)
        setattr(model, TRIMMING, trimmed)
    learns = torch.is_grad_enabled()
    try:
        attributes = trimmed.attributes = trimmed.attributes or Attributes(model)
        has_changed = attributes.is_changed(sum(planned.calls for planned in trimmed.plans.values()))
        parameters = attributes.parameters
        key = _key(attributes, parameters, args, kwargs)
        if key not in trimmed.plans and len(trimmed.plans) >= MAX_PLANS:
            key = _key(attributes, parameters, args, kwargs, has_numbers=False)
        if key not in trimmed.plans and any(map(is_lazy, (*model.parameters(), *model.buffers()))):
            return  # lazy parameters get their shapes in this call
        _make_last(model)
        frame = sys._getframe(1)
        _begin(trimmed, frame)
        planned = trimmed.plans.get(key)
        if planned is None or has_changed or planned.is_due:
            keep_freed_blocks(False)  # the plain model's tables have other sizes
            trial = CheckedCall(model, hops, args, kwargs, lambda plan: TrimmedRun(model, plan, hops, frame))
            planned = _planned(trial, trimmed, key, has_changed, frame)
            keep_freed_blocks(True)  # each step makes about the same tables
        elif planned.calls % _KEEPING_CALLS == 0:
            return_growth()  # batches differ in size, so that more and more kept blocks fit no table
        planned.calls += 1
        may_repeat = planned.plan is not None and planned.functions is not None
        before = Before(model, planned, attributes, parameters, (args, kwargs)) if may_repeat else None
        run = TrimmedRun(model, planned.plan, hops, frame, attributes.replaced)
        began = _Running(run, key, planned, before, (args, kwargs), sys.exc_info()[1])
        Replaced([(vars(_thread), "running", began)]).__enter__()
        run.__enter__()
    except BaseException:
        torch._C._set_grad_enabled(learns)
        trimmed.plans.clear()  # a change of the model was perhaps noticed, but not recorded
        undo.end()
        raise


def _begin(trimmed: Trimming, frame: Any) -> None:
    """Begins a call of a model in this thread. ``frame`` is the Python frame that makes it."""
    undo.begin(frame)
    Replaced([(vars(trimmed), "caller", threading.current_thread())]).__enter__()


def _is_followed() -> bool:
    """Returns True inside ``torch.compile``, ``torch.jit.trace``, ``torch.func`` or forward-mode autograd, where a model must run untrimmed."""
    is_compiled = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return is_compiled or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _planned(trial: CheckedCall, trimmed: Trimming, key: Any, has_changed: bool, frame: Any) -> Planned:
    """Returns the plan of a call. Makes it if there is none or the model has changed, and compares it with the plain model if that is due."""
    model, planned = trial.model, trimmed.plans.get(key)
    row_wise = trimmed.norms == "needed rows"
    checks = trimmed.check and not row_wise
    try:
        if planned is None or (has_changed and planned.plan is not None):
            made, expected, safe = _record(trial, row_wise, frame)
            if row_wise and made.plan != safe:
                warnings.warn(
                    f"{type(model).__name__} reads a number of rows whose use is unknown, and norms='needed rows' allows no comparison with the plain model; "
                    "if the number becomes a value, as in h / len(h), results are wrong; if it is only logged or gives a shape, ignore this warning",
                    RuntimeWarning,
                    stacklevel=2,
                )
            if not checks:
                made.plan, made.functions = made.plan if row_wise else safe, None
            if planned is not None and made.plan == planned.plan and made.functions == planned.functions:
                return planned
            if checks:
                trusted = made.plan if made.plan and is_sharp(expected) else safe
                made.plan = _right_plan(trial, trusted, safe, expected, 0)
            made.calls = 0 if planned is None else planned.calls
            planned = trimmed.plans[key] = made
        elif checks and planned.plan is not None and planned.is_due:
            try:
                planned.plan = _right_plan(trial, planned.plan, planned.plan, None, planned.calls + 1)
            except torch.OutOfMemoryError:
                warnings.warn(
                    f"call {planned.calls + 1} of trimmed {type(model).__name__} was not compared with the plain model, which needs more memory than there is",
                    RuntimeWarning,
                    stacklevel=2,
                )
    except RuntimeWarning:  # the caller makes errors of warnings
        raise
    except Exception as error:  # the model's own call may raise it too; if it does not, the model warns
        trimmed.plans.pop(key, None)
        planned = Planned(None)
        planned.error = f"{type(error).__name__}: {error}"
    return planned


def _record(trial: CheckedCall, row_wise: bool, frame: Any) -> tuple[Planned, Results, TrimPlan]:
    """Records a call. Returns a plan, the plain model's results, and a safe plan.

    If the call uses a number of rows in an unknown way, the safe plan takes all rows. The first plan assumes that the use does no harm.
    """
    model, args, kwargs = trial.model, trial.args, trial.kwargs
    with rehearsal(model, args, kwargs) as effects:
        with without_dropout(model), SameNumbers() as numbers:
            recorded = record(model, trial.hops, row_wise, frame, effects.args, effects.kwargs)
        planned = Planned(recorded.trusting, {recorded.functions}, effects.written, effects.draws)
        return planned, trial.results(effects, recorded.out, numbers.draws), recorded.plan


def _right_plan(
    trial: CheckedCall, plan: TrimPlan, safe: TrimPlan, expected: Results | None, calls: int
) -> TrimPlan | None:
    """Returns ``plan`` if it gives the plain model's results, else ``safe`` if that does.

    If neither does, warns, and returns a plan with more rows that does, or None. With None, the model runs untrimmed.
    """
    expected = expected or trial.call()
    fault = trial.fault_of(plan, expected)
    if fault is not None and safe != plan:
        plan, fault = safe, trial.fault_of(safe, expected)
    if fault is None:
        return plan
    better, layer = trial.corrected(plan, fault)
    rest = "the model now runs untrimmed" if better is None else "this layer and those before it now compute all rows"
    name = type(trial.model).__name__
    when = f"call {calls}" if calls else "its first call"
    warnings.warn(
        f"the results of trimmed {name} differed from those of the plain model in {when} (relative difference {fault.size:.1e}); the cause is in layer "
        f"{layer!r} or in an operation after it; {rest}, so that results are right; earlier calls may have differed too; if the difference is meant, pass "
        "check=False to salientpp.nn.trim",
        RuntimeWarning,
        stacklevel=2,
    )
    return better


def _is_first(model: torch.nn.Module) -> bool:
    """Returns True if :func:`_before_forward` is the model's first hook. Otherwise makes it the first."""
    hooks = cast("OrderedDict[int, Any]", model._forward_pre_hooks)
    if next(iter(hooks.values())) is _before_forward:
        return True
    for number in [number for number, hook in hooks.items() if hook is _before_forward]:
        hooks.move_to_end(number, last=False)
    return False


def _make_last(model: torch.nn.Module) -> None:
    """Makes :func:`_after_forward` the last hook, so that the model's own hooks are part of its forward pass."""
    hooks = cast("OrderedDict[int, Any]", model._forward_hooks)
    if next(reversed(hooks.values())) is not _after_forward:
        for number, hook in list(hooks.items()):
            if hook is _after_forward:
                hooks.move_to_end(number)


def _after_forward(model: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
    running: _Running | None = getattr(_thread, "running", None)
    if running is None or running.run.model is not model:
        return None
    if running.depth:
        running.depth -= 1
        return None
    run, planned = running.run, running.planned
    plans = getattr(model, TRIMMING).plans
    functions, known = tuple(run.functions), planned.functions
    if sys.exc_info()[1] is not running.raised:  # the call has failed
        if known is not None and not any(each[: len(functions)] == functions for each in known):
            plans.pop(running.key, None)
        undo.end()
        return None
    is_known = planned.plan is None or known is None or functions in known
    undo.end()
    if planned.plan is None and running.key not in plans:
        plans[running.key] = planned
        warnings.warn(
            f"{type(model).__name__} could not be recorded and compared with the plain model ({planned.error}); it runs untrimmed; results are right",
            RuntimeWarning,
            stacklevel=2,
        )
    return None if is_known else _again(model, running, functions)


def _again(model: torch.nn.Module, running: _Running, functions: tuple[str, ...]) -> Any:
    """Repeats a call with all rows, because it ran operations that its plan does not know. Returns the output.

    It also extends the plan, so that later calls may run these operations.
    """
    trimmed, planned, hops = getattr(model, TRIMMING), running.planned, running.run.hops
    name, other = type(model).__name__, first_of(functions, min(planned.functions or [()], key=len))
    trimmed.plans.pop(running.key, None)
    if running.before is None or not running.before.restore():
        raise RuntimeError(
            f"{name} called other operations than before ({other}), and wrote to its arguments or parameters, so that the call cannot be "
            "repeated with all rows; do not use salientpp.nn.trim on this model, or do not write to them"
        )
    args, kwargs = running.given
    frame = sys._getframe(1)
    try:
        _begin(trimmed, frame)
        recorded = record(model, hops, trimmed.norms == "needed rows", frame, args, kwargs)
    finally:
        undo.end()
    planned.join(recorded.plan, recorded.functions)
    if planned.plan is None:
        warnings.warn(
            f"{name} calls other operations between its layers from batch to batch ({other}); it now runs untrimmed; results are right",
            RuntimeWarning,
            stacklevel=2,
        )
    trimmed.plans[running.key] = planned
    return recorded.out


def trimming_of(model: torch.nn.Module) -> Trimming | None:
    """Returns the state that :func:`trim` has given a model, or None."""
    return getattr(model, TRIMMING, None)


def keys_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
    """Returns the facts on which the plan of a call depends, if several ranks make the call together, each with its own rows.

    Returns:
        A key that is equal on all ranks, and the numbers among this rank's arguments as text. The text is empty on all ranks or on none. A tensor with
        dimensions is no number, even if it has one element, because it may have more on other ranks.
    """
    given = [*args, *kwargs.values()]
    numbers = [_choice(each) for each in given if _may_hold_numbers(each)]
    attributes = Attributes(model)
    key = _key(attributes, attributes.parameters, args, kwargs, has_numbers=False)
    return key, repr(numbers) if numbers else ""


def _may_hold_numbers(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, (list, tuple, dict)) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _key(
    attributes: Attributes, parameters: list[torch.nn.Parameter], args: Any, kwargs: Any, has_numbers: bool = True
) -> Any:
    """Returns the key of a call's plan, with the values of its number arguments, or without them."""
    learns = torch.is_grad_enabled() and tuple([value.requires_grad for value in parameters])
    # A layer that was changed gets all rows.
    unchanged = tuple([change_of(layer) is None and change_inside(layer) is None for layer in attributes.layers])
    modes = attributes.modes, unchanged, learns, torch.is_inference_mode_enabled()
    given = [(None, each) for each in args] + list(kwargs.items())
    return (*modes, *[(name, _choice(each, has_numbers)) for name, each in given])


def _choice(value: Any, has_numbers: bool = True) -> Any:
    """Returns those facts about an argument that a model's control flow may depend on. Calls with equal facts share a plan.

    A bool, str or None gives itself, and so does a number with ``has_numbers``. A tensor gives facts, a container the
    results of its items, and any other value its type.
    """
    if isinstance(value, Tensor):
        is_number = has_numbers and value.numel() == 1 and value.device.type == "cpu"
        return type(value), value.requires_grad, value.dtype, value.item() if is_number else value.dim()
    if has_numbers and isinstance(value, (list, tuple, dict)):
        items = itertools.islice(value.items() if isinstance(value, dict) else enumerate(value), MAX_PLANS)
        return (type(value), *[(name, _choice_inside(each)) for name, each in items])
    is_known = isinstance(value, (bool, str, type(None), enum.Enum, np.bool_)) or (has_numbers and _is_number(value))
    return (type(value), value) if is_known else type(value)


def _choice_inside(value: Any) -> Any:
    """Returns :func:`_choice` of an item in a container. Leaves out a tensor's value, and large numbers, as they may be sizes."""
    is_large = isinstance(value, Tensor) or (_is_number(value) and not abs(value) < _MAX_CHOICE)
    return _choice(value, has_numbers=not is_large)


def _hops_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hops | None:
    """Returns the hops of the batch whose edges a model was given; None without such edges, or with edges of two batches."""
    batches = [dict(store.items()) for value in args if hasattr(value, "stores") for store in value.stores]
    found = {id(edges.hops): edges.hops for edges in edges_in([args, kwargs, batches])}
    return next(iter(found.values())) if len(found) == 1 else None
