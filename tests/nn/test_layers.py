"""Laws of the table of layers: each fact of each layer holds, and no layer has more facts than the table says.

The graph is numbered like a batch: after n seeds come their in-neighbours, hop after hop. In-neighbours of a vertex are at most one hop further.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from pyg_layers import CASES, Case, with_columns
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from salientpp.nn.layers import LAYERS, LINEAR_MESSAGES, layer_of, linear_form, with_helpers

WIDTH = 6
#: Number of vertices up to each hop; the first are the seeds.
BOUNDS = [9, 20, 35, 50, 60]

#: Linear messages that the table leaves out -> reason.
NOT_LINEAR = {
    "PDNConv": "its weights are functions of parameters",
    "RGCNConv": "with PyG's use_segment_matmul its message multiplies rows by matrices",
}


def graph() -> Data:
    """Makes a graph with self-loops, repeated edges and vertices without edges."""
    draw = torch.Generator().manual_seed(1)
    lists = []
    for low, high, limit in zip([0, *BOUNDS], BOUNDS, BOUNDS[1:]):
        # The last vertex of each hop has no edges.
        lists.append(
            torch.stack(
                [torch.randint(limit, (60,), generator=draw), torch.randint(low, high - 1, (60,), generator=draw)]
            )
        )
        lists[-1][0, :3] = lists[-1][1, :3]
        lists[-1][:, 3:6] = lists[-1][:, 6:9]
    return with_columns(torch.cat(lists, 1), BOUNDS[-1], WIDTH, draw)


def cut(data: Data, hops: int) -> Data:
    """Cuts a graph to the vertices up to a hop, and the edges into all but the last of these hops."""
    kept = data.edge_index[1] < BOUNDS[hops - 1]
    number = BOUNDS[hops]
    parts = Data()
    for name, value in data.to_dict().items():
        parts[name] = (
            value[:, kept] if name == "edge_index" else value[kept] if data.is_edge_attr(name) else value[:number]
        )
    assert int(parts.edge_index[0].max()) < number
    return parts


def made(case: Case) -> torch.nn.Module:
    torch.manual_seed(2)
    return case.make(WIDTH, 2 * WIDTH).double().eval()


def output(case: Case, data: Any, helpers: dict[str, Callable[..., Any]] | None = None, pairs: bool = False) -> Tensor:
    """Returns the layer's rows for a graph. The rows of the seeds are compared."""
    layer = made(case)
    for module in layer.modules():
        vars(module).update(with_helpers(module, helpers or {}))
    if not pairs:
        return case.call(layer, data.x, data)
    given, seeds = data.clone(), BOUNDS[0]
    for name in case.rows:
        given[name] = data[name], data[name][:seeds]
    return case.call(layer, (data.x, data.x[:seeds]), given)


