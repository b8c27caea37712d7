"""Graphs, models and comparisons for tests of padded batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch_geometric.nn as nn
from torch_geometric.data import Data, HeteroData

from salientpp.datasets import synthetic

N = 3000
OPTIONS = dict(num_neighbors=[8, 4], batch_size=64, shuffle=True, seed=7)


def graph() -> Data:
    data = synthetic(num_vertices=N, seed=2)
    generator = torch.Generator().manual_seed(0)
    data.edge_attr = torch.rand(data.num_edges, 3, generator=generator)
    data.name = "whole"
    data.scale = torch.ones(5)
    return data


DATA = graph()


def typed() -> HeteroData:
    generator = torch.Generator().manual_seed(1)
    data = HeteroData()
    sizes = {"paper": 400, "author": 300, "venue": 50}
    for type_, size in sizes.items():
        data[type_].x = torch.randn(size, 6, generator=generator)
    data["lonely"].num_nodes = 0
    for source, name, target, size in [
        ("author", "wrote", "paper", 2000),
        ("paper", "cites", "paper", 1500),
        ("venue", "has", "paper", 300),
    ]:
        ends = [torch.randint(sizes[end], (size,), generator=generator) for end in (source, target)]
        data[source, name, target].edge_index = torch.stack(ends)
        data[source, name, target].weight = torch.rand(size, generator=generator)
    data["paper", "in", "lonely"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    return data


def assert_same_but_for_padding(bare, full) -> None:
    for ours, theirs in zip(bare.stores, full.stores):
        typed = isinstance(bare, HeteroData)
        assert set(theirs.keys()) - set(ours.keys()) <= {"node_mask", "edge_mask"}
        for name in ours.keys():
            value, filled = ours[name], theirs[name]
            if not isinstance(value, torch.Tensor) or value.shape == filled.shape:
                assert name == "num_nodes" or (
                    torch.equal(value, filled) if isinstance(value, torch.Tensor) else value == filled
                )
                continue
            mask = (
                theirs.edge_mask
                if name == "edge_index" or ours.is_edge_attr(name) or name == "e_id"
                else theirs.node_mask
            )
            assert (mask.long().diff() <= 0).all(), "padding comes last"
            dim = full.__cat_dim__(name, filled, theirs)
            real, rest = filled.split([int(mask.sum()), int((~mask).sum())], dim)
            assert torch.equal(value, real), name
            if name == "edge_index":
                kinds = (ours._key[0], ours._key[2]) if typed else (None, None)
                for end, type_ in zip(rest, kinds):
                    others = full[type_] if typed else full
                    assert not others.node_mask[end].any(), "padding edges join only padding vertices"
                assert (rest[1].diff() >= 0).all()
            else:
                assert (rest == (-1 if name in ("n_id", "e_id") else 0)).all(), name


def shape(batch) -> tuple:
    return tuple(
        (name, tuple(store[name].shape)) for store in batch.stores for name in store if name in ("x", "edge_index")
    )


def assert_equal(batch: Data, again: Data) -> None:
    assert list(batch.keys()) == list(again.keys())
    assert all(torch.equal(batch[name], again[name]) for name in batch.keys() if isinstance(batch[name], torch.Tensor))


def assert_same_training(
    make_model: Callable[[], torch.nn.Module], bare: Iterable, full: Iterable, number: int
) -> None:
    """Compares a model's outputs at the seeds and its gradients on the first batches without padding and with it."""
    torch.manual_seed(0)
    model = make_model().double()
    for ours, theirs, _ in zip(bare, full, range(number)):
        seen = []
        for batch in (ours, theirs):
            model.zero_grad()
            out = model(batch.x.double(), batch.edge_index)[: batch.batch_size]
            torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size] % 4).backward()
            seen.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
        for a, b in zip(*seen, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


MODELS = {
    "sage mean": lambda: nn.GraphSAGE(DATA.num_features, 16, 2, 4),
    "sage max": lambda: nn.GraphSAGE(DATA.num_features, 16, 2, 4, aggr="max"),
    "gat": lambda: nn.GAT(DATA.num_features, 16, 2, 4, v2=False),
    "gcn": lambda: nn.GCN(DATA.num_features, 16, 2, 4),
    "gin": lambda: nn.GIN(DATA.num_features, 16, 2, 4),
}
