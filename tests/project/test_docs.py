"""Laws of the documentation: what it shows runs, and what it links to is there.

The blocks of a page (``python``, the new side of a ``diff``, and ``bash``) run in order, in one namespace and one empty folder. Before a block an
HTML comment, which readers do not see, may say how: ``<!-- docs-test: ... -->`` with these words, separated by ``; ``:

* ``not run: REASON``
* ``reading A as B``: the text A, which must be there, is replaced, so that an example of a user's size runs on a small graph;
* ``first COMMAND``: a command of salientpp that the page takes for done;
* ``on N ranks``: a script for torchrun, in processes of its own;
* ``is FILE``: not run here, but by a command of the page that names the file.

Of shell commands those run that are ``salientpp`` or ``torchrun``; of ``bash SCRIPT`` it is checked that the script can be read.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from distributed import HANG
from forked_python import python
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import cli
from salientpp.datasets import synthetic

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- docs-test: (?P<how>.*?) -->\n)?^(?P<indent> *)```(?P<language>\w+)\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block that can run, and what is said of it; ``line`` is that of its first line of code."""

    language: str
    code: str
    line: int
    how: tuple[str, ...]

    def said(self, word: str) -> list[str]:
        return [how.removeprefix(f"{word} ") for how in self.how if how.startswith(f"{word} ")]


def blocks_of(text: str) -> Iterator[Block]:
    for match in BLOCK.finditer(text):
        code, how = textwrap.dedent(match["code"]), tuple(match["how"].split("; ")) if match["how"] else ()
        if match["language"] == "diff":
            code = "\n".join(line[1:] for line in code.splitlines() if line[:1] != "-")
        for asked in how:
            if not re.fullmatch(r"not run: .+|reading .+ as .+|first salientpp .+|on \d ranks|is \w+\.py", asked):
                raise ValueError(f"docs-test: what does {asked!r} mean?")
        block = Block(match["language"], code, text.count("\n", 0, match.start("code")) + 1, how)
        for pair in block.said("reading"):
            old, new = pair.split(" as ")
            if old not in code:
                raise ValueError(f"docs-test: the block at line {block.line} has no {old!r}")
            code = code.replace(old, new)
        if block.language in ("python", "diff", "bash"):
            yield Block(block.language, code, block.line, how)


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def salientpp_command(words: list[str]) -> None:
    assert cli.main(words[1:]) == 0, shlex.join(words)


def torchrun(words: list[str]) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHON_EXEC": python(),  # of what torchrun starts
    }
    command = [
        python(),
        "-m",
        "torch.distributed.run",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        *words[1:],
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}\n{done.stderr}"


def bash(words: list[str]) -> None:
    subprocess.run(["bash", "-n", *words[1:]], check=True, timeout=HANG)


RUN = {"salientpp": salientpp_command, "torchrun": torchrun, "bash": bash}


def stand_ins() -> dict[str, Any]:
    """What a page may take as the reader's own."""
    data = synthetic(num_vertices=2000, num_features=16)
    part = salientpp.partition(data, 1, "a-part", [15, 10, 5], 1024)
    model = GraphSAGE(16, 8, 3, int(data.y.max()) + 1)
    return {
        "salientpp": salientpp,
        "NeighborLoader": salientpp.NeighborLoader,
        "data": data,
        "part": part,
        "model": model,
    }


def run_page(page: Path) -> int:
    """How many blocks ran, of the page's in the current folder."""
    blocks, namespace, ran = list(blocks_of(page.read_text())), None, 0
    for block in blocks:
        for name in block.said("is"):
            Path(name).write_text(block.code)
    for block in blocks:
        where = f"{page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name}, line {block.line}"
        left_out = any(how.startswith("not run: ") for how in block.how) or block.said("is")
        if block.language == "python" or (
            block.language == "diff" and not left_out
        ):  # what is not run must be Python at least
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
            torchrun(["torchrun", "--nproc-per-node", ranks[0].split()[0], str(script)])
        else:
            namespace = namespace or stand_ins()
            exec(code, namespace)
        ran += 1
    return ran


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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
    torchrun(["torchrun", "--nproc-per-node", "2", "train.py"])


def test_a_page_that_is_wrong_fails(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    for number, (text, error, words) in enumerate(
        [
            ("```python\nsalientpp.no_such_name\n```\n", AttributeError, "no_such_name"),
            ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", AssertionError, None),
            ("```diff\n-1 / 1\n+1 / 0\n```\n", ZeroDivisionError, None),
            ("```bash\nsalientpp info nowhere\n```\n", AssertionError, "salientpp info nowhere"),
            ("```bash\ntorchrun --nproc-per-node 1 nowhere.py\n```\n", AssertionError, "nowhere.py"),
            ("```bash\nsrun true\n```\n", ValueError, "page.md, line 2: no test can run 'srun'"),
            ("<!-- docs-test: reading 5 as 3 -->\n```python\n4\n```\n", ValueError, "has no '5'"),
            ("<!-- docs-test: skip -->\n```python\n4\n```\n", ValueError, "what does 'skip' mean"),
            ("<!-- docs-test: not run: needs a GPU -->\n```python\nx = (\n```\n", SyntaxError, None),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        page.write_text(text)
        with pytest.raises(error, match=words):
            run_page(page)


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(path for name in ("CONTRIBUTING.md", "CHANGELOG.md") if (path := ROOT / name).exists())],
    ids=lambda page: page.name,
)
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


def test_version_is_the_same_wherever_it_is_written():
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == version
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text().replace("[", "").replace("]", "")
