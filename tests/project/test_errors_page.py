"""Laws of the page of errors: each message that it quotes is in the source.

A message of the page has words that vary in angle brackets, and ``...`` for omitted text. The pieces between them are the fixed words. If an error's text
changes, the test names the pieces that are missing and the most similar text of the source.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "errors.md"

#: Stands for a value in a text of the source.
VALUE = "\0"


@cache
def texts() -> list[str]:
    """Returns the strings of the package; f-strings have a mark instead of each value."""
    return [text for path in (ROOT / "salientpp").rglob("*.py") for text in _strings(ast.parse(path.read_text()))]


def _strings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


def fixed_words(message: str) -> list[str]:
    """Returns the pieces of a quoted message that must be in the source."""
    pieces = [piece.strip(" ;,.:`") for piece in re.split(r"<[^>]+>|\.\.\.", message)]
    return [piece for piece in pieces if re.search(r"\w", piece)]


def missing(message: str) -> list[str]:
    return [piece for piece in fixed_words(message) if not any(piece in text for text in texts())]


MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", MESSAGES)
def test_every_quoted_message_is_in_the_source(message):
    if wrong := missing(message):
        candidates = [text for text in texts() if " " in text and len(text) < 1000]
        similar = difflib.get_close_matches(message, candidates, n=1, cutoff=0)
        raise AssertionError(
            f"not in the source: {wrong}; the most similar text is {similar}. Change the message in {PAGE.name}"
        )


def test_a_changed_message_is_found():
    assert len(MESSAGES) >= 25
    assert missing("seed <id> is owned by part <p> but this rank serves part <q>...") == []
    assert missing("seed <id> belongs to part <p> but this rank serves part <q>...") == ["belongs to part"]
