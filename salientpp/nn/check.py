"""Compares a trimmed model with the plain one on a batch, and finds the layer whose rows were wrongly left out.

Both models get the same random numbers, and all effects of the calls are undone. A difference counts if it exceeds rounding errors by far. In doubt, the
check measures how sensitive the model is to rounding errors.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from salientpp.nn.layers import Replaced
from salientpp.nn.rehearsal import Rehearsal, rehearsal
from salientpp.nn.trace import ALL, Call, TrimPlan
from salientpp.nn.undo import NotedDispatch
from salientpp.sampling.hops import Hops

_DROPOUTS = (
    torch.nn.Dropout,
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
)

#: Precision of matrix products of float32, if torch may compute them with fewer bits.
_PRECISIONS = {"tf32": 2.0**-10, "bf16": 2.0**-7}

#: Differences of this many times the precision of a dtype are examined further.
_DOUBTFUL = 1000
#: Differences of gradients below this many times the precision of the largest gradient are rounding errors.
_ROUNDING = 100
#: A difference is a fault if it exceeds, by this factor, the effect of rounding-sized changes of parameters and inputs.
_FAULTY = 30
#: Number of such changes to try before a difference is called a fault. At a kink, as ReLU has, some changes have a large effect and others none.
_PATTERNS = 6


@dataclass
class Results:
    """Outputs and gradients of one call at the seeds of a batch.

    Attributes:
        values: the outputs' rows of seeds.
        gradients: gradients of a fixed weighted sum of ``values`` with respect to parameters and inputs. Empty if none were computed.
        draws: number of operations that drew random numbers.
    """

    values: list[Tensor]
    gradients: list[Tensor | None] = field(default_factory=list)
    draws: int = 0


@dataclass
class CheckedCall:
    """Calls a model on one batch as often as a check needs, and undoes the effects of each call.

    Attributes:
        run: function that returns the context in which a call of the model follows a plan.
    """

    model: torch.nn.Module
    hops: Hops
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Callable[[TrimPlan], AbstractContextManager[Any]]

    def call(
        self,
        context: AbstractContextManager[Any] | None = None,
        evaluates: bool = False,
        change: float = 0.0,
        pattern: int = 1,
    ) -> Results:
        """Calls the model and returns its results. ``context`` may trim it; by default it runs as the plain model.

        Args:
            evaluates: True calls it in evaluation mode.
            change: relative change of all parameters and inputs, to measure how sensitive the results are; 0: none.
            pattern: number >= 1; each number spreads the change over the elements in another way.
        """
        with rehearsal(self.model, self.args, self.kwargs) as effects:
            if evaluates:
                self.model.eval()
            if change:
                self._change(effects, change, pattern)
            with without_dropout(self.model), SameNumbers() as numbers, context or contextlib.nullcontext():
                out = self.model(*effects.args, **effects.kwargs)
            return self.results(effects, out, numbers.draws)

    def results(self, effects: Rehearsal, out: Any, draws: int) -> Results:
        """Returns outputs and gradients of a call that returned ``out`` in a rehearsal."""
        values = [_real(value) for value in _values_of(out, self.hops)]
        loss: Any = 0
        for value in values:
            if value.requires_grad and value.is_floating_point():
                weights = torch.arange(value.numel(), device=value.device, dtype=torch.float64).cos()
                loss = loss + (value.to(torch.float64).reshape(-1) * weights).sum()
        gradients: list[Tensor | None] = []
        if isinstance(loss, Tensor):
            leaves = [each for each in (*self.model.parameters(), *effects.leaves) if each.requires_grad]
            with contextlib.suppress(RuntimeError):  # for example a checkpoint, which supports ``backward`` only
                gradients = list(torch.autograd.grad(loss, leaves, allow_unused=True))
        gradients = [None if each is None else _real(each.detach()) for each in gradients]
        return Results([value.detach() for value in values], gradients, draws)

    @torch.no_grad()
    def _change(self, effects: Rehearsal, change: float, pattern: int) -> None:
        for each in {id(each): each for each in (*self.model.parameters(), *effects.inputs)}.values():
            values = each.detach().data  # writes through it are not counted as changes, and are undone
            places = torch.arange(each.numel(), device=each.device, dtype=torch.float64)
            values.mul_((1 + change * (pattern * places).cos()).view(each.shape).to(each.dtype))

    # --- comparisons ------------------------------------------------------------------------------------------

    def fault_of(self, plan: TrimPlan, expected: Results | None = None) -> Fault | None:
        """Compares a call that follows ``plan`` with the plain call. Returns the difference; None if it is rounding. Errors of calls are raised."""
        expected = expected or self.call()
        found = self._fault(plan, expected, evaluates=False)
        if found is None or not expected.draws:
            return found
        # The numbers of rows may decide which random numbers are drawn.
        return self._fault(plan, self.call(evaluates=True), evaluates=True)

    def _fault(self, plan: TrimPlan, expected: Results, evaluates: bool) -> Fault | None:
        got = self.call(self.run(plan), evaluates)
        differences = differences_of(expected, got)
        if not any(each > _DOUBTFUL for each in differences):
            return None
        eps = _largest_eps(expected)
        noise = [0.0] * len(differences)
        for pattern in range(1, _PATTERNS + 1):
            changed = self.call(evaluates=evaluates, change=4 * eps, pattern=pattern)
            noise = list(map(max, noise, differences_of(expected, changed)))
            faults = [each for each, own in zip(differences, noise) if each > _DOUBTFUL + _FAULTY * own]
            if not faults:
                return None
        return Fault(max(faults) * eps, evaluates, expected)

    def corrected(self, plan: TrimPlan, fault: Fault) -> tuple[TrimPlan | None, str]:
        """Finds a plan that removes ``fault``: its first layers get all rows, as few of them as possible.

        Returns the plan, and the path of the last layer that gets all rows. The plan is None if no such plan removes the fault.
        """
        for number, call in enumerate(plan, 1):
            if call.is_whole and number < len(plan):
                continue
            better = whole_until(plan, number)
            if self._fault(better, fault.expected, fault.evaluates) is None:
                return better, call.layer
        return None, plan[-1].layer if plan else ""


@dataclass(frozen=True)
class Fault:
    """Difference between the results of a trimmed call and of a plain one.

    Attributes:
        size: largest relative difference of an output or a gradient.
        evaluates: True if both calls were in evaluation mode.
        expected: results of the plain call.
    """

    size: float
    evaluates: bool
    expected: Results


def whole_until(plan: TrimPlan, number: int) -> TrimPlan:
    """Returns a plan whose first ``number`` layers get all rows."""
    return [Call(call.layer, ALL, ALL, True) if k < number else call for k, call in enumerate(plan)]


def differences_of(expected: Results, got: Results) -> list[float]:
    """Returns the relative difference of each output and each gradient, as a multiple of its dtype's precision."""
    if [value.shape for value in expected.values] != [value.shape for value in got.values]:
        return [float("inf")]
    found = [_difference(a, b, 0.0) for a, b in zip(expected.values, got.values)]
    if len(expected.gradients) == len(got.gradients):
        floor = max((_norm(each) for each in expected.gradients if each is not None), default=0.0)
        found += [_difference(a, b, floor) for a, b in zip(expected.gradients, got.gradients)]
    return found


