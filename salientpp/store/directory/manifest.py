"""Reads the manifest of a dataset directory, and checks it against the format.

After the check, no field is missing, has a wrong type or contradicts another field, and every listed file belongs to the directory. The files themselves are
checked when they are opened.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from salientpp.store.directory.description import (
    FORMAT,
    ORIGIN,
    PARTS,
    VERSIONS,
    WHOLE,
    Description,
    EdgeType,
    VertexType,
)
from salientpp.store.directory.files import DatasetError, cannot_be_read
from salientpp.store.directory.kinds import CONVERTED, MANIFEST, has_manifest
from salientpp.store.directory.owned import hidden_name
from salientpp.store.directory.table_fields import check_frame, shown
from salientpp.store.narrow import Narrow

#: File in a host's copy: {"parts": [...]}, the parts that the copy has.
PARTS_FILE = "parts.json"

#: A function that checks a JSON value.
Check = Callable[[Any], bool]


def _whole(least: int = 0, end: int = 2**63) -> Check:
    return lambda value: type(value) is int and least <= value < end


def _is(*types: type) -> Check:
    return lambda value: type(value) in types


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _map_of(key: Check, check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(key, value)) and all(map(check, value.values()))


def _record(**fields: Check) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(name in value and check(value[name]) for name, check in fields.items())
    )


def _tuple_of(*checks: Check) -> Check:
    return lambda value: (
        isinstance(value, list) and len(value) == len(checks) and all(check(each) for check, each in zip(checks, value))
    )


def _at_least_zero(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0


def _text(value: Any) -> bool:
    # False for text with half of a surrogate pair.
    return isinstance(value, str) and value.encode(errors="replace").decode() == value


def _part_of_a_file_name(value: Any) -> bool:
    return _text(value) and not set(value) & {"/", "\0"}


def _split_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier() and value != "all"


def _hexadecimal(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")


def _dtype(value: Any) -> bool:
    return isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)


_ATTRIBUTES = (
    "a map of names, without '/', to a dtype of torch and a row_shape, integers >= 0",
    _map_of(_part_of_a_file_name, _record(dtype=_dtype, row_shape=_list_of(_whole()))),
)

#: Field -> description of its valid values, and the check.
Schema = Mapping[str, tuple[str, Check]]

_SPLITS = ("a map of identifiers to integers >= 0, one per part", _map_of(_split_name, _list_of(_whole())))
_COUNT = ("an integer >= 0", _whole())
_OFFSETS = ("a list of integers >= 0", _list_of(_whole()))
_SHARED: Schema = {
    "num_parts": ("an integer >= 1", _whole(1)),
    "quality": (
        "edge_cut and edge_cut_fraction, numbers; balance, a map of names to numbers",
        _record(
            edge_cut=_is(int, float), edge_cut_fraction=_is(int, float), balance=_map_of(_is(str), _is(int, float))
        ),
    ),
    "files": (
        "a map of names to bytes and quick, integers >= 0; sha256, 64 hexadecimal digits; a dtype; and a shape, integers >= 0",
        _map_of(
            _is(str),
            _record(bytes=_whole(), quick=_whole(), sha256=_hexadecimal, dtype=_is(str), shape=_list_of(_whole())),
        ),
    ),
    "partitioning": (
        "method and order, strings; edge_weights, null or a string; refine, true or false",
        _record(method=_is(str), order=_is(str), edge_weights=_is(str, NoneType), refine=_is(bool)),
    ),
}
#: Directories of earlier versions lack these fields.
_OPTIONAL = ("partitioning", "origin")
_FANOUTS = _list_of(_whole(-1, 2**31))

_VERSION_2: Schema = {
    "node_types": ("a list of at least one record", lambda value: _list_of(_record())(value) and len(value) > 0),
    "edge_types": ("a list of records", _list_of(_record())),
    "time_attr": ("null or a string", _is(str, NoneType)),
    "workload": (
        "num_neighbors, a list of fanouts for each of edge_types; batch_size, an integer >= 1; seeds, a type and a split",
        _record(
            num_neighbors=_list_of(_FANOUTS),
            batch_size=_whole(1),
            seeds=_tuple_of(_is(str, NoneType), _is(str)),
        ),
    ),
    **_SHARED,
}

_VERSION_5: Schema = {
    "topology": (f"{WHOLE!r} or {PARTS!r}", lambda value: value in (WHOLE, PARTS)),
    **_VERSION_2,
}

_SCHEMAS: Mapping[int, Schema] = {
    1: {
        "num_vertices": _COUNT,
        "num_edges": _COUNT,
        "offsets": _OFFSETS,
        "num_classes": _COUNT,
        "node_attributes": _ATTRIBUTES,
        "edge_attributes": _ATTRIBUTES,
        "splits": _SPLITS,
        "workload": (
            "num_neighbors, a list of fanouts; batch_size, an integer >= 1; seeds, the name of a split",
            _record(num_neighbors=_FANOUTS, batch_size=_whole(1), seeds=_is(str)),
        ),
        **_SHARED,
    },
    2: _VERSION_2,
    3: _VERSION_2,
    4: {"topology": (repr(PARTS), lambda value: value == PARTS), **_VERSION_2},
    5: _VERSION_5,
    6: {"origin": (repr(ORIGIN), lambda value: value == ORIGIN), **_VERSION_5},
}

_VERTEX_TYPE: Schema = {
    "name": ("a string, or null in a homogeneous graph", lambda value: value is None or _text(value)),
    "num_vertices": _COUNT,
    "offsets": _OFFSETS,
    "num_classes": _COUNT,
    "attributes": _ATTRIBUTES,
    "splits": _SPLITS,
    "replicated": ("true or false", _is(bool)),
}

_STORED_AS = (
    "a format, row_bytes, an integer >= 0, and largest_error and relative_rms_error, numbers >= 0",
    _record(format=_is(str), row_bytes=_whole(), largest_error=_at_least_zero, relative_rms_error=_at_least_zero),
)

_EDGE_TYPE: Schema = {
    "name": (
        "three strings, or null in a homogeneous graph",
        lambda value: value is None or _tuple_of(_text, _text, _text)(value),
    ),
    "num_edges": _COUNT,
    "attributes": _ATTRIBUTES,
    "splits": _SPLITS,
}

_EDGE_TYPE_OF_PARTS: Schema = {**_EDGE_TYPE, "edge_offsets": _OFFSETS}


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


_FRAMES: Schema = {
    "frames": (
        "a map of names to pieces, records of stype, key, kind, dtype, offset and column; and names, pairs of a stype and its columns",
        _map_of(
            _text,
            _record(
                pieces=_list_of(
                    _record(
                        stype=_or_null(_text),
                        key=_or_null(_text),
                        kind=lambda value: value in ("dense", "embedding", "ragged"),
                        dtype=_dtype,
                        offset=_list_of(_whole()),
                        column=_text,
                    )
                ),
                names=_list_of(_tuple_of(_text, _list_of(_text))),
            ),
        ),
    )
}

_EDGE_TYPE_OF_TABLES: Schema = {
    **_EDGE_TYPE,
    **_FRAMES,
    "edge_offsets": ("null or a list of integers >= 0", _or_null(_OFFSETS[1])),
}


def _key_columns(value: Any) -> bool:
    if not _list_of(_record(name=_text, type=_text))(value):
        return False
    return len({column["name"] for column in value}) == len(value) > 0


_KEYS: Schema = {
    "keys": ("null, or a list of at least one column, each with a name of its own and a type", _or_null(_key_columns))
}

#: By version, the fields of vertex types and of edge types.
_TYPES: Mapping[int, tuple[Schema, Schema]] = {
    2: (_VERTEX_TYPE, _EDGE_TYPE),
    3: (_VERTEX_TYPE, _EDGE_TYPE),
    4: (_VERTEX_TYPE, _EDGE_TYPE_OF_PARTS),
    5: (
        {**_VERTEX_TYPE, **_FRAMES},
        _EDGE_TYPE_OF_TABLES,
    ),
    6: ({**_VERTEX_TYPE, **_FRAMES, **_KEYS}, _EDGE_TYPE_OF_TABLES),
}


def read_manifest(root: Path) -> dict[str, Any]:
    try:
        text = (root / MANIFEST).read_text()
    except (FileNotFoundError, NotADirectoryError):
        kind, _, named = str(root).partition(":")
        if kind == "converted" and has_manifest(named):
            read_manifest(Path(named))  # refuses a converted graph
        aside = sorted(root.parent.glob(f"{glob.escape(hidden_name(root.name, 'replaced-'))}*"))
        raise DatasetError(
            f"{root} is not a dataset directory: it has no manifest.json; write one with salientpp.partition(...) or "
            f"`salientpp partition`{f', or rename back {aside[-1]}, which a killed run was replacing' if aside else ''}"
        ) from None
    except OSError as error:
        raise cannot_be_read(root / MANIFEST, error) from None
    except ValueError as error:
        raise _no_json(root, error) from None
    return parse_manifest(text, root)


def _no_json(root: object, error: Exception) -> DatasetError:
    return DatasetError(f"{root}/{MANIFEST} is not valid JSON ({error}); partition again")


def parse_manifest(text: str | bytes, root: object) -> dict[str, Any]:
    """Returns the checked manifest that a text holds. ``root`` is the path or address of its directory, for errors. Raises DatasetError if it is wrong."""
    path = f"{root}/{MANIFEST}"
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_json(root, error) from None
    if isinstance(manifest, dict) and manifest.get("format") == CONVERTED:
        raise DatasetError(
            f"{root} is a converted graph and has no parts; write a dataset directory with `salientpp partition converted:{root} DIR --parts K`"
        )
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DatasetError(f"{path} does not describe a dataset directory: expected format {FORMAT!r}; partition again")
    if type(manifest.get("version")) is not int or manifest["version"] not in VERSIONS:
        raise DatasetError(
            f"{path} has format version {manifest.get('version')}, but this salientpp reads versions {', '.join(map(str, VERSIONS[:-1]))} and {VERSIONS[-1]}; "
            "upgrade salientpp, or partition again"
        )
    stated = manifest.pop("checksum", None)
    try:
        if stated != manifest_checksum(manifest):
            raise DatasetError(f"{path} was altered: its checksum does not match its contents; partition again")
        check_manifest(manifest)
    except RecursionError:
        raise DatasetError(f"{path} is nested too deeply; partition again") from None
    except DatasetError:
        raise
    except ValueError as error:
        raise DatasetError(f"{path} does not describe a dataset directory: {error}; partition again") from None
    return manifest


def manifest_checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def parts_there(root: Path) -> set[int] | None:
    """Returns the parts that a host's copy holds. None: the directory is not a copy, so it holds all parts."""
    path = root / PARTS_FILE
    try:
        parts = json.loads(path.read_text())["parts"]
        if not isinstance(parts, list) or not all(type(part) is int and part >= 0 for part in parts):
            raise ValueError(f"parts must be a list of integers >= 0, got {ascii(parts)[:200]}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise cannot_be_read(path, error, "delete the directory and copy it again") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatasetError(f"{path} does not list parts ({error}); delete the directory and copy it again") from None
    return set(parts)


def check_part_id(part_id: int, num_parts: int) -> None:
    if not 0 <= part_id < num_parts:
        raise ValueError(f"part_id must be in [0, {num_parts}), got {part_id}")


def check_is_there(root: Path, part_id: int) -> None:
    there = parts_there(root)
    if there is not None and part_id not in there:
        raise DatasetError(
            f"{root} is a copy without part {part_id}; its parts are {', '.join(map(str, sorted(there))) or 'none'}; copy that part too, "
            "or open the original directory"
        )


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Checks a parsed manifest against the format. Raises ValueError, which names the field, if a field is wrong."""
    version = manifest["version"]
    _check_fields(manifest, _SCHEMAS[version], "")
    for kind, schema in zip(("node_types", "edge_types"), _TYPES[version]) if version > 1 else ():
        for number, entry in enumerate(manifest[kind]):
            _check_fields(entry, schema, f"{kind}[{number}].")
    described = Description.of(manifest)
    _check_names(described)
    for vertices in described.node_types:
        _check_offsets(f"{vertices.where}offsets", vertices.offsets, "num_vertices", vertices.num_vertices, described)
    for edges in described.edge_types:
        if (edges.edge_offsets is None) != (described.topology == WHOLE):
            raise ValueError(
                f"{edges.where}edge_offsets must be null if and only if topology is {WHOLE!r}, got {shown(edges.edge_offsets)} for "
                f"{described.topology!r}"
            )
        if edges.edge_offsets is not None:
            _check_offsets(f"{edges.where}edge_offsets", edges.edge_offsets, "num_edges", edges.num_edges, described)
    for type_ in described.types:
        _check_splits(type_, described.num_parts)
    _check_workload(described)
    _check_time(described)
    _check_narrow(described)
    for type_ in described.types:
        for name, frame in type_.tables.items():
            check_frame(frame, f"{type_.where}frames[{name!r}]", name, type_.attributes)
    _check_files(described, manifest["files"])


def _check_fields(record: Mapping[str, Any], schema: Schema, where: str) -> None:
    for field, (words, check) in schema.items():
        if field not in record and field not in _OPTIONAL:
            raise ValueError(f"field {where}{field} is missing, expected {words}")
        if field in record and not check(record[field]):
            raise ValueError(f"{where}{field} must be {words}, got {shown(record[field])}")


def _check_names(described: Description) -> None:
    """Checks that type names are unique, that edges join existing types, and that None is the only type of a homogeneous graph."""
    for kind, types in (("node_types", described.node_types), ("edge_types", described.edge_types)):
        names = [type_.name for type_ in types]
        for number, name in enumerate(names):
            first = names.index(name)
            if first != number:
                raise ValueError(f"{kind} must have distinct names, got {shown(name)} as number {first} and {number}")
    known = [type_.name for type_ in described.node_types]
    if None in known and (known != [None] or [type_.name for type_ in described.edge_types] != [None]):
        raise ValueError(
            "a type named null must be the only vertex type and the only edge type, as in a homogeneous graph"
        )
    for type_ in described.edge_types:
        for end in (type_.source, type_.target):
            if end not in known:
                raise ValueError(f"{type_.where}name must join node types ({shown(known)}), got {shown(type_.name)}")


def _check_offsets(field: str, offsets: list[int], name: str, size: int, described: Description) -> None:
    num_parts, ascending = described.num_parts, all(first <= second for first, second in pairwise(offsets))
    if len(offsets) != num_parts + 1 or offsets[0] != 0 or offsets[-1] != size or not ascending:
        raise ValueError(
            f"{field} must ascend from 0 to {name}, {size}, in num_parts + 1 = {num_parts + 1} numbers, got {shown(offsets)}"
        )


def _check_splits(type_: VertexType | EdgeType, num_parts: int) -> None:
    if isinstance(type_, VertexType):
        whole, most = "number of vertices of the part", [end - begin for begin, end in pairwise(type_.offsets)]
    elif type_.edge_offsets is None:
        whole, most = "number of edges", [type_.num_edges] * num_parts
    else:
        whole, most = "number of edges of the part", [end - begin for begin, end in type_.pieces]
    for name, counts in type_.splits.items():
        if len(counts) != num_parts or any(count > size for count, size in zip(counts, most)):
            raise ValueError(
                f"{type_.where}splits[{name!r}] must have one number for each of {num_parts} parts, at most the {whole}, got {shown(counts)}"
            )


def _check_workload(described: Description) -> None:
    type_, split = described.seeds
    known = {vertices.name: vertices for vertices in described.node_types}
    if split != "all" and split not in (known[type_].splits if type_ in known else ()):
        raise ValueError(
            f"workload.seeds must be a split or 'all', got {shown(split)}{f' of {shown(type_)}' if described.version > 1 else ''}"
        )
    if split == "all" and type_ is not None and type_ not in known:
        raise ValueError(f"workload.seeds must name a node type, got {shown(type_)}")
    if len(described.num_neighbors) != len(described.edge_types) or len(set(map(len, described.num_neighbors))) > 1:
        raise ValueError(
            f"workload.num_neighbors must have a list for each of {len(described.edge_types)} edge types, all of one length, got "
            f"{shown(described.num_neighbors)}"
        )


def _check_time(described: Description) -> None:
    name = described.time_attr
    if name is None:
        return
    having = [type_ for type_ in described.types if name in type_.attributes]
    if len({type_.kind for type_ in having}) != 1 or any(type_.attributes[name]["row_shape"] for type_ in having):
        raise ValueError(f"time_attr must be null, or name scalar times of nodes or of edges, got {shown(name)}")


def _check_narrow(described: Description) -> None:
    """Checks attributes that are stored encoded: the version permits them, they are not times, and their format fits."""
    words, check = _STORED_AS
    for type_ in described.types:
        for name, entry in type_.attributes.items():
            if "stored_as" not in entry:
                continue
            where, stored = f"{type_.attributes_field}[{name!r}].stored_as", entry["stored_as"]
            least, of = (3, "vertices") if isinstance(type_, VertexType) else (5, "edges")
            if described.version < least or name == described.time_attr:
                raise ValueError(
                    f"{where} is valid only in version {least} or later, for attributes of {of} that are not times"
                )
            if not check(stored):
                raise ValueError(f"{where} must be {words}, got {shown(stored)}")
            narrow = Narrow(stored["format"], getattr(torch, entry["dtype"]), tuple(entry["row_shape"]))
            if narrow.row_bytes != stored["row_bytes"]:
                raise ValueError(f"{where}.row_bytes must be {narrow.row_bytes}, got {shown(stored['row_bytes'])}")


def _check_files(described: Description, files: Mapping[str, Any]) -> None:
    """Checks that ``files`` has exactly the files that the other fields imply. So no name leads out of the directory."""
    expected = described.files()
    for name in sorted(expected.keys() - files.keys()):
        raise ValueError(f"files must have {name!r}, but it is missing")
    for name in sorted(files.keys() - expected.keys()):
        raise ValueError(f"files must have only files of the graph, got {shown(name)}")
    for name, (dtypes, shape) in expected.items():
        entry = files[name]
        if entry["dtype"] not in dtypes or entry["shape"] != shape:
            raise ValueError(
                f"files[{name!r}] must be {' or '.join(dtypes)} {shown(shape)}, got {shown(entry['dtype'])} {shown(entry['shape'])}"
            )
        if math.prod(shape) >= 2**60:
            raise ValueError(f"files[{name!r}] must fit into a file, got the shape {shown(shape)}")


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """Returns a checksum that is equal for directories of equal contents: all files but the origin and, from version 2 on, types and ``time_attr``."""
    said = "".join(f"{name}{entry['sha256']}" for name, entry in sorted(manifest["files"].items()) if name != ORIGIN)
    if manifest["version"] > 1:
        said += json.dumps([manifest[name] for name in ("node_types", "edge_types", "time_attr")], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]
