"""Measures the memory of ranks in jobs with storage ranks, for ``bench_storage.py``.

:func:`of_trainers`: two ranks train with a memory budget, on a large graph that two ranks store, with the topology in parts. *Beyond libraries* is the resident
memory of a process minus what it had before it opened the graph. A first job on a small graph in the same process has loaded all libraries by then. A first
job on the large graph computes the inclusion probabilities of the joined parts, which the directory keeps. A second job does not. Both are measured.

The law: the highest memory in an epoch is at most the budget and the most memory that batches in flight take. After the epoch, it is at most the budget and
the pools of buffers, which stay. Memory of batches in flight has two parts. One are the pools, ``batches`` and ``exchange`` of ``memory_used()``, in full.
The other are blocks of the C library that are in use while batches are in flight, and not after the epoch. Everything else must fit into the budget. That is
rows in the cache, their ids, seeds, tables and working memory of threads, freed memory that the C library keeps, and mapped pages of files.

:func:`of_slow_trainer`: a rank trains on one rank's rows with fanouts [50, 50], and sleeps after each batch or does not. The law: the anonymous memory of the
rank that stores does not grow from batch to batch, and is no larger if the other rank sleeps.
"""

from __future__ import annotations

import argparse
import bisect
import ctypes
import gc
import itertools
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import reset_peak, resident_bytes
from large_graph import generate

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import load_dataset, synthetic

TRAINERS, STORAGE, PARTS = 2, 2, 4
FANOUTS, FEATURES = [15, 10, 5], 128
SLOW_FANOUTS, SLOW_BATCH = [50, 50], 512
SAMPLE_SECONDS = 0.05