def _difference(a: Tensor | None, b: Tensor | None, floor: float) -> float:
    if a is None or b is None:
        other = b if a is None else a
        return 0.0 if other is None or not _norm(other) else float("inf")
    if a.layout != torch.strided:
        return 0.0
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    is_finite = a.isfinite()
    if not torch.equal(is_finite, b.isfinite()):
        return float("inf")
    difference = _norm(a.to(torch.float64) - b.to(torch.float64))
    return 0.0 if difference <= _ROUNDING * _eps(a) * floor else difference / max(_norm(a), 1e-300) / _eps(a)


def _norm(value: Tensor) -> float:
    """Returns the norm of the finite elements. They are divided by the largest one first, so that no square is too large or too small."""
    if value.layout != torch.strided or not value.numel():
        return 0.0
    value = value.detach().to(torch.float64)
    value = torch.where(value.isfinite(), value, 0)
    largest = float(value.abs().max())
    return largest * float(torch.linalg.vector_norm(value / largest)) if largest else 0.0


def _real(value: Tensor) -> Tensor:
    """Returns a complex tensor as pairs of real numbers, which can be compared; others as they are."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def is_sharp(results: Results) -> bool:
    """Returns True if a comparison with these results notices differences of a few per cent. In 16 bits it does not."""
    return _DOUBTFUL * _largest_eps(results) < 0.01


def _largest_eps(results: Results) -> float:
    return max((_eps(value) for value in results.values), default=0.0)


def _eps(value: Tensor) -> float:
    """Returns the machine epsilon of the dtype in which a value was computed."""
    kinds = [torch.finfo(value.dtype).eps] if value.is_floating_point() else []
    if torch.is_autocast_enabled(value.device.type):
        kinds.append(torch.finfo(torch.get_autocast_dtype(value.device.type)).eps)
    if value.dtype == torch.float32:
        backend = torch.backends.mkldnn if value.device.type == "cpu" else torch.backends.cuda
        kinds.append(_PRECISIONS.get(backend.matmul.fp32_precision, 0.0))
    return max(kinds, default=0.0)


# --- outputs ------------------------------------------------------------------------------------------------------


def _values_of(out: Any, hops: Hops) -> Iterator[Tensor]:
    """Yields the seeds' rows of each tensor in an output, also inside containers and attributes of objects."""
    with_seeds = [type_ for type_, counts in hops.num_nodes.items() if counts[0]]
    return _rows_of_seeds(out, with_seeds[0] if with_seeds else None, hops, {})


