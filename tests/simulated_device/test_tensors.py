"""Operations of the simulated device give what the CPU gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch_geometric.nn import GAT, GraphSAGE

from tests.simulated_device import seed
from tests.simulated_device.memory import pinned_empty
from tests.simulated_device.tensors import SimulatedTensor

pytestmark = pytest.mark.simulated
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_every_dtype_is_copied_both_ways(device, dtype):
    want = torch.arange(12).view(3, 4).to(dtype)
    there = want.to(device)
    assert isinstance(there, SimulatedTensor) and there.device == device and there.dtype == dtype
    assert torch.equal(there.cpu().view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(there.t().cpu().t().contiguous().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_is_conspicuous(device, dtype):
    found = pinned_empty((9,), dtype)
    if dtype.is_floating_point:
        assert found.isnan().all()
    elif dtype.itemsize > 1:
        assert (found >= 2**15 - 1).all()
    assert not torch.equal(found, torch.zeros(9, dtype=dtype))


OPERATIONS = {
    "views": lambda x: x.t()[1:].unsqueeze(0).expand(2, -1, -1).transpose(1, 2).reshape(-1).view(2, -1)[:, ::2],
    "in place": lambda x: x.clone().mul_(2).add_(x).clamp_(min=3),
    "writes through a view": lambda x: x.clone().index_fill_(0, torch.tensor([0], device=x.device), 7)[1].neg(),
    "out": lambda x: torch.where(x > 3, x, -x, out=torch.empty_like(x)),
    "indices": lambda x: x[torch.tensor([2, 0], device=x.device)],
    "indices of the host": lambda x: x[torch.tensor([2, 0])],
    "a mask": lambda x: x[x > 3],
    "assignment": lambda x: torch.zeros_like(x).index_put_((x[:, 0].argsort(),), x[0]),
    "several results": lambda x: torch.cat([*x.max(dim=1), *x.sort(descending=True)[0]]),
    "unique": lambda x: torch.unique(x % 4, return_counts=True)[1],
    "scatter": lambda x: torch.zeros(4, 4, device=x.device).scatter_add_(0, x.long() % 4, x),
    "factories": lambda x: torch.cat(
        [torch.arange(3, device=x.device), torch.full((2,), 5, device=x.device), x.new_ones(2)]
    ),
    "scalars of the host": lambda x: x * torch.tensor(2.0) + 1,
    "views of other dtypes": lambda x: x.view(torch.int32).view(torch.uint8).view(torch.float32),
    "dtypes": lambda x: x.to(torch.int64).to(torch.float16).float(),
    "products": lambda x: torch.einsum("ij,kj->ik", x, x).softmax(1),
    "repeats": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2], device=x.device), 0),
    "cumulated": lambda x: torch.searchsorted(x.flatten().cumsum(0), x.flatten()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_equal_those_of_the_cpu(device, name):
    x = torch.arange(12.0).view(3, 4)
    want = OPERATIONS[name](x)
    for number in range(6):
        seed(number)
        got = OPERATIONS[name](x.to(device))
        assert got.device == device and got.dtype == want.dtype and got.stride() == want.stride()
        assert torch.equal(got.cpu(), want)


def test_results_on_the_host_are_tensors_of_the_host(device):
    x = torch.ones(3, device=device)
    for there in (x.cpu(), x.to("cpu"), torch.zeros_like(x, device="cpu"), x.new_empty(2, device="cpu")):
        assert type(there) is torch.Tensor and there.device.type == "cpu"


def test_a_resized_output_is_refused(device):
    out = torch.empty(2, device=device)
    torch.add(torch.ones(3, device=device), 1, out=out)
    with pytest.raises(RuntimeError, match="resizes its output"):
        out.cpu()


class Marked(torch.Tensor):
    """A subclass, as the package uses for marked edges."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def test_subclasses_are_possible(device):
    marked = torch.arange(3.0, device=device, requires_grad=True).as_subclass(Marked)
    marked.note = 5
    assert isinstance(marked, Marked) and marked.note == 5 and marked.device == device
    assert not isinstance(marked + 1, Marked) and (marked + 1).tolist() == [1, 2, 3]


# --- models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GraphSAGE, GAT])
@pytest.mark.parametrize("number", [0, 1, 20])
def test_a_model_trains_as_on_the_cpu(device, kind, number):
    torch.manual_seed(0)
    model = kind(5, 8, num_layers=2, out_channels=3)
    x, edges, y = torch.rand(30, 5), torch.randint(30, (2, 90)), torch.randint(3, (30,))
    seed(number)

    def train(model, x, edges, y):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(model(x, edges), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [loss, *model.parameters()]

    on_device = train(copy.deepcopy(model).to(device), x.to(device), edges.to(device), y.to(device))
    for got, want in zip(on_device, train(model, x, edges, y), strict=True):
        assert got.device == device
        torch.testing.assert_close(got.detach().cpu(), want.detach())


def test_inference_mode_and_no_grad(device):
    with torch.inference_mode():
        x = torch.ones(3, device=device)
    with torch.no_grad():
        y = torch.ones(3, device=device).mul_(2)
    assert (x.cpu() + y.cpu()).tolist() == [3] * 3 and not (x + 1).requires_grad
