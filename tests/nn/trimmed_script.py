"""Trains a trimmed model for some steps of an epoch, from a saved state if they are not the first ones.

It prints each loss in full, the output's rows and the seeds. With ``before``, it prints whether a batch drawn before the model was trimmed gives all rows
of the plain model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch_geometric.nn as pyg

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from trimmed import WIDTH, graph, loader

import salientpp

sys.stdout, out = sys.stderr, sys.stdout


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return pyg.GAT(WIDTH, 8, 2, 4, dropout=0.5).double()


def before() -> None:
    (batch,) = loader(graph())
    plain = network().eval()(batch.x, batch.edge_index)
    got = salientpp.nn.trim(network().eval())(batch.x, batch.edge_index)
    print(torch.equal(plain, got), got.size(0) - batch.num_nodes, file=out)


def train(first: int, last: int, path: str) -> None:
    model = salientpp.nn.trim(network())
    optimizer = torch.optim.Adam(model.parameters())
    batches = loader(graph(), batch_size=2, shuffle=True, num_workers=1)
    if first:
        state = torch.load(path, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state_dict(state["loader"])
        torch.set_rng_state(state["random"])
    for number, batch in enumerate(batches, first):
        rows = model(batch.x, batch.edge_index)
        loss = torch.nn.functional.cross_entropy(rows[: batch.batch_size], batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex(), rows.size(0), batch.batch_size, file=out)
        if number == last - 1:
            if not first:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": batches.state_dict(),
                    "random": torch.get_rng_state(),
                }
                torch.save(state, path)
            break


if __name__ == "__main__":
    before() if sys.argv[1] == "before" else train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
