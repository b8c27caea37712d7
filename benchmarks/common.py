"""How is something timed here, and what does a result file hold?

A benchmark module measures one module of the package, against its peers in the same run, and writes one JSON file: machine,
versions, commit, date, command line, and rows of figures. Tables and plots in README and docs are drawn from these files by
``benchmarks/draw.py``; nothing is copied by hand.

Timing: candidates take turns, so that a slow minute of a shared machine hits all of them; the first turn is warm-up. CPU seconds are
those of the process, all threads together.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import salientpp

RESULTS = Path(__file__).parent / "results"


def describe_run() -> dict[str, Any]:
    """Machine, versions, commit, date and command."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return {
        "machine": {
            "cpu": cpu or platform.processor(),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "salientpp": _version()},
        "commit": commit,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *(_anonymous(argument) for argument in sys.argv[1:])]),
    }


def _version() -> str:
    from importlib.metadata import version

    return version(salientpp.__name__)


def _anonymous(argument: str) -> str:
    """Folders of this machine mean nothing to a reader: keep the file's name."""
    kind, colon, path = argument.rpartition(":")
    return f"{kind}{colon}{os.path.basename(path)}" if os.path.isabs(path) or path.startswith("..") else argument


def write_results(name: str, rows: list[dict[str, Any]], **more: Any) -> Path:
    """Write ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(one_row_a_line({**describe_run(), **more, "rows": rows}))
    print(f"wrote {path}")
    return path


def one_row_a_line(result: dict[str, Any]) -> str:
    """JSON whose lists of rows have a line per row: short to store, and a change of one row is a change of one line."""
    entries = []
    for key, value in result.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def take_turns(candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, Any]]:
    """Time each candidate ``repeats`` times, alternating, after one warm-up each.

    Returns:
        For each name: median and quartiles of seconds and of CPU seconds, and what the last call returned.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    cpu: dict[str, list[float]] = {name: [] for name in candidates}
    last: dict[str, Any] = {}
    for turn in range(repeats + 1):
        for name, candidate in candidates.items():
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            last[name] = candidate()
            if turn:
                seconds[name].append(time.perf_counter() - wall_start)
                cpu[name].append(time.process_time() - cpu_start)
    return {name: {"seconds": _spread(seconds[name]), "cpu_seconds": _spread(cpu[name]), "last": last[name]} for name in candidates}


def _spread(values: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "low": quartiles[0], "high": quartiles[2], "repeats": len(values)}
