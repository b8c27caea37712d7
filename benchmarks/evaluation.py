"""Evaluates a model on emulated hosts in three ways, for the table of time to accuracy with evaluation.

* ``salientpp.inference``: all ranks compute the exact outputs of all vertices, layer by layer.
* ``sampled, salientpp``: batches of the vertices of val and test with 20 sampled neighbours at each hop, through the cache of training.
* ``PyG model.inference``: rank 0 computes the exact outputs of all vertices. It has the whole graph and all features, and the other ranks wait.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import bytes_received
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PyGLoader

import salientpp
from salientpp import NeighborLoader

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import train_sage

WAYS = ["salientpp.inference", "sampled, salientpp", "PyG model.inference"]
FANOUTS = [20, 20, 20]
SPLITS = ("val", "test")


class Evaluator:
    """Evaluates a model on the vertices of val and test.

    Args:
        part: the part of this rank.
        whole: the whole graph, which only rank 0 reads.
        cache: the cache of the training loader.
        batch_size: seeds of a sampled batch.
    """

    def __init__(self, part: salientpp.PartitionedGraph, whole: Data, cache: Any, batch_size: int) -> None:
        self._part, self._rank = part, dist.get_rank()
        self._own = part.split("all")
        labels = whole.y[part.original_id(self._own)]
        first = part.book.range_of(part.part_id)[0]
        places = {split: part.split(split) - first for split in SPLITS}
        self._splits = {split: (place, labels[place]) for split, place in places.items()}
        self._loaders = {
            split: NeighborLoader(
                part, FANOUTS, split, batch_size=batch_size, uneven="exact", cache=cache, num_workers=1, timeout=600
            )
            for split in SPLITS
        }
        self._whole = whole if self._rank == 0 else None
        if self._whole is not None:
            bare = Data(x=whole.x, edge_index=whole.edge_index)
            self._pyg = PyGLoader(bare, [-1], batch_size=1024, shuffle=False)

    def warm_up(self, model: torch.nn.Module) -> None:
        """Makes what the first call of each way makes once."""
        self._exact(model)
        for loader in self._loaders.values():
            train_sage.accuracy(model, islice(loader, 2), torch.device("cpu"))

    def measure(self, way: str, model: torch.nn.Module) -> dict[str, Any]:
        """Returns the seconds until all ranks know both accuracies, the accuracies, and the bytes that this host received."""
        dist.barrier()
        before, started = bytes_received(), time.perf_counter()
        evaluate = {WAYS[0]: self._exact, WAYS[1]: self._sampled, WAYS[2]: self._by_pyg}[way]
        accuracies = evaluate(model)
        dist.barrier()
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "bytes": bytes_received() - before, **accuracies}

    def _exact(self, model: torch.nn.Module) -> dict[str, float]:
        rows = salientpp.inference(model, self._part, timeout=600)
        return {split: _share(rows[place], labels) for split, (place, labels) in self._splits.items()}

    def _sampled(self, model: torch.nn.Module) -> dict[str, float]:
        found = {
            split: train_sage.accuracy(model, loader, torch.device("cpu")) for split, loader in self._loaders.items()
        }
        model.train()
        return found

    @torch.no_grad()
    def _by_pyg(self, model: torch.nn.Module) -> dict[str, float]:
        found = torch.zeros(2, dtype=torch.float64)
        if self._whole is not None:
            bare = model.module.eval()
            rows = bare.inference(self._pyg)
            bare.train()
            for number, split in enumerate(SPLITS):
                mask = self._whole[f"{split}_mask"]
                found[number] = (rows[mask].argmax(dim=1) == self._whole.y[mask]).double().mean()
        dist.broadcast(found, 0)
        return dict(zip(SPLITS, found.tolist()))


def _share(rows: Tensor, labels: Tensor) -> float:
    """Returns the share of right predictions over all ranks."""
    counts = torch.tensor([int((rows.argmax(dim=1) == labels).sum()), labels.numel()])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1].clamp(min=1))


def seconds_to(
    target: float, train: list[float], evaluation: list[float], accuracy: list[float]
) -> tuple[int | None, float | None]:
    """Returns the number of epochs until the accuracy reaches the target, and the seconds with evaluation; None if it does not."""
    for epoch, value in enumerate(accuracy):
        if value >= target:
            return epoch + 1, sum(train[: epoch + 1]) + sum(evaluation[: epoch + 1])
    return None, None