def seeing(data: Data, num_vertices: int, called: set[str]) -> dict[str, Callable[..., Any]]:
    """Makes helper functions for layers that get only the edges between the first vertices. Degrees are counted in all edges of ``data``."""

    def norm(
        edge_index: Tensor, edge_weight: Tensor | None = None, num_nodes: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        called.add("gcn_norm")
        index, weight = gcn_norm(
            data.edge_index, None if edge_weight is None else data.edge_weight, data.num_nodes, *args, **kwargs
        )
        kept = (index < num_vertices).all(0)
        return index[:, kept], weight[kept]

    return {"gcn_norm": norm}


def are_close(expected: Tensor, got: Tensor) -> bool:
    seeds = BOUNDS[0]
    return torch.allclose(expected[:seeds], got[:seeds], rtol=1e-10, atol=1e-10)


def cases_of(name: str) -> dict[str, Case]:
    return {title: case for title, case in CASES.items() if title.split()[0] == name}


each_layer = pytest.mark.parametrize("name", LAYERS)


# --- pairs ------------------------------------------------------------------------------------------------


def takes_pairs(case: Case) -> bool:
    data = cut(graph(), 1)
    try:
        got = output(case, data, pairs=True)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return got.size(0) == BOUNDS[0] and are_close(output(case, data), got)


@each_layer
def test_a_layer_takes_pairs_if_the_table_says_so(name):
    layer = LAYERS[name]
    for title, case in cases_of(name).items():
        if layer.pairs:
            assert layer.pairs == ("x", *case.rows), title
            assert takes_pairs(case), title
    if not layer.pairs:
        assert not all(map(takes_pairs, cases_of(name).values()))


# --- degrees ----------------------------------------------------------------------------------------------


@each_layer
def test_edges_can_be_left_out_if_degrees_count_all_edges(name):
    facts, data = LAYERS[name], graph()
    called: set[str] = set()
    fails_alone, fails = set(), set()
    for title, case in cases_of(name).items():
        whole, part = output(case, data), cut(data, case.hops)
        assert all(with_helpers(made(case), {each: gcn_norm}) for each in facts.degrees), "the layer itself calls them"
        helpers = {each: seeing(data, part.num_nodes, called)[each] for each in helpers_of(case, facts.degrees)}
        if not are_close(whole, output(case, part)):
            fails_alone.add(title)
        if not are_close(whole, output(case, part, helpers)):
            fails.add(title)
    assert bool(fails_alone) == bool(called), "the degrees matter, or the layer counts none"
    assert set(facts.degrees) <= called
    assert not fails or facts.needs_all
    assert not facts.needs_all or fails or name == "SuperGATConv"


def helpers_of(case: Case, degrees: tuple[str, ...]) -> set[str]:
    """Returns the helpers of the layer, and of layers that it holds."""
    inner = [layer_of(module) for module in made(case).modules()]
    return {*degrees, *(name for facts in inner if facts is not None for name in facts.degrees)}


def test_a_layer_that_draws_pairs_of_vertices_needs_them_all():
    data, losses = graph(), []
    for given in (data, cut(data, 1)):
        layer = made(CASES["SuperGATConv"]).train()
        torch.manual_seed(4)
        layer(given.x, given.edge_index)
        losses.append(layer.get_attention_loss())
    assert not torch.allclose(*losses) and LAYERS["SuperGATConv"].needs_all


# --- linear layers ----------------------------------------------------------------------------------------


def weights_of(case: Case) -> set[str | None]:
    """Returns the factors of source rows in the messages: the argument 'edge_weight', None for no factor, 'else' for anything else."""
    layer, found = made(case), set()

    def look(module: MessagePassing, inputs: tuple[dict[str, Any]], message: Any) -> None:
        expected, weight = (inputs[0].get(name) for name in ("x_j", "edge_weight"))
        if not isinstance(expected, Tensor) or not isinstance(message, Tensor) or message.shape != expected.shape:
            found.add("else")
        elif torch.equal(message, expected):
            found.add("edge_weight" if "edge_weight" in inputs[0] else None)
        else:
            is_product = weight is not None and torch.equal(message, expected * weight.view(-1, 1))
            found.add("edge_weight" if is_product else "else")

    if not isinstance(layer, MessagePassing) or type(layer).aggregate is not MessagePassing.aggregate:
        return {"else"}
    layer.register_message_forward_hook(look)
    data = graph()
    case.call(layer, data.x, data)
    return found


@each_layer
def test_a_layer_is_linear_if_the_table_says_so(name):
    facts, cases = LAYERS[name], cases_of(name)
    found = set().union(*map(weights_of, cases.values()))
    forms = [linear_form(conv) for conv in map(made, cases.values()) if isinstance(conv, MessagePassing)]
    if facts.linear:
        assert found == {facts.weight}
        assert {form[0] for form in forms if form is not None} == {facts.weight}
    else:
        assert "else" in found or name in NOT_LINEAR
        assert facts.weight is None and not facts.merges and set(forms) <= {None}


def test_a_subclass_that_inherits_the_message_is_linear():
    class Mine(pyg.GraphConv):
        pass

    class Other(pyg.GraphConv):
        def message(self, x_j):
            return x_j.relu()

    assert linear_form(Mine(2, 2)) == ("edge_weight", "sum") == linear_form(pyg.GraphConv(2, 2))
    assert linear_form(Other(2, 2)) is None
    assert linear_form(MessagePassing("mean")) == (None, "mean")
    assert LINEAR_MESSAGES[MessagePassing.message].merges
    assert layer_of(Mine(2, 2)) is None
    assert layer_of(pyg.GraphConv(2, 2)) is LAYERS["GraphConv"]
