"""Laws of `make test`: a failed test runs once more, alone.

If it then passes, it is named as flaky. More than two flaky tests fail the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run import MOST_FAILED

ROOT = Path(__file__).parents[2]

#: Flaky tests fail only in the first process that runs them.
TESTS = """
import pathlib, pytest

@pytest.mark.parametrize("number", range(FLAKY))
def test_flaky(number):
    file = pathlib.Path(f"{number}.seen")
    seen = file.exists()
    file.touch()
    assert seen

@pytest.mark.parametrize("number", range(FAILING))
def test_failing(number):
    pathlib.Path("times").open("a").write("x")
    raise ValueError("as always")

def test_sound():
    pass
"""


def ended(folder: Path, flaky: int, failing: int, *arguments: str, tests: str = TESTS) -> tuple[int, list[str]]:
    """Exit code, and the lines that follow pytest's own output."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_them.py").write_text(tests.replace("FLAKY", str(flaky)).replace("FAILING", str(failing)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "tests.run", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("===") or " in " in line)
    return done.returncode, [line for line in lines[last + 1 :] if line]


def test_a_run_without_failures_ends_as_pytest_does(tmp_path):
    assert ended(tmp_path, 0, 0) == (0, [])


@pytest.mark.parametrize("arguments", [(), ("-p", "xdist", "-n", "2")], ids=["in one process", "in two"])
def test_up_to_two_flaky_tests_are_named_and_pass(tmp_path, arguments):
    code, lines = ended(tmp_path, 2, 0, *arguments)
    assert code == 0
    assert sorted(lines) == [
        f"flaky: failed, and passed alone: test_them.py::test_flaky[{number}]" for number in (0, 1)
    ]


def test_a_test_that_hangs_once_is_ended_and_named(tmp_path):
    hanging = "import time, pathlib\ndef test_it():\n    file = pathlib.Path('seen')\n    if not file.exists():\n        file.touch()\n        time.sleep(600)"
    limits = ("-o", "faulthandler_timeout=3", "-o", "faulthandler_exit_on_timeout=true")
    assert ended(tmp_path, 0, 0, "-p", "xdist", "-n", "2", *limits, tests=hanging) == (
        0, ["flaky: failed, and passed alone: test_them.py::test_it"],
    )  # fmt: skip


def test_three_flaky_tests_fail_the_run(tmp_path):
    code, lines = ended(tmp_path, 3, 0)
    assert code == 1
    assert len(lines) == 4 and lines[-1] == "3 tests are flaky; more than 2 fail the run"


def test_a_test_that_fails_twice_fails_the_run(tmp_path):
    code, lines = ended(tmp_path, 1, 1)
    assert code == 1
    assert lines == [
        "failed twice: test_them.py::test_failing[0]",
        "flaky: failed, and passed alone: test_them.py::test_flaky[0]",
    ]
    assert (tmp_path / "times").read_text() == "xx"


def test_many_failures_do_not_run_again(tmp_path):
    assert ended(tmp_path, 0, MOST_FAILED + 1) == (1, [])
    assert len((tmp_path / "times").read_text()) == MOST_FAILED + 1


def test_a_file_that_cannot_be_collected_fails_the_run(tmp_path):
    assert ended(tmp_path, 0, 0, tests="import no_such_module") == (2, [])
