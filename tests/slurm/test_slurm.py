"""Laws of running under a real SLURM: scripts of `salientpp slurm` run unedited, and a stopped job resumes bit for bit.

Ranks are gloo processes on loopback, two or four on two nodes that are both this machine.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import salientpp
from salientpp import cli
from salientpp.datasets import synthetic
from tests.slurm.scripts import ENVIRONMENT, ROOT, make_script, submit
from tests.slurm.slurm_cluster import Cluster, Job

pytestmark = pytest.mark.slurm

TRAIN = ROOT / "examples" / "train_slurm.py"
TRAIN_FULL = ROOT / "examples" / "train_full.py"
WORKLOAD = ["--num-neighbors", "5,3", "--batch-size", "8"]
EPOCHS = 30


@pytest.fixture(scope="module")
def datasets(slurm: Cluster) -> Path:
    """A folder with dataset directories of 2 and of 4 parts."""
    data = synthetic(num_vertices=4000, num_features=16)
    folder = slurm.folder / "datasets"
    for num_parts in (2, 4):
        salientpp.partition(data, num_parts, folder / f"parts-{num_parts}", [5, 3], 8, method="random")
    return folder


@pytest.fixture
def folder(slurm: Cluster, request: pytest.FixtureRequest) -> Path:
    """Folder from which a test submits its jobs."""
    made = slurm.folder / re.sub(r"\W+", "-", request.node.name)
    made.mkdir()
    return made


def run(slurm: Cluster, script: Path, **environment: str) -> Job:
    return slurm.wait(submit(slurm, script, **environment))


def epochs_of(log: str) -> list[str]:
    """Line of each epoch, without the rank's tag and the seconds."""
    return [re.sub(r" seconds=.*", "", line) for line in re.findall(r"^0: (epoch=.*)$", log, re.MULTILINE)]


# --- templates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("launcher", "parts", "per_part"), [("srun", 4, 1), ("torchrun", 2, 2)])
def test_a_script_runs_unedited_and_its_ranks_copy_their_parts_at_once(
    slurm, datasets, folder, capsys, launcher, parts, per_part
):
    script = make_script(
        capsys,
        folder / "train.sbatch",
        "--parts",
        parts,
        "--ranks-per-part",
        per_part,
        "--gpus-per-node",
        1,
        "--ranks-per-node",
        2,
        "--cpus-per-task",
        1,
        "--time",
        5,
        "--partition",
        "main",
        "--launcher",
        launcher,
        "--",
        TRAIN,
        datasets / f"parts-{parts}",
        *WORKLOAD,
        "--epochs",
        2,
        "--copy-to-disk",
        folder / "local",
    )
    job = run(slurm, script)
    assert job.state == "COMPLETED", job.log
    for rank in range(4):
        assert re.search(rf"^{rank}: rank={rank} of=4 .* starts at epoch=0 batch=0$", job.log, re.MULTILINE), job.log
    assert [line.partition(" ")[0] for line in epochs_of(job.log)] == ["epoch=0", "epoch=1"]
    assert re.search(r"^0: test=0\.\d+$", job.log, re.MULTILINE)
    assert "batch/s" not in job.log and "%|" not in job.log, "the log contains a progress bar"
    copy = folder / "local" / f"parts-{parts}"
    assert json.loads((copy / "parts.json").read_text()) == {"parts": list(range(parts))}
    salientpp.load(copy, part_id=0, verify="full")
    assert not list(folder.glob(".salientpp-*")), "the file in which rank 0 publishes its address must be removed"


def test_full_graph_training_equals_one_process(slurm, datasets, folder, capsys):
    options = ["--parts", 4, "--ranks-per-node", 2, "--cpus-per-task", 1, "--time", 5]
    script = make_script(capsys, folder / "full.sbatch", *options, "--", TRAIN_FULL, datasets / "parts-4", "state.pt")
    job = run(slurm, script)
    assert job.state == "COMPLETED", job.log
    alone = slurm.run(sys.executable, TRAIN_FULL, datasets / "parts-4", "alone.pt", cwd=folder, environment=ENVIRONMENT)
    # Rounding errors grow from step to step, and Adam scales up even small gradients.
    pattern = r"(?:0: )?epochs 0 to 20: loss ([\d.]+), validation ([\d.]+)%"
    (found,), (expected,) = (re.findall(rf"^{pattern}$", log, re.MULTILINE) for log in (job.log, alone))
    assert float(found[0]) == pytest.approx(float(expected[0]), abs=0.01), job.log
    assert float(found[1]) == pytest.approx(float(expected[1]), abs=3), job.log
    assert [torch.load(folder / name)["epoch"] for name in ("state.pt", "alone.pt")] == [20, 20]


