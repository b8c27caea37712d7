"""Measures exchanges of rows between the ranks of a host: shared memory against gloo on the loopback interface. Prints a table.

    python benchmarks/bench_host_memory.py [--ranks 2 4] [--megabytes 1 5 20 50] [--repeats 15]

Every rank receives the given number of megabytes in an exchange, in equal pieces from the other ranks. It sends rows of its table in random order. The two ways
take turns, and a barrier precedes each exchange. A time includes the agreement on the exchange, and is the slowest rank's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import distributed

from salientpp.fullgraph.exchange import Ranks, Route
from salientpp.ranks.comm import Comm

WIDTH = 128  # columns of float32


def measure(rank: int, megabytes: list[float], repeats: int) -> list[dict[str, float]]:
    """Median seconds of each way on this rank, for each size."""
    job = Ranks(Comm.create())
    comm = job.comm
    ways = {"gloo": job, "shared memory": job.among(range(comm.size))}
    if ways["shared memory"].memory is None:
        raise SystemExit("the ranks cannot share memory here")
    found = []
    for size in megabytes:
        piece = max(1, int(size * 1e6) // (4 * WIDTH * (comm.size - 1)))
        counts = [0 if other == rank else piece for other in range(comm.size)]
        rows = torch.randn(sum(counts), WIDTH)
        route = Route(torch.randperm(sum(counts)), counts, counts)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats + 2):
            for name, ranks in ways.items():
                comm.gather_numbers([0])
                start = time.perf_counter()
                ranks.fetch(rows, route)
                mine = time.perf_counter() - start
                slowest = max(each for (each,) in comm.gather_numbers([int(mine * 1e9)]))
                seconds[name].append(slowest / 1e9)
        found.append({name: statistics.median(times[2:]) for name, times in seconds.items()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 5.0, 20.0, 50.0])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    print("ranks  megabytes  gloo [ms]  shared memory [ms]  ratio")
    for ranks in options.ranks:
        found = distributed.run(measure, ranks, options.megabytes, options.repeats)
        for size, times in zip(options.megabytes, found[0], strict=True):
            gloo, shared = 1e3 * times["gloo"], 1e3 * times["shared memory"]
            print(f"{ranks:5}  {size:9g}  {gloo:9.2f}  {shared:18.2f}  {gloo / shared:5.2f}")


if __name__ == "__main__":
    main()
