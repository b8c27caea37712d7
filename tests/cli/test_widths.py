"""Laws of tables: no terminal is so narrow that a number is cut."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import run

import salientpp
from salientpp.analysis.analyze import analyze
from salientpp.datasets import synthetic, synthetic_mag

ANALYZE = ["--epochs=1", "--details", "--replication-factors=0,.01,.05,.1,.2,.5,1,1.5"]


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("widths")
    plain = synthetic(num_vertices=1200, num_features=8, community_size=40)
    mag = synthetic_mag(num_papers=300, num_features=4, community_size=60, papers_per_institution=100)
    one = salientpp.partition(plain, 2, folder / "plain", [4, 3], 16)
    several = salientpp.partition(mag, 2, folder / "mag", [3, 2], 16)
    return {"plain": one.root, "mag": several.root}


@pytest.mark.parametrize(
    "words",
    [
        ["info", "plain"],
        ["info", "mag"],
        ["analyze", "plain", *ANALYZE],
        ["analyze", "plain", "--epochs=1", "--lookahead=4", "--partial-aggregation"],
        ["analyze", "plain", "--epochs=1", "--num-neighbors=4,3", "--num-neighbors=2"],
        ["analyze", "mag", "--epochs=1", "--details"],
        ["plan", "plain", "--machines=10GbE", "--memory=0B,123456B,8GiB", "--price=12345.678", "--set=step.seconds=1234"],
    ],
    ids=lambda words: " ".join(words[:2]),
)  # fmt: skip
def test_no_terminal_cuts_a_number(capsys, monkeypatch, roots, words):
    counted = []  # the analysis is made once and shown in each width

    def once(*given, **options):
        counted.extend([] if counted else [analyze(*given, **options)])
        return counted[0]

    monkeypatch.setattr("salientpp.analysis.analyze.analyze", once)

    def printed(width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, err = run(capsys, words[0], roots[words[1]], *words[2:])
        assert code == 0, err
        return out

    def numbers(out: str) -> set[str]:
        return set(re.findall(r"\d[\d.,]*\d|\d", out.replace(str(roots[words[1]].parent), "")))

    whole = numbers(printed(300))
    for width in (120, 80, 60, 40):
        out = printed(width)
        # A command is one line, so that it can be copied.
        lines = [line for line in out.splitlines() if not line.startswith("  salientpp ")]
        assert "…" not in out and max(map(len, lines)) <= width, (width, out)
        missing = whole - numbers(out) if width >= 60 else set()
        assert not missing, f"at {width} columns: {sorted(missing)}"


def test_a_block_repeats_the_first_column(capsys, monkeypatch, roots):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(capsys, "analyze", roots["plain"], *ANALYZE)
    headings = [line.split() for line in out.splitlines() if line.startswith(" policy")]
    assert len(headings) == 2 and all(names[0] == "policy" for names in headings)
    assert [name for names in headings for name in names[1:]] == [
        f"α={alpha:g}" for alpha in (0, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 1.5)
    ]
    assert len(re.findall("^ vip ", out, re.M)) == 2
