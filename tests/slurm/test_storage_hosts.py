"""Laws of jobs with storage hosts under a real SLURM: ranks read batches from `salientpp serve` in the job's second component, also after a requeue."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from distributed import HANG

import salientpp
from salientpp.datasets import synthetic
from tests.slurm.scripts import make_script, submit
from tests.slurm.slurm_cluster import Cluster

pytestmark = pytest.mark.slurm

#: Its first run stops for the signal and requeues the job. Its second run compares the batches with those of a job in which every rank stores.
TRAIN = """
import itertools, os, sys, time
import torch, torch.distributed as dist
import salientpp
launch = salientpp.init_process_group()
options = {"batch_size": 8, "shuffle": True, "seed": 3}
part = salientpp.load(os.environ["SALIENTPP_STORAGE"])
loader = salientpp.NeighborLoader(part, [5, 3], "train", replication_factor=0.2, **options)
if "SLURM_RESTART_COUNT" not in os.environ:
    with salientpp.Preemption() as preemption:
        print("trains", flush=True)
        for epoch in itertools.count():
            for batch in loader:
                preemption.should_stop()
            if preemption.should_stop():
                break
    print("stopped", flush=True)
    preemption.requeue()
    time.sleep(60)
plain = salientpp.NeighborLoader(salientpp.load(sys.argv[1]), [5, 3], "train", **options)
for batch, expected in zip(loader, plain, strict=True):
    assert torch.equal(batch.n_id, expected.n_id) and torch.equal(batch.x, expected.x) and torch.equal(batch.y, expected.y)
rows = loader.stats().by_type[None]
assert rows["host"] == 0 < rows["remote"], rows
print("compared", len(loader), "batches", flush=True)
"""


@pytest.fixture(scope="module")
def root(slurm: Cluster) -> Path:
    data = synthetic(num_vertices=2000, num_features=16)
    return salientpp.partition(data, 2, slurm.folder / "stored" / "parts-2", [5, 3], 8, method="random").root


def test_ranks_read_from_storage_hosts_also_after_a_requeue(
    slurm: Cluster, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = slurm.folder / "storage-hosts"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    hosts = ["--parts", 2, "--ranks-per-node", 2, "--gpus-per-node", 1, "--cpus-per-task", 1, "--time", 10]
    storage = ["--storage-hosts", 1, "--storage-cpus", 2, "--storage-memory", "1M", "--root", root]
    script = make_script(capsys, folder / "job.sbatch", *hosts, *storage, "--", "train.py", root)
    job = submit(slurm, script)
    log = folder / f"salientpp-{job}.log"
    slurm.wait_for("trains", log)
    slurm.run("scancel", "--signal=USR1", job)
    slurm.wait_for("stopped", log)
    # SLURM starts jobs with several components only when it looks at all jobs. It does so after a change of any job.
    deadline = time.monotonic() + HANG
    while log.read_text().count("salientpp serves") < 2 and time.monotonic() < deadline:
        slurm.run("scontrol", "update", f"JobId={job}", "Comment=look")
        time.sleep(1)
    done = slurm.wait(job, log)
    assert done.state == "COMPLETED" and done.facts["Restarts"] == "1", done.log
    assert sorted(re.findall(r"^(\d): compared", done.log, re.MULTILINE)) == ["0", "1"]
    assert done.log.count(f"salientpp serves {root} on 127.0.0.1:") == 2, "the storage starts again with the job"
    token = re.search(r"SALIENTPP_TOKEN=(?!\$)\S+", done.log)
    assert token is None, "the log has no secret"


def test_a_script_that_fails_ends_its_storage(slurm: Cluster, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = slurm.folder / "storage-fails"
    folder.mkdir()
    (folder / "train.py").write_text("raise SystemExit(7)")
    storage = ["--storage-hosts", 1, "--storage-cpus", 1, "--root", root]
    script = make_script(
        capsys, folder / "job.sbatch", "--parts", 1, "--cpus-per-task", 1, "--time", 5, *storage, "--", "train.py"
    )
    job = submit(slurm, script)
    log = folder / f"salientpp-{job}.log"
    done = slurm.wait(job, log)
    assert done.state == "FAILED", done.log
    assert f"salientpp serves {root} on 127.0.0.1:" in done.log
    states = slurm.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").split()
    assert "RUNNING" not in states
