"""Laws of layers that were changed: a trimmed model computes what PyG's code computes, whatever was replaced, hooked or wrapped, and whenever."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from changed_layers import LATER, LINEAR, MESSAGES, Change, patched
from torch import Tensor, nn
from torch_geometric.nn.conv import gat_conv, gcn_conv
from trimmed import WIDTH, assert_same, batch_of, graph, step

import salientpp

LAYERS = {
    "GCNConv": lambda: pyg.GCNConv(WIDTH, WIDTH),
    "GCNConv to more columns": lambda: pyg.GCNConv(WIDTH, 4 * WIDTH),
    "SAGEConv": lambda: pyg.SAGEConv(WIDTH, WIDTH),
    "SAGEConv of sums": lambda: pyg.SAGEConv(WIDTH, WIDTH, "sum"),
    "GATConv": lambda: pyg.GATConv(WIDTH, 3, heads=2),
    "GATv2Conv": lambda: pyg.GATv2Conv(WIDTH, 3, heads=2, share_weights=True),
    "GINConv": lambda: pyg.GINConv(pyg.Linear(WIDTH, WIDTH)),
    "TransformerConv": lambda: pyg.TransformerConv(WIDTH, 3, heads=2),
    "EdgeConv": lambda: pyg.EdgeConv(pyg.Linear(2 * WIDTH, WIDTH)),
}
LINEAR_MAPS = [
    ("GCNConv", "lin"),
    ("GCNConv to more columns", "lin"),
    ("SAGEConv", "lin_l"),
    ("SAGEConv", "lin_r"),
    ("GATConv", "lin"),
    ("GATv2Conv", "lin_l"),
    ("TransformerConv", "lin_key"),
    ("EdgeConv", "nn"),
]


class Network(nn.Module):
    def __init__(self, layer: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = LAYERS[layer]()
        self.last = pyg.SAGEConv(-1, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.conv(x, edge_index).tanh(), edge_index)


@pytest.fixture(scope="module")
def batch():
    return batch_of(graph(6), [3, 2])


def network(layer: str, batch) -> nn.Module:
    model = Network(layer).double()
    torch.manual_seed(2)
    model(batch.x, batch.edge_index)  # gives the last layer its shape
    return model


def check(layer: str, change: Change, batch) -> None:
    """The model is called with the change, without it if it can be undone, and with it again."""
    results = []
    for is_trimmed in (False, True):
        model = network(layer, batch)
        if is_trimmed:
            salientpp.nn.trim(model)
        steps = []
        for _ in range(2):
            torch.manual_seed(3)
            with change(model.conv):
                steps.append(step(model, batch))
            steps.append(step(model, batch))
        results.append(steps)
    for expected, got in zip(*results, strict=True):
        assert_same(expected, got, 1e-9)


@pytest.mark.parametrize("change", MESSAGES)
@pytest.mark.parametrize("layer", ["GCNConv", "SAGEConv of sums", "GATConv", "GINConv", "TransformerConv"])
def test_changed_messages_are_computed_as_pyg_computes_them(layer, change, batch):
    check(layer, MESSAGES[change], batch)


@pytest.mark.parametrize("change", LINEAR)
@pytest.mark.parametrize(("layer", "lin"), LINEAR_MAPS)
def test_changed_linear_maps_are_called_as_pyg_calls_them(layer, lin, change, batch):
    check(layer, LINEAR[change](lin), batch)


@pytest.mark.parametrize("change", LATER)
def test_changes_after_the_first_call_are_noticed(change, batch):
    plain, trimmed = network("SAGEConv", batch), salientpp.nn.trim(network("SAGEConv", batch))
    assert_same(step(plain, batch), step(trimmed, batch), 1e-9)
    with LATER[change](plain.conv):
        expected = step(plain, batch)
    with LATER[change](trimmed.conv):
        assert_same(expected, step(trimmed, batch), 1e-9)


def _with_twice(old):
    def changed(*args, **kwargs):
        edge_index, weight = old(*args, **kwargs)
        return edge_index, 2 * weight

    return changed


REPLACED = {
    "gcn_norm": ("GCNConv", patched(gcn_conv, "gcn_norm", _with_twice)),
    "softmax": ("GATConv", patched(gat_conv, "softmax", lambda old: lambda *args, **kwargs: 2 * old(*args, **kwargs))),
    "message": ("GCNConv", patched(pyg.GCNConv, "message", lambda old: lambda self, x_j, edge_weight: x_j)),
    "edge_update": (
        "GATConv",
        patched(pyg.GATConv, "edge_update", lambda old: lambda self, *args, **kwargs: 2 * old(self, *args, **kwargs)),
    ),
    "forward": (
        "SAGEConv",
        patched(pyg.SAGEConv, "forward", lambda old: lambda self, x, edge_index: 2 * old(self, x, edge_index)),
    ),
}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_functions_of_pyg_are_called(name, batch):
    check(*REPLACED[name], batch)


def test_unchanged_layers_are_cut(batch):
    for layer in LAYERS:
        model = salientpp.nn.trim(network(layer, batch))
        assert step(model, batch).rows[-1] == batch.batch_size, layer
