"""Writes the tables of options in docs/loader.md anew: ``python docs/write_options.py``."""

import re
from pathlib import Path

from salientpp.loader.signature import tables_of_options

page = Path(__file__).parent / "loader.md"
pattern = re.compile(r"(?<=<!-- options -->\n\n).*?(?=\n<!-- /options -->)", re.DOTALL)
page.write_text(pattern.sub(lambda _: tables_of_options(), page.read_text()))
