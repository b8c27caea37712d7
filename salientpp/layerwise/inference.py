"""A model's output rows for every vertex, computed layer by layer over all ranks.

A rank computes the rows of its part. It holds the part's rows before and after one layer, in memory or in mapped files. A layer that is a sum or a mean reads
the rows of sources once, in order (:mod:`salientpp.layerwise.products`). For any other layer, a rank visits the vertices in batches with all their
in-neighbours. An :class:`~salientpp.engine.engine.Engine` over the layer's input rows fetches the rows of other parts.

If a layer fails, every rank raises an error with the same text. The ranks agree on the model before the first layer. After each layer they check that all of
them have completed it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.layerwise.call import NO_ROWS, Call
from salientpp.layerwise.layer_run import LayerRun
from salientpp.layerwise.layers import device_of, evaluating
from salientpp.layerwise.parts import (
    results_at,
    sampler_of,
)
from salientpp.loader.statistics import LoaderStats
from salientpp.progress import Progress
from salientpp.ranks.comm import DEFAULT_TIMEOUT
from salientpp.ranks.roll import before_roll_call
from salientpp.store.directory.of_trainers import of_trainers
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.suggestions import suggest_arguments


@suggest_arguments
def inference(
    model: torch.nn.Module | Sequence[Callable[..., Tensor]],
    data: PartitionedGraph | Data,
    *,
    batch_size: int = 1024,
    batch_edges: int = 2**20,
    edge_weight: str | None = None,
    edge_attr: str | None = None,
    replication_factor: float = 0.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    num_workers: int = 0,
    depth: int = 10,
    process_group: Any = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
    out: str | os.PathLike[str] | None = None,
    scratch: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Computes a model's output for every vertex, layer by layer from all neighbours. On a partitioned graph each rank gets the rows of its part.

    The result equals that of ``model(x, edge_index)`` on the whole graph in evaluation mode, up to rounding. On several ranks the call is collective: every
    rank makes it with the same model, and in the same order relative to its loaders. The model and its mode stay as they were.

    Args:
        model: one of PyG's basic models (``GraphSAGE``, ``GCN``, ``GAT``, ``GIN``, ``PNA``, ``EdgeCNN``), also in DDP, or a list. A list holds layers, which
            are called with (x, edge_index) and read only the in-neighbours of a vertex. It also holds functions of single rows, such as ``torch.relu`` or a
            ``BatchNorm``. Modules are set to evaluation mode; other functions must compute as in evaluation already. Layers that need more than one hop, or
            the whole graph, raise an error.
        data: a PyG ``Data`` (one process only) or a :class:`~salientpp.PartitionedGraph`. It must have ``x``.
        batch_size: most vertices per batch.
        batch_edges: most edges into the vertices of a batch, unless a single vertex has more.
        edge_weight, edge_attr: names of edge attributes of ``data``. Layers with an argument ``edge_weight`` or ``edge_attr`` get them. None:
            nothing is passed to them.
        replication_factor: α >= 0; during each layer a rank caches up to ``floor(α N / K)`` remote rows, those that most batches need. A row that only
            one batch needs is not cached.
        device: device of the batches and layers; None: the model's device. Rows of whole parts are on the CPU.
        dtype: dtype that ``x`` is converted to, batch by batch; None: as stored.
        num_workers, depth, process_group, timeout: as in :class:`~salientpp.NeighborLoader`.
        out: a folder, created if needed. When all rows are computed, those of part k of the directory are written to ``part-<k in five digits>.npy`` in it,
            on any number of ranks. A folder with files of further parts is refused. A folder whose name ends in ``.parquet``, or an address such as
            ``s3://bucket/folder``, gets Parquet files ``part-<k>.parquet`` instead. They have the key columns of the user's tables, or the column ``id``
            for vertices without keys, and the column ``output`` with numbers or lists of fixed length.
        scratch: a folder, created if needed. The rows of each layer are then in mapped files without a name in it, and not in memory. A layer that is a sum or
            a mean then visits sources in order and adds to their targets' sums, or visits targets in batches, whichever reads less. Results are equal up
            to rounding.
        memory: with ``scratch``, most bytes of sums and of blocks of rows together, a number or text such as ``"2GiB"``; None: 1 GiB. Batches come on top.
        progress: an object that shows progress, such as a :class:`~salientpp.ProgressBar`. On rank 0 it is told the number of finished batches of all layers.

    Returns:
        [n, ...] on the CPU. For a ``Data``, row i belongs to vertex i. For a partitioned graph, the rows of this rank's part, in the order of
        ``part.split("all")``; ``part.original_id(part.split("all"))`` returns the ids of these vertices in the user's data.

    Raises:
        ValueError, TypeError: an argument is wrong, or a layer needs more than one hop. Every rank raises it, and the text
            names the rank at fault.
        OSError: rows of a layer or of ``out`` cannot be written, for instance because the disk is full.
        RuntimeError: a layer failed (:class:`~salientpp.engine.pipeline.StageError`), or a rank failed. Every rank raises it.
    """
    # The ranks meet only for a partitioned graph.
    with before_roll_call() if isinstance(data, PartitionedGraph) else contextlib.nullcontext():
        data, process_group = of_trainers(data, process_group)
        if isinstance(data, HeteroData) or getattr(data, "is_hetero", False):
            raise TypeError(
                f"inference needs a graph with one type, got a {type(data).__name__} with several; convert it with to_homogeneous(), or apply the layers "
                "yourself with a NeighborLoader for each type"
            )
        options = {
            "batch_size": batch_size, "device": device_of(model) if device is None else device, "num_workers": num_workers, "depth": depth,
            "process_group": process_group, "timeout": timeout, "replication_factor": replication_factor,
        }  # fmt: skip
        names = {"edge_weight": edge_weight, "edge_attr": edge_attr}
        call = Inference(
            model, data, batch_edges, names, dtype, results_at(out, data), progress or Progress(), options,
            None if scratch is None else Path(scratch), memory,
        )  # fmt: skip
    return call.run()


class Inference(Call):
    """One call of :func:`inference` on one rank."""

    def run(self) -> Tensor:
        """Computes the final rows of this rank's part."""
        sampler = sampler_of(self.data)
        with evaluating(self.model):
            while not self.number or self.number < len(self.network.layers):
                layer = LayerRun(self, sampler)
                if not self.number:
                    if self.placement.rank != 0:
                        self.progress = Progress()
                    number = len(self.own_ranges) * len(self.network.layers)
                    self.progress.begin("inference", number, "batches")
                layer.run()
                if self.network.join is not None:
                    self.kept.append(self.following)
                self.present, self.following = self.following, NO_ROWS
                if layer.engine is None:
                    self.pushed.append(self.number)
                else:
                    self.stats.append(LoaderStats.of(layer.engine))
                self.number += 1
                del layer  # frees the rows of the previous layer
        return self.present
