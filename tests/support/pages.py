"""Reads the code blocks of a page of the documentation: ``python``, the new side of a ``diff``, and ``bash``.

tests/project/test_docs.py runs the blocks, and tests/wheel.sh follows the quickstart. An HTML comment before a block, invisible to readers, changes how
it runs: ``<!-- docs-test: ... -->`` with these words, separated by ``; ``:

* ``not run: REASON``
* ``reading A as B`` replaces the text A, which must exist. An example of a user's size then runs on a small graph.
* ``first COMMAND`` runs a command of salientpp before the block. The page assumes that the reader ran it.
* ``on N ranks`` runs the block as a script in new processes, which have the variables of torchrun's ranks.
* ``needs MODULE`` skips the page if the module is not installed.
* ``is FILE`` writes the block to a file. A command of the page runs it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

BLOCK = re.compile(
    r"^(?:<!-- docs-test: (?P<how>.*?) -->\n)?^(?P<indent> *)```(?P<language>\w+)\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """Fenced block with its ``docs-test`` words. ``line`` is the line of its first line of code."""

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
            if not re.fullmatch(
                r"not run: .+|reading .+ as .+|first salientpp .+|on \d ranks|needs \w+|is \w+\.(?:py|toml)", asked
            ):
                raise ValueError(
                    f"docs-test: expected words that the docstring of tests/support/pages.py lists, got {asked!r}"
                )
        block = Block(match["language"], code, text.count("\n", 0, match.start("code")) + 1, how)
        for pair in block.said("reading"):
            old, new = pair.split(" as ")
            if old not in code:
                raise ValueError(f"docs-test: the block at line {block.line} has no {old!r}")
            code = code.replace(old, new)
        if block.language in ("python", "diff", "bash") or block.said("is"):
            yield Block(block.language, code, block.line, how)
