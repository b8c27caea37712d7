"""Extreme arguments of the command end in one line that says what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_line import mistake, wide_terminal  # noqa: F401  the fixture is used by name
from graphs import random_data

import salientpp

LONG = "a" * 5000
TOO_LONG = r"\(File name too long\); the name is too long: choose one of at most 255 bytes"
DEEP = '{"step": ' + "[" * 900 + "]" * 900 + "}"
DEEPER = '{"a":' * 100_000 + "1" + "}" * 100_000

#: Contents of a machines file -> words of the error.
MACHINES = {
    '{"between": "10GbE", "draw": 1e300}': r"draw in .* must be a number >= 0 \(0, or from 1e-18 to 1e\+18\), got 1e\+300",
    '{"between": "10GbE", "draw": 1e-300}': r"draw in .* must be a number >= 0 \(0, or from",
    '{"between": "10GbE", "cores": 1e-300}': r"cores in .* must be a number >= 0 \(0, or from",
    '{"between": "10GbE", "to_device": 1e-300}': r"to_device in .* must be a number >= 0 \(0, or from",
    '{"between": "10GbE", "price": 1e300}': r"price in .* must be a number >= 0 \(0, or from",
    '{"between": "10GbE", "batch": ' + "9" * 400 + "}": r"batch in .* must be a number >= 0 \(0, or from",
    '{"between": {"bytes_per_second": 1e-300}}': r"bytes_per_second of between in .* must be a number >= 0 \(0, or from",
    '{"between": "10GbE", "step": {"seconds": 1e300}}': r"seconds of step in .* must be a number >= 0 \(0, or from",
    '{"between": "10GbE", "about": 5}': r"about in .* must be an object that says where the constants come from, got 5",
    '{"between": "10GbE", "about": [1]}': r"about in .* must be an object .* got \[1\]",
    '{"between": "10GbE", "step": ' + DEEP[9:-1] + "}": r"step in .* must be an object with the entries seconds",
    '{"between": ' + DEEP[9:-1] + "}": r"between in .* must be an object with the entries bytes_per_second",
    DEEPER: r"must be a JSON file as salientpp calibrate writes it, but it cannot be read: maximum recursion",
}

#: Options of `salientpp plan` -> words of the error.
OPTIONS = {
    "--set=about=5": r"about in 10GbE with --set must be an object that says where the constants come from, got 5",
    "--set=draw=1e300": r"draw in 10GbE with --set must be a number >= 0 \(0, or from 1e-18",
    "--set=step.seconds=1e300": r"seconds of step in 10GbE with --set must be a number >= 0",
    f"--memory={'9' * 400}GiB": r"--memory must be a number of bytes >= 0",
    f"--memory={'9' * 400}": r"--memory must be fewer than 2\^63 bytes",
    f"--json={LONG}": TOO_LONG,
    f"--machines={LONG}": TOO_LONG,
}


def plan(*options: str) -> list[str]:
    return ["plan", "synthetic:num_vertices=50", "--hosts=2", "--machines=10GbE", *options]


@pytest.mark.parametrize("contents", MACHINES, ids=lambda contents: contents[:50])
def test_a_file_of_machines_is_refused(capsys, tmp_path, contents):
    file = tmp_path / "machines.json"
    file.write_text(contents)
    said = mistake(capsys, *plan(f"--machines={file}"))
    assert len(said) < 1000
    with pytest.raises(ValueError, match=MACHINES[contents]):
        raise ValueError(said)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option[:30])
def test_options_of_a_plan_are_refused(capsys, option):
    with pytest.raises(ValueError, match=OPTIONS[option]):
        raise ValueError(mistake(capsys, *plan(option)))


def test_a_constant_has_at_most_two_names(capsys):
    with pytest.raises(SystemExit):
        mistake(capsys, *plan("--set=" + "about." * 5000 + "a=1"))
    assert "expected a constant, or one of a link or a step" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["slurm", "--parts=2", "--time=1:00", f"--output={LONG}", "--", "train.py"],
        ["partition", "synthetic:num_vertices=50", LONG, "--parts=2"],
        ["partition", f"npz:{LONG}", "root", "--parts=2"],
        ["info", LONG],
        ["analyze", LONG, "--parts=2"],
        ["convert", f"npz:{LONG}", "root"],
        ["copy-to-disk", LONG, "--to=copy"],
        ["rewrite", LONG, "root", "--topology=parts"],
        ["calibrate", LONG],
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_a_name_that_is_too_long_is_named(capsys, monkeypatch, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    said = mistake(capsys, *words)
    assert "[Errno" not in said
    assert "too long: choose one of at most 255 bytes" in said
    assert [*tmp_path.iterdir()] == []


STEPS = """
import sys

def leaves(part):
    sys.exit(3)

def fails(part):
    raise ZeroDivisionError("no")

def step_leaves(part):
    return lambda batch: sys.exit(4)

def step_fails(part):
    return lambda batch: batch.nothing + 1
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    (folder / "user_steps.py").write_text(STEPS)
    (folder / "leaves_at_once.py").write_text("import sys\nsys.exit(5)\n")
    (folder / "fails_at_once.py").write_text("import a_module_that_is_not_there\n")
    salientpp.partition(random_data(200, 800, train_fraction=0.5), 1, folder / "parts", [2, 2], 8)
    return folder


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("user_steps.py:leaves", r"user_steps.py:leaves called sys.exit\(3\) \(.*user_steps.py, line 5\); a step must return"),
        ("user_steps.py:fails", r"user_steps.py:fails raised ZeroDivisionError: no \(.*line 8\)"),
        ("user_steps.py:step_leaves", r"the step of --step=.*user_steps.py:step_leaves called sys.exit\(4\) \(.*line 11\)"),
        ("user_steps.py:step_fails", r"the step of --step=.*:step_fails raised AttributeError: .*nothing"),
        ("leaves_at_once.py:step", r"leaves_at_once.py called sys.exit\(5\) \(.*leaves_at_once.py, line 2\)"),
        ("fails_at_once.py:step", r"fails_at_once.py raised ModuleNotFoundError: No module named"),
    ],
)  # fmt: skip
def test_an_error_in_the_users_step_is_named(capsys, root, tmp_path, step, words):
    options = [f"--step={root}/{step}", "--between=10GbE", "--seconds=0.1", f"--json={tmp_path}/m.json"]
    said = mistake(capsys, "calibrate", root / "parts", *options)
    with pytest.raises(ValueError, match=words):
        raise ValueError(said)
    assert not (tmp_path / "m.json").exists()
    sys.modules.pop(Path(step.partition(":")[0]).stem, None)


def test_memory_that_the_kernels_lack_is_one_line(capsys, monkeypatch):
    from salientpp.cli import info

    def lacks(_: object) -> int:
        raise RuntimeError("cannot allocate a vector of 7999786 entries of dtype 4")

    monkeypatch.setattr(info, "run", lacks)
    said = mistake(capsys, "info", "root")
    assert said == "salientpp info: not enough memory (cannot allocate a vector of 7999786 entries of dtype 4)"


def test_the_constants_of_a_file_stay_as_they_are(tmp_path):
    from salientpp.ways.planner.machines import LINKS, Machines

    machines = Machines(LINKS["10GbE"], about={"any": [1, {"thing": None}]})
    machines.write(tmp_path / "m.json")
    assert Machines.read(tmp_path / "m.json") == machines
    assert json.loads((tmp_path / "m.json").read_text())["draw"] == machines.draw
