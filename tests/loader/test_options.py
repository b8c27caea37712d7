"""Laws of the options: each is declared once, and signature, docstring, docs, facts and fingerprint follow from the declaration."""

from __future__ import annotations

import inspect
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
from graphs import random_data

from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.engine.option import declared_in
from salientpp.loader.options import GROUPS, OPTIONS
from salientpp.loader.values import Options
from salientpp.loader.vertex_options import OF_VERTICES

ROOT = Path(__file__).parents[2]

#: A file that adds an option to the loaders, with a way that the option makes.
NEW_FILE = '''
from typing import Annotated, TypedDict
from salientpp.engine.option import Option, flag
from salientpp.engine.way import Way
from salientpp.loader.signature import declare

class Counting(Way):
    name = "counting"
    needs_stages = True
    delivered = 0

    def deliver(self, batch, note):
        Counting.delivered += 1

class Counts(TypedDict, total=False):
    """What is counted."""

    count_batches: Annotated[bool, Option(
        default=False, check=flag, agree="yes", identifies=True, help="count the batches, see [docs](x.md). At the end", way=lambda value: Counting(),
    )]

declare(Counts)
'''

USE = """
import inspect, pytest, salientpp, torch, new_file
from write_reference import tables_of_options
from salientpp.loader.values import Options
from salientpp.loader.signature import declare
from torch_geometric.data import Data

data = Data(x=torch.arange(20.0).view(-1, 1), edge_index=torch.randint(20, (2, 60)))
make = lambda **options: salientpp.NeighborLoader(data, [3], batch_size=5, seed=1, **options)
for class_ in (salientpp.NeighborLoader, salientpp.LinkNeighborLoader):
    assert inspect.signature(class_).parameters["count_batches"].default is False
    assert "count_batches: count the batches\\n" in class_.__doc__
    assert "* What is counted: ``count_batches``" in class_.__doc__
assert "### What is counted" in tables_of_options()
assert "| `count_batches` | `False` | same | count the batches, see [docs](x.md). At the end |" in tables_of_options()
assert Options(count_batches=True).facts(of_host=False)["count_batches"] is True
plain, counting = make(), make(count_batches=True)
assert plain.count_batches is False and counting.count_batches is True
assert "count_batches" not in plain.state_dict()["fingerprint"]
assert counting.state_dict()["fingerprint"]["count_batches"] is True
assert all(torch.equal(a.x, b.x) for a, b in zip(plain, counting, strict=True))
assert new_file.Counting.delivered == len(counting) == 4
with pytest.raises(ValueError, match="count_batches must be True or False, got 3"):
    make(count_batches=3)
with pytest.raises(ValueError, match="Counts declares count_batches, which the loaders already have"):
    declare(new_file.Counts)
"""


