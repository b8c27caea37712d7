"""Reads the description of a graph of keyed tables: a TOML file, or a mapping with the same contents.

The description says which tables hold the vertices of a type, which tables hold the edges of a relation, and what their columns mean. Reading it opens no
table. :mod:`~salientpp.datasets.tabular.columns` compares it with the columns that the tables have.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any, Literal

from salientpp.addresses import is_remote, without_password
from salientpp.datasets.arrays import unreadable
from salientpp.datasets.tabular.keyed import Policy
from salientpp.datasets.tabular.table_parts import instead_of, is_object
from salientpp.files import first_line
from salientpp.suggestions import did_you_mean

#: What an entry of a description may hold, for errors.
_COLUMNS = "a column's name, or a list of them"

#: Letters that names of types and relations cannot have: terminals, files and other programs do not take them.
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

#: Policy -> its values; the first is the default.
NODE_POLICIES = {"duplicates": ("error", "drop"), "null_keys": ("error", "drop")}
EDGE_POLICIES = {"dangling": ("error", "drop", "add"), "null_keys": ("error", "drop")}


@dataclass(frozen=True)
class NodeTable:
    """The tables of a vertex type, one row a vertex, and the meaning of their columns. Columns that nothing names become attributes."""

    name: str
    tables: tuple[object, ...]  # addresses, or objects with ``__arrow_c_stream__``
    key: tuple[str, ...]
    time: str | None = None
    label: str | None = None
    split: str | None = None
    drop: tuple[str, ...] = ()
    fill: Mapping[str, object] = field(default_factory=dict)  # column -> value in place of nulls
    x: tuple[str, ...] | bool = ()  # columns that are joined into ``x``; True: all numbers
    frame: bool = False  # columns that nothing else names become columns of the ``TensorFrame`` ``tf``, not attributes
    duplicates: Policy = "error"
    null_keys: Policy = "error"

    @property
    def title(self) -> str:
        """The entry's name in errors."""
        return f"nodes.{self.name}"


@dataclass(frozen=True)
class EdgeTable:
    """The tables of a relation, one row an edge, and the meaning of their columns. Columns that nothing names become attributes."""

    name: tuple[str, str, str]
    tables: tuple[object, ...]
    source: tuple[str, ...]
    target: tuple[str, ...]
    time: str | None = None
    drop: tuple[str, ...] = ()
    fill: Mapping[str, object] = field(default_factory=dict)
    dangling: Policy | Literal["add"] = "error"
    null_keys: Policy = "error"
    reverse: bool = True  # also store the relation ``rev_NAME``

    @property
    def title(self) -> str:
        """The entry's name in errors."""
        return f"edges.{','.join(self.name)}"

    @property
    def reverse_name(self) -> tuple[str, str, str]:
        """The relation in the other direction, as :class:`torch_geometric.transforms.ToUndirected` calls it."""
        source, relation, target = self.name
        return target, f"rev_{relation}", source


@dataclass(frozen=True)
class TableGraph:
    """Description of a graph of keyed tables. Relative addresses begin at ``base``. ``text`` is the same for equal descriptions."""

    name: str
    nodes: tuple[NodeTable, ...]
    edges: tuple[EdgeTable, ...]
    base: Path
    text: str

    @property
    def entries(self) -> tuple[NodeTable | EdgeTable, ...]:
        """All entries: vertex types, then relations."""
        return (*self.nodes, *self.edges)

    @property
    def folder(self) -> str | None:
        """The folder at which relative addresses begin, or None if there are none."""
        addresses = [table for entry in self.entries for table in entry.tables if isinstance(table, str)]
        paths = [re.sub("^(delta|iceberg):", "", address) for address in addresses]
        is_relative = any("://" not in path and not Path(path).is_absolute() for path in paths)
        return str(self.base.resolve()) if is_relative else None

    @property
    def recorded(self) -> dict[str, Any]:
        """The description as JSON, without passwords of addresses."""
        described = json.loads(self.text)
        for entry in (*described["nodes"], *described["edges"]):
            entry["tables"] = [without_password(table) for table in entry["tables"]]
        return described


def read_description(source: str | Path | Mapping[str, Any]) -> TableGraph:
    """Reads a TOML file, or a mapping with the entries ``nodes`` and ``edges``.

    In a mapping, tables may also be objects with ``__arrow_c_stream__`` (of pyarrow, pandas, polars, DuckDB), and names of relations may be tuples.

    Raises:
        ValueError: the file cannot be read, or the description is wrong. The text names the file or the entry.
    """
    if isinstance(source, Mapping):
        return _graph_of(dict(source), "tables", Path())
    if is_remote(source):
        raise ValueError(
            f"the description of tables must be a file of this host, got {without_password(str(source))}; download it, and name the file"
        )
    path = Path(source)
    return _graph_of(_read_toml(path), f"tables:{path}", path.parent)


