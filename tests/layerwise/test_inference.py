"""Laws of layer-wise inference: the result equals the model's on the whole graph, on any ranks."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.loader
import torch_geometric.nn as gnn
from graphs import random_data, random_hetero
from peers import peer
from rare import rare
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import aggr
from torch_geometric.utils import degree

import salientpp
from salientpp.layerwise.inference import Inference

WIDTH, CLASSES = 6, 5


def graph(dtype: torch.dtype = torch.float32) -> Data:
    """Makes a directed graph with skewed degrees, self-loops, repeated edges, isolated vertices, and weights and attributes of edges."""
    data = random_data(num_vertices=300, num_edges=1500, directed=True)
    generator = torch.Generator().manual_seed(1)
    loops = torch.arange(40)
    data.edge_index = torch.cat([data.edge_index, data.edge_index[:, :30], torch.stack([loops, loops])], dim=1)
    data.x = torch.randn(data.num_nodes, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    data.weight = (torch.rand(data.num_edges, generator=generator, dtype=torch.float64) + 0.1).to(dtype)
    data.edge_attr = torch.randn(data.num_edges, 3, generator=generator, dtype=torch.float64).to(dtype)
    return data


def _pna() -> dict[str, Any]:
    histogram = torch.bincount(degree(graph().edge_index[1], 300).long())
    return {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"], "deg": histogram}


def _basic(kind: type, layers: int = 3, **options: Any) -> torch.nn.Module:
    return kind(WIDTH, 8, layers, CLASSES, **options)


#: name -> function that makes a model, and its edge attributes
MODELS: dict[str, tuple[Any, dict[str, str]]] = {
    "GraphSAGE": (lambda: _basic(gnn.GraphSAGE), {}),
    "GraphSAGE, max, act first": (lambda: _basic(gnn.GraphSAGE, aggr="max", norm="batch_norm", act_first=True), {}),
    "GraphSAGE, layer norm by vertex": (
        lambda: _basic(gnn.GraphSAGE, norm="layer_norm", norm_kwargs={"mode": "node"}),
        {},
    ),
    "GraphSAGE of a pair": (lambda: gnn.GraphSAGE((WIDTH, WIDTH), 8, 2, CLASSES), {}),
    "GCN": (lambda: _basic(gnn.GCN), {}),
    "GCN, improved, weights": (lambda: _basic(gnn.GCN, improved=True), {"edge_weight": "weight"}),
    "GCN without loops, weights": (lambda: _basic(gnn.GCN, add_self_loops=False), {"edge_weight": "weight"}),
    "GCN that does not normalise": (lambda: _basic(gnn.GCN, normalize=False), {}),
    "GCN that keeps weights": (lambda: _basic(gnn.GCN, cached=True), {}),
    "GAT": (lambda: _basic(gnn.GAT, heads=2), {}),
    "GAT, attributes": (lambda: _basic(gnn.GAT, heads=2, edge_dim=3), {"edge_attr": "edge_attr"}),
    "GATv2": (lambda: _basic(gnn.GAT, heads=2, v2=True), {}),
    "GIN": (lambda: _basic(gnn.GIN, norm="batch_norm"), {}),
    "PNA": (lambda: _basic(gnn.PNA, 2, **_pna()), {}),
    "EdgeCNN": (lambda: _basic(gnn.EdgeCNN, 2), {}),
    "one layer": (lambda: _basic(gnn.GraphSAGE, 1), {}),
    "no output layer": (lambda: gnn.GraphSAGE(WIDTH, 8, 2), {}),
    "jk last": (lambda: _basic(gnn.GraphSAGE, jk="last"), {}),
    "jk cat": (lambda: _basic(gnn.GCN, jk="cat"), {}),
    "jk max": (lambda: _basic(gnn.GAT, jk="max"), {}),
    "jk lstm": (lambda: _basic(gnn.GraphSAGE, 2, jk="lstm"), {}),
    "dropout": (lambda: _basic(gnn.GAT, dropout=0.5), {}),
}


class Block(torch.nn.Module):
    """User's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.skip = gnn.GraphConv(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return F.elu(self.conv(x, edge_index)) + self.skip(x)


def layers() -> list[Any]:
    return [
        torch.nn.Linear(WIDTH, 8), torch.relu, gnn.GCNConv(8, 8), gnn.BatchNorm(8), torch.nn.ReLU(), torch.nn.Dropout(0.5), Block(),
        gnn.TransformerConv(8, 4, heads=2), lambda x: x.tanh(), gnn.GraphConv(8, CLASSES), F.log_softmax,
    ]  # fmt: skip


def apply_layers(model: list[Any], data: Data) -> Tensor:
    x = data.x
    for layer in model:
        x = layer(x, data.edge_index) if isinstance(layer, (gnn.MessagePassing, Block)) else layer(x)
    return x


