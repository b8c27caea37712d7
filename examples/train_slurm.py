"""Trains on a cluster, with a copy of the part on the host's disk, and continues after SLURM has stopped the job.

    salientpp slurm --parts 8 --gpus-per-node 1 --time 2:00:00 -- train_slurm.py parts-8 --copy-to-disk > train.sbatch
    sbatch train.sbatch

Try it without SLURM:

    salientpp partition synthetic:num_vertices=20000 parts-2 --parts 2
    torchrun --nproc-per-node 2 examples/train_slurm.py parts-2 --epochs 2

On SIGUSR1 all ranks stop after the same batch, rank 0 saves a checkpoint, and the job is requeued. After the restart it continues with the next
batch of that epoch. The script also saves a checkpoint after every epoch. It runs under srun, under torchrun without SLURM, and in a single
process (docs/how-to/slurm.md).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE
from tqdm import tqdm
from train_sage import accuracy, add_training_arguments, forward, make_loaders

import salientpp
from salientpp import NeighborLoader, Preemption


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a dataset directory")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("checkpoint.pt"), help="checkpoint file on a disk that all hosts share"
    )
    parser.add_argument(
        "--copy-to-disk",
        nargs="?",
        const=tempfile.gettempdir(),
        metavar="DIR",
        help="copy the part to this folder on a disk of the host ($TMPDIR)",
    )
    add_training_arguments(parser)
    return parser.parse_args()


class Training:
    """Contents of a checkpoint: model, optimizer, and for every rank the loader's state, the random state and the losses of the epoch."""

    def __init__(
        self, file: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: NeighborLoader
    ) -> None:
        self.file, self.model, self.optimizer, self.loader = file, model, optimizer, loader
        self.losses: list[torch.Tensor] = []
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def save(self) -> None:
        """Writes the checkpoint; every rank calls it. It is one file, renamed when complete, so a reader never finds half a checkpoint."""
        mine = {
            "loader": self.loader.state_dict(),
            "losses": [float(loss) for loss in self.losses],
            "random": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            mine["cuda_random"] = torch.cuda.get_rng_state()
        ranks: list[Any] = [mine] * self.size
        if self.size > 1:
            dist.gather_object(mine, ranks if self.rank == 0 else None)
        if self.rank == 0:
            temporary = self.file.with_name(f"{self.file.name}.writing")
            temporary.unlink(missing_ok=True)  # left by a killed run, or a link placed by another user
            with temporary.open("xb") as file:
                torch.save(
                    {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "ranks": ranks}, file
                )
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self.file)

    def load(self) -> None:
        """Continues from the checkpoint, if one exists; every rank calls it before DDP wraps the model."""
        if not self.file.exists():
            return
        saved = torch.load(self.file, map_location="cpu", weights_only=True)
        if len(saved["ranks"]) != self.size:
            raise ValueError(
                f"{self.file} was saved by {len(saved['ranks'])} ranks, but this run has {self.size}; start as many, or choose another --checkpoint"
            )
        mine = saved["ranks"][self.rank]
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.loader.load_state_dict(mine["loader"])
        self.losses = [torch.tensor(loss) for loss in mine["losses"]]
        torch.set_rng_state(mine["random"])
        if "cuda_random" in mine and torch.cuda.is_available():
            torch.cuda.set_rng_state(mine["cuda_random"])


def train(args: argparse.Namespace, device: torch.device) -> float | None:
    """Trains, and returns the test accuracy, or None if the job was stopped and will continue later."""
    torch.manual_seed(args.seed)
    loaders, num_features, num_classes = make_loaders(args, device)
    loader = loaders["train"]
    model = GraphSAGE(num_features, args.hidden, len(args.num_neighbors), num_classes, dropout=0.3)
    model = salientpp.nn.trim(model.to(device))  # computes only the rows that the seeds need
    training = Training(args.checkpoint, model, torch.optim.Adam(model.parameters(), lr=args.lr), loader)
    training.load()
    rank, size = training.rank, training.size
    parallel = (
        DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None) if size > 1 else model
    )
    state = loader.state_dict()
    place = f"epoch={state['epoch']} batch={state['batches']}"
    line = f"rank={rank} of={size} host={os.uname().nodename} device={device} starts at {place}\n"
    print(line, end="", flush=True)  # one write with its line break, so that the lines of ranks stay apart
    with Preemption() as preemption:
        for epoch in range(state["epoch"], args.epochs):
            loader.set_epoch(epoch)
            started = time.perf_counter()
            model.train()
            # A bar on rank 0 only, and none if the output is not a terminal (disable=None).
            for batch in tqdm(loader, desc=f"epoch {epoch}", unit="batch", leave=False, disable=rank != 0 or None):
                loss = F.cross_entropy(forward(parallel, batch), batch.y[: batch.batch_size])
                training.optimizer.zero_grad()
                loss.backward()
                training.optimizer.step()
                training.losses.append(loss.detach())
                if preemption.should_stop():
                    training.save()
                    if rank == 0:
                        print(f"stopped at epoch={epoch} batch={loader.state_dict()['batches']}", flush=True)
                    preemption.requeue()  # SLURM may end this process before the call returns
                    return None
            seconds = time.perf_counter() - started
            loaders["val"].set_epoch(epoch)
            report_epoch(epoch, training.losses, accuracy(model, loaders["val"], device), seconds, rank, size)
            training.losses = []
            training.save()
    loaders["test"].set_epoch(0)
    return accuracy(model, loaders["test"], device)


def report_epoch(
    epoch: int, losses: list[torch.Tensor], validation: float, seconds: float, rank: int, size: int
) -> None:
    """Prints one line per epoch for all ranks, found by `grep loss= LOG`."""
    loss = torch.tensor([sum(float(loss) for loss in losses), len(losses)], dtype=torch.float64)
    if size > 1:
        dist.all_reduce(loss)
    if rank == 0:
        mean, batches = loss[0] / loss[1], int(loss[1])
        print(
            f"epoch={epoch} loss={mean:.6f} validation={validation:.4f} batches={batches} seconds={seconds:.1f}",
            flush=True,
        )


def main() -> None:
    args = parse_arguments()
    launch = salientpp.init_process_group()
    if args.copy_to_disk is not None:
        args.dataset = str(salientpp.copy_to_disk(args.dataset, args.copy_to_disk))
    test = train(args, launch.device)
    if test is not None and launch.rank == 0:
        print(f"test={test:.4f}", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
