"""Measures the losses of ranks in jobs with storage ranks. Writes results/losses.json.

    python benchmarks/bench_losses.py [--cases 'rank 1, SIGKILL, in load']

A job has two ranks that train and two that store. Each of them is killed and stopped at each stage of the job. The script measures until when every other rank
has raised an error or ended, and reads which rank the errors name. For a rank that trains, the seconds begin when it next calls the package, if it computed
when the other was lost. A loss in ``load`` happens when all ranks have begun it, and each has sent its first beat.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from bench_sessions import FANOUTS, STAGES, TIMEOUT, is_alive, watch
from common import generated, write_results
from session_jobs import Job, JobSpec, Rank
from storage_server import until

import salientpp

PARTS, TRAINERS, STORAGE = 4, 2, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="regular expression of the losses to measure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vertices", type=int, default=100_000)
    arguments = parser.parse_args()
    load, draws = os.getloadavg()[0], random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "stored"
        data = generated(arguments.vertices, 15.0, 32)
        salientpp.partition(data, PARTS, root, FANOUTS, 64, topology="parts", refine=False)
        rows = []
        for how in (signal.SIGKILL, signal.SIGSTOP):
            for rank in range(TRAINERS + STORAGE):
                for stage in STAGES:
                    if re.search(arguments.cases, f"rank {rank}, {how.name}, {stage}"):
                        rows.append(_lose(str(root), rank, stage, how, draws.uniform(0.0, 0.05)))
                        print("rank {rank}, {how}, {stage}: {state}, {seconds:.2f} s".format(**rows[-1]), end=", ")
                        print("{named} of {others} name it, {left} are left".format(**rows[-1]), flush=True)
                        for other, text in rows[-1]["unnamed"].items():
                            print(f"    rank {other} says: {text}", flush=True)
    write_results(
        "losses", rows, timeout=TIMEOUT, trainers=TRAINERS, storage=STORAGE, seed=arguments.seed, load_before=load
    )


def _lose(root: str, victim: int, stage: str, how: signal.Signals, delay: float) -> dict[str, Any]:
    """Loses a rank at a stage of the first rank that trains and is not lost. A storage rank has no stages but ``load``."""
    timeout = TIMEOUT if how == signal.SIGSTOP else None
    ranks = {"ranks": TRAINERS + STORAGE, "storage_ranks": STORAGE}
    job = Job(JobSpec(root, "", **ranks, sleep=0.02, pause=0.5, timeout=timeout))
    watched = job.ranks if stage == "in load" else job.ranks[:TRAINERS]
    for rank in watched:
        rank.wait_for(STAGES[stage][0])
    if stage == "in load":
        until(lambda: job.store.check([f"salientpp/roles/beat/{number}" for number in range(len(job.ranks))]))
    else:
        time.sleep(delay)
    os.kill(job.ranks[victim].pid, how)
    lost = time.monotonic()
    others = {number: rank for number, rank in enumerate(job.ranks) if number != victim}
    ends = [*watch(job, {("rank", number): rank.pid for number, rank in others.items()}, lost).values()]
    time.sleep(0.1)
    texts = {number: _text(rank) for number, rank in others.items()}
    unnamed = {number: text for number, text in texts.items() if not re.search(rf"\branks? (\d, )*{victim}\b", text)}
    job.ranks[victim].process.kill()  # a stopped one cannot end otherwise
    left = 0
    try:
        until(lambda: not any(is_alive(rank.pid) for rank in others.values()), 15)
    except AssertionError:
        left = sum(is_alive(rank.pid) for rank in others.values())
    job.kill()
    known = [end for end in ends if end is not None]
    return {
        "rank": victim,
        "role": "trains" if victim < TRAINERS else "stores",
        "stage": stage,
        "how": how.name,
        "state": "ended" if len(known) == len(ends) else "HUNG",
        "seconds": max(known, default=0.0),
        "seconds_of": ends,
        "named": len(texts) - len(unnamed),
        "others": len(texts),
        "unnamed": unnamed,
        "left": left,
        "example": next(iter(texts.values()), ""),
    }


def _text(rank: Rank) -> str:
    raised = rank.said("raised")
    return "no error" if raised is None else ": ".join(raised.values[1:])


if __name__ == "__main__":
    main()
