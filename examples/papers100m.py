"""Trains on a graph of the shape of ogbn-papers100M over four machines, first without and then with memory for copies.

    python examples/papers100m.py --partition papers-4
    torchrun --nproc-per-node 4 examples/papers100m.py papers-4 --memory 1500kB

The generated graph has the degrees, features, classes and training share of ogbn-papers100M, and a two-thousandth of its vertices. The four processes
behave as four machines (ranks_per_host=1). The analysis counts the rows that they fetch, before any training:

    salientpp analyze papers-4 --policies vip,random --replication-factors 0,0.1,0.32 --epochs 2

Convert and partition the graph itself once:

    salientpp convert ogbn-papers100M papers --undirected --dtype x=fp16 --memory 16GB
    salientpp partition converted:papers papers-4 --parts 4

Then start a process on each machine:

    torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/papers100m.py papers-4 --memory 8GiB --batch-size 1024
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE
from train_sage import train_epoch

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import synthetic

FANOUTS = [15, 10, 5]


def partition(root: str) -> None:
    """Writes the dataset directory of a small graph of the same shape."""
    data = synthetic(
        num_vertices=55_500, average_degree=29, num_features=128, num_classes=172, community_size=100, train_fraction=0.011
    )  # fmt: skip
    data.x = data.x.half()
    salientpp.partition(data, 4, root, FANOUTS, 32)


def train(part: salientpp.PartitionedGraph, memory: str | None, batch_size: int, epochs: int) -> None:
    """Trains, and prints the loss of rank 0, and the rows that it needed and fetched."""
    loader = NeighborLoader(
        part, FANOUTS, "train", batch_size=batch_size, shuffle=True, seed=0, num_workers=1, memory=memory, ranks_per_host=1
    )  # fmt: skip
    torch.manual_seed(0)
    model = salientpp.nn.trim(GraphSAGE(part.num_features, 64, len(FANOUTS), part.num_classes))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    started = time.perf_counter()
    losses = [train_epoch(model, loader, optimizer, f"epoch {epoch}") for epoch in range(epochs)]
    seconds, stats = time.perf_counter() - started, loader.stats()
    if dist.get_rank() == 0:
        fetched = f"{stats.rows_remote:,} of {stats.rows:,} rows fetched, {stats.bytes_received / 1e6:.1f} MB"
        print(f"memory {memory}: loss {losses[-1]:.3f}, {fetched}, {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", help="a dataset directory")
    parser.add_argument("--partition", metavar="DIR", help="write the dataset directory and exit")
    parser.add_argument("--memory", default="8GiB", help="memory of each machine for copies of rows")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    if args.partition is not None:
        partition(args.partition)
        return
    salientpp.init_process_group()
    part = salientpp.load(args.root)
    for memory in (None, args.memory):
        train(part, memory, args.batch_size, args.epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
