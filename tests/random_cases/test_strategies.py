"""Law of strategies: each option, argument, way, topology, row source and kind of data occurs in random jobs. Otherwise a test names the place to add it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from typing import Any, get_args, get_type_hints

import pytest
import torch_geometric.loader
from random_cases import choices, data, inferred, jobs, options, use

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.engine.way import Way
from salientpp.loader.options import OPTIONS
from salientpp.loader.pyg_arguments import TorchArguments
from salientpp.sampling.topology import Topology
from salientpp.store.directory import description
from salientpp.store.narrow import FORMATS
from salientpp.store.rows import RowSource


def check(there: set[str], known: set[str], what: str, where: str) -> None:
    missing, gone = sorted(there - known), sorted(known - there)
    assert not missing, f"{what} {', '.join(missing)} has no strategy; add one to {where} in tests/random_cases/"
    assert not gone, (
        f"{where} in tests/random_cases/ has a strategy for {', '.join(gone)}, which does not exist any more"
    )


def parameters_of(*classes: Any) -> set[str]:
    names = {name for each in classes for name in inspect.signature(each.__init__).parameters}
    return names - {"self", "args", "kwargs", "options"}


def classes_of_the_package() -> list[type]:
    modules = [
        importlib.import_module(each.name)
        for each in pkgutil.walk_packages(salientpp.__path__, "salientpp.")
        if not each.name.endswith("__main__")
    ]
    return list(
        {
            each
            for module in modules
            for each in vars(module).values()
            if inspect.isclass(each) and each.__module__.startswith("salientpp.")
        }
    )


def is_row_source(each: type) -> bool:
    take = vars(each).get("take")
    return (
        each is not RowSource
        and take is not None
        and [*inspect.signature(take).parameters][1:] == ["index", "out", "out_index"]
    )


def check_arguments() -> None:
    pyg = torch_geometric.loader
    classes = (
        NeighborLoader,
        LinkNeighborLoader,
        pyg.NeighborLoader,
        pyg.LinkNeighborLoader,
        pyg.NodeLoader,
        pyg.LinkLoader,
    )
    there = {*OPTIONS, *TorchArguments.__annotations__, *parameters_of(*classes)} - {"node_sampler", "link_sampler"}
    check(there, set(options.STRATEGIES), "the argument", "STRATEGIES of options.py")


def check_classes() -> None:
    found = classes_of_the_package()
    ways = {each.__name__ for each in found if issubclass(each, Way) and each is not Way}
    check(ways, set(options.WAYS), "the way", "WAYS of options.py")
    topologies = {each.__name__ for each in found if issubclass(each, Topology) and each is not Topology}
    check(topologies, set(data.TOPOLOGY_CLASSES), "the topology", "TOPOLOGY_CLASSES of data.py")
    check(
        {each.__name__ for each in found if is_row_source(each)},
        set(data.ROW_SOURCES),
        "the row source",
        "ROW_SOURCES of data.py",
    )


def check_data() -> None:
    hints = [get_type_hints(each.__init__)["data"] for each in (NeighborLoader, LinkNeighborLoader)]
    kinds = {kind.__name__ for hint in hints for kind in get_args(hint)}
    check(
        kinds | {"stores"}, {data.KINDS[form] for form in data.FORMS}, "the kind of data", "FORMS and KINDS of data.py"
    )
    check({description.WHOLE, description.PARTS}, set(data.TOPOLOGIES), "the form of topology", "TOPOLOGIES of data.py")
    check(
        set(FORMATS), {format.partition("/")[0] for format in data.FORMATS}, "the format of rows", "FORMATS of data.py"
    )


@pytest.mark.parametrize("law", [check_arguments, check_classes, check_data])
def test_everything_has_a_strategy(law):
    law()


@pytest.mark.parametrize(
    ("table", "entry", "law"),
    [
        (options.STRATEGIES, "lookahead", check_arguments),
        (options.STRATEGIES, "time_attr", check_arguments),
        (options.WAYS, "ReadAhead", check_classes),
        (data.TOPOLOGY_CLASSES, "PartTopology", check_classes),
        (data.ROW_SOURCES, "TensorRows", check_classes),
        (data.FORMS, "HeteroData", check_data),
    ],
)
def test_a_missing_strategy_is_named_with_the_place_to_add_it(monkeypatch, table, entry, law):
    monkeypatch.delitem(table, entry)
    with pytest.raises(
        AssertionError, match=rf"{entry} has no strategy; add one to .* of (options|data)\.py in tests/random_cases/"
    ):
        law()


def test_every_strategy_gives_values():
    """A strategy whose function never returns a value is none."""
    wanted = {name for name, strategy in options.STRATEGIES.items() if strategy.chance > 0}
    drawn: set[str] = set()
    for seed in range(5000):
        drawn |= jobs.job_of(seed).unfolded.keys()
        if drawn >= wanted:
            break
    check(wanted, drawn, "the argument", "STRATEGIES of options.py")


def test_a_subclass_gets_the_weights_that_inference_gives_to_its_class():
    weighted = choices.Choice(0, "conv LEConv", forward="h = self.l0(h, edge_index, edge_weight)")
    takes = {"OwnLinear": "edge_weight", "OwnCentred": "edge_weight", "OwnGAT": "edge_attr", "OwnGCN": "", "Own": ""}
    for name, more in takes.items():
        own = choices.Choice(
            1,
            f"conv {name}",
            top=choices.OWN[name],
            init=f"self.l1 = {name}(6, 6, edge_dim=3)",
            forward="h = self.l1(h, edge_index)",
        )
        other = dataclasses.replace(weighted, forward=weighted.forward.replace("edge_weight", more or "edge_weight"))
        found = inferred._with_weights(own, (other, own)).forward
        assert found == (f"h = self.l1(h, edge_index, {more})" if more else own.forward), name


def test_every_step_is_a_method():
    for step in jobs.STEPS:
        assert hasattr(use.Use, f"_{step.removesuffix(' N').replace(' ', '_')}")
