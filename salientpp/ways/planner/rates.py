"""Rates of a job's machines: cores, links between ranks, and copies to the device. All ranks measure at the same time, because they share cores and links."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch

from salientpp.ranks.comm import Comm, Pending
from salientpp.ranks.placement import Placement
from salientpp.ways.planner.machines import Link

#: Bytes per pair of ranks in the first timed exchange, and the largest number of bytes that a rank sends in one exchange.
_FEW_BYTES, _MOST_BYTES = 64 * 2**10, 64 * 2**20

#: An exchange of this many seconds is dominated by the rate of the link. Longer ones are not measured: if several ranks send a megabyte each to one rank, its
#: link drops packets, and the messages of batches are shorter. The other numbers: seconds of a measurement at the final size, and limits of its exchanges.
_LONG_SECONDS, _RATE_SECONDS, _FEWEST, _MOST = 0.01, 0.3, 4, 200

#: Number of exchanges without content, and number of repetitions of each other measurement. The median counts.
_EMPTY, _ROUNDS = 20, 3

#: Bytes of a copy to the device, and number of timed copies and other single actions.
_COPY_BYTES, _REPEATS = 64 * 2**20, 5


def gather_reals(comm: Comm, numbers: Sequence[float]) -> list[list[float]]:
    """Gathers the numbers of all ranks (equally many), in the order of the ranks. Collective."""
    form = f"{len(numbers)}d"
    words = struct.unpack(f"{len(numbers)}q", struct.pack(form, *numbers))
    return [list(struct.unpack(form, struct.pack(f"{len(words)}q", *each))) for each in comm.gather_numbers(words)]


def largest(comm: Comm, number: float) -> float:
    """Returns the largest number of any rank. Collective."""
    return max(each for (each,) in gather_reals(comm, [number]))


def smallest(comm: Comm, number: float) -> float:
    """Returns the smallest number of any rank. Collective."""
    return -largest(comm, -number)


def mean(comm: Comm, number: float) -> float:
    """Returns the mean over the ranks whose number is not NaN; NaN if all are. Collective."""
    known = [each for (each,) in gather_reals(comm, [number]) if not math.isnan(each)]
    return statistics.fmean(known) if known else math.nan


def measure_cores(comm: Comm, seconds: float) -> float:
    """Returns the number of cores that a rank gets while all ranks compute: the smallest number of any rank. A hardware thread counts as a core.

    Every rank keeps one thread busy for each core that it may use. The result is the threads' CPU time per second, as a median. Collective.
    """
    block = bytes(2**22)  # crc32 leaves Python's lock to other threads
    rounds = []
    for _ in range(_ROUNDS):
        comm.gather_numbers([0])
        end, cpu = time.perf_counter() + seconds / _ROUNDS, time.process_time()

        def compute(end: float = end) -> None:
            while time.perf_counter() < end:
                zlib.crc32(block)

        began = time.perf_counter()
        threads = [threading.Thread(target=compute) for _ in os.sched_getaffinity(0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rounds.append((time.process_time() - cpu) / (time.perf_counter() - began))
    return smallest(comm, statistics.median(rounds))


@dataclass(frozen=True)
class Measured:
    """Rate and delay of a link, and the CPU seconds that a rank spends per byte over it."""

    link: Link
    cpu_per_byte: float


def measure_link(
    comm: Comm, peers: Container[int], seconds: float = _RATE_SECONDS, most_bytes: int = _MOST_BYTES
) -> Measured:
    """Measures the link to the ranks ``peers`` by exchanges of all ranks. Collective.

    Exchanges grow until the rate of the link dominates their time. The first exchange of each size is not timed, because some links let a burst pass. The rate
    is the smallest of any rank, the delay is the largest, and the CPU time is the mean. A rank without peers takes part, but its numbers do not count.

    Args:
        peers: numbers of ranks other than this one. If rank a is a peer of rank b, then b is a peer of a.
        seconds: approximate time of one measurement; the median of several counts.
        most_bytes: largest number of bytes that a rank sends in one exchange. A rank needs three times these bytes.
    """
    others = [rank for rank in range(comm.size) if rank in peers]
    delays = [_exchange(comm, others, 1, 1, under_way=1) for _ in range(_EMPTY)]
    delay = largest(comm, statistics.median(seconds for seconds, _ in delays) if others else 0.0)
    empty_cpu = statistics.median(cpu for _, cpu in delays)
    most_peers = int(largest(comm, len(others)))
    num_bytes, long = _FEW_BYTES, _LONG_SECONDS * seconds / _RATE_SECONDS
    while True:
        longest = largest(comm, _exchange(comm, others, num_bytes, 1)[0])
        growth = 4 if longest < long / 4 else 2
        if longest - delay >= long or num_bytes * growth * most_peers > most_bytes:
            break
        num_bytes *= growth
    number = min(_MOST, max(_FEWEST, math.ceil(seconds / longest)))
    rounds = [_exchange(comm, others, num_bytes, number) for _ in range(_ROUNDS)]
    passed, cpu = (statistics.median(of_rounds) for of_rounds in zip(*rounds))
    received = number * num_bytes * len(others)
    rate = received / max(passed - number * delay, passed / 10) if others else math.inf
    per_byte = max(0.0, cpu - number * empty_cpu) / (2 * received) if others else math.nan
    return Measured(Link(smallest(comm, rate), delay), mean(comm, per_byte))


def measure_links(
    comm: Comm, placement: Placement, seconds: float = _RATE_SECONDS, most_bytes: int = _MOST_BYTES
) -> dict[str, Measured]:
    """Measures the links that exist: ``between`` hosts, and ``within`` a host with several ranks. Collective. See :func:`measure_link`."""
    here, hosts, found = placement.ranks_of_host, placement.ranks_by_host, {}
    for name, exists in (("between", len(hosts) > 1), ("within", max(hosts) > 1)):
        if exists:
            peers = [rank for rank in range(comm.size) if (rank in here) == (name == "within") and rank != comm.rank]
            found[name] = measure_link(comm, peers, seconds, most_bytes)
    return found


def _exchange(
    comm: Comm, others: Sequence[int], num_bytes: int, number: int, under_way: int = 2
) -> tuple[float, float]:
    """Returns this rank's seconds and CPU seconds of ``number`` exchanges that bring ``num_bytes`` from each of the others.

    Two exchanges are under way at a time, as in an epoch: a single exchange over gloo does not fill a link in both directions. The first and the last
    exchange are not timed.
    """
    counts = [num_bytes if rank in others else 0 for rank in range(comm.size)]
    send, *received = (torch.zeros(sum(counts), dtype=torch.uint8, device=comm.device) for _ in range(1 + under_way))
    memory = itertools.cycle(received)
    pending: deque[Pending] = deque()

    def start() -> None:
        pending.append(comm.all_to_all(send, counts, counts, lambda *_: next(memory)))

    def wait() -> None:
        pending.popleft().wait()
        wait_for_device(comm.device)

    comm.gather_numbers([0])
    for turn in range(1 + number):
        while len(pending) < under_way:
            start()
        wait()
        if turn == 0:
            began, cpu = time.perf_counter(), time.process_time()
    passed, spent = time.perf_counter() - began, time.process_time() - cpu
    while pending:
        wait()
    return passed, spent


def measure_copies(comm: Comm, device: torch.device) -> float:
    """Returns the bytes per second from pinned host memory to the device while all ranks copy: the smallest of any rank, or 0 for the CPU. Collective."""
    rate = math.inf
    comm.gather_numbers([0])
    if device.type != "cpu":
        there, here = (
            torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device),
            torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu"),
        )
        rate = _COPY_BYTES / statistics.median(seconds_of(lambda: there.copy_(here, non_blocking=True), device))
    rate = smallest(comm, rate)
    return 0.0 if math.isinf(rate) else rate


def seconds_of(action: Callable[[], object], device: torch.device) -> list[float]:
    """Runs ``action`` several times, after one run that is not timed. Returns the seconds of each, with the work of the device."""
    seconds = []
    for _ in range(1 + _REPEATS):
        wait_for_device(device)
        began = time.perf_counter()
        action()
        wait_for_device(device)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def wait_for_device(device: torch.device) -> None:
    """Waits until the device has done all its work, so that a time includes it. Returns at once for the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
