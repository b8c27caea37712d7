"""Trains a GraphSAGE as PyG's examples on ogbn-products and Reddit do: sampled batches, and exact accuracies after each epoch.

    python examples/products.py

The generated stand-in has the 100 features, 47 classes, degrees and splits of ogbn-products, and a hundredth of its vertices. With --dataset ogbn-products
the script reads the data itself through OGB, and with --dataset npz:FILE a graph of yours. A script for PyG's loader differs in the import of NeighborLoader,
the line with salientpp.nn.trim, and the line with salientpp.inference. The last one takes the place of a loader over all neighbours.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import load_dataset

STAND_IN = (
    "synthetic:num_vertices=24490,average_degree=50,num_features=100,num_classes=47,community_size=100,"
    "train_fraction=0.08,val_fraction=0.016,test_fraction=0.904"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default=STAND_IN, help="synthetic:..., npz:FILE, ogbn-products (a stand-in)")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = load_dataset(args.dataset)
    loader = NeighborLoader(
        data, [15, 10, 5], data.train_mask, batch_size=64, shuffle=True, num_workers=2, seed=0, device=device
    )
    model = GraphSAGE(data.num_features, args.hidden, 3, int(data.y.max()) + 1, dropout=0.3).to(device)
    trimmed = salientpp.nn.trim(model)  # computes only the rows that the seeds need
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        model.train()
        losses, right = [], 0
        for batch in loader:
            out, y = trimmed(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size]
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            right += int((out.argmax(1) == y).sum())
        print(
            f"epoch {epoch}: loss {float(torch.stack(losses).mean()):.3f}, training seeds {right / int(data.train_mask.sum()):.3f}"
        )
        is_right = salientpp.inference(model, data).argmax(1) == data.y  # every vertex, from all its neighbours
        scores = {name: float(is_right[data[f"{name}_mask"]].float().mean()) for name in ("train", "val", "test")}
        print("         exact:", ", ".join(f"{name} {score:.3f}" for name, score in scores.items()))


if __name__ == "__main__":
    main()