def _read_toml(path: Path) -> dict[str, Any]:
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        toml = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{path} is read with the {name!r} package: pip install salientpp[tables]") from error
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise unreadable(str(path), error) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a TOML file in UTF-8 ({error}); save it in UTF-8") from error
    try:
        return toml.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML ({first_line(error)}); correct it") from error


def _graph_of(given: dict[str, Any], name: str, base: Path) -> TableGraph:
    _check_known(given, ("nodes", "edges"), name)
    nodes, edges = (_mapping(given.get(part, {}), f"{name}: {part}") for part in ("nodes", "edges"))
    if not nodes:
        raise ValueError(f"{name} must describe at least one vertex type; add [nodes.NAME] with table and key")
    node_tables = tuple(_node_table(type_, entry, name) for type_, entry in nodes.items())
    edge_tables = tuple(_edge_table(relation, entry, name) for relation, entry in edges.items())
    _check_ends(node_tables, edge_tables, name)
    return TableGraph(name, node_tables, edge_tables, base, _text_of(node_tables, edge_tables))


def _text_of(nodes: Sequence[NodeTable], edges: Sequence[EdgeTable]) -> str:
    """Returns the entries as JSON."""
    # The order of entries numbers the types, so it is part of the text.
    described = {
        part: [{each.name: getattr(table, each.name) for each in fields(table)} for table in tables]
        for part, tables in (("nodes", nodes), ("edges", edges))
    }
    return json.dumps(described, sort_keys=True, default=_json_of)


def _json_of(value: object) -> str:
    return str(value) if isinstance(value, date) else f"<{type(value).__name__}>"


# --- entries ----------------------------------------------------------------------------------------------


def _node_table(type_: object, entry: object, name: str) -> NodeTable:
    if not isinstance(type_, str) or not type_ or "," in type_ or _CONTROL.search(type_):
        raise ValueError(f"{name}: nodes must be named by words without a comma and control characters, got {type_!r}")
    read = _Entry(entry, f"{name}: [nodes.{type_}]", NodeTable, NODE_POLICIES)
    table = NodeTable(
        type_,
        read.tables(),
        read.columns("key", is_required=True),
        time=read.column("time"),
        label=read.column("label"),
        split=read.column("split"),
        drop=read.columns("drop"),
        fill=read.fill(),
        x=read.joined(),
        frame=read.flag("frame", False),
        **read.policies(),
    )
    read.check_distinct(
        key=table.key, time=table.time, label=table.label, split=table.split, drop=table.drop, x=table.x
    )
    return table


def _edge_table(relation: object, entry: object, name: str) -> EdgeTable:
    parts = relation.split(",") if isinstance(relation, str) else relation
    words = [part.strip() for part in parts if isinstance(part, str)] if isinstance(parts, (list, tuple)) else []
    if len(words) != 3 or not all(words):
        raise ValueError(
            f'{name}: edges must be named by source type, relation and target type, as in [edges."customer,placed,order"], got {relation!r}'
        )
    title = ",".join(words)
    if _CONTROL.search(title):
        raise ValueError(f"{name}: edges must be named by words without control characters, got {title!r}")
    read = _Entry(entry, f'{name}: [edges."{title}"]', EdgeTable, EDGE_POLICIES)
    table = EdgeTable(
        (words[0], words[1], words[2]),
        read.tables(),
        read.columns("source", is_required=True),
        read.columns("target", is_required=True),
        time=read.column("time"),
        drop=read.columns("drop"),
        fill=read.fill(),
        reverse=read.flag("reverse", True),
        **read.policies(),
    )
    read.check_distinct(source=table.source, time=table.time, drop=table.drop)
    read.check_distinct(target=table.target, time=table.time, drop=table.drop)
    return table


