"""Trains with every seed exactly once per epoch, on ranks with different numbers of batches.

    salientpp partition synthetic:num_vertices=20000,num_features=32 parts-2 --parts 2 --num-neighbors 10,5 --batch-size 32
    torchrun --nproc-per-node 2 examples/train_exact.py parts-2

DDP waits for all ranks in every backward pass. With uneven="exact", ranks with fewer batches finish the epoch earlier. torch's Join takes
their place in DDP's collectives, and their loaders still answer requests for rows. With uneven="wrap", the default for shuffled
seeds, Join is not needed (examples/train_sage.py).
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader


def train(root: str, epochs: int = 2) -> tuple[list[list[int]], float]:
    """Trains, and returns the seeds of this rank by epoch, and the last loss."""
    part = salientpp.load(root)
    loader = NeighborLoader(part, [10, 5], "train", batch_size=32, shuffle=True, uneven="exact", memory="8GiB", seed=0)
    torch.manual_seed(0)
    model = salientpp.nn.trim(GraphSAGE(part.num_features, 64, 2, part.num_classes))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    seeds, loss = [], torch.tensor(0.0)
    for _ in range(epochs):
        seeds.append([])
        with Join([model]):  # a new one for every epoch
            for batch in loader:
                out = model(batch.x.float(), batch.edge_index)[: batch.batch_size]
                loss = F.cross_entropy(out, batch.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seeds[-1] += batch.input_id.tolist()
        line = f"rank {dist.get_rank()}: {len(loader)} batches, {len(seeds[-1])} seeds, loss {loss.item():.2f}\n"
        print(line, end="", flush=True)  # one write with its line break, so that the lines of ranks stay apart
    return seeds, loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()
