"""Finds the inclusion probabilities (VIP) that a dataset directory holds, and computes those of joined parts.

What was computed is kept in the folder ``kept`` of the directory, if that can be written; it may be deleted. The name of a file has the checksum of its
contents, and a file that does not match it is computed again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from salientpp.files import replace_file
from salientpp.processes import lazy
from salientpp.store.directory.columns import vertex_split
from salientpp.store.directory.description import Description, VertexType
from salientpp.store.directory.files import Arrays
from salientpp.store.directory.topology import Topology
from salientpp.vip.inclusion import inclusion_probability, typed_inclusion_probability, uniform_starts

_FOLDER, _DIGITS = "kept", 16


class StoredVip:
    """The probabilities for the workload that a dataset directory was ordered by. All views of a directory share one."""

    def __init__(self, arrays: Arrays, description: Description, topology: Topology, fingerprint: str) -> None:
        self._arrays, self._description, self._topology, self._fingerprint = arrays, description, topology, fingerprint

    def of(self, vertices: VertexType, stored: range) -> Tensor:
        """float32 [N] of one type, without seeds, for the part that joins these on disk; that of several is computed once."""
        if len(stored) == 1:
            return self._arrays.open(vertices.vip_file(stored[0]))
        types = self._description.node_types
        found = self._joined.get(stored)
        if found is None:
            found = self._joined[stored] = _kept(
                self._arrays.root,
                f"vip-{stored.start}-{stored.stop - 1}-{self._fingerprint[:16]}",
                {f"n{number}": (each.num_vertices,) for number, each in enumerate(types)},
                lambda: self._compute(stored),
            )
        return found[f"n{types.index(vertices)}"]

    @lazy
    def _joined(self) -> dict[range, dict[str, Tensor]]:
        """Those in use, by parts on disk, then by the number of the type."""
        return {}

    def _compute(self, stored: range) -> dict[str, Tensor]:
        named, (seed_type, split) = self._description, self._description.seeds
        seeds = {
            type_.name: vertex_split(self._arrays, type_, split, stored)
            for type_ in named.node_types
            if seed_type in (None, type_.name)
        }
        if tuple(seeds) == (None,):
            vip = inclusion_probability(self._topology.graph, seeds[None], named.num_neighbors[0], named.batch_size)
            return {"n0": vip}
        starts = uniform_starts(seeds, named.batch_size)
        found = typed_inclusion_probability(self._topology.typed_graph(None, None), starts, named.num_neighbors)
        return {f"n{number}": found[type_.name] for number, type_ in enumerate(named.node_types)}


def _kept(
    root: Path, name: str, shapes: Mapping[str, tuple[int, ...]], compute: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """float32 arrays of these shapes by name, as they were kept under ``name``, or else computed now and kept if that can be done."""
    folder = root / _FOLDER
    found = {array: _read(folder, f"{name}.{array}", shape) for array, shape in shapes.items()}
    there = {array: tensor for array, tensor in found.items() if tensor is not None}
    if len(there) == len(shapes):
        return there
    computed = dict(compute())
    for array, tensor in computed.items():
        digits = _digits(tensor.numpy())
        try:
            folder.mkdir(exist_ok=True)
            replace_file(folder / f"{name}.{array}.{digits}.npy", partial(np.save, arr=tensor.numpy()))
        except OSError:
            pass  # a read-only or a full disk: the next run computes it again
    return computed


def _read(folder: Path, stem: str, shape: tuple[int, ...]) -> Tensor | None:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return None
    for name in names:
        match = re.fullmatch(rf"{re.escape(stem)}\.([0-9a-f]{{{_DIGITS}}})\.npy", name)
        if match is None:
            continue
        try:
            array = np.load(folder / name, allow_pickle=False)
        except (OSError, ValueError, EOFError, MemoryError):
            continue
        if array.dtype == np.float32 and array.shape == shape and _digits(array) == match[1]:
            return torch.from_numpy(array)
    return None


def _digits(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()[:_DIGITS]
