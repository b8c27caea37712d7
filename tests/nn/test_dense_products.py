"""Laws of the sums of dense products: convolutions give what matrix products give, with gradients of any order, and only where they are faster."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from trimmed import WIDTH, batch_of, graph

import salientpp
from salientpp.nn import dense_products
from salientpp.nn.dense_products import add_products


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def of_torch(bias: Tensor | None, *factors: dense_products.Factors) -> Tensor:
    out = sum(rows @ weight.t() for rows, weight in factors)
    assert isinstance(out, Tensor)
    return out if bias is None else out + bias


@pytest.fixture
def convolutions(monkeypatch):
    """Has products of any size computed as convolutions, and counts them."""
    seen: list[int] = []
    convolution = dense_products._convolution

    def counted(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(rows.size(0))
        return convolution(rows, weight, bias)

    monkeypatch.setattr(dense_products, "_convolution", counted)
    monkeypatch.setattr(dense_products, "_LEAST", 0)
    monkeypatch.setattr(dense_products, "_has_faster_convolutions", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return seen


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("widths", [(3,), (3, 2), (1, 4)])
def test_convolutions_equal_matrix_products_with_gradients_of_two_orders(has_bias, widths):
    torch.manual_seed(len(widths))
    bias = random(5) if has_bias else None
    factors = [each for width in widths for each in (random(7, width), random(5, width))]

    def products(*given: Tensor | None) -> Tensor:
        return dense_products._Products.apply(*given)

    expected = of_torch(bias, *zip(factors[::2], factors[1::2], strict=True))
    torch.testing.assert_close(products(bias, *factors), expected, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(products, (bias, *factors))
    assert torch.autograd.gradgradcheck(products, (bias, *factors))


@pytest.mark.parametrize("frozen", range(5))
def test_a_tensor_without_gradient_leaves_the_others_their_own(convolutions, frozen):
    given = [random(5), random(7, 3), random(5, 3), random(7, 2), random(5, 2)]
    given = [each.detach().float().requires_grad_(number != frozen) for number, each in enumerate(given)]
    wanted = [each for each in given if each.requires_grad]
    found = torch.autograd.grad(add_products(given[0], given[1:3], given[3:5]).square().sum(), wanted)
    expected = torch.autograd.grad(of_torch(given[0], given[1:3], given[3:5]).square().sum(), wanted)
    assert convolutions
    torch.testing.assert_close(found, expected)


def test_a_checkpoint_computes_convolutions_again(convolutions):
    given = [random(*shape, dtype=torch.float32) for shape in ((5,), (7, 3), (5, 3), (7, 2), (5, 2))]

    def products(bias: Tensor, *factors: Tensor) -> Tensor:
        return add_products(bias, factors[:2], factors[2:])

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out.square().sum(), given)

    expected = gradients(products(*given))
    found = gradients(checkpoint(products, *given, use_reentrant=False))
    assert convolutions
    torch.testing.assert_close(found, expected)


def test_convolutions_round_as_little_as_matrix_products(convolutions):
    torch.manual_seed(0)
    given = [random(each, 64, dtype=torch.float32) for each in (5000, 32, 5000, 32)]
    bias, grad = random(32, dtype=torch.float32), torch.randn(5000, 32)

    def errors(products, wide: bool = False) -> list[Tensor]:
        tensors = [each.double() if wide else each for each in (bias, *given)]
        out = products(tensors[0], tensors[1:3], tensors[3:5])
        return [out, *torch.autograd.grad(out, tensors, grad.to(out.dtype))]

    exact = errors(of_torch, wide=True)
    for ours, plain, right in zip(errors(add_products), errors(of_torch), exact, strict=True):
        assert (ours - right).norm() <= 3 * (plain - right).norm() + 1e-7 * right.norm()
    assert convolutions


@pytest.mark.parametrize("layer", [pyg.SAGEConv, pyg.GCNConv, pyg.GATConv])
def test_trimmed_layers_give_the_plain_gradients_by_convolutions(convolutions, layer):
    torch.manual_seed(1)
    data = graph()
    data.x = data.x.float()
    batch = batch_of(data)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = torch.nn.ModuleList([layer(WIDTH, 4), layer(4, 4), layer(4, 3)])

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            for conv in self.convs[:-1]:
                x = F.relu(conv(x, edge_index), inplace=True)  # of a view, torch would refuse this
            return self.convs[-1](x, edge_index)

    plain = Net()
    ours = salientpp.nn.trim(copy.deepcopy(plain), check=False)
    for model in (plain, ours):
        model(batch.x, batch.edge_index)[: batch.batch_size].square().sum().backward()
    assert convolutions
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_only_contiguous_float32_with_equal_precision_and_threads_is_convolved(convolutions, monkeypatch):
    rows, weight = torch.randn(7, 3), torch.randn(5, 3)

    def convolved(rows: Tensor, weight: Tensor) -> bool:
        convolutions.clear()
        torch.testing.assert_close(add_products(None, (rows, weight)), rows @ weight.t())
        return bool(convolutions)

    assert convolved(rows, weight)
    assert not convolved(rows.double(), weight.double())
    assert not convolved(torch.randn(3, 7).t(), weight)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not convolved(rows, weight)
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert not convolved(rows, weight)
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # of torch.set_float32_matmul_precision("highest")
        assert convolved(rows, weight)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert not convolved(rows, weight)
    monkeypatch.undo()
    assert not convolved(rows, weight)  # too small