def test_each_host_copies_its_own_parts(slurm, datasets, folder):
    command = f'{sys.executable} -m salientpp copy-to-disk {datasets}/parts-4 --to "$PWD/$SLURMD_NODENAME"'
    out = slurm.run(
        "srun", "--nodes=2", "--ntasks-per-node=2", "bash", "-c", command, cwd=folder, environment=ENVIRONMENT
    )
    assert sorted(out.split()) == sorted(2 * [f"{folder}/n1/parts-4", f"{folder}/n2/parts-4"])
    for node, parts in (("n1", [0, 1]), ("n2", [2, 3])):
        copy = folder / node / "parts-4"
        assert sorted(path.name for path in copy.glob("part-*")) == [f"part-{part:05d}" for part in parts]
        salientpp.load(copy, part_id=parts[0], verify="full")
        with pytest.raises(
            salientpp.store.directory.files.DatasetError, match=f"is a copy without part {3 - parts[0]}"
        ):
            salientpp.load(copy, part_id=3 - parts[0])


def test_a_chain_partitions_and_then_trains(slurm, folder, capsys):
    script = make_script(
        capsys,
        folder / "chain.sh",
        "--parts",
        2,
        "--ranks-per-node",
        2,
        "--cpus-per-task",
        1,
        "--time",
        5,
        "--job-name",
        "chain",
        "--dataset",
        "synthetic:num_vertices=2000,num_features=8",
        "--root",
        "new parts",
        "--partition-cpus",
        1,
        "--partition-options",
        "--num-neighbors 5,3 --batch-size 8 --method random",
        "--",
        TRAIN,
        "new parts",
        *WORKLOAD,
        "--epochs",
        1,
    )
    first, second = re.findall(r"job (\d+)", slurm.run("bash", script.name, cwd=folder, environment=ENVIRONMENT))
    training, partitioning = slurm.wait(second), slurm.wait(first)
    assert (partitioning.state, training.state) == ("COMPLETED", "COMPLETED"), partitioning.log + training.log
    assert training.facts["StartTime"] >= partitioning.facts["EndTime"]
    assert len(epochs_of(training.log)) == 1
    # The directory exists, so no second job writes it.
    again = re.findall(r"job (\d+)", slurm.run("bash", script.name, cwd=folder, environment=ENVIRONMENT))
    assert len(again) == 1
    slurm.run("scancel", *again)


def test_a_chain_ends_when_partitioning_fails(slurm, folder, capsys):
    script = make_script(
        capsys,
        folder / "chain.sh",
        "--parts",
        2,
        "--time",
        5,
        "--dataset",
        "npz:missing.npz",
        "--root",
        "parts",
        "--",
        TRAIN,
        "parts",
    )
    first, second = re.findall(r"job (\d+)", slurm.run("bash", script.name, cwd=folder, environment=ENVIRONMENT))
    assert slurm.wait(first).state == "FAILED"
    assert slurm.wait(second).state == "CANCELLED", "the second job must not wait forever"


# --- preemption -------------------------------------------------------------------------------------------


def train_script(capsys: pytest.CaptureFixture, folder: Path, datasets: Path, launcher: str) -> Path:
    return make_script(
        capsys,
        folder / "train.sbatch",
        "--parts",
        2,
        "--cpus-per-task",
        1,
        "--time",
        10,
        "--launcher",
        launcher,
        "--",
        TRAIN,
        datasets / "parts-2",
        *WORKLOAD,
        "--epochs",
        EPOCHS,
    )


@pytest.fixture(scope="module")
def uninterrupted(slurm, datasets) -> tuple[list[str], dict]:
    """Epochs and last checkpoint of a run without interruption, by torchrun on this machine without SLURM."""
    folder = slurm.folder / "uninterrupted"
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        TRAIN,
        datasets / "parts-2",
        *WORKLOAD,
        "--epochs",
        EPOCHS,
    ]
    out = slurm.run(*command, cwd=folder, environment=ENVIRONMENT)
    return [
        re.sub(r" seconds=.*", "", line) for line in out.splitlines() if line.startswith("epoch=")
    ], read_checkpoint(folder)


