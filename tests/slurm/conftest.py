"""SLURM for the tests of this folder. If none can be started, they skip, or fail if FAIL_WITHOUT_SLURM is set."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.slurm_cluster import Cluster, cluster, why_not


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        assert not os.environ.get("FAIL_WITHOUT_SLURM"), f"FAIL_WITHOUT_SLURM is set, but {reason}"
        pytest.skip(reason)
    # pytest's own folders have longer names, and paths of sockets must be short.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with cluster(folder) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)
