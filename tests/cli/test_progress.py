"""Laws of progress: a terminal shows a step's time so far, its rate, and what is left; a pipe gets lines without bars."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import threading

import pytest
from distributed import HANG
from forked_python import python

import salientpp
from salientpp.cli.progress import rate_of
from salientpp.datasets import synthetic


def on_a_terminal(*words: str, folder) -> str:
    """Runs the command with stderr on a pseudo-terminal of 100 columns, and returns what appears there, without its colours."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [python(), "-m", "salientpp", *words]
    received: list[bytes] = []

    def receive() -> None:
        while True:
            try:
                received.append(os.read(ours, 65536))
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=receive)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment, cwd=folder) as process:
        os.close(theirs)
        reader.start()
        assert process.wait(HANG) == 0
    reader.join(HANG)
    os.close(ours)
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", b"".join(received).decode(errors="replace"))


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (
            ["analyze", "synthetic:num_vertices=3000", "--parts", "2", "--epochs", "3", "--policies", "vip,oracle"],
            [r"partitioning \(METIS shows no progress\)", r"rank 0 of 2, epoch 2", r"so far"],
        ),
        (
            ["partition", "synthetic:num_vertices=3000", "d", "--parts", "2"],
            [r"\d\.\d s  assigning 3000 vertices to 2 parts by metis, refined \(METIS shows no progress\)"],
        ),
        (
            ["demo", "--vertices", "2000"],
            [
                "generating a graph",
                "assigning 2000 vertices",
                r"rank 0 of 2, epoch 2",
                "training on 2 ranks without and",
            ],
        ),
        (
            ["calibrate", "parts", "--between", "10GbE", "--seconds", "1"],
            [r"measuring for about 1 s .* 0:00:\d\d so far"],
        ),
    ],
    ids=lambda words: words[0],
)
def test_a_terminal_shows_every_step(tmp_path, words, steps):
    if words[0] == "calibrate":
        salientpp.partition(synthetic(num_vertices=2000), 2, tmp_path / "parts", method="random")
    shown = on_a_terminal(*words, folder=tmp_path)
    for step in [*steps, r"\d:\d\d:\d\d so far"]:
        assert re.search(step, shown), shown[-3000:]
    assert " 0.0 M" not in shown and "-:--:--" not in shown
    assert all(re.search(r"\d:\d\d:\d\d left", before) for before in re.findall(".{12}left", shown))


@pytest.mark.parametrize(
    ("done", "seconds", "text"),
    [
        (0, 5, ""),
        (5, 0, ""),
        (3, 12, "15 batches/min"),
        (57, 10, "5.7 batches/s"),
        (9999, 1, "10 k batches/s"),
        (1_234_567, 1, "1.23 M batches/s"),
        (5_000_000_000, 2, "2.5 G batches/s"),
    ],
)
def test_a_rate_has_three_digits(done, seconds, text):
    assert rate_of(done, seconds, "batches") == text
