"""Laws of PyG's models when trimmed: with normalisations, JumpingKnowledge and dropout, results are exact or as the option says."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from rare import rare
from trimmed import WIDTH, batch_of, compare, graph, step, within

import salientpp

CLASSES = 3
MODELS = {
    "GraphSAGE": lambda **options: pyg.GraphSAGE(WIDTH, 8, 3, CLASSES, **options),
    "GCN": lambda **options: pyg.GCN(WIDTH, 8, 3, CLASSES, **options),
    "GIN": lambda **options: pyg.GIN(WIDTH, 8, 3, CLASSES, **options),
    "GAT": lambda **options: pyg.GAT(WIDTH, 8, 3, CLASSES, heads=2, **options),
    "GATv2": lambda **options: pyg.GAT(WIDTH, 8, 3, CLASSES, heads=2, v2=True, **options),
    "EdgeCNN": lambda **options: pyg.EdgeCNN(WIDTH, 8, 3, CLASSES, **options),
    "PNA": lambda **options: pyg.PNA(
        WIDTH,
        8,
        3,
        CLASSES,
        aggregators=["mean", "std"],
        scalers=["amplification"],
        deg=torch.tensor([1, 5, 9, 3]),
        **options,
    ),
}
NORMS = {
    None: (None, None),
    "batch": ("batch_norm", None),
    "layer": ("layer_norm", {"mode": "node"}),
    "layer over the graph": ("layer_norm", None),
    "graph": ("graph_norm", None),
    "pair": ("pair_norm", None),
    "diff_group": ("diff_group_norm", {"groups": 3}),
    "instance": ("instance_norm", None),
}
#: Normalisations of each row separately. The layers of EdgeCNN and GIN hold normalisations themselves.
ROW_WISE = {None, "layer"}
JK = ["cat", "max", "lstm"]


@pytest.fixture(scope="module")
def batch():
    return batch_of(graph(2))


def made(name: str, norm: str | None = None, jk: str | None = None, **options) -> torch.nn.Module:
    torch.manual_seed(1)
    kind, arguments = NORMS[norm]
    return MODELS[name](norm=kind, norm_kwargs=arguments, jk=jk, **options).double()


def norms_inside(model: torch.nn.Module) -> bool:
    return any(
        isinstance(module, (torch.nn.BatchNorm1d, pyg.BatchNorm)) for conv in model.convs for module in conv.modules()
    )


def covering(*axes: Any) -> list[Any]:
    """Returns test parameters: all combinations of the values. The half whose places have an even sum are no rare tests."""
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = tuple(axis[place] for axis, place in zip(axes, places, strict=True))
        found += [values] if sum(places) % 2 == 0 else rare(values)
    return found


@pytest.mark.parametrize(("name", "norm", "training"), covering([*MODELS], [*NORMS], [True, False]))
def test_normalisations_over_all_rows_see_all_rows(name, norm, training, batch):
    model = made(name, norm).train(training)
    _, got = compare(model, batch)
    if norm in ROW_WISE and not (training and norms_inside(model)):
        assert got.rows == [within(batch, 2), within(batch, 1), within(batch, 0)]
        assert got.num_out == batch.batch_size
    elif name != "EdgeCNN":  # its last layer normalises messages
        assert got.rows[-1] == batch.batch_size


@pytest.mark.parametrize(("name", "norm", "jk"), covering([*MODELS], [None, "batch"], JK))
def test_jumping_knowledge_gets_the_rows_of_the_last_layer(name, norm, jk, batch):
    model = made(name, norm, jk)
    _, got = compare(model, batch)
    if norm is None and not norms_inside(model):
        assert got.rows == [within(batch, 2), within(batch, 1), within(batch, 0)]


@pytest.mark.parametrize(("name", "norm"), covering([*MODELS], ["batch", "graph", "pair", "diff_group", "instance"]))
def test_only_needed_rows_are_normalised_on_request(name, norm, batch):
    model = salientpp.nn.trim(made(name, norm), norms="needed rows")
    got = step(model, batch)
    assert got.rows[-3:] == [within(batch, 2), within(batch, 1), within(batch, 0)]
    assert got.out.isfinite().all()
    assert all(value.isfinite().all() for value in got.tensors.values() if value is not None)


@pytest.mark.parametrize("value", [lambda h: 1.01 ** len(h), lambda h: 1.01], ids=["number of rows", "constant"])
def test_needed_rows_warn_of_numbers_of_rows_whose_use_is_unknown(value, batch):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = torch.nn.ModuleList(pyg.SAGEConv(batch.num_features, batch.num_features) for _ in range(2))

        def forward(self, x, edge_index):
            h = self.convs[0](x, edge_index)
            return self.convs[1](h * value(h), edge_index)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = salientpp.nn.trim(Model().to(batch.x.dtype), norms="needed rows")
        for _ in range(2):
            model(batch.x, batch.edge_index)
    said = [str(each.message) for each in caught if "whose use is unknown" in str(each.message)]
    assert len(said) == (value(batch.x) != 1.01)


class Centred(torch.nn.Module):
    """Network that reads all rows."""

    def __init__(self, columns: int, out: int) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(columns, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x - x.mean(0))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: pyg.EdgeConv(Centred(2 * WIDTH, WIDTH)),
        lambda: pyg.GINConv(Centred(WIDTH, WIDTH)),
        lambda: pyg.GINConv(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, WIDTH))
        ),
        lambda: pyg.PointNetConv(Centred(WIDTH + 3, WIDTH), Centred(WIDTH, WIDTH)),
    ],
)
def test_networks_inside_layers_may_read_all_rows(layer, batch):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = torch.nn.ModuleList([layer(), layer()])

        def forward(self, x, pos, edge_index):
            for each in self.layers:
                x = each(x, pos, edge_index) if isinstance(each, pyg.PointNetConv) else each(x, edge_index)
            return x

    compare(Model().double(), batch, lambda model, batch: model(batch.x, batch.pos, batch.edge_index))


def test_running_statistics_are_counted_once(batch):
    model = made("GraphSAGE", "batch")
    expected, got = compare(model, batch)
    counted = [name for name in got.tensors if name.endswith("num_batches_tracked")]
    assert counted and all(got.tensors[name] == 1 == expected.tensors[name] for name in counted)


def test_without_running_statistics_evaluation_normalises_all_rows(batch):
    torch.manual_seed(1)
    model = pyg.GraphSAGE(WIDTH, 8, 2, CLASSES, norm=torch.nn.BatchNorm1d(8, track_running_stats=False)).double()
    compare(model.eval(), batch)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_repeats_with_torchs_seed(name, batch):
    model = salientpp.nn.trim(made(name, dropout=0.5))
    torch.manual_seed(4)
    first = step(model, batch)
    torch.manual_seed(4)
    second = step(model, batch)
    assert torch.equal(first.out, second.out)
    assert first.out.isfinite().all() and (first.out != step(model, batch).out).any()


def test_the_first_pass_leaves_the_state_of_generators_unchanged(batch):
    model = salientpp.nn.trim(made("GraphSAGE"))
    torch.manual_seed(4)
    before = torch.get_rng_state()
    step(model, batch)
    assert torch.equal(before, torch.get_rng_state())


def test_the_models_own_trimming_stays_exact(batch):
    def call(model, batch):
        return model(
            batch.x,
            batch.edge_index,
            num_sampled_nodes_per_hop=batch.num_sampled_nodes,
            num_sampled_edges_per_hop=batch.num_sampled_edges,
        )

    for name in ("GraphSAGE", "GCN", "GIN"):
        compare(made(name), batch, call)


def test_modes_of_single_layers_have_their_own_plans(batch):
    model = made("GraphSAGE", "batch")
    trimmed = salientpp.nn.trim(copy.deepcopy(model))
    for frozen in (False, True, False):
        for each in (model, trimmed):
            each.train()
            for module in each.modules():
                if isinstance(module, torch.nn.BatchNorm1d):
                    module.train(not frozen)
        rows = [step(each, batch).rows[-3:] for each in (model, trimmed)]
        assert rows[0] == [batch.num_nodes] * 3
        assert rows[1] == ([within(batch, 2), within(batch, 1), within(batch, 0)] if frozen else [*rows[0][:2], 13])


@pytest.mark.parametrize("name", ["GraphSAGE", "GCN", "GAT", "GIN"])
def test_models_with_weights_or_attributes_of_edges_are_exact(name, batch):
    model = made(name, edge_dim=3) if name == "GAT" else made(name)
    if name == "GAT":
        compare(model, batch, lambda model, batch: model(batch.x, batch.edge_index, edge_attr=batch.edge_attr))
    elif name == "GCN":
        compare(model, batch, lambda model, batch: model(batch.x, batch.edge_index, edge_weight=batch.edge_weight))
    else:
        compare(model, batch, lambda model, batch: model(x=batch.x, edge_index=batch.edge_index))


def test_a_model_of_no_layers_is_refused():
    with pytest.raises(ValueError, match="MessagePassing, got Linear without any"):
        salientpp.nn.trim(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got function"):
        salientpp.nn.trim(lambda x: x)
    with pytest.raises(ValueError, match="'all rows' or 'needed rows', got 'some'"):
        salientpp.nn.trim(pyg.SimpleConv(), norms="some")