def read_checkpoint(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize(
    ("launcher", "how"), [("srun", "signal"), ("torchrun", "signal"), ("srun", "scontrol requeue")]
)
def test_a_stopped_job_resumes_bit_for_bit(slurm, datasets, folder, capsys, uninterrupted, launcher, how):
    job = submit(slurm, train_script(capsys, folder, datasets, launcher))
    log = Path(slurm.facts(job)["StdOut"])
    slurm.wait_for("epoch=1 loss", log)
    # SLURM sends the signal for --signal; an administrator requeues, which gives the job no time to save.
    slurm.run(*(["scancel", "--signal=USR1", job] if how == "signal" else ["scontrol", "requeue", job]))
    done = slurm.wait(job)
    assert done.state == "COMPLETED" and done.facts["Restarts"] == "1", done.log
    starts = re.findall(r"^\d: rank=(\d) .* starts at (epoch=\d+ batch=\d+)$", done.log, re.MULTILINE)
    assert sorted(rank for rank, _ in starts) == ["0", "0", "1", "1"]
    assert {where for _, where in starts[:2]} == {"epoch=0 batch=0"}
    if how == "signal":
        stopped = re.search(r"^0: stopped at (epoch=\d+ batch=[1-9]\d*)$", done.log, re.MULTILINE)
        assert stopped is not None, done.log
        assert {where for _, where in starts[2:]} == {stopped[1]}
    else:
        assert all(re.fullmatch(r"epoch=[1-9]\d* batch=0", where) for _, where in starts[2:])
    lines, checkpoint = uninterrupted
    assert [line for index, line in enumerate(epochs_of(done.log)) if line not in epochs_of(done.log)[:index]] == lines
    resumed = read_checkpoint(folder)
    assert resumed["model"].keys() == checkpoint["model"].keys()
    for name, value in checkpoint["model"].items():
        assert torch.equal(resumed["model"][name], value), f"{name} differs from the uninterrupted run"
    # Each run plans its memory by its own measurements, which change no batch.
    states = [[{**rank["loader"], "plan": None} for rank in each["ranks"]] for each in (resumed, checkpoint)]
    assert states[0] == states[1]


WAITS = """
import os, sys, time
import torch, torch.distributed as dist
import salientpp
launch = salientpp.init_process_group()
if os.environ.get("SLURM_RESTART_COUNT") == "1":
    print("came back", flush=True)
    sys.exit()
with salientpp.Preemption() as preemption:
    steps = 0
    while not preemption.should_stop():
        steps += 1
        dist.all_reduce(torch.ones(1))  # as DDP does: a rank that stops earlier would leave the other waiting
        time.sleep(0.05 * launch.rank)
print(f"steps={steps}", flush=True)
preemption.requeue()
"""


@pytest.fixture(scope="module", autouse=True)
def waiting_job(slurm: Cluster) -> str:
    """A job that waits for its time limit. It is submitted first, because it takes minutes and almost no CPU."""
    folder = slurm.folder / "waits"
    folder.mkdir()
    (folder / "waits.py").write_text(WAITS)
    # SLURM checks every 30 s which jobs to signal. The signal comes at least 85 s after the start, when the ranks wait.
    options = [
        "--parts",
        "2",
        "--ranks-per-node",
        "2",
        "--cpus-per-task",
        "1",
        "--time",
        "2",
        "--sbatch=--signal=USR1@5",
    ]
    assert cli.main(["slurm", *options, "--output", str(folder / "waits.sbatch"), "--", "waits.py"]) == 0
    return submit(slurm, folder / "waits.sbatch")


# --- failure ----------------------------------------------------------------------------------------------

DIES = """
import os, signal, sys
from datetime import timedelta
import torch.distributed as dist
import salientpp
# Time-outs are longer than the test waits for the job.
launch = salientpp.init_process_group(timeout=timedelta(hours=1))
loader = salientpp.NeighborLoader(salientpp.load(sys.argv[1]), [5, 3], "train", batch_size=8, shuffle=True, seed=0, timeout=3600)
with salientpp.Preemption() as preemption:
    for epoch in range(1000):
        for batch in loader:
            preemption.should_stop()
            if epoch == 2 and launch.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_rank_that_dies_ends_the_job_at_once_and_is_named(slurm, datasets, folder, capsys, launcher):
    (folder / "dies.py").write_text(DIES)
    script = make_script(
        capsys,
        folder / "dies.sbatch",
        "--parts",
        2,
        "--cpus-per-task",
        1,
        "--time",
        10,
        "--launcher",
        launcher,
        "--",
        "dies.py",
        datasets / "parts-2",
    )
    job = run(slurm, script)
    assert job.state == "FAILED", job.log
    named = r"task 1: Killed" if launcher == "srun" else r"rank +: 1 \(local_rank: 0\)\s.*\s*exitcode +: -9"
    assert re.search(named, job.log), job.log
    assert job.facts["Restarts"] == "0"


def test_the_error_names_a_wrong_network_interface(slurm, folder, capsys):
    (folder / "meets.py").write_text("import salientpp\nsalientpp.init_process_group()\n")
    script = make_script(
        capsys, folder / "meets.sbatch", "--parts", 2, "--cpus-per-task", 1, "--time", 5, "--", "meets.py"
    )
    job = run(slurm, script, GLOO_SOCKET_IFNAME="nosuch0")
    assert job.state == "FAILED"
    assert re.search(
        r"LaunchError: rank \d of 2 on .* could not connect .*GLOO_SOCKET_IFNAME is nosuch0; .* among .*lo", job.log
    ), job.log


def test_a_process_without_srun_learns_that_it_is_not_a_rank(slurm, folder):
    script = folder / "alone.sbatch"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks=2\n{sys.executable} -c 'import salientpp; salientpp.init_process_group()'\n"
    )
    job = run(slurm, script)
    assert job.state == "FAILED"
    assert (
        f"runs in the shell of SLURM's job {job.id}, which has 2 tasks, but it is not one of the tasks; start it with srun"
        in job.log
    )


# --- from Python ------------------------------------------------------------------------------------------


def test_ranks_started_by_submitit_connect(slurm, datasets, folder):
    pytest.importorskip("submitit", reason="submitit is not installed; pip install salientpp[submitit]")
    program = textwrap.dedent(f"""
        import submitit

        def count(root):
            import torch.distributed as dist
            import salientpp
            launch = salientpp.init_process_group()
            loader = salientpp.NeighborLoader(salientpp.load(root), [5, 3], "train", batch_size=8)
            given = sum(1 for _ in loader)
            dist.barrier()
            return launch.rank, given == len(loader) > 0

        executor = submitit.AutoExecutor(folder="logs")
        executor.update_parameters(nodes=2, tasks_per_node=1, cpus_per_task=1, timeout_min=5)
        job = executor.submit(count, {str(datasets / "parts-2")!r})
        print(type(job).__name__, job.results())
    """)
    (folder / "launch.py").write_text(program)
    out = slurm.run(sys.executable, "launch.py", cwd=folder, environment=ENVIRONMENT)
    # submitit prints a warning to stdout that accounting is missing.
    assert out.splitlines()[-1] == "SlurmJob [(0, True), (1, True)]"


# --- last, because it takes longest -----------------------------------------------------------------------


def test_slurm_sends_the_signal_before_the_time_limit(slurm, waiting_job):
    job = slurm.wait(waiting_job)
    assert job.state == "COMPLETED", job.log
    counts = re.findall(r"^(\d): steps=(\d+)$", job.log, re.MULTILINE)
    assert sorted(rank for rank, _ in counts) == ["0", "1"] and len({steps for _, steps in counts}) == 1, job.log
    assert job.log.count("came back") == 2


# --- a lost host ------------------------------------------------------------------------------------------


def test_a_job_whose_host_fails_continues_on_the_remaining_hosts(slurm, datasets, folder, capsys):
    elastic = [ROOT / "examples" / "train_elastic.py", datasets / "parts-2", *WORKLOAD, "--epochs", 12, "--every", 10]
    whole = folder / "whole.pt"
    out = slurm.run(sys.executable, *elastic, "--checkpoint", whole, environment=ENVIRONMENT)
    script = make_script(
        capsys, folder / "elastic.sbatch", "--parts", 2, "--cpus-per-task", 1, "--time", 10, "--", *elastic
    )
    job = submit(slurm, script)
    log = Path(slurm.facts(job)["StdOut"])
    slurm.wait_for("epoch 2:", log)
    try:
        slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
        assert slurm.facts(job)["Restarts"] == "1", "the requeued job waits for its old number of hosts"
        slurm.run("scontrol", "update", f"JobId={job}", "NumNodes=1", "NumTasks=1")
        done = slurm.wait(job)
    finally:
        # The node's daemon still runs, so SLURM may already have taken the node back.
        if "DOWN" in slurm.run("scontrol", "--oneliner", "show", "node", "n2"):
            slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert done.state == "COMPLETED" and done.facts["Restarts"] == "1", done.log
    starts = re.findall(r"^0: (\d) ranks, 2 logical ranks, from epoch (\d+), round \d+$", done.log, re.MULTILINE)
    assert [size for size, _ in starts] == ["2", "1"] and int(starts[1][1]) >= 2, done.log
    (accuracy,) = re.findall(r"^test accuracy .*$", out, re.MULTILINE)
    assert f"0: {accuracy}\n" in done.log
    expected = torch.load(whole, weights_only=True)["model"]
    for name, value in torch.load(folder / "elastic.pt", weights_only=True)["model"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
