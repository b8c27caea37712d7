"""Reads the inclusion probabilities (VIP) of a dataset directory, and computes those of joined parts.

Computed probabilities are kept in the directory's folder ``kept``, if it can be written; the folder may be deleted. A file's name contains a checksum of
its contents. If the checksum does not match, the file is ignored and the probabilities are computed again.
"""

from __future__ import annotations

import hashlib
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
    """Inclusion probabilities for the workload that a dataset directory was partitioned with. All views of a directory share this object."""

    def __init__(self, arrays: Arrays, description: Description, topology: Topology, fingerprint: str) -> None:
        self._arrays, self._description, self._topology, self._fingerprint = arrays, description, topology, fingerprint

    def of(self, vertices: VertexType, stored: range) -> Tensor:
        """Returns the probabilities of one type, float32 [N], for the part that joins these parts on disk. Being a seed does not count.

        The probabilities of a joined part are computed once.
        """
        if len(stored) == 1:
            return self._arrays.open(vertices.vip_file(stored[0]))
        if stored not in self._joined:
            self._joined[stored] = self._read_or_compute(stored)
        return self._joined[stored][vertices.name]

    @lazy
    def _joined(self) -> dict[range, dict[str | None, Tensor]]:
        """Probabilities read or computed so far, by parts on disk, then by type."""
        return {}

    def _read_or_compute(self, stored: range) -> dict[str | None, Tensor]:
        folder, types = self._arrays.root / _FOLDER, self._description.node_types
        name = f"vip-{stored.start}-{stored.stop - 1}-{self._fingerprint}"
        stems = {type_.name: f"{name}.n{number}" for number, type_ in enumerate(types)}
        found = {type_.name: _read(folder, stems[type_.name], type_.num_vertices) for type_ in types}
        there = {type_: vip for type_, vip in found.items() if vip is not None}
        if len(there) == len(types):
            return there
        computed = self._compute(stored)
        for type_, vip in computed.items():
            try:
                folder.mkdir(exist_ok=True)
                path = folder / f"{stems[type_]}.{_digits(vip.numpy())}.npy"
                replace_file(path, partial(np.save, arr=vip.numpy()))
            except OSError:
                pass  # a read-only or a full disk: the next run computes it again
        return computed

    def _compute(self, stored: range) -> dict[str | None, Tensor]:
        named, (seed_type, split) = self._description, self._description.seeds
        seeds = {
            type_.name: vertex_split(self._arrays, type_, split, stored)
            for type_ in named.node_types
            if seed_type in (None, type_.name)
        }
        if tuple(seeds) == (None,):
            vip = inclusion_probability(self._topology.graph, seeds[None], named.num_neighbors[0], named.batch_size)
            return {None: vip}
        starts = uniform_starts(seeds, named.batch_size)
        return typed_inclusion_probability(self._topology.typed_graph(None, None), starts, named.num_neighbors)


def _read(folder: Path, stem: str, size: int) -> Tensor | None:
    for path in sorted(folder.glob(f"{stem}.*.npy")):
        try:
            array = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError, MemoryError):
            continue
        if array.dtype == np.float32 and array.shape == (size,) and path.name == f"{stem}.{_digits(array)}.npy":
            return torch.from_numpy(array)
    return None


def _digits(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()[:_DIGITS]
