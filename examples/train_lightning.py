"""Trains a module of Lightning, in one process or over parts.

    python examples/train_lightning.py
    salientpp partition synthetic:num_vertices=10000,num_features=32 parts-2 --parts 2 --num-neighbors 10,5 --batch-size 128
    torchrun --nproc-per-node 2 examples/train_lightning.py parts-2

The data module takes the arguments of PyG's LightningNodeData, and options of the loaders such as memory. Lightning: pip install 'salientpp[lightning]'
"""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp.datasets import synthetic
from salientpp.lightning import LightningNodeData


class Sage(L.LightningModule):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.model = salientpp.nn.trim(GraphSAGE(num_features, 64, 2, num_classes))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return F.cross_entropy(self.model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size])

    def validation_step(self, batch: Any, _: int) -> None:
        right = self.model(batch.x, batch.edge_index)[: batch.batch_size].argmax(1) == batch.y[: batch.batch_size]
        self.log("accuracy", right.float().mean(), batch_size=batch.batch_size, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        accuracy = self.trainer.callback_metrics["accuracy"]
        self.print(f"epoch {self.current_epoch}: validation accuracy {accuracy:.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(root: str | None = None) -> None:
    L.seed_everything(0, verbose=False)
    salientpp.init_process_group()  # joins the ranks of torchrun; no effect in a single process
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    data = synthetic(num_vertices=10_000, num_features=32) if root is None else salientpp.load(root)
    budget = {} if root is None else {"memory": "8GiB"}  # for copies of rows, on each machine
    datamodule = LightningNodeData(data, num_neighbors=[10, 5], batch_size=128, num_workers=1, seed=0, **budget)
    trainer = L.Trainer(
        max_epochs=3, strategy="ddp" if ranks > 1 else "auto", devices=ranks, num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    num_classes = int(data.y.max()) + 1 if root is None else data.num_classes
    trainer.fit(Sage(data.num_features, num_classes), datamodule)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