def _rows_of_seeds(value: Any, type_: Any, hops: Hops, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Yields rows of seeds in a value. ``seen``: ids of visited objects, since objects may form cycles."""
    if isinstance(value, Tensor):
        counts = hops.num_nodes.get(type_, [0])
        others = {count for each, counts in hops.num_nodes.items() if each != type_ for count in counts}
        if value.dim() == 0:
            yield value
        elif value.layout == torch.strided and counts[0] and (value.size(0) in counts or value.size(0) not in others):
            ends = [counts[0] if k == 0 or size in counts else size for k, size in enumerate(value.shape)]
            yield value[tuple([slice(end) for end in ends])]
        return
    if id(value) in seen or isinstance(value, (type, types.ModuleType, torch.nn.Module)):
        return
    seen[id(value)] = value
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _rows_of_seeds(each, key if key in hops.num_nodes else type_, hops, seen)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _rows_of_seeds(each, type_, hops, seen)
    elif hasattr(value, "__dict__"):
        yield from _rows_of_seeds(vars(value), type_, hops, seen)
    elif is_dataclass(value):  # with slots
        yield from _rows_of_seeds([getattr(value, each.name, None) for each in fields(value)], type_, hops, seen)


# --- random numbers -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Switches dropout inside message-passing layers off, for comparisons: a trimmed layer would drop other edges, as it orders them differently."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for conv in model.modules():
        if isinstance(conv, MessagePassing):
            for part in conv.modules():
                own = vars(part)
                name = "p" if isinstance(part, _DROPOUTS) else "dropout"
                if isinstance(own.get(name), float):
                    found.append((own, name, 0.0))
    with Replaced(found):
        yield


class SameNumbers(NotedDispatch):
    """Makes a trimmed and a plain model draw equal random numbers for the rows that both have.

    It seeds the generator before each random operation. The trimmed model has the first rows of the plain one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0
        # States of generators of the user's, which need not belong to the model.
        self._states: dict[torch.Generator, Tensor] = {}

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for generator, state in self._states.items():
            generator.set_state(state)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.draws += 1
        generator = kwargs.get("generator")
        if generator is not None and generator not in self._states:
            self._states[generator] = generator.get_state()
        torch.default_generator.manual_seed(self.draws)
        out = func(*args, **kwargs)
        if func._schema.name in _NORMAL and isinstance(out, Tensor):
            # The generator makes the last 16 numbers in another way than the others.
            torch.default_generator.manual_seed(self.draws)
            more = torch.randn(out.numel() + 64 - out.numel() % 16, dtype=out.dtype, device=out.device)[: out.numel()]
            given = list(args[1:3]) if func._schema.name == "aten::normal_" else []
            mean, std = given + [0.0, 1.0][len(given) :]
            out.copy_(more.view(out.shape) * kwargs.get("std", std) + kwargs.get("mean", mean))
        return out


#: Operations that draw from a normal distribution.
_NORMAL = frozenset(["aten::randn", "aten::randn_like", "aten::normal_"])


def first_of(sequence: Sequence[str], other: Sequence[str]) -> str:
    """Compares two sequences of function names, for a warning. Returns the first name that differs, "" if none does."""
    return next((a or b for a, b in itertools.zip_longest(sequence, other) if a != b), "")
