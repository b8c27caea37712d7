"""``salientpp describe``: proposes how tables become a graph."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import add_json, adder, files_of
from salientpp.files import is_replaced

HELP = "propose how tables with keys become a graph"
EXAMPLE = "salientpp describe customers.parquet 'orders/*.parquet' --out shop.toml"

#: Help of each argument.
TEXTS = {
    "addresses": "tables: files, folders, or patterns in quotes, of .parquet, .orc, .csv, .jsonl or .arrow files; URLs such as s3://BUCKET/orders/; "
    "delta:ADDRESS or iceberg:ADDRESS",
    "--out": "write the description to this TOML file, with comments. An existing file is never replaced",
    "--rows": "rows to read of each table (default: 100000)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read some rows of each table, and propose which columns are keys, which refer to other tables, and what the others become. Check the "
        "proposal, then pass the file to `salientpp convert tables:FILE`."
    )
    add = adder(parser, TEXTS)
    add("addresses", nargs="+")
    add("--out", type=Path, metavar="FILE")
    add_json(parser, "the proposal")
    add("--rows", type=int, default=100_000, metavar="N")


def run(arguments: argparse.Namespace) -> int:
    from salientpp.datasets.tabular.described import toml_of
    from salientpp.datasets.tabular.propose import propose_graph

    files = files_of(arguments, "json", "out")
    if arguments.rows < 1:
        raise ValueError(f"--rows must be >= 1, got {arguments.rows}")
    if arguments.out is not None and arguments.out.exists() and is_replaced(arguments.out):
        raise ValueError(
            f"--out: {arguments.out} exists and is not replaced, since you may have changed it; remove it, or choose another name"
        )
    tables = propose_graph(arguments.addresses, Path(), arguments.rows)
    name = arguments.out or Path("graph.toml")
    command = f"salientpp convert {shlex.quote(f'tables:{name}')} {shlex.quote(name.stem)}"
    text = toml_of(tables, Path(), name.parent, command)
    contents = {"json": lambda: _as_json(tables), "out": text.encode}
    terminal.finish(files, contents, arguments.written, lambda: _shown(tables, command, arguments.out))
    return 0


def _as_json(tables: list[Any]) -> bytes:
    from salientpp.addresses import without_password

    described = [
        {
            "name": table.profile.name,
            "address": without_password(table.profile.address),
            "rows_read": table.profile.rows,
            "num_rows": table.profile.num_rows,
            "key": list(table.key),
            "references": [{"column": each.column, "to": each.to} for each in table.references],
            "columns": [
                {
                    "name": column.name,
                    "type": str(column.type),
                    "nulls": column.nulls,
                    "distinct": column.distinct,
                    "becomes": table.becomes(column),
                }
                for column in table.profile.columns.values()
            ],
        }
        for table in tables
    ]
    return (json.dumps({"tables": described}, indent=1) + "\n").encode()


def _shown(tables: list[Any], command: str, out: Path | None) -> list[Any]:
    from rich.text import Text

    from salientpp.addresses import without_password
    from salientpp.tables import simple_table

    shown = list[Any]()
    for table in tables:
        profile = table.profile
        kind = "vertices" if table.key else "edges" if table.is_link else "not used: no key was found"
        rows = f"{profile.rows:,} rows" + ("" if profile.is_whole else " read")
        title = f"{profile.name}: {without_password(profile.address)} ({rows}; {kind})"
        lines = simple_table(title, ["column", "type", "nulls", "different", "becomes"], ["column", "type", "becomes"])
        for column in profile.columns.values():
            different = f"{column.distinct:,}" if column.distinct else ""
            lines.add_row(column.name, str(column.type), f"{column.nulls:,}", different, table.becomes(column))
        shown.append(lines)
    if out is None:
        return [*shown, "To write the description as TOML, add --out FILE.toml."]
    return [*shown, f"{out} has the description. Check it. Then:", Text(command, no_wrap=True)]
