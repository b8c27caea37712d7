"""Law of random models under layer-wise inference: the rows of all vertices equal those of the plain model on the whole graph in evaluation mode, or an error says why.

A model is one of PyG's basic models, or a list of steps: modules, and functions of rows, or of rows and edges.
"""

# ruff: noqa: E501 (tables)

from __future__ import annotations

import dataclasses
import functools
import random
import re
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import torch
from random_cases.choices import CONVS, Choice, model_of
from random_cases.drawn import BY_ROW, Taste, drawn, one_of
from random_cases.models import (
    Case,
    Failure,
    Invalid,
    Outcome,
    Refused,
    cleared,
    graph_of_cases,
    made_of,
)
from torch_geometric.data import Data

import salientpp
from salientpp.testing.steps import difference, is_in_words

#: Names of a model's arguments that inference does not give.
_LACKS = ("node_type", "edge_type", "pos", "normal", "hs", "step", "x")
_MESSAGES = ("SAGEConv", "GCNConv", "GATConv", "GINConv", "GraphConv", "TransformerConv", "GATv2Conv", "LGConv", "EdgeConv", "GENConv", "ResGatedGraphConv", "PNAConv", "CGConv", "GINEConv", "NNConv", "LEConv", "GeneralConv", "FeaStConv", "ClusterGCNConv", "MFConv", "EGConv", "SimpleConv")  # fmt: skip
_LAYER = one_of(_MESSAGES, refuses=r"add_self_loops=True|TransformerConv.*beta")
_OPS = [each for each in BY_ROW if each[0] != "jump" and "Cell" not in each[1]]
#: Kinds of choices that are no steps. The trial, which finds layers over all rows, cannot find a function that asks whether there are more than 30 rows.
_NOT_STEPS = ("keep", "whole model", "number of rows: h * (1.0 if")
ARGUMENTS = ("edge_weight", "edge_attr", "model", "layer", "step")


def case_of(seed: int) -> Case:
    """Returns the random case of an integer."""
    r = random.Random(f"inferred {seed}")
    if r.random() < 0.2:
        chosen: tuple[Choice, ...] = (model_of(r, 0),)
    else:
        chosen = tuple(
            each for each in drawn(r, Taste(_LAYER, _LAYER, _OPS, _LACKS)) if not each.kind.startswith(_NOT_STEPS)
        )
        chosen = chosen or (_LAYER(r, 0),)
    chosen = tuple(_with_weights(each, chosen) for each in chosen)
    names = [name for name in ("edge_weight", "edge_attr") if any(name in each.forward for each in chosen)]
    options = {
        "parts": r.choice((0, 0, 1)),
        "batch_size": r.choice((1, 7, 50, 1024)),
        "batch_edges": r.choice((2**20, 20)),
        "scratch": r.random() < 0.15,
        "names": tuple(name for name in names if r.random() < 0.95),
    }
    return Case(seed, chosen, modes=(), target="inferred", options=tuple(options.items()))


def _with_weights(layer: Choice, chosen: tuple[Choice, ...]) -> Choice:
    """Returns a layer that is given what inference gives to every layer that takes it, if it gives it to any."""
    inherited = None if "def forward" in layer.top else re.search(r"\(pyg\.(\w+)\)", layer.top)
    strategy = CONVS.get(inherited[1] if inherited else layer.kind.removeprefix("conv "))
    if strategy is None or not layer.forward.endswith("(h, edge_index)"):
        return layer
    for name, takes in (("edge_weight", strategy.weight), ("edge_attr", strategy.attr is not None)):
        if takes and any(name in each.forward for each in chosen):
            return dataclasses.replace(layer, forward=f"{layer.forward[:-1]}, {name})")
    return layer


def steps_of(case: Case) -> str:
    """Returns the source of a function from the model to its steps, and of one that applies them to the whole graph."""
    lines, names = [], []
    for each in case.choices:
        if not each.forward:
            continue
        alone = re.fullmatch(
            rf"h = self\.l{each.number}\((h|x=h)(, (?:edge_index=)?edge_index)?(, edge_\w+(?:=edge_\w+)?)?\)",
            each.forward,
        )
        if alone:
            names.append(f"self.l{each.number}")
            continue
        names.append(f"step{each.number}")
        arguments = [
            name for name in ("edge_index", "edge_weight", "edge_attr") if re.search(rf"\b{name}\b", each.forward)
        ]
        lines.append(
            f"def step{each.number}({', '.join(['h', *arguments])}):\n{textwrap.indent(each.forward, '    ')}\n    return h\n"
        )
    body = "\n".join([*lines, f"return [{', '.join(names)}]"])
    return f"def steps(self):\n{textwrap.indent(body, '    ')}\n"


def _whole_graph(x: torch.Tensor, given: Any) -> list[Any]:
    return [x, given.edge_index, given.get("edge_weight"), given.get("edge_attr"), None, None, None, None, 0]


def outcome_of(case: Case) -> Outcome:
    """Runs a case."""
    options = {
        "parts": 0,
        "batch_size": 1024,
        "batch_edges": 2**20,
        "scratch": False,
        "names": ("edge_weight", "edge_attr"),
        **dict(case.options),
    }
    names = [name for name in options["names"] if any(name in each.forward for each in case.choices)]
    data = graph_of_cases().clone()
    given = Data(edge_index=data.edge_index, **{name: data[name].clone() for name in names})
    with cleared():
        space, plain, other = made_of(case)
        for model in (plain, other):
            model.eval()
            space["begin"](model, 0)
        try:
            with torch.no_grad():
                expected = plain(*_whole_graph(data.x.clone(), given))
            exec(steps_of(case), space)
            steps = space["steps"](other)
        except Exception as error:
            raise Invalid(f"{type(error).__name__}: {error}") from error
        is_basic = len(case.choices) == 1 and case.choices[0].kind.startswith("model")
        try:
            got = inferred(steps[0] if is_basic else steps, data, names, options)
        except Exception as error:
            functions = tuple(re.findall(r"\bstep\d+", str(error)))
            if is_in_words(error, plain, (*ARGUMENTS, *functions)):
                return Refused(str(error))
            return Failure(0, type(error).__name__, str(error)[:300])
        found = difference({"output": expected}, {"output": got})
    return None if found is None else Failure(0, *found)


def inferred(model: Any, data: Any, names: list[str], options: dict[str, Any]) -> torch.Tensor:
    """Returns the rows of all vertices, in the order of the data."""
    more = {name: name for name in names}
    more.update({name: options[name] for name in ("batch_size", "batch_edges")})
    with tempfile.TemporaryDirectory() as folder:
        if options["scratch"]:
            more.update(scratch=Path(folder) / "scratch", memory=2048)
        if not options["parts"]:
            return salientpp.inference(model, data, **more).clone()
        part = salientpp.load(_root_of_parts(options["parts"]))
        rows = salientpp.inference(model, part, **more)
        return torch.empty_like(rows).index_copy_(0, part.original_id(part.split("all")), rows)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


@functools.cache
def _root_of_parts(parts: int) -> Path:
    root = Path(_folder().name) / f"parts-{parts}"
    salientpp.partition(graph_of_cases(), parts, root, [3, 2], 8)
    return root
