"""Builds, tests and measures salientpp on a machine with a GPU, and ends with a summary: ``make gpu-check``.

    python benchmarks/gpu_check.py

It builds the extension and measures training (``bench_cuda.py``). It runs the tests on the device and of the kernels. It measures sampling and decoding
(``bench_device_sampler.py``, ``bench_decode.py``). Last, it runs some tests under torch's sanitizer of CUDA streams. Each step has a time limit. A step
that fails does not stop the next ones, but the exit code is then 1. The whole takes at most ten minutes and downloads nothing. It writes
results/gpu_check.json, cuda.json, device_sampler.json and decode.json. Tests run in eight processes if pytest-xdist is installed.

``--device cpu`` tries the script on a machine without a GPU. It does not build, and tests that need a GPU are skipped. Further arguments go to
``bench_cuda.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

#: Tests that run under the sanitizer. It watches operators in the caller's thread, in which the pipeline runs, and makes them many times slower.
UNDER_SANITIZER = [
    "tests/device/test_batches.py::test_batches_on_the_device_equal_batches_on_the_cpu",
    "tests/device/test_batches.py::test_attributes_already_on_the_device_are_in_the_batch",
    "tests/device/test_batches.py::test_a_transform_runs_on_the_device",
    "tests/device/test_epochs.py::test_loaders_that_take_turns_do_not_disturb_each_other",
]


@dataclass(frozen=True)
class Step:
    """A command with a time limit.

    Attributes:
        environ: variables added to those of this process.
        report: file to which pytest writes what became of each test, or None.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    environ: Mapping[str, str] = field(default_factory=dict)
    report: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """Outcome of a step.

    Attributes:
        code: exit code, or None if the step was stopped at its time limit.
        tests: (file of tests, what became of them) -> number.
    """

    name: str
    code: int | None
    seconds: float
    tests: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.code == 0

    @property
    def words(self) -> str:
        if self.code is None:
            return f"stopped at its limit of {self.seconds:.0f} s"
        return f"{'passed' if self.passed else f'FAILED with exit code {self.code}'} in {self.seconds:.0f} s"

    def number(self, what: str) -> int:
        return sum(number for (_, became), number in self.tests.items() if became == what)


