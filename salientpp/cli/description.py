"""Tables that describe a dataset directory or a converted graph, printed by ``info``, ``partition`` and ``convert``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from salientpp.cli import terminal
from salientpp.datasets.converted.directory import read_converted
from salientpp.store.directory.description import PARTS, EdgeName, EdgeType, VertexType
from salientpp.store.directory.manifest import parts_there
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.directory.origin import table_origin
from salientpp.tables import FittedTable

#: Number of files that a graph was made of, of which addresses are shown.
_NAMED_TABLES = 4


def describe(part: PartitionedGraph) -> list[RenderableType]:
    described = part.description
    total = sum(entry["bytes"] for entry in part.manifest["files"].values())
    there = parts_there(part.root)
    facts = [("directory", f"{part.root}, {total / 1e6:,.1f} MB, format version {described.version}")]
    if there is not None:
        parts = ", ".join(map(str, sorted(there)))
        facts.append(("copy with", f"part {parts} of {part.num_parts}; the figures describe the whole directory"))
    facts.append(("topology", "in parts" if part.topology == PARTS else "whole"))
    facts.append(("graph", f"{part.num_vertices:,} vertices, {part.num_edges:,} edges"))
    if not part.is_hetero:
        facts.append(("attributes", _attributes(described.node_types[0], described.edge_types[0])))
    facts += [
        (f"{_words(type_.name)}{name}", _narrower(type_, name))
        for type_ in described.types
        for name, entry in type_.attributes.items()
        if "stored_as" in entry
    ]
    facts += [
        (_keys_of(type_.name), _columns_of(type_.keys)) for type_ in described.node_types if type_.keys is not None
    ]
    facts += _made_of(part.root)
    if described.time_attr is not None:
        facts.append(("lists ascend by", repr(described.time_attr)))
    facts += [
        ("ordered for", _workload(part)),
        *([] if described.partitioning is None else [("assigned by", _partitioned(described.partitioning))]),
        ("edge cut", f"{described.quality['edge_cut']:,} edges, {described.quality['edge_cut_fraction']:.1%}"),
        (
            "largest part / mean",
            ", ".join(f"{name} {ratio:.3f}" for name, ratio in described.quality["balance"].items()),
        ),
    ]
    grid = _grid(facts)
    if not part.is_hetero:
        return [grid, _table_of_parts(part)]
    vertices = _table("vertices", numbers=("number",), texts=("rows", "attributes"))
    for type_ in described.node_types:
        rows = "none" if not type_.attributes else "in every part" if type_.replicated else "by part"
        cells = str(type_.name), f"{type_.num_vertices:,}", rows, _attributes(type_)
        vertices.add_row(*map(terminal.printable, cells))
    edges = _table("edges", numbers=("number",), texts=("attributes", "splits"))
    for relation in described.edge_types:
        splits = ", ".join(f"{name} {sum(counts):,}" for name, counts in relation.splits.items())
        name, columns = map(terminal.printable, (" ".join(relation.name or ()), _attributes(relation)))
        edges.add_row(name, f"{relation.num_edges:,}", columns, splits or "none")
    return [grid, vertices, edges, _table_of_parts(part)]


def as_json(root: Path, manifest: Mapping[str, Any], **more: Any) -> bytes:
    """Returns the manifest of a directory as JSON, with the total bytes of its files instead of the files."""
    about = {name: value for name, value in manifest.items() if name not in ("files", "checksum")}
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    return (json.dumps({"root": str(root.absolute()), "bytes": total, **about, **more}, indent=1) + "\n").encode()


def _partitioned(how: Mapping[str, Any]) -> str:
    weights = f", {how['edge_weights']} edge weights" if how["edge_weights"] else ""
    order = "" if how["order"] == "vip" else "; ids in the user's order"
    return f"{how['method']}{weights}{', refined' if how['refine'] else ', not refined'}{order}"


def _words(type_: str | EdgeName) -> str:
    """Returns the name of a vertex or edge type and a space, to write before an attribute's name. Empty in a homogeneous graph."""
    return "" if type_ is None else f"{type_ if isinstance(type_, str) else ' '.join(type_)} "


def _narrower(type_: VertexType | EdgeType, name: str) -> str:
    """Returns a text about an attribute that is stored in a narrow format: the format, the bytes of a row, and the errors."""
    narrow, stored = type_.narrow(name), type_.attributes[name]["stored_as"]
    assert narrow is not None  # the manifest says so
    return (
        f"stored as {narrow.format}: {narrow.row_bytes:,} bytes per row, not {narrow.wide_bytes:,}; largest error {stored['largest_error']:.3g}, "
        f"root mean square {stored['relative_rms_error']:.2%} of the values'"
    )


def _attributes(*types: VertexType | EdgeType) -> str:
    """Returns the attributes of these types as text. A table counts as one attribute: its columns are counted by semantic type, with a row's bytes."""
    shown = []
    for type_ in types:
        tables = type_.tables
        parts = {column for table in tables.values() for column in table.columns}
        others = {name: entry for name, entry in type_.attributes.items() if name not in parts}
        shown += [_columns(others)] if others else []
        for name, table in tables.items():
            size = sum(type_.row_bytes(column) for column in table.columns)
            kinds = [f"{len(names)} {stype}" for stype, names in table.names]
            kinds += ["y"] if any(piece.stype is None for piece in table.pieces) else []
            shown.append(f"{name} table ({', '.join(kinds) or 'no columns'}; {size:,} bytes per row)")
    return ", ".join(shown) or "none"


