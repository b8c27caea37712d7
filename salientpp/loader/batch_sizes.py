"""Counts the vertices and edges of batches by type, and chooses the few sizes to which batches are padded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_geometric.data import HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

#: Draws from which sizes are computed use the keys of this epoch. Users' epochs count up from 0, and single batches count down from -1.
TRIAL_EPOCH = -(2**61)

#: Sizes are rounded up to one of this number of steps between a power of two and the next. It is also the smallest size.
_STEPS = 32

#: Type of the edges of a graph without types.
EDGES = "edges"

#: Numbers of vertices and of edges by type. A graph without types has the types None and EDGES.
Sizes = dict[Any, int]


@dataclass(frozen=True)
class Classes:
    """The few sizes to which a loader pads its batches, smallest first. In every type, each is at least as large as the one before."""

    sizes: Sequence[Sizes]

    @classmethod
    def of(cls, trial: Iterable[Sizes], types: Iterable[Any]) -> Classes:
        """Makes the classes from the sizes of trial batches. ``types`` lists all types, because a batch may lack some."""
        batches = list(trial)
        seen = {type_: sorted(sizes.get(type_, 0) for sizes in batches) or [0] for type_ in types}
        median = {type_: rounded_up(sizes[len(sizes) // 2]) for type_, sizes in seen.items()}
        return cls([median, {type_: rounded_up(sizes[-1]) for type_, sizes in seen.items()}])

    def fitting(self, sizes: Sizes) -> Sizes:
        """Returns the sizes to which a batch of ``sizes`` is padded.

        These are the smallest class that holds the batch. Beyond the largest class, they are that class times powers of 1.25.
        """
        for of_class in self.sizes:
            if _fits(sizes, of_class):
                return of_class
        largest, factor = self.sizes[-1], 1.0
        while not _fits(sizes, of_class):
            factor *= 1.25
            of_class = {type_: rounded_up(int(size * factor)) for type_, size in largest.items()}
        return of_class


def rounded_up(size: int) -> int:
    """Rounds a size up, so that few different sizes occur. The result is at least :data:`_STEPS`; a larger size grows by less than ``1 / _STEPS``."""
    step = 1 << max(0, size.bit_length() - 1 - (_STEPS.bit_length() - 1))
    return max(_STEPS, -(-size // step) * step)


def _fits(sizes: Sizes, of_class: Sizes) -> bool:
    return all(size <= of_class[type_] for type_, size in sizes.items())


def sizes_of(mfg: SamplerOutput | HeteroSamplerOutput) -> Sizes:
    """Returns the numbers of vertices and edges of an MFG. Each vertex type counts one more, because a padded batch has at least one padding vertex of it."""
    if isinstance(mfg, HeteroSamplerOutput):
        return {
            **{type_: n_id.numel() + 1 for type_, n_id in mfg.node.items()},
            **{type_: row.numel() for type_, row in mfg.row.items() if row is not None},
        }
    return {None: mfg.node.numel() + 1, EDGES: mfg.row.numel()}


def types_of(data: Any) -> list[Any]:
    """Returns the types of vertices and of edges in PyG's data or in a partitioned graph."""
    typed = isinstance(data, HeteroData) or getattr(data, "is_hetero", False)
    return [*data.node_types, *data.edge_types] if typed else [None, EDGES]
