"""Predicts from the tables of a shop which customers order again: columns of every kind, foreign keys as edges, and times.

    python examples/relational.py                                     # one process, the whole graph
    python examples/relational.py --partition shop-2 --parts 2        # once
    torchrun --nproc-per-node 2 examples/relational.py shop-2         # one rank per part

The shop has customers, products and orders. A training example is a customer and a day; its label says whether the customer orders within the next 60 days.
The sampler draws only orders before that day. Each table has a ResNet of PyTorch Frame, which turns the columns of a row into a vector. A GraphSAGE over
the foreign keys follows. The loop is the same for one process and for several ranks.

The example needs PyTorch Frame: pip install 'salientpp[relational]'
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_frame import stype
from torch_frame.data import Dataset
from torch_frame.nn import (
    EmbeddingEncoder,
    LinearEmbeddingEncoder,
    LinearEncoder,
    MultiCategoricalEmbeddingEncoder,
    ResNet,
    TimestampEncoder,
)
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

import salientpp
from salientpp import NeighborLoader
from salientpp.launch.environment import detect

FANOUTS = [16, 8]
DAYS, HORIZON, LAST_TRAIN_DAY = 720, 60, 540


class Shop(NamedTuple):
    """The graph, and what is learned on it.

    Attributes:
        data: vertices are rows with a ``TensorFrame`` and a day; edges are foreign keys in both directions.
        stats: per table, PyTorch Frame's statistics of the columns, which encoders need.
        examples: by split, the customer, the day and the label of each example.
    """

    data: HeteroData
    stats: dict[str, Any]
    examples: dict[str, tuple[Tensor, Tensor, Tensor]]


def shop(num_customers: int = 1500, num_products: int = 300, seed: int = 0) -> Shop:
    """Generates a shop. A customer of a plan orders at a rate that fits the plan, until the customer has enough of the shop."""
    draw = np.random.default_rng(seed)
    plan = draw.choice(3, num_customers)
    rate = np.array([0.01, 0.03, 0.06])[plan]  # orders per day
    joined = draw.integers(0, 300, num_customers)
    left = joined + draw.exponential(400, num_customers)
    number = draw.poisson(rate * np.clip(np.minimum(left, DAYS) - joined, 0, None))
    buyer = np.repeat(np.arange(num_customers), number)
    day = np.floor(joined[buyer] + draw.random(buyer.size) * (np.minimum(left, DAYS) - joined)[buyer]).astype(np.int64)
    product = draw.integers(0, num_products, buyer.size)
    start = pd.Timestamp("2024-01-01")
    tables = {
        "customer": pd.DataFrame(
            {
                "age": np.where(draw.random(num_customers) < 0.1, np.nan, draw.normal(45, 15, num_customers)),
                "plan": np.array(["free", "basic", "pro"])[plan],
                "interests": pd.Series([str(each) for each in draw.choice(["", "art", "art,sport", "music"], num_customers)], dtype=object),
                "joined": start + pd.to_timedelta(joined, unit="D"),
            }
        ),
        "product": pd.DataFrame({"price": draw.lognormal(3, 1, num_products), "text": list(draw.normal(size=(num_products, 8)))}),
        "order": pd.DataFrame({"discount": draw.random(buyer.size), "placed": start + pd.to_timedelta(day, unit="D")}),
    }  # fmt: skip
    kinds = {
        "customer": {"age": stype.numerical, "plan": stype.categorical, "interests": stype.multicategorical, "joined": stype.timestamp},
        "product": {"price": stype.numerical, "text": stype.embedding},
        "order": {"discount": stype.numerical, "placed": stype.timestamp},
    }  # fmt: skip
    data, stats = HeteroData(), {}
    for name, frame in tables.items():
        read = Dataset(frame, kinds[name], col_to_sep=",").materialize()
        data[name].tf, stats[name] = read.tensor_frame, read.col_stats
    data["customer"].day = torch.from_numpy(joined)
    data["product"].day = torch.zeros(num_products, dtype=torch.int64)
    data["order"].day = torch.from_numpy(day)
    for name, key in (("customer", buyer), ("product", product)):
        edges = torch.stack([torch.arange(buyer.size), torch.from_numpy(key)])
        data["order", "of", name].edge_index, data[name, "in", "order"].edge_index = edges, edges.flip(0)
    days = {"train": range(240, LAST_TRAIN_DAY, 100), "test": [DAYS - HORIZON]}
    examples = {}
    for split, when in days.items():
        rows = [(np.flatnonzero(joined < at), at) for at in when]
        labels = [np.isin(ids, buyer[(day > at) & (day <= at + HORIZON)]) for ids, at in rows]
        times = np.concatenate([np.full(ids.size, at) for ids, at in rows])
        columns = np.concatenate([ids for ids, _ in rows]), times, np.concatenate(labels)
        examples[split] = tuple(map(torch.from_numpy, columns))
    return Shop(data, stats, examples)


class Model(nn.Module):
    """Scores the seeds of a batch: an encoder for each table, the age of each row on the day of the seed, and two layers of GraphSAGE."""

    def __init__(self, made: Shop, width: int = 32) -> None:
        super().__init__()
        encoders: dict[Any, Any] = {
            stype.numerical: LinearEncoder, stype.categorical: EmbeddingEncoder, stype.multicategorical: MultiCategoricalEmbeddingEncoder,
            stype.embedding: LinearEmbeddingEncoder, stype.timestamp: TimestampEncoder,
        }  # fmt: skip
        types, relations = made.data.metadata()
        self.tables = nn.ModuleDict(
            {
                name: ResNet(
                    width, width, 2, made.stats[name], made.data[name].tf.col_names_dict,
                    {kind: encoders[kind]() for kind in made.data[name].tf.stypes}, dropout_prob=0.0,
                )
                for name in types
            }
        )  # fmt: skip
        self.ages = nn.ModuleDict({name: nn.Linear(3, width) for name in types})
        self.layers = nn.ModuleList(
            HeteroConv({relation: SAGEConv((width, width), width) for relation in relations}, aggr="sum")
            for _ in FANOUTS
        )
        self.norms = nn.ModuleList(nn.ModuleDict({name: nn.LayerNorm(width) for name in types}) for _ in FANOUTS)
        self.head = nn.Linear(width, 1)

    def forward(self, batch: HeteroData) -> Tensor:
        x = {}
        for name, encoder in self.tables.items():
            store = batch[name]
            age = (batch["customer"].seed_time[store.batch] - store.day).float().clamp(min=0)
            ages = torch.stack([age / 100, (-age / 30).exp(), (-age / 120).exp()], 1)
            x[name] = (encoder(store.tf) if store.num_nodes else ages.new_zeros(0, self.head.in_features)) + self.ages[
                name
            ](ages)
        for layer, norms in zip(self.layers, self.norms):
            found = layer(x, batch.edge_index_dict)
            x = {name: norms[name](found[name]).relu() if name in found else value for name, value in x.items()}
        return self.head(x["customer"][: batch["customer"].batch_size]).flatten()


def loader_of(data: Any, examples: tuple[Tensor, Tensor, Tensor], **options: Any) -> NeighborLoader:
    """Returns a loader of examples, of the whole graph or of those whose customer belongs to this rank's part. ``input_id`` is the number of the example."""
    customer, day, _ = examples
    number = torch.arange(customer.numel())
    if not isinstance(data, HeteroData):
        customer = data.directory_id(customer, "customer")
        begin, end = data.books["customer"].range_of(data.part_id)
        number = ((customer >= begin) & (customer < end)).nonzero().flatten()
        options |= dict(columns=["tf", "day"])
    return NeighborLoader(
        data,
        FANOUTS,
        ("customer", customer[number]),
        day[number],
        time_attr="day",
        input_id=number,
        num_workers=1,
        **options,
    )


