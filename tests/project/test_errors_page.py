"""Laws of the tables of errors in pages: each message that they quote is in the source.

A table of errors has the word ``message`` at the head of its first column. A message has words that vary in angle brackets, and ``...`` for
omitted text. The pieces between them are the fixed words. If an error's text changes, the test names the pieces that are missing and the most
similar text of the source.
"""

from __future__ import annotations

import ast
import difflib
import re
from functools import cache
from pathlib import Path

import pytest
from prose import strings

ROOT = Path(__file__).parents[2]
#: Page -> the least number of messages that its tables quote.
PAGES = {"reference/errors.md": 50, "how-to/slurm.md": 2, "how-to/several-machines.md": 9}


@cache
def texts() -> list[str]:
    """Returns the strings of the package and the examples; f-strings have one word instead of each value."""
    return [
        text
        for folder in ("salientpp", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for _, text in strings(ast.parse(path.read_text()))
    ]


def fixed_words(message: str) -> list[str]:
    """Returns the pieces of a quoted message that must be in the source."""
    pieces = [piece.strip(" ;,.:`") for piece in re.split(r"<[^>]+>|\.\.\.", message)]
    return [piece for piece in pieces if re.search(r"\w", piece)]


def missing(message: str) -> list[str]:
    return [piece for piece in fixed_words(message) if not any(piece in text for text in texts())]


def messages(page: str) -> list[str]:
    """Returns the first cells of the page's tables of errors, without their code marks."""
    tables = re.findall(r"^\| message\b.*\n\|[-|]+\n((?:\|.*\n)+)", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return [row.split(" | ")[0].strip("| `") for table in tables for row in table.splitlines()]


@pytest.mark.parametrize(("page", "message"), [(page, message) for page in PAGES for message in messages(page)])
def test_every_quoted_message_is_in_the_source(page, message):
    if wrong := missing(message):
        candidates = [text for text in texts() if " " in text and len(text) < 1000]
        similar = difflib.get_close_matches(message, candidates, n=1, cutoff=0)
        raise AssertionError(
            f"not in the source: {wrong}; the most similar text is {similar}. Change the message in {page}"
        )


@pytest.mark.parametrize("page", PAGES)
def test_a_quoted_message_has_fixed_words(page):
    assert len(messages(page)) >= PAGES[page]
    assert all(fixed_words(message) for message in messages(page))


def test_a_changed_message_is_found():
    assert missing("seed <id> is owned by part <p> but this rank serves part <q>...") == []
    assert missing("seed <id> belongs to part <p> but this rank serves part <q>...") == ["belongs to part"]
