"""Inputs and outputs of an inference: sampler and features of a ``Data``, batches of a part, and files of rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp.engine.agreement import Facts
from salientpp.engine.source import BatchSource
from salientpp.files import check_output
from salientpp.loader.values import Options
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.schedule import Schedule
from salientpp.store.directory.opened import PartitionedGraph

#: Engines' name for the rows that go through the layers.
ROWS = (None, "x")


@dataclass(frozen=True, eq=False)
class Ranges(Schedule):
    """Schedule whose batches are ``ranges`` of the part's vertices, in order. Its ``seeds_per_logical_rank`` counts batches, not seeds."""

    ranges: Sequence[tuple[int, int]] = ()

    def batches(self, epoch: int) -> list[Tensor]:
        return [torch.arange(*one, device="cpu") for one in self.ranges]


@dataclass(frozen=True, eq=False)
class Prepared:
    """Results of a rank's preparation for a layer, before it communicates: the data to read, facts for the other ranks, and options."""

    source: BatchSource
    facts: Facts
    options: Options


def file_of(folder: Path, part_id: int) -> Path:
    """Returns the file of the rows of a part."""
    return folder / f"part-{part_id:05d}.npy"


def make_folder(folder: Path) -> None:
    """Creates a folder unless it exists. Raises ValueError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the folder {folder} cannot be created ({error.strerror}); choose another") from None


def check_folder(folder: Path, part_ids: Collection[int], num_parts: int, dtype: torch.dtype) -> None:
    """Creates the folder that an inference writes its results to, before it computes them.

    Raises:
        ValueError: rows of ``dtype`` cannot be written to it, or it has files of more parts than the graph's ``num_parts``.
    """
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        raise ValueError(
            f"rows of {dtype} cannot be written to a .npy file; append a function to the layers that converts the rows to another dtype"
        ) from None
    make_folder(folder)
    try:
        found = [(path.name, re.fullmatch(r"part-(\d{5,})\.npy", path.name)) for path in folder.iterdir()]
    except OSError as error:
        raise ValueError(f"the folder {folder} cannot be read ({error.strerror}); choose another") from None
    others = sorted(name for name, match in found if match is not None and int(match[1]) >= num_parts)
    if others:
        # They may be results that somebody needs. Left in place, they would be taken for rows of this graph.
        raise ValueError(
            f"the folder {folder} must have no files of other parts than the {num_parts} of this graph, but it has {others[0]}"
            f"{f' and {len(others) - 1} more' if others[1:] else ''}; remove them, or choose another folder as out="
        )
    for part_id in part_ids:
        check_output(file_of(folder, part_id))


def features_of(data: PartitionedGraph | Data) -> dict[str, Tensor] | None:
    """Returns ``x`` of a ``Data`` on the CPU, by the name that a loader uses; None for a partitioned graph, which has its own rows."""
    if not isinstance(data, Data) or not isinstance(data.get("x"), Tensor):
        return None
    x = data.x.detach().cpu()
    return {ROWS[1]: x.contiguous() if x.layout == torch.strided else x}


def sampler_of(data: PartitionedGraph | Data) -> NeighborSampler | None:
    """Makes the sampler of a ``Data``, once for all layers. Returns None for a partitioned graph."""
    if not isinstance(data, Data):
        return None
    adj_t = data.get("adj_t")
    if data.get("edge_index") is None and adj_t is not None:
        values = adj_t.values() if isinstance(adj_t, Tensor) else adj_t.storage.value()
        if values is not None and bool((values != 1).any()):
            raise ValueError(
                "data.adj_t has values other than 1; pass the graph as edge_index, and the values as an attribute named by edge_weight="
            )
    return NeighborSampler(data, [-1])
