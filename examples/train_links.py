"""Predicts purchases from earlier purchases: links with times between two vertex types.

    python examples/train_links.py                                    # one process, the whole graph
    python examples/train_links.py --partition shop-4 --parts 4       # once
    torchrun --nproc-per-node 4 examples/train_links.py shop-4        # one rank per part

A batch holds purchases and the same number of random pairs. For each pair the sampler draws only purchases before the time of the pair.
The training loop is the same for one process and for several ranks.
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
from salientpp import LinkNeighborLoader
from salientpp.launch.environment import detect

BUYS = ("user", "buys", "item")
FANOUTS = [8, 4]


def shop(num_users: int = 3000, num_items: int = 1500, num_edges: int = 30_000, seed: int = 0) -> HeteroData:
    """Returns a generated shop. Users and items have tastes, and features are tastes with noise. A purchase joins a user and an item of similar taste, at a
    time in [0, 1000)."""
    generator = torch.Generator().manual_seed(seed)
    tastes = F.normalize(torch.randn(8, 16, generator=generator), dim=1)
    taste = {
        name: torch.randint(8, (size,), generator=generator)
        for name, size in (("user", num_users), ("item", num_items))
    }
    users = torch.randint(num_users, (num_edges,), generator=generator)
    items = torch.randint(num_items, (num_edges,), generator=generator)
    for _ in range(12):  # draw again where tastes differ, so that most purchases match
        differ = (taste["user"][users] != taste["item"][items]) & (torch.rand(num_edges, generator=generator) < 0.95)
        items = torch.where(differ, torch.randint(num_items, (num_edges,), generator=generator), items)
    time = torch.randint(1000, (num_edges,), generator=generator).sort().values
    data = HeteroData()
    for name, of_name in taste.items():
        data[name].x = tastes[of_name] + 0.5 * torch.randn(of_name.numel(), 16, generator=generator)
    data[BUYS].edge_index = torch.stack([users, items])
    data["item", "bought_by", "user"].edge_index = torch.stack([items, users])
    for name in data.edge_types:
        data[name].time = time
        data[name].before = time - 1  # a purchase may draw only earlier ones, not itself
    return data


def split(data: HeteroData) -> dict[str, Tensor]:
    """Returns edge ids by split. The last fifth of the time is the test split."""
    late = data[BUYS].time >= 800
    return {"train": (~late).nonzero().flatten(), "test": late.nonzero().flatten()}


def partition(data: HeteroData, num_parts: int, root: Path) -> None:
    """Writes the dataset directory with the splits of the edges."""
    salientpp.partition(
        data, num_parts, root, FANOUTS, 256, seeds=("user", "all"), edge_split={BUYS: split(data)}, time_attr="time", replicate=()
    )  # fmt: skip


class Encoder(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv((16, 16), hidden), SAGEConv((hidden, hidden), hidden)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Predictor(nn.Module):
    """Scores the pairs of a batch."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.encoder = to_hetero(Encoder(hidden), (["user", "item"], [BUYS, ("item", "bought_by", "user")]))

    def forward(self, batch: HeteroData) -> Tensor:
        found = self.encoder(batch.x_dict, batch.edge_index_dict)
        user, item = batch[BUYS].edge_label_index
        return (found["user"][user] * found["item"][item]).sum(dim=1)


def loaders(data: Any, seed: int, memory: str, batch_size: int) -> dict[str, LinkNeighborLoader]:
    """Returns the loaders for training and testing, for the whole graph or for this rank's part."""
    options: dict[str, Any] = dict(
        num_neighbors=FANOUTS, neg_sampling="binary", time_attr="time", batch_size=batch_size, seed=seed, num_workers=1
    )
    if isinstance(data, HeteroData):
        own = {
            name: dict(edge_label_index=(BUYS, data[BUYS].edge_index[:, ids]), edge_label_time=data[BUYS].before[ids])
            for name, ids in split(data).items()
        }
        return {
            "train": LinkNeighborLoader(data, shuffle=True, **own["train"], **options),
            "test": LinkNeighborLoader(data, **own["test"], **options),
        }
    options["edge_label_time"] = "before"
    train = LinkNeighborLoader(data, edge_label_index=(BUYS, "train"), shuffle=True, memory=memory, **options)
    # Without shuffle each pair comes once. The test loader reads the cache of the training loader.
    test = LinkNeighborLoader(data, edge_label_index=(BUYS, "test"), cache=train.cache, **options)
    return {"train": train, "test": test}


def auc(score: Tensor, label: Tensor) -> float:
    """Returns the probability that a random positive pair scores higher than a random negative pair."""
    rank = torch.empty_like(score)
    rank[score.argsort()] = torch.arange(1, score.numel() + 1, dtype=score.dtype)
    positive = label > 0
    number = positive.sum()
    return float((rank[positive].sum() - number * (number + 1) / 2) / (number * (~positive).sum()))


def train(data: Any, epochs: int, seed: int, memory: str = "8GiB", batch_size: int = 256, hidden: int = 32) -> float:
    """Trains, and returns the AUC on the last fifth of the time, over all ranks."""
    torch.manual_seed(seed)
    in_group = dist.is_initialized() and dist.get_world_size() > 1
    by_split = loaders(data, seed, memory, batch_size)
    model: nn.Module = salientpp.nn.trim(Predictor(hidden))
    if in_group:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(epochs):
        model.train()
        for batch in by_split["train"]:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(batch), batch[BUYS].edge_label.float()).backward()
            optimizer.step()
    alone = model.module if in_group else model  # without DDP, because ranks have different numbers of test batches
    alone.eval()
    with torch.no_grad():
        pairs = [(alone(batch), batch[BUYS].edge_label) for batch in by_split["test"]]
    score, label = (torch.cat(column) for column in zip(*pairs))
    if not in_group:
        return auc(score, label)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (score, label))
    score, label = (torch.cat(column) for column in zip(*everyone))
    return auc(score, label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "root", nargs="?", type=Path, help="a dataset directory; without one, one process trains on the whole graph"
    )
    parser.add_argument("--partition", type=Path, metavar="DIR", help="write the dataset directory and exit")
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--memory", default="8GiB", help="memory of each host for copies of rows; the loader plans its use"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.partition is not None:
        data = shop()
        partition(data, args.parts, args.partition)
        print(f"{args.partition}: {args.parts} parts")
        return
    if detect().world_size > 1:
        salientpp.init_process_group()
    data = shop() if args.root is None else salientpp.load(args.root)
    found = train(data, args.epochs, args.seed, args.memory)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"AUC of purchases in the last fifth of the time: {found:.3f}")


if __name__ == "__main__":
    main()
