"""Measures time and memory of each step of partitioning as graphs grow. Writes results/scale.json.

    python benchmarks/bench_scale.py [--vertices 500000 1000000 ...] [--graphs DIR ...] [--degree 20 ...] [--parts 8] [--folder DIR]

For each size ``large_graph.py`` writes a graph with 128 float16 columns. ``salientpp partition converted:`` partitions it for fanouts 15,10,5 and
batches of 1024. Each runs in a process of its own with two threads. Meanwhile /proc is read 50 times a second. The figures are wall-clock and CPU
time, and the peak memory of each step, summed over the process and its children. *Anonymous* memory is taken by arrays and is not returned before
they are freed. *Resident* memory also has the pages of libraries and mapped files. They belong to the page cache too and give way if memory is short;
pages that processes share count once for each. The steps are those that the command prints. The only other process is KaMinPar's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import children, process_figures, write_results

FEATURES, FANOUTS, BATCH_SIZE, THREADS = 128, "15,10,5", 1024, 2

GENERATOR = Path(__file__).with_name("large_graph.py")
SALIENTPP = [sys.executable, "-c", "import sys; from salientpp.cli import main; sys.exit(main())"]

BEFORE = "VIP weights, undirected graph, clusters"

#: The command's line at the beginning of a step -> the name of the step here.
STEPS = {
    "loading": "start and reading",
    "reading": "start and reading",
    "assigning": BEFORE,
    "computing": "VIP",
    "writing": "writing",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--vertices", type=int, nargs="*", default=[500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000]
    )
    parser.add_argument(
        "--graphs", type=Path, nargs="*", default=[], help="graphs that were generated before, in addition"
    )
    parser.add_argument(
        "--degree", type=float, nargs="+", default=[20.0], help="average degrees, for every number of vertices"
    )
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--method", default="kaminpar")
    parser.add_argument("--refine", action="store_true")
    parser.add_argument("--memory", default="1GB", help="memory for generating graphs")
    parser.add_argument("--results", default="scale", help="name of the result file")
    parser.add_argument("--folder", type=Path, help="where files are written and removed (a temporary folder)")
    arguments = parser.parse_args()
    rows, quality = [], []
    sizes = [(vertices, degree) for vertices in arguments.vertices for degree in arguments.degree]
    for given, degree in [*sizes, *((graph, None) for graph in arguments.graphs)]:
        folder = Path(tempfile.mkdtemp(prefix="salientpp-scale-", dir=arguments.folder))
        graph, found = folder / "g", []
        try:
            if isinstance(given, Path):
                graph = given
            else:
                options = ["--num-vertices", given, "--average-degree", degree, "--num-features", FEATURES]
                found += watch(
                    [sys.executable, GENERATOR, graph, *options, "--memory", arguments.memory], folder, "generate"
                )
            workload = ["--num-neighbors", FANOUTS, "--batch-size", BATCH_SIZE, "--method", arguments.method]
            workload.append("--refine" if arguments.refine else "--no-refine")
            found += watch(
                [
                    *SALIENTPP,
                    "partition",
                    f"converted:{graph}",
                    folder / "parts",
                    "--parts",
                    arguments.parts,
                    *workload,
                ],
                folder,
            )
            made = json.loads((graph / "manifest.json").read_text())
            size = {"vertices": made["node_types"][0]["num_vertices"], "edges": made["edge_types"][0]["num_edges"]}
            rows += [{**size, **row} for row in found]
            quality.append({**size, **json.loads((folder / "parts" / "manifest.json").read_text())["quality"]})
            write_results(
                arguments.results,
                rows,
                quality=quality,
                parts=arguments.parts,
                method=arguments.method,
                refine=arguments.refine,
                features=FEATURES,
                fanouts=FANOUTS,
                batch_size=BATCH_SIZE,
                threads=THREADS,
            )
        finally:
            shutil.rmtree(folder)


def watch(command: list, folder: Path, only: str | None = None) -> list[dict]:
    """Runs the command and returns a row for each step."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [*map(str, command)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=variables,
    )
    said: list[str] = []
    reader = threading.Thread(target=lambda: [said.append(line) for line in process.stderr], daemon=True)
    reader.start()
    rows: dict[str, dict] = {}
    before, cpu_before, had_child = time.perf_counter(), 0.0, False
    while process.poll() is None:
        mine = process_figures(process.pid)
        others = [process_figures(pid) for pid in children(process.pid)]
        words = [match[1] for line in said if (match := re.match(r" *[\d.]+ s  (\w+)", line))]
        step = only or STEPS.get(words[-1] if words else "loading", "writing")
        if step == BEFORE:
            had_child = had_child or bool(others)
            step = "KaMinPar" if others else "balancing" if had_child else step
        now, cpu = time.perf_counter(), mine["cpu_seconds"] + sum(other["cpu_seconds"] for other in others)
        row = rows.setdefault(
            step, {"step": step, "seconds": 0.0, "cpu_seconds": 0.0, "anonymous_bytes": 0, "resident_bytes": 0}
        )
        row["seconds"] += now - before
        row["cpu_seconds"] += max(0.0, cpu - cpu_before)
        for kind in ("anonymous_bytes", "resident_bytes"):
            row[kind] = max(row[kind], mine[kind] + sum(other[kind] for other in others))
        before, cpu_before = now, max(cpu, cpu_before)
        time.sleep(0.02)
    reader.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed: {''.join(said)}")
    for row in rows.values():
        print(row, flush=True)
    return list(rows.values())


if __name__ == "__main__":
    main()
