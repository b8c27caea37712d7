"""Trains a GraphSAGE that torch.compile compiles for one shape.

    python examples/compiled.py                       # inductor; needs a C++ compiler, or Triton on a GPU
    python examples/compiled.py --backend eager       # takes seconds; only counts compilations

With pad='fixed' all batches have one shape, except a few that are larger. On a GPU, the compiled model becomes a CUDA graph (mode='reduce-overhead'), and
pad={"static": True} delivers every batch at the addresses that this graph reads.
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
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    data = synthetic(num_vertices=args.vertices)
    model = GraphSAGE(data.num_features, 64, 2, int(data.y.max()) + 1).to(device)
    mode = "reduce-overhead" if on_gpu and args.backend == "inductor" else None
    compiled = torch.compile(model, dynamic=False, backend=args.backend, mode=mode)
    loader = NeighborLoader(
        data,
        [10, 5],
        data.train_mask,
        batch_size=256,
        shuffle=True,
        drop_last=True,  # the last batch may have fewer seeds
        num_workers=1,
        seed=0,
        device=device,
        pad={"static": on_gpu},
    )
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
        seconds, stats = time.perf_counter() - started, loader.stats()
        print(
            f"epoch {epoch}: loss {float(torch.stack(losses).mean()):.3f}, {seconds:.1f} s, {len(shapes)} shapes so far, "
            f"{stats.padding_overflows} of {stats.padded_batches} batches larger than the first shape"
        )


if __name__ == "__main__":
    main()
