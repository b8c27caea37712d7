"""Laws of mistakes of one rank before the first collective: the other ranks raise too, although the rank catches its error and lives on.

All mistakes are made in the same processes. After each, the ranks meet in a barrier of torch, which a rank that waits elsewhere would never reach.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import distributed
import torch
import torch_geometric.nn as pyg
from graphs import random_data
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp import NeighborLoader, PartitionedGraph, inference
from salientpp.engine.way import Way
from salientpp.fullgraph import LocalGraph, accuracy, distribute, local, loss_mean, plan_for
from salientpp.nn import trim

NEVER = distributed.NEVER


def data_of() -> Data:
    data = random_data(80, 240, train_fraction=0.8)
    data.x = torch.ones(80, 6)
    data.y = torch.arange(80) % 5
    return data


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(6, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


def stale(*_: Any) -> None:
    raise OSError(errno.ESTALE, "Stale file handle")


class Stale(Way):
    """A way whose files went away."""

    name = "stale"
    begin_epoch = stale


def loader(part: PartitionedGraph, **options: Any) -> NeighborLoader:
    return NeighborLoader(part, [2], "train", batch_size=8, seed=1, timeout=NEVER, **options)


def together(part: PartitionedGraph) -> NeighborLoader:
    return loader(part, ranks_per_host=2, cooperate="host")


def whole(part: PartitionedGraph) -> LocalGraph:
    return local(part, timeout=NEVER)


def epoch_without_files(part: PartitionedGraph, here: bool) -> None:
    made = loader(part)
    if here:
        vars(made.data)["check_sizes"] = stale
    list(made)


def epoch_of_a_way(part: PartitionedGraph, here: bool) -> None:
    made = loader(part, ways=[Stale()])
    if not here:
        made.engine.ways.clear()
    list(made)


def another_plan(part: PartitionedGraph, here: bool) -> None:
    one, other = whole(part), whole(part)
    plan = plan_for(Net(), one, kind="fetch")
    distribute(Net(), other if here else one, plan)


def loss(part: PartitionedGraph, here: bool) -> None:
    loss_mean(torch.tensor(1.0) if here else torch.ones(3), whole(part))


def score(part: PartitionedGraph, here: bool) -> None:
    accuracy("no tensor" if here else torch.ones(3, 5), torch.ones(3), whole(part))  # type: ignore[arg-type]


def interrupted(part: PartitionedGraph, here: bool) -> None:
    class Interrupted(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            if here:
                raise KeyboardInterrupt
            return super().forward(x, edge_index)

    graph = whole(part)
    try:
        distribute(Interrupted(), graph)(graph.x, graph.edge_index)
    except KeyboardInterrupt:
        raise InterruptedError("Ctrl-C") from None


#: Name -> (function of the part, and whether this rank makes the mistake; words of the error of the other rank).
MISTAKES: dict[str, tuple[Callable[[PartitionedGraph, bool], Any], str]] = {
    "files are gone": (epoch_without_files, "could not begin an epoch: OSError: [Errno 116] Stale file handle"),
    "files of a way are gone": (epoch_of_a_way, "could not begin an epoch: OSError: [Errno 116] Stale file handle"),
    "hosts": (lambda part, here: loader(part, ranks_per_host="2" if here else 2), "ranks_per_host must be"),
    "local, time-out": (lambda part, here: local(part, timeout="x" if here else NEVER), "timedelta"),  # type: ignore[arg-type]
    "local, device": (lambda part, here: local(part, device="nope" if here else None, timeout=NEVER), "nope"),
    "local, dtype": (lambda part, here: local(part, dtype="x" if here else None, timeout=NEVER), "the same x"),  # type: ignore[arg-type]
    "layout": (lambda part, here: distribute(Net(), whole(part), "2" if here else "halo"), "layout must be"),
    "no model": (lambda part, here: distribute(3 if here else Net(), whole(part)), "model must be"),  # type: ignore[arg-type]
    "recompute": (lambda part, here: distribute(Net(), whole(part), recompute="x" if here else None), "recompute must"),
    "another plan": (another_plan, "layout is a plan for another part"),
    "Ctrl-C": (interrupted, "rank 1 failed in the model's forward: KeyboardInterrupt"),
    "kind": (lambda part, here: plan_for(Net(), whole(part), kind="x" if here else "cut"), "kind must be one of"),
    "memory": (
        lambda part, here: plan_for(Net(), whole(part), kind="cut", memory=f"{'9' * 400} GiB" if here else None),
        "rank 1 could not plan: ",
    ),
    "constants": (
        lambda part, here: plan_for(Net(), whole(part), kind="cut", constants=3 if here else None),  # type: ignore[arg-type]
        "constants must be a Constants or None, got int",
    ),
    "layout of a loader": (
        lambda part, here: distribute(Net(), together(part), "1d" if here else "halo"),
        "layout must be 'halo' for a loader",
    ),
    "trim and recompute": (
        lambda part, here: distribute(trim(Net()), together(part), recompute="layers" if here else None),
        "recompute must be None for a model of salientpp.nn.trim",
    ),
    "loss": (loss, "loss_mean, which failed (ValueError: losses must be a tensor"),
    "score": (score, "accuracy, which failed (AttributeError: 'str' object"),
    "inference, out": (
        lambda part, here: inference(pyg.GraphSAGE(6, 8, 2), part, out=3.5 if here else None, timeout=NEVER),  # type: ignore[arg-type]
        "not float",
    ),
    "inference, model": (
        lambda part, here: inference(3 if here else pyg.GraphSAGE(6, 8, 2), part, timeout=NEVER),  # type: ignore[arg-type]
        "model must be one of PyG's basic models",
    ),
}


def said(rank: int, root: str) -> dict[str, str]:
    found = {}
    for name, (function, _) in MISTAKES.items():
        try:
            function(salientpp.load(root), rank == 1)
            found[name] = "no error"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        torch.distributed.barrier()
    return found


def test_every_rank_hears_of_a_mistake_of_one_rank(tmp_path):
    root = tmp_path / "2"
    salientpp.partition(data_of(), 2, root, [2], 8)
    first, second = distributed.run(said, 2, str(root))
    for name, (_, words) in MISTAKES.items():
        assert words in first[name], (name, first[name])
        assert second[name] != "no error" and "no answer" not in second[name], (name, second[name])
