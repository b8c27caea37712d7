"""Random models, each a function of one integer: source text, a step of training, shrinking, and a script that shows a failure by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from random_cases.choices import HELPERS, Choice
from torch_geometric.nn import MessagePassing

from salientpp.testing import steps
from salientpp.testing.comparison import Refused
from salientpp.testing.steps import copy_values, difference, graph, is_in_words

IMPORTS = """\
import itertools, math, types

import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric
import torch_geometric.nn as pyg
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import degree, scatter, softmax, to_dense_adj

import salientpp

torch_geometric.backend.use_segment_matmul = False
"""

LOADERS = (
    "[3, 2], batch_size=8", "[3, 2], batch_size=8", "[2, 2, 2], batch_size=6", "[3], batch_size=8", "[-1, -1], batch_size=4", "[3, 2], batch_size=2",
    "[3, 3], batch_size=6, replace=True", "[3, 2], batch_size=5, disjoint=True", "[1, 1, 1, 1], batch_size=10", "[3, 2], batch_size=1",
)  # fmt: skip
MODES = (
    ("train", "train", "train"), ("train", "train", "train"), ("train", "eval", "train"), ("eval", "train", "train"), ("eval", "eval", "eval"),
    ("no_grad", "train", "train"), ("train", "no_grad", "train"), ("inference", "train", "train"),
)  # fmt: skip
#: Outputs of one tensor.
ONE_OUTPUT = (
    "h",
    "h",
    "h",
    "h",
    "h.log_softmax(1)",
    "self.head(h)",
    "self.one(h)",
    "self.one(h).squeeze(1)",
)
OUTPUTS = (
    *ONE_OUTPUT,
    "h[:1]",
    "h, h.mean(0)",
    "h, hs[-1]",
    "{'h': h, 'kept': hs[-1]}",
    "[h, h.sum()]",
    "h[: len(h) // 2 + 8]",
)
PENALTIES = ("none", "none", "none", "none", "gradient", "hessian")


#: Attributes of a batch that every model is called with.
NAMES = ("x", "edge_index", "edge_weight", "edge_attr", "edge_type", "node_type", "pos", "normal")


def run_step(
    model: Any, begin: Callable[[Any, int], None], batch: Any, step: int, mode: str, given: str, penalty: str
) -> dict[str, torch.Tensor]:
    """Runs a step of a model of a case; see :func:`salientpp.testing.steps.run_step`."""
    return steps.run_step(
        model, batch, NAMES, step, mode, given, penalty, begin=lambda: begin(model, step), more=(step,)
    )


# --- cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Random model, and the steps in which it is called.

    Attributes:
        target: conversion that is compared with the plain model.
        options: options of the conversion, by name.
        precision: "double", "single", or "autocast" for single precision under autocast to bfloat16.
        threads: number of equal models that are called at once, each in its own thread.
    """

    seed: int
    choices: tuple[Choice, ...]
    loader: str = LOADERS[0]
    modes: tuple[str, ...] = MODES[0]
    given: str = "leaf"
    penalty: str = "none"
    output: str = "h"
    target: str = "trim"
    options: tuple[tuple[str, Any], ...] = ()
    precision: str = "double"
    threads: int = 1

    @property
    def kinds(self) -> tuple[str, ...]:
        rest = [
            *([] if self.output == "h" else [f"returns {self.output}"]),
            *([] if self.penalty == "none" else [self.penalty]),
            *([] if set(self.modes) == {"train"} else ["/".join(self.modes)]),
            *([] if self.precision == "double" else [self.precision]),
            *([] if self.threads == 1 else [f"{self.threads} threads"]),
            *(f"{name}={value}" for name, value in self.options if value not in (None, False)),
        ]
        return tuple([each.kind for each in self.choices] + rest)


