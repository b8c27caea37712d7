"""Trains an unchanged PyG model on the whole graph, over several ranks, from a checkpoint if one exists.

    salientpp partition synthetic:num_vertices=20000,num_features=32 parts-2 --parts 2
    torchrun --nproc-per-node 2 examples/train_full.py parts-2 state.pt
    salientpp slurm --parts 2 --time 30 -- examples/train_full.py parts-2 state.pt | sbatch

No vertex is sampled. Each epoch is one step, with the loss and gradients of one process on the whole graph. The checkpoint holds the state of
the plain model, so any number of ranks, or a single process, can continue from it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp.fullgraph import accuracy, distribute, local, loss_mean


def train(root: str, checkpoint: str, epochs: int = 20, every: int = 10) -> tuple[list[float], float]:
    """Trains, and returns the losses of this run's epochs and the accuracy on the validation vertices."""
    part = local(salientpp.load(root))
    torch.manual_seed(0)
    model = distribute(GraphSAGE(part.x.size(1), 64, 3, part.num_classes, norm="batch_norm"), part)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first, path = 0, Path(checkpoint)
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    losses = []
    for epoch in range(first, epochs):
        model.train()
        optimizer.zero_grad()
        out = model(part.x, part.edge_index)[part.train_mask]
        loss = loss_mean(F.cross_entropy(out, part.y[part.train_mask], reduction="none"), part)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if (epoch + 1) % every == 0 and part.ranks.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
    model.eval()
    with torch.no_grad():
        out = model(part.x, part.edge_index)
    score = accuracy(out[part.val_mask], part.y[part.val_mask], part)
    if part.ranks.rank == 0 and losses:
        print(f"epochs {first} to {epochs}: loss {losses[-1]:.3f}, validation {score:.1%}", flush=True)
    return losses, score


if __name__ == "__main__":
    salientpp.init_process_group()  # joins the ranks that torchrun or srun started
    train(*sys.argv[1:3])
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
