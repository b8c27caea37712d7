"""Runs pytest, then each failed test once more, alone: ``python -m tests.run [arguments of pytest]``.

A test that passes the second time is flaky. The last lines of the output name the flaky tests. The exit code is 0 if every failed test is flaky and
their number is at most ``MOST_FLAKY``, otherwise 1. Nothing runs again if more than ``MOST_FAILED`` tests fail, if a file cannot be collected, or if
pytest ends for another reason.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MOST_FLAKY = 2
MOST_FAILED = 20


class Failures:
    """Pytest plugin that records the failed tests, including those of xdist's workers."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.folder = Path()
        self.is_broken = False  # a file could not be collected

    def pytest_configure(self, config: pytest.Config) -> None:
        self.folder = config.rootpath

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.is_broken |= report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names[report.nodeid] = None


def passes_alone(name: str, folder: Path) -> bool:
    """Returns True if the test passes in a pytest process of its own. Its markers do not matter."""
    return subprocess.run([sys.executable, "-m", "pytest", "-m", "", name], cwd=folder).returncode == 0


def main(arguments: list[str]) -> int:
    failures = Failures()
    code = int(pytest.main(arguments, plugins=[failures]))
    if failures.is_broken or code != pytest.ExitCode.TESTS_FAILED or not 0 < len(failures.names) <= MOST_FAILED:
        return code
    flaky, failed = [], []
    for name in failures.names:
        print(f"\nfailed; running it once more, alone: {name}", flush=True)
        (flaky if passes_alone(name, failures.folder) else failed).append(name)
    print()
    for name in failed:
        print(f"failed twice: {name}")
    for name in flaky:
        print(f"flaky: failed, and passed alone: {name}")
    if len(flaky) > MOST_FLAKY:
        print(f"{len(flaky)} tests are flaky; more than {MOST_FLAKY} fail the run")
    return int(bool(failed) or len(flaky) > MOST_FLAKY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
