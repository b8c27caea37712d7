"""Laws of batch scripts with storage hosts: two components, an address and a secret for the ranks, and a storage that ends with training."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from salientpp import cli
from salientpp.launch.environment import LaunchError
from salientpp.launch.free_address import free_address
from salientpp.launch.sbatch import Batch, Partitioning, script
from salientpp.launch.storage_script import Storage

COMMAND = ["train.py", "it's", "--epochs", "3"]
STORAGE = Storage(2, "my parts", ["--copy-to", "/scratch/a b"], cpus=16, memory="256G", partition="bigmem")
BATCH = Batch(
    COMMAND, parts=4, time="2:00:00", python="/opt/env/bin/python", ranks_per_node=2, gpus_per_node=2, partition="gpu", storage=STORAGE
)  # fmt: skip

#: Commands that stand in for SLURM's and for Python. They record their calls. `srun` of the storage runs until `scancel` is called.
COMMANDS = {
    "srun": """
printf '%s\\0' "$@" "" >> calls
case "$*" in
    *free_address*) printf '1 10.0.0.2:5001\\n0 10.0.0.1:5000\\n' ;;
    *"salientpp serve"*) if [[ $STORAGE == fails ]]; then exit 1; fi; touch serving; until [[ -e cancelled ]]; do sleep 0.05; done; touch ended ;;
    *) printf '%s\\n' "$SALIENTPP_STORAGE" "$SALIENTPP_HOSTS" "$SALIENTPP_TOKEN" > environment; exit "$TRAINING" ;;
esac
""",
    "scancel": 'echo "$*" > cancelled',
    "python": 'case "$*" in *secrets*) echo 0123456789abcdef ;; *--status*) [[ -e serving ]] ;; esac',
}


def directives_of(text: str) -> list[list[str]]:
    """Returns the #SBATCH lines of each component."""
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    at = lines.index("hetjob")
    return [lines[:at], lines[at + 1 :]]


def run_script(folder: Path, batch: Batch, storage: str = "serves", training: int = 0) -> int:
    """Runs a script in ``folder`` with :data:`COMMANDS`. Returns its exit status."""
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "job.sh").write_text(script(replace(batch, python=str(folder / "python")), "test"))
    environ = {
        "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_JOB_ID_HET_GROUP_1": "13", "SLURM_NNODES": "2",
        "STORAGE": storage, "TRAINING": str(training),
    }  # fmt: skip
    return subprocess.run(["bash", "job.sh"], cwd=folder, env=environ, capture_output=True, timeout=60).returncode


