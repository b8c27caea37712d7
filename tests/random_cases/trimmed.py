"""Law of random trimmed models: they give the outputs, all gradients and all effects of the plain model, in each precision and in two threads at once.

Results are equal up to rounding. In doubt, they differ no more than those of plain models whose numbers are off by a rounding error.
"""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from random_cases.choices import choices
from random_cases.models import (
    LOADERS,
    MODES,
    ONE_OUTPUT,
    OUTPUTS,
    PENALTIES,
    Case,
    Failure,
    Invalid,
    Outcome,
    Refused,
    answer_of,
    batches_of,
    cleared,
    compared,
    difference,
    made_of,
    run_step,
)

import salientpp

#: Precision -> relative error of a number, and difference that results may have.
_ERRORS = {"double": (2.0**-52, 1e-9), "single": (2.0**-23, 1e-6), "autocast": (2.0**-8, 0.03)}
#: Results may also differ by this many times the effect of errors in inputs and parameters.
_FACTOR = 8
#: Smallest relative difference in double precision that no rounding explains.
_LARGE = 1e-5


def case_of(seed: int) -> Case:
    """Returns the random case of an integer."""
    r = random.Random(seed)
    chosen = choices(r)
    needs = {each.mode for each in chosen}
    modes = ("eval",) * 3 if "evaluation" in needs else r.choice(MODES)
    given = (
        r.choice(("computed", "constant")) if "written" in needs else r.choice(("leaf", "leaf", "computed", "constant"))
    )
    penalty = "none" if "first order" in needs else r.choice(PENALTIES)
    return Case(
        seed,
        chosen,
        r.choice(LOADERS),
        modes,
        given,
        penalty,
        r.choice(ONE_OUTPUT if "one output" in needs else OUTPUTS),
        # Otherwise the check at run time would correct what the rules get wrong.
        options=(("check", False),) if r.random() < 0.7 else (),
        precision=r.choice(("double",) * 8 + ("single", "autocast")),
        # Later changes may draw initial values from the generator, which all threads share.
        threads=1 if any(each.before for each in chosen) else r.choice((1,) * 8 + (2,)),
    )


def outcome_of(case: Case) -> Failure | None:
    """Runs a case."""
    if case.precision != "double":
        found = _rounded_outcome(case)
    elif case.threads > 1:
        found = _threaded_outcome(case)
    else:
        found = compared(case, lambda model: _trim(case, model))
        if isinstance(found, Failure) and isinstance(found.off, float) and found.off < _LARGE:
            found = _rounded_outcome(case)  # the model may amplify rounding errors, as second derivatives do
    return None if isinstance(found, Refused) else found


def _trim(case: Case, model: Any) -> Any:
    return salientpp.nn.trim(model, **dict(case.options))


# --- threads -------------------------------------------------------------------------------------------------------


def _threaded_outcome(case: Case) -> Outcome:
    """Runs the steps on equal models at once, one in each thread."""

    def steps(model: Any) -> list[dict[str, torch.Tensor]] | Outcome:
        found = []
        for step, (batch, mode) in enumerate(zip(batches, case.modes)):
            try:
                found.append(run_step(model, space["begin"], batch, step, mode, case.given, case.penalty))
            except Exception as error:
                return answer_of(case, step, error)
        return found

    with cleared():
        space, plain, *models = made_of(case, case.threads)
        batches = batches_of(case)
        expected = steps(plain)
        if not isinstance(expected, list):
            raise Invalid(str(expected))
        converted = [_trim(case, model) for model in models]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(case.threads) as pool:
                results = list(pool.map(steps, converted))
        finally:
            sys.setswitchinterval(interval)
    for found in results:
        if not isinstance(found, list):
            return found
        for step, (want, got) in enumerate(zip(expected, found)):
            if (differs := difference(want, got)) is not None:
                return Failure(step, *differs)
    return None


# --- rounding -----------------------------------------------------------------------------------------------------


class _Autocast(torch.nn.Module):
    """Calls a model under autocast."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*args)


def _rounded_outcome(case: Case) -> Outcome:
    """Runs a plain model, the trimmed one, and plain models whose parameters and inputs have errors."""
    eps, allowed = _ERRORS[case.precision]
    with cleared():
        space, plain, other, *noisy = made_of(case, 3)
        for pattern, model in enumerate(noisy, 1):
            for value in model.parameters():
                value.data.copy_(_with_errors(value.data, eps, pattern))
        models = [plain, _trim(case, other), *noisy]
        for step, (batch, mode) in enumerate(zip(batches_of(case), case.modes)):
            found: list[dict[str, torch.Tensor]] = []
            for number, model in enumerate(models):
                given = batch.clone() if number < 2 else _batch_with_errors(batch, eps, number - 1)
                called = _Autocast(model) if case.precision == "autocast" else model
                rest = step, mode, case.given, case.penalty
                try:
                    found.append(run_step(called, lambda _, step: space["begin"](model, step), given, *rest))
                except Exception as error:
                    if number == 1:
                        return answer_of(case, step, error)
                    raise Invalid(f"{type(error).__name__}: {error}") from error
            expected, got = found[:2]
            if any(not value.isfinite().all() for value in expected.values()):
                return None
            noise = [_differences(expected, each) for each in found[2:]]
            for name, off in _differences(expected, got).items():
                bound = allowed + _FACTOR * max(each[name] for each in noise)
                if not off <= bound:
                    return Failure(step, name, f"{off}, more than {bound}")
            for name, value in expected.items():
                if name.startswith("output") and got[name].dtype != value.dtype:
                    return Failure(step, name, f"{value.dtype} and {got[name].dtype}")
    return None


def _with_errors(value: torch.Tensor, eps: float, pattern: int) -> torch.Tensor:
    places = torch.arange(value.numel(), dtype=torch.float64).view(value.shape)
    return (value * (1 + eps * (pattern * places).cos())).to(value.dtype)


def _batch_with_errors(batch: Any, eps: float, pattern: int) -> Any:
    made = batch.clone()
    for name in ("x", "edge_weight", "edge_attr", "pos", "normal"):
        made[name] = _with_errors(batch[name], eps, pattern)
    return made


def _differences(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the norm of each tensor's difference relative to the tensor. For gradients, the norm of the largest one counts too, because a small
    one may be a sum of large terms."""
    largest = max((float(value.norm()) for name, value in expected.items() if name.startswith("gradient")), default=0.0)
    found = {}
    for name in [*expected, *(got.keys() - expected.keys())]:
        one, other = (of.get(name, torch.zeros(())).double() for of in (expected, got))
        if name in expected and name in got and one.shape != other.shape:
            found[name] = float("inf")
            continue
        scale = largest if name.startswith("gradient") else float(one.norm())
        off = float((one - other).norm())
        found[name] = off / scale if scale else (float("inf") if off else 0.0)
    return found
