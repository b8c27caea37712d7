"""One rank of the doctor's self-test: loads one epoch, with messages and through shared memory, and measures the speed of messages.

It gets the folder with the dataset directory ``parts``, its rank, and the seconds after which the system ends it. Its report becomes ``RANK.json``.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from salientpp.cli.checks.self_test import RANKS, READY, digests_of
from salientpp.files import replace_file
from salientpp.store.directory.load import load

#: Size of a message, and how many are sent.
BYTES, MESSAGES = 4 << 20, 16


def bytes_per_second(rank: int) -> float:
    """Measures how fast messages travel from rank 0 to rank 1, whose short answer ends the measurement. Returns the bytes per second on this rank."""
    message, answer = torch.zeros(BYTES, dtype=torch.uint8, device="cpu"), torch.zeros(1, device="cpu")
    started = time.perf_counter()
    for number in range(MESSAGES + 2):
        if number == 2:  # the first two connect and warm up
            started = time.perf_counter()
        dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
    dist.recv(answer, 1) if rank == 0 else dist.send(answer, 0)
    return BYTES * MESSAGES / (time.perf_counter() - started)


def main() -> None:
    folder, rank, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    signal.alarm(int(2 * seconds) + 5)  # in case the doctor itself is killed
    while not (folder / READY).exists():
        time.sleep(0.01)
    group = dist.FileStore(str(folder / "meeting"), RANKS)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=RANKS, timeout=timedelta(seconds=seconds))
    part = load(folder / "parts")
    report = {
        "messages": digests_of(part, ranks_per_host=1),
        "shared": digests_of(part, ranks_per_host=RANKS),
        "bytes_per_second": bytes_per_second(rank),
    }
    replace_file(folder / f"{rank}.json", lambda file: file.write(json.dumps(report).encode()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