class _Entry:
    """Reads the values of one table of a description. ``where`` names it in errors."""

    def __init__(self, given: object, where: str, kind: type, policies: Mapping[str, tuple[str, ...]]) -> None:
        self.given, self.where, self._policies = _mapping(given, where), where, policies
        known = ["table" if each.name == "tables" else each.name for each in fields(kind) if each.name != "name"]
        _check_known(self.given, known, where)

    def tables(self) -> tuple[object, ...]:
        if "table" not in self.given:
            raise ValueError(f"{self.where} must have table, an address or a list of them; add it")
        value = self.given["table"]
        tables = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        for table in tables:
            is_address = isinstance(table, (str, Path)) and str(table)
            if not is_address and not is_object(table):
                raise ValueError(
                    f"{self.where}: table must be an address, a list of them, or an Arrow object (with __arrow_c_stream__), got {_shown(table)}"
                    f"{instead_of(table)}"
                )
        if not tables:
            raise ValueError(f"{self.where}: table must name at least one address, got an empty list")
        return tuple(str(table) if isinstance(table, Path) else table for table in tables)

    def column(self, key: str) -> str | None:
        value = self.given.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise ValueError(f"{self.where}: {key} must be a column's name, got {value!r}")
        return value

    def columns(self, key: str, is_required: bool = False) -> tuple[str, ...]:
        value = self.given.get(key, ())
        names = (value,) if isinstance(value, str) else value
        is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) and name for name in names)
        if not is_list or (is_required and not names):
            got = repr(value) if key in self.given else "nothing"
            raise ValueError(f"{self.where}: {key} must be {_COLUMNS}, got {got}")
        if len(set(names)) < len(names):
            raise ValueError(f"{self.where}: {key} must name each column once, got {list(names)}")
        return tuple(names)

    def joined(self) -> tuple[str, ...] | bool:
        return self.flag("x", True) if isinstance(self.given.get("x"), bool) else self.columns("x")

    def flag(self, key: str, default: bool) -> bool:
        value = self.given.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} must be true or false, got {value!r}")
        return value

    def fill(self) -> dict[str, object]:
        values = _mapping(self.given.get("fill", {}), f"{self.where}: fill")
        for column, value in values.items():
            if not isinstance(value, (bool, int, float, str, date)):
                raise ValueError(
                    f"{self.where}: fill must map columns to a number, a text, a date, true or false, got {value!r} for {column!r}"
                )
        return values

    def policies(self) -> dict[str, Any]:
        chosen = {}
        for key, values in self._policies.items():
            chosen[key] = self.given.get(key, values[0])
            if chosen[key] not in values:
                expected = " or ".join(f'"{value}"' for value in values)
                raise ValueError(
                    f"{self.where}: {key} must be {expected}, got {chosen[key]!r}{did_you_mean(chosen[key], values)}"
                )
        return chosen

    def check_distinct(self, **uses: str | tuple[str, ...] | bool | None) -> None:
        """Raises ValueError if a column has two of these uses."""
        used: dict[str, str] = {}
        for use, names in uses.items():
            for column in (names,) if isinstance(names, str) else names if isinstance(names, tuple) else ():
                if column in used:
                    raise ValueError(
                        f"{self.where}: the column {column!r} is both {used[column]} and {use}; leave out one"
                    )
                used[column] = use


# --- checks -----------------------------------------------------------------------------------------------


def _check_ends(nodes: Sequence[NodeTable], edges: Sequence[EdgeTable], name: str) -> None:
    """Raises ValueError if a relation is named twice, joins unknown types, or names its ends by another number of columns than their keys have."""
    by_type = {table.name: table for table in nodes}
    taken: set[tuple[str, str, str]] = set()
    for table in edges:
        where = f'{name}: [edges."{",".join(table.name)}"]'
        for end, type_, columns in (("source", table.name[0], table.source), ("target", table.name[2], table.target)):
            if type_ not in by_type:
                raise ValueError(
                    f"{where} must join types of [nodes] ({', '.join(by_type)}), got {type_!r}{did_you_mean(type_, by_type)}"
                )
            key = by_type[type_].key
            if len(columns) != len(key):
                raise ValueError(
                    f"{where}: {end} must name {len(key)} columns, as many as the key of {type_} ({', '.join(key)}), got {', '.join(columns)}"
                )
        if table.name in taken:
            raise ValueError(f"{where} is described twice; rename one")
        taken.add(table.name)
    for table in edges:
        if table.reverse and table.reverse_name in taken:
            raise ValueError(
                f"{name}: the relation {','.join(table.reverse_name)} is described, and is also the reverse of {','.join(table.name)}; rename it, or set "
                "reverse = false"
            )


def _check_known(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise ValueError(f"{where} has no entry {key!r}; it has {', '.join(known)}{did_you_mean(key, known)}")


def _mapping(value: object, where: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a table of entries, got {_shown(value)}")
    return dict(value)


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
