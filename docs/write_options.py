"""Writes the tables of options in docs/reference/options.md: ``python docs/write_options.py``."""

import re
from pathlib import Path

from salientpp.engine.option import declared_in
from salientpp.loader.options import GROUPS


def tables_of_options() -> str:
    """Returns Markdown: a table for each group of options with defaults, whether ranks must agree, and help."""
    agree = {"yes": "same", "no": "", "hosts": "same on a host"}
    blocks = []
    for group in GROUPS:
        title = (group.__doc__ or group.__name__).splitlines()[0].rstrip(".")
        lines = [f"### {title}\n", "| argument | default | ranks | meaning |", "|---|---|---|---|"]
        for name, (_, option) in declared_in(group).items():
            default = f"`{option.default!r}`" if option.shown is None else option.shown
            lines.append(f"| `{name}` | {default} | {agree[option.agree]} | {option.help} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    page = Path(__file__).parent / "reference" / "options.md"
    pattern = re.compile(r"(?<=<!-- options -->\n\n).*?(?=\n<!-- /options -->)", re.DOTALL)
    page.write_text(pattern.sub(lambda _: tables_of_options(), page.read_text()))
