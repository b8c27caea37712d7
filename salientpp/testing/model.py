"""Tests (laws) that every model and every layer should pass: converted by this package, it computes what it computes in plain PyG.

The test of a model subclasses :class:`ModelLaws` and overrides ``model``. Each law runs random cases in float64, which are functions of an integer.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch_geometric.data import Data

import salientpp
from salientpp.fullgraph import distribute, local
from salientpp.testing.comparison import Outcome, Refused, judge
from salientpp.testing.ranks import run_ranks
from salientpp.testing.steps import Rows, copy_values, difference, graph, is_in_words, run_step, summed

_LOADERS: tuple[dict[str, Any], ...] = (
    {"num_neighbors": [3, 2], "batch_size": 8}, {"num_neighbors": [2, 2, 2], "batch_size": 6}, {"num_neighbors": [3], "batch_size": 8},
    {"num_neighbors": [-1, -1], "batch_size": 4}, {"num_neighbors": [1, 1, 1, 1], "batch_size": 10},
    {"num_neighbors": [3, 3], "batch_size": 6, "replace": True}, {"num_neighbors": [3, 2], "batch_size": 5, "disjoint": True},
)  # fmt: skip
_MODES = ("train", "train", "train", "eval", "no_grad", "inference")
_LAYOUTS = ("halo", "halo", "cover", "1d", "1.5d", "2d")

#: Arguments of the conversions, and words for what they take. An error must name one of them, or a module of the model.
_ARGUMENTS = ("edge_weight", "edge_attr", "layer", "step", "layout", "recompute", "partial_aggregation", "data")


@dataclass(frozen=True)
class ModelCase:
    """Random case of a conversion.

    Attributes:
        seed: integer that the case is a function of.
        modes: 'train', 'eval', 'no_grad' or 'inference' for each step.
        given: whether attributes are given as leaves with gradients, computed from such, or without gradients.
        options: of the loader, for batches, and of the conversion.
    """

    seed: int
    modes: tuple[str, ...]
    given: str
    options: dict[str, Any]


class ModelLaws:
    """Tests of one model, or of one layer. Subclass it and override ``model``.

    A conversion may refuse the model with an error that names the model or an argument. If it does so in every case, the test is skipped with this error.

    Attributes:
        arguments: names of the attributes that the model is called with, in order.
        cases: number of random cases of each test.
        first: integer of the first case.
    """

    arguments: ClassVar[Sequence[str]] = ("x", "edge_index")
    cases: ClassVar[int] = 12
    first: ClassVar[int] = 0

    @classmethod
    def model(cls) -> torch.nn.Module:
        """Returns a new model. It returns rows [n, ...] of the vertices, or several such tensors."""
        raise NotImplementedError("the test class must override `model` with a function that returns a new model")

    @classmethod
    def data(cls) -> Data:
        """Returns the graph, in float64. The default has the attributes that :func:`salientpp.testing.steps.graph` states."""
        return graph()

    @classmethod
    def steps(cls, model: torch.nn.Module) -> Any:
        """Returns what :func:`salientpp.inference` takes: the model, or a list of its layers and of functions."""
        return model

    def test_a_trimmed_model_computes_the_same(self) -> None:
        judge(outcomes(type(self), trimmed))

    def test_a_model_over_sums_computes_the_same(self) -> None:
        judge(outcomes(type(self), over_sums))

    @pytest.mark.parametrize("world", [1, 2, 3], ids="{} ranks".format)
    def test_a_model_over_ranks_computes_the_same(self, world: int) -> None:
        of_ranks = run_ranks(outcomes_on_rank, world, type(self))
        judge([(rows[0][0], *(outcome for _, outcome in rows)) for rows in zip(*of_ranks)])

    def test_inference_computes_the_same(self) -> None:
        judge(outcomes(type(self), inferred))


# --- cases ------------------------------------------------------------------------------------------------

#: Runs a case with the plain model and with an equal one to convert, and returns the first difference.
Run = Callable[[type[ModelLaws], ModelCase, torch.nn.Module, torch.nn.Module], "tuple[str, Any] | None"]


def outcomes(laws: type[ModelLaws], run: Run) -> list[tuple[ModelCase, Outcome]]:
    """Runs all cases. Raises AssertionError with the case for an error that does not say why a model is refused."""
    found: list[tuple[ModelCase, Outcome]] = []
    for seed in range(laws.first, laws.first + laws.cases):
        r = random.Random(f"{run.__name__} {seed}")
        torch.manual_seed(seed)
        plain, other = laws.model().double(), laws.model().double()
        copy_values(plain, other)
        case = ModelCase(
            seed, tuple(r.choices(_MODES, k=3)), r.choice(("leaf", "computed", "constant")), _options(run, r)
        )
        try:
            wrong = run(laws, case, plain, other)
            found.append((case, None if wrong is None else f"{wrong[0]} differs by {wrong[1]}"))
        except Exception as error:
            if not is_in_words(error, plain, _ARGUMENTS):
                raise AssertionError(f"{type(error).__name__}: {error}, in {case}") from error
            found.append((case, Refused(str(error))))
    return found


def _options(run: Run, r: random.Random) -> dict[str, Any]:
    """Draws the options of a loader or of a conversion."""
    check = r.random() < 0.3  # it corrects or refuses what the conversion would get wrong
    if run is trimmed:
        return {**r.choice(_LOADERS), "check": check}
    if run is over_sums:
        sums = {"reduction": r.choice(("sum", "mean", "max")), "weight": r.choice((None, "edge_weight"))}
        return {"num_neighbors": r.choice(([3], [3, 2], [2, 2, 2])), "batch_size": 6, "check": check, **sums}
    if run is inferred:
        return {"batch_size": r.choice((1, 7, 50, 1024)), "batch_edges": r.choice((20, 2**20))}
    cuts = sorted(r.choice((0, 1, 40, 60, 120)) for _ in range(dist.get_world_size() - 1))
    return {"cuts": cuts, "layout": r.choice(_LAYOUTS), "recompute": r.choice((None, None, "layers"))}


def trimmed(laws: type[ModelLaws], case: ModelCase, plain: torch.nn.Module, other: torch.nn.Module) -> Any:
    """Compares a model of :func:`salientpp.nn.trim`."""
    options = {**case.options}
    converted = salientpp.nn.trim(other, check=options.pop("check"))
    return _over_batches(laws, case, plain, converted, options, lambda batch, data: batch)


def over_sums(laws: type[ModelLaws], case: ModelCase, plain: torch.nn.Module, other: torch.nn.Module) -> Any:
    """Compares a model of :func:`salientpp.nn.merge_partial`, for batches with sums in place of some rows."""
    options = {**case.options}
    converted = salientpp.nn.merge_partial(other, check=options.pop("check"))
    reduction, weight = options.pop("reduction"), options.pop("weight")
    weight = weight if weight in laws.arguments else None
    case = dataclasses.replace(case, given="constant")
    return _over_batches(
        laws, case, plain, converted, options, lambda batch, data: summed(batch, data, case.seed, reduction, weight)
    )


def _over_batches(
    laws: type[ModelLaws],
    case: ModelCase,
    plain: torch.nn.Module,
    converted: torch.nn.Module,
    options: dict[str, Any],
    changed: Callable[[Any, Data], Any],
) -> tuple[str, Any] | None:
    data = laws.data()
    seeds = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(case.seed))
    batches = salientpp.NeighborLoader(data, input_nodes=seeds, seed=case.seed, **options)
    for step, (batch, mode) in enumerate(zip(batches, case.modes)):
        expected, got = (
            run_step(model, given, laws.arguments, step, mode, case.given)
            for model, given in ((plain, batch), (converted, changed(batch, data)))
        )
        if (found := difference(*map(_results, (expected, got)))) is not None:
            return found
    return None


def _results(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leaves out the inputs, which differ if rows are replaced by sums or belong to a rank."""
    return {name: value for name, value in found.items() if not name.startswith("input")}


