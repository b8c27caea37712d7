"""Tables for terminals of any width. A terminal that is too narrow shows the columns in several blocks, and no number is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table


class FittedTable(Table):
    """Table that fits any terminal: columns that do not fit go into a further block below. Each block repeats the columns that name a line.

    Columns with ``justify="right"`` hold numbers, which are neither wrapped nor cut. Other columns wrap.

    Attributes:
        num_keys: number of columns that name a line. They are the first columns of the table.
    """

    num_keys = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, last, width = self.num_keys, len(self.columns), options.max_width
        while True:
            stop = last
            while stop > first + 1 and _width(self._block(first, stop, width), console, options) > width:
                stop -= 1
            block = self._block(first, stop, width)
            if first == self.num_keys:
                block.title = self.title
            yield block
            if stop >= last:
                return
            first = stop

    def _block(self, first: int, stop: int, max_width: int) -> Table:
        """Returns one block: the columns that name a line, and columns ``first`` to ``stop - 1``. The first column wraps only beyond half of the terminal."""
        look: dict[str, Any] = {
            name: getattr(self, name) for name in ("box", "padding", "title_justify", "title_style")
        }
        block, columns = Table(**look), [*self.columns[: self.num_keys], *self.columns[first:stop]]
        for number, column in enumerate(columns):
            is_number = column.justify == "right"
            width = max(cell_len(str(text)) for text in (column.header, *column.cells))
            is_whole = is_number or (not number and width <= max_width // 2)
            block.add_column(
                column.header,
                justify=column.justify,
                width=column.width,
                min_width=width if is_whole else None,
                no_wrap=is_number,
                overflow="fold",
            )
        for row, *cells in zip(self.rows, *(column.cells for column in columns)):
            block.add_row(*cells, style=row.style, end_section=row.end_section)
        return block


def _width(table: Table, console: Console, options: ConsoleOptions) -> int:
    """Returns the smallest width at which no number is cut and no word broken."""
    return Measurement.get(console, options.update(max_width=10_000), table).minimum


def simple_table(title: str, headings: Sequence[str], texts: Sequence[str], num_keys: int = 1) -> FittedTable:
    """Returns an empty table without vertical lines. The columns that ``texts`` names hold text, the others numbers."""
    table = FittedTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.num_keys = num_keys
    for heading in headings:
        table.add_column(heading, justify="left" if heading in texts else "right")
    return table
