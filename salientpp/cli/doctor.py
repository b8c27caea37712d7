"""``salientpp doctor``: checks this machine and the installed software, and says what to change."""

from __future__ import annotations

import argparse
import getpass
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salientpp.cli import terminal
from salientpp.cli.checks.directory import check_directory
from salientpp.cli.checks.finding import Finding, Machine
from salientpp.cli.checks.limits import (
    check_cores,
    check_huge_pages,
    check_locked_memory,
    check_memory,
    check_open_files,
    check_shared_memory,
)
from salientpp.cli.checks.network import check_network
from salientpp.cli.checks.self_test import check_ranks
from salientpp.cli.checks.software import (
    check_environment,
    check_gpu,
    check_installed,
    check_libraries,
    check_operators,
)
from salientpp.cli.shared_arguments import add_json, adder, directory_of, files_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from salientpp.progress import Progress

NEEDS_TORCH = False  # a missing torch is a finding
HELP = "check this machine and the installation, and say what to change"
EXAMPLE = "salientpp doctor"

#: Checks by the name of their line, in the order in which they run. None as a result: the check does not apply.
CHECKS: dict[str, Callable[[Machine], Finding | None]] = {
    "versions": check_installed,
    "operators": check_operators,
    "cores": check_cores,
    "memory": check_memory,
    "open files": check_open_files,
    "/dev/shm": check_shared_memory,
    "network": check_network,
    "huge pages": check_huge_pages,
    "GPU": check_gpu,
    "locked memory": check_locked_memory,
    "environment": check_environment,
    "libraries": check_libraries,
    "directory": check_directory,
    "two ranks": check_ranks,
}
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}

TEXTS = {"directory": "dataset directory or converted graph, whose bytes are all compared with their checksums"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check this machine and the installation: versions, limits, network, compiled operators, GPU and environment. Two ranks of this machine load "
        "a small graph. Each line is ok, a note or a problem, and the end says what to change. With a problem the exit status is 2. The output has no "
        "user names, and can be pasted into a bug report."
    )
    add = adder(parser, TEXTS)
    add("directory", type=directory_of, nargs="?", metavar="DIR")
    add_json(parser, "all values")


def run(arguments: argparse.Namespace) -> int:
    from salientpp.cli.progress import shown_progress

    files = files_of(arguments, "json")
    with shown_progress(lines=False) as progress:
        findings = examine(Machine(directory=arguments.directory), progress)
    changes = changes_of(findings)
    contents = {"json": lambda: (json.dumps(as_json(findings), indent=1) + "\n").encode()}
    terminal.finish(files, contents, arguments.written, lambda: shown(findings, changes))
    if problems := [name for name, finding in findings.items() if finding.status == "problem"]:
        found = f"found {len(problems)} problem{'s' * (len(problems) > 1)} ({', '.join(problems)})"
        raise ValueError(f"{found}; the end of the report says what to change")
    return 0


def examine(machine: Machine, progress: Progress | None = None) -> dict[str, Finding]:
    """Runs all checks. Returns their findings by name, without the names of users and their home folders."""
    findings: dict[str, Finding] = {}
    for name, check in CHECKS.items():
        if progress is not None:
            progress.begin(f"checking {name}")
        try:
            finding = check(machine)
        except ImportError as error:
            again = "Run `salientpp doctor` again when torch and PyG can be imported: some checks need them."
            finding = Finding(f"not checked ({error})", notes=[again])
        except Exception as error:
            finding = Finding(
                f"this check failed ({type(error).__name__}: {error})",
                notes=[f"Report that the check of {name} failed: {type(error).__name__}: {error}."],
            )
        if finding is not None:
            findings[name] = Finding(**_without_names(asdict(finding)))
    return findings


def changes_of(findings: Mapping[str, Finding]) -> list[str]:
    """Returns what to change: first problems, then notes. A sentence that several checks give is returned once."""
    problems = [text for finding in findings.values() for text in finding.problems]
    return list(dict.fromkeys(problems + [text for finding in findings.values() for text in finding.notes]))


def as_json(findings: Mapping[str, Finding]) -> dict[str, Any]:
    """Returns all that was found, as JSON values."""
    checks = {name: {"status": finding.status, **asdict(finding)} for name, finding in findings.items()}
    return {"checks": checks, "change": changes_of(findings)}


def shown(findings: Mapping[str, Finding], changes: list[str]) -> list[RenderableType]:
    """Returns a table with a line for each finding, and the list of changes."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, finding in findings.items():
        table.add_row(name, Text(finding.status, _STYLES[finding.status]), terminal.printable(finding.text))
    if not changes:
        return [table, "", "Nothing to change."]
    numbered = Table.grid(padding=(0, 1))
    for number, change in enumerate(changes, 1):
        numbered.add_row(f"{number}.", terminal.printable(change))
    return [table, "", "To change:", numbered]


def _without_names(value: Any) -> Any:
    """Returns a copy of JSON values in which texts hide the home folder and the user's name, so that users can publish a report."""
    if isinstance(value, Mapping):
        return {key: _without_names(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_names(entry) for entry in value]
    if not isinstance(value, str):
        return value
    try:
        home, user = str(Path.home()), getpass.getuser()
    except (RuntimeError, OSError, KeyError, ImportError):  # this user has neither
        return value
    value = value.replace(home, "~") if len(home) > 1 else value
    return (
        re.sub(rf"(?<=/){re.escape(user)}(?![\w-]|\.\w)", "USER", value) if user else value
    )  # a sentence may end after it
