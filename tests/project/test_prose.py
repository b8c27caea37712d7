"""Laws of the check of the English (tests/prose.py): it finds each kind of fault, and plain text passes."""

from __future__ import annotations

import pytest
from prose import READERS, faults, main

PLAIN = '''"""Counts rows."""


def count(rows):
    """Returns the number of rows.

    Args:
        rows: int64 [n].
    """
    # A set is slower here.
    if rows is None:
        raise ValueError(f"rows must be a tensor, got {rows!r}; pass one")
    return len(rows)


def test_every_row_is_counted():
    assert count([1]) == 1, "a row counts once"
'''

LONG = " ".join(["word"] * 31) + "."


def found(name: str, text: str) -> list[str]:
    read = READERS[name[name.index(".") :]]
    return [fault for piece in read(text) for _, fault in faults(piece)]


def test_plain_text_has_no_faults():
    assert found("a.py", PLAIN) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Returns the number of", "Of the rows, how many", "docstring begins with 'Of'"),
        ("Counts rows.", "How does one count rows?", "docstring begins with 'How'"),
        ("Returns the number of rows.", "Is this the number of rows?", "docstring is a question"),
        ("Returns the number of rows.", LONG, "docstring: 31 words in a sentence"),
        ("int64 [n].", LONG, "docstring: 32 words in a sentence"),
        ("A set is slower here.", "A list in the place of a set.", "comment: 'in the place of' (better: instead of)"),
        ("A set is slower here.", "What a set does is slower.", "comment: a clause as subject"),
        ("; pass one", "; who has none gives it anew", "error: 'anew' (better: again)"),
        ("a row counts once", "a row counts in vain", "error: 'in vain'"),
        ("test_every_row_is_counted", "test_a_row_is_counted_for_ever", "name: 'for ever'"),
    ],
)
def test_each_kind_of_fault_in_python_is_found(old, new, words):
    assert PLAIN.count(old) == 1
    assert [fault for fault in found("a.py", PLAIN.replace(old, new)) if words in fault]


def test_comments_and_texts_of_cpp_are_read():
    text = (
        f'// Counts rows anew.\nint a = 1;  // {LONG}\ncheck(a, "rows must be sorted, but ", b, " is so many rows");\n'
    )
    assert len(found("a.cpp", text)) == 3
    assert found("a.cpp", '// Counts rows.\nconst char* url = "https://a//b";\n') == []


def test_pages_are_read_without_their_code():
    assert found("a.md", f"# Rows\n\n```text\n{LONG[:60]}\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n") == []
    assert found("a.md", "```text\n" + "x" * 77 + "\n```\n") == ["code of a page has 77 columns, expected at most 76"]
    assert len(found("a.md", f"A page.\n\n* {LONG}\n\n| a | anew |\n|---|---|\n")) == 2
    assert found("a.md", "# What is a row?\n") == [
        "heading begins with 'What', expected a verb or a noun: 'What is a row?'",
        "heading is a question, expected a statement: 'What is a row?'",
    ]


def test_the_command_fails_and_names_file_and_line(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("A page.\n\nIt is read anew.\n")
    assert main([str(page)]) == 1
    assert f"{page}:3: page: 'anew'" in capsys.readouterr().out
    page.write_text("A page.\n")
    assert main([str(page)]) == 0
