"""Laws of the script behind `make gpu-check`: it runs every step, stops a step at its limit, and tells what failed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import bench_cuda
import gpu_check
from distributed import HANG
from drawing import gpu
from gpu_check import Outcome, Step, count_tests, run


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_step_that_fails_does_not_stop_the_next(monkeypatch, tmp_path, capfd):
    steps = [Step("first", python("raise SystemExit(3)"), 300), Step("second", python("print('ran')"), 300)]
    monkeypatch.setattr(gpu_check, "steps", lambda *_: steps)
    assert gpu_check.main(["--device", "cpu", "--results", str(tmp_path)]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert "ran" in lines and lines[-1] == "FAILED: first"
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [row["code"] for row in found["rows"]] == [3, 0]
    table = gpu.draw_tests(found).splitlines()
    assert table[4].startswith("| first | failed | ") and table[5].startswith("| second | passed | ")
    monkeypatch.setattr(gpu_check, "steps", lambda *_: steps[1:])
    assert gpu_check.main(["--device", "cpu", "--results", str(tmp_path)]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "everything passed"


def test_a_step_is_stopped_at_its_limit_with_its_children(tmp_path):
    written = tmp_path / "pid"
    code = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)']);"
        f"open({str(written)!r}, 'w').write(str(child.pid)); time.sleep(3600)"
    )
    limit = 1.0
    while not (written.exists() and written.read_text()):  # on a busy machine the child may need longer to start
        outcome = run(Step("slow", python(code), limit))
        limit *= 2
    assert outcome.code is None and not outcome.passed and "stopped at its limit" in outcome.words
    ends = time.monotonic() + HANG
    while is_running(int(written.read_text())):  # a killed process needs a moment to end
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_tests_are_counted_by_file_and_outcome(tmp_path):
    code = "import pytest\n@pytest.mark.parametrize('i', [0, 1, 2])\ndef test_it(i): assert i or pytest.skip('no')\ndef test_no(): assert False"
    (tmp_path / "test_sample.py").write_text(code)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={tmp_path}", f"--junit-xml={report}", str(tmp_path)]
    outcome = run(Step("tests", command, 300, report=report))
    assert outcome.code == 1
    assert {what: outcome.number(what) for what in ("passed", "failed", "skipped")} == {
        "passed": 2,
        "failed": 1,
        "skipped": 1,
    }
    assert gpu_check.of_files(outcome) == "sample 2/3"
    report.unlink()
    assert count_tests(report) == {}


def test_the_steps_need_a_gpu_only_on_cuda(tmp_path):
    on_gpu = gpu_check.steps("cuda", tmp_path, tmp_path, [])
    assert [step.name for step in on_gpu] == ["build", "training", "tests", "sampling", "decoding", "sanitizer"]
    assert all(step.environ["FAIL_WITHOUT_CUDA"] == "1" for step in on_gpu if step.report)
    assert on_gpu[-1].environ["TORCH_CUDA_SANITIZER"] == "1"
    assert sum(step.limit_s for step in on_gpu) <= 600
    arguments = [argument for step in on_gpu if step.report for argument in step.command]
    named = [argument.partition("::") for argument in arguments if argument.startswith("tests/")]
    assert len(named) > 5
    for file, _, name in named:
        assert (gpu_check.ROOT / file).exists() and (
            not name or f"def {name}(" in (gpu_check.ROOT / file).read_text()
        ), file
    on_cpu = gpu_check.steps("cpu", tmp_path, tmp_path, [])
    assert [step.name for step in on_cpu] == ["tests", "training"] and not any(step.environ for step in on_cpu)


def test_the_benchmark_runs_on_the_cpu_and_is_summarised(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_cuda, "TIERS", bench_cuda.TIERS[::8])
    sizes = {
        "vertices": 2000,
        "sparse-vertices": 12_000,
        "batch-size": 8,
        "hidden": 4,
        "workers": 0,
        "turns": 1,
        "batches": 2,
    }
    given = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    bench_cuda.main(["--device", "cpu", "--results", str(tmp_path), *given])
    measured = json.loads((tmp_path / "cuda.json").read_text())
    assert [*measured["seconds"]] == [
        "first graph", "assembly", "loaders", "plain", "trimmed", "second graph", "tiers",
    ]  # fmt: skip
    for name, (file, draw) in gpu.DRAWN.items():
        if file == "cuda":
            rows = [line for line in draw(measured).splitlines() if line.startswith("|")]
            assert len(rows) > 3 and {row.count("|") for row in rows} == {rows[0].count("|")}, name
    lines = gpu_check.summary([Outcome("training", 0, 1.0)], measured)
    begins = [
        "",
        "training",
        "  plain step",
        "  trimmed step",
        "  loading alone",
        "  assembly",
        "everything passed",
    ]
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True)), lines