def made(make: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Makes a model whose norms have statistics; in training mode."""
    torch.manual_seed(0)
    model = make()
    for module in model if isinstance(model, list) else [model]:
        for part in module.modules() if isinstance(module, torch.nn.Module) else ():
            part.to(dtype)
            if isinstance(part, torch.nn.BatchNorm1d) and part.track_running_stats:
                part.running_mean.normal_()
                part.running_var.uniform_(0.5, 2)
    return model


@torch.no_grad()
def whole(model: Any, data: Data, names: dict[str, str]) -> Tensor:
    model = copy.deepcopy(model)  # a layer may cache results
    for module in model if isinstance(model, list) else [model]:
        if isinstance(module, torch.nn.Module):
            module.eval()
    if isinstance(model, list):
        return apply_layers(model, data)
    return model(data.x, data.edge_index, **{name: data[key] for name, key in names.items()})


def cases() -> list[tuple[str, Any, dict[str, str]]]:
    return [*((name, make, names) for name, (make, names) in MODELS.items()), ("a list", layers, {})]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*implicit.*log_softmax.*|Implicit dimension.*")
        yield


# --- one process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("name", "make", "names"), cases(), ids=[name for name, _, _ in cases()])
def test_rows_equal_the_whole_graphs(name, make, names, dtype, most):
    data, model = graph(dtype), made(make, dtype)
    got = salientpp.inference(model, data, batch_size=64, **names)
    expected = whole(model, data, names)
    assert got.dtype == dtype and got.shape == expected.shape and not got.requires_grad
    assert (got - expected).abs().max() <= most


def test_the_model_is_unchanged_afterwards():
    data = graph()
    for make in (lambda: _basic(gnn.GCN, norm="batch_norm", cached=True), layers):
        model = made(make)
        modules = [
            part
            for item in (model if isinstance(model, list) else [model])
            if isinstance(item, torch.nn.Module)
            for part in item.modules()
        ]
        modules[-1].eval()  # one module has another mode
        before = [
            (part.training, dict(vars(part)), {k: v.clone() for k, v in part.state_dict().items()}) for part in modules
        ]
        drawn = torch.random.get_rng_state()
        salientpp.inference(model, data)
        assert torch.equal(drawn, torch.random.get_rng_state())
        for part, (training, attributes, state) in zip(modules, before, strict=True):
            assert part.training == training and vars(part).keys() == attributes.keys()
            assert all(torch.equal(value, state[key]) for key, value in part.state_dict().items())
            if isinstance(part, gnn.GCNConv):
                assert part.normalize and part._cached_edge_index is None
    failing = made(lambda: [gnn.SAGEConv(WIDTH + 1, 3)])
    with pytest.raises(ValueError):
        salientpp.inference(failing, data)
    assert failing[0].training


def test_batches_are_bounded_by_vertices_and_by_edges():
    data, seen = graph(), []

    class Seen(gnn.SAGEConv):
        def forward(self, x: Any, edge_index: Tensor) -> Tensor:
            seen.append((int(edge_index[1].max()) + 1 if edge_index.numel() else 0, edge_index.size(1)))
            return super().forward(x, edge_index)

    model = made(lambda: [Seen(WIDTH, 4)])
    several = {}
    for options in ({"batch_size": 50}, {"batch_edges": 64}, {"batch_size": 10, "batch_edges": 64}, {}):
        seen.clear()
        several[str(options)] = salientpp.inference(model, data, **options)
        batches = seen[34:]  # the first calls belong to the trial
        largest = int(degree(data.edge_index[1]).max())
        assert sum(edges for _, edges in batches) == data.num_edges
        assert all(targets <= options.get("batch_size", 1024) for targets, _ in batches)
        assert all(edges <= max(options.get("batch_edges", 2**20), largest) for _, edges in batches)
    first, *others = several.values()
    assert all((first - other).abs().max() < 1e-6 for other in others)


@pytest.mark.parametrize("form", ["SparseTensor", "CSR"])
def test_a_graph_may_be_given_as_adj_t(form):
    data = graph()
    expected = whole(made(MODELS["GCN"][0]), data, {})
    if form == "CSR":
        order = torch.sort(data.edge_index[1], stable=True).indices
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree(data.edge_index[1], 300, torch.int64).cumsum(0)])
        data.adj_t = torch.sparse_csr_tensor(indptr, data.edge_index[0][order], torch.ones(data.num_edges), (300, 300))
    else:
        data.adj_t = peer("torch_sparse").SparseTensor.from_edge_index(data.edge_index, sparse_sizes=(300, 300)).t()
    del data.edge_index
    assert (salientpp.inference(made(MODELS["GCN"][0]), data) - expected).abs().max() < 1e-5
    data.adj_t = data.adj_t * 2 if form == "CSR" else data.adj_t.set_value(torch.full((data.num_edges,), 2.0), "coo")
    with pytest.raises(ValueError, match="data.adj_t has values other than 1"):
        salientpp.inference(made(MODELS["GCN"][0]), data)


def test_features_in_another_dtype_are_converted_on_request():
    data, model = graph(), made(MODELS["GraphSAGE"][0])
    data.x = data.x.half()
    with pytest.raises(
        ValueError,
        match=r"layer 0 \(SAGEConv, ReLU\) cannot be applied to rows of torch.float16 \[6\] \(dtype= converts x\)",
    ):
        salientpp.inference(model, data)
    got = salientpp.inference(model, data, dtype=torch.float32)
    data.x = data.x.float()
    assert (got - whole(model, data, {})).abs().max() < 1e-5


def test_features_may_be_ids():
    data, model = graph(), made(lambda: [torch.nn.Embedding(9, 8), gnn.SAGEConv(8, 4)])
    for x in (torch.arange(300) % 9, (torch.arange(300) % 9).int()):
        data.x = x
        got = salientpp.inference(model, data, batch_size=64)
        assert (got - model[1](model[0](x), data.edge_index)).abs().max() < 1e-5


def sparse_graph() -> Data:
    """Makes a graph in which most vertices have no or one in-neighbour: the first two, the last twenty, and some between."""
    generator = torch.Generator().manual_seed(2)
    source, target = torch.randint(40, (2, 30), generator=generator)
    target = target % 18 + 2
    # PyG's quantiles fail on a whole graph whose first vertex has no in-neighbours.
    edge_index = torch.cat([torch.stack([source, target]), torch.tensor([[5, 9], [0, 0]])], dim=1)
    return Data(x=torch.randn(40, 4, generator=generator), edge_index=edge_index)


AGGREGATIONS: dict[str, Any] = {
    **{name: lambda name=name: name for name in ("sum", "mean", "min", "max", "mul", "var", "std", "median")},
    "quantiles": lambda: aggr.QuantileAggregation([0.1, 0.5, 1.0]),
    "lower quantile": lambda: aggr.QuantileAggregation(0.5, "lower", fill_value=3.0),
    "higher quantile": lambda: aggr.QuantileAggregation(0.9, "higher"),
    "nearest quantile": lambda: aggr.QuantileAggregation(0.9, "nearest"),
    "softmax": lambda: aggr.SoftmaxAggregation(learn=True),
    "power mean": lambda: aggr.PowerMeanAggregation(learn=True),
    "several": lambda: ["mean", "median", "std"],
    "attention over several": lambda: aggr.MultiAggregation(
        ["mean", "median"], mode="attn", mode_kwargs={"in_channels": 4, "out_channels": 4, "num_heads": 2}
    ),
    "scaled by degree": lambda: aggr.DegreeScalerAggregation(
        ["mean", "median"], ["identity", "amplification", "attenuation", "linear"], torch.tensor([20, 10, 10])
    ),
    "attention": lambda: aggr.AttentionalAggregation(torch.nn.Linear(4, 1)),
    "deep sets": lambda: aggr.DeepSetsAggregation(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)),
    "variance preserving": lambda: aggr.VariancePreservingAggregation(),
    "set2set": lambda: aggr.Set2Set(4, 2),
}


@pytest.mark.parametrize("batch_size", [1, 3, 40])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_vertices_without_in_neighbours_equal_the_whole_graph(name, batch_size):
    torch.manual_seed(0)
    data, conv = sparse_graph(), gnn.SimpleConv(AGGREGATIONS[name]()).eval()
    before = [{**vars(module)} for module in conv.modules()]
    with torch.no_grad():
        expected = conv(data.x, data.edge_index)
    found = salientpp.inference([conv], data, batch_size=batch_size)
    assert torch.allclose(found, expected, atol=1e-5)
    assert [vars(module).keys() for module in conv.modules()] == [each.keys() for each in before]


def test_functions_may_write_in_place():
    data, model = graph(), made(lambda: [torch.tanh_, gnn.SAGEConv(WIDTH, 8), torch.relu_, gnn.GraphConv(8, 4)])
    expected = model[3](model[1](data.x.tanh(), data.edge_index).relu(), data.edge_index)
    before = data.x.clone()
    assert (salientpp.inference(model, data, batch_size=64) - expected).abs().max() < 1e-5
    assert torch.equal(data.x, before)
    model = made(lambda: _basic(gnn.GraphSAGE, act=torch.relu_, jk="cat"))
    assert (salientpp.inference(model, data, batch_size=64) - whole(model, data, {})).abs().max() < 1e-5


def test_compiled_models_run_as_they_are_written():
    data, model = graph(), made(MODELS["GraphSAGE"][0])
    assert (salientpp.inference(torch.compile(model), data) - whole(model, data, {})).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [gnn.APPNP(2, 0.1)], r"layer 0 \(APPNP\) .* holds APPNP, which passes rows on over several hops"),
        (lambda: [gnn.ChebConv(WIDTH, 4, 3)], "holds ChebConv, which passes rows on over several hops"),
        (lambda: [gnn.SAGEConv(WIDTH, 4), gnn.SGConv(4, 4, K=2)], r"layer 1 \(SGConv\)"),
        (lambda: [gnn.TAGConv(WIDTH, 4)], "holds TAGConv"),
        (lambda: [gnn.ARMAConv(WIDTH, 4)], "holds ARMAConv"),
        (lambda: [gnn.SAGEConv(WIDTH, 4, aggr="lstm")], r"layer 0 \(SAGEConv\) .*sorted"),
        (lambda: [gnn.GCNConv(WIDTH, 4), gnn.GraphNorm(4)], "on the whole graph. It holds GraphNorm, "),
        (lambda: [gnn.SAGEConv(WIDTH, 4), gnn.GraphNorm(4)], "holds GraphNorm, which normalises over all vertices of a graph"),
        (lambda: _basic(gnn.GraphSAGE, norm="pair_norm"), "holds PairNorm, which normalises over all vertices"),
        (lambda: _basic(gnn.GraphSAGE, norm="layer_norm"), "holds LayerNorm, .* unless mode='node'"),
        (lambda: _basic(gnn.GraphSAGE, norm="instance_norm"), "holds InstanceNorm"),
        (lambda: [torch.nn.BatchNorm1d(WIDTH, track_running_stats=False), gnn.SAGEConv(WIDTH, 4)], r"layer 0 \(BatchNorm1d, SAGEConv\)"),
        (lambda: [gnn.Sequential("x, e", [(gnn.GCNConv(WIDTH, 4), "x, e -> x")])], "holds GCNConv, which divides by degrees .*unless it is itself"),
        (lambda: gnn.Sequential("x, e", [(gnn.GraphConv(WIDTH, 4), "x, e -> x"), (gnn.GraphConv(4, 4), "x, e -> x")]), "pass a list of its layers"),
        (lambda: [lambda x, edge_index: F.dropout(x)], r"layer 0 \(<lambda>\) .*call eval\(\) first"),
        (lambda: [gnn.GCN2Conv(WIDTH, 0.1)], r"layer 0 \(GCN2Conv\) cannot be applied .*missing 1 required positional argument"),
        (lambda: [lambda x: x + x[x.abs().sum(1).argmax()], gnn.SAGEConv(WIDTH, 4)], r"layer 0 \(<lambda>, SAGEConv\) cannot be computed"),
        (lambda: [lambda x, edge_index: x[:3]], "must return one row per vertex, expected 24, got 3"),
        (lambda: [gnn.SAGEConv(WIDTH + 1, 4)], r"layer 0 \(SAGEConv\) cannot be applied to rows of torch.float32 \[6\]"),
        (lambda: torch.nn.Linear(WIDTH, 4), r"at least one layer that takes \(x, edge_index\), got none"),
        (lambda: [gnn.SAGEConv(WIDTH, 4), 3], "layers must be modules or functions, got int at place 1"),
    ],
)  # fmt: skip
def test_layers_that_need_more_than_one_hop_are_refused_by_name(make, words):
    with pytest.raises((ValueError, TypeError), match=f"(?s){words}"):
        salientpp.inference(made(make), graph())


def test_a_layer_without_use_for_edge_attributes_is_told_how_to_get_none():
    layers = [gnn.GATConv(WIDTH, 4, edge_dim=3), gnn.ResGatedGraphConv(4, 4)]
    data = graph()
    data.attr = torch.rand(data.num_edges, 3)
    words = r"layer 1 \(ResGatedGraphConv\) .* with edge_attr \(a function of \(x, edge_index\) in place of a layer gets none\)"
    with pytest.raises(ValueError, match=words):
        salientpp.inference(layers, data, edge_attr="attr")
    without = [layers[0], lambda x, edge_index: layers[1](x, edge_index)]
    assert salientpp.inference(without, data, edge_attr="attr").shape == (data.num_nodes, 4)


class Passing(gnn.GATConv):
    """Layer of the user's, whose forward passes further arguments on."""

    def forward(self, x: Tensor, edge_index: Tensor, **more: Any) -> Any:
        return super().forward(x, edge_index, **more)


def test_a_layer_that_passes_arguments_on_gets_the_attributes_that_its_base_class_takes():
    draw = torch.Generator().manual_seed(0)
    data = Data(x=torch.randn(24, 4, generator=draw), edge_index=torch.randint(24, (2, 90), generator=draw))
    data.edge_attr = torch.rand(90, 3, generator=draw)
    first, second = gnn.GATConv(4, 4, edge_dim=3).eval(), Passing(4, 4, edge_dim=3).eval()
    with torch.no_grad():
        expected = second(first(data.x, data.edge_index, data.edge_attr), data.edge_index, edge_attr=data.edge_attr)
    torch.testing.assert_close(salientpp.inference([first, second], data, edge_attr="edge_attr"), expected)


def test_a_layer_whose_forward_was_wrapped_gets_the_attributes_that_its_class_takes():
    layer, data = gnn.GENConv(WIDTH, 4, edge_dim=3), graph()
    data.attr = torch.rand(data.num_edges, 3)
    expected = layer.eval()(data.x, data.edge_index, data.attr).detach().sin()
    layer.forward = lambda *args, old=layer.forward, **kwargs: old(*args, **kwargs).sin()
    torch.testing.assert_close(salientpp.inference([layer], data, edge_attr="attr"), expected)


def scaled(factor: float) -> gnn.SAGEConv:
    layer = gnn.SAGEConv(WIDTH, 4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(factor)
    return layer


#: Functions of all rows that a batch computes from its own rows.
MIXING: dict[str, Any] = {
    "mean": lambda r: r - r.mean(0),
    "root mean square": lambda r: r / r.square().mean(0).sqrt(),
    "one column only": lambda r: torch.cat([r[:, :3], r[:, 3:] - r[:, 3:].mean(0)], 1),
    "one row only": lambda r: torch.cat([r[:1] + r.mean(0), r[1:]]),
}

#: What may hide such a function: a step of rows, from the function.
AROUND: dict[str, Any] = {
    "small rows": lambda mix: lambda r: mix(r) * 1e-4,
    "tiny rows": lambda mix: lambda r: mix(r) * 1e-20,
    "huge rows": lambda mix: lambda r: mix(r) * 1e20,
    "beside larger columns": lambda mix: lambda r: torch.cat([r * 1e4, mix(r)], 1),
    "small differences of large rows": lambda mix: lambda r: mix(r) * 0.1 + 1000,
    "a column of infinities": lambda mix: lambda r: torch.cat([mix(r) * 1e-4, torch.full_like(r[:, :1], torch.inf)], 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("mixing", MIXING)
def test_a_layer_that_reads_all_rows_is_refused_whatever_the_size_of_its_rows(mixing, around, dtype):
    model = made(lambda: [gnn.SAGEConv(WIDTH, 4), AROUND[around](MIXING[mixing])], dtype)
    with pytest.raises(ValueError, match=r"layer 0 \(SAGEConv, .*gives other rows in batches than on the whole graph"):
        salientpp.inference(model, graph(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1e-30, 1e-4, 1, 1e4, 1e30])
def test_a_model_of_one_hop_is_taken_whatever_the_size_of_its_rows(factor, dtype):
    if dtype == torch.float16:
        factor = min(max(factor, 1e-4), 1e4)
    data = graph(dtype)
    cancelling = lambda r: torch.cat([r, r @ torch.ones(4, 1, dtype=r.dtype) - r.sum(1, keepdim=True)], 1)  # noqa: E731
    for rest in ([], [cancelling], [lambda r: r * 0 + 7], [lambda r: (r - 1e3).relu()], [lambda r: r / r * torch.nan]):
        model = made(lambda rest=rest: [scaled(factor), *rest], dtype)
        with torch.no_grad():
            expected = apply_layers(model, data)
        got = salientpp.inference(model, data, batch_size=64)
        largest = expected.nan_to_num().abs().max()
        most = 50 * torch.finfo(dtype).eps * max(float(largest), torch.finfo(dtype).tiny)
        assert torch.allclose(got.double(), expected.double(), rtol=0, atol=most, equal_nan=True)


@pytest.mark.parametrize(
    "hidden",
    [
        lambda r: F.relu(r - 100) - F.relu(r - 100).mean(0),  # rows of size 1 give 0
        lambda r: r / (r.abs().mean(0) + 1e6),
        lambda r: torch.where(r > 100, r.mean(0), r),
    ],
)
def test_a_layer_is_tried_with_rows_of_the_data(hidden):
    data, model = graph(), made(lambda: [gnn.SAGEConv(WIDTH, 4), hidden])
    salientpp.inference(model, data)
    data.x = data.x * 1e4
    with pytest.raises(ValueError, match="gives other rows in batches"):
        salientpp.inference(model, data)


def test_a_layer_is_tried_with_valid_ids():
    data, steps = graph(), [torch.nn.Embedding(9, 8), gnn.SAGEConv(8, 4)]
    data.x = 2 + torch.arange(300) % 7
    summed = lambda rows: torch.where(rows > 1, rows.sum() % 9, rows)  # noqa: E731
    with pytest.raises(ValueError, match="gives other rows in batches"):
        salientpp.inference([summed, *steps], data)


def test_complex_rows_are_compared_up_to_rounding():
    data, root = graph(torch.float64), torch.randn(WIDTH, 7, dtype=torch.complex128)
    layer = lambda x, edge_index: gnn.SimpleConv("sum")(x, edge_index) @ root  # noqa: E731
    data.x = data.x.to(torch.complex128)
    assert salientpp.inference([layer], data, batch_size=64).is_complex()
    with pytest.raises(ValueError, match="gives other rows in batches"):
        salientpp.inference([layer, lambda r: 1e-9 * (r - r.mean(0))], data)


class OwnForward(gnn.GCN):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index)


class KeywordForward(gnn.GCN):
    def forward(self, x: Tensor, edge_index: Tensor, **named: Any) -> Tensor:
        return super().forward(x, edge_index, **named)


class EpochForward(gnn.GCN):
    def forward(self, x: Tensor, edge_index: Tensor, epoch: int) -> Tensor:
        return super().forward(x, edge_index)


def test_a_forward_of_a_subclass_gets_what_it_takes():
    data = graph()
    own, keywords = made(lambda: _basic(OwnForward)), made(lambda: _basic(KeywordForward))
    assert (salientpp.inference(own, data) - whole(own, data, {})).abs().max() < 1e-5
    for names in ({}, {"edge_weight": "weight"}):
        assert (salientpp.inference(keywords, data, **names) - whole(keywords, data, names)).abs().max() < 1e-5
    with pytest.raises(ValueError, match="edge_weight='weight' is given, but no layer of the model takes edge_weight"):
        salientpp.inference(own, data, edge_weight="weight")
    words = r"EpochForward.forward cannot be called with x, edge_index, edge_weight|EpochForward.forward cannot be called with x, edge_index: TypeError"
    with pytest.raises(ValueError, match=words):
        salientpp.inference(made(lambda: _basic(EpochForward)), data)


class Doubled(gnn.GraphSAGE):
    """Model with an operation between its layers that is in none of the layers."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return 2 * super().forward(x, edge_index)


def test_a_model_with_its_own_forward_is_refused():
    with pytest.raises(ValueError, match="(?s)Doubled.forward .*does not just apply its layers in order"):
        salientpp.inference(made(lambda: _basic(Doubled)), graph())


def test_wrong_arguments_raise_a_clear_error():
    data, model = graph(), made(MODELS["GraphSAGE"][0])
    for error, words, options in [
        (TypeError, "graph with one type, got a HeteroData with several", {"data": random_hetero()}),
        (TypeError, "data must be", {"data": 3}),
        (TypeError, "model must be one of PyG's basic models", {"model": 3}),
        (ValueError, "inference begins with x", {"data": Data(edge_index=data.edge_index, num_nodes=300)}),
        (ValueError, "batch_size must be an integer >= 1", {"batch_size": 0}),
        (ValueError, "batch_edges must be an integer >= 1", {"batch_edges": 0}),
        (ValueError, "edge_weight='weight' is given, but no layer of the model takes edge_weight", {"edge_weight": "weight"}),
        (ValueError, "edge_weight must be the name of an edge attribute, .*got 'w'; the data has .*weight", {"edge_weight": "w"}),
        (ValueError, "edge_attr must be the name of an edge attribute, a tensor with 1570 rows, got 'y'", {"edge_attr": "y"}),
        (ValueError, "replication_factor must be >= 0", {"replication_factor": -1}),
        (ValueError, "device must be", {"device": "nowhere"}),
        (ValueError, "the folder /dev/null/x cannot be created", {"out": "/dev/null/x"}),
    ]:  # fmt: skip
        with pytest.raises(error, match=words):
            salientpp.inference(**{"model": model, "data": data, **options})


def test_a_partitioned_graph_of_several_types_is_refused(tmp_path):
    salientpp.partition(random_hetero(), 2, tmp_path / "parts", [2, 2], 8, split={"paper": {"train": torch.arange(60)}})
    with pytest.raises(TypeError, match="graph with one type, got a PartitionedGraph with several"):
        salientpp.inference(made(MODELS["GraphSAGE"][0]), salientpp.load(tmp_path / "parts", part_id=0))


def test_rows_are_written_on_request(tmp_path):
    data, model = graph(), made(MODELS["GraphSAGE"][0])
    got = salientpp.inference(model, data, out=tmp_path / "some" / "rows")
    assert np.array_equal(np.load(tmp_path / "some" / "rows" / "part-00000.npy"), got.numpy())
    assert [file.name for file in (tmp_path / "some" / "rows").iterdir()] == ["part-00000.npy"]
    with pytest.raises(ValueError, match="rows of torch.bfloat16 cannot be written"):
        salientpp.inference([*layers_of_sage(), lambda x: x.bfloat16()], data, out=tmp_path)


def layers_of_sage() -> list[Any]:
    return made(lambda: [gnn.SAGEConv(WIDTH, 4)])


def test_a_progress_bar_counts_batches_of_all_layers(capsys):
    data, model = graph(), made(MODELS["GraphSAGE"][0])
    salientpp.inference(model, data, batch_size=100)
    assert capsys.readouterr().err == ""
    salientpp.inference(model, data, batch_size=100, progress=salientpp.ProgressBar())
    assert "inference: 100%" in (shown := capsys.readouterr().err) and "9/9" in shown


# --- ranks -------------------------------------------------------------------------------------------------


def _partition(root: Path, num_parts: int, **options: Any) -> str:
    salientpp.partition(graph(), num_parts, root, [-1], 32, **options)
    return str(root)


def _own(part: salientpp.PartitionedGraph) -> Tensor:
    """Returns the ids of this rank's vertices in the user's data."""
    return part.original_id(part.split("all"))


def _infer(model: Any, part: salientpp.PartitionedGraph, **options: Any) -> tuple[Tensor, Inference]:
    """Returns the rows, and the call."""
    calls = []
    run = Inference.run

    def noted(call: Inference) -> Tensor:
        calls.append(call)
        return run(call)

    Inference.run = noted
    try:
        return salientpp.inference(model, part, **options), calls[0]
    finally:
        Inference.run = run


def _every_model(rank: int, root: str, out: str) -> dict[str, float]:
    warnings.filterwarnings("ignore", message="Implicit dimension.*")
    part, data = salientpp.load(root), graph()
    far = {}
    for number, (name, make, names) in enumerate(cases()):
        model = made(make)
        options = {
            "replication_factor": 0.2 * (number % 3),
            "num_workers": number % 2,
            "batch_edges": 100,
            "batch_size": 40,
        }
        got = salientpp.inference(model, part, **options, **names)
        expected = whole(model, data, names)[_own(part)]
        assert got.shape == expected.shape and got.dtype == expected.dtype, name
        scale = max(1.0, float(expected.abs().max())) if got.numel() else 1.0
        far[name] = float((got - expected).abs().max()) / scale if got.numel() else 0.0
    sage = made(MODELS["GraphSAGE"][0])
    got = salientpp.inference(DistributedDataParallel(sage), part, out=out)
    dist.barrier()
    for part_id in range(part.num_parts):
        of_part = salientpp.load(root, part_id=part_id)
        rows = torch.from_numpy(np.load(f"{out}/part-{part_id:05d}.npy"))
        far[f"file {part_id}"] = float((rows - whole(sage, data, {})[_own(of_part)]).abs().max())
        assert part_id != part.part_id or torch.equal(rows, got)
    return far


@pytest.mark.parametrize(("num_parts", "world_size"), [(2, 2), (1, 2), *rare((1, 1), (4, 4), (2, 4))])
def test_ranks_give_the_rows_of_the_whole_graph(tmp_path, num_parts, world_size):
    root = _partition(tmp_path / "parts", num_parts)
    for far in distributed.run(_every_model, world_size, root, str(tmp_path / "rows")):
        assert len(far) == len(cases()) + num_parts
        assert {name: value for name, value in far.items() if value > 1e-5} == {}


def _count(rank: int, root: str) -> dict[float, tuple[list[tuple[int, int, int]], list[int]]]:
    part, counted = salientpp.load(root), {}
    for alpha in (0.0, 0.3, 9.0):
        model = made(lambda: _basic(gnn.GraphSAGE, aggr="max"))  # a maximum runs in batches
        _, call = _infer(model, part, batch_size=20, replication_factor=alpha)
        rows = [(stats.rows_remote, stats.rows_cache, stats.rows) for stats in call.stats]
        counted[alpha] = rows, [stats.batches for stats in call.stats]
    return counted


def test_a_layer_fetches_only_remote_in_neighbours_of_its_batches(tmp_path):
    root = _partition(tmp_path / "parts", 2)
    for rank, counted in enumerate(distributed.run(_count, 2, root)):
        part = salientpp.load(root, part_id=rank)
        begin, end = part.book.range_of(rank)
        needed = []
        for first in range(begin, end, 20):
            last = min(first + 20, end)
            sources = part.graph.indices[int(part.graph.indptr[first]) : int(part.graph.indptr[last])].tolist()
            needed.append({*sources, *range(first, last)})
        outside = [{v for v in of_batch if not begin <= v < end} for of_batch in needed]
        times = {v: sum(v in of_batch for of_batch in outside) for v in set().union(*outside)}
        # Rows that several batches need are worth caching; among equals the lower id.
        ranked = sorted((v for v in times if times[v] > 1), key=lambda v: (-times[v], v))
        for alpha, (rows, batches) in counted.items():
            hits = sum(times[v] for v in ranked[: int(alpha * part.num_vertices / 2)])
            assert rows == [(sum(times.values()) - hits, hits, sum(map(len, needed)))] * 3
            assert batches == [len(needed)] * 3
        assert counted[0.0][0][0][1] == 0 < counted[0.3][0][0][1] < counted[9.0][0][0][1]
        assert counted[9.0][0][0][0] == sum(count == 1 for count in times.values()) > 0


def _uneven(rank: int, root: str) -> float:
    part, data = salientpp.load(root), graph()
    worst = 0.0
    for name in ("GraphSAGE", "jk cat", "GAT"):
        model = made(MODELS[name][0])
        got = salientpp.inference(model, part, batch_size=7, replication_factor=0.5)
        expected = whole(model, data, {})[_own(part)]
        assert got.shape == expected.shape
        worst = max(worst, float((got - expected).abs().max()) if got.numel() else 0.0)
    return worst


@pytest.mark.parametrize("sizes", [[299, 1], [0, 300, 0]])
def test_parts_may_differ_in_size_and_be_empty(tmp_path, sizes):
    assignment = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    root = _partition(tmp_path / "parts", len(sizes), method=assignment, split={"train": torch.arange(300)})
    assert max(distributed.run(_uneven, len(sizes), root)) <= 1e-5


def _fail(rank: int, root: str, out: str) -> dict[str, str]:
    """Returns the error for each of several mistakes of rank 1. After each, inference works."""
    part, expected = salientpp.load(root), whole(made(MODELS["GraphSAGE"][0]), graph(), {})
    said = {}
    for how in MISTAKES:
        model: Any = made(MODELS["GraphSAGE"][0])
        options: dict[str, Any] = {"batch_size": 50, "out": out if how == "file" else None}
        if rank == 1 and how == "model":
            model = [gnn.APPNP(2, 0.1)]
        elif rank == 1 and how == "layers":
            model = made(lambda: _basic(gnn.GraphSAGE, 2))
        elif rank == 1 and how == "parameters":
            model.convs[1].lin_l.weight.data[0, 0] += 1
        elif rank == 1 and how == "buffers":
            model.register_buffer("count", torch.ones(1))
        elif rank == 1 and how == "argument":
            options["batch_size"] = 40
        elif rank == 1 and how == "layer":
            model.convs[1].register_forward_hook(_fail_at(38))  # the trial makes 36 calls
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and how == "file":
                patch.setattr("salientpp.layerwise.parts.written_whole", _no_space)
            try:
                salientpp.inference(model, part, **options)
            except Exception as error:
                said[how] = f"{type(error).__name__}: {error}"
        got = salientpp.inference(made(MODELS["GraphSAGE"][0]), part)
        assert (got - expected[_own(part)]).abs().max() < 1e-5, how
    return said


def _fail_at(call: int) -> Any:
    calls = []

    def hook(*_: Any) -> None:
        calls.append(0)
        if len(calls) == call:
            raise ArithmeticError("the user's own")

    return hook


def _no_space(path: Path, write: Any) -> Any:
    raise OSError(f"{path} cannot be written (No space left on device)")


#: Mistake of rank 1 -> errors of ranks 0 and 1.
MISTAKES = {
    "model": (
        r"ValueError: rank 1 could not run a layer: ValueError: layer 0 \(APPNP\) ",
        r"ValueError: layer 0 \(APPNP\) ",
    ),
    "layers": (r"ValueError: all ranks must have the same layers, got \['SAGEConv, ReLU', .* on rank 1",) * 2,
    "parameters": ("ValueError: all ranks must have the same parameters of the model",) * 2,
    "buffers": ("ValueError: all ranks must have the same buffers of the model .*broadcast",) * 2,
    "argument": ("ValueError: all ranks must have the same batch_size, got 50 on rank 0 and 40 on rank 1",) * 2,
    "layer": (
        # Rank 0 may have all rows that its batches need before rank 1 fails.
        r"(StageError: rank 0, batch \d, stage \w+|RankFailure): rank 1, batch 1, stage assemble: layer 1 \(SAGEConv, ReLU\) failed "
        "for .*: ArithmeticError: the user's own",
        r"StageError: rank 1, batch 1, stage assemble: layer 1 \(SAGEConv, ReLU\) failed for .*: ArithmeticError: the user's own",
    ),
    "file": ("RuntimeError: rank 1 could not end layer 2: OSError: .*part-00001.npy cannot be written", "OSError: "),
}


def test_a_failure_on_one_rank_raises_on_every_rank(tmp_path):
    both = distributed.run(_fail, 2, _partition(tmp_path / "parts", 2), str(tmp_path / "rows"))
    for rank, said in enumerate(both):
        for how, expected in MISTAKES.items():
            assert re.match(expected[rank], said[how]), (rank, how, said[how])


def _in_groups(rank: int, root: str) -> float:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, worst = groups[rank % 2], 0.0
    part = salientpp.load(root, process_group=group)
    for name in [["GAT"], ["GraphSAGE", "GIN", "GCN"]][rank % 2]:  # groups run at different speeds
        model = made(MODELS[name][0])
        got = salientpp.inference(model, part, process_group=group, batch_size=50)
        worst = max(worst, float((got - whole(model, graph(), {})[_own(part)]).abs().max()))
    dist.barrier()
    return worst


def test_process_groups_infer_independently(tmp_path):
    assert max(distributed.run(_in_groups, 4, _partition(tmp_path / "parts", 2))) <= 1e-5


def _watch(rank: int, root: str) -> tuple[int, int, str]:
    """Returns the largest number of rows of any tensor during inference, and the text of the progress bar."""
    import contextlib
    import io

    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dim() == 2 and out.size(1) in (8, CLASSES):
                Largest.rows = max(Largest.rows, out.size(0))
            return out

    part, shown = salientpp.load(root), io.StringIO()
    with contextlib.redirect_stderr(shown), Largest():
        salientpp.inference(
            made(MODELS["GraphSAGE"][0]), part, batch_size=4, batch_edges=64, progress=salientpp.ProgressBar()
        )
    return Largest.rows, part.book.size_of(part.part_id), shown.getvalue()


def test_no_rank_holds_all_rows_and_rank_0_shows_progress(tmp_path):
    first, second = distributed.run(_watch, 2, _partition(tmp_path / "parts", 2))
    for most, size, _ in (first, second):
        assert most == size < 200, "the rows of a part are the largest tensor"
    assert "inference: 100%" in first[2] and second[2] == ""


# --- PyG's own inference, on our loaders ------------------------------------------------------------------


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("name", ["GraphSAGE", "GCN", "GAT", "GATv2", "GIN", "PNA", "EdgeCNN", "jk last"])
def test_models_of_pyg_infer_over_our_loaders_as_over_pygs(name, cache, capsys):
    peer("pyg_lib")
    data, model = graph(), made(MODELS[name][0]).eval()
    found = []
    for loaders in (torch_geometric.loader, salientpp):
        loader = loaders.NeighborLoader(copy.copy(data), [-1], batch_size=64)
        options = {"cache": cache, "progress_bar": True, "embedding_device": "cpu", "device": "cpu"}
        found.append(model.inference(loader, **options))
        assert f"{5 * model.num_layers}/{5 * model.num_layers}" in capsys.readouterr().err
        batch = next(iter(loader))
        found.append(model.inference_per_layer(0, batch.x, batch.edge_index, batch.batch_size))
    assert (found[0] - found[2]).abs().max() < 1e-6 and (found[1] - found[3]).abs().max() < 1e-6
    if "GCN" in name:
        # PyG's inference counts the degrees of the sources in the batch. Ours counts them in the whole graph.
        assert (found[0] - whole(model, data, {})).abs().max() > 1e-2
    else:
        assert (found[2] - whole(model, data, {})).abs().max() < 1e-5


def test_pygs_models_name_mistakes_in_our_loaders():
    """The errors are PyG's assertions; the same ones fail on PyG's loaders."""
    data, model = graph(), made(MODELS["GraphSAGE"][0]).eval()
    with pytest.raises(AssertionError):
        model.inference(salientpp.NeighborLoader(data, [-1, -1]))
