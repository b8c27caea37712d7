"""Laws of trimmed models under tools of torch and PyG: a tool gives what it gives for the plain model. ``untrim`` gives the plain model back."""

from __future__ import annotations

import copy
import pickle
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from forked_python import python
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch_geometric.explain import Explainer, GNNExplainer
from trimmed import WIDTH, assert_same, batch_of, graph, loader, network, step, within

import salientpp


@pytest.fixture(scope="module")
def batch():
    salientpp.nn.trim(pyg.GCN(1, 1, 1))
    return next(iter(loader(graph(6), [4, 3])))


def seeds(model: nn.Module, batch: Any, x: Tensor | None = None) -> Tensor:
    return model(batch.x if x is None else x, batch.edge_index)[: batch.batch_size]


def squares(model: nn.Module, batch: Any, scale: Tensor) -> Tensor:
    return seeds(model, batch, batch.x * scale).square().sum()


def ones() -> Tensor:
    return torch.ones(WIDTH, dtype=torch.float64)


def parameters(model: nn.Module) -> list[Tensor]:
    return [value.grad for value in model.parameters() if value.grad is not None]


def penalised(model: nn.Module, batch: Any) -> list[Tensor]:
    x = batch.x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(seeds(model, batch, x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    return parameters(model)


def of_parameters(model: nn.Module, batch: Any, transform: Callable[..., Any]) -> Any:
    values = dict(model.named_parameters())
    return transform(
        lambda given: functional_call(model, given, (batch.x, batch.edge_index))[: batch.batch_size].sum()
    )(values)


def dual(model: nn.Module, batch: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(seeds(model, batch, forward_ad.make_dual(batch.x, batch.x.cos()))).tangent


def traced(model: nn.Module, batch: Any) -> Tensor:
    return seeds(torch.jit.trace(model.eval(), (batch.x, batch.edge_index)), batch)


def scripted(model: nn.Module, batch: Any) -> Tensor:
    return seeds(torch.jit.script(model.eval()), batch)


def explained(model: nn.Module, batch: Any) -> Tensor:
    explainer = Explainer(
        model,
        GNNExplainer(epochs=3),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
    )
    return explainer(batch.x, batch.edge_index, index=0).edge_mask


def with_backward_hook(model: nn.Module, batch: Any) -> list[Tensor]:
    seeds(model, batch).sum().backward()  # the first call also compares gradients
    model.zero_grad()
    seen: list[Tensor] = []
    layer = next(module for module in model.modules() if isinstance(module, pyg.MessagePassing))
    layer.register_full_backward_hook(lambda module, grads, outs: seen.append(outs[0].abs().sum()))
    seeds(model, batch).square().sum().backward()
    seen.clear()
    model.zero_grad()
    seeds(model, batch).square().sum().backward()
    return [*seen, *parameters(model)]


def with_changing_hook(model: nn.Module, batch: Any) -> list[Tensor]:
    layer = next(module for module in model.modules() if isinstance(module, pyg.MessagePassing))
    layer.register_full_backward_pre_hook(lambda module, outs: tuple(2 * each for each in outs))
    seeds(model, batch).square().sum().backward()
    return parameters(model)


TOOLS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "hessian": lambda model, batch: torch.autograd.functional.hessian(lambda s: squares(model, batch, s), ones()),
    "vhp": lambda model, batch: torch.autograd.functional.vhp(lambda s: squares(model, batch, s), ones(), ones())[1],
    "gradient penalty": penalised,
    "func.grad": lambda model, batch: of_parameters(model, batch, torch.func.grad),
    "func.hessian": lambda model, batch: torch.func.hessian(lambda s: squares(model, batch, s))(ones()),
    "jacrev": lambda model, batch: torch.func.jacrev(lambda s: squares(model, batch, s))(ones()),
    "vmap": lambda model, batch: torch.vmap(lambda s: seeds(model, batch, batch.x * s))(torch.stack([ones(), 2 * ones()])),
    "forward mode": dual,
    "jit.trace": traced,
    "jit.script": scripted,
    "GNNExplainer": explained,
    "full backward hook": with_backward_hook,
    "full backward hook that changes": with_changing_hook,
}  # fmt: skip

MODELS = {
    "GCN": lambda: pyg.GCN(WIDTH, 8, 2, 4),
    "GraphSAGE": lambda: pyg.GraphSAGE(WIDTH, 8, 2, 4),
    "GAT": lambda: pyg.GAT(WIDTH, 8, 2, 4, heads=2),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]().double()


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for item in (value.values() if isinstance(value, dict) else value) for each in flat(item)]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("model", MODELS)
def test_tools_give_what_they_give_for_the_plain_model(model, tool, batch):
    if (model, tool) == ("GAT", "jit.script"):
        pytest.skip("pyg-lib's softmax cannot be scripted")
    results = []
    for each in (made(model), salientpp.nn.trim(made(model))):
        torch.manual_seed(2)
        results.append(flat(TOOLS[tool](each, batch)))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tool", ["func.grad", "func.hessian", "jacrev", "vmap"])
@pytest.mark.parametrize("model", MODELS)
def test_transforms_of_torch_func_run_a_model_untrimmed_after_a_training_step(model, tool, batch):
    """The step leaves a plan, but the operations of a trimmed call cannot be transformed."""
    plain, ours = made(model), salientpp.nn.trim(made(model))
    seeds(ours, batch).sum().backward()
    for expected, got in zip(flat(TOOLS[tool](plain, batch)), flat(TOOLS[tool](ours, batch)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


class Stateful(nn.Module):
    """A recurrent unit over layers, whose first states are rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([pyg.SAGEConv(WIDTH, 4), pyg.SAGEConv(4, 4), pyg.SAGEConv(4, 3)])
        self.gru = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first = self.layers[0](x, edge_index)
        second = self.layers[1](first, edge_index)
        return self.layers[2](self.gru(second[:, None], first[None])[0][:, 0], edge_index)


class Weighted(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.last = conv, pyg.SAGEConv(4, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        weight = torch.linspace(0.1, 2, edge_index.size(1), dtype=torch.float64)[:, None]
        return self.last(self.conv(x, edge_index, weight).tanh(), edge_index)


@pytest.mark.parametrize(
    "make",
    [
        Stateful,
        lambda: Weighted(pyg.GCNConv(WIDTH, 4)),
        lambda: Weighted(pyg.GCNConv(WIDTH, 4, normalize=False)),
        lambda: Weighted(pyg.SGConv(WIDTH, 4, K=2)),
        lambda: Weighted(pyg.GraphConv(WIDTH, 4)),
    ],
    ids=["GRU with states of rows", "GCNConv", "GCNConv without norm", "SGConv", "GraphConv"],
)
def test_shapes_that_pyg_takes_are_taken(make, batch):
    results = []
    for wrap in (lambda model: model, salientpp.nn.trim):
        torch.manual_seed(1)
        model = wrap(make().double())
        results.append([step(model, batch), step(model, batch)])
    for expected, got in zip(*results, strict=True):
        assert_same(expected, got)


@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_a_call_in_inference_mode_does_not_stop_a_later_training_step(name):
    batch = batch_of(graph(6), [4, 3])
    model = salientpp.nn.trim(made(name))
    with torch.inference_mode():
        seeds(model, batch)
    assert_same(step(made(name), batch), step(model, batch))


# --- untrim ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_an_untrimmed_model_is_the_plain_model(copied):
    batch = batch_of(graph(6))
    model, names = network(), set(vars(network()))
    salientpp.nn.trim(model)
    assert step(model, batch).num_out == batch.batch_size
    other = copied(model)
    assert salientpp.nn.untrim(other) is other
    assert set(vars(other)) == names and not other._forward_hooks and not other._forward_pre_hooks
    assert step(other, batch).num_out == batch.num_nodes
    assert_same(step(network(), batch), step(other, batch))
    assert step(salientpp.nn.trim(other), batch).num_out == within(batch, 0)


def test_a_printed_model_says_that_it_is_trimmed():
    class Model(nn.Sequential):
        def extra_repr(self) -> str:
            return "mine"

    model = salientpp.nn.trim(Model(pyg.GCN(1, 1, 1)))
    text = "Model(\n  mine, trimmed by salientpp.nn.trim\n  (0): GCN(1, 1, num_layers=1)\n)"
    assert repr(model) == repr(copy.deepcopy(model)) == text
    assert repr(salientpp.nn.untrim(model)) == text.replace(", trimmed by salientpp.nn.trim", "")


class Named(nn.Module):
    """A model that prints itself. One base class of PyG prints itself too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = pyg.GCN(8, 16, 2, 3)

    def __repr__(self) -> str:
        return f"Named[{self.layers!r}]"


class Derived(pyg.GIN):
    def __repr__(self) -> str:
        return f"my {super().__repr__()}"


@pytest.mark.parametrize(
    "make",
    [Named, *(lambda kind=kind: kind(8, 16, 2, 3) for kind in (pyg.GraphSAGE, pyg.GCN, pyg.GAT, pyg.GIN, Derived))],
)
def test_a_model_that_prints_itself_says_that_it_is_trimmed(make):
    plain = repr(make())
    text = f"{plain}, trimmed by salientpp.nn.trim"
    model = salientpp.nn.trim(make())
    copies = copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert [repr(each) for each in (model, *copies)] == [text] * 4 and repr(make()) == plain
    assert repr(nn.Sequential(model)) == f"Sequential(\n  (0): {text}\n)"
    assert repr(salientpp.nn.untrim(model)) == plain and repr(copies[1]) == text
    assert repr(salientpp.nn.trim(model)) == text


def test_a_model_that_is_opened_in_another_process_says_that_it_is_trimmed(tmp_path):
    torch.save(salientpp.nn.trim(pyg.GraphSAGE(8, 16, 2, 3)), tmp_path / "model.pt")
    script = f"import torch; print(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False))"
    printed = subprocess.run([python(), "-c", script], check=True, capture_output=True, text=True).stdout
    assert printed == "GraphSAGE(8, 3, num_layers=2), trimmed by salientpp.nn.trim\n"


def test_untrim_leaves_other_hooks_and_other_models():
    model = network()
    model.register_forward_hook(lambda module, args, out: None)
    assert salientpp.nn.untrim(model) is model
    salientpp.nn.untrim(salientpp.nn.trim(model))
    assert len(model._forward_hooks) == 1
    with pytest.raises(TypeError, match="untrim needs a torch.nn.Module, got int"):
        salientpp.nn.untrim(3)


def test_a_model_that_is_called_cannot_be_untrimmed(batch):
    model = salientpp.nn.trim(network())
    model.convs[0].register_forward_hook(lambda module, args, out: salientpp.nn.untrim(model) and None)
    with pytest.raises(RuntimeError, match="GCN is being called; call untrim after its forward pass"):
        model(batch.x, batch.edge_index)
