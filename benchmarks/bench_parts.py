"""Measures the CPU time that partitioning adds to a batch, for one type of vertices and for several. Writes results/parts.json.

    python benchmarks/bench_parts.py [--repeats 7]

Two ranks on one machine, each with a part, exchange rows over loopback. They take turns with one process that has the whole graph; all make whole
batches without workers. The one process runs alone, and then two independent ones run at once. These two share caches and memory
as the ranks do, so the difference is the cost of partitioning. The ranks run as on two machines, with and without a cache, and as a launcher starts
them on one machine, where both read all rows. The CPU time covers all threads of both ranks, divided by the batches of both. The time of gloo's
threads is the kernel's work for loopback. It is also reported separately.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from common import write_results
from torch_geometric.data import Data, HeteroData

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import synthetic
from salientpp.datasets.generated_mag import synthetic_mag

BATCH = 256
CASES = {"one type": [15, 10, 5], "several types": [8, 6, 4]}
#: Hosts of the two ranks, and α.
WAYS: dict[tuple[str, float], dict[str, Any]] = {
    ("two hosts", 0.0): {"ranks_per_host": 1},
    ("two hosts", 0.16): {"ranks_per_host": 1, "replication_factor": 0.16},
    ("one host", 0.0): {"ranks_per_host": 2},
}


def made(case: str) -> Data | HeteroData:
    """Makes rows of 128 columns of 4 bytes. Several types have MAG240M's schema, in which only papers have rows."""
    if case == "one type":
        return synthetic(num_vertices=300_000, average_degree=20, num_features=128)
    data = synthetic_mag(num_papers=150_000, num_features=128)
    data["paper"].x = data["paper"].x.float()
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case, fanouts in CASES.items():
            root, data = Path(folder) / case.replace(" ", "-"), made(case)
            salientpp.partition(data, 2, root, fanouts, BATCH, refine=False)
            torch.save(data, root / "whole.pt")
            queue: Any = torch.multiprocessing.get_context("spawn").SimpleQueue()
            torch.multiprocessing.spawn(
                measure,
                (str(root), fanouts, f"file://{folder}/{case.replace(' ', '-')}.store", arguments.repeats, queue),
                2,
            )
            for row in queue.get():
                rows.append({"case": case, "fanouts": fanouts, **row})
                print(
                    f"{case:14} {row['hosts']}, alpha {row['alpha']:4}: {row['cpu_ms_alone']:7.2f} ms of CPU alone, {row['cpu_ms_at_once']:7.2f} two at once, "
                    f"{row['cpu_ms_parts']:7.2f} ms on 2 ranks, {row['cpu_ms_network']:.2f} of it network, "
                    f"{row['ratio']:.2f}x, {row['remote_rows_per_batch']:,.0f} rows fetched a batch",
                    flush=True,
                )
    write_results("parts", rows, batch_size=BATCH)


def measure(rank: int, root: str, fanouts: list[int], store: str, repeats: int, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    typed = "several" in root
    options: dict[str, Any] = dict(num_neighbors=fanouts, batch_size=BATCH, shuffle=True, seed=0)
    part = salientpp.load(root)
    seeds = ("paper", "train") if typed else "train"
    loaders = {way: NeighborLoader(part, input_nodes=seeds, **of_way, **options) for way, of_way in WAYS.items()}
    data = torch.load(Path(root) / "whole.pt", weights_only=False)
    own = ("paper", data["paper"].train_mask) if typed else data.train_mask
    whole = NeighborLoader(data, input_nodes=own, **options)
    times: dict[Any, list[float]] = {key: [] for key in ("alone", "at once", *WAYS)}
    network: dict[tuple[str, float], list[float]] = {way: [] for way in WAYS}
    for turn in range(repeats + 1):
        if rank == 0:
            spent = cpu_per_batch(whole)
            if turn:
                times["alone"].append(spent[0] / spent[1])
        dist.barrier()
        both = torch.tensor(cpu_per_batch(whole), dtype=torch.float64)
        dist.all_reduce(both)
        if turn:
            times["at once"].append(float(both[0] / both[1]))
        for way in WAYS:
            before = network_seconds()
            spent = cpu_per_batch(loaders[way])
            both = torch.tensor([*spent, network_seconds() - before], dtype=torch.float64)
            dist.all_reduce(both)
            if turn:
                times[way].append(float(both[0] / both[1]))
                network[way].append(float(both[2] / both[1]))
    rows = []
    for way in WAYS:
        loaders[way].reset_stats()
        number = sum(1 for _ in loaders[way])
        fetched = torch.tensor([loaders[way].stats().rows_remote, number], dtype=torch.float64)
        dist.all_reduce(fetched)
        ours, at_once = statistics.median(times[way]), statistics.median(times["at once"])
        rows.append(
            {
                "hosts": way[0],
                "alpha": way[1],
                "cpu_ms_alone": statistics.median(times["alone"] or [0.0]) * 1e3,
                "cpu_ms_at_once": at_once * 1e3,
                "cpu_ms_parts": ours * 1e3,
                "ratio": ours / at_once,
                # Mean, because the kernel counts a thread's time in hundredths of a second.
                "cpu_ms_network": statistics.mean(network[way]) * 1e3,
                "remote_rows_per_batch": float(fetched[0] / fetched[1]),
                "turns": len(times[way]),
            }
        )
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def network_seconds() -> float:
    """CPU seconds of gloo's threads in this process."""
    ticks = 0
    for file in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            name, _, numbers = file.read_text().partition("(")[2].rpartition(")")
            if "gloo" in name:
                ticks += sum(int(word) for word in numbers.split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_per_batch(loader: NeighborLoader) -> tuple[float, int]:
    """Returns this process's CPU seconds of an epoch, and its number of batches. Answering the other rank to the end of its epoch counts."""
    started = time.process_time()
    number = sum(1 for _ in loader)
    loader.engine.close()
    return time.process_time() - started, number


if __name__ == "__main__":
    main()
