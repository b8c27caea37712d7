"""Runs the command in the process of the test."""

from __future__ import annotations

import pytest

from salientpp import cli


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Keeps the command from breaking lines in which a test looks for words."""
    monkeypatch.setenv("COLUMNS", "300")


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    capsys.readouterr()
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def mistake(capsys, *arguments: object) -> str:
    """The single line on stderr that is not a step. Lines of steps end in 's  <step>'."""
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == ""
    said = [line for line in err.splitlines() if not line[:9].endswith(" s")]
    assert len(said) == 1, err
    assert "Traceback" not in err
    return said[0]
