"""Times candidates in turns, makes the graphs that benchmarks share, and writes result files.

Each benchmark measures one module of the package against its peers in the same run. It writes one JSON file with machine, versions, commit, date, command
and rows of figures. ``draw.py`` draws the tables and plots of README and docs from these files; nothing is copied by hand.

Timing: candidates take turns, so that a slow minute of a shared machine affects all of them. The first turn is warm-up. CPU seconds include all threads of
the process.

Memory: as in its loaders, salientpp keeps topology, maps, VIP and large features in huge pages where the system provides them. Peers get ordinary memory, as
their users do.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric
import torch_geometric.typing
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PyGLoader
from torch_geometric.sampler import NeighborSampler

import salientpp
from salientpp.datasets import synthetic

RESULTS = Path(__file__).parent / "results"


#: PyG's sampling backends that are installed, in PyG's order of preference.
PYG = [
    name
    for name, is_there in (
        ("PyG over pyg-lib", torch_geometric.typing.WITH_PYG_LIB),
        ("PyG over torch-sparse", torch_geometric.typing.WITH_TORCH_SPARSE),
    )
    if is_there
]


class PyGSampler(NeighborSampler):
    """Runs PyG's sampler with one of its backends, so that both can be measured in one process.

    Args:
        backend: a name in ``PYG``.
    """

    def __init__(self, backend: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._over_pyg_lib = backend == "PyG over pyg-lib"

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        before = torch_geometric.typing.WITH_PYG_LIB
        torch_geometric.typing.WITH_PYG_LIB = self._over_pyg_lib
        try:
            return super()._sample(*args, **kwargs)
        finally:
            torch_geometric.typing.WITH_PYG_LIB = before


def pyg_loader(backend: str, data: Data, fanouts: list[int], input_nodes: Any = None, **options: Any) -> PyGLoader:
    """Returns PyG's ``NeighborLoader`` with a backend named in ``PYG``."""
    return PyGLoader(data, fanouts, input_nodes, neighbor_sampler=PyGSampler(backend, data, fanouts), **options)


def generated(num_vertices: int, degree: float, num_features: int) -> Data:
    """Returns the generated graph of ``salientpp.datasets.synthetic``, with float32 features of noise.

    Topology, labels and splits are kept in a temporary folder that the scripts share, because the largest graph takes minutes to make.
    """
    folder = Path(tempfile.gettempdir()) / f"salientpp-bench-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{num_vertices}-{degree:g}.npz"
    if not path.is_file():
        made = synthetic(num_vertices=num_vertices, average_degree=degree, num_features=1)
        part = path.with_suffix(f".{os.getpid()}")
        with part.open("wb") as file:
            arrays = {name: made[name].numpy() for name in ("y", "train_mask", "val_mask", "test_mask")}
            np.savez(file, edge_index=made.edge_index.int().numpy(), **arrays)
        part.rename(path)
    with np.load(path) as arrays:
        data = Data(**{name: torch.from_numpy(arrays[name]) for name in arrays.files}, num_nodes=num_vertices)
    data.edge_index = data.edge_index.long()
    data.x = torch.randn(num_vertices, num_features, generator=torch.Generator().manual_seed(0))
    return data


def ours_and_pygs(data: Data, fanouts: list[int], **options: Any) -> dict[str, DataLoader]:
    """Returns our loader of the training seeds and PyG's with each backend that is installed, all settled."""
    options = {"input_nodes": data.train_mask, "shuffle": True, **options}
    loaders = {"salientpp": salientpp.NeighborLoader(data, fanouts, **options)}
    loaders |= {name: pyg_loader(name, data, fanouts, **options) for name in PYG}
    settle()
    return loaders


def settle() -> None:
    """Waits until loaders have moved their features into huge pages, which they do once, in a background thread."""
    for thread in threading.enumerate():
        if thread.name == "salientpp-pages":
            thread.join()


