"""Opens folders of arrays: a folder for each type of vertices, and a folder ``SOURCE__RELATION__TARGET`` for each type of edges.

The names of files in a folder differ between public datasets; :mod:`~salientpp.datasets.converted.layouts` describes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from salientpp.datasets.arrays import SPLITS, check_file
from salientpp.datasets.converted.arrays import StoredArray, array_rows
from salientpp.datasets.converted.column_names import Ends
from salientpp.datasets.converted.labels import labels_of
from salientpp.datasets.converted.layouts import SIZES, Layout
from salientpp.datasets.converted.named_files import ON_THIS_HOST, Finder, by_numbers, edges_of
from salientpp.datasets.converted.parquet import parquet_rows
from salientpp.datasets.converted.pieces import EdgePiece, EdgeSource, Rows, Source, Split, Vertices
from salientpp.datasets.converted.tables import parquet_table
from salientpp.datasets.spec import with_spec
from salientpp.suggestions import did_you_mean

_FILE = re.compile(r"(.+?)(?:-(\d+))?\.(npy|parquet)")
_SPLIT = re.compile(rf"({'|'.join(SPLITS)})(_idx|_mask)?")
_EDGES = "edge_index"
_TABLE = "nodes"


def open_folder(name: str, layout: Layout, rest: str, undirected: bool | None, finder: Finder = ON_THIS_HOST) -> Source:
    """Opens the folder that ``name`` stands for. ``rest`` is ``DIR[,key=value]``. Only headers are read.

    With ``undirected`` every relation gets its inverse, as PyG's ``ToUndirected`` adds it: a relation within one type stores each pair in both directions,
    once. Any other relation gets a second relation, called ``rev_RELATION``.
    """
    folder_name, _, spec = rest.partition(",")
    homogeneous, chosen = _parameters(name, layout, with_spec(name, spec, {}, as_text=True))
    given = finder.path(name, folder_name)
    if not given.is_dir():
        raise FileNotFoundError(f"{name}: {given} is not a directory; expected one with a folder for each type")
    folder = given / layout.inside if (given / layout.inside).is_dir() else given
    relations = _relations(folder)
    if not relations:
        raise ValueError(
            f"{name}: {folder} must have folders SOURCE__RELATION__TARGET with {_EDGES}.npy, got {_listed(folder)}"
        )
    root = folder.parent if layout.inside else folder
    sizes = layout.sizes(root)
    types = dict.fromkeys(end for source, _, target in relations for end in (source, target))
    types |= dict.fromkeys(each.name for each in _folders(folder) if each.name not in _by_name(relations))
    if homogeneous:
        type_ = layout.main or next(iter(types))
        relations = {each: at for each, at in relations.items() if each[0] == each[2] == type_}
        if len(relations) != 1 or (layout.main is None and len(types) != 1):
            raise ValueError(
                f"{name}: homogeneous=true needs one type of vertices and one relation, got {', '.join(map(str, types))} with "
                f"{len(relations)} relations within {type_!r}; leave it out"
            )
        types = {type_: None}
    files: list[Path] = []
    left_out: list[str] = []
    if layout.takes_others:
        unknown = [type_ for type_ in sizes if type_ not in types]
        if unknown:
            raise ValueError(
                f"{name}: num_nodes.json names {', '.join(map(repr, unknown))}, but the folder has the types {', '.join(map(repr, types))}; correct the name"
                f"{did_you_mean(unknown[0], list(types))}"
            )
        left_out += [each.name for each in sorted(folder.iterdir()) if _is_data(each) and each.name != SIZES]
    vertices: dict[str | None, Vertices] = {
        type_: _vertices(folder, type_, layout, chosen, sizes.get(type_), files, left_out) for type_ in types
    }
    for type_, splits_of in layout.splits.items():
        if type_ in types and (size := vertices[type_].num_vertices) is not None:
            vertices[type_] = replace(vertices[type_], splits=splits_of(root, size, chosen))
    edges: dict[Any, EdgeSource] = {}
    for relation, at in relations.items():
        edges[relation] = _edges(at, (relation[0], relation[2]), files, left_out)
        if undirected and relation[0] != relation[2]:
            inverse = (relation[2], f"rev_{relation[1]}", relation[0])
            if inverse in relations:
                raise ValueError(f"{name}: {folder} has {'__'.join(inverse)} already; leave out --undirected")
            edges[inverse] = _inverted(edges[relation])
    if homogeneous:
        vertices, edges = {None: next(iter(vertices.values()))}, {None: next(iter(edges.values()))}
    return Source(
        name,
        vertices,
        edges,
        undirected=bool(undirected),
        files=tuple(files),
        left_out=tuple(dict.fromkeys(left_out)),
    )


def _parameters(name: str, layout: Layout, given: dict[str, str]) -> tuple[bool, dict[str, str]]:
    """Checks the parameters after ``DIR``. Returns True if the user asks for a homogeneous graph, and the value of each of the layout's ``choices``."""
    known = ("homogeneous", *layout.choices)
    for key in given:
        if key not in known:
            raise ValueError(f"{name} has no parameter {key!r}; it has {', '.join(known)}{did_you_mean(key, known)}")
    homogeneous = given.get("homogeneous", "false").lower()
    if homogeneous not in ("true", "false"):
        raise ValueError(f"{name}: homogeneous must be true or false, got {homogeneous!r}")
    chosen = {key: given.get(key, next(iter(values))) for key, values in layout.choices.items()}
    for key, value in chosen.items():
        if value not in layout.choices[key]:
            raise ValueError(f"{name}: {key} must be {' or '.join(layout.choices[key])}, got {value!r}")
    return homogeneous == "true", chosen


# --- files of a folder ------------------------------------------------------------------------------------


def _folders(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))


