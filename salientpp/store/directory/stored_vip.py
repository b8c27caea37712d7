"""Reads the inclusion probabilities (VIP) of a dataset directory, and computes those of joined parts.

Computed probabilities are kept in the directory's folder ``kept``, if it can be written; the folder may be deleted. A file's name contains a checksum of
its contents. If the checksum does not match, the file is ignored and the probabilities are computed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salientpp.files import replace_file
from salientpp.graph.mapped import releaser
from salientpp.processes import lazy
from salientpp.store.directory.columns import vertex_split
from salientpp.store.directory.description import PARTS, Description, VertexType
from salientpp.store.directory.files import Arrays
from salientpp.store.directory.topology import Topology
from salientpp.vip.inclusion import inclusion_probability, typed_inclusion_probability, uniform_starts

#: Folder of computed probabilities.
KEPT = "kept"

_DIGITS = 16


class StoredVip:
    """Gives the inclusion probabilities (VIP) for the workload that a directory was partitioned with.

    All views of the directory share this object, so that each is computed once.
    """

    def __init__(self, arrays: Arrays, description: Description, topology: Topology, fingerprint: str) -> None:
        self._arrays, self._description, self._topology, self._fingerprint = arrays, description, topology, fingerprint

    def of(self, vertices: VertexType, stored: range) -> Tensor:
        """Returns the probabilities of one type, float32 [N], for the part that joins the parts ``stored`` on disk.

        Being a seed does not count. The probabilities of a joined part are computed once.
        """
        if len(stored) == 1:
            return self._arrays.open(vertices.vip_file(stored[0]))
        if not stored:  # batches of no part sample nothing
            return torch.zeros(vertices.num_vertices, device="cpu")
        if self.find(stored) is None:
            self.keep(stored, self._compute(stored))
        return self._joined[stored][vertices.name]

    def release_pages(self) -> None:
        """Releases the pages of probabilities that were read from files. They are read again on the next use."""
        for of_type in [*self._joined.values()]:  # another thread may add some
            for vip in of_type.values():
                releaser(vip)()

    @lazy
    def _joined(self) -> dict[range, dict[str | None, Tensor]]:
        """Probabilities read or computed so far: range of parts on disk -> vertex type -> float [N]."""
        return {}

    def is_of(
        self,
        stored: range,
        type_: str | None,
        seeds: Tensor,
        fanouts: Sequence[Sequence[int]],
        batch_size: int,
        replace: bool,
    ) -> bool:
        """True if the parts ``stored`` were partitioned for this workload, so that their probabilities hold for it.

        Args:
            fanouts: a list for each edge type.
        """
        named = self._description
        same = not replace and [list(per_hop) for per_hop in fanouts] == named.num_neighbors
        if not same or (batch_size, type_) != (named.batch_size, named.seeds[0]):
            return False
        own = vertex_split(self._arrays, named.vertices(type_), named.seeds[1], stored)
        return torch.equal(seeds.sort().values, own)

    def of_workload(self, stored: range, *workload: Any) -> dict[str | None, Tensor] | None:
        """Implements :meth:`salientpp.PartitionedGraph.vip_of`. ``workload``: the arguments of :meth:`is_of`."""
        if not self.is_of(stored, *workload):
            return None
        if self._description.topology == PARTS:
            return self.find(stored)
        return {type_.name: self.of(type_, stored) for type_ in self._description.node_types}

    def find(self, stored: range) -> dict[str | None, Tensor] | None:
        """Returns the probabilities of all types, type -> float32 [N], or None if they would have to be computed."""
        types = self._description.node_types
        if len(stored) <= 1:
            return {type_.name: self.of(type_, stored) for type_ in types}
        if stored not in self._joined:
            found = {
                type_.name: _read(self._folder, self._stem(stored, type_.name), type_.num_vertices) for type_ in types
            }
            there = {type_: vip for type_, vip in found.items() if vip is not None}
            if len(there) < len(types):
                return None
            self._joined[stored] = there
        return self._joined[stored]

    def keep(self, stored: range, vip: Mapping[str | None, Tensor]) -> None:
        """Stores the probabilities of joined parts, type -> float32 [N], in files. If that fails, keeps them in memory."""
        self._joined.pop(stored, None)
        for type_, of_type in vip.items():
            try:
                self._folder.mkdir(exist_ok=True)
                stem = self._stem(stored, type_)
                if _read(self._folder, stem, of_type.numel()) is None:  # otherwise another rank may have mapped it
                    path = self._folder / f"{stem}.{_digits(of_type.numpy())}.npy"
                    replace_file(path, partial(np.save, arr=of_type.numpy()))
            except OSError:
                pass  # the next run computes it again
        if self.find(stored) is None:
            self._joined[stored] = dict(vip)

    @property
    def _folder(self) -> Path:
        return self._arrays.root / KEPT

    def _stem(self, stored: range, type_: str | None) -> str:
        number = [each.name for each in self._description.node_types].index(type_)
        return f"vip-{stored.start}-{stored.stop - 1}-{self._fingerprint}.n{number}"

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
            # Mapped, so that it takes no memory of this process. Nobody writes to it; mode 'r' would make torch warn.
            array = np.load(path, mmap_mode="c", allow_pickle=False)
        except (OSError, ValueError, EOFError, MemoryError):
            continue
        if array.dtype == np.float32 and array.shape == (size,) and path.name == f"{stem}.{_digits(array)}.npy":
            return torch.from_numpy(array)
    return None


def _digits(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()[:_DIGITS]
