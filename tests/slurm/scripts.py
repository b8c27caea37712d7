"""Scripts of `salientpp slurm` for the tests of this folder: written, checked and submitted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from salientpp import cli
from tests.slurm.slurm_cluster import Cluster

ROOT = Path(__file__).parents[2]

#: Variables that jobs inherit from sbatch: gloo on loopback, and the package under test.
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}


def make_script(capsys: pytest.CaptureFixture, file: Path, *arguments: object) -> Path:
    """Writes the script that `salientpp slurm` prints, and has bash and shellcheck check it."""
    capsys.readouterr()
    assert cli.main(["slurm", *map(str, arguments)]) == 0
    file.write_text(capsys.readouterr().out)
    subprocess.run(["bash", "-n", file], check=True)
    subprocess.run(["shellcheck", file], check=True)
    return file


def submit(slurm: Cluster, script: Path, **environment: str) -> str:
    return slurm.run("sbatch", "--parsable", script, cwd=script.parent, environment=ENVIRONMENT | environment).strip()
