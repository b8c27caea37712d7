"""Is this what a manifest of a dataset directory may say?

A manifest's checksum says that it is what some program wrote. Here it is held against the format itself, so that no reader of its fields meets
a missing one, a value of another type, a size that contradicts another, or a file that is not the directory's. Whoever has read
a manifest through :func:`check_manifest` may take every field at its word; whether the files hold it is checked when they are opened.

The **schema** is a table: field -> what it must be, in words, and the test of it. What follows from the sizes, the list of files with their
dtypes and shapes, is computed and compared.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from salientpp.store.directory.files import DatasetError, numpy_dtype

FORMAT = "salientpp-partitioned-graph"
VERSION = 1

#: In a copy for one host: {"parts": [...]}, the parts that are there.
PARTS_FILE = "parts.json"

#: A test of a JSON value.
Check = Callable[[Any], bool]


def _whole(least: int = 0, end: int = 2**63) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value < end


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _map_of(key: Check, check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(key, value)) and all(map(check, value.values()))


def _record(**fields: Check) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(name in value and check(value[name]) for name, check in fields.items())
    )


def _part_of_a_file_name(value: Any) -> bool:
    if not isinstance(value, str) or set(value) & {"/", "\0"}:
        return False
    return value.encode(errors="replace").decode() == value  # else it has half a character


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

_SCHEMA: dict[str, tuple[str, Check]] = {
    "num_vertices": ("an integer >= 0", _whole()),
    "num_edges": ("an integer >= 0", _whole()),
    "num_parts": ("an integer >= 1", _whole(1)),
    "offsets": ("a list of integers >= 0", _list_of(_whole())),
    "num_classes": ("an integer >= 0", _whole()),
    "node_attributes": _ATTRIBUTES,
    "edge_attributes": _ATTRIBUTES,
    "splits": ("a map of identifiers to integers >= 0, one per part", _map_of(_split_name, _list_of(_whole()))),
    "workload": (
        "num_neighbors, a list of fanouts; batch_size, an integer >= 1; seeds, the name of a split",
        _record(
            num_neighbors=_list_of(_whole(-1, 2**31)), batch_size=_whole(1), seeds=lambda value: isinstance(value, str)
        ),
    ),
    "quality": (
        "edge_cut and edge_cut_fraction, numbers; balance, a map of names to numbers",
        _record(
            edge_cut=_number, edge_cut_fraction=_number, balance=_map_of(lambda name: isinstance(name, str), _number)
        ),
    ),
    "files": (
        "a map of names to bytes and quick, integers >= 0; sha256, 64 hexadecimal digits; a dtype; and a shape, integers >= 0",
        _map_of(
            lambda name: isinstance(name, str),
            _record(
                bytes=_whole(),
                quick=_whole(),
                sha256=_hexadecimal,
                dtype=lambda value: isinstance(value, str),
                shape=_list_of(_whole()),
            ),
        ),
    ),
}


def part_folder(part_id: int) -> str:
    return f"part-{part_id:05d}"


def read_manifest(root: Path) -> dict[str, Any]:
    path = root / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        aside = sorted(root.parent.glob(f".{glob.escape(root.name)}.replaced-*"))
        raise DatasetError(
            f"{root} is not a dataset directory: it has no manifest.json; write one with salientpp.partition(...) or "
            f"`salientpp partition`{f', or rename back {aside[-1]}, which a killed run was replacing' if aside else ''}"
        ) from None
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error.strerror}); copy it again, or partition again") from None
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is not valid JSON ({error}); partition again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DatasetError(f"{path} does not describe a dataset directory: expected format {FORMAT!r}; partition again")
    if manifest.get("version") != VERSION:
        raise DatasetError(
            f"{path} has format version {manifest.get('version')}, this salientpp reads version {VERSION}; "
            "upgrade salientpp, or partition again"
        )
    stated = manifest.pop("checksum", None)
    try:
        if stated != manifest_checksum(manifest):
            raise DatasetError(f"{path} was altered: its checksum does not match its contents; partition again")
        check_manifest(manifest, lambda dtype: numpy_dtype(dtype).str)
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
    """The parts that a copy for one host has; None: all, it is no such copy."""
    path = root / PARTS_FILE
    try:
        parts = json.loads(path.read_text())["parts"]
        if not isinstance(parts, list) or not all(type(part) is int and part >= 0 for part in parts):
            raise ValueError(f"parts must be a list of integers >= 0, got {ascii(parts)[:200]}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatasetError(f"{path} does not list parts ({error}); delete the directory and stage it again") from None
    return set(parts)


def check_is_there(root: Path, part_id: int) -> None:
    there = parts_there(root)
    if there is not None and part_id not in there:
        raise DatasetError(
            f"{root} is a copy without part {part_id}, its parts are {', '.join(map(str, sorted(there))) or 'none'}; stage that part too, "
            "or open the directory that it was copied from"
        )


def check_manifest(manifest: Mapping[str, Any], stored_dtype: Callable[[torch.dtype], str]) -> None:
    """Raise ValueError, naming the field, unless the manifest describes a directory of this format.

    Args:
        manifest: parsed JSON.
        stored_dtype: the dtype that files have for columns of one of torch's; TypeError where there is none.
    """
    for field, (words, check) in _SCHEMA.items():
        if field not in manifest:
            raise ValueError(f"it has no {field}, expected {words}")
        if not check(manifest[field]):
            raise ValueError(f"{field} must be {words}, got {_shown(manifest[field])}")
    offsets, num_parts, num_vertices = manifest["offsets"], manifest["num_parts"], manifest["num_vertices"]
    ascending = all(first <= second for first, second in pairwise(offsets))
    if len(offsets) != num_parts + 1 or offsets[0] != 0 or offsets[-1] != num_vertices or not ascending:
        raise ValueError(
            f"offsets must ascend from 0 to num_vertices, {num_vertices}, in num_parts + 1 = {num_parts + 1} numbers, got {_shown(offsets)}"
        )
    for name, counts in manifest["splits"].items():
        if len(counts) != num_parts or any(
            count > end - begin for count, begin, end in zip(counts, offsets, offsets[1:])
        ):
            raise ValueError(
                f"splits[{name!r}] must have a number for each of {num_parts} parts, at most the part's vertices, got {_shown(counts)}"
            )
    if manifest["workload"]["seeds"] not in {*manifest["splits"], "all"}:
        raise ValueError(f"workload.seeds must be a split or 'all', got {_shown(manifest['workload']['seeds'])}")
    _check_files(manifest, stored_dtype)


def _check_files(manifest: Mapping[str, Any], stored_dtype: Callable[[torch.dtype], str]) -> None:
    """The files must be those that follow from the other fields, with those dtypes and shapes; so no name leads elsewhere."""
    num_vertices, num_edges, offsets = manifest["num_vertices"], manifest["num_edges"], manifest["offsets"]
    int32, int64, float32 = map(stored_dtype, (torch.int32, torch.int64, torch.float32))
    expected: dict[str, tuple[tuple[str, ...], list[int]]] = {
        "indptr.npy": ((int64,), [num_vertices + 1]),
        "indices.npy": ((int32, int64) if num_vertices < 2**31 else (int64,), [num_edges]),
        "original_id.npy": ((int64,), [num_vertices]),
    }
    columns = [("edge", name, entry) for name, entry in manifest["edge_attributes"].items()]
    columns += [("node", name, entry) for name, entry in manifest["node_attributes"].items()]
    for kind, name, entry in columns:
        try:
            stored = stored_dtype(getattr(torch, entry["dtype"]))
        except (TypeError, RuntimeError):
            raise ValueError(
                f"{kind}_attributes[{name!r}] must have a dtype that files can hold, got {entry['dtype']!r}"
            ) from None
        if kind == "edge":
            expected[f"edge_{name}.npy"] = (stored,), [num_edges, *entry["row_shape"]]
        for part_id, (begin, end) in enumerate(pairwise(offsets)) if kind == "node" else ():
            expected[f"{part_folder(part_id)}/node_{name}.npy"] = (stored,), [end - begin, *entry["row_shape"]]
    for part_id in range(len(offsets) - 1):
        expected[f"{part_folder(part_id)}/vip.npy"] = (float32,), [num_vertices]
        for name, counts in manifest["splits"].items():
            expected[f"{part_folder(part_id)}/split_{name}.npy"] = (int64,), [counts[part_id]]
    files = manifest["files"]
    for name in expected.keys() - files.keys():
        raise ValueError(f"files must have {name!r}, and it is not there")
    for name in files.keys() - expected.keys():
        raise ValueError(f"files must have those of the graph alone, got {_shown(name)}")
    for name, (dtypes, shape) in expected.items():
        entry = files[name]
        if entry["dtype"] not in dtypes or entry["shape"] != shape:
            raise ValueError(
                f"files[{name!r}] must be {' or '.join(dtypes)} {_shown(shape)}, got {_shown(entry['dtype'])} {_shown(entry['shape'])}"
            )
        if math.prod(shape) >= 2**60:
            raise ValueError(f"files[{name!r}] must have a size that a file can have, got the shape {_shown(shape)}")


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
