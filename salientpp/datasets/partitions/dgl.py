"""Reads the parts that DGL assigned to vertices, from the JSON file of `dgl.distributed.partition_graph`. DGL need not be installed.

DGL renumbers vertices part by part, and the JSON file has the range of each part. With ``reshuffle=False`` vertices keep their numbers, and a second
file has a part id for each.

Source: https://www.dgl.ai/dgl_docs/generated/dgl.distributed.partition_graph.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salientpp.datasets.partitions.pieces import read_json
from salientpp.ids import first_outside

#: DGL's name for the only type of vertices of a homogeneous graph.
_ONLY_TYPE = "_N"


def load_dgl_assignment(
    path: str | Path, original_id: Tensor | Mapping[str, Tensor] | None = None
) -> tuple[Tensor | dict[str, Tensor], int]:
    """Returns DGL's assignment in the form that ``method=`` of :func:`~salientpp.partition` takes.

    Args:
        path: the JSON file, ``<graph name>.json``.
        original_id: int64 [N]: for each of DGL's numbers, the id of the vertex in the data. It is the first tensor that ``return_mapping=True`` gives. With
            several types, a mapping from type to tensor. None: the data is in DGL's order, or DGL kept the numbers of the data.

    Returns:
        int64 [N] part ids, or with several types a dictionary from type to such a tensor; and the number of parts.

    Raises:
        ValueError: a file cannot be read or is not in DGL's format, or ``original_id`` is not a permutation.
    """
    path = Path(path)
    meta = read_json(path)
    if not isinstance(meta, dict):
        raise ValueError(f"{path}: expected an object with num_parts and node_map, got {type(meta).__name__}")
    num_parts, node_map = meta.get("num_parts"), meta.get("node_map")
    if isinstance(num_parts, bool) or not isinstance(num_parts, int) or num_parts < 1:
        raise ValueError(f"{path}: expected num_parts, an integer above 0, as DGL writes it, got {num_parts!r}")
    if isinstance(node_map, str):
        if original_id is not None:
            raise ValueError(f"{path}: DGL kept the numbers of the data; leave out original_id")
        return _part_ids(path, node_map, num_parts), num_parts
    if not isinstance(node_map, dict) or not node_map:
        raise ValueError(
            f"{path}: node_map must be ranges by node type, or the path of a file, as DGL writes it, got {node_map!r}"
        )
    assignment = _by_ranges(path, node_map, num_parts, meta.get("num_nodes"))
    if len(assignment) == 1 and not isinstance(original_id, Mapping):
        (parts,) = assignment.values()
        return (parts if original_id is None else _in_order(parts, original_id, "original_id")), num_parts
    if original_id is not None:
        if not isinstance(original_id, Mapping) or set(original_id) != set(assignment):
            got = sorted(original_id) if isinstance(original_id, Mapping) else type(original_id).__name__
            raise ValueError(f"original_id must be a mapping from {sorted(assignment)} to tensors, got {got}")
        assignment = {
            name: _in_order(parts, original_id[name], f"original_id[{name!r}]") for name, parts in assignment.items()
        }
    return assignment, num_parts


def _part_ids(path: Path, name: str, num_parts: int) -> Tensor:
    """Reads the file with the part of each vertex. ``name`` is its path on the machine where DGL ran; the folder of the JSON file is searched too."""
    file = Path(name) if Path(name).is_file() else path.parent / Path(name).name
    try:
        array = np.load(file, allow_pickle=False)
    except Exception as error:  # numpy does not document its errors for damaged files
        raise ValueError(f"{file}: not an .npy file of part ids ({error})") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{file}: expected one integer per vertex, got {array.dtype} of shape {list(array.shape)}")
    parts = torch.from_numpy(array.astype(np.int64))
    at = first_outside(parts, num_parts)
    if at is not None:
        raise ValueError(f"{file}: entry {at} must be in [0, {num_parts}), got {int(parts[at])}")
    return parts


def _by_ranges(path: Path, node_map: Mapping[str, Any], num_parts: int, num_vertices: Any) -> dict[str, Tensor]:
    """Returns the part of each vertex by type, from the range of numbers that each part has in ``node_map``.

    The numbers of a type ascend with the part. They need not be consecutive, because other types may have the numbers between two ranges.
    """
    where = {name: "node_map" if name == _ONLY_TYPE else f"node_map of {name!r}" for name in node_map}
    for name, ranges in node_map.items():
        is_list = isinstance(ranges, list) and len(ranges) == num_parts
        if not is_list or not all(_is_range(each) for each in ranges):
            raise ValueError(
                f"{path}: expected {where[name]} to have {num_parts} pairs of a first number and one past the last, got {ranges!r:.200}"
            )
        if any(begin < end for (_, end), (begin, _) in pairwise(ranges)):
            raise ValueError(f"{path}: expected the ranges of {where[name]} to ascend, got {ranges!r:.200}")
    found = sum(end - begin for ranges in node_map.values() for begin, end in ranges)
    if num_vertices is not None and found != num_vertices:
        raise ValueError(
            f"{path}: expected the ranges of node_map to have num_nodes = {num_vertices!r} vertices, got {found}; copy it again, or partition again"
        )
    assignment = {}
    for name, ranges in node_map.items():
        try:
            sizes = torch.tensor([end - begin for begin, end in ranges], device="cpu")
            assignment[name] = torch.arange(num_parts, device="cpu").repeat_interleave(sizes)
        except (RuntimeError, MemoryError, OverflowError) as error:
            raise ValueError(
                f"{path}: {where[name]} has more vertices than fit into memory, got {ranges!r:.200}; copy it again, or partition again"
            ) from error
    return assignment


def _is_range(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(isinstance(end, int) and not isinstance(end, bool) for end in value) and 0 <= value[0] <= value[1]


def _in_order(parts: Tensor, original_id: Any, name: str) -> Tensor:
    """Reorders ``parts`` from DGL's numbers to the ids in the data."""
    size = parts.numel()
    if not isinstance(original_id, Tensor) or original_id.shape != parts.shape or original_id.is_floating_point():
        got = list(original_id.shape) if isinstance(original_id, Tensor) else type(original_id).__name__
        raise ValueError(f"{name} must be integers of shape [{size}], an id for each of DGL's numbers, got {got}")
    ids = original_id.to("cpu", torch.int64)
    at = first_outside(ids, size)
    if at is not None:
        raise ValueError(f"{name}[{at}] must be in [0, {size}), got {int(ids[at])}")
    found = torch.full((size,), -1, device="cpu")
    found[ids] = parts
    if bool((found < 0).any()):
        raise ValueError(f"{name} must have every id once, but lacks {int((found < 0).nonzero()[0])}")
    return found
