"""Laws of ``salientpp calibrate``: the ranks of a job write one file, and a mistake on one rank ends them all."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from command_line import mistake, run, wide_terminal  # noqa: F401  the fixture is used by name
from distributed import HANG
from forked_python import python
from graphs import random_data

import salientpp
from salientpp.cli.calibrate import link_of
from salientpp.ways.planner.machines import LINKS, Link, Machines

FANOUTS, BATCH = [4, 3], 8

#: A file with steps of the user. `late` fails on rank 1 while rank 0 waits for rank 1 to make the same module.
STEPS = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel
from beside import WIDTH

def make_step(part):
    model = torch.nn.Linear(part.num_features, WIDTH)
    if torch.distributed.is_initialized():
        model = DistributedDataParallel(model)
    def step(batch):
        model(batch.x).sum().backward()
    return step, model

def late(part):
    if os.environ["RANK"] == "1":
        raise ValueError("the user's mistake")
    return make_step(part)

def wrong(part):
    return 3
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    data = random_data(600, 3600, train_fraction=0.5)
    return salientpp.partition(data, 2, tmp_path_factory.mktemp("calibrate") / "d", FANOUTS, BATCH).root


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    (folder / "beside.py").write_text("WIDTH = 5")
    (folder / "steps.py").write_text(STEPS)
    return folder / "steps.py"


def _ranks(*arguments: list[object]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of the command on each rank, with these arguments."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank, words in enumerate(arguments):
        places = {"RANK": rank, "WORLD_SIZE": len(arguments), "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": len(arguments)}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
        environ = {
            **os.environ,
            "COLUMNS": "300",
            **{name: str(value) for name, value in {**places, **meeting}.items()},
        }
        command = [python(), "-m", "salientpp", "calibrate", *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen(command, env=environ, text=True, **pipes))
    try:
        said = [rank.communicate(timeout=HANG) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said)]


def test_ranks_write_one_file_with_links_and_the_step(root, steps, tmp_path):
    file = tmp_path / "machines.json"
    words = [root, "--ranks-per-host=1", "--seconds=0.2", f"--step={steps}:make_step", f"--json={file}"]
    (code, out, err), (other_code, other_out, other_err) = _ranks(words, words)
    assert (code, other_code) == (0, 0), err + other_err
    assert other_out == "" and "link between hosts" in out and "2 ranks on 2 hosts" in out
    machines = Machines.read(file)
    assert machines.between.bytes_per_second > 0 and machines.cores > 0
    # Gradients of a layer of the width 5; with two ranks each receives as many bytes as the gradients have.
    features = salientpp.load(root).num_features
    assert machines.step.gradient_bytes == 4 * 5 * (features + 1) and machines.step.seconds > 0
    about = {"ranks": 2, "hosts": 2, "num_neighbors": FANOUTS, "batch_size": BATCH, "salientpp": salientpp.__version__}
    assert about.items() <= machines.about.items()


def test_one_process_measures_everything_except_links(capsys, steps, tmp_path):
    part = salientpp.partition(random_data(600, 3600), 1, tmp_path / "one", FANOUTS, BATCH)
    file = tmp_path / "machines.json"
    words = [part.root, "--seconds=0.2", "--num-neighbors=2,2", "--batch-size=5", f"--json={file}"]
    said = mistake(capsys, "calibrate", *words)
    assert (
        "--between is required, because this is a single process, which cannot measure the link between hosts" in said
    )
    assert not file.exists()
    code, out, _ = run(capsys, "calibrate", *words, "--between=2e9:1e-4", f"--step={steps}:make_step")
    machines = Machines.read(file)
    assert code == 0 and machines.between == Link(2e9, 1e-4) and machines.step.gradient_bytes == 0
    assert (machines.about["num_neighbors"], machines.about["batch_size"]) == ([2, 2], 5)
    assert "2,000.0 MB/s" in out and "400 ns per 1000 bytes (not measured)" in out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--json={here}/no/m.json"], "--json: "),
        (
            ["--between=2GbE"],
            "--between must be one of 1GbE, 10GbE, 25GbE, 100GbE, InfiniBand HDR, InfiniBand NDR, or BYTES",
        ),
        (["--step=train.txt"], "--step must be FILE.py:FUNCTION, such as train.py:make_step, got 'train.txt'"),
        (["--step={here}/no.py:f"], "no.py does not exist; pass the path of a Python file that this rank can read"),
        (["--step={steps}:f"], "steps.py must have a function f(part), and it has none"),
        (
            ["--step={steps}:wrong", "--between=1GbE"],
            "steps.py:wrong must return step(batch), or (step, module), got int",
        ),
        (
            ["--seconds=0", "--between=1GbE"],
            "seconds must be a number > 0 and at most 3600 (the time that measuring takes), got 0.0",
        ),
        (["--seeds=spam", "--between=1GbE"], "spam"),
    ],
)
def test_a_mistake_is_one_line(capsys, root, steps, tmp_path, options, text):
    options = [option.format(here=tmp_path, steps=steps) for option in options]
    assert text in mistake(capsys, "calibrate", root, f"--json={tmp_path}/m.json", *options)
    assert not (tmp_path / "m.json").exists()


def test_a_mistake_on_one_rank_ends_all_ranks(root, steps, tmp_path):
    words = [root, "--ranks-per-host=1", f"--json={tmp_path}/m.json"]
    for option, text in (
        (f"--step={steps}:f", "rank 1 could not calibrate: ValueError: --step: "),
        ("--between=2GbE", "rank 1 could not calibrate: ValueError: --between must be one of"),
    ):
        (code, _, err), (other_code, _, other_err) = _ranks(words, [*words, option])
        assert code == other_code == 2
        assert text in err and text.rpartition("ValueError: ")[2] in other_err
    (code, _, err), (other_code, _, other_err) = _ranks(*[[*words, f"--step={steps}:late"]] * 2)
    assert other_code == 2 and "the user's mistake" in other_err
    assert code != 0, err
    assert not (tmp_path / "m.json").exists()


def test_a_link_is_a_name_or_numbers():
    assert link_of("InfiniBand HDR") == LINKS["InfiniBand HDR"]
    assert link_of("1.25e9") == Link(1.25e9, 0.0) and link_of("5:0.5") == Link(5.0, 0.5)
    for text in ("", "0", "-1", "inf", "1:-1", "1:x", "10gbe"):
        with pytest.raises(ValueError, match="--between must be one of"):
            link_of(text)
