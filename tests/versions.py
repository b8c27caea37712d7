"""Tests one wheel with several versions of torch and Python: ``python -m tests.versions WHEEL [TORCH:PYTHON ...]``.

The wheel was built with the locked torch. For each pair, it is installed into a new
environment with that torch, and the tests in ``LAWS`` run there, away from the sources. These tests compare operators,
samplers and loaders with references, on up to four ranks. They also compare the digests of batches with recorded ones,
so batches that pass are identical under all versions. The environment is then deleted; one needs 7 GB.

Each pair becomes a row of the table *Tested versions* in CONTRIBUTING.md, also if it failed or could not be installed.
The exit code is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"

#: Every torch and every Python once, and the newest of both.
PAIRS = ("2.10:3.10", "2.11:3.11", "2.12:3.12", "2.13:3.13", "2.14:3.11", "2.15:3.13", "2.15:3.14")

#: The digests of batches, and the tests that run beside them.
DIGESTS = "tests/engine/test_same_batches.py"
LAWS = (
    DIGESTS,
    "tests/ops",
    "tests/graph",
    "tests/vip/test_inclusion.py",
    "tests/sampling",
    "tests/batch",
    "tests/loader/test_loader.py",
    "tests/loader/test_ranks.py",
)
TOOLS = ("pytest>=9", "pytest-xdist>=3.5", "hypothesis", "scipy")

#: Prints the versions that a row shows. The package must come from the environment.
SHOW = """
import platform, sys
from importlib.metadata import version
import salientpp
assert salientpp.__file__.startswith(sys.prefix), salientpp.__file__
print(version("torch"), platform.python_version(), version("torch_geometric"))
"""

HEADER = ("torch", "Python", "torch_geometric", "result", "batches", "date")
BEGIN, END = "<!-- versions -->", "<!-- /versions -->"


@dataclass(frozen=True)
class Row:
    """A row of the table; every field is text.

    Attributes:
        result: numbers of tests by outcome, or the reason why none ran.
        batches: ``identical`` if every recorded digest was found again, ``differ`` if not, empty if none was compared.
    """

    torch: str
    python: str
    torch_geometric: str
    result: str
    batches: str
    date: str

    @property
    def pair(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Minor versions of Python and torch, which identify the row."""
        return _minor(self.torch), _minor(self.python)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


# --- the table ------------------------------------------------------------------------------------------------


def rows_of(page: str) -> list[Row]:
    """Reads the rows that stand between the markers."""
    body = page.split(BEGIN)[1].split(END)[0]
    lines = [line.split("|")[1:-1] for line in body.splitlines() if line.startswith("|")]
    return [Row(*map(str.strip, line)) for line in lines[2:]]


def with_rows(page: str, rows: Iterable[Row]) -> str:
    """Returns the page with these rows. They replace the rows of the same versions; the other rows stay."""
    table = {row.pair: row for row in [*rows_of(page), *rows]}
    lines = [HEADER, ("---",) * len(HEADER), *(astuple(table[pair]) for pair in sorted(table))]
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{page.split(BEGIN)[0]}{BEGIN}\n\n{body}\n\n{END}{page.split(END)[1]}"


def outcome(report: Path) -> tuple[str, str]:
    """Returns the columns ``result`` and ``batches`` from a JUnit file of pytest."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    digests = set()
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[kind] += 1
        if case.get("classname", "") == DIGESTS.removesuffix(".py").replace("/", "."):
            digests.add(kind)
    result = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number or kind == "passed")
    return result, "identical" if digests == {"passed"} else "differ" if digests else ""


# --- one pair ---------------------------------------------------------------------------------------------------


def interpreter(python: str) -> str | None:
    """Returns the path of a Python of this minor version: from PATH, or the newest of pyenv's; None if no such Python starts."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    newest = sorted(pyenv.glob(f"{python}.*/bin/python"), key=lambda path: [*map(int, re.findall(r"\d+", str(path)))])
    for name in (f"python{python}", *map(str, reversed(newest))):
        show = [name, "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"]
        try:
            done = subprocess.run(show, capture_output=True, text=True)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.split()[0] == python:
            return done.stdout.split()[1]
    return None


def tested(torch: str, python: str, wheel: Path, processes: str) -> Row:
    """Tests one pair and returns its row."""
    today = datetime.date.today().isoformat()
    executable = interpreter(python)
    if executable is None:
        return Row(torch, python, "", f"not run: this machine has no Python {python}", "", today)
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        here = Path(folder) / "venv" / "bin" / "python"
        subprocess.run([executable, "-m", "venv", here.parents[1]], check=True)
        install = [here, "-m", "pip", "install", "--quiet", "--no-cache-dir", f"torch=={torch}.*", wheel, *TOOLS]
        done = subprocess.run(install, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            print(done.stderr, flush=True)
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            reason = (errors or ["pip failed"])[-1].removeprefix("ERROR:").strip().replace("|", "/")
            return Row(torch, python, "", f"not installed: {reason}", "", today)
        sources = Path(folder) / "sources"  # the tests and what they read, without the package
        shutil.copytree(ROOT / "tests", sources / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("csrc", "docs"):
            shutil.copytree(ROOT / name, sources / name)
        shutil.copy(ROOT / "pyproject.toml", sources)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        show = subprocess.run([here, "-c", SHOW], cwd=sources, env=environment, stdout=subprocess.PIPE, text=True)
        if show.returncode:
            return Row(torch, python, "", "failed: the package cannot be imported", "", today)
        report = Path(folder) / "report.xml"
        test = [here, "-m", "pytest", "-q", "-n", processes, "--maxprocesses", "8", "--dist", "worksteal"]
        test += [f"--junitxml={report}", f"--basetemp={folder}/temporary", *LAWS]
        code = subprocess.run(test, cwd=sources, env=environment).returncode
        result, batches = outcome(report) if report.is_file() else (f"failed: pytest ended with {code}", "")
        return Row(*show.stdout.split(), result, batches, today)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "pairs", nargs="*", metavar="TORCH:PYTHON", help=f"minor versions; by default {' '.join(PAIRS)}"
    )
    parser.add_argument(
        "--processes", default="logical", help="number of processes that run tests; by default one per core"
    )
    arguments = parser.parse_args()
    for pair in arguments.pairs:
        if not re.fullmatch(r"\d+\.\d+:\d+\.\d+", pair):
            parser.error(f"expected pairs such as 2.10:3.10, got {pair!r}")
    wheel = arguments.wheel.resolve()
    if not wheel.is_file():
        parser.error(
            f"expected the file of a wheel, got {arguments.wheel}, which does not exist; build one with `make wheel`"
        )
    failed = False
    for pair in arguments.pairs or PAIRS:
        row = tested(*pair.split(":"), wheel, arguments.processes)
        PAGE.write_text(with_rows(PAGE.read_text(), [row]))
        print(
            f"torch {row.torch}, Python {row.python}: {row.result}; batches: {row.batches or 'not compared'}",
            flush=True,
        )
        failed |= "failed" in row.result or row.batches == "differ"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