def steps(device: str, results: Path, folder: Path, more: Sequence[str]) -> list[Step]:
    """Returns the steps. Reports of tests are written to ``folder``."""
    python = sys.executable
    pip = f"{python} -m pip install --quiet --no-build-isolation --no-deps --no-index --editable .".split()
    # Triton's compiler and the start of ranks take most of the tests' time.
    processes = ["-n", "8", "--dist", "worksteal"] if device == "cuda" and find_spec("xdist") else []
    pytest = [python, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *processes]
    tests, sanitizer = folder / "tests.xml", folder / "sanitizer.xml"
    to = [] if results == RESULTS else ["--results", str(results)]
    training = [python, "benchmarks/bench_cuda.py", *more, *to]
    if device == "cpu":
        return [
            Step("tests", [*pytest, f"--junit-xml={tests}", "tests/device"], 180, report=tests),
            Step("training", [*training, "--device", "cpu"], 170),
        ]
    need = {"FAIL_WITHOUT_CUDA": "1"}
    watch = {**need, "TORCH_CUDA_SANITIZER": "1"}
    on_gpu = ["tests/device", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/*/test_*_cuda.py"))]
    return [
        Step("build", pip, 80),
        Step("training", training, 240),
        Step("tests", [*pytest, f"--junit-xml={tests}", *on_gpu], 120, need, tests),
        Step("sampling", [python, "benchmarks/bench_device_sampler.py", *to], 60),
        Step("decoding", [python, "benchmarks/bench_decode.py", *to], 25),
        Step("sanitizer", [*pytest, f"--junit-xml={sanitizer}", *UNDER_SANITIZER], 75, watch, sanitizer),
    ]


def run(step: Step) -> Outcome:
    """Runs a step. At its time limit it and its children are killed."""
    print(f"\n=== {step.name}: {' '.join(step.command)}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(step.command, cwd=ROOT, env={**os.environ, **step.environ}, start_new_session=True)
    try:
        code: int | None = process.wait(step.limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Outcome(step.name, code, time.monotonic() - started, count_tests(step.report))


def count_tests(report: Path | None) -> Counter[tuple[str, str]]:
    """Counts the tests of a report by file and by outcome: passed, failed or skipped. A report that was not finished counts as none."""
    found: Counter[tuple[str, str]] = Counter()
    if report is None or not report.is_file():
        return found
    for case in ET.parse(report).iter("testcase"):
        became = {child.tag for child in case}
        outcome = "failed" if became & {"failure", "error"} else "skipped" if "skipped" in became else "passed"
        found[case.get("classname", "").rpartition(".")[2], outcome] += 1
    return found


def of_tests(outcome: Outcome) -> str:
    return ", ".join(f"{outcome.number(what)} {what}" for what in ("passed", "failed", "skipped"))


def of_files(outcome: Outcome) -> str:
    """Passed tests of each file, of those that ran."""
    files = dict.fromkeys(file for file, _ in outcome.tests)
    ran = {file: (outcome.tests[file, "passed"], outcome.tests[file, "failed"]) for file in files}
    return ", ".join(
        f"{file.removeprefix('test_')} {passed}/{passed + failed}" for file, (passed, failed) in ran.items()
    )


def of_benchmark(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns three lines about what was measured."""
    epochs = {(row["model"], row["name"]): row for row in rows if row["part"] == "epoch"}
    loads = {row["name"]: row["batches_per_second"] for row in rows if row["part"] == "loading"}
    peers = [name for name in loads if name.startswith("PyG")]
    lines = []
    for model in ("plain", "trimmed"):
        ours = [row for (of, name), row in epochs.items() if of == model and name != "floor" and name not in peers]
        if ours:
            best = min(ours, key=lambda row: row["ms_per_batch"])
            floor = epochs[model, "floor"]["ms_per_batch"]
            times = f"{best['over_floor']:.2f} times the floor of {floor:.1f} ms per batch ({best['name']})"
            peer = [
                f"{epochs[model, name]['over_floor']:.2f} times with {name}"
                for name in peers
                if (model, name) in epochs
            ]
            lines.append(f"{model} step: {', '.join([times, *peer])}")
    best = max((name for name in loads if name not in peers), key=loads.__getitem__, default=None)
    if best is not None:
        ratio = [f"{loads[best] / loads[name]:.1f} times as many as {name}" for name in peers]
        lines.append(
            f"loading alone: {loads[best]:.0f} batches per second ({best}), {', '.join(ratio) or 'PyG has no sampler here'}"
        )
    for row in rows:
        if row["part"] == "assembly" and row["dtype"] == "torch.float32":
            rate, ratio = 2 * row["bytes"] / row["fused_us"] / 1e3, row["in_torch_us"] / row["fused_us"]
            lines.append(f"assembly of float32 rows: {rate:.0f} GB/s, {ratio:.1f} times as fast as torch's operators")
    return lines


def summary(outcomes: Sequence[Outcome], measured: Mapping[str, Any] | None) -> list[str]:
    """Returns the last lines of the output."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    lines = [f"{gpu}; torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}"]
    for outcome in outcomes:
        tests = f": {of_tests(outcome)}" if outcome.tests else ""
        lines.append(f"{outcome.name} {outcome.words}{tests}")
        if outcome.name == "tests" and outcome.tests:
            lines.append(f"  passed by file: {of_files(outcome)}")
    if measured is not None:
        lines += [f"  {line}" for line in of_benchmark(measured["rows"])]
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    return [*lines, f"FAILED: {', '.join(failed)}" if failed else "everything passed"]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    arguments, more = parser.parse_known_args(given)
    written, began = arguments.results / "cuda.json", time.time()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = [run(step) for step in steps(arguments.device, arguments.results, Path(folder), more)]
    write(outcomes, arguments.results)
    measured = json.loads(written.read_text()) if written.is_file() and written.stat().st_mtime >= began else None
    print("\n=== summary", *summary(outcomes, measured), sep="\n", flush=True)
    return int(not all(outcome.passed for outcome in outcomes))


def write(outcomes: Sequence[Outcome], results: Path) -> None:
    """Writes results/gpu_check.json, if the package could be built."""
    sys.path.insert(0, str(ROOT))  # the package was installed after this interpreter started
    try:
        from common import write_results
    except ImportError as error:
        print(f"no results are written: {error}")
        return
    rows = [
        {
            "step": outcome.name,
            "code": outcome.code,
            "seconds": outcome.seconds,
            "tests": {what: outcome.number(what) for what in ("passed", "failed", "skipped")},
        }
        for outcome in outcomes
    ]
    write_results("gpu_check", rows, results)


if __name__ == "__main__":
    sys.exit(main())
