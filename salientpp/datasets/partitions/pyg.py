"""Reads the files of PyG's `torch_geometric.distributed.Partitioner`.

Ids of edges count through all types, one type after another. So do the ids of vertices under the key ``global_id``. Every part has the times of all vertices.
A type that lacks an attribute of another type gets rows of NaN for that attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from salientpp.datasets.arrays import form
from salientpp.datasets.partitions.pieces import (
    Book,
    Files,
    PartRows,
    Type,
    check_folders,
    integers,
    read_books,
    read_dict,
    read_json,
    tensor,
)

META = "META.json"


def open_pyg(root: Path) -> Files:
    """Opens a directory that PyG's partitioner wrote."""
    file = root / META
    meta = read_json(file)
    is_hetero = meta.get("is_hetero") if isinstance(meta, dict) else None
    num_parts = meta.get("num_parts") if isinstance(is_hetero, bool) else None
    if isinstance(num_parts, bool) or not isinstance(num_parts, int) or num_parts < 1:
        raise ValueError(
            f"{file}: expected num_parts, an integer above 0, and is_hetero, true or false, as PyG's partitioner writes them, got {meta!r}"
        )
    check_folders(root, "part_", num_parts, META)
    node_types, edge_types = _types(meta, file) if is_hetero else ([None], [None])
    vertices = read_books(root / "node_map", node_types, num_parts)
    edges = read_books(root / "edge_map", edge_types, num_parts)
    first_vertex, first_edge = _offsets(vertices), _offsets(edges)

    def pieces(part: int) -> Iterator[PartRows]:
        folder = root / f"part_{part}"
        names = ("graph.pt", "node_feats.pt", "edge_feats.pt")
        topology, features, edge_features = ((folder / name, read_dict(folder / name)) for name in names)
        for edge_type in edges:
            source, target = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
            size = [vertices[of].parts.numel() for of in (source, target)]
            yield from _edges(edge_type, size, first_edge[edge_type], topology, edge_features)
        for node_type in vertices:
            file, stored = features
            entry = _entry(stored, node_type, file)
            ids = integers(_member(entry, "global_id", file), file, "global_id") - first_vertex[node_type]
            yield PartRows("vertex", node_type, file, ids, _features(entry, file))
            if entry.get("time") is not None:
                yield PartRows("vertex", node_type, file, None, {"time": tensor(entry["time"], file, "time")})

    return Files(num_parts, vertices, edges, pieces, fills_with_nan=bool(is_hetero))


def _edges(
    edge_type: Any, size: list[int], first: int, topology: tuple[Path, Any], attributes: tuple[Path, Any]
) -> Iterator[PartRows]:
    """Yields the rows of one part for an edge type: first the ends of its edges, then their attributes, if it has any.

    ``size`` has the numbers of source and target vertices. ``first`` is the id of the type's first edge. ``topology`` and ``attributes`` are a file and
    its contents.
    """
    file, stored = topology
    attributes_file, of_edges = attributes
    entry = _entry(stored, edge_type, file)
    row, col, ids = (integers(_member(entry, name, file), file, name) for name in ("row", "col", "edge_id"))
    if list(entry.get("size", size)) != size:
        raise ValueError(
            f"{file}: expected edges from {size[0]} sources to {size[1]} targets, the numbers of vertices in node_map, got size "
            f"{entry['size']!r}; the files come from different partitions: copy all files of one partition again, or partition again"
        )
    yield PartRows("edge", edge_type, file, ids - first, {"row": row, "col": col})

    entry = of_edges if edge_type is None else of_edges.get(edge_type, {})
    if not isinstance(entry, dict):
        raise ValueError(f"{attributes_file}: expected a dict for {edge_type!r}, got {form(entry)}")
    values = _features(entry, attributes_file)
    if entry.get("edge_time") is not None:
        values["edge_time"] = tensor(entry["edge_time"], attributes_file, "edge_time")
    if (
        "global_id" in entry
    ):  # these ids count within the type, unlike edge_id; they are missing if the type has only times
        own = integers(entry["global_id"], attributes_file, "global_id")
        if own.shape != ids.shape or not bool((own == ids - first).all()):
            raise ValueError(
                f"{attributes_file}: global_id must list the edges of graph.pt in the same order, got other ids; the "
                "files come from different partitions: copy all files of one partition again, or partition again"
            )
    if values:
        yield PartRows("edge", edge_type, attributes_file, ids - first, values)


def _types(meta: dict[str, Any], file: Path) -> tuple[list[str], list[tuple[str, str, str]]]:
    node_types, edge_types = meta.get("node_types"), meta.get("edge_types")
    if (
        not isinstance(node_types, list)
        or not all(isinstance(t, str) for t in node_types)
        or not isinstance(edge_types, list)
        or not all(isinstance(t, list) and len(t) == 3 and all(isinstance(name, str) for name in t) for t in edge_types)
        or not {t for source, _, target in edge_types for t in (source, target)} <= {*node_types}
        or len({*node_types}) < len(node_types)
        or len({*map(tuple, edge_types)}) < len(edge_types)
    ):
        raise ValueError(
            f"{file}: expected node_types, a list of names, and edge_types, a list of [source, relation, target] with these names, all distinct, got "
            f"{node_types!r} and {edge_types!r}"
        )
    return node_types, [(source, relation, target) for source, relation, target in edge_types]


def _offsets(books: dict[Any, Book]) -> dict[Any, int]:
    """Returns the id at which each type begins, because the partitioner numbers the types one after another."""
    return dict(zip(books, accumulate((book.parts.numel() for book in books.values()), initial=0)))


def _entry(stored: dict[Any, Any], of: Type, file: Path) -> dict[Any, Any]:
    entry = stored if of is None else _member(stored, of, file)
    if not isinstance(entry, dict):
        raise ValueError(f"{file}: expected a dict for {of!r}, got {form(entry)}")
    return entry


def _member(stored: dict[Any, Any], key: Any, file: Path) -> Any:
    if key not in stored:
        raise ValueError(
            f"{file}: expected {key!r}, got {', '.join(map(repr, stored)) or 'nothing'}; PyG's partitioner did not write the "
            "file, or another version did: partition again"
        )
    return stored[key]


def _features(entry: dict[Any, Any], file: Path) -> dict[str, Tensor]:
    values = entry.get("feats", {})
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected a dict under feats, got {form(values)}")
    return {str(name): tensor(rows, file, str(name)) for name, rows in values.items() if rows is not None}
