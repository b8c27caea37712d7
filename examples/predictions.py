"""Trains over parts, measures exact accuracies, and saves the predicted class of every vertex in the order of the data.

    salientpp partition synthetic:num_vertices=20000,num_features=32 parts-2 --parts 2 --num-neighbors 10,5 --batch-size 128
    torchrun --nproc-per-node 2 examples/predictions.py parts-2 classes.npy

salientpp.inference computes each layer once for every vertex, from all neighbours. Each rank gets the rows of its part. The ranks write one file together, so
several machines need a disk that they share.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader


def train(part: salientpp.PartitionedGraph, epochs: int) -> torch.nn.Module:
    """Trains a GraphSAGE, which is the same on all ranks."""
    loader = NeighborLoader(part, [10, 5], "train", batch_size=128, shuffle=True, memory="8GiB", seed=0)
    torch.manual_seed(0)
    plain = GraphSAGE(part.num_features, 64, 2, part.num_classes)
    model = DistributedDataParallel(salientpp.nn.trim(plain))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for batch in loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            optimizer.zero_grad()
            F.cross_entropy(out, batch.y).backward()
            optimizer.step()
    return plain


def accuracy(part: salientpp.PartitionedGraph, classes: torch.Tensor, split: str) -> float:
    """Returns the share of right classes among the vertices of a split, over all ranks."""
    begin, _ = part.book.range_of(part.part_id)
    vertices = part.split(split)  # ids of the directory; row i of the part has the id begin + i
    right = classes[vertices - begin] == part.take("y", vertices)
    counts = torch.tensor([right.sum(), right.numel()])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main(root: str, file: str, epochs: int = 3) -> None:
    part = salientpp.load(root)
    classes = salientpp.inference(train(part, epochs), part).argmax(1)
    scores = {split: accuracy(part, classes, split) for split in ("train", "val", "test")}
    ids = part.original_id(part.split("all"))  # the same vertices' ids in the data
    if dist.get_rank() == 0:
        np.lib.format.open_memmap(file, "w+", np.int64, (part.num_nodes,)).flush()
    dist.barrier()
    np.load(file, mmap_mode="r+")[ids.numpy()] = classes.numpy()
    dist.barrier()
    if dist.get_rank() == 0:
        print("accuracy:", ", ".join(f"{split} {score:.3f}" for split, score in scores.items()))
        saved = np.load(file)
        print(f"{file}: {saved.size:,} classes, the first {saved[:10].tolist()}")


if __name__ == "__main__":
    salientpp.init_process_group()
    main(*sys.argv[1:3])
    dist.barrier()
    dist.destroy_process_group()
