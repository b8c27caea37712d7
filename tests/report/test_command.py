"""Laws of ``salientpp report``: what it prints and writes, and its answers to wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import mistake, run, wide_terminal  # noqa: F401  the fixture is used by name
from traces import Times, write

from salientpp.report import page
from salientpp.report.causes import CAUSES
from salientpp.report.read import read_run
from salientpp.report.run_page import numbers_of

SLOW = [Times(batches=12), Times(batches=12, transform=0.31)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, which has records in ``trace``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page, "_bundle", lambda: "/* Vega */")  # takes seconds
    write(tmp_path / "trace", SLOW)
    return tmp_path


def test_the_verdict_is_printed_and_the_files_are_written(capsys, folder):
    code, out, err = run(capsys, "report", "trace", "--json", "report.json")
    assert (code, err) == (0, "")
    first, where, *_, last = out.splitlines()
    assert first.startswith("Rank 1 is the slowest: its `transform` takes 0.31 s of 0.41 s a batch. Make it faster")
    assert where == "Epoch 1 of loader 0: 2 ranks, 4.9 s." and last == "report.html shows all numbers."
    html = (folder / "report.html").read_text()
    assert html.startswith("<!doctype html>") and "<title>Epoch 1 of NeighborLoader on 2 ranks</title>" in html
    found = json.loads((folder / "report.json").read_text())
    assert found["epoch"] == 1 and found["schema"] == 1 and len(found["epochs"]) == 4
    first = found["verdict"]["findings"][0]
    assert (first["cause"], first["rank"], first["part"]) == ("transform", 1, "transform")
    assert first["expected"] == pytest.approx(1.3, abs=0.1) == found["seconds"] - first["saved"]


def test_the_page_on_files_names_every_field(capsys, folder):
    text = (Path(__file__).parents[2] / "docs/reference/analysis-files.md").read_text().split("## Report\n")[1]
    numbers = numbers_of(read_run(folder / "trace"))
    found = {
        *numbers,
        *numbers["ranks"][0],
        *numbers["verdict"]["findings"][0],
        *numbers["timeline"],
        *numbers["timeline"]["spans"][0],
    }
    assert [name for name in sorted(found) if f"`{name}`" not in text] == []
    assert [cause.__name__ for cause in CAUSES if f"`{cause.__name__}`" not in text] == []


def test_options_choose_the_epoch_the_loader_and_the_batches(capsys, folder):
    write(folder / "trace", [Times(batches=3)] * 2, loader=1)
    words = "trace", "--json", "r.json", "--epoch", 0, "--batches", "2:4", "--out", "r.html"
    assert run(capsys, "report", *words)[0] == 0
    found = json.loads((folder / "r.json").read_text())
    assert found["epoch"] == 0 and {span["at"] for span in found["timeline"]["spans"]} == {2, 3, 4}
    assert run(capsys, "report", "trace", "--loader", 1)[1].startswith(
        "An epoch of 3 batches a rank is too short for a sure answer"
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("nowhere", "nowhere: expected a directory with records of a run, got no directory; train again with SALIENTPP_TRACE_DIR=DIR"),
        (".", ".: expected files loader.global_rank_*.jsonl, got none"),
        ("trace --epoch 9", "trace: expected epoch 0 or 1 of loader 0, got 9; choose another --epoch"),
        ("trace --loader 9", "trace: expected one of the loaders 0, got 9; choose another --loader"),
        ("trace --batches 50:60", "expected batches between 0 and 11 of epoch 1, got 50:60; choose other --batches"),
        ("trace --out no/such/place", "--out: the directory no/such does not exist"),
        ("trace --out r --json r", "--out and --json name the same file"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_in_one_line(capsys, folder, words, text):
    assert text in mistake(capsys, "report", *words.split())
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("batches", ["5", "5:", "9:5", "a:b", "-1:3"])
def test_wrong_batches_are_refused(capsys, folder, batches):
    with pytest.raises(SystemExit):
        run(capsys, "report", "trace", f"--batches={batches}")
    assert "expected the first and the last batch such as 100:110" in capsys.readouterr().err


def test_a_missing_package_is_named(capsys, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    said = mistake(capsys, "report", "trace")
    assert "a page needs vl-convert-python" in said and "pip install 'salientpp[report]'" in said
    for words in ("analyze synthetic --parts 2", "plan synthetic --machines 10GbE --hosts 2"):
        assert "a page needs vl-convert-python" in mistake(capsys, *words.split(), "--html", "page.html")


def test_names_of_files_and_options_are_texts_of_the_page(capsys, folder):
    """A path, a host or an option may hold what HTML, scripts and JSON read as their own."""
    odd = "</script><b>&`x`\u2028"
    for path in (folder / "trace").iterdir():
        path.write_text(path.read_text().replace('"seed": 0', f'"seed": {json.dumps(odd)}'))
    (folder / "trace").rename(folder / "<i>")
    assert run(capsys, "report", "<i>")[0] == 0
    html = (folder / "report.html").read_text()
    assert "&lt;/script&gt;&lt;b&gt;&amp;" in html and "<b>" not in html and "<i>" not in html
    assert html.count("</script>") == html.count("<script")


def test_a_report_needs_no_torch(folder):
    program = (
        "import sys; from salientpp.report import read, run_page; run_page.numbers_of(read.read_run(__import__('pathlib').Path('trace')));"
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=folder)
