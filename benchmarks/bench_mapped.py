"""Measures gathering rows of a mapped file of which only half is in memory. Writes results/mapped.json.

    python benchmarks/bench_mapped.py [--gigabytes 4] [--repeats 5]

The file has rows of 256 and of 1,024 bytes. Before each turn it is dropped from the page cache, and a random half of its megabytes is read again. Then random
rows, as many as a batch has, are gathered by the row kernel and by torch's ``index_select`` of the mapped tensor. For comparison, 32 threads read the pages of
these rows with ``pread``. The system counts what the disk reads. The temporary folder must be on a disk, not in memory.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from common import write_results

from salientpp import ops

PIECE = 2**20


def prepare(file: int, size: int, draw: np.random.Generator) -> None:
    """Drops the file from memory, except a random half of its pieces."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    for piece in np.sort(draw.permutation(size // PIECE)[: size // PIECE // 2]):
        os.pread(file, PIECE, int(piece) * PIECE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's warning about a map that is not writable
    draw = np.random.default_rng(0)
    found = []
    with tempfile.NamedTemporaryFile() as storage, ThreadPoolExecutor(32) as readers:
        size = int(arguments.gigabytes * 2**30) // PIECE * PIECE
        block = draw.bytes(64 * PIECE)
        for begin in range(0, size, len(block)):
            storage.write(block[: size - begin])
        storage.flush()
        file = storage.fileno()
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead for pread
        for row_bytes in (256, 1024):
            turns: dict[str, list[dict[str, float]]] = {}
            for turn in range(arguments.repeats + 1):
                index = torch.from_numpy(draw.integers(0, size // row_bytes, arguments.rows))
                pages = torch.unique(index * row_bytes // mmap.PAGESIZE)
                pages = pages[torch.randperm(pages.numel())].tolist()

                def kernel(rows: torch.Tensor, index: torch.Tensor = index) -> None:
                    ops.gather_rows(rows, index, torch.empty((index.numel(), rows.size(1)), dtype=rows.dtype), None)

                def by_torch(rows: torch.Tensor, index: torch.Tensor = index) -> None:
                    rows.index_select(0, index)

                def disk(rows: torch.Tensor, pages: list[int] = pages) -> None:
                    def read(some: list[int]) -> None:
                        for page in some:
                            os.pread(file, mmap.PAGESIZE, page * mmap.PAGESIZE)

                    list(readers.map(read, [pages[k::32] for k in range(32)]))

                for name, way in (("kernel", kernel), ("torch", by_torch), ("disk", disk)):
                    prepare(file, size, draw)
                    map_ = mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
                    rows = torch.frombuffer(map_, dtype=torch.float16).view(-1, row_bytes // 2)
                    entry = measure(way, rows)
                    del rows, map_
                    if turn:
                        turns.setdefault(name, []).append(entry)
            for name, entries in turns.items():
                found.append(
                    {
                        "row_bytes": row_bytes,
                        "way": name,
                        **{key: statistics.median(entry[key] for entry in entries) for key in entries[0]},
                    }
                )
                print(found[-1], flush=True)
    write_results("mapped", found, rows_per_turn=arguments.rows, gigabytes=arguments.gigabytes)


def measure(way: Callable[[torch.Tensor], None], rows: torch.Tensor) -> dict[str, float]:
    blocks, cpu, begin = resource.getrusage(resource.RUSAGE_SELF).ru_inblock, time.process_time(), time.perf_counter()
    way(rows)
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "bytes_read": 512.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - blocks),
    }


if __name__ == "__main__":
    main()
