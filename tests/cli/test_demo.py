"""Laws of ``salientpp demo``: ranks fetch the rows that were counted, and nothing but the plot is left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import mistake, run, wide_terminal  # noqa: F401  the fixture is used by name
from forked_python import python


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(sys, "executable", python())
    monkeypatch.setenv("PYTHON_EXEC", python())  # for torchrun's ranks
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_ranks_fetch_the_rows_that_were_counted(empty_folder: Path, capsys: pytest.CaptureFixture) -> None:
    _, printed, _ = run(capsys, "demo", "--vertices", "3000")
    lines = dict(re.findall(r"^ +(none|20% of a part) +([\d,]+ +[\d,]+) +[\d.]+ +[\d.]+ +[\d.]+ *$", printed, re.M))
    counted, fetched = zip(*(map(int, line.replace(",", "").split()) for line in lines.values()))
    assert counted == fetched and counted[0] > counted[1] > 0
    assert "equal to the last bit" in printed
    assert [path.name for path in empty_folder.iterdir()] == ["salientpp-demo.png"]
    assert (empty_folder / "salientpp-demo.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_demo_leaves_out_only_the_plot(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, printed, complaints = run(capsys, "demo", "--vertices", "2000")
    assert code == 0 and "rows fetched" in printed
    assert "pip install 'salientpp[plot]'" in complaints
    assert not list(empty_folder.iterdir())
    assert "a plot needs matplotlib" in mistake(capsys, "demo", "--plot", "x.png")


def test_a_failed_rank_is_an_error(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: SimpleNamespace(returncode=1))
    code, _, complaints = run(capsys, "demo", "--vertices", "2000")
    assert code == 2 and "the training on 2 ranks failed (exit status 1)" in complaints
    assert not list(empty_folder.iterdir())


def test_a_plot_of_another_kind_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert "--plot must end in .png or .svg, got x.jpg" in mistake(capsys, "demo", "--plot", "x.jpg")
