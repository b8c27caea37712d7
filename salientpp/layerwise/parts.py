"""Inputs and outputs of an inference: sampler and features of a ``Data``, batches of a part, and files of rows."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp.engine.agreement import Facts
from salientpp.engine.source import BatchSource
from salientpp.files import check_output, save_array, written_whole
from salientpp.loader.values import Options
from salientpp.predictions.destination import LocalFolder
from salientpp.predictions.part_files import ParquetParts, check_others, is_parquet
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


def make_folder(folder: Path) -> None:
    """Creates a folder unless it exists. Raises ValueError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the folder {folder} cannot be created ({error.strerror}); choose another") from None


class ArrayParts:
    """Files ``part-<k>.npy`` in a folder, with the rows of each part of a graph. A ``Data`` has one part."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, part_ids: Collection[int], num_parts: int, like: Tensor) -> None:
        """Creates the folder that an inference writes its results to, before it computes them.

        Args:
            part_ids: parts whose files this rank writes.
            like: [0, ...], a tensor with the shape and dtype of the rows.

        Raises:
            ValueError: such rows cannot be written to the folder, or it has files of more parts than the graph's ``num_parts``.
        """
        folder = self._folder
        try:
            torch.empty(0, dtype=like.dtype, device="cpu").numpy()
        except TypeError:
            raise ValueError(
                f"rows of {like.dtype} cannot be written to a .npy file; append a function to the layers that converts the rows to another dtype"
            ) from None
        make_folder(folder)
        check_others(LocalFolder(folder), "part-*.npy", num_parts, f"of other parts than the {num_parts} of this graph")
        for part_id in part_ids:
            check_output(self._file_of(part_id))

    def written(self, part_id: int, rows: Tensor) -> AbstractContextManager[None]:
        """Writes the rows of a part [n, ...]. The file replaces an earlier one when the ``with`` block ends, unless the block raises."""
        return written_whole(self._file_of(part_id), partial(save_array, array=rows.numpy()))

    def _file_of(self, part_id: int) -> Path:
        return self._folder / f"part-{part_id:05d}.npy"


def results_at(out: str | os.PathLike[str] | None, data: PartitionedGraph | Data) -> ArrayParts | ParquetParts | None:
    """Returns the files of results for the argument ``out`` of an inference: Parquet files, ``.npy`` files or none."""
    if out is None:
        return None
    return ParquetParts(out, data) if is_parquet(out) else ArrayParts(Path(out))


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
