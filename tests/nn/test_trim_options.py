"""Laws of the options of PyG's layers and aggregations: a trimmed model gives the seeds the plain model's rows and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from trimmed import WIDTH, batch_of, compare, graph


def each(**options: list[Any]) -> list[dict[str, Any]]:
    """Returns all combinations."""
    return [dict(zip(options, values)) for values in itertools.product(*options.values())]


BOTH, D = [True, False], 3
ATTENTION = each(heads=[1, 2], concat=[False], residual=BOTH, add_self_loops=BOTH, bias=BOTH)
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SAGEConv": each(normalize=BOTH, root_weight=BOTH, project=BOTH, bias=BOTH),
    "GATConv": [*ATTENTION, {"heads": 2}, *each(heads=[2], concat=[False], edge_dim=[D], fill_value=["mean", 0.5])],
    "GATv2Conv": [*ATTENTION, *each(share_weights=[True], heads=[2], concat=[False], edge_dim=[None, D])],
    "TransformerConv": each(heads=[1, 2], concat=[False], beta=BOTH, root_weight=BOTH, edge_dim=[None, D]),
    "GCNConv": [*each(improved=BOTH, add_self_loops=BOTH, bias=BOTH), *each(normalize=[False], bias=BOTH)],
    "SGConv": each(K=[1, 2, 3], add_self_loops=BOTH),
    "SSGConv": each(alpha=[0.1], K=[1, 2]),
    "TAGConv": each(K=[1, 2, 3], normalize=BOTH),
    "ARMAConv": each(num_stacks=[1, 2], num_layers=[1, 2], shared_weights=BOTH),
    "GraphConv": each(bias=BOTH),
    "ClusterGCNConv": each(diag_lambda=[0.0, 0.5]),
    "MFConv": each(max_degree=[3, 10]),
    "GENConv": each(aggr=["softmax", "powermean", "add"], norm=["layer"]),
    "EGConv": each(aggregators=[["symnorm"], ["sum", "max"], ["mean", "var"]], num_heads=[2], add_self_loops=BOTH),
    "GeneralConv": each(attention=BOTH, heads=[1, 2], directed_msg=BOTH, l2_normalize=[True]),
}
#: Layers that take ``edge_weight``.
WEIGHTED = {"GCNConv", "SGConv", "SSGConv", "TAGConv", "ARMAConv", "GraphConv"}
AGGREGATIONS = ["mean", "max", "min", "std"]


@pytest.fixture(scope="module")
def batch():
    return batch_of(graph(3))


class Two(nn.Module):
    def __init__(self, name: str, options: dict[str, Any], argument: str | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        kind, self.argument = getattr(pyg, name), argument
        self.first, self.second = (kind(WIDTH, WIDTH, **options) for _ in range(2))
        self.last = nn.LazyLinear(WIDTH)

    def forward(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
        more = {} if self.argument is None else {self.argument: batch[self.argument]}
        out = self.first(x, batch.edge_index, **more)
        return self.last(self.second(out[:, :WIDTH].relu(), batch.edge_index, **more))


def check(name: str, options: dict[str, Any], argument: str | None, batch: Any) -> None:
    model = Two(name, options, argument).double()
    model(batch.x, batch)  # sets the size of the last linear map
    expected, got = compare(model, batch, lambda model, batch: model(batch.x, batch))
    assert expected.rows[-1] == expected.num_out > got.rows[-1], "it is trimmed"


@pytest.mark.parametrize(("name", "options"), [(name, each) for name, options in OPTIONS.items() for each in options])
def test_options_of_layers_are_exact(name, options, batch):
    check(name, options, "edge_attr" if options.get("edge_dim") else None, batch)
    if name in WEIGHTED:
        check(name, options, "edge_weight", batch)


@pytest.mark.parametrize("aggr", AGGREGATIONS)
@pytest.mark.parametrize("name", ["GCNConv", "SGConv", "TAGConv", "ARMAConv", "GraphConv", "SAGEConv", "LEConv"])
def test_every_aggregation_is_exact(name, aggr, batch):
    check(name, {"aggr": aggr}, None, batch)


def test_several_aggregations_together_are_exact(batch):
    check("SAGEConv", {"aggr": ["mean", "max"]}, None, batch)


@pytest.mark.parametrize("aggr", AGGREGATIONS)
@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_every_aggregation_of_attention_is_exact(name, aggr, batch):
    check(name, {"aggr": aggr, "heads": 2, "concat": False}, None, batch)
