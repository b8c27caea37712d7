"""Trains a plain PyG GraphSAGE in one process or in many.

    python examples/train_sage.py synthetic:num_vertices=20000                   # one process, the whole graph
    salientpp partition synthetic:num_vertices=20000 parts-2 --parts 2           # once
    torchrun --nproc-per-node 2 examples/train_sage.py parts-2 --memory 8GiB     # one rank per part

A script for PyG's loader differs in the import of NeighborLoader, its arguments, and the line with salientpp.nn.trim. The model and the training loop stay
the same.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE
from tqdm import tqdm

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import load_dataset
from salientpp.launch.environment import detect


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-neighbors", type=lambda text: [int(f) for f in text.split(",")], default=[15, 10, 5])
    parser.add_argument("--batch-size", type=int, default=256, help="seeds per batch and rank")
    parser.add_argument(
        "--memory", default="8GiB", help="memory of each host for copies of rows; the loader plans its use"
    )
    parser.add_argument("--alpha", type=float, help="size of the cache as a replication factor, instead of --memory")
    parser.add_argument("--beta", type=float, default=0.0, help="fraction of a part's rows kept on the device")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--workers", type=int, default=1, help="sampling threads")
    parser.add_argument("--depth", type=int, default=10, help="batches in flight; 1 turns the pipeline off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ranks-per-host", type=int, help="ranks that share the memory of a host (as torchrun or SLURM reports)"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "dataset", help="a dataset directory, or a dataset for one process (synthetic, npz:FILE, ogbn-...)"
    )
    add_training_arguments(parser)
    parser.add_argument("--profile", metavar="FILE", help="write a Chrome trace of the first epoch's stages (rank 0)")
    return parser.parse_args()


def copies(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the option of a loader that says how many rows of other hosts it may copy."""
    return dict(memory=args.memory) if args.alpha is None else dict(replication_factor=args.alpha)


def make_loaders(args: argparse.Namespace, device: torch.device) -> tuple[dict[str, NeighborLoader], int, int]:
    """Returns the loaders by split, the number of features and the number of classes."""
    options = dict(
        num_neighbors=args.num_neighbors, batch_size=args.batch_size, num_workers=args.workers, depth=args.depth
    )
    options |= dict(seed=args.seed, device=device, device_rows=args.beta)
    if Path(args.dataset).is_dir():
        data = salientpp.load(args.dataset)
        options["ranks_per_host"] = args.ranks_per_host
        train = NeighborLoader(data, input_nodes="train", shuffle=True, **copies(args), **options)
        # Evaluation visits every seed once and shares the cache of the training loader.
        options |= dict(uneven="exact", cache=train.cache)
        loaders = {split: NeighborLoader(data, input_nodes=split, **options) for split in ("val", "test")}
        return {"train": train, **loaders}, data.num_features, data.num_classes
    data = load_dataset(args.dataset)
    loaders = {
        split: NeighborLoader(data, input_nodes=data[f"{split}_mask"], shuffle=split == "train", **options)
        for split in ("train", "val", "test")
    }
    return loaders, data.num_features, int(data.y.max()) + 1


def forward(model: torch.nn.Module, batch) -> torch.Tensor:
    """Returns class scores of the seeds. Each layer computes only the hops that later layers need."""
    out = model(
        batch.x.float(),
        batch.edge_index,
        num_sampled_nodes_per_hop=batch.num_sampled_nodes,
        num_sampled_edges_per_hop=batch.num_sampled_edges,
    )
    return out[: batch.batch_size]


def train_epoch(model: torch.nn.Module, loader: NeighborLoader, optimizer: torch.optim.Optimizer, title: str) -> float:
    """Trains for one epoch, and returns the mean loss of this rank's batches."""
    model.train()
    losses = []
    # disable=None shows no bar if the output is not a terminal.
    for batch in tqdm(loader, desc=title, unit="batch", disable=rank() != 0 or None, leave=False):
        loss = F.cross_entropy(forward(model, batch), batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


@torch.no_grad()
def accuracy(model: torch.nn.Module, loader: NeighborLoader, device: torch.device) -> float:
    """Returns the share of correct predictions over the seeds of all ranks."""
    model.eval()
    # Without DDP, because ranks with different numbers of batches would wait for each other.
    model = getattr(model, "module", model)
    right, total = 0, 0
    for batch in loader:
        right += int((forward(model, batch).argmax(dim=1) == batch.y[: batch.batch_size]).sum())
        total += batch.batch_size
    counts = torch.tensor([right, total], device=device)
    if dist.is_initialized():
        dist.all_reduce(counts)
    return float(counts[0] / counts[1].clamp(min=1))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def train(args: argparse.Namespace) -> tuple[dict[str, NeighborLoader], float]:
    """Trains, prints a line per epoch, and returns the loaders and the test accuracy."""
    torch.manual_seed(args.seed)
    device = detect().device
    loaders, num_features, num_classes = make_loaders(args, device)
    model: torch.nn.Module = GraphSAGE(num_features, args.hidden, len(args.num_neighbors), num_classes, dropout=0.3)
    model = salientpp.nn.trim(model.to(device))  # computes only the rows that the seeds need
    if dist.is_initialized():
        model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        with (
            loaders["train"].profile(args.profile)
            if args.profile and epoch == rank() == 0
            else contextlib.nullcontext()
        ):
            loss = train_epoch(model, loaders["train"], optimizer, f"epoch {epoch}")
        val = accuracy(model, loaders["val"], device)
        if rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, validation accuracy {val:.3f}", flush=True)
    return loaders, accuracy(model, loaders["test"], device)


def main() -> None:
    args = parse_arguments()
    salientpp.init_process_group()  # joins the ranks of torchrun or srun; no effect in a single process
    _, test = train(args)
    if rank() == 0:
        print(f"test accuracy {test:.3f}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
