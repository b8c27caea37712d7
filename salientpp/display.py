"""Renders results as text for a console and as HTML for a notebook."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

#: Units of amounts of memory.
UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@dataclass(frozen=True)
class Table:
    """A table of texts. The first column is aligned to the left, the others to the right.

    Attributes:
        headings: texts above the columns.
        lines: the cells, line by line.
        title: text above the table.
    """

    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    title: str = ""

    def __str__(self) -> str:
        rows = [self.headings, *self.lines]
        widths = [max(map(len, column)) for column in zip(*rows)]
        texts = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
        return "\n".join([self.title, *texts] if self.title else texts)


def html(*blocks: Any) -> str:
    """Renders blocks as HTML. A block is a text, a :class:`Table` or a table of ``rich``; all its text is escaped."""
    return "".join(f"<p>{escape(block)}</p>" if isinstance(block, str) else _of_table(block) for block in blocks)


def text(blocks: Sequence[Any], width: int) -> str:
    """Renders texts and tables of ``rich`` as a console of ``width`` columns prints them, without spaces at the ends of lines."""
    from rich.console import Console  # importing rich takes as long as making a small loader

    printed = io.StringIO()
    console = Console(file=printed, width=width, markup=False, emoji=False, highlight=False)
    for block in blocks:
        console.print(block)
    return "\n".join(line.rstrip() for line in printed.getvalue().strip("\n").splitlines())


def _of_table(table: Any) -> str:
    if isinstance(table, Table):
        headings, lines = table.headings, table.lines
    else:  # of rich, whose cells lie in columns
        headings, lines = (
            [column.header for column in table.columns],
            [*zip(*(column.cells for column in table.columns))],
        )
    title = f"<caption>{escape(str(table.title))}</caption>" if table.title else ""
    rows = [_row("th", headings), *(_row("td", line) for line in lines)]
    return f"<table>{title}{''.join(rows)}</table>"


def _row(tag: str, cells: Sequence[Any]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"


def format_bytes(num_bytes: float) -> str:
    """Returns bytes with a decimal unit and three digits: 12.8 MB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} GB" if num_bytes < 999.5 else f"{num_bytes:,.0f} GB"


def short(number: float) -> str:
    """Writes a number >= 0 with three digits, or as an integer from 100 on. A number below a millionth becomes 0, since it comes from rounded sums."""
    if number >= 100:
        return f"{number:,.0f}"
    return "0" if number < 1e-6 else f"{number:.3g}"


def exact_bytes(num_bytes: int) -> str:
    """Writes bytes exactly, in the form that :func:`~salientpp.arguments.as_amount` reads, as short as possible: 8GiB, 250MB, 1234B."""
    # One digit after the point is exact if the bytes are a multiple of a tenth of the unit. ``:g`` writes five digits before it in full.
    texts = [
        f"{num_bytes / size:g}{unit}"
        for unit, size in reversed(UNITS.items())
        if num_bytes * 10 % size == 0 and num_bytes < 10**5 * size
    ]
    return min([*texts, f"{num_bytes}B"], key=len) if num_bytes else "0B"


def round_up(num_bytes: float) -> int:
    """Rounds bytes up to two significant digits, so that an advised amount is easy to read."""
    digits = 10 ** max(0, len(str(int(num_bytes))) - 2)
    return -(-int(num_bytes) // digits) * digits
