"""Laws of `make test-versions`: the table names every version, a run replaces its rows only, and failures are shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from salientpp.versions import NEEDED
from tests import versions
from tests.versions import BEGIN, END, PAGE, PAIRS, ROOT, Row, outcome, rows_of, with_rows

EMPTY = f"before\n{BEGIN}\n\n{END}\nafter\n"
OLD = Row("2.10.0+cu128", "3.10.13", "2.8.1", "9 passed", "identical", "2026-01-01")
NEW = Row("2.11.0", "3.11.7", "2.8.1", "8 passed, 1 failed", "differ", "2026-01-02")
NONE = Row("2.15", "3.14", "", "not run: this machine has no Python 3.14", "", "2026-01-02")


def test_rows_are_read_as_written_and_sorted():
    page = with_rows(EMPTY, [NONE, NEW, OLD])
    assert rows_of(page) == [OLD, NEW, NONE]
    assert page.startswith(f"before\n{BEGIN}\n\n| torch | Python |") and page.endswith(f" |\n\n{END}\nafter\n")


def test_a_run_replaces_the_rows_of_its_versions_only():
    page = with_rows(EMPTY, [OLD, NEW])
    again = Row("2.11.1", "3.11.9", "2.9.0", "9 passed", "identical", "2026-01-03")
    assert rows_of(with_rows(page, [again])) == [OLD, again]
    assert with_rows(page, []) == page


def test_the_pairs_and_the_table_have_every_torch_and_every_python():
    for pairs in (
        PAIRS,
        [f"{row.pair[0][0]}.{row.pair[0][1]}:{row.pair[1][0]}.{row.pair[1][1]}" for row in rows_of(PAGE.read_text())],
    ):
        torches, pythons = ({each.split(":")[side] for each in pairs} for side in (0, 1))
        assert torches == {f"2.{minor}" for minor in range(NEEDED["torch"][1], 16)}
        assert pythons == {f"3.{minor}" for minor in range(10, 15)}


def test_every_file_of_the_laws_exists():
    assert all((ROOT / path).exists() for path in versions.LAWS)


CASE = '<testcase classname="tests.engine.test_same_batches" name="a">{}</testcase>'
OTHER = '<testcase classname="tests.ops.test_ops" name="a">{}</testcase>'


@pytest.mark.parametrize(
    "cases, expected",
    [
        ([CASE.format(""), OTHER.format("")], ("2 passed", "identical")),
        ([CASE.format(""), OTHER.format("<failure/>")], ("1 passed, 1 failed", "identical")),
        ([CASE.format("<failure/>"), CASE.format("")], ("1 passed, 1 failed", "differ")),
        ([CASE.format("<error/>"), OTHER.format("<skipped/>")], ("0 passed, 1 failed, 1 skipped", "differ")),
        ([OTHER.format("")], ("1 passed", "")),
    ],
)
def test_a_report_becomes_numbers_of_tests_and_a_word_on_batches(tmp_path, cases, expected):
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert outcome(report) == expected


def test_a_missing_python_is_a_row_and_no_error(monkeypatch):
    row = versions.tested("2.15", "3.99", Path("none.whl"), "2")
    assert (row.torch, row.python, row.result, row.batches) == (
        "2.15",
        "3.99",
        "not run: this machine has no Python 3.99",
        "",
    )
    page = with_rows(EMPTY, [row])
    assert rows_of(page) == [row]


def test_the_running_python_is_found(monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    found = versions.interpreter(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert found is not None and Path(found).exists()


@pytest.mark.parametrize("given", ["2.10", "2.10.0:3.10", "2.10-3.10"])
def test_other_words_are_refused(monkeypatch, capsys, given):
    monkeypatch.setattr(sys, "argv", ["versions", __file__, given])
    with pytest.raises(SystemExit):
        versions.main()
    assert f"expected pairs such as 2.10:3.10, got {given!r}" in capsys.readouterr().err


def test_a_missing_wheel_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["versions", "none.whl"])
    with pytest.raises(SystemExit):
        versions.main()
    assert "got none.whl, which does not exist; build one with `make wheel`" in capsys.readouterr().err
