"""Trains a GraphSAGE on a graph with several vertex types, some without features, in one process or in many.

    python examples/train_hetero.py synthetic-mag:num_papers=5000                  # one process, the whole graph
    salientpp partition synthetic-mag:num_papers=5000 mag-2 --parts 2 --num-neighbors 8,4 --batch-size 128
    torchrun --nproc-per-node 2 examples/train_hetero.py mag-2 --memory 8GiB        # one rank per part

With times, a paper draws no newer papers:

    python examples/train_hetero.py synthetic-mag:num_papers=5000 --time-attr year

The graph has the schema of MAG240M. Authors and institutions get learned embeddings by their ``n_id``. Rows of papers that other ranks own are fetched.
A script for PyG's loader differs in the import, the arguments of the loader, and the line with salientpp.nn.trim. For other graphs, --target names the
vertex type whose classes are learned.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv, to_hetero

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import load_dataset
from salientpp.launch.environment import detect

FANOUTS = [8, 4]


class Layers(nn.Module):
    def __init__(self, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv((-1, -1), hidden), SAGEConv((-1, -1), num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Classifier(nn.Module):
    """Predicts the classes of the target type. Types without features get embeddings."""

    def __init__(
        self, data: Any, num_vertices: dict[str, int], target: str, num_classes: int, hidden: int = 64
    ) -> None:
        super().__init__()
        self.target = target
        widths = data.num_features
        self.given = nn.ModuleDict({name: nn.Linear(width, hidden) for name, width in widths.items() if width})
        self.learned = nn.ModuleDict(
            {name: nn.Embedding(num_vertices[name], hidden) for name, width in widths.items() if not width}
        )
        self.layers = to_hetero(Layers(hidden, num_classes), (list(data.node_types), list(data.edge_types)))

    def forward(self, batch: HeteroData) -> Tensor:
        x = {name: embedding(batch[name].n_id) for name, embedding in self.learned.items()}
        x |= {name: linear(batch[name].x) for name, linear in self.given.items()}
        return self.layers(x, batch.edge_index_dict)[self.target][: batch[self.target].batch_size]


def loaders(
    data: Any, seed: int, memory: str, batch_size: int, time_attr: str | None, target: str
) -> dict[str, NeighborLoader]:
    """Returns the loaders by split, for the whole graph or for this rank's part."""
    options: dict[str, Any] = dict(
        num_neighbors=FANOUTS, batch_size=batch_size, num_workers=1, seed=seed, time_attr=time_attr, dtype=torch.float32
    )
    if isinstance(data, HeteroData):
        train, test = data[target].train_mask, data[target].test_mask
        return {
            "train": NeighborLoader(data, input_nodes=(target, train), shuffle=True, **options),
            "test": NeighborLoader(data, input_nodes=(target, test), **options),
        }
    loader = NeighborLoader(data, input_nodes=(target, "train"), shuffle=True, memory=memory, **options)
    return {"train": loader, "test": NeighborLoader(data, input_nodes=(target, "test"), cache=loader.cache, **options)}


def train(
    data: Any,
    epochs: int,
    seed: int,
    memory: str = "8GiB",
    batch_size: int = 128,
    time_attr: str | None = None,
    target: str = "paper",
) -> float:
    """Trains, and returns the accuracy on the test vertices of the target type, over all ranks."""
    torch.manual_seed(seed)
    in_group = dist.is_initialized() and dist.get_world_size() > 1
    by_split = loaders(data, seed, memory, batch_size, time_attr, target)
    whole = isinstance(data, HeteroData)
    sizes = (
        {name: data[name].num_nodes for name in data.node_types}
        if whole
        else {name: data.books[name].num_vertices for name in data.node_types}
    )
    num_classes = int(data[target].y.max()) + 1 if whole else data.num_classes[target]
    model: nn.Module = Classifier(data, sizes, target, num_classes)
    first = next(iter(by_split["test"]))
    with torch.no_grad():
        model(first)  # lazy layers get their widths from a batch
    model = salientpp.nn.trim(model)  # computes only the rows that the seeds need
    if in_group:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(epochs):
        model.train()
        for batch in by_split["train"]:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), batch[target].y[: batch[target].batch_size]).backward()
            optimizer.step()
    alone = model.module if in_group else model  # without DDP, because ranks have different numbers of test batches
    alone.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for batch in by_split["test"]:
            right = alone(batch).argmax(dim=1) == batch[target].y[: batch[target].batch_size]
            counts += torch.tensor([right.sum(), right.numel()])
    if in_group:
        dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "dataset", help="a dataset directory, or a dataset with several types for one process (synthetic-mag, pyg:FILE)"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--memory", default="8GiB", help="memory of each host for copies of rows; the loader plans its use"
    )
    parser.add_argument("--target", default="paper", help="the vertex type whose classes are learned (paper)")
    parser.add_argument("--time-attr", help="time attribute; with 'year' a paper draws no newer papers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if detect().world_size > 1:
        salientpp.init_process_group()
    data: Any = salientpp.load(args.dataset) if Path(args.dataset).is_dir() else load_dataset(args.dataset)
    accuracy = train(data, args.epochs, args.seed, args.memory, time_attr=args.time_attr, target=args.target)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
