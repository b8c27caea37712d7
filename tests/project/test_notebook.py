"""Runs the example notebook from its first cell to its plot."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from forked_python import python

NOTEBOOK = Path(__file__).parents[2] / "examples" / "partition_to_plot.ipynb"


def test_cells_run_in_order(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    # The graph is smaller here. The last cell's figure is checked, because a plot without lines raises no error.
    assert "num_vertices=100000" in code[0]
    script = "\n\n".join(code).replace("num_vertices=100000", "num_vertices=5000")
    script += "\n\nlines = pyplot.gca().lines\nassert [len(line.get_xdata()) for line in lines] == [len(alphas)] * 3\n"
    script += "for policy, values in rows.items():\n    assert values == sorted(values, reverse=True) and values[0] > values[-1] > 0, policy\n"
    environment = {**os.environ, "MPLBACKEND": "agg", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [python(), "-c", script], capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
