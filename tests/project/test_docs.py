"""Laws of the documentation: its code runs, its links lead somewhere, and each table stands in one place.

The blocks of a page (``python``, the new side of a ``diff``, and ``bash``) run in order, in one namespace and one empty folder. tests/support/pages.py
lists the words of ``<!-- docs-test: ... -->`` that change that.

The shell commands ``salientpp``, ``torchrun``, ``export`` and ``python FILE`` run. ``salientpp serve`` runs until the end of the page. ``bash SCRIPT``
runs outside a job of SLURM, with an ``sbatch`` that checks the syntax of the script that it gets and starts nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import HANG
from forked_python import python
from pages import Block, blocks_of
from script_ranks import run_script
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import cli
from salientpp.datasets import synthetic

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_PAGES = [
    path for name in ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md") if (path := ROOT / name).exists()
]
TESTS = ROOT / "tests"


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def salientpp_command(words: list[str]) -> None:
    if words[1] == "serve" and "--listen" in words:
        return start_server(words[1:])
    assert cli.main(words[1:]) == 0, shlex.join(words)


servers: list[subprocess.Popen[str]] = []


def start_server(words: list[str]) -> None:
    """Starts a server that runs until the end of its page, and waits until it is ready."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [python(), "-m", "salientpp", *words]
    servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    assert servers[-1].stdout is not None and servers[-1].stdout.readline(), shlex.join(words)


@contextlib.contextmanager
def ending_servers() -> Iterator[None]:
    """Ends the servers of a page, and removes the variables that it has set."""
    before = {*os.environ}
    try:
        yield
    finally:
        while servers:
            with servers.pop() as server:
                server.terminate()
        for name in os.environ.keys() - before:
            del os.environ[name]


def export(words: list[str]) -> None:
    """Sets an environment variable."""
    name, _, value = words[1].partition("=")
    os.environ[name] = value


