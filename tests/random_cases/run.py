"""Runs random cases: ``python -m random_cases.run --cases 1000``, in the folder ``tests``. Prints scripts of failing cases, which run by themselves."""

from __future__ import annotations

import argparse
import collections
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from random_cases import jobs, targets
from random_cases.pool import shared_pool

KINDS = ("jobs", "models")

#: Directories of partitioned graphs that are kept. Consecutive jobs share one.
_MOST_DIRECTORIES = 100


def run_models(seeds: range, show: Callable[[int, str], None], target: str) -> int:
    """Runs random models through one conversion, or through all. Returns the number of models that failed."""
    names = [*targets.TARGETS] if target == "all" else [target]
    return sum(targets.run(name, seeds, show) for name in names)


def run_jobs(seeds: range, show: Callable[[int, str], None]) -> int:
    """Runs random jobs. Returns the number that failed."""
    refused: collections.Counter[str] = collections.Counter()
    pool, failed, checked = shared_pool(), 0, 0
    folder = Path(tempfile.mkdtemp(prefix="jobs"))
    for seed in seeds:
        job = jobs.job_of(seed)
        why, reports = jobs.outcome_of(job, pool, folder)
        if why is not None:
            failed += 1
            print(f"seed {seed}: {why}", flush=True)
            small = jobs.shrunk(job, pool, folder)
            show(seed, jobs.script_of(small, why))
        elif reports[0].refused is not None:
            refused[reports[0].refused[:150]] += 1
        else:
            checked += sum(report.checked for report in reports)
        if seed % _MOST_DIRECTORIES == 0:
            shutil.rmtree(folder)
            folder.mkdir()
    shutil.rmtree(folder)
    print(f"{checked} batches were compared, {sum(refused.values())} jobs were refused")
    for text, count in refused.most_common(25):
        print(f"  refused {count}: {text}")
    return failed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help="only cases of this kind")
    parser.add_argument("--target", choices=["all", *targets.TARGETS], default="all", help="conversion of the models")
    parser.add_argument("--cases", type=int, default=1000, help="number of cases of each kind")
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--scripts", type=Path, help="folder for scripts of shrunk cases")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seeds, failed = range(given.first, given.first + given.cases), 0
    for kind in [given.kind] if given.kind else KINDS:

        def show(seed: int, script: str) -> None:
            if given.scripts is None:
                print(script, flush=True)
            else:
                given.scripts.mkdir(parents=True, exist_ok=True)
                (given.scripts / f"{kind}-{seed}.py").write_text(script)

        begun = time.monotonic()
        wrong = run_models(seeds, show, given.target) if kind == "models" else run_jobs(seeds, show)
        failed += wrong
        print(f"{given.cases} {kind}, {wrong} failed, {time.monotonic() - begun:.0f} s", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
