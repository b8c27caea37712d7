"""Trains a GraphSAGE that torch.compile has compiled for fixed shapes.

    python examples/compiled.py                       # inductor; needs a C++ compiler, or Triton on a GPU
    python examples/compiled.py --backend eager       # takes seconds and only counts the compilations

With pad='bucket' an epoch has two or three shapes, so the model is compiled two or three times.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

from salientpp import NeighborLoader
from salientpp.datasets import synthetic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--vertices", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = synthetic(num_vertices=args.vertices)
    loader = NeighborLoader(
        data, [10, 5], data.train_mask, batch_size=256, shuffle=True, num_workers=1, seed=0, device=device, pad="bucket"
    )
    model = GraphSAGE(data.num_features, 64, 2, int(data.y.max()) + 1).to(device)
    compiled = torch.compile(model, dynamic=False, backend=args.backend)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    shapes = set()
    for epoch in range(args.epochs):
        started, losses = time.perf_counter(), []
        for batch in loader:
            shapes.add((batch.num_nodes, batch.num_edges))
            # The seeds come first, so the loss sees no padding.
            out = compiled(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        seconds = time.perf_counter() - started
        print(
            f"epoch {epoch}: loss {float(torch.stack(losses).mean()):.3f}, {seconds:.1f} s, {len(shapes)} shapes so far"
        )


if __name__ == "__main__":
    main()