def _keys_of(type_: str | None) -> str:
    return "keys" if type_ is None else f"keys of {type_}"


def _columns_of(keys: Sequence[Mapping[str, str]]) -> str:
    """Returns names and types of key columns as text."""
    return ", ".join(f"{column['name']} {column['type']}" for column in keys)


def _columns(*columns: Mapping[str, Mapping[str, Any]]) -> str:
    shown = [
        f"{name} {entry['dtype']} {entry['row_shape']}" if entry["row_shape"] else f"{name} {entry['dtype']}"
        for each in columns
        for name, entry in each.items()
    ]
    return ", ".join(shown) or "none"


def _grid(facts: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    for fact in facts:
        grid.add_row(*map(terminal.printable, fact))
    return grid


def _table(first: str, numbers: Sequence[str], texts: Sequence[str] = ()) -> FittedTable:
    table = FittedTable(first)
    for heading in (*numbers, *texts):
        table.add_column(heading, justify="right" if heading in numbers else "left")
    return table


def _workload(part: PartitionedGraph) -> str:
    described = part.description
    type_, split = described.seeds
    alike = [each for each in described.num_neighbors if each == described.num_neighbors[0]]
    if len(alike) == len(described.num_neighbors):
        numbers = f"{alike[0] if alike else 'none'}"
    else:
        names = [" ".join(relation.name or ()) for relation in described.edge_types]
        numbers = ", ".join(f"{per_hop} of {name}" for name, per_hop in zip(names, described.num_neighbors))
    of = f" of {type_!r}" if type_ is not None else ""
    return f"num_neighbors {numbers}, batch size {described.batch_size}, seeds {split!r}{of}"


def _table_of_parts(part: PartitionedGraph) -> Table:
    """Returns a table with the vertices and seeds that each part owns, per type and split."""
    columns: dict[str, list[int]] = {}
    for type_ in part.description.node_types:
        name = "" if type_.name is None else f"{terminal.printable(type_.name)} "
        columns[name.strip() or "vertices"] = [type_.book.size_of(part_id) for part_id in range(part.num_parts)]
        columns |= {f"{name}{split}": counts for split, counts in type_.splits.items()}
    table = _table("part", numbers=[*columns])
    table.columns[0].justify = "right"
    for part_id in range(part.num_parts):
        table.add_row(str(part_id), *(f"{counts[part_id]:,}" for counts in columns.values()))
    return table


def describe_converted(root: Path) -> Table:
    manifest = read_converted(root)
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    facts = [("converted graph", f"{root}, {total / 1e6:,.1f} MB; use it as converted:{root}")]
    for number, vertices in enumerate(manifest["node_types"]):
        entries = {name: manifest["files"][f"n{number}.{name}.npy"] for name in vertices["columns"]}
        columns = {
            name: {"dtype": each["torch_dtype"], "row_shape": each["shape"][1:]} for name, each in entries.items()
        }
        name = "vertices" if vertices["name"] is None else f"vertices {vertices['name']}"
        facts.append((name, f"{vertices['num_vertices']:,}; {_columns(columns) if columns else 'no attributes'}"))
        if vertices.get("keys") is not None:
            facts.append((_keys_of(vertices["name"]), _columns_of(vertices["keys"])))
    for number, edges in enumerate(manifest["edge_types"]):
        entries = {name: manifest["files"][f"e{number}.{name}.npy"] for name in edges.get("columns", ())}
        columns = {
            name: {"dtype": each["torch_dtype"], "row_shape": each["shape"][1:]} for name, each in entries.items()
        }
        name = "edges" if edges["name"] is None else f"edges {' '.join(edges['name'])}"
        facts.append((name, "; ".join([f"{edges['num_edges']:,}", *([_columns(columns)] if columns else [])])))
    for links in manifest.get("link_splits", ()):
        split, of = links["name"], links["columns"]
        entries = {name: manifest["files"][f"l.{split}.{name}.npy"] for name in of if name not in ("edge", "edge_neg")}
        columns = {
            name: {"dtype": each["torch_dtype"], "row_shape": each["shape"][1:]} for name, each in entries.items()
        }
        negatives = [f"{of['edge_neg']:,} negatives"] if "edge_neg" in of else []
        more = [*negatives, *([_columns(columns)] if columns else [])]
        facts.append((f"link split {split}", "; ".join([f"{of['edge']:,} edges", *more])))
    return _grid([*facts, *_made_of(root)])


def _made_of(root: Path) -> list[tuple[str, str]]:
    """Returns the fact from which tables a graph was made, or nothing."""
    origin = table_origin(root)
    if origin is None:
        return []
    files = {fact["address"]: fact.get("size", 0) for table in origin["tables"].values() for fact in table["from"]}
    more = f" and {len(files) - _NAMED_TABLES:,} more" if len(files) > _NAMED_TABLES else ""
    size = f", {total / 1e6:,.1f} MB" if (total := sum(files.values())) else ""
    return [("made of", f"{', '.join([*files][:_NAMED_TABLES])}{more}{size}")]
