"""Trimmed models in DistributedDataParallel over a partitioned graph, and inside a LightningModule."""

from __future__ import annotations

import copy
from pathlib import Path

import distributed
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from rare import rare
from torch.nn.parallel import DistributedDataParallel
from trimmed import FANOUTS, WIDTH, graph, loader

import salientpp

STEPS = 3


def network(kind: str, norm: str | None) -> torch.nn.Module:
    torch.manual_seed(1)
    make = {"gcn": pyg.GCN, "sage": pyg.GraphSAGE, "gat": pyg.GAT}[kind]
    return make(WIDTH, 8, 3, 3, norm=norm).double()


def lists(values) -> dict[str, list]:
    """Converts to lists, by names without wrappers. Pipes between processes keep no tensors of a process that has ended."""
    return {name.removeprefix("module."): value.tolist() for name, value in values}


def train(rank: int, root: str, kind: str, norm: str | None) -> list[tuple]:
    """Returns :func:`train_with` of a plain model, and of models that are trimmed before and after they are distributed."""
    return [train_with(root, kind, norm, trims) for trims in ("", "before", "after")]


def train_with(root: str, kind: str, norm: str | None, trims: str) -> tuple:
    """Returns the gradients of each step, the final state, and per step the numbers of output rows, seeds and vertices."""
    model = network(kind, norm)
    if trims == "before":
        salientpp.nn.trim(model)
    model = DistributedDataParallel(model)
    if trims == "after":
        salientpp.nn.trim(model)
    optimizer = torch.optim.Adam(model.parameters())
    given = salientpp.NeighborLoader(
        salientpp.load(root),
        FANOUTS,
        "train",
        batch_size=8,
        seed=3,
        shuffle=True,
        replication_factor=0.2,
        num_workers=1,
    )
    found, rows = [], []
    for batch, _ in zip(given, range(STEPS)):
        out = model(batch.x, batch.edge_index)
        optimizer.zero_grad()
        F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size]).backward()
        found.append(lists((name, value.grad) for name, value in model.named_parameters()))
        rows.append((out.size(0), batch.batch_size, batch.num_nodes))
        optimizer.step()
    return found, lists(model.state_dict().items()), rows


@pytest.mark.parametrize(
    ("kind", "norm", "ranks"),
    [
        *(("gcn", None, 2), ("gat", None, 1), ("sage", "batch_norm", 2)),
        *rare(("gcn", None, 1), ("gat", None, 2), ("sage", "batch_norm", 1)),
    ],
)
def test_gradients_of_ranks_equal_plain_models(kind, norm, ranks, tmp_path: Path):
    data = graph(7)
    data.train_mask = torch.arange(data.num_nodes) % 4 == 0
    parts = torch.arange(data.num_nodes) // 4 % ranks
    salientpp.partition(data, ranks, tmp_path / "parts", FANOUTS, 8, method=parts)
    plain, *others = zip(*distributed.run(train, ranks, str(tmp_path / "parts"), kind, norm), strict=True)
    for got in others:
        for (found, state, rows), (expected, last, _) in zip(got, plain):
            assert len(found) == len(expected) == STEPS
            assert all(number == seeds < all_ for number, seeds, all_ in rows)
            for a, b in zip((*found, state), (*expected, last)):
                assert a.keys() == b.keys()
                for name in a:
                    torch.testing.assert_close(torch.tensor(a[name]), torch.tensor(b[name]), rtol=1e-9, atol=1e-9)


def test_a_lightning_module_holds_a_trimmed_network(tmp_path):
    lightning = pytest.importorskip("lightning", reason="needs Lightning: pip install salientpp[lightning]")

    class Module(lightning.LightningModule):
        def __init__(self, trims: bool) -> None:
            super().__init__()
            self.net = network("gcn", "batch_norm")
            if trims:
                salientpp.nn.trim(self.net)
            self.rows: list[tuple[int, int]] = []

        def training_step(self, batch, _):
            out = self.net(batch.x, batch.edge_index)
            self.rows.append((out.size(0), batch.batch_size))
            return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])

        def validation_step(self, batch, _):
            out = self.net(batch.x, batch.edge_index)
            self.rows.append((out.size(0), batch.batch_size))
            self.log("loss", F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size]), batch_size=1)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    data, states = graph(8), []
    for trims in (False, True):
        module = Module(trims)
        runner = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        runner.fit(module, loader(data, batch_size=6, drop_last=True), loader(data, batch_size=6, drop_last=True))
        states.append({name: value.clone() for name, value in module.state_dict().items()})
        assert all(number == seeds for number, seeds in module.rows) == trims
        path = tmp_path / f"{trims}.ckpt"
        runner.save_checkpoint(path)
        other = Module.load_from_checkpoint(path, trims=not trims)
        assert other.state_dict().keys() == module.state_dict().keys()
        assert copy.deepcopy(module).net(data.x, data.edge_index).size(0) == data.num_nodes
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-8, atol=1e-8)