def test_one_new_file_adds_an_option(tmp_path):
    (tmp_path / "new_file.py").write_text(NEW_FILE)
    path = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'docs')!r}]\n"
    done = subprocess.run([sys.executable, "-c", path + USE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_tables_in_the_docs_match_the_declarations():
    page = (ROOT / "docs" / "reference" / "options.md").read_text()
    found = page.split("<!-- options -->\n\n")[1].split("\n<!-- /options -->")[0]
    assert found == runpy.run_path(str(ROOT / "docs" / "write_reference.py"))["tables_of_options"](), (
        "run `python docs/write_reference.py`"
    )


@pytest.mark.parametrize("class_", [NeighborLoader, LinkNeighborLoader])
def test_signature_and_docstring_have_every_option(class_):
    parameters = inspect.signature(class_).parameters
    for group in GROUPS:
        for name, (_, option) in declared_in(group).items():
            if group in OF_VERTICES and class_ is LinkNeighborLoader:
                assert name not in parameters
            else:
                assert parameters[name].default == option.default and f"        {name}: " in class_.__doc__
    assert "<options>" not in class_.__doc__


@pytest.mark.parametrize("class_", [NeighborLoader, LinkNeighborLoader])
def test_the_docstring_begins_with_what_most_scripts_need_and_lists_the_rest_by_purpose(class_):
    before, args = class_.__doc__.split("    Args:\n")
    names = re.findall(r"``(\w+)``", before.split("Start here: ")[1])
    pygs = [
        "data",
        "num_neighbors",
        "input_nodes",
        "edge_label_index",
        "neg_sampling",
        "batch_size",
        "shuffle",
        "num_workers",
        "transform",
    ]
    own = [name for name in names if name not in (*pygs, "memory", "NeighborLoader")]
    start = list(declared_in(GROUPS[0]))
    expected = [name for group in GROUPS for name in declared_in(group) if name in inspect.signature(class_).parameters]
    assert [name for name in names if name in start][: len(start)] == start
    assert [name for name in own if name not in start] == [name for name in expected if name not in start]
    assert max(map(len, args.splitlines())) <= 150 and all(group.__doc__ for group in GROUPS)


def test_every_option_is_an_attribute_from_which_lightning_recreates_the_loader():
    loader = NeighborLoader(random_data(), [3])
    assert not [
        name for name in inspect.signature(NeighborLoader).parameters if name != "kwargs" and not hasattr(loader, name)
    ]


def test_a_mapping_stays_an_attribute_and_its_entries_are_in_facts_and_errors():
    mapping = {"sigma": 4, "static": True}
    loader = NeighborLoader(random_data(), [3], pad=mapping)
    assert loader.pad == mapping, "a tool that makes the loader again passes it on"
    values = Options(pad=mapping, cooperate={"batches": 3})
    assert (values.pad, values.pad_sigma, values.pad_static) == ("fixed", 4, True)
    assert values.facts(of_host=False)["cooperate['batches']"] == values.fingerprint()["cooperate['batches']"] == 3
    with pytest.raises(TypeError, match="pad_sigma"):
        NeighborLoader(random_data(), [3], pad_sigma=3.0)


#: Options that take a mapping -> a plain value, and the mapping that means the same, with defaults named.
EQUAL = {
    "memory": ("1kB", {"host": 1000, "device": None, "machines": None, "allow": ()}),
    "device_rows": (0.5, {"part": 0.5, "cache": 0, "zero_copy": False}),
    "logical_ranks": (3, {"number": 3, "join": False}),
    "partial_aggregation": ("sum", {"reduce": "sum", "weight": None}),
    "shared_draws": ("batch", {"vertices": "batch", "block": 1}),
    "pad": ("fixed", {"sigma": 3, "static": False}),
    "cooperate": ("host", {"batches": None, "split_by": "vip"}),
}


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.keys])
def test_a_plain_value_and_its_mapping_mean_the_same(name):
    plain, mapping = (Options(**{name: value}).checked_alone() for value in EQUAL[name])
    assert {each: getattr(plain, each) for each in OPTIONS} == {each: getattr(mapping, each) for each in OPTIONS}
    assert plain.facts(of_host=True) == mapping.facts(of_host=True) and plain.fingerprint() == mapping.fingerprint()


def test_a_mapping_that_changes_later_changes_no_loader():
    given = {"vertices": "batch", "block": 2}
    loader = NeighborLoader(random_data(), [3], shared_draws=MappingProxyType(given), seed=1)
    before = loader.state_dict()["fingerprint"]
    given.update(block=3)
    assert loader.shared_draws == {"vertices": "batch", "block": 2} and type(loader.shared_draws) is dict
    assert pickle.loads(pickle.dumps(loader)).state_dict()["fingerprint"] == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pad": {"sigm": 1}}, "pad may be a mapping with the entries sigma, static; got the entry 'sigm'. Did you mean sigma?"),
        ({"shared_draws": {("block",): 1}}, "entries vertices, block; got the entry ('block',)"),
        ({"shared_draws": {"vertices": {"block": 2}}}, "shared_draws must be 'batch' or None, got {'block': 2}"),
        ({"memory": {"host": {"host": 1}}}, "memory must be a number of bytes"),
        ({"logical_ranks": {"join": None}}, "logical_ranks['join'] must be True or False, got None"),
        ({"draw_block": 3}, "has no argument 'draw_block'. Did you mean shared_draws={'block': ...}?"),
        ({"device_memory": "1GB"}, "has no argument 'device_memory'. Did you mean memory={'device': ...}?"),
        ({"device_cache": 1.0}, "has no argument 'device_cache'. Did you mean device_rows={'cache': ...}?"),
        ({"join_logical_ranks": True}, "has no argument 'join_logical_ranks'. Did you mean logical_ranks={'join': ...}?"),
        ({"device_row": 1.0}, "has no argument 'device_row'. Did you mean device_rows or device?"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_entry_and_an_old_name_are_told_with_the_entry_that_is_meant(given, words):
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        NeighborLoader(random_data(), [3], **given)


def test_every_option_has_help_and_no_default_is_refused():
    assert all(option.help and not option.help.endswith(".") for option in OPTIONS.values())
    checked = Options().checked_alone()
    assert {name: getattr(checked, name) for name in OPTIONS} == {
        name: option.default for name, option in OPTIONS.items()
    }
