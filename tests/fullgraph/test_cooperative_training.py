"""Laws of training over a loader with ``cooperate="host"``: gradients, rows on the network, and evaluation."""

from __future__ import annotations

from typing import Any

import distributed
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from graphs import random_data
from rare import rare
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp import NeighborLoader
from salientpp.fullgraph import accuracy, distribute, loss_mean
from salientpp.nn import trim

NUMBER, WIDTH, CLASSES, CO_BATCHES = 300, 6, 5, 3
BOTH = [pyg.SAGEConv, pyg.GATConv]
FORMS = [
    (2, 2, BOTH),
    (2, 1, BOTH[:1]),
    (4, 2, BOTH[1:]),
    *rare((1, 1, BOTH), (2, 1, BOTH), (4, 4, BOTH), (4, 2, BOTH)),
]


def data_of() -> Data:
    data = random_data(NUMBER, 3 * NUMBER, train_fraction=0.3)
    draw = torch.Generator().manual_seed(1)
    data.x = torch.randn(NUMBER, WIDTH, generator=draw).double()
    data.y = torch.randint(CLASSES, (NUMBER,), generator=draw)
    return data


class Net(torch.nn.Module):
    """Layers with residual connections."""

    def __init__(self, layer: Any, number: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([layer(WIDTH, WIDTH) for _ in range(number)])
        self.head = torch.nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index).relu() + x
        return self.head(x)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("cooperative") / "4"
    salientpp.partition(data_of(), 4, folder, [-1, -1], 16)
    return str(folder)


def losses_of(out: Tensor, batch: Data) -> Tensor:
    return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size], reduction="none")


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def train(rank: int, root: str, ranks_per_host: int, layers: list[Any]) -> None:
    data = data_of()
    part = salientpp.load(root)
    loader = NeighborLoader(
        part,
        [-1, -1],
        "train",
        shuffle=True,
        seed=3,
        ranks_per_host=ranks_per_host,
        cooperate={"batches": CO_BATCHES},
        uneven="exact",
    )
    seeds = data.train_mask.nonzero().view(-1)
    for layer in layers:
        alone = Net(layer)
        F.cross_entropy(alone(data.x, data.edge_index)[seeds], data.y[seeds]).backward()
        for trims in (False, True):
            module = Net(layer)
            model = distribute(trim(module) if trims else module, loader)
            number = 0
            for batch in loader:
                (losses_of(model(batch.x, batch.edge_index), batch).sum() / seeds.numel()).backward()
                number += 1
            assert number == CO_BATCHES
            for a, b in zip(gradients(alone), gradients(module), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    module.eval()
    alone.eval()
    found = torch.zeros(2, dtype=torch.float64)
    every = NeighborLoader(part, [-1, -1], "val", ranks_per_host=ranks_per_host, cooperate={"batches": 4})
    with torch.no_grad():
        for batch in every:
            seeds = slice(batch.batch_size)
            prediction = model(batch.x, batch.edge_index)[seeds].argmax(-1)
            counts = torch.tensor([int((prediction == batch.y[seeds]).sum()), batch.batch_size], dtype=torch.float64)
            counts = model.job.sum_up(counts, "counts")
            assert accuracy(prediction, batch.y[seeds], model) == float(counts[0] / counts[1])
            found += counts
        expected = alone(data.x, data.edge_index)[data.val_mask].argmax(-1) == data.y[data.val_mask]
    assert found.tolist() == [int(expected.sum()), expected.numel()]


@pytest.mark.parametrize(("size", "ranks_per_host", "layers"), FORMS)
def test_an_epoch_of_co_batches_equals_one_process(root, size, ranks_per_host, layers):
    """T5: with all neighbours, the gradients of all co-batches sum to those of one process over all seeds, also of a trimmed model."""
    distributed.run(train, size, root, ranks_per_host, layers)


def count(rank: int, root: str) -> None:
    loader = NeighborLoader(
        salientpp.load(root), [3, 3, 3], "train", batch_size=8, ranks_per_host=4, cooperate="host", seed=2
    )
    for trims in (False, True):
        module = Net(pyg.SAGEConv, 3)
        model = distribute(trim(module) if trims else module, loader)
        forward = backward = 0
        for number, batch in enumerate(loader):
            share = batch.edge_index.hops.share
            received = model.ranks.received
            if number:  # the first batch finds out the needed rows
                received.clear()
                forward = sum(
                    sum(of_rank[hops] for of_rank in share.received) * WIDTH
                    for hops in ((3, 2, 1) if trims else (3, 3, 3))
                )
                backward = sum(
                    sum(of_rank[hops] for of_rank in share.sent) * WIDTH for hops in ((2, 1) if trims else (3, 3))
                )
            out = model(batch.x, batch.edge_index)
            assert out.size(0) == (max(1, batch.batch_size) if trims and share.num_own else share.num_own)
            loss_mean(losses_of(out, batch), model).backward()
            if number:
                assert (received["forward"], received["backward"]) == (forward, backward)


def test_a_trimmed_model_exchanges_only_rows_within_the_hops_that_later_layers_need(root):
    """Law 4: words that travel equal the numbers of the share."""
    distributed.run(count, 4, root)
