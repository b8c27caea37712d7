"""Laws of changed layers over ranks: a model computes what one process computes with the whole graph, or the change is named."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import distributed
import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from changed_layers import LINEAR, MESSAGES, Change
from fullgraph_training import WIDTH, data_of
from rare import rare
from torch import Tensor

from salientpp.fullgraph import distribute, local
from salientpp.fullgraph.layers import refusals

LAYERS: dict[str, Callable[[], Any]] = {
    "GCNConv": lambda: pyg.GCNConv(WIDTH, WIDTH),
    "SAGEConv of sums": lambda: pyg.SAGEConv(WIDTH, WIDTH, "sum"),
    "GATConv": lambda: pyg.GATConv(WIDTH, 3, heads=2),
}
#: Errors, by the name of the layer.
REFUSED = r"cannot be trained over ranks: {} (has|runs) .*; undo it, or put the code into a subclass of the layer"
OVERRIDDEN = (
    r"overrides forward\(\) of GCNConv, which looks up vertices of other ranks; derive the layer from MessagePassing"
)
ONLY_HALO = "but .* does more with its in-neighbours' rows; use layout='halo'"
#: Changes that layers over ranks follow.
RIGHT = ("another aggregation of one name",)


class Doubled(pyg.GCNConv):
    """Calls the forward of PyG, which divides by degrees."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


class OwnMessage(pyg.SAGEConv):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.tanh()


class OwnPropagate(pyg.SAGEConv):
    def propagate(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().propagate(*args, **kwargs)


class OwnAggregate(pyg.SAGEConv):
    def aggregate(self, inputs: Tensor, index: Tensor, ptr: Any = None, dim_size: int | None = None) -> Tensor:
        return super().aggregate(inputs, index, ptr, dim_size).sin()


class Chooses(pyg.MessagePassing):
    """Chooses its message when it is made."""

    def __init__(self) -> None:
        super().__init__("sum")
        self.message = self._message  # type: ignore[method-assign]

    def _message(self, x_j: Tensor) -> Tensor:
        return x_j * x_j

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


SUBCLASSES: dict[str, Callable[[], Any]] = {
    "subclass with a message": lambda: OwnMessage(WIDTH, WIDTH),
    "subclass with propagate": lambda: OwnPropagate(WIDTH, WIDTH),
    "subclass with aggregate": lambda: OwnAggregate(WIDTH, WIDTH),
    "message chosen by the layer": Chooses,
    "forward outside its class": lambda: Doubled(WIDTH, WIDTH),
}
LINEAR_MAPS = {"GCNConv": "lin", "SAGEConv of sums": "lin_l", "GATConv": "lin"}
#: Code of users that reads all rows of a rank, or counts its calls. No function sees that.
UNSEEN = ("hook over all", "counter", "another aggregation")

ROWS: dict[str, tuple[Callable[[], Any], Change]] = {
    **{
        f"{layer}, {name}": (LAYERS[layer], change)
        for layer in LAYERS
        for name, change in MESSAGES.items()
        if name not in UNSEEN
    },
    **{
        f"{layer}, {name}": (LAYERS[layer], make(LINEAR_MAPS[layer]))
        for layer in LAYERS
        for name, make in LINEAR.items()
        if name not in UNSEEN
    },
    **{name: (make, lambda conv: contextlib.nullcontext()) for name, make in SUBCLASSES.items()},
}


def compare(rank: int, layout: str, changed_first: bool, names: list[str]) -> dict[str, str]:
    """Returns, for each row, the difference from one process, or the error of the distributed layer."""
    data, found = data_of(), {}
    part = local(data)
    for name in names:
        make, change = ROWS[name]
        torch.manual_seed(3)
        whole, mine = make().double(), make().double()
        mine.load_state_dict(whole.state_dict())
        x = part.x.clone().requires_grad_()
        torch.manual_seed(4)
        with change(whole):
            expected = whole(data.x, data.edge_index).detach()
        try:
            model = None if changed_first else distribute(mine, part, layout)
            torch.manual_seed(4)
            with change(mine):
                if model is not None and (refused := [*refusals(mine)]):
                    # The forward raises this. The ranks of a call that failed may not meet again, so it is not called here.
                    raise ValueError(f"this model cannot be trained over ranks: {refused[0]}")
                out = (model or distribute(mine, part, layout))(x, part.edge_index)
            found[name] = str(float((out.detach() - expected[part.n_id[: part.num_counted]]).abs().max()))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    dist.barrier()
    return found


NAMES = [*ROWS]


@pytest.mark.parametrize(
    ("layout", "changed_first", "names"),
    [
        ("halo", True, NAMES[1::2]),
        ("halo", False, NAMES[::2]),
        ("cover", False, NAMES[::3]),
        *rare(("halo", True, NAMES), ("halo", False, NAMES), ("cover", False, NAMES)),
    ],
    ids=lambda value: f"{len(value)} changes" if isinstance(value, list) else str(value),
)
def test_changed_layers_are_right_or_refused_by_name(layout, changed_first, names):
    for found in distributed.run(compare, 2, layout, changed_first, names):
        assert [*found] == names
        for name, text in found.items():
            layer, _, change = name.partition(", ")
            if "outside its class" in name:
                assert re.search(OVERRIDDEN, text), f"{name}: {text}"
            elif layout == "cover" and (name.startswith("GATConv") or name in SUBCLASSES):
                assert re.search(ONLY_HALO, text), f"{name}: {text}"
            elif change == "weight of a subclass":
                assert re.search(r"Linear \(lin\w*\) has a parameter of the class DoubledProducts,", text), (
                    f"{name}: {text}"
                )
            elif change in (*MESSAGES, "hook for all linear maps") and change not in RIGHT:
                assert re.search(REFUSED.format(layer.split()[0]), text), f"{name}: {text}"
            else:
                assert re.fullmatch(r"[0-9.e-]+", text) and float(text) < 1e-9, f"{name}: {text}"
