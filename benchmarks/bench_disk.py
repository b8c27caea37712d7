"""Measures batches whose rows are in a mapped file of five times the memory. Writes results/disk.json.

    python benchmarks/bench_disk.py [--vertices 6000000] [--seconds 45]

A generated graph has rows of 512 bytes. Each candidate runs alone, in a process of its own, with a memory limit. The limit holds a fifth of the rows, and
300 MB for batches in flight. The system counts the page cache and what the candidate allocates. Topology and interpreter are in memory before, and are not
counted. The page cache is empty at first. A third of the time is warm-up. First, the disk reads 4 KiB at random and 256 KiB in order.

Candidates:

* ``index_select``: torch's operator on the memory map, as PyG's loaders use it. It gets small batches, because a large one takes minutes.
* ``map``: the loader over the memory map. It requests the pages of a batch before it reads them.
* ``pread``: 32 threads read the pages of a batch, each page once, through the page cache.
* ``read_ahead``: the option, with 85 % of a fifth of the rows.

The temporary folder must be on a disk. The control group needs root.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from common import write_results
from large_graph import generate
from memory_limit import limited

from salientpp import Graph, NeighborLoader, ops
from salientpp.datasets import load_dataset

FANOUTS, BATCH, WIDTH = [10, 10], 512, 128
#: Seeds per batch where they differ: with BATCH seeds, a single batch takes minutes.
BATCHES = {"index_select": 16}
WAYS = ("index_select", "map", "pread", "read_ahead")


class Selected:
    """Rows by torch's ``index_select`` of the map."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.shape, self.dtype = rows, rows.shape, rows.dtype

    def take(self, index: torch.Tensor, out: torch.Tensor, out_index: torch.Tensor | None = None) -> None:
        taken = self.rows.index_select(0, index)
        if out_index is None:
            out.copy_(taken)
        else:
            out[out_index] = taken


class Read:
    """Rows by ``pread`` in 32 threads, through the page cache, each page of a batch once and for itself."""

    def __init__(self, rows: torch.Tensor, path: Path) -> None:
        self.shape, self.dtype = rows.shape, rows.dtype
        self.file, self.offset = os.open(path, os.O_RDONLY), path.stat().st_size - rows.nbytes
        os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_RANDOM)

    def take(self, index: torch.Tensor, out: torch.Tensor, out_index: torch.Tensor | None = None) -> None:
        rows, order = torch.sort(index)
        places = order if out_index is None else out_index[order]
        found = ops.read_rows(
            self.file, self.offset, self.shape[0], rows, ops.bytes_of(out).view(len(out), -1), places, 0, 32
        )
        if int(found[1]) >= 0:
            raise OSError(f"the file of rows cannot be read at byte {int(found[1])}")


def disk_rates(path: Path) -> dict[str, float]:
    """Returns bytes per second of 4 KiB at random, and of 256 KiB in order, with 32 requests at once and without the page cache."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    found = {}
    for name, row_bytes, number in (("random", 2**12, 50_000), ("in_order", 2**18, 4_000)):
        there = path.stat().st_size // row_bytes
        index = torch.randint(there, (number,)).sort().values if name == "random" else torch.arange(min(there, number))
        # In random order for the disk: the threads take blocks in turn, and each of these is a block of its own.
        out = torch.empty((1, row_bytes), dtype=torch.uint8)
        begun = time.perf_counter()
        read = ops.read_rows(file, 0, there, index, out, torch.zeros_like(index), 0, 32)
        found[name] = float(read[0]) / (time.perf_counter() - begun)
    os.close(file)
    return found


def lock(tensor: torch.Tensor) -> None:
    """Keeps a mapped array in memory."""
    if ctypes.CDLL(None).mlock(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)):
        raise OSError("cannot lock the topology in memory; run as root")


def measure(root: Path, way: str, seconds: float, share: float) -> dict[str, Any]:
    """Measures one candidate, in this process."""
    warnings.simplefilter("ignore")
    data = load_dataset(f"converted:{root}")
    rows, path = data.x, rows_file(root)
    topology = Graph.from_data(data)
    for array in (topology.indptr, topology.indices):
        lock(array)
    limit = int(rows.nbytes * share)
    sync_and_drop(path)
    options: dict[str, Any] = {"num_workers": 2, "batch_size": BATCHES.get(way, BATCH), "shuffle": True, "seed": 0}
    if way == "index_select":
        options["columns"] = {"x": Selected(rows)}
    if way == "pread":
        options["columns"] = {"x": Read(rows, path)}
    if way == "read_ahead":
        options["read_ahead"] = int(limit * 0.85)  # the batches in flight take the rest
    with limited(limit + 300 * 2**20):
        loader = NeighborLoader(data, FANOUTS, data.train_mask, **options)
        begun, number, delivered, blocks, cpu = time.perf_counter(), 0, 0, 0, 0.0
        counted: float | None = None
        while True:
            for batch in loader:
                now = time.perf_counter()
                if counted is None:
                    if now - begun > seconds / 3:
                        counted = now
                        blocks, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_inblock, time.process_time()
                    continue
                number += 1
                delivered += batch.x.size(0)
                if now - counted > seconds * 2 / 3:
                    spent = now - counted
                    read = 512 * (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - blocks)
                    return {
                        "way": way, "rows_per_second": delivered / spent, "bytes_read_per_row": read / delivered,
                        "cpu_seconds_per_row": (time.process_time() - cpu) / delivered, "rows_per_batch": delivered / number, "batches": number,
                        "limit_bytes": limit, "memory_used": loader.memory_used(),
                    }  # fmt: skip


def rows_file(root: Path) -> Path:
    """Returns the file of the rows in a converted graph."""
    return next(root.glob("*.x.npy"))


def sync_and_drop(path: Path) -> None:
    """Drops a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=6_000_000)
    parser.add_argument("--degree", type=float, default=15)
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--share", type=float, default=0.2, help="memory limit as a fraction of the rows")
    parser.add_argument("--folder", type=Path, help="keep the graph here, and use it if it exists")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(Path(arguments.one[0]), arguments.one[1], arguments.seconds, arguments.share)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        root = make(folder, arguments.vertices, arguments.degree)
        path = rows_file(root)
        sync_and_drop(path)
        rates, found = disk_rates(path), []
        print(rates, flush=True)
        for way in arguments.ways.split(","):
            command = [
                sys.executable, __file__, "--one", str(root), way, "--seconds", str(arguments.seconds), "--share", str(arguments.share)
            ]  # fmt: skip
            found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
            print(found[-1], flush=True)
        size = path.stat().st_size
    write_results(
        "disk", found, rates=rates, file_bytes=size, vertices=arguments.vertices, share=arguments.share, batch_size=BATCH,
        fanouts=FANOUTS, row_bytes=WIDTH * 4, seconds=arguments.seconds,
    )  # fmt: skip


def make(folder: Path, num_vertices: int, degree: float) -> Path:
    """Makes the converted graph, unless it is there."""
    root = folder / f"disk-{num_vertices}-{degree:g}"
    if not root.exists():
        begun = time.perf_counter()
        generate(
            root, num_vertices=num_vertices, average_degree=degree, num_features=WIDTH, dtype="fp32", train_fraction=0.2, memory="2GB",
        )  # fmt: skip
        print(f"generated in {time.perf_counter() - begun:.0f} s", flush=True)
    return root


if __name__ == "__main__":
    main()