def _listed(folder: Path) -> str:
    return ", ".join(sorted(each.name for each in folder.iterdir())) or "nothing"


def _relations(folder: Path) -> dict[tuple[str, str, str], Path]:
    """Returns the folder of each relation. Two or three underscores separate the parts of its name."""
    found = {}
    for each in _folders(folder):
        parts = each.name.split("___") if "___" in each.name else each.name.split("__")
        if len(parts) == 3 and all(parts):
            found[parts[0], parts[1], parts[2]] = each
        elif len(parts) > 1:
            raise ValueError(f"the name of {each} must be SOURCE__RELATION__TARGET, got {len(parts)} parts; rename it")
    return found


def _by_name(relations: Mapping[tuple[str, str, str], Path]) -> set[str]:
    return {at.name for at in relations.values()}


def _arrays_of(folder: Path) -> dict[str, list[Path]]:
    """Returns the files of each array. ``NAME-0.npy``, ``NAME-1.npy``, ... are pieces of one array, in the order of their numbers."""
    found: dict[str, list[Path]] = {}
    numbers: dict[str, list[int]] = {}
    for path in sorted(folder.iterdir(), key=lambda each: by_numbers(each.name)) if folder.is_dir() else ():
        if match := _FILE.fullmatch(path.name):
            found.setdefault(match[1], []).append(path)
            numbers.setdefault(match[1], []).append(int(match[2] or -2))
    for name, paths in found.items():
        if len({path.suffix for path in paths}) > 1:
            raise ValueError(f"{folder} has {name} as .npy and as .parquet; leave out one")
        first = numbers[name][0]
        if len(paths) > 1 and numbers[name] != [*range(first, first + len(paths))]:
            raise ValueError(
                f"{folder} must have the pieces of {name} as {name}-0.npy, {name}-1.npy and so on, got {', '.join(path.name for path in paths)}; add the "
                "missing file, or move away files that are no piece"
            )
    return found


def _is_data(path: Path) -> bool:
    """True if a file may hold data that the user expects in the graph."""
    return path.is_file() and not path.name.startswith(".")


def _edges(folder: Path, types: tuple[str, str], files: list[Path], left_out: list[str]) -> EdgeSource:
    held = _arrays_of(folder)
    if _EDGES not in held:
        raise FileNotFoundError(f"{folder} must have {_EDGES}.npy or {_EDGES}.parquet, got {_listed(folder)}")
    files += held[_EDGES]
    edges = edges_of(held[_EDGES], ends=Ends(types=types))
    others = [each.name for each in sorted(folder.iterdir()) if _is_data(each) and each not in held[_EDGES]]
    left_out += [f"{folder.name}/{other}" for other in others]
    left_out += [f"column {column} of {folder.name}" for column in edges.left_out]
    return edges


def _inverted(edges: EdgeSource) -> EdgeSource:
    def pieces(most: int) -> Iterator[EdgePiece]:
        for piece in edges.pieces(most):
            yield EdgePiece(piece.target, piece.source, piece.where, piece.done)

    return EdgeSource(pieces, edges.total, edges.num_edges, edges.unit)


def _vertices(
    folder: Path,
    type_: str,
    layout: Layout,
    chosen: Mapping[str, str],
    size: int | None,
    files: list[Path],
    left_out: list[str],
) -> Vertices:
    names = {stem: name for key, value in chosen.items() for stem, name in layout.choices[key][value].items()}
    names |= layout.names
    columns: dict[str, Rows] = {}
    splits: dict[str, Split] = {}

    def add(stem: str, name: str, value: Rows | Split) -> None:
        if name in columns or name in splits:
            raise ValueError(f"{folder / type_} has {name} twice, the second time in {stem}; leave out one")
        if isinstance(value, Split):
            splits[name] = value
        else:
            columns[name] = value

    not_chosen = {stem for values in layout.choices.values() for of in values.values() for stem in of}
    read: list[Path] = []
    for stem, paths in _arrays_of(folder / type_).items():
        name = names.get(stem, stem if layout.takes_others else None)
        if name is None:
            read += paths if stem in not_chosen else []  # the user chose another file
            continue
        files += paths
        read += paths
        is_table = paths[0].suffix == ".parquet"
        split = _SPLIT.fullmatch(name) if layout.takes_others else None
        if is_table and name == _TABLE:
            for several in parquet_table(paths):
                for key, value in several.items():
                    add(stem, key, value)
            continue
        rows = parquet_rows(paths) if is_table else _npy_rows(paths, layout.without_header.get(stem))
        if split:
            is_mask = not is_table and StoredArray.of(paths[0]).dtype.kind == "b"
            add(stem, split[1], Split(rows, is_mask))
        else:
            add(stem, name, labels_of(rows, layout.are_classes) if name == "y" else rows)
    others = sorted(each for each in folder.joinpath(type_).iterdir()) if (folder / type_).is_dir() else []
    left_out += [f"{type_}/{each.name}" for each in others if _is_data(each) and each not in read]
    known = [rows.num_rows for rows in columns.values() if rows.num_rows is not None]
    size = known[0] if size is None and known else size
    return Vertices(size, columns, splits, keeps_unlabelled=layout.keeps_unlabelled)


def _npy_rows(paths: list[Path], values: tuple[str, tuple[int, ...]] | None) -> Rows:
    """Returns the rows of .npy files. If the layout allows files without numpy's header, ``values`` has the dtype and shape of their rows."""
    return array_rows(
        [
            StoredArray.of(path)
            if values is None or _has_header(path)
            else StoredArray.of_values(path, np.dtype(values[0]), values[1])
            for path in paths
        ]
    )


def _has_header(path: Path) -> bool:
    check_file(path)
    with path.open("rb") as file:
        return file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