def source_of(case: Case) -> str:
    """Returns the source of the case's model: ``make()`` makes it, ``begin(model, step)`` runs before each call."""
    text = [each.top for each in case.choices if each.top]
    helpers = _used(HELPERS, "\n".join(each.change + each.before for each in case.choices))
    lines = [*dict.fromkeys(textwrap.dedent(each).strip() for each in [*helpers, *text])]
    init = [each.init for each in case.choices if each.init]
    if "self.head" in case.output:
        init.append("self.head = nn.Linear(6, 4)")
    if "self.one" in case.output:
        init.append("self.one = nn.Linear(6, 1)")
    forward = ["h, hs = x, [x]", *(each.forward for each in case.choices if each.forward), f"return {case.output}"]
    model = [
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        textwrap.indent("\n".join(init), " " * 8),
        "",
        "    def forward(self, x, edge_index, edge_weight, edge_attr, edge_type, node_type, pos, normal, step):",
        textwrap.indent("\n".join(forward), " " * 8),
    ]
    make = ["model = Model().double()", *(each.change for each in case.choices if each.change), "return model.double()"]
    begin = [each.before for each in case.choices if each.before] or ["pass"]
    functions = [
        "handles = []\n\n\ndef make():\n    torch.manual_seed(0)\n" + textwrap.indent("\n".join(make), " " * 4),
        "def begin(model, step):\n" + textwrap.indent("\n".join(begin), " " * 4),
    ]
    source = "\n\n\n".join([*lines, "\n".join(model), *functions]) + "\n"
    return source if case.precision == "double" else source.replace(".double()", ".float()")


def _used(helpers: str, text: str) -> Iterator[str]:
    """Yields the functions and classes of ``helpers`` that a text uses, with those that they use."""
    parts = re.split(r"\n\n(?=\S)", textwrap.dedent(helpers).strip())
    used: set[str] = set()
    grown = True
    while grown:
        grown = False
        for part in parts:
            name = re.match(r"(?:class|def) (\w+)", part)
            assert name is not None
            if part not in used and re.search(rf"\b{name[1]}\b", text + "".join(used)):
                used.add(part)
                grown = True
    yield from (part for part in parts if part in used)


def namespace_of(case: Case) -> dict[str, Any]:
    space = vars(_MODULE)
    space.clear()
    space.update(_IMPORTED)
    exec(compile(source_of(case), f"<model {case.seed}>", "exec"), space)
    return space


#: Module of the models' classes. PyG looks up the module of a layer's class.
_MODULE = sys.modules.setdefault("random_model", types.ModuleType("random_model"))
_IMPORTED = {**vars(_MODULE)}
exec(IMPORTS, _IMPORTED)
_GRAPH = None


def graph_of_cases() -> Any:
    """Returns the graph of all cases."""
    global _GRAPH
    _GRAPH = graph() if _GRAPH is None else _GRAPH
    return _GRAPH


def batches_of(case: Case) -> list[Any]:
    data = graph_of_cases() if case.precision == "double" else graph_of_cases().clone().apply(_to_single)
    return eval(_loader_text(case), {**_IMPORTED, "data": data})


