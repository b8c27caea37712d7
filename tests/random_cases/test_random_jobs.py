"""Law of random jobs: a loader with any options gives the batches of the plainest loader, with predicted counts, or an error is as it must be."""

from __future__ import annotations

import pytest
from random_cases.jobs import failure_of, job_of, script_of, shrunk
from random_cases.pool import shared_pool
from rare import rare

#: Jobs of `make test`, jobs that `make test-rare` adds, and jobs of each test. `make test-random CASES=...` runs more.
JOBS, MORE, EACH = 100, 200, 25


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Folder of the partitioned graphs."""
    return tmp_path_factory.mktemp("jobs")


@pytest.mark.parametrize("first", [*range(0, JOBS, EACH), *rare(*range(JOBS, JOBS + MORE, EACH))])
def test_a_job_gives_the_batches_of_the_plainest_loader_or_names_an_argument(folder, first):
    pool = shared_pool()
    for seed in range(first, first + EACH):
        job = job_of(seed)
        why = failure_of(job, pool, folder)
        if why is not None:
            small = shrunk(job, pool, folder)
            why = failure_of(small, pool, folder) or why
            pytest.fail(f"job {seed}: {why}\nThe script below shows it.\n\n{script_of(small, why)}", pytrace=False)
