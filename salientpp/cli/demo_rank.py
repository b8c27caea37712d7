"""One rank of ``salientpp demo``: trains without a cache and with one, and writes what it fetched as JSON.

Started by torchrun with the folder that has the dataset directory ``parts``. The report of rank r becomes ``r.json`` there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

from salientpp.cli.demo import ALPHA, BATCH_SIZE, EPOCHS, FANOUTS, SEED
from salientpp.loader.node_loader import NeighborLoader
from salientpp.nn.trim import trim
from salientpp.store.directory.load import load
from salientpp.store.directory.opened import PartitionedGraph


def train(part: PartitionedGraph, alpha: float) -> dict[str, Any]:
    """Trains a GraphSAGE with the replication factor ``alpha``. Returns the rows and bytes from the other rank, each batch's loss, and the accuracy."""
    torch.manual_seed(SEED)
    options: dict[str, Any] = dict(
        num_neighbors=list(FANOUTS), batch_size=BATCH_SIZE, num_workers=1, seed=SEED, ranks_per_host=1
    )
    loader = NeighborLoader(part, input_nodes="train", shuffle=True, replication_factor=alpha, **options)
    evaluation = NeighborLoader(part, input_nodes="val", uneven="exact", cache=loader.cache, **options)
    network = trim(GraphSAGE(part.num_features, 64, len(FANOUTS), part.num_classes))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(EPOCHS):
        for batch in loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = cross_entropy(out, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    stats = loader.stats()
    right = torch.zeros(2, device="cpu")
    network.eval()
    with torch.no_grad():
        for batch in evaluation:
            found = network(batch.x, batch.edge_index)[: batch.batch_size].argmax(dim=1)
            right[0] += (found == batch.y[: batch.batch_size]).sum()
            right[1] += batch.batch_size
    dist.all_reduce(right)
    accuracy = float(right[0] / right[1].clamp(min=1))
    return {"rows": stats.rows_remote, "bytes": stats.bytes_received, "losses": losses, "accuracy": accuracy}


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    part = load(folder / "parts")
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps([train(part, alpha) for alpha in (0.0, ALPHA)]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
