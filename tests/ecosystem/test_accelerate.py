"""Hugging Face's Accelerator: ``prepare`` works on a loader, or raises an error that says why it cannot."""

from __future__ import annotations

import os

import distributed
import pytest
import torch
import torch.nn.functional as F
from graphs import random_data
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader

accelerate = pytest.importorskip("accelerate", reason="needs Hugging Face's accelerate")


def graph():
    data = random_data(100, 700)
    data.x, data.y = torch.randn(100, 8), torch.arange(100) % 3
    return data


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_prepared_loader_trains(num_workers):
    data = graph()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = GraphSAGE(8, 8, 2, 3)
    loader = NeighborLoader(data, [3, 2], torch.arange(50), batch_size=8, shuffle=True, num_workers=num_workers)
    model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    assert len(prepared) == 7
    steps = 0
    for _ in range(2):
        seeds = []
        for batch in prepared:
            assert torch.equal(batch.x, data.x[batch.n_id]) and torch.equal(
                data.edge_index[:, batch.e_id], batch.n_id[batch.edge_index]
            )
            seeds += batch.input_id.tolist()
            with accelerator.accumulate(model):
                loss = F.cross_entropy(
                    model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size]
                )
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                steps += accelerator.sync_gradients
        assert sorted(seeds) == list(range(50)) and seeds != sorted(seeds)
    assert steps == 4, "expected a step after every four batches, and after the last batch of an epoch"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_of_a_prepared_loader_draw_different_batches(num_workers):
    loader = accelerate.Accelerator(cpu=True).prepare(
        NeighborLoader(graph(), [3], torch.arange(50), batch_size=10, num_workers=num_workers)
    )
    epochs = [[batch.n_id.tolist() for batch in loader] for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_link_loader_can_be_prepared():
    data = graph()
    loader = LinkNeighborLoader(data, [3], data.edge_index[:, :20], batch_size=5, neg_sampling="binary")
    batches = list(accelerate.Accelerator(cpu=True).prepare(loader))
    assert [batch.edge_label.tolist() for batch in batches] == [[1.0] * 5 + [0.0] * 5] * 4


def on_rank(rank, directory):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
        ACCELERATE_USE_CPU="true",
    )
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    texts = []
    for loader in (
        NeighborLoader(salientpp.load(directory), [3], "all", batch_size=8),
        NeighborLoader(graph(), [3], batch_size=8, share=(rank, 2), seed=1),
    ):
        with pytest.raises(ValueError) as error:
            accelerator.prepare(loader)
        texts.append(str(error.value))
        list(loader)
    torch.manual_seed(5)
    shared = accelerator.prepare(NeighborLoader(graph(), [3], torch.arange(40), batch_size=5, shuffle=True))
    return texts, [batch.input_id.tolist() for batch in shared]


def test_a_loader_that_already_shares_its_seeds_cannot_be_prepared(tmp_path):
    salientpp.partition(graph(), 2, tmp_path / "parts", [3], 8)
    found = distributed.run(on_rank, 2, tmp_path / "parts", seconds=180)
    for texts, _ in found:
        assert all("leave it out of prepare()" in text for text in texts)
    seeds = [sum(batches, []) for _, batches in found]
    assert sorted(seeds[0] + seeds[1]) == list(range(40)) and len(seeds[0]) == len(seeds[1]), (
        "expected each process to get its share of the seeds"
    )