def of_trainers(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the memory of the rank that trains and had the highest peak, in bytes."""
    small, root = folder / "small", arguments.large_root or folder / "large"
    few = synthetic(num_vertices=3000, num_features=FEATURES, train_fraction=0.2)
    salientpp.partition(few, PARTS, small, FANOUTS, arguments.batch_size, topology="parts")
    if arguments.large_root is None:
        write_large(folder / "graph", root, arguments.large, arguments.batch_size)
    budget = round(arguments.budget_megabytes * 1e6)
    given = [small, root], arguments.batch_size, budget, arguments.large_batches
    first, found = (run_job(train_within, TRAINERS, STORAGE, *given) for _ in range(2))
    part = salientpp.load(root)
    row = {
        "vertices": part.num_vertices,
        "edges": part.num_edges,
        **{
            f"{name}_with_vip": max(of_rank[name] for of_rank in first[:TRAINERS])
            for name in ("over_law_bytes", "over_law_bytes_after")
        },
        **max(found[:TRAINERS], key=lambda of_rank: of_rank["over_law_bytes"]),
        "storage_anonymous_bytes": max(each.anonymous for samples in found[TRAINERS:] for each in samples.values()),
    }
    print(f"memory: {row}", flush=True)
    return row


def write_large(graph: Path, root: Path, vertices: int, batch_size: int) -> None:
    """Writes the large graph in parts that are ranges of its shuffled ids, so that most neighbours are in other parts."""
    if not graph.is_dir():
        generate(graph, num_vertices=vertices, num_features=FEATURES, memory="2GB")
    data = load_dataset(f"converted:{graph}")
    ranges = torch.arange(data.num_nodes) * PARTS // data.num_nodes
    salientpp.partition(data, PARTS, root, FANOUTS, batch_size, method=ranges, refine=False, topology="parts")


def train_within(parts: list[Any], batch_size: int, budget: int, batches: int) -> dict[str, Any]:
    """Loads batches of the second graph within a budget, after an epoch of the first graph. Returns bytes."""
    small, part = parts
    options: dict[str, Any] = dict(batch_size=batch_size, shuffle=True, seed=0, num_workers=1)
    loader = NeighborLoader(small, FANOUTS, "train", memory="1MB", **options)
    for _ in loader:
        pass
    del loader
    gc.collect()
    reset_peak()
    libraries = resident()
    with Watch() as watch:
        loader = NeighborLoader(part, FANOUTS, "train", memory=budget, **options)
    while_made, made = watch.peak() - libraries, resident() - libraries
    reset_peak()

    def in_flight_or_kept() -> int:
        return pools(loader) + blocks_in_use()

    with Watch(in_flight_or_kept) as watch:
        for batch in itertools.islice(loader, batches):
            del batch
        peak, held, stats = resident_bytes(peak=True) - libraries.total, loader.memory_used(), loader.stats()
    loader.engine.close()  # waits until the ranks have left the epoch
    after, kept = resident() - libraries, blocks_in_use()
    in_flight = max(sample.in_flight for sample in watch.samples.values()) - kept
    highest = max((sample - libraries for sample in watch.samples.values()), key=lambda sample: sample.total)
    beside = loader.plan().beside
    return {
        "libraries": asdict(libraries),
        "while_made": asdict(while_made),
        "made": asdict(made),
        "in_epoch": asdict(highest),
        "after_epoch": asdict(after),
        "beyond_libraries_bytes": peak,
        "budget_bytes": budget,
        "in_flight_bytes": in_flight,
        "pools_bytes": pools(loader),
        "over_law_bytes": peak - in_flight - budget,
        "over_law_bytes_after": after.total - pools(loader) - budget,
        "beside_bytes": beside,
        "cached_bytes": held["cache"],
        "other_bytes": peak - in_flight - highest.mapped - held["cache"] - beside,
        "memory_used": held,
        "batches": stats.batches,
        "rows_cache": stats.rows_cache,
        "rows_remote": stats.rows_remote,
        "row_bytes": sum(stats.row_bytes.values()),
    }


def pools(loader: NeighborLoader) -> int:
    """Returns the bytes of the pools of buffers."""
    return sum(loader.memory_used()[name] for name in ("batches", "exchange"))


class _Blocks(ctypes.Structure):
    """Result of ``mallinfo2`` of the GNU C library (2.33). Blocks with pages of their own are counted in ``hblkhd``, others in ``uordblks``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def blocks_in_use() -> int:
    """Returns the bytes of the blocks that the C library has given to this process, without freed ones."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Blocks
    found = library.mallinfo2()
    return found.hblkhd + found.uordblks


def of_slow_trainer(root: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the anonymous memory of the rank that stores at each batch of the other rank, which sleeps or does not."""
    rows = []
    for sleep in (0.0, arguments.slow_seconds):
        batches, samples = run_job(train_slowly, 1, 1, [root], arguments.slow_batches, sleep)
        moments = sorted(samples)
        at = [samples[moments[bisect.bisect(moments, when) - 1]].anonymous for when in batches["times"]]
        half = len(at) // 2
        row = {
            "sleep_seconds": sleep,
            "batch_row_bytes": batches["batch_row_bytes"],
            "storage_bytes_before": samples[moments[0]].anonymous,
            "storage_bytes_at_batch": at,
            "storage_peak_bytes": max(sample.anonymous for sample in samples.values()),
            "growth_in_second_half_bytes": max(at[half:]) - max(at[:half]),
        }
        rows.append(row)
        print(f"slow: {row}", flush=True)
    return rows


def train_slowly(parts: list[Any], batches: int, sleep: float) -> dict[str, Any]:
    """Loads batches of equal size and sleeps after each. Returns the time of each, and of the end."""
    loader = NeighborLoader(parts[0], SLOW_FANOUTS, "all", batch_size=SLOW_BATCH, shuffle=True, seed=0, num_workers=1)
    times, row_bytes = [], []
    for batch in itertools.islice(loader, batches):
        times.append(time.time())
        row_bytes.append(batch.x.nbytes)
        time.sleep(sleep)
    return {"times": [*times, time.time()], "batch_row_bytes": statistics.mean(row_bytes)}


# --- jobs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resident:
    """Resident bytes of this process. Pages that belong to no file are anonymous. ``mapped`` pages belong to files, and the system can take them back.

    Attributes:
        in_flight: bytes of batches on their way, and of everything else that is counted with them.
    """

    anonymous: int
    mapped: int
    shared: int
    in_flight: int = 0

    @property
    def total(self) -> int:
        return self.anonymous + self.mapped + self.shared

    def __sub__(self, other: Resident) -> Resident:
        return Resident(
            self.anonymous - other.anonymous,
            self.mapped - other.mapped,
            self.shared - other.shared,
            self.in_flight - other.in_flight,
        )


def resident(in_flight: int = 0) -> Resident:
    """Returns the present memory of this process, from /proc (Linux)."""
    kinds = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return Resident(*(int(kinds[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "RssShmem")), in_flight)


class Watch:
    """Takes the memory of this process several times a second, while the ``with`` block lasts.

    Args:
        in_flight: gives :attr:`Resident.in_flight`.

    Attributes:
        samples: time -> memory.
    """

    def __init__(self, in_flight: Callable[[], int] = lambda: 0) -> None:
        self._in_flight = in_flight
        self.samples: dict[float, Resident] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def peak(self) -> Resident:
        """Returns the sample with the most bytes."""
        return max(self.samples.values(), key=lambda sample: sample.total)

    def _run(self) -> None:
        while True:
            self.samples[time.time()] = resident(self._in_flight())
            if self._ends.wait(SAMPLE_SECONDS):
                break


def run_job(function: Callable[..., Any], trainers: int, storage: int, roots: list[Path], *args: Any) -> list[Any]:
    """Runs ``function(parts, *args)`` on the ranks that train. Returns its results, and then the samples of :class:`Watch` of each rank that stores."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    given = (trainers, storage, port, roots, function, args, queue)
    ranks = mp.spawn(_be_rank, given, nprocs=trainers + storage, join=False)
    found: dict[int, Any] = {}
    while len(found) < trainers + storage:
        if queue.empty():
            ranks.join(timeout=SAMPLE_SECONDS)  # raises the error of a rank
        else:
            rank, result = queue.get()
            found[rank] = result
    while not ranks.join():
        pass
    return [found[rank] for rank in sorted(found)]


def _be_rank(
    rank: int, trainers: int, storage: int, port: int, roots: list[Path], function: Callable[..., Any], args: Any, queue: Any
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=trainers + storage)
    parts = [salientpp.load(root, storage_ranks=storage) for root in roots]
    if parts[0].only_stores:
        with Watch() as watch:
            salientpp.serve(*parts)
        queue.put((rank, watch.samples))
    else:
        queue.put((rank, function(parts, *args)))
        dist.barrier(parts[0].trainers)
    dist.destroy_process_group()
