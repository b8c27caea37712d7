"""Runs one loader for score.py: ``python score_worker.py LOADER.py FOLDER OPTIONS``. Reads commands from stdin and answers with lines of JSON on stdout.

It needs numpy, torch and the loader's own library, in whatever versions that library works with.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

#: Number of batches whose edges and rows are checked. Seeds are checked over the whole epoch.
CHECKED = 5


def main() -> None:
    file, folder, options = Path(sys.argv[1]), Path(sys.argv[2]), SimpleNamespace(**json.loads(sys.argv[3]))
    torch.set_num_threads(max(1, options.workers))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    try:
        sys.path.insert(0, str(file.parent))
        spec.loader.exec_module(module)
    except Exception as error:
        # A library may fail to load in many ways where it does not fit this torch.
        say(name=file.stem, failed=f"not installed here: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        return
    about = {"name": module.NAME, "versions": versions(module)}
    try:
        graph = SimpleNamespace(
            **{name: torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("edge_index", "x", "y", "seeds")}
        )
        graph_bytes = pss()
        loader = module.make(graph, options)
        say(**about, memory_of_graph=graph_bytes)
        obey(module, loader, graph, options)
    except Exception as error:
        traceback.print_exc()
        say(**about, failed=f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}")


def obey(module: ModuleType, loader: object, graph: SimpleNamespace, options: SimpleNamespace) -> None:
    iterator = None
    for line in sys.stdin:
        command, *number = line.split()
        if command == "check":
            wrong = fault(module, loader, graph, options)
            say(**({"failed": f"wrong batches: {wrong}"} if wrong else {"checked": True}))
        elif command == "turn":
            started = time.perf_counter()
            iterator = iter(loader)
            next(iterator)
            first = time.perf_counter() - started
            for _ in range(2 * options.workers):  # batches that workers had made before
                next(iterator)
            started, cpu = time.perf_counter(), cpu_seconds()
            taken = sum(1 for _ in itertools.islice(iterator, int(number[0])))
            wall, cpu = time.perf_counter() - started, cpu_seconds() - cpu
            say(batches_per_second=taken / wall, cpu_seconds_per_batch=cpu / taken, first_batch_seconds=first)
        elif command == "close":
            iterator = None
            say()


def fault(module: ModuleType, loader: object, graph: SimpleNamespace, options: SimpleNamespace) -> str:
    """Returns what is wrong with the batches of an epoch, or an empty text.

    Each hop holds for each target as many neighbours of the graph as the fanout asks for, each of them once. A vertex has its row of the graph.
    Every seed comes once.
    """
    num_vertices = len(graph.x)
    edges = torch.unique(graph.edge_index[1] * num_vertices + graph.edge_index[0])
    degree = torch.bincount(edges // num_vertices, minlength=num_vertices)
    seeds = []
    for number, batch in enumerate(loader):
        found = module.describe(batch)
        seeds.append(found.n_id[: found.batch_size])
        if number >= CHECKED:
            continue
        if not torch.equal(found.x, graph.x[found.n_id]):
            return "rows differ from those of the graph"
        for hop, (source, target) in enumerate(found.hops):
            drawn = found.n_id[target] * num_vertices + found.n_id[source]
            at = torch.searchsorted(edges, drawn).clamp(max=len(edges) - 1)
            if not torch.equal(edges[at], drawn):
                return f"hop {hop} has edges that the graph does not have"
            if len(torch.unique(drawn)) != len(drawn):
                return f"hop {hop} has an edge twice"
            targets, counts = torch.unique(found.n_id[target], return_counts=True)
            if len(found.hops) < len(options.fanouts):  # the loader does not tell the hops of edges
                right = bool((counts <= max(options.fanouts)).all())
            else:
                right = torch.equal(counts, degree[targets].clamp(max=options.fanouts[hop]))
            if not right:
                return f"hop {hop} has other numbers of neighbours than fanouts {options.fanouts} ask for"
    if not torch.equal(torch.cat(seeds).sort().values, graph.seeds.sort().values):
        return "an epoch does not hold every seed once"
    return ""


def versions(module: ModuleType) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    return found | {name: importlib.metadata.version(name) for name in module.DISTRIBUTIONS}


def cpu_seconds() -> float:
    """CPU seconds of this process and its living worker processes (Linux)."""
    ticks, todo = 0, [os.getpid()]
    while todo:
        pid = todo.pop()
        try:
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                todo += map(int, task.read_text().split())
        except OSError:  # it has ended
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def pss() -> int:
    """Proportional set size of this process in bytes (Linux)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def say(**answer: object) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