def resident_bytes(peak: bool = False) -> int:
    """Resident bytes of this process, from /proc (Linux): now, or the peak since the start or ``reset_peak``."""
    name = "VmHWM" if peak else "VmRSS"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Starts the peak at the present resident memory, after memory that was freed has gone back to the system (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def cost_of(call: Callable[[], Any]) -> dict[str, float]:
    """Calls a function. Returns wall-clock and CPU seconds, and peak memory: in total, and above the memory before the call."""
    reset_peak()
    before, started, cpu = resident_bytes(), time.perf_counter(), time.process_time()
    call()
    seconds, cpu, peak = time.perf_counter() - started, time.process_time() - cpu, resident_bytes(peak=True)
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": peak, "above_start_bytes": peak - before}


def run_step(script: str, step: str, **options: object) -> Any:
    """Runs ``script --one STEP`` with further options in a process of its own. Returns what it prints last, read as JSON."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([sys.executable, script, "--one", step, *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{step} with {' '.join(words)} failed: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def process_figures(pid: int | str = "self") -> dict[str, float]:
    """CPU seconds and memory of one process, from /proc (Linux). Zeros if the process has ended.

    CPU seconds include children that have ended. Anonymous pages are pages that belong to no file.
    """
    figures = {"cpu_seconds": 0.0, "anonymous_bytes": 0, "resident_bytes": 0}
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return figures
    figures["cpu_seconds"] = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    for line in lines:
        for name, kind in (("RssAnon:", "anonymous_bytes"), ("VmRSS:", "resident_bytes")):
            if line.startswith(name):
                figures[kind] = int(line.split()[1]) * 1024
    return figures


def children(pid: int | str = "self") -> list[int]:
    """Children of a process, from /proc (Linux). Forked children that still run the parent's program are left out: their memory is the parent's."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        program = Path(f"/proc/{pid}/cmdline").read_bytes()
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [
                    child
                    for child in map(int, task.read_text().split())
                    if Path(f"/proc/{child}/cmdline").read_bytes() != program
                ]
    return found


def describe_run() -> dict[str, Any]:
    """Returns machine, versions, commit, date and command."""
    commit = ""
    with contextlib.suppress(FileNotFoundError):  # git is not installed
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
        ).stdout.strip()
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {
        "machine": {
            "cpu": cpu or platform.processor(),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "torch_geometric": torch_geometric.__version__,
            "salientpp": _version(),
        },
        "commit": commit,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": "python "
        + " ".join([os.path.relpath(sys.argv[0]), *(_anonymous(argument) for argument in sys.argv[1:])]),
    }


def _version() -> str:
    from importlib.metadata import version

    return version(salientpp.__name__)


def _anonymous(argument: str) -> str:
    """Drops folders of this machine from an argument and keeps the file's name."""
    kind, path = re.fullmatch(r"(.*[:=])?(.*)", argument).groups(default="")
    return f"{kind}{os.path.basename(path)}" if os.path.isabs(path) or path.startswith("..") else argument


def seconds_on_device(function: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of one call: on a CUDA device those between two events, elsewhere those of the host."""
    if device.type != "cuda":
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def write_results(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS, **more: Any) -> Path:
    """Writes ``results/<name>.json``, or the file of this name in another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(one_row_a_line({**describe_run(), **more, "rows": rows}))
    print(f"wrote {path}")
    return path


def one_row_a_line(result: dict[str, Any]) -> str:
    """Formats JSON with one line per row, so that files stay short and a changed row is a changed line."""
    entries = []
    for key, value in result.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def take_turns(candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, Any]]:
    """Times each candidate ``repeats`` times, alternating, after one warm-up each.

    Returns:
        Median and quartiles of seconds and of CPU seconds, and the result of the last call, by name.
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
    return {
        name: {"seconds": spread(seconds[name]), "cpu_seconds": spread(cpu[name]), "last": last[name]}
        for name in candidates
    }


def spread(values: list[float]) -> dict[str, float]:
    """Returns the median, the quartiles and the number of values."""
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "low": quartiles[0], "high": quartiles[2], "repeats": len(values)}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    """Trains an epoch on batches whose first vertices are the seeds."""
    for batch in batches:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        optimizer.zero_grad()
        cross_entropy(out, batch.y[: batch.batch_size]).backward()
        optimizer.step()