def _to_single(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value


def _loader_text(case: Case) -> str:
    return f"list(salientpp.NeighborLoader(data, {case.loader}, input_nodes=torch.arange(120).roll({case.seed % 7}), seed={case.seed}))[:{len(case.modes)}]"


class Invalid(Exception):
    """The plain model raises."""


@dataclass(frozen=True)
class Failure:
    """Fault of a case: the step, the tensor or the error, and by how much."""

    step: int
    what: str
    off: Any

    def __str__(self) -> str:
        return f"call {self.step}: {self.what}: {self.off}"


#: None: the converted model is right.
Outcome = Failure | Refused | None


def made_of(case: Case, others: int = 1) -> tuple[Any, ...]:
    """Returns the names of a case's source, its plain model, and equal ones to convert. Raises Invalid."""
    space = namespace_of(case)
    try:
        plain, *copies = [space["make"]() for _ in range(1 + others)]
    except Exception as error:
        raise Invalid(f"{type(error).__name__}: {error}") from error
    if not any(isinstance(module, MessagePassing) for module in plain.modules()):
        raise Invalid("the model has no layers")
    if any(type(module).__name__ == "RGATConv" for module in plain.modules()):  # leaves parameters without values
        torch.manual_seed(1)
        for value in plain.parameters():
            value.data.normal_()
    for other in copies:
        copy_values(plain, other)
    return space, plain, *copies


def answer_of(case: Case, step: int, error: Exception) -> Outcome:
    """Returns what an error of a converted model means: it refuses the case with an error that a choice allows, or it fails."""
    if any(each.refuses and re.search(each.refuses, str(error)) for each in case.choices):
        return Refused(str(error))
    return Failure(step, type(error).__name__, str(error)[:300])


def compared(
    case: Case,
    convert: Callable[[Any], Any],
    given: Callable[[Any, Any, int], Any] = lambda batch, data, step: batch,
    skips: str = "nothing",
    arguments: tuple[str, ...] | None = None,
) -> Outcome:
    """Compares a converted model with the plain one over the batches of a case.

    Args:
        given: returns what the converted model gets instead of a batch, from the batch, the data and the number of the step.
        skips: first word of the results that are not compared.
        arguments: names of arguments that a refusal may name. None: only models whose choices name the words may be refused.
    """
    with cleared():
        space, plain, other = made_of(case)

        def answer(step: int, error: Exception) -> Outcome:
            if arguments is not None and is_in_words(error, plain, arguments):
                return Refused(str(error))
            return answer_of(case, step, error)

        try:
            converted = convert(other)
        except Exception as error:
            return answer(-1, error)
        for step, (batch, mode) in enumerate(zip(batches_of(case), case.modes)):
            rest = step, mode, case.given, case.penalty
            try:
                expected = run_step(plain, space["begin"], batch, *rest)
            except Exception as error:
                raise Invalid(f"{type(error).__name__}: {error}") from error
            try:
                got = run_step(converted, space["begin"], given(batch, graph_of_cases(), step), *rest)
            except Exception as error:
                return answer(step, error)
            found = difference(
                *(
                    {name: value for name, value in each.items() if not name.startswith(skips)}
                    for each in (expected, got)
                )
            )
            if found is not None:
                return Failure(step, *found)
    return None


@contextlib.contextmanager
def cleared() -> Iterator[None]:
    """Context after which no hooks for all modules are left."""
    try:
        yield
    finally:
        for handle in vars(_MODULE).get("handles", ()):
            handle.remove()


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Drops choices of a failing case, and simplifies the rest, while it still fails."""
    while True:
        for other in _simpler(case):
            if fails(other):
                case = other
                break
        else:
            return case


def _simpler(case: Case) -> Iterator[Case]:
    for dropped in case.choices:
        gone = {dropped.number}
        while more := {each.number for each in case.choices if each.needs in gone} - gone:
            gone |= more
        left = tuple(each for each in case.choices if each.number not in gone)
        if left:
            yield dataclasses.replace(case, choices=left)
    for k in range(len(case.options)):
        yield dataclasses.replace(case, options=case.options[:k] + case.options[k + 1 :])
    plainest = Case(case.seed, case.choices)
    for name in ("precision", "threads", "modes", "penalty", "output", "loader", "given"):
        now, simple = getattr(case, name), getattr(plainest, name)
        is_as_simple = set(now) == set(simple) if name == "modes" else now == simple
        if not is_as_simple and not (name == "given" and any(each.mode == "written" for each in case.choices)):
            yield dataclasses.replace(case, **{name: simple})
    for k, each in enumerate(case.choices):  # options of constructors
        for option in re.findall(r", \w+=(?:'[^']*'|\[[^\]]*\]|[\w.]+)(?=[,)])", each.init):
            changed = dataclasses.replace(each, init=each.init.replace(option, "", 1))
            yield dataclasses.replace(case, choices=(*case.choices[:k], changed, *case.choices[k + 1 :]))
    if len(case.modes) > 1:
        yield dataclasses.replace(case, modes=case.modes[:-1])


def script_of(case: Case) -> str:
    """Returns a script that shows the case without this file. Cases of other conversions than ``trim`` need the folder of the tests."""
    if case.target != "trim" or case.precision != "double" or case.threads > 1:
        return f'''"""Random model {case.seed}: {", ".join(case.kinds)}. Run it in the folder tests, with PYTHONPATH=..:.:support."""

from random_cases.choices import Choice
from random_cases.models import Case, source_of
from random_cases.targets import TARGETS

case = {case!r}

if __name__ == "__main__":
    print(source_of(case), TARGETS[case.target].outcome_of(case))
'''
    return f'''"""Random model {case.seed}: {", ".join(case.kinds)}."""

{IMPORTS}
from salientpp.testing.steps import copy_values, difference, graph, run_step

{source_of(case)}

plain = make()
model = make()
copy_values(plain, model)
salientpp.nn.trim(model, **{dict(case.options)!r})
data = graph()
batches = {_loader_text(case)}
for step, (batch, mode) in enumerate(zip(batches, {case.modes!r})):
    expected, got = (
        run_step(each, batch, {NAMES!r}, step, mode, {case.given!r}, {case.penalty!r}, begin=lambda: begin(each, step), more=(step,))
        for each in (plain, model)
    )
    print(mode, difference(expected, got))
'''
