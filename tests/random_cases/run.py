"""Runs random models: ``python -m random_cases.run --cases 1000``, in the folder ``tests``. Prints scripts of failing models, which run by themselves."""

from __future__ import annotations

import argparse
import collections
import sys
import time
from pathlib import Path

import torch
from random_cases.models import Case, Failure, Invalid, case_of, failure_of, script_of, shrunk

import salientpp


def failure(case: Case) -> Failure | None:
    return failure_of(case, salientpp.nn.trim)


def fails(case: Case) -> bool:
    try:
        return failure(case) is not None
    except Invalid:
        return False


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--scripts", type=Path, help="folder for scripts of shrunk cases")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    invalid: collections.Counter[str] = collections.Counter()
    found: dict[tuple[str, ...], list[int]] = {}
    begun = time.process_time()
    for seed in range(given.first, given.first + given.cases):
        case = case_of(seed)
        try:
            wrong = failure(case)
        except Invalid as error:
            invalid[str(error)[:150]] += 1
            continue
        if wrong is None:
            continue
        small = shrunk(case, fails)
        is_new = small.kinds not in found
        found.setdefault(small.kinds, []).append(seed)
        if is_new:
            print(f"seed {seed}: {wrong}\n    {' | '.join(small.kinds)}: {failure(small)}", flush=True)
            if given.scripts is None:
                print(script_of(small), flush=True)
            else:
                given.scripts.mkdir(parents=True, exist_ok=True)
                (given.scripts / f"{seed}.py").write_text(script_of(small))
    seconds = time.process_time() - begun
    failed = sum(map(len, found.values()))
    print(f"{given.cases} models, {failed} failed, {sum(invalid.values())} invalid, {seconds:.0f} s")
    for text, count in invalid.most_common(25):
        print(f"  invalid {count}: {text}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
