"""Chooses the copies of remote rows itself: by a policy that is a function, and by a way that adds rows of its own.

    salientpp partition synthetic:num_vertices=20000,num_features=32 parts-2 --parts 2 --num-neighbors 10,5 --batch-size 64
    torchrun --nproc-per-node 2 examples/own_cache.py parts-2

The two processes behave as two machines (ranks_per_host=1). The script trains with each choice, and prints how many rows travelled. The losses are the same,
because copies never change a batch.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader
from salientpp.engine.way import Way
from salientpp.store.rows import TensorRows
from salientpp.store.tiers import IdSet, Tier


def in_degree(workload: Any) -> Tensor:
    """A policy: the score of every vertex, [N]. The cache takes the remote vertices with the highest scores."""
    return workload.graph.in_degree().float()


class EveryThirdRow(Way):
    """A way: every rank has copies of every third row of the graph."""

    name = "every third row"

    def choose(self, basis: Any, tiers: Any, rows: Any = None) -> Any:
        size = basis.source.part.num_vertices
        tier = Tier("cache", IdSet.of(torch.arange(0, size, 3), size), rows or {}, False, "cache")
        return {None: dataclasses.replace(tiers[None], copies=[*tiers[None].copies, tier])}

    def place(self, basis: Any, tiers: Any) -> Any:
        part = basis.source.part
        rows = torch.cat([part.node_rows(k)["x"] for k in range(part.num_parts)])[::3].contiguous()
        return self.choose(basis, tiers, {"x": TensorRows(rows)})


CHOICES: dict[str, dict[str, Any]] = {
    "no copies": {},
    "memory of 256 kB": dict(memory="256kB"),
    "own policy, α = 0.2": dict(replication_factor=0.2, policy=in_degree),
    "own way": dict(ways=[EveryThirdRow()]),
}


def train(part: salientpp.PartitionedGraph, options: dict[str, Any], epochs: int = 2) -> tuple[int, float]:
    """Trains, and returns the rows that the ranks fetched and the last loss of rank 0."""
    loader = NeighborLoader(part, [10, 5], "train", batch_size=64, shuffle=True, seed=0, ranks_per_host=1, **options)
    torch.manual_seed(0)
    model = DistributedDataParallel(salientpp.nn.trim(GraphSAGE(part.num_features, 64, 2, part.num_classes)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = torch.tensor(0.0)
    for _ in range(epochs):
        for batch in loader:
            loss = F.cross_entropy(model(batch.x, batch.edge_index)[: batch.batch_size], batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    rows = torch.tensor(loader.stats().rows_remote)
    dist.all_reduce(rows)
    return int(rows), loss.item()


if __name__ == "__main__":
    salientpp.init_process_group()
    opened = salientpp.load(sys.argv[1])
    for name, chosen in CHOICES.items():
        fetched, last = train(opened, chosen)
        if dist.get_rank() == 0:
            print(f"{name:20} {fetched:7,} rows fetched, last loss {last:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
