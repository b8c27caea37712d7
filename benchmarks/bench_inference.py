"""Measures layer-wise inference with rows in files, within a limit on memory. Writes results/inference.json.

    python benchmarks/bench_inference.py [--vertices 10300000] [--limit 4] [--memory 2GiB] [--folder DIR]

A graph of ``large_graph.py`` is generated with 128 float16 columns, and a GraphSAGE of three layers infers all vertices. Each way runs in a process of its own:

* ``in memory``: no limit and no files. Its output is the reference.
* ``in batches``: the same, but no layer runs as a product.
* ``in files``: ``scratch=`` within ``--limit`` gigabytes. The layers choose their order.
* ``pulled``: the same, but all layers are pulled. Only the first ``--pulled`` batches of the first layer run, and the time of the layer is extrapolated.

A control group (memory, version 1 or 2) sets the limit, which includes the page cache. Making the group needs root. The folder must be on a disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import process_figures, write_results
from large_graph import generate
from memory_limit import limited_group
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp.datasets import load_dataset
from salientpp.engine.pipeline import StageError
from salientpp.layerwise import layer_run, scratch
from salientpp.layerwise.call import Call
from salientpp.layerwise.inference import Inference

HIDDEN, LAYERS, CLASSES = 128, 3, 16
WAYS, FILES = ["in memory", "in batches", "in files", "pulled"], ("in files", "pulled")


class Enough(Exception):
    """Ends a run after some batches."""


def child(arguments: argparse.Namespace) -> None:
    """Runs one way in this process and prints its figures as JSON."""
    torch.set_num_threads(2)
    way, folder = arguments.way, arguments.folder
    torch.manual_seed(0)
    data = load_dataset(f"converted:{folder / 'g'}")
    model = GraphSAGE(data.num_features, HIDDEN, LAYERS, CLASSES)
    options: dict[str, Any] = {
        "out": folder / way.replace(" ", "-"),
        "dtype": torch.float32,
        "batch_size": arguments.batch_size,
    }
    if way in FILES:
        options |= {"scratch": folder / "scratch", "memory": arguments.memory}
    calls, ends, batches, counted = [], [], [0], []
    run, store, count = Inference.run, Call.store, layer_run.count_reads

    def noted(call: Inference) -> torch.Tensor:
        calls.append(call)
        return run(call)

    def stored(call: Call, first: int, last: int, rows: torch.Tensor) -> None:
        store(call, first, last, rows)
        batches[0] += 1
        ends[call.number :] = [time.perf_counter()]
        if way == "pulled" and batches[0] == arguments.pulled:
            raise Enough

    def reads(product: Any) -> scratch.Reads:
        counted.append(count(product))
        return scratch.Reads(1, 0) if way == "pulled" else counted[-1]

    if way == "in batches":
        layer_run.LayerRun._agree_on_product = lambda *_: (None, 0)
    Inference.run, Call.store, layer_run.count_reads = noted, stored, reads
    before, begin, cpu = read_bytes(), time.perf_counter(), time.process_time()
    with contextlib.suppress(Enough, StageError):
        salientpp.inference(model, data, **options)
    seconds = time.perf_counter() - begin
    call = calls[0]
    # A pulled layer takes as long as its first batches, times the number of its batches.
    scale = len(call.own_ranges) / batches[0] if way == "pulled" else 1.0
    layers = [end - start for start, end in zip([begin, *ends], ends)]
    figures = {
        "way": way,
        "seconds": seconds * scale,
        "cpu_seconds": (time.process_time() - cpu) * scale,
        "bytes_read": (read_bytes() - before) * scale,
        "seconds_by_layer": [layer * scale for layer in layers],
        "layers": 1 if way == "pulled" else LAYERS,
        "pushed": call.pushed,
        "counted": [[each.pushed, each.pulled] for each in counted],
        "peak_bytes": arguments.peak.read_text() if arguments.peak else None,
        "anonymous_bytes": process_figures()["anonymous_bytes"],
        "batches": batches[0],
    }
    if figures["peak_bytes"] is not None:
        figures["peak_bytes"] = int(figures["peak_bytes"])
    print("FIGURES " + json.dumps(figures), flush=True)


def read_bytes() -> int:
    """Bytes that this process has read from disks."""
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


def measured(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one way in a new process, after the page cache has dropped the files."""
    for path in arguments.folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, __file__, "--way", way, "--folder", str(arguments.folder)]
    command += [
        "--memory",
        arguments.memory,
        "--pulled",
        str(arguments.pulled),
        "--batch-size",
        str(arguments.batch_size),
    ]
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(limited_group(int(arguments.limit * 2**30))) if way in FILES else None
        if group is not None:
            command += ["--peak", str(group.peak)]
        process = subprocess.Popen(["sh", "-c", 'read go; exec "$@"', "sh", *command], stdin=-1, stdout=-1, text=True)
        if group is not None:
            group.take(process.pid)
        output, _ = process.communicate("go\n")
    found = [line for line in output.splitlines() if line.startswith("FIGURES ")]
    if process.returncode != 0 or not found:
        raise RuntimeError(f"{way} ended with {process.returncode}: {output}")
    figures = json.loads(found[0].removeprefix("FIGURES "))
    print(figures, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=10_300_000, help="with 10.3 M vertices, 200 M edges")
    parser.add_argument("--limit", type=float, default=4, help="GiB that processes with files may use")
    parser.add_argument("--memory", default="2GiB", help="memory= of the inference")
    parser.add_argument("--pulled", type=int, default=6, help="batches of the run that pulls")
    parser.add_argument("--batch-size", type=int, default=16384)
    parser.add_argument("--folder", type=Path, help="where files are written and removed (a temporary folder)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--peak", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        child(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="salientpp-inference-", dir=arguments.folder) as folder:
        arguments.folder = Path(folder)
        generate(arguments.folder / "g", num_vertices=arguments.vertices, num_features=128, memory="2GB")
        edges = load_dataset(f"converted:{arguments.folder / 'g'}").num_edges
        rows = [measured(way, arguments) for way in arguments.ways]
        furthest = None
        if {"in memory", "in files"} <= set(arguments.ways):
            first, second = (
                np.load(arguments.folder / way / "part-00000.npy", mmap_mode="r") for way in ("in-memory", "in-files")
            )
            furthest = max(
                float(np.abs(first[at : at + 2**20] - second[at : at + 2**20]).max())
                for at in range(0, len(first), 2**20)
            )
            print(f"largest difference {furthest:g}")
        write_results(
            "inference", rows, vertices=arguments.vertices, edges=edges, limit_gib=arguments.limit,
            memory=arguments.memory, columns=128, hidden=HIDDEN, largest_difference=furthest,
        )  # fmt: skip


if __name__ == "__main__":
    main()
