"""Laws of the reference: its pages name exactly the public names of the package, and every field of the analysis files."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

import salientpp
import salientpp.metrics
import salientpp.nn
import salientpp.testing
from salientpp.analysis.plan_result import Planned, Prediction
from salientpp.analysis.result import Ahead, Analysis, Copies, DeviceRows, Summed, Volume

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def test_api_pages_name_exactly_the_public_names():
    pages = [page.read_text() for page in (REFERENCE / "api").glob("*.md")]
    named = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    rooms = (salientpp, salientpp.nn, salientpp.metrics, salientpp.testing)
    public = [f"{room.__name__}.{name}" for room in rooms for name in room.__all__]
    named = [re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in named]  # a module with the name of its function
    assert sorted(named) == sorted(public)


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ("## JSON", Analysis),
        ("### results", Volume),
        ("### ahead", Ahead),
        ("### summed", Summed),
        ("### device_rows", DeviceRows),
        ("### copies", Copies),
        ("## Plan", Planned),
        ("### predictions", Prediction),
    ],
)
def test_analysis_page_lists_every_field(section, kind):
    text = (REFERENCE / "analysis-files.md").read_text().split(f"\n{section}\n")[1]
    table = re.split(r"^##", text, flags=re.MULTILINE)[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    added = {Analysis: ["schema"], Planned: ["schema", "recommended", "cheapest"]}.get(kind, [])
    assert sorted(listed) == sorted([field.name for field in fields(kind)] + added)


def test_the_site_reads_the_options_that_the_loaders_have(monkeypatch):
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))  # only the site's environment has it
    read = runpy.run_path(str(REFERENCE.parent / "loader_options.py"))
    for loader, without in ((salientpp.NeighborLoader, set()), (salientpp.LinkNeighborLoader, read["of_vertices"]())):
        found = [
            (name, default, f"{name}: {read['_plain'](text)}")
            for group, (title, options) in read["declared"]().items()
            if group not in without
            for name, (_, default, text) in options.items()
        ]
        own = inspect.signature(loader).parameters
        names = [name for name, _, _ in found]
        assert names == [name for name in list(own)[list(own).index(names[0]) :] if name != "kwargs"]
        described = " ".join(loader.__doc__.split())
        for name, default, text in found:
            assert " ".join(text.split()).split(" {")[0] in described, name
            assert default == "DEFAULT_TIMEOUT" or ast.literal_eval(default) == own[name].default, name
