"""Law of changed layers on batches with sums: outputs at the seeds are PyG's on the whole batch, or the change is named."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import distributed
import pytest
import torch
from changed_layers import LINEAR, MESSAGES, Change
from graphs import random_data
from torch import Tensor
from torch_geometric.nn import GCNConv, GINConv, Linear, SAGEConv

import salientpp
from salientpp import NeighborLoader
from salientpp.nn import merge_partial

WIDTH = 8


class Network(torch.nn.Module):
    """Two layers. One of them is changed."""

    def __init__(self, make: Callable[[], torch.nn.Module], changed_first: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.changed, self.other = make(), SAGEConv(WIDTH, WIDTH)
        self.changed_first = changed_first

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first, second = (self.changed, self.other) if self.changed_first else (self.other, self.changed)
        return second(first(x, edge_index).tanh(), edge_index)


LAYERS: dict[str, Callable[[], Any]] = {
    "GCNConv": lambda: GCNConv(WIDTH, WIDTH, normalize=False),
    "SAGEConv": lambda: SAGEConv(WIDTH, WIDTH, "sum"),
    "GINConv": lambda: GINConv(Linear(WIDTH, WIDTH)),
}
#: Linear map of each layer. GCNConv applies it to rows of sources, and the others to sums.
MAPS = {"GCNConv": "lin", "SAGEConv": "lin_l", "GINConv": "nn"}
#: Changes of the code that passes messages.
CODE = (*MESSAGES, "hook for all linear maps")
REFUSED = (
    r"(has|runs) .* on a batch with sums.*(changed code and hooks|the hook) would see only some messages; (undo the change|remove it)"
    r"|merge_partial: .* (has|runs) .*, so a sum of rows may not replace its messages"
)
#: Changes that read all rows, or count calls.
UNSEEN = ("hook over all", "counter", "another aggregation")

ROWS: dict[str, tuple[Callable[[], Any], Change, bool]] = {
    f"{layer}, {name}, {'first' if first else 'second'}": (make, change, first)
    for layer, make in LAYERS.items()
    for name, change in [*MESSAGES.items(), *((name, linear(MAPS[layer])) for name, linear in LINEAR.items())]
    for first in ((True, False) if layer == "GCNConv" else (True,))
    if name not in UNSEEN
}


def use_all(rank: int, root: str) -> dict[str, str]:
    """Uses every changed layer. Rank 0 merges each model before the change, and rank 1 after it."""
    merged_first = rank == 0
    options: dict[str, Any] = {"batch_size": 32, "shuffle": True, "seed": 3, "ranks_per_host": 1}
    part = salientpp.load(root)
    with_sums = NeighborLoader(part, [8, 8], "train", partial_aggregation="mean", **options)
    loaders = zip(with_sums, NeighborLoader(part, [8, 8], "train", **options), strict=True)
    ((batch, whole),) = itertools.islice(loaders, 1)
    assert batch.partial.target.numel() > 30
    found = {}
    for name, (make, change, first) in ROWS.items():
        results: list[Tensor] = []
        try:
            for given in (whole, batch):
                model = Network(make, first).double()
                if given is batch and merged_first:
                    merge_partial(model)
                torch.manual_seed(6)
                with change(model.changed):
                    if given is batch and not merged_first:
                        merge_partial(model)
                    given = copy.deepcopy(given)
                    results.append(model(given.x, given.edge_index)[: given.batch_size].detach())
            found[name] = str(float((results[0] - results[1]).abs().max()))
        except (RuntimeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    data = random_data(2000, 14000, directed=True, dtype=torch.float64)
    data.x = torch.randn(2000, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    root = str(tmp_path_factory.mktemp("changed") / "parts")
    salientpp.partition(data, 2, root, [8, 8], 32)
    return root


def test_changed_layers_over_sums_are_right_or_refused_by_name(root):
    for found in distributed.run(use_all, 2, root):
        assert found.keys() == ROWS.keys()
        for name, text in found.items():
            layer, change, place = name.split(", ")
            if change in CODE and change != "another aggregation of one name":
                assert re.search(REFUSED, text), f"{name}: {text}"
            elif change == "rounding":
                assert "is not known to work on each row separately" in text, f"{name}: {text}"
            elif place == "first" and change in MESSAGES:
                assert "aggregates with SumAggregation, which is not a plain sum" in text, f"{name}: {text}"
            elif place == "first" and layer == "GCNConv":
                assert "GCNConv has another lin than PyG's own map" in text, f"{name}: {text}"
            elif change == "weight of a subclass" and "RuntimeError" in text:
                assert "over a batch with sums would differ from the plain model" in text, f"{name}: {text}"
            else:
                assert re.fullmatch(r"[0-9.e-]+", text) and float(text) < 1e-9, f"{name}: {text}"