def auc(score: Tensor, label: Tensor) -> float:
    """Returns the probability that a random customer who orders scores higher than a random one who does not."""
    rank = torch.empty_like(score)
    rank[score.argsort()] = torch.arange(1, score.numel() + 1, dtype=score.dtype)
    number = label.sum()
    return float((rank[label].sum() - number * (number + 1) / 2) / (number * (~label).sum()))


def train(
    data: Any, epochs: int, seed: int, memory: str = "8GiB", batch_size: int = 128, made: Shop | None = None, sizes: Any = None
) -> float:  # fmt: skip
    """Trains, and returns the AUC on the last days, over all ranks.

    Args:
        data: the graph of the shop, or this rank's part of it.
        made: the shop; None: generated again, from ``sizes`` if they are given.
    """
    made = made or shop(**(sizes or {}))
    torch.manual_seed(seed)
    in_group = dist.is_initialized() and dist.get_world_size() > 1
    options = dict(batch_size=batch_size, seed=seed)
    whole = isinstance(data, HeteroData)
    budget = {} if whole else {"memory": memory}
    train_loader = loader_of(data, made.examples["train"], shuffle=True, **budget, **options)
    # Without shuffle each example comes once. The test loader reads the cache of the training loader.
    cache = {} if whole else {"cache": train_loader.cache}
    test_loader = loader_of(data, made.examples["test"], **cache, **options)
    model: nn.Module = salientpp.nn.trim(Model(made))  # computes only the rows that the seeds need
    if in_group:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(epochs):
        model.train()
        for batch in train_loader:
            label = made.examples["train"][2][batch["customer"].input_id]
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(batch), label.float()).backward()
            optimizer.step()
    alone = model.module if in_group else model  # without DDP, because ranks have different numbers of test batches
    alone.eval()
    with torch.no_grad():
        found = [(alone(batch), batch["customer"].input_id) for batch in test_loader]
    everyone: list[Any] = [found]
    if in_group:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
    score, number = (torch.cat(column) for column in zip(*(pair for of_rank in everyone for pair in of_rank)))
    return auc(score, made.examples["test"][2][number])


def partition(made: Shop, num_parts: int, root: Path) -> None:
    """Writes the dataset directory. All customers may be seeds."""
    salientpp.partition(made.data, num_parts, root, FANOUTS, 128, seeds=("customer", "all"), time_attr="day")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "root", nargs="?", type=Path, help="a dataset directory; without one, one process trains on the whole graph"
    )
    parser.add_argument("--partition", type=Path, metavar="DIR", help="write the dataset directory and exit")
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--memory", default="8GiB", help="memory of each host for copies of rows; the loader plans its use"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    made = shop()
    if args.partition is not None:
        partition(made, args.parts, args.partition)
        print(f"{args.partition}: {args.parts} parts")
        return
    if detect().world_size > 1:
        salientpp.init_process_group()
    data = made.data if args.root is None else salientpp.load(args.root)
    found = train(data, args.epochs, args.seed, args.memory, made=made)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"AUC of customers who order again: {found:.3f}")


if __name__ == "__main__":
    main()