def calls_of(folder: Path) -> list[list[str]]:
    calls = (folder / "calls").read_text().removesuffix("\0\0").split("\0\0")
    return [call.split("\0") for call in calls]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize(
    "first", [None, Partitioning("synthetic:num_vertices=100", "my parts")], ids=["alone", "chain"]
)
def test_the_second_component_has_memory_and_no_gpus(tmp_path: Path, launcher: str, first: Partitioning | None) -> None:
    text = script(replace(BATCH, launcher=launcher, first=first), "salientpp slurm")
    training, storage = directives_of(text)
    assert {"--partition=gpu", "--nodes=2", "--gpus-per-node=2", "--time=2:00:00", "--requeue"} <= set(training)
    assert storage == ["--partition=bigmem", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--mem=256G"]
    assert directives_of(script(replace(BATCH, storage=Storage(1, "d")), ""))[1] == [
        "--partition=gpu", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=4",
    ]  # fmt: skip
    file = tmp_path / "script"
    file.write_text(text)
    subprocess.run(["bash", "-n", file], check=True)
    if shutil.which("shellcheck"):  # the tests of tests/slurm require it
        subprocess.run(["shellcheck", file], check=True)


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_ranks_get_address_and_secret_and_the_storage_ends_with_them(
    tmp_path: Path, launcher: str, status: int
) -> None:
    assert run_script(tmp_path, replace(BATCH, launcher=launcher), training=status) == status
    asked, served, trained = calls_of(tmp_path)
    assert asked[:3] == served[:3] == ["--het-group=1", "--ntasks=2", "--ntasks-per-node=1"]
    assert served[-6:] == ["-m", "salientpp", "serve", "my parts", "--copy-to", "/scratch/a b"]
    assert trained[:2] == ["--het-group=0", f"--ntasks={4 if launcher == 'srun' else 2}"]
    assert trained[-len(COMMAND) :] == COMMAND
    address, hosts, token = (tmp_path / "environment").read_text().splitlines()
    assert address == "salientpp://10.0.0.1:5000" and hosts == "10.0.0.1:5000 10.0.0.2:5001" and len(token) >= 16
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 13\n"
    assert (tmp_path / "ended").exists(), "the script waits for the end of the storage"
    assert token not in (tmp_path / "job.sh").read_text()


@pytest.mark.parametrize("number", [0, 1])
def test_each_storage_host_serves_its_own_address_and_ignores_the_signal(tmp_path: Path, number: int) -> None:
    assert run_script(tmp_path, BATCH) == 0
    _, served, _ = calls_of(tmp_path)
    inner = served[served.index("bash") :]
    python = tmp_path / "own_python"
    python.write_text('#!/bin/bash\nkill -USR1 $$\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    inner[inner.index(str(tmp_path / "python"))] = str(python)
    environ = {**os.environ, "SALIENTPP_HOSTS": "a:1 b:2", "SLURM_PROCID": str(number)}
    words = subprocess.run(inner, env=environ, check=True, capture_output=True, text=True).stdout.splitlines()
    assert words[3:] == [
        "my parts",
        "--copy-to",
        "/scratch/a b",
        "--listen",
        ("a:1", "b:2")[number],
        "--hosts",
        "a:1",
        "b:2",
    ]


def test_a_storage_that_cannot_start_ends_the_job_before_training(tmp_path: Path) -> None:
    assert run_script(tmp_path, BATCH, storage="fails") == 1
    assert len(calls_of(tmp_path)) == 2 and not (tmp_path / "environment").exists()


def test_a_script_without_storage_has_one_component() -> None:
    text = script(replace(BATCH, storage=None), "salientpp slurm")
    assert "het" not in text and "SALIENTPP" not in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hosts": 0}, "--storage-hosts must be an integer from 1"),
        ({"hosts": 3}, "--storage-hosts=3 does not fit 2 parts: use at most 2 storage hosts or a multiple of 2"),
        ({"cpus": 0}, "--storage-cpus must be an integer from 1"),
        ({"memory": "256 G"}, "--storage-memory must be a size as sbatch's --mem takes it, such as 256G, got '256 G'"),
        ({"partition": "big mem"}, "--storage-partition must be a name without blanks"),
        ({"root": " "}, "--root must not be empty"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        replace(BATCH, parts=2, storage=replace(STORAGE, **changes))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["--storage-hosts", "1"],
            "--storage-hosts requires --root: the dataset directory that the storage hosts serve",
        ),
        (["--storage-hosts", "-1", "--root", "d"], "--storage-hosts must be an integer from 1"),
        (["--root", "d"], "--dataset and --root require each other"),
        (
            ["--storage-hosts", "1", "--root", "d", "--storage-options", "'"],
            "--storage-options must be arguments in shell",
        ),
    ],
)
def test_the_command_refuses_wrong_options(capsys: pytest.CaptureFixture[str], given: list[str], words: str) -> None:
    assert cli.main(["slurm", "--parts", "2", "--time", "5", *given, "--", "train.py"]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_the_command_writes_the_script_of_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--parts",
        "4",
        "--time",
        "2:00:00",
        "--partition",
        "gpu",
        "--gpus-per-node",
        "2",
        "--storage-hosts",
        "2",
        "--root",
    ]
    own = ["my parts", "--storage-partition", "bigmem", "--storage-cpus", "16", "--storage-memory", "256G"]
    own += ["--storage-options", "--copy-to '/scratch/a b'", "--python", BATCH.python]
    assert cli.main(["slurm", *given, *own, "--", *COMMAND]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("# Made by")]
    assert lines == [line for line in script(BATCH, "").splitlines() if not line.startswith("# Made by")]


# --- addresses ----------------------------------------------------------------------------------------------


def test_a_free_address_can_be_listened_at() -> None:
    host, _, port = free_address({"GLOO_SOCKET_IFNAME": "lo"}).rpartition(":")
    assert host == "127.0.0.1"
    with socket.create_server((host, int(port))):
        pass


def test_an_ipv6_address_has_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("salientpp.launch.free_address.addresses_of", lambda name: ["127.0.0.1"])
    assert re.fullmatch(r"127\.0\.0\.1:\d+", free_address({}))
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text():
        monkeypatch.setattr("salientpp.launch.free_address.addresses_of", lambda name: ["::1"])
        assert re.fullmatch(r"\[::1\]:\d+", free_address({}))


def test_a_host_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("salientpp.launch.free_address.addresses_of", lambda name: [])
    for environ, words in (
        ({}, f"the host name {socket.gethostname()}"),
        ({"GLOO_SOCKET_IFNAME": "no0"}, "interface no0"),
    ):
        with pytest.raises(LaunchError, match=f"{words}.* has no address at which other hosts can reach"):
            free_address(environ)
