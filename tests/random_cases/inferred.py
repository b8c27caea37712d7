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

import numpy as np
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
from random_cases.pool import Failed, Place, shared_pool
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
        "ranks": r.choice((0, 0, 0, 1, 1, 2, 3)),
        "batch_size": r.choice((1, 7, 50, 1024)),
        "batch_edges": r.choice((2**20, 20)),
        "scratch": r.random() < 0.15,
        "names": tuple(name for name in names if r.random() < 0.95),
    }
    if options["ranks"]:
        options["parts"] = options["ranks"] + (options["ranks"] > 1 and r.random() < 0.3)
        options["replication_factor"] = r.choice((0.0, 0.3))
        options["num_workers"] = r.choice((0, 0, 0, 1))
        options["out"] = r.random() < 0.3
    return Case(seed, chosen, modes=(), target="inferred", options=tuple(options.items()))


def _with_weights(layer: Choice, chosen: tuple[Choice, ...]) -> Choice:
    """Returns a layer that is given what inference gives to every layer that takes it, if it gives it to any."""
    inherited = None if "def forward" in layer.top else re.search(r"\(pyg\.(\w+)\)", layer.top)
    strategy = CONVS.get(inherited[1] if inherited else layer.kind.removeprefix("conv "))
    if strategy is None or not layer.forward.endswith("(h, edge_index)"):
        return layer
    for name, takes in (
        ("edge_weight", strategy.weight),
        ("edge_attr", (strategy.attr or "") in layer.init if strategy.attr is not None else False),
    ):
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
    options = options_of(case)
    data, names = graph_of_cases().clone(), _names(case, options)
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
            space["steps"](other)
        except Exception as error:
            raise Invalid(f"{type(error).__name__}: {error}") from error
    root = _root_of_parts(options["parts"]) if options["ranks"] else None
    with tempfile.TemporaryDirectory() as folder:
        if options["parts"] > 1:
            answers = shared_pool().run(rows_on_rank, options["ranks"], case, root, Path(folder))
        else:
            try:
                answers = [rows_on_rank(Place(0, 1), case, root, Path(folder))]
            except Exception as error:
                return Failure(0, type(error).__name__, str(error)[:300])
        written = [torch.from_numpy(np.load(file)) for file in sorted(Path(folder).glob("out/part-*.npy"))]
    got = torch.empty_like(expected)
    for rank, answer in enumerate(answers):
        if isinstance(answer, Failed):
            return Failure(0, f"rank {rank}: {answer.kind}", answer.text[:300])
        if not isinstance(answer, str):
            ids, rows = answer
            if rows.shape[1:] != expected.shape[1:]:
                return Failure(0, "output", f"{tuple(expected.shape)} and {tuple(rows.shape)}")
            got[ids] = rows
    words = [answer for answer in answers if isinstance(answer, str)]
    if words:
        is_wrong = len(words) < len(answers) or _must_work(case)
        return Failure(0, f"refusal on {len(words)} ranks", words[0]) if is_wrong else Refused(words[0])
    if options["out"] and not torch.equal(torch.cat(written), torch.cat([rows for _, rows in answers])):
        return Failure(0, "files of the rows", [len(each) for each in written])
    found = difference({"output": expected}, {"output": got})
    return None if found is None else Failure(0, *found)


def _must_work(case: Case) -> bool:
    """Returns True if the documentation promises that a model works: one layer, or a basic model without norms over all vertices.

    The trial refuses what it finds wrong. So without this law, a fault would only make it refuse more.
    """
    only = case.choices[0]
    is_layer = only.kind.removeprefix("conv ") in {*_MESSAGES} - {"EGConv", "FeaStConv"}  # these refuse some options
    is_model = only.kind.startswith("model") and not re.search("norm='(layer|instance|graph|pair)_norm'", only.init)
    return len(case.choices) == 1 and (is_layer or is_model)


def options_of(case: Case) -> dict[str, Any]:
    """Returns the options of a case, with the plainest values for those that are missing."""
    plainest = {
        "batch_size": 1024,
        "batch_edges": 2**20,
        "scratch": False,
        "names": ("edge_weight", "edge_attr"),
        "ranks": 0,
        "out": False,
    }
    found = {**plainest, "replication_factor": 0.0, "num_workers": 0, **dict(case.options)}
    return {**found, "parts": max(found.get("parts", 0), found["ranks"]) if found["ranks"] else 0}


def _names(case: Case, options: dict[str, Any]) -> list[str]:
    return [name for name in options["names"] if any(name in each.forward for each in case.choices)]


def rows_on_rank(place: Place, case: Case, root: Path | None, folder: Path) -> tuple[torch.Tensor, torch.Tensor] | str:
    """Returns ids and rows of this rank's vertices, or the text of an error that says why. Raises errors without such words.

    Args:
        root: directory of the parts; None for a ``Data``.
        folder: folder for files, the same on all ranks.
    """
    options = options_of(case)
    more: dict[str, Any] = {name: name for name in _names(case, options)}
    more.update({name: options[name] for name in ("batch_size", "batch_edges", "replication_factor", "num_workers")})
    plain: Any = torch.nn.Module()
    with cleared():
        space, plain, model = made_of(case)
        model.eval()
        space["begin"](model, 0)
        exec(steps_of(case), space)
        steps = space["steps"](model)
        if len(case.choices) == 1 and case.choices[0].kind.startswith("model"):
            steps = steps[0]
        if options["scratch"]:
            more.update(scratch=folder / "scratch", memory=2048)
        if options["out"]:
            more["out"] = folder / "out"
        try:
            if root is None:
                return torch.arange(120), salientpp.inference(steps, graph_of_cases().clone(), **more).clone()
            part = salientpp.load(root, process_group=place.group)
            rows = salientpp.inference(steps, part, process_group=place.group, **more)
            return part.original_id(part.split("all")), rows.clone()
        except Exception as error:
            functions = tuple(re.findall(r"\bstep\d+", str(error)))
            if type(error).__name__ == "RankFailure" or is_in_words(error, plain, (*ARGUMENTS, *functions)):
                return str(error)
            raise


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


@functools.cache
def _root_of_parts(parts: int) -> Path:
    root = Path(_folder().name) / f"parts-{parts}"
    salientpp.partition(graph_of_cases(), parts, root, [3, 2], 8)
    return root
