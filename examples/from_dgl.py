"""Converts a graph of DGL, partitions it, and trains on the parts.

    python examples/from_dgl.py parts-2
    torchrun --nproc-per-node 2 examples/from_dgl.py parts-2

The first command needs DGL and writes the directory. The second needs no DGL. Fanouts are in the order of PyG, from the seeds outwards.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import synthetic

FANOUTS, BATCH_SIZE = [10, 5], 128
NAMES = {"feat": "x", "label": "y"}  # DGL's name -> PyG's


def graph_of_dgl() -> Any:
    """Returns a generated graph as DGL has it. Read your own here, for example with dgl.load_graphs."""
    import dgl

    made = synthetic(num_vertices=10_000, num_features=32)
    graph = dgl.graph(tuple(made.edge_index), num_nodes=made.num_nodes)
    graph.ndata["feat"], graph.ndata["label"] = made.x, made.y
    for name in ("train_mask", "val_mask", "test_mask"):
        graph.ndata[name] = made[name]
    return graph


def from_dgl(graph: Any) -> Data:
    """Returns a graph with one vertex type and one edge type as PyG has it. Ids of vertices and edges stay the same."""
    data = Data(edge_index=torch.stack(graph.edges()).long(), num_nodes=graph.num_nodes())
    for name, value in [*graph.ndata.items(), *graph.edata.items()]:
        data[NAMES.get(name, name)] = value
    return data


def train(root: str, epochs: int = 3) -> None:
    part = salientpp.load(root)
    loader = NeighborLoader(part, FANOUTS, "train", batch_size=BATCH_SIZE, shuffle=True, memory="8GiB", seed=0)
    torch.manual_seed(0)
    model = salientpp.nn.trim(GraphSAGE(part.num_features, 64, 2, part.num_classes))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        losses = []
        for batch in loader:
            loss = F.cross_entropy(model(batch.x, batch.edge_index)[: batch.batch_size], batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {float(torch.stack(losses).mean()):.3f}", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        salientpp.init_process_group()
        train(sys.argv[1])
        dist.barrier()
        dist.destroy_process_group()
    else:
        found = graph_of_dgl()
        print(found)
        print(from_dgl(found))
        salientpp.partition(from_dgl(found), 2, sys.argv[1], FANOUTS, BATCH_SIZE)
