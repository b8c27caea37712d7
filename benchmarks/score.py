"""Measures every loader that is installed on one graph, checks its batches, and writes one JSON and one table.

    python benchmarks/score.py [--graph synthetic:num_vertices=500000,average_degree=40,num_features=128]
    python benchmarks/score.py --loader my_loader.py                       # a loader of your own beside the others
    python benchmarks/score.py --python dgl_graphbolt=venv/bin/python      # a loader that needs another torch

Loaders are the files of benchmarks/loaders/. benchmarks/loaders/README.md says how to add one. Each runs in a process of its own, which may have another
Python. The processes take turns, one works at a time. Before the turns, the batches of an epoch are checked against the graph; a loader whose batches are
wrong gets no figures.

Figures: batches per second and CPU seconds per batch, once the loader is running; the seconds until the first batch of an epoch; and memory beyond the graph.
All of them include worker processes. Memory is the proportional set size, which counts shared pages once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import write_results
from drawing.score import draw_score
from torch_geometric.data import Data

from salientpp.datasets import load_dataset

HERE = Path(__file__).parent
LOADERS = sorted((HERE / "loaders").glob("[!_]*.py"))


class Contestant:
    """A loader in a process of its own, which carries out one command at a time."""

    def __init__(self, file: Path, python: str, folder: Path, options: dict[str, Any]) -> None:
        command = [python, str(HERE / "score_worker.py"), str(file), str(folder), json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._answer()

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def memory(self) -> int:
        """Proportional set size of the process and its workers, in bytes."""
        total = 0
        for process in (top := psutil.Process(self._process.pid), *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        return {"failed": f"its process ended with exit status {self._process.wait()}; its error is above"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="synthetic:num_vertices=500000,average_degree=40,num_features=128")
    parser.add_argument("--fanouts", type=lambda text: [int(word) for word in text.split(",")], default=[15, 10, 5])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--batches", type=int, default=10, help="batches of a turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each loader")
    parser.add_argument(
        "--loader", type=Path, action="append", default=[], help="one more file like benchmarks/loaders/*.py"
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the Python of a loader, by the name of its file",
    )
    parser.add_argument("--out", default="score", help="name of the file in benchmarks/results (default: %(default)s)")
    arguments = parser.parse_args()
    pythons = dict(word.split("=", 1) for word in arguments.python)
    files = [*LOADERS, *arguments.loader]
    if unknown := set(pythons) - {file.stem for file in files}:
        parser.error(f"--python: expected one of {', '.join(file.stem for file in files)}, got {', '.join(unknown)}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="salientpp-score-") as folder:
        graph = write_graph(load_dataset(arguments.graph), Path(folder))
        for workers in arguments.workers:
            options = {"fanouts": arguments.fanouts, "batch_size": arguments.batch_size, "workers": workers}
            rows += measured(files, pythons, Path(folder), options, arguments.batches, arguments.repeats)
    result = {"graph": arguments.graph, **graph, "fanouts": arguments.fanouts, "batch_size": arguments.batch_size}
    path = write_results(arguments.out, rows, **result)
    print(draw_score(json.loads(path.read_text())))


def write_graph(data: Data, folder: Path) -> dict[str, int]:
    """Writes the arrays that every loader gets: ``edge_index`` int64 [2, E], ``x`` float32 [N, F], ``y`` int64 [N], and ``seeds`` int64: training vertices."""
    seeds = data.train_mask.nonzero().flatten()
    arrays = {"edge_index": data.edge_index, "x": data.x.float(), "y": data.y, "seeds": seeds}
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values.numpy())
    return {"vertices": data.num_nodes, "edges": data.num_edges, "features": data.num_features, "seeds": len(seeds)}


def measured(
    files: list[Path], pythons: dict[str, str], folder: Path, options: dict[str, Any], batches: int, repeats: int
) -> list[dict[str, Any]]:
    """Returns a row for each loader."""
    rows: list[dict[str, Any]] = []
    with started(files, pythons, folder, options) as contestants:
        turns: dict[Path, list[dict[str, Any]]] = {}
        for file, contestant in contestants.items():
            checked = contestant.about if "failed" in contestant.about else contestant.ask("check")
            rows.append({"file": file.stem, "workers": options["workers"], **contestant.about, **checked})
            if "failed" not in checked:
                turns[file] = []
            print(f"{file.stem}, {options['workers']} workers: {checked}", file=sys.stderr, flush=True)
        for _ in range(repeats):
            for file, of_file in turns.items():
                turn = contestants[file].ask(f"turn {batches}")
                turn["memory"] = contestants[file].memory()
                of_file.append(turn | contestants[file].ask("close"))
    by_file = {row["file"]: row for row in rows}
    for file, of_file in turns.items():
        for name in ("batches_per_second", "cpu_seconds_per_batch", "first_batch_seconds"):
            values = [turn[name] for turn in of_file]
            by_file[file.stem][name] = statistics.median(values)
            by_file[file.stem][f"{name}_of_turns"] = sorted(values)
        by_file[file.stem]["memory_bytes"] = max(turn["memory"] for turn in of_file)
    return rows


@contextlib.contextmanager
def started(
    files: list[Path], pythons: dict[str, str], folder: Path, options: dict[str, Any]
) -> Iterator[dict[Path, Contestant]]:
    contestants: dict[Path, Contestant] = {}
    try:
        for file in files:
            contestants[file] = Contestant(file, pythons.get(file.stem, sys.executable), folder, options)
        yield contestants
    finally:
        for contestant in contestants.values():
            contestant.end()


if __name__ == "__main__":
    main()
