"""Law of changed layers in inference: rows are PyG's on the whole graph, or the layer is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from changed_layers import LINEAR, MESSAGES, Change
from graphs import random_data

import salientpp

WIDTH = 6
LAYERS: dict[str, Callable[[], Any]] = {
    "GCNConv": lambda: pyg.GCNConv(WIDTH, WIDTH),
    "GCNConv to fewer columns": lambda: pyg.GCNConv(WIDTH, 3),
    "SAGEConv": lambda: pyg.SAGEConv(WIDTH, 3, "sum"),
    "GraphConv": lambda: pyg.GraphConv(WIDTH, 3),
}
MAPS = {"GCNConv": "lin", "GCNConv to fewer columns": "lin", "SAGEConv": "lin_l", "GraphConv": "lin_rel"}
#: Changes that no layer of one hop can have.
REFUSED = (
    "aggregate over all",
    "hook of the aggregation over all",
    "another aggregation",
    "hook over all",
    "hook before aggregate",
)


@pytest.fixture(scope="module")
def data():
    data = random_data(200, 900, directed=True)
    data.x = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    return data


def check(make: Callable[[], Any], change: Change, is_refused: bool, data: Any) -> None:
    torch.manual_seed(2)
    conv = make().double().eval()
    with change(conv):
        conv.eval()  # modules that the change has added
        expected = conv(data.x, data.edge_index).detach()
        if is_refused:
            with pytest.raises(
                ValueError, match="cannot be computed from the in-neighbours of each vertex only|normalise"
            ):
                salientpp.inference([conv], data, batch_size=64)
            return
        got = salientpp.inference([conv], data, batch_size=64)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("change", MESSAGES)
@pytest.mark.parametrize("layer", LAYERS)
def test_changed_messages_give_pygs_rows_or_are_refused(layer, change, data):
    check(LAYERS[layer], MESSAGES[change], change in REFUSED, data)


@pytest.mark.parametrize("change", [name for name in LINEAR if name != "counter"])
@pytest.mark.parametrize("layer", LAYERS)
def test_changed_linear_maps_give_pygs_rows_or_are_refused(layer, change, data):
    check(LAYERS[layer], LINEAR[change](MAPS[layer]), change in REFUSED, data)
