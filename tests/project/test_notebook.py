"""Runs the example notebook from its first cell to its plot."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

from forked_python import python

NOTEBOOK = Path(__file__).parents[2] / "examples" / "partition_to_plot.ipynb"


README = NOTEBOOK.parents[1] / "README.md"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_first_cell_installs_what_is_missing(monkeypatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    exec(code_cells()[0], {})
    assert not commands  # the package is installed here
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(code_cells()[0], {})
    said = [line.split("pip install ")[-1] for line in README.read_text().replace("\\\n", " ").splitlines()]
    *needed, source = [shlex.split(line) for line in said if "ninja" in line or "git+" in line]
    assert commands[-1][-2:] == source
    assert {re.split(">=", word)[0] for word in commands[0]} >= {re.split(">=", word)[0] for word in needed[0]}


def test_cells_run_in_order(tmp_path: Path) -> None:
    code = code_cells()
    # The graph is smaller here. The figure is checked, because a plot without lines raises no error.
    assert "num_vertices=100000" in code[1]
    script = "\n\n".join(code).replace("num_vertices=100000", "num_vertices=5000")
    script += "\n\nfrom matplotlib import pyplot\n"
    script += "bare, *lines = pyplot.gca().lines\nassert [len(line.get_xdata()) for line in lines] == [len(alphas)] * len(policies)\n"
    script += "for line in lines:\n    values = [*line.get_ydata()]\n    assert values == sorted(values, reverse=True) and values[0] > values[-1] > 0\n"
    script += "for shown in (part, analysis, loader, loader.stats()):\n    assert shown._repr_html_().startswith('<')\n"
    environment = {**os.environ, "MPLBACKEND": "agg", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [python(), "-c", script], capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