def run_python(arguments: list[str]) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHON_EXEC": python(),  # torchrun starts it for each rank
    }
    done = subprocess.run([python(), *arguments], env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, f"{shlex.join(arguments)}:\n{done.stdout}\n{done.stderr}"


def script(words: list[str]) -> None:
    run_python(words[1:])


def torchrun(words: list[str]) -> None:
    run_python(["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *words[1:]])


SBATCH = """#!/usr/bin/env bash
[[ " $* " == *" --wrap "* ]] || bash -n "${!#}"
"""


def in_shell(words: list[str]) -> None:
    """Runs a command without variables of SLURM, as on a login node whose ``sbatch`` checks the syntax of scripts."""
    with tempfile.TemporaryDirectory() as folder:
        (sbatch := Path(folder) / "sbatch").write_text(SBATCH)
        sbatch.chmod(0o755)
        outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        environment = {**outside, "PATH": os.pathsep.join([folder, os.environ["PATH"]])}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}\n{done.stderr}"


RUN = {
    "salientpp": salientpp_command,
    "python": script,
    "torchrun": torchrun,
    "export": export,
    "bash": in_shell,
    "sbatch": in_shell,
}


@functools.cache
def small_part() -> tuple[Data, tempfile.TemporaryDirectory]:
    """A small graph, and a folder with its dataset directory."""
    data, folder = synthetic(num_vertices=2000, num_features=16), tempfile.TemporaryDirectory(prefix="docs-")
    salientpp.partition(data, 1, Path(folder.name) / "a-part", [15, 10, 5], 1024)
    return data, folder


def stand_ins() -> dict[str, Any]:
    """Returns the names that a page may use as the reader's own."""
    data, folder = small_part()
    data, part = data.clone(), salientpp.load(Path(folder.name) / "a-part", part_id=0)
    model = GraphSAGE(16, 8, 3, int(data.y.max()) + 1)
    return {
        "salientpp": salientpp,
        "NeighborLoader": salientpp.NeighborLoader,
        "data": data,
        "part": part,
        "model": model,
    }


def run_page(page: Path) -> int:
    """Runs the blocks of a page in the current folder, and returns the number of blocks that ran."""
    blocks, namespace, ran = list(blocks_of(page.read_text())), None, 0
    for block in blocks:
        for name in block.said("is"):
            Path(name).write_text(block.code)
        for module in block.said("needs"):
            pytest.importorskip(module)
    for block in blocks:
        where = f"{page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name}, line {block.line}"
        left_out = any(how.startswith("not run: ") for how in block.how) or block.said("is")
        if block.language == "python" or (
            block.language == "diff" and not left_out
        ):  # a block that does not run must compile at least
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        if left_out:
            continue
        for command in block.said("first"):
            salientpp_command(shlex.split(command))
        if block.language == "bash":
            for words in commands(block):
                if words[0] not in RUN:
                    raise ValueError(
                        f"{where}: no test can run {words[0]!r}; say before the block: <!-- docs-test: not run: REASON -->"
                    )
                RUN[words[0]](words)
        elif ranks := block.said("on"):
            script = Path(f"line-{block.line}.py")
            script.write_text(block.code)
            run_script(script, int(ranks[0].split()[0]))
        else:
            namespace = namespace or stand_ins()
            exec(code, namespace)
        ran += 1
    return ran


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # a page may import files that it has shown
    with ending_servers():
        print(run_page(page), "blocks")


def test_the_script_for_ranks_trains_on_features_stored_as_float16(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (script,) = (
        block for block in blocks_of((ROOT / "docs" / "how-to" / "pyg-script.md").read_text()) if block.said("is")
    )
    data = synthetic(num_vertices=2000, num_features=16)
    data.x = data.x.half()
    salientpp.partition(data, 2, "demo-2", [15, 10, 5], 256)
    Path("train.py").write_text(script.code)
    run_script(Path("train.py"), 2)


def test_a_wrong_page_fails(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    for number, (text, error, words) in enumerate(
        [
            ("```python\nsalientpp.no_such_name\n```\n", AttributeError, "no_such_name"),
            ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", AssertionError, None),
            ("```diff\n-1 / 1\n+1 / 0\n```\n", ZeroDivisionError, None),
            ("```bash\nsalientpp info nowhere\n```\n", AssertionError, "salientpp info nowhere"),
            ("```bash\ntorchrun --nproc-per-node 1 nowhere.py\n```\n", AssertionError, "nowhere.py"),
            (
                "<!-- docs-test: on 2 ranks -->\n```python\nimport os\n1 / int(os.environ['RANK'])\n```\n",
                AssertionError,
                "division by zero",
            ),
            (
                "```bash\nsalientpp slurm --parts 2 --time 1 --output a.sbatch -- a.py\nbash a.sbatch\n```\n",
                AssertionError,
                "SLURM_NNODES: unbound",
            ),
            ("```bash\nsrun true\n```\n", ValueError, "page.md, line 2: no test can run 'srun'"),
            ("<!-- docs-test: reading 5 as 3 -->\n```python\n4\n```\n", ValueError, "has no '5'"),
            ("<!-- docs-test: skip -->\n```python\n4\n```\n", ValueError, "got 'skip'"),
            ("<!-- docs-test: not run: needs a GPU -->\n```python\nx = (\n```\n", SyntaxError, None),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        page.write_text(text)
        with pytest.raises(error, match=words):
            run_page(page)


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?:|mailto:", target):
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, (
                    target
                )


@functools.cache
def by_file() -> dict[Path, set[str]]:
    files = TESTS.rglob("*.py")
    return {path: set(re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE)) for path in files}


def missing_tests(text: str) -> list[str]:
    """Lists files and names of tests that a text mentions and that do not exist. A name has three words or more, unlike `test_mask`."""
    tests = by_file()
    known = set().union(*tests.values())
    missing = [name for name in re.findall(r"`(test(?:_[a-z0-9]+){3,})`", text) if name not in known]
    for file, name in re.findall(r"\b(tests/[\w/]+\.\w+|(?:\w+/)+test_\w+\.py)(?:::(test_\w+))?", text):
        path = TESTS / file.removeprefix("tests/")
        if not path.is_file() or (name and name not in tests[path]):
            missing.append(f"{file}::{name}" if name else file)
    return missing


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES, ROOT / "Makefile"], ids=lambda page: page.name)
def test_tests_named_on_a_page_exist(page):
    assert missing_tests(page.read_text()) == []


def test_a_missing_test_is_found():
    text = "`test_mask`, `test_no_such_law`, tests/vip/test_none.py, tests/run.py and vip/test_policies.py::"
    assert missing_tests(text + "test_ties_go_to_the_lower_id") == ["test_no_such_law", "tests/vip/test_none.py"]
    assert missing_tests(text + "test_ties")[-1] == "vip/test_policies.py::test_ties"


def test_readme_can_be_read_in_a_minute():
    words = [word for word in (ROOT / "README.md").read_text().split() if re.search(r"\w", word)]
    assert len(words) <= 700, len(words)


def test_every_how_to_page_leads_to_the_levers_by_their_title():
    levers = ROOT / "docs" / "how-to" / "turn-on.md"
    title = levers.read_text().partition("\n")[0].removeprefix("# ")
    assert f"- {title}: how-to/turn-on.md\n" in (ROOT / "mkdocs.yml").read_text()
    for page in sorted({*levers.parent.glob("*.md")} - {levers}):
        assert f"[{title}](turn-on.md)" in " ".join(page.read_text().split()), page.name
    rows = re.findall(r"^\|.*\|$", levers.read_text(), re.MULTILINE)
    assert all(cell.strip() for row in rows for cell in row[1:-1].split("|"))  # also what a lever costs


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_trims_its_model_and_plans_its_memory(example):
    text = example.read_text()
    if "distribute(" in text or "torch.compile(" in text:  # neither trims: the whole graph, and a model of one shape
        return
    assert "salientpp.nn.trim(" in text
    if "salientpp.load(" not in text:  # one process with the whole graph has no other host's rows
        return
    assert "memory=" in text or '"memory":' in text or "copies(args)" in text or "make_loaders(args" in text


def test_the_list_of_examples_is_complete():
    text = (ROOT / "examples" / "README.md").read_text()
    listed = set(re.findall(r"\]\((\w+\.(?:py|ipynb))\)", text))
    assert listed == {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")}


def test_pictures_of_ideas_show_what_the_package_computes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import draw_ideas

    committed = draw_ideas.FOLDER
    monkeypatch.setattr(draw_ideas, "FOLDER", tmp_path)
    for draw in (draw_ideas.draw_vip, draw_ideas.draw_tiers, draw_ideas.draw_stages, draw_ideas.draw_ranks):
        draw()
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in committed.glob("idea-*.svg"))
    for name in drawn:
        assert (tmp_path / name).read_text() == (committed / name).read_text(), f"run benchmarks/draw_ideas.py: {name}"


def test_each_library_has_the_same_four_statements():
    text = (ROOT / "docs" / "explanation" / "comparison.md").read_text()
    sections = re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", text, re.MULTILINE)
    libraries = {title: body for title, body in sections if "**Needs**" in body}
    assert len(libraries) == 7
    for title, body in libraries.items():
        said = re.findall(r"^\* \*\*(.+?)\*\*", body, re.MULTILINE)
        assert said[:4] == ["Needs", "Can", "Lacks", "Take it"], title


def test_no_row_of_figures_stands_on_two_pages():
    seen: dict[str, Path] = {}
    for page in PAGES:
        if page.name != "README.md":  # its table repeats a few figures of the results
            for line in page.read_text().splitlines():
                cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
                if sum(bool(re.search(r"\d", cell)) for cell in cells) >= 3:
                    assert seen.setdefault(" ".join(cells), page) == page, f"{page}: {line}"


def test_the_repository_is_the_same_wherever_it_is_written():
    url = re.search(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md"):
        assert f"git+{url}\n" in page.read_text(), page


def test_version_is_the_same_wherever_it_is_written():
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == version
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text().replace("[", "").replace("]", "")
