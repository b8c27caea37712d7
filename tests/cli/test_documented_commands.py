"""Laws of the commands that docstrings of examples show: the parser takes them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from salientpp.cli.main import _parser

ROOT = Path(__file__).parents[2]
COMMANDS = [
    (path.name, line)
    for path in sorted((ROOT / "examples").glob("*.py"))
    for line in re.findall(r"^ +(salientpp [a-z].*)$", path.read_text().split('"""')[1], re.MULTILINE)
]


@pytest.mark.parametrize(("example", "line"), COMMANDS)
def test_the_command_of_an_example_can_be_parsed(example, line):
    words = shlex.split(re.split(r"[|>]", line)[0], comments=True)
    assert _parser().parse_args(words[1:]).command == words[1]


def test_there_are_such_commands():
    assert {"train_full.py", "train_slurm.py"} <= {example for example, _ in COMMANDS}
