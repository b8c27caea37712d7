"""Trains on a number of ranks that may change: a stopped job continues with the same steps on another number of ranks.

Partition once:

    salientpp partition synthetic:num_vertices=20000 parts-4 --parts 4

Train the first epoch on 4 ranks, and continue on 3:

    torchrun --nproc-per-node 4 examples/train_elastic.py parts-4 --logical-ranks 4 --epochs 1
    torchrun --nproc-per-node 3 examples/train_elastic.py parts-4 --logical-ranks 4 --epochs 2

Start on 2 to 4 hosts; the job continues when a host is lost:

    torchrun --nnodes 2:4 --max-restarts 5 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/train_elastic.py parts-4 --logical-ranks 4

The batches of an epoch belong to logical ranks, and each rank serves some of them. A round is one batch of each logical rank. After a round all ranks
take one step with the mean of the logical ranks' gradients. Any number of ranks therefore takes the same steps, up to the order of sums.

Rank 0 writes a checkpoint every few rounds. A new start reads it, on any number of ranks, also when SLURM requeues the job (docs/how-to/slurm.md).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE
from train_sage import accuracy, add_training_arguments, copies, forward

import salientpp
from salientpp import NeighborLoader


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a dataset directory")
    parser.add_argument(
        "--logical-ranks", type=int, help="logical ranks that share the batches of an epoch (the number of parts)"
    )
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("elastic.pt"), help="checkpoint file on a disk that all hosts share"
    )
    parser.add_argument("--every", type=int, default=20, help="rounds between checkpoints")
    add_training_arguments(parser)
    return parser.parse_args(arguments)


def write_whole(file: Path, contents: dict) -> None:
    """Writes a checkpoint beside the last one and renames it, so that a reader always finds a complete file."""
    beside = file.with_name(f"{file.name}.writing")
    with beside.open("wb") as out:
        torch.save(contents, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(beside, file)


def train(args: argparse.Namespace, device: torch.device) -> float:
    """Trains, and returns the test accuracy, which is the same on all ranks."""
    torch.manual_seed(args.seed)  # all ranks start with the same model
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    part = salientpp.load(args.dataset)
    logical_ranks = args.logical_ranks or part.whole.num_parts
    options = dict(
        num_neighbors=args.num_neighbors, batch_size=args.batch_size, num_workers=args.workers, depth=args.depth
    )
    options |= dict(seed=args.seed, device=device, device_rows=args.beta)
    options |= dict(logical_ranks=logical_ranks)
    loader = NeighborLoader(part, input_nodes="train", shuffle=True, **copies(args), **options)
    # No dropout: each rank would draw its own random numbers, so results would depend on the number of ranks.
    model = GraphSAGE(part.num_features, args.hidden, len(args.num_neighbors), part.num_classes)
    model = salientpp.nn.trim(model.to(device))  # computes only the rows that the seeds need
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # every rank loads the state of rank 0
    state = loader.state_dict()
    if rank == 0:
        print(
            f"{size} ranks, {logical_ranks} logical ranks, from epoch {state['epoch']}, round {state['round']}",
            flush=True,
        )
    for epoch in range(state["epoch"], args.epochs):
        loader.set_epoch(epoch)
        losses = torch.zeros(2, device=device)
        for number, batches in enumerate(loader.rounds(), start=1):
            optimizer.zero_grad(set_to_none=False)
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            for batch in batches:
                loss = F.cross_entropy(forward(model, batch), batch.y[: batch.batch_size])
                (loss / logical_ranks).backward()  # adds to the gradients of the rank's other logical ranks
                losses += torch.stack([loss.detach(), torch.ones_like(loss)])
            if size > 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            if number % args.every == 0:
                save(args.checkpoint, model, optimizer, loader, rank)
        save(args.checkpoint, model, optimizer, loader, rank)
        if size > 1:
            dist.all_reduce(losses)
        if rank == 0:
            print(f"epoch {epoch}: loss {float(losses[0] / losses[1].clamp(min=1)):.4f}", flush=True)
    test = NeighborLoader(part, input_nodes="test", uneven="exact", cache=loader.cache, **options)
    test.set_epoch(0)
    return accuracy(model, test, device)


def save(
    file: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: NeighborLoader, rank: int
) -> None:
    """Writes a checkpoint after a round. All ranks are then at the same point, so rank 0's state serves every rank."""
    if rank == 0:
        state = loader.state_dict()
        write_whole(file, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": state})


def main() -> None:
    args = parse_arguments()
    launch = salientpp.init_process_group()
    test = train(args, launch.device)
    if launch.rank == 0:
        print(f"test accuracy {test:.3f}", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