def inferred(laws: type[ModelLaws], case: ModelCase, plain: torch.nn.Module, other: torch.nn.Module) -> Any:
    """Compares the rows of all vertices by :func:`salientpp.inference`."""
    data = laws.data()
    names: dict[str, Any] = {name: name for name in ("edge_weight", "edge_attr") if name in laws.arguments}
    with torch.no_grad():
        expected = plain.eval()(*(data[name] for name in laws.arguments))
    got = salientpp.inference(laws.steps(other), data, **names, **case.options)
    return difference({"output": expected}, {"output": got})


def outcomes_on_rank(rank: int, laws: type[ModelLaws]) -> list[tuple[ModelCase, Outcome]]:
    """Runs all cases of :func:`distributed` on a rank."""
    return outcomes(laws, distributed)


def distributed(laws: type[ModelLaws], case: ModelCase, plain: torch.nn.Module, other: torch.nn.Module) -> Any:
    """Compares a model of :func:`salientpp.fullgraph.distribute`: the outputs and gradients of a rank's vertices and edges, and of all parameters."""
    data, options = laws.data(), case.options
    size = data.num_nodes
    part = local(data, offsets=[0, *(min(cut, size) for cut in options["cuts"]), size])
    converted = distribute(other, part, options["layout"], recompute=options["recompute"])
    whole, mine = Rows(data, torch.arange(size), size), Rows(part, part.n_id, part.num_counted)
    ids = {f"gradient of {name}": mine.n_id for name in ("x", "pos")}
    ids |= {f"gradient of {name}": part.e_id for name in ("edge_weight", "edge_attr")}
    # Only the rows of 'halo' may come from a user's operations.
    given = case.given if options["layout"] == "halo" else "stored"
    found = []  # compared on each rank after all steps, which the ranks make together
    for step, mode in enumerate(case.modes):
        expected, got = (
            _results(run_step(model, rows, laws.arguments, step, mode, given))
            for model, rows in ((plain, whole), (converted, mine))
        )
        got = {name.replace(" module.", " "): value for name, value in got.items()}
        for name in expected.keys() & got.keys():
            own = mine.n_id[: mine.batch_size] if name.startswith("output") else ids.get(name)
            if own is not None:  # a rank without vertices has a row that no vertex has
                expected[name], got[name] = expected[name][own], got[name][: len(own)]
        found.append(difference(expected, got))
    return next(filter(None, found), None)
