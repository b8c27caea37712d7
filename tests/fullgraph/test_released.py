"""Laws of what a dropped loader or model leaves: its connections, and so its threads and descriptors, serve the next one."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import distributed
import torch
import torch_geometric.nn as pyg
from graphs import random_data
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp import NeighborLoader, PartitionedGraph, inference
from salientpp.fullgraph import Preload, distribute, local, loss_mean, plan_for
from salientpp.nn import trim

NUMBER = 8

#: Uses that leave cycles, which Python's garbage collection frees.
CYCLES = {"trimmed batches", "cache with lookahead"}

#: Most threads and descriptors that may be added: a rank may still answer in an epoch that the other has left, so that a further connection is made.
MOST = 24


def data_of() -> Data:
    data = random_data(80, 240, train_fraction=0.8)
    data.x = torch.ones(80, 6)
    return data


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.SAGEConv(6, 8), pyg.GCNConv(8, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def loader(part: PartitionedGraph, **options: Any) -> NeighborLoader:
    return NeighborLoader(part, [2, 2], "train", batch_size=16, seed=1, **options)


def step(model: torch.nn.Module, of: Any) -> None:
    loss_mean(model(of.x, of.edge_index).square().sum(1), model).backward()


def batches(part: PartitionedGraph, module: torch.nn.Module, number: int = 9) -> None:
    made = loader(part, ranks_per_host=2, cooperate="host")
    model = distribute(module, made)
    for index, batch in enumerate(made):
        step(model, batch)
        if index == number:
            break


def whole(part: PartitionedGraph, **options: Any) -> None:
    of = local(part, **options)
    step(distribute(Net(), of), of)


def planned(part: PartitionedGraph) -> None:
    of = local(part)
    step(distribute(Net(), of, plan_for(Net(), of, kind="cache")), of)


#: Name -> what a user does and drops.
USES: dict[str, Callable[[PartitionedGraph], Any]] = {
    "loader": lambda part: list(loader(part)),
    "epoch left early": lambda part: next(iter(loader(part))),
    "cache with lookahead": lambda part: list(loader(part, replication_factor=0.2, lookahead=4)),
    "cooperation": lambda part: list(loader(part, ranks_per_host=2, cooperate="host")),
    "batches": lambda part: batches(part, Net()),
    "batches, left early": lambda part: batches(part, Net(), 1),
    "trimmed batches": lambda part: batches(part, trim(Net())),
    "whole graph": whole,
    "plan": planned,
    "recomputed": lambda part: distribute(Net(), local(part), recompute="layers"),
    "preloaded": lambda part: whole(part, preload=Preload(1), ranks_per_host=2),
    "inference": lambda part: inference(pyg.GraphSAGE(6, 8, 2), part),
}


def held(rank: int, root: str) -> dict[str, tuple[int, int]]:
    """Returns the growth of the numbers of threads and of descriptors between the first and the last use."""
    found = {}
    gc.disable()
    for name, use in USES.items():
        numbers = []
        for _ in range(NUMBER):
            use(salientpp.load(root))
            if name in CYCLES:
                gc.collect()
            torch.distributed.barrier()
            gloo = [each for each in map(name_of_thread, os.listdir("/proc/self/task")) if "gloo" in each]
            numbers.append((len(gloo), len(os.listdir("/proc/self/fd"))))
        found[name] = numbers[-1][0] - numbers[1][0], numbers[-1][1] - numbers[1][1]
    return found


def name_of_thread(number: str) -> str:
    try:
        with open(f"/proc/self/task/{number}/comm") as file:
            return file.read()
    except OSError:  # the thread has ended
        return ""


def test_connections_of_what_was_dropped_are_used_again(tmp_path):
    root = tmp_path / "2"
    salientpp.partition(data_of(), 2, root, [2, 2], 16)
    for found in distributed.run(held, 2, str(root)):
        assert all(max(grown) <= MOST for grown in found.values()), found
