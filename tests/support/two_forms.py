"""A dataset directory in both forms of its topology, and copies that hold the files of one rank only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch_geometric.data import Data, HeteroData

import salientpp
from salientpp.ranks.placement import runs

FORMS = ("whole", "parts")


def in_both_forms(
    folder: Path,
    data: Data | HeteroData,
    num_parts: int,
    num_neighbors: Any = (5, 5),
    batch_size: int = 16,
    **options: Any,
) -> list[str]:
    """Partitions a graph once in each form; returns the two directories."""
    roots = [str(folder / form) for form in FORMS]
    for root, form in zip(roots, FORMS):
        salientpp.partition(data, num_parts, root, num_neighbors, batch_size, topology=form, **options)
    return roots


def own_copy(root: str, num_parts: int) -> salientpp.PartitionedGraph:
    """Opens a copy that holds the files of this rank's parts only, so that reading a list of another part fails."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bounds = runs(num_parts, size)
    to = Path(root).parent / f"copies of rank {rank} of {size}"
    copy = salientpp.copy_to_disk(root, to, parts=range(*bounds[rank : rank + 2]))
    folders = {path.parent for path in copy.rglob("*indices.npy")}
    assert len(folders) == bounds[rank + 1] - bounds[rank], (
        f"expected the lists of the rank's parts only, got {folders}"
    )
    return salientpp.load(copy)
