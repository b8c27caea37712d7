"""Writes a proposal as a TOML file with comments, which ``salientpp convert tables:FILE`` reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from salientpp.addresses import without_password
from salientpp.datasets.tabular.lakes import LAKES
from salientpp.datasets.tabular.profiles import TableProfile, plain_name
from salientpp.datasets.tabular.propose import Reference, TableProposal

#: Column at which comments begin.
_COMMENT = 48


def toml_of(tables: Sequence[TableProposal], base: Path, folder: Path, command: str) -> str:
    """Returns the description of a graph of tables, in TOML.

    Args:
        tables: the proposal.
        base: folder that the addresses of the tables begin at.
        folder: folder of the TOML file. Its relative addresses begin there.
        command: the command that converts the graph, for the first comment.
    """
    lines = [
        "# A proposal of `salientpp describe`, from names and from the values of some rows. Check keys and relations. Then:",
        f"#   {command}",
    ]
    written = _Addresses(base, folder)
    for table in tables:
        lines += ["", *_nodes_of(table, written)] if table.key else []
    for table in tables:
        for block in _edges_of(table, written):
            lines += ["", *block]
    for table in tables:
        if not table.key and not table.is_link:
            lines += ["", *_unused(table, written)]
    return "\n".join(lines) + "\n"


class _Addresses:
    """Writes addresses relative to the folder of the TOML file."""

    def __init__(self, base: Path, folder: Path) -> None:
        self._base, self._folder = base, folder

    def __call__(self, address: str) -> str:
        kind, colon, rest = address.partition(":")
        if colon and kind in LAKES:
            return f"{kind}:{self(rest)}" if os.path.exists(self._base / rest) else address
        if "://" in address or os.path.isabs(address):
            return address
        return os.path.relpath(self._base / address, self._folder)


def _line(text: str, comment: str = "") -> str:
    return f"{text:<{_COMMENT}}# {comment}" if comment else text


def _quoted(*names: str) -> str:
    """Returns names in TOML: a string, or a list of several."""
    words = [json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f") for name in names]
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"


def _list(names: Sequence[str]) -> str:
    return f"[{', '.join(_quoted(name) for name in names)}]"


def _rows(profile: TableProfile) -> str:
    read = f"{profile.rows:,} rows"
    if profile.is_whole:
        return read
    return f"{read} read" + ("" if profile.num_rows is None else f" of {profile.num_rows:,}")


def _key_word(name: str) -> str:
    """Returns a name as a key of TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _nodes_of(table: TableProposal, written: _Addresses) -> list[str]:
    profile = table.profile
    unique = "differs in each row that was read" if profile.rows > 1 else "check: the table has few rows"
    if len(table.key) > 1:
        unique = "check: together they must differ in each row"
    lines = [
        f"[nodes.{_key_word(profile.name)}]",
        _line(f"table = {_quoted(written(profile.address))}", _rows(profile)),
        _line(f"key = {_quoted(*table.key)}", unique),
    ]
    if table.time is not None:
        others = [c.name for c in profile.columns.values() if c.is_time and c.name != table.time]
        lines.append(_line(f"time = {_quoted(table.time)}", f"or {', '.join(others)}" if others else ""))
    if table.split is not None:
        lines.append(_line(f"split = {_quoted(table.split)}", "train, val or test"))
    lines += [_line(f"# label = {_quoted(name)}", "becomes y") for name in table.labels if name not in table.key]
    if table.left_out:
        lines.append(_line(f"drop = {_list(table.left_out)}", "references, or no use as attributes"))
    lines += _fill(table, {*table.key, *table.left_out, table.split, table.time})
    lines += [
        f"# {_quoted(name)} may refer to {' or '.join(others)}; write a relation if it does"
        for name, others in table.unclear.items()
    ]
    return lines


def _fill(table: TableProposal, used: set[str | None]) -> list[str]:
    """Returns the line with values for nulls of integers and booleans, which have no number that means null. Columns in ``used`` are no attributes."""
    from pyarrow import types

    values = [
        f"{_key_word(column.name)} = {'false' if types.is_boolean(column.type) else 0}"
        for column in table.profile.columns.values()
        if column.nulls and column.name not in used and (types.is_integer(column.type) or types.is_boolean(column.type))
    ]
    text = f"fill = {{ {', '.join(values)} }}"
    return [_line(text, "nulls become this value: choose it, or drop the column")] if values else []


def _edges_of(table: TableProposal, written: _Addresses) -> list[list[str]]:
    """Returns the relations of a table."""
    if table.is_link:
        first, second = table.references[:2]
        name = first.to, table.profile.name, second.to
        return [_block(table, name, (first.column,), (second.column,), (first, second), written)]
    if not table.key:
        return []
    return [
        _block(
            table,
            (table.profile.name, plain_name(each.column), each.to),
            table.key,
            (each.column,),
            (each,),
            written,
        )
        for each in table.references
    ]


def _block(
    table: TableProposal,
    name: tuple[str, str, str],
    source: tuple[str, ...],
    target: tuple[str, ...],
    references: Sequence[Reference],
    written: _Addresses,
) -> list[str]:
    lines = [
        f"[edges.{_quoted(','.join(name))}]",
        _line(f"table = {_quoted(written(table.profile.address))}", _rows(table.profile) if table.is_link else ""),
        f"source = {_quoted(*source)}",
        _line(
            f"target = {_quoted(*target)}",
            "" if any(each.by_name for each in references) else "found by its values; check it",
        ),
    ]
    if table.time is not None:
        lines.append(f"time = {_quoted(table.time)}")
    dropped = [name for name in table.left_out if name not in (*source, *target)] if table.is_link else []
    if dropped:
        lines.append(_line(f"drop = {_list(dropped)}", "no use as attributes"))
    if table.is_link:
        lines += _fill(table, {*source, *target, *dropped, table.time})
    if sum(each.nulls for each in references):
        nulls = ", ".join(f"{each.nulls:,} in {each.column}" for each in references if each.nulls)
        lines.append(_line('null_keys = "drop"', f"nulls in the rows that were read: {nulls}"))
    if sum(each.missing for each in references):
        missing = ", ".join(f"{each.missing:,} of {each.column}" for each in references if each.missing)
        lines.append(_line('dangling = "drop"', f"values without a row among those read: {missing}"))
    return lines


def _unused(table: TableProposal, written: _Addresses) -> list[str]:
    return [
        f"# {without_password(written(table.profile.address))} is not used: none of its columns differs in each row.",
        f"# Write [nodes.{_key_word(table.profile.name)}] with key = [...] if several columns together do.",
    ]
