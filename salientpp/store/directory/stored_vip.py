"""Finds the inclusion probabilities (VIP) that a dataset directory holds, and computes those of joined parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from salientpp.processes import lazy
from salientpp.store.directory.description import Description, VertexType
from salientpp.store.directory.files import Arrays
from salientpp.store.directory.kept import kept
from salientpp.store.directory.splits import vertex_split
from salientpp.store.directory.topology import Topology
from salientpp.vip.inclusion import inclusion_probability, typed_inclusion_probability, uniform_starts


class StoredVip:
    """The probabilities for the workload that a dataset directory was ordered by. All views of a directory share one.

    Args:
        arrays: the files.
        description: what is in them.
        topology: the lists that probabilities of joined parts are computed from.
        fingerprint: of the contents; it names what is kept.
    """

    def __init__(self, arrays: Arrays, description: Description, topology: Topology, fingerprint: str) -> None:
        self._arrays, self._description, self._topology, self._fingerprint = arrays, description, topology, fingerprint

    def of(self, vertices: VertexType, stored: range) -> Tensor:
        """float32 [N] of one type, without seeds, for the part that joins these on disk; that of several is computed once."""
        if len(stored) == 1:
            return self._arrays.open(vertices.vip_file(stored[0]))
        types = self._description.node_types
        found = self._joined.get(stored)
        if found is None:
            found = self._joined[stored] = kept(
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

    def is_of(
        self,
        stored: range,
        type_: str | None,
        seeds: Tensor,
        fanouts: Sequence[Sequence[int]],
        batch_size: int,
        replace: bool,
    ) -> bool:
        """Whether the probabilities are those of this workload: seeds of one type, and fanouts per edge type."""
        named = self._description
        same = not replace and [list(per_hop) for per_hop in fanouts] == named.num_neighbors
        if not same or (batch_size, type_) != (named.batch_size, named.seeds[0]):
            return False
        own = vertex_split(self._arrays, named.vertices(type_), named.seeds[1], stored)
        return torch.equal(seeds.sort().values, own)
