"""Laws of what a model may compute between its layers over ranks: the result of one process with the whole graph, or an error that names the operation.

The rows of the tables run one after the other on two ranks. Each is a model between whose two layers a function changes the rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import MethodType
from typing import Any

import distributed
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from host_batches import batch_of, filled, loader_of, share_batch
from rare import rare
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops, degree, scatter

from salientpp.fullgraph import Preload, distribute, local, loss_mean
from salientpp.nn import trim

N, WIDTH = 40, 4

#: Label 2 occurs on the last rank only. The second list has a rank with one vertex, the third one without vertices.
OFFSETS = [[0, 15, N], [0, 1, N], [0, 0, N]]


def graph() -> Data:
    draw = torch.Generator().manual_seed(3)
    edge_index = torch.randint(N, (2, 160), generator=draw)
    types = torch.randint(3, (160,), generator=torch.Generator().manual_seed(4))
    return Data(
        edge_type=types.masked_fill((edge_index[1] >= 30) & (types == 0), 3),  # type 3 occurs on the last rank only
        edge_index=edge_index,
        x=torch.randn(N, WIDTH, generator=draw).double(),
        edge_weight=torch.rand(160, generator=draw).double(),
        label=torch.randint(3, (N,), generator=draw).minimum(torch.arange(N).div(30, rounding_mode="floor") + 1),
        train_mask=torch.rand(N, generator=draw) < 0.5,
    )


Change = Callable[["Net", Tensor, Any], Any]


def at(places: Any) -> Change:
    """Writes to rows at given places."""

    def change(net: Net, h: Tensor, g: Any) -> Tensor:
        h = h.clone()
        h[places] = 0
        return h

    return change


class Own(pyg.MessagePassing):
    """Layer of the user's, which changes rows before it sends them."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.change(x))


class Updated(pyg.SAGEConv):
    """Layer of the user's, which changes the sums of all vertices."""

    def update(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0)


class Aggregated(pyg.SAGEConv):
    """Layer of the user's, which scales the sums of all vertices."""

    def aggregate(self, inputs: Tensor, index: Tensor, ptr: Any = None, dim_size: Any = None) -> Tensor:
        out = super().aggregate(inputs, index, ptr=ptr, dim_size=dim_size)
        return out / out.abs().max()


class Doubled(pyg.SAGEConv):
    """Layer of the user's, which changes each sum by itself, and drops messages."""

    def message(self, x_j: Tensor) -> Tensor:
        return F.dropout(x_j, 0.0, self.training)

    def update(self, inputs: Tensor) -> Tensor:
        return 2 * inputs.tanh()


class Normed(pyg.SAGEConv):
    """Layer of the user's with a norm over the sums of all vertices."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.norm = nn.BatchNorm1d(width)

    def update(self, inputs: Tensor) -> Tensor:
        return self.norm(inputs)


class Nested(pyg.SAGEConv):
    """Layer of the user's with a layer inside it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.inner = pyg.SAGEConv(width, width)

    def propagate(self, edge_index: Any, size: Any = None, **given: Any) -> Tensor:
        self.edges = edge_index
        return super().propagate(edge_index, size=size, **given)

    def update(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs, self.edges)


class Net(nn.Module):
    def __init__(self, change: Change | nn.Module, conv: Any = pyg.SAGEConv) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = conv(WIDTH, WIDTH), conv(WIDTH, WIDTH)
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.attend, self.gru, self.instance = (
            nn.MultiheadAttention(WIDTH, 2),
            nn.GRU(WIDTH, WIDTH),
            nn.InstanceNorm1d(WIDTH),
        )
        self.register_buffer("table", torch.randn(N, WIDTH))
        self.own = Own(lambda h: h - h.mean(0))
        self.gin = pyg.GINConv(nn.Softmax(dim=0))
        self.change = change
        self.step = 0
        self.double()

    def forward(self, x: Tensor, g: Any) -> Any:
        h = self.first(x, g.edge_index)
        h = self.change(h) if isinstance(self.change, nn.Module) else self.change(self, h, g)
        return self.second(h, g.edge_index)


def times_weights(net: Any, h: Tensor, g: Any) -> Tensor:
    h, (_, weights) = net.first(h, g.edge_index, return_attention_weights=True)
    return h * weights.mean()


class WithPenalty(pyg.SAGEConv):
    """Layer of the user's, which also returns the edges and a number."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return super().forward(x, edge_index), edge_index, self.lin_l.weight.square().sum()


def with_penalty(width: int, out: int) -> nn.Module:
    conv = WithPenalty(width, out)
    return pyg.Sequential(
        "x, edges", [(conv, "x, edges -> h, same, penalty"), (lambda h, penalty: h * penalty, "h, penalty -> h")]
    )


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (ctx.saved_tensors[0].abs() < 1)


def hooked(hook: Callable[[Tensor], Any]) -> Change:
    def change(net: Net, h: Tensor, g: Any) -> Tensor:
        h = h * 1
        if h.requires_grad:
            h.register_hook(hook)
        return h

    return change


def with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda _, args, out: out - out.mean(0))
    return module


def with_gradients(change: Callable[[Tensor], Tensor], pre: bool) -> Net:
    """Returns a model with a hook for the gradients of its second layer's outputs, or of a linear map's inputs."""
    net = Net(lambda net, h, g: net.lin(h))
    if pre:
        net.second.register_full_backward_pre_hook(lambda _, outs: tuple(map(change, outs)))
    else:
        net.lin.register_full_backward_hook(lambda _, given, outs: tuple(map(change, given)))
    return net


def later(net: Net, h: Tensor, g: Any) -> Tensor:
    net.step += 1
    return h - h.mean(0) if net.step > 2 else h


def written(net: Net, h: Tensor, g: Any) -> Tensor:
    out = torch.zeros_like(h)
    out[:, 1:] = h[:, 1:]
    out[0] = 0
    return out


def with_virtual_vertex(net: Net, h: Tensor, g: Any) -> Tensor:
    return h + net.lin(h.sum(0, keepdim=True))


def over_sources(net: Net, h: Tensor, g: Any) -> Tensor:
    return h / degree(g.edge_index[0], h.size(0)).clamp(min=1)[:, None]


#: Name -> (model, the operation that an error names).
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "update of a layer": (lambda: Net(lambda net, h, g: h, Updated), r"Updated \(first\)"),
    "aggregate of a layer": (lambda: Net(lambda net, h, g: h, Aggregated), r"Aggregated \(first\)"),
    "module on edges": (
        lambda: Net(lambda net, h, g: h, lambda a, b: pyg.EdgeConv(nn.Sequential(nn.Linear(2 * a, b), nn.Softmax(0)))),
        r"EdgeConv \(first\)",
    ),
    "backward hook": (lambda: with_gradients(lambda gradient: gradient / gradient.abs().sum(), False), "sum"),
    "backward pre-hook": (lambda: with_gradients(lambda gradient: gradient - gradient.mean(0), True), "mean"),
    "mean": (lambda: Net(lambda net, h, g: h - h.mean(0)), "mean"),
    "mean of all": (lambda: Net(lambda net, h, g: h - h.mean()), "mean"),
    "std": (lambda: Net(lambda net, h, g: h / (h.std(0) + 1)), "std"),
    "var_mean": (lambda: Net(lambda net, h, g: h - torch.var_mean(h, 0)[1]), "var_mean"),
    "first places": (lambda: Net(at(slice(10))), "__setitem__"),
    "last places": (lambda: Net(at(slice(-10, None))), "__setitem__"),
    "further places": (lambda: Net(at((slice(0, 20), 1))), "__setitem__"),
    "first places of columns": (
        lambda: Net(lambda net, h, g: at((slice(None), slice(10)))(net, h.t(), g).t()),
        "__setitem__",
    ),
    "places after a dimension": (lambda: Net(at((None, slice(10)))), "__setitem__"),
    "places in the last dimension": (
        lambda: Net(lambda net, h, g: h * at((..., slice(10)))(net, h[:, 0], g)[:, None]),
        "__setitem__",
    ),
    "triangle": (lambda: Net(lambda net, h, g: h + h.tril(-10)), "tril"),
    "rolled": (lambda: Net(lambda net, h, g: h + h.roll(24, 0)), "roll"),
    "rolled by name": (lambda: Net(lambda net, h, g: h + torch.roll(input=h, shifts=24, dims=0)), "roll"),
    "rolled along no dimension": (lambda: Net(lambda net, h, g: h + torch.roll(h, 24, None)), "roll"),
    "rolled elements": (lambda: Net(lambda net, h, g: h + torch.roll(h, 24 * WIDTH)), "roll"),
    "as many classes as needed": (lambda: Net(lambda net, h, g: h + F.one_hot(g.label)[:, -1:]), "one_hot"),
    "sum": (lambda: Net(lambda net, h, g: h / h.abs().sum(0, keepdim=True)), "sum"),
    "norm": (lambda: Net(lambda net, h, g: h / h.norm()), "norm"),
    "softmax": (lambda: Net(lambda net, h, g: h.softmax(0)), "softmax"),
    "log_softmax": (lambda: Net(lambda net, h, g: F.log_softmax(h, dim=0)), "log_softmax"),
    "normalize": (lambda: Net(lambda net, h, g: F.normalize(h, dim=0)), "normalize"),
    "max": (lambda: Net(lambda net, h, g: h - h.max(0).values), "max"),
    "amin": (lambda: Net(lambda net, h, g: h - h.amin(0)), "amin"),
    "median": (lambda: Net(lambda net, h, g: h - h.median(0).values), "median"),
    "quantile": (lambda: Net(lambda net, h, g: h - h.quantile(0.3, 0)), "quantile"),
    "cumsum": (lambda: Net(lambda net, h, g: h.cumsum(0)), "cumsum"),
    "sort": (lambda: Net(lambda net, h, g: h.sort(0).values), "sort"),
    "flip": (lambda: Net(lambda net, h, g: h + h.flip(0)), "flip"),
    "roll": (lambda: Net(lambda net, h, g: h + h.roll(1, 0)), "roll"),
    "first rows": (lambda: Net(lambda net, h, g: h + h[:1]), "__getitem__"),
    "one row": (lambda: Net(lambda net, h, g: h - h[0]), "__getitem__"),
    "numbers of rows": (lambda: Net(lambda net, h, g: h + h[torch.tensor([0, 0])].mean(0)), "__getitem__"),
    "rows of sources": (lambda: Net(lambda net, h, g: h + h[g.edge_index[0]].mean(0)), "__getitem__|mean"),
    "written row": (lambda: Net(written), "__setitem__"),
    "attention": (
        lambda: Net(lambda net, h, g: F.scaled_dot_product_attention(h[None], h[None], h[None])[0]),
        "scaled_dot_product_attention",
    ),
    "attention of torch": (lambda: Net(lambda net, h, g: net.attend(h, h, h)[0]), "multi_head_attention_forward"),
    "attention of torch, without weights": (
        lambda: Net(lambda net, h, g: net.attend(h, h, h, need_weights=False)[0]),
        "multi_head_attention_forward",
    ),
    "weights of attention": (lambda: Net(times_weights, pyg.GATv2Conv), "mean"),
    "layer made in the forward": (
        lambda: Net(lambda net, h, g: h + pyg.SimpleConv()(h, g.edge_index)),
        r"index_select of a layer that is no module of the model \(.* in a ModuleList, not in a list\)",
    ),
    "bytes of rows": (lambda: Net(lambda net, h, g: h * h.nbytes), "nbytes, which tells how many bytes rows take,"),
    "bytes of memory": (
        lambda: Net(lambda net, h, g: h * h.untyped_storage().nbytes()),
        "untyped_storage, which tells",
    ),
    "product of rows": (lambda: Net(lambda net, h, g: (h @ h.t()).tanh() @ h), "matmul"),
    "product of columns": (lambda: Net(lambda net, h, g: h @ (h.t() @ h)), "matmul"),
    "einsum": (lambda: Net(lambda net, h, g: torch.einsum("nf,ng->fg", h, h).mean() + h), "einsum"),
    "distances": (lambda: Net(lambda net, h, g: h + torch.cdist(h, h).min(1, keepdim=True).values), "cdist"),
    "instance norm": (lambda: Net(lambda net, h, g: net.instance(h.t()).t()), "instance_norm"),
    "batch norm of functional": (
        lambda: Net(lambda net, h, g: F.batch_norm(h, None, None, training=True)),
        "batch_norm",
    ),
    "recurrent": (lambda: Net(lambda net, h, g: net.gru(h[:, None])[0][:, 0]), "gru"),
    "pooling": (lambda: Net(lambda net, h, g: h + pyg.global_mean_pool(h, None)), "mean"),
    "pooling by numbers": (lambda: Net(lambda net, h, g: h + pyg.global_add_pool(h, g.label)[:1]), "max|scatter"),
    "virtual vertex": (lambda: Net(with_virtual_vertex), "sum"),
    "scatter": (lambda: Net(lambda net, h, g: h + scatter(h, g.label, 0, 3, "mean")[g.label]), "scatter_add_"),
    "module": (lambda: Net(nn.Softmax(dim=0)), r"softmax in Softmax \(change\)"),
    "module in a module": (
        lambda: Net(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(dim=0))),
        r"in Softmax \(change.1\)",
    ),
    "number": (lambda: Net(lambda net, h, g: h / h.size(0)), "number of rows|div"),
    "root of the number": (lambda: Net(lambda net, h, g: h / h.shape[0] ** 0.5), "number of rows"),
    "len": (lambda: Net(lambda net, h, g: h / len(h) ** 0.5), "len"),
    "log of the number": (lambda: Net(lambda net, h, g: h * math.log(h.size(0) + 1)), "number of rows"),
    "one by the number": (lambda: Net(lambda net, h, g: h * (1.0 / h.size(0))), "number of rows"),
    "numel": (lambda: Net(lambda net, h, g: h.sign() / h.numel()), "number of rows|div"),
    "tensor of the number": (lambda: Net(lambda net, h, g: h / torch.tensor(h.size(0))), "tensor"),
    "linspace": (lambda: Net(lambda net, h, g: h + torch.linspace(0, 1, h.size(0)).double()[:, None]), "add"),
    "positions": (lambda: Net(lambda net, h, g: h + torch.arange(h.size(0))[:, None]), "add"),
    "largest position": (lambda: Net(lambda net, h, g: h / torch.arange(h.size(0)).max()), "max"),
    "a position": (lambda: Net(lambda net, h, g: h / (2 * torch.arange(1, h.size(0) + 1).double())[-1:]), "getitem"),
    "positions of edges": (lambda: Net(lambda net, h, g: h / (torch.arange(g.edge_index.size(1)) + 1).max()), "max"),
    "positions that are read": (lambda: Net(lambda net, h, g: h * sum(torch.arange(h.size(0)).tolist())), "tolist"),
    "first rows that are cleared": (lambda: Net(lambda net, h, g: h + h.clone()[:30].zero_()), "__getitem__"),
    "some first rows": (lambda: Net(lambda net, h, g: h + h.split(30)[0].sum(1)[:1]), "split"),
    "item": (lambda: Net(lambda net, h, g: h * float(h.abs().max())), "max"),
    "numpy": (lambda: Net(lambda net, h, g: h + h.detach().numpy().mean()), "numpy"),
    "list": (lambda: Net(lambda net, h, g: h + sum(h.tolist()[0])), "tolist"),
    "integer": (lambda: Net(lambda net, h, g: h / int(h.size(0))), r"int\(\)"),
    "mean of a mask": (lambda: Net(lambda net, h, g: h * g.train_mask.double().mean()), "mean"),
    "positions in a mask": (lambda: Net(lambda net, h, g: h * g.train_mask.cumsum(0)[:, None]), "cumsum"),
    "answer in a given tensor": (lambda: Net(answered_in_place), "any"),
    "branch on numbers": (lambda: Net(lambda net, h, g: h * 2 if (h.sum() > 0) else h), "sum"),
    "branch on selected rows": (
        lambda: Net(lambda net, h, g: 2 * h if h[g.label == 2].size(0) > 0 else h),
        r"use mask.any\(\)",
    ),
    "branch on places": (lambda: Net(lambda net, h, g: 2 * h if places(g, 2).numel() else h), r"use mask.any\(\)"),
    "places as numbers": (
        lambda: Net(lambda net, h, g: h.index_add(0, places(g), h[places(g)] * places(g)[:, None])),
        "mul",
    ),
    "number of places": (lambda: Net(lambda net, h, g: h * places(g).numel()), "mul"),
    "some places": (lambda: Net(lambda net, h, g: h.index_fill(0, places(g)[:1], 0.0)), "__getitem__"),
    "places of a table": (
        lambda: Net(lambda net, h, g: h.index_copy(0, places(g), net.table[places(g)])),
        "index_copy",
    ),
    "places that are read": (lambda: Net(lambda net, h, g: h * sum(places(g).tolist())), "tolist"),
    "mean over places": (lambda: Net(lambda net, h, g: h - h[places(g)].mean(0)), "mean"),
    "given row": (lambda: Net(lambda net, h, g: h.index_fill(0, torch.tensor([0]), 0.0)), "index_fill"),
    "labels by their number": (
        lambda: Net(lambda net, h, g: h * torch.bincount(g.label, minlength=4)[:3].sum()),
        "bincount",
    ),
    "log": (lambda: Net(lambda net, h, g: h if float(h.norm()) else 0), "norm"),
    "hook that asks": (
        lambda: Net(hooked(lambda gradient: 2 * gradient if (gradient > 0.01).any() else gradient)),
        "any",
    ),
    "hook": (lambda: Net(hooked(lambda gradient: gradient / gradient.abs().mean())), "mean"),
    "function of autograd": (lambda: Net(lambda net, h, g: Centred.apply(h)), "mean"),
    "hook of a layer": (lambda: with_first(with_hook), "mean"),
    "hook of the model": (lambda: with_hook(Net(lambda net, h, g: h)), "mean in Net"),
    "method of a module": (lambda: with_forward(lambda lin, h: h - h.mean(0)), "mean"),
    "layer of the user's": (lambda: Net(lambda net, h, g: net.own(h, g.edge_index)), r"mean in Own \(own\)"),
    "module in a layer": (lambda: Net(lambda net, h, g: net.gin(h, g.edge_index)), r"softmax in Softmax \(gin.nn\)"),
    "edges": (lambda: Net(lambda net, h, g: h * (g.edge_weight - g.edge_weight.mean()).sign().sum()), "mean"),
    "types by their number": (lambda: Net(lambda net, h, g: h * torch.bincount(g.edge_type)[0]), "bincount"),
    "mean of types": (lambda: Net(lambda net, h, g: h * g.edge_type.double().mean()), "mean"),
    "largest number of a vertex": (lambda: Net(lambda net, h, g: h / (g.edge_index.max() + 1)), "max"),
    "edges of first vertices": (lambda: Net(lambda net, h, g: h * (g.edge_index[0] > 3).sum()), "gt"),
    "edges in one direction": (
        lambda: Net(lambda net, h, g: net.first(h, g.edge_index[:, g.edge_index[0] < g.edge_index[1]])),
        "lt",
    ),
    "vertices with edges": (lambda: Net(lambda net, h, g: h * len(g.edge_index[1].unique())), "unique"),
    "number of edges": (lambda: Net(lambda net, h, g: h * (g.edge_index.size(1) / h.size(0))), "number of rows"),
    "number of types": (lambda: Net(lambda net, h, g: h / g.edge_type.numel()), "number of rows|div"),
    "as many types as needed": (lambda: Net(lambda net, h, g: h + F.one_hot(g.edge_type).size(1)), "one_hot"),
    "first edges": (lambda: Net(lambda net, h, g: net.first(h, g.edge_index[:, :100])), "__getitem__"),
    "half of the edges": (
        lambda: Net(lambda net, h, g: net.first(h, g.edge_index[:, : g.edge_index.size(1) // 2])),
        "__getitem__",
    ),
    "types that are read": (lambda: Net(lambda net, h, g: h * sum(g.edge_type.tolist())), "tolist"),
    "branch on selected edges": (
        lambda: Net(lambda net, h, g: 2 * h if g.edge_index[:, g.edge_type == 3].size(1) > 0 else h),
        r"use mask.any\(\)",
    ),
    "branch on numbers of edges": (
        lambda: Net(lambda net, h, g: 2 * h if (g.edge_type == 3).nonzero().numel() > 0 else h),
        r"use mask.any\(\)",
    ),
    "types of selected edges": (
        lambda: Net(lambda net, h, g: h * g.edge_type[g.edge_weight > 0.5].max()),
        "max",
    ),
    "types, one by one": (lambda: Net(lambda net, h, g: h * max(g.edge_type)), "unbind"),
    "sorted types": (lambda: Net(lambda net, h, g: h * g.edge_type.sort().values[-1]), "__getitem__"),
    "a type among sorted ones": (lambda: Net(lambda net, h, g: h * (g.edge_type.sort()[0] == 3).any()), "any"),
    "loop over a number": (lambda: Net(lambda net, h, g: h * sum(1 for _ in range(h.size(0)))), "used as a number"),
    "list of a length": (lambda: Net(lambda net, h, g: h * len([0] * g.edge_index.size(1))), "used as a number"),
    "function of math": (lambda: Net(lambda net, h, g: h * math.gcd(h.size(0), 8)), "used as a number"),
    "bits of a number": (lambda: Net(lambda net, h, g: h * (h.size(0) & 1)), "used as a number"),
    "size of a number": (lambda: Net(lambda net, h, g: h * h.size(0).bit_length()), "used as a number"),
    "random order of edges": (lambda: Net(lambda net, h, g: h * g.edge_weight[torch.randperm(len_of(g))].sum()), "sum"),
    "sparse matrix": (
        lambda: Net(lambda net, h, g: h * torch.sparse_coo_tensor(g.edge_index, g.edge_weight).sum()),
        "sparse_coo_tensor",
    ),
    "edges in another order": (
        lambda: Net(lambda net, h, g: h + g.edge_weight[g.edge_type.argsort()].sum()),
        "sum",
    ),
    "mean over targets": (lambda: Net(lambda net, h, g: h + h[g.edge_index[1]].mean(0)), "mean"),
    "input": (lambda: Net(lambda net, h, g: h + g.x.mean(0)), "mean"),
    "degrees of sources": (lambda: Net(over_sources), "scatter_add_"),
    "a later step": (lambda: Net(later), "mean"),
    "output": (lambda: Last(lambda h: h - h.mean(0)), "mean"),
    "result that is a sum": (lambda: Last(lambda h: h.square().sum()), "sum"),
}


def len_of(g: Any) -> Any:
    return g.edge_index.size(1)


def places(g: Any, label: int = 1) -> Tensor:
    return (g.label == label).nonzero().view(-1)


def answered_in_place(net: Net, h: Tensor, g: Any) -> Tensor:
    answer = torch.tensor(False)
    torch.any(g.label == 2, out=answer)
    return 2 * h if answer else h


class Last(nn.Module):
    """Layer, and a function of its output."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.change = pyg.SAGEConv(WIDTH, WIDTH).double(), change

    def forward(self, x: Tensor, g: Any) -> Tensor:
        return self.change(self.conv(x, g.edge_index))


def with_first(change: Callable[[nn.Module], nn.Module]) -> Net:
    net = Net(lambda net, h, g: h)
    change(net.first)
    return net


def with_forward(forward: Callable[[nn.Module, Tensor], Tensor]) -> Net:
    net = Net(lambda net, h, g: net.lin(h))
    net.lin.forward = MethodType(forward, net.lin)
    return net


def with_doubled_gradients(net: Net) -> Net:
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    return net


def logged(gradient: Tensor) -> None:
    float(gradient.norm())


def chosen(net: Net, h: Tensor, g: Any) -> Tensor:
    """Changes the rows that a mask selects."""
    h = h.clone()
    h[g.train_mask] = net.lin(h[g.train_mask]).relu() + h[g.train_mask]
    return h


def guarded(net: Net, h: Tensor, g: Any) -> Tensor:
    """Changes the rows of each label that occurs, and all rows if some label does."""
    out = torch.zeros_like(h)
    for label in g.label.unique():
        mask = g.label == label
        if mask.any() and mask.sum() > 2 and not mask.all():
            out[mask] = net.lin(h[mask]) * label
            out = out + float(label)
    return out * int(g.label.max()) if (g.label == 2).any() and g.train_mask.any() else out


def guarded_by_values(net: Net, h: Tensor, g: Any) -> Tensor:
    """Asks for values that the model has computed."""
    if (h > 0.5).any() and not torch.isnan(h).any() and (h.argmax(1) == 1).sum() > 3:
        h = 2 * h * (h > 0).count_nonzero()
    bad = torch.where((g.label == 2)[:, None], math.inf, h)
    return h + (h > 0.3).any(0) * (h > 0).sum(0, keepdim=True) if torch.isinf(bad).any() else h


def at_places(net: Net, h: Tensor, g: Any) -> Tensor:
    """Changes the rows at the places of a mask."""
    out = torch.zeros_like(h)
    for label in range(4):
        rows = places(g, label)
        out[rows] = net.lin(h[rows]) * label
        chosen = torch.where(h[:, label] > 0)[0]
        out = out.index_add(0, chosen, h.index_select(0, chosen))
        out[chosen] += net.lin.bias
    return out.index_fill(0, (g.label == 2).nonzero(as_tuple=True)[0], 0.5)


def by_types(net: Net, h: Tensor, g: Any) -> Tensor:
    """Asks about types of edges, and sends rows along the edges of each type that occurs."""
    types, out = g.edge_type, torch.zeros_like(h)
    for each in range(5):
        edges = types == each
        if edges.any() and not edges.all() and edges.sum() > 2 and edges.count_nonzero() < 150:
            out = out + (each + 1) * net.first(h, g.edge_index[:, edges])
    for each in types.unique():
        out = out + float(each) * int((types == each).sum())
    scale = net.lin.weight[0, :4].abs()[types]
    out = out + net.first(h, g.edge_index[:, (types == 1).nonzero().view(-1)]) * int(types.max()) - types.min()
    if (scale > 0).all() and not (g.edge_index[0] == g.edge_index[1]).all():
        out = out + net.second(h, g.edge_index[:, types.argsort()])
    return out if types.max() == 3 else h


def by_numbers(net: Net, h: Tensor, g: Any) -> Tensor:
    """Branches on numbers of edges and vertices, which are smaller on each rank."""
    if g.edge_index.size(1) > 120 and g.edge_index.numel() == 320 and g.edge_type.size(0) != 0 and h.size(0) > 39:
        h = 2 * h
    ones = torch.ones(h.size(0) + g.edge_index.size(1))
    assert ones.dim() == 1
    assert isinstance(h.size(0), int) and isinstance(g.edge_index.size(1), int)
    if h.size(0) - 20 > h.size(0) // 4 and h.size(0) + 90 < g.edge_index.size(1) > 3 * h.size(0) + 39:
        h = 3 * h
    if abs(h.size(0) - 30) < 12 and abs(h.size(0) - 30) > 8:  # 10 for the whole graph, 15 and 5 on two ranks
        h = h - 0.5
    if h.size(0) == N and g.x.size(0) <= N and h.size(0) == g.x.size(0) and h.size(0):
        h = h + 1
    return h + scatter(g.edge_weight[g.edge_type < 9] * 0 + 1, g.edge_index[1], 0, h.size(0), "sum")[:, None]


def with_degrees(net: Net, h: Tensor, g: Any) -> Tensor:
    number = h.size(0)
    weights = scatter(g.edge_weight, g.edge_index[1], 0, number, "sum")
    return h / (degree(g.edge_index[1], number) + 1)[:, None] + weights.view(-1, 1)


def in_place(net: Net, h: Tensor, g: Any) -> Tensor:
    out = torch.zeros(h.size(0), WIDTH + 1, dtype=h.dtype)
    out[:, :WIDTH] = h
    return F.leaky_relu(out, 0.5, inplace=True)[:, 1:].clone().add_(1).mul_(0.5)


def examined(net: Net, h: Tensor, g: Any) -> Tensor:
    if torch.isnan(h).any() or h.size(0) != g.x.size(0):
        raise ValueError("unusual rows")
    return h


def in_heads(net: Net, h: Tensor, g: Any) -> Tensor:
    number, width = h.shape
    h = h.view(number, 2, width // 2)
    scores = (h * h.mean(-1, keepdim=True)).sum(-1).softmax(-1)
    return torch.einsum("nhc,nh->nhc", h, scores).reshape(number * 2, -1).tanh().view(number, -1)


class Looped(pyg.MessagePassing):
    """Layer of the user's with self-loops."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, out)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        number = x.size(0)
        return self.propagate(add_self_loops(edge_index, num_nodes=number)[0], x=self.lin(x), size=(number, number))


def jumped(mode: str) -> Change:
    torch.manual_seed(1)
    jump = pyg.JumpingKnowledge(mode, WIDTH, 2).double()
    return lambda net, h, g: jump([h, g.x])[:, :WIDTH]


KEPT: dict[str, Callable[[], nn.Module]] = {
    "update of a layer": lambda: Net(lambda net, h, g: h, Doubled),
    "norm in an update": lambda: Net(lambda net, h, g: h, Normed),
    "layer in an update": lambda: Net(lambda net, h, g: h, Nested),
    "layer that returns edges and a number": lambda: Net(lambda net, h, g: h, with_penalty),
    "backward hook": lambda: with_gradients(lambda gradient: 2 * gradient, False),
    "backward pre-hook": lambda: with_gradients(lambda gradient: gradient.clamp(-1, 1), True),
    "activation": lambda: Net(lambda net, h, g: F.elu(h).sigmoid() * h.clamp(min=-1)),
    "norms": lambda: Net(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))),
    "dropout": lambda: Net(nn.Sequential(nn.Dropout(0.0), nn.AlphaDropout(0.0))),
    "places of columns": lambda: Net(at((slice(None), slice(2)))),
    "places of rows": lambda: Net(
        lambda net, h, g: at((..., slice(2)))(net, at((slice(2), ...))(net, h.t(), g).t(), g)
    ),
    "rolled columns": lambda: Net(lambda net, h, g: h.roll(1, 1) + h.roll((1,), dims=(-1,))),
    "columns": lambda: Net(lambda net, h, g: F.normalize(h.softmax(-1).sort(1).values, dim=1).cumsum(1)),
    "largest columns": lambda: Net(lambda net, h, g: h.topk(2, 1).values.repeat(1, 2) + h.argmax(1, keepdim=True)),
    "picked columns": lambda: Net(
        lambda net, h, g: h + h.gather(1, g.label[:, None]) + h[torch.arange(h.size(0)), g.label][:, None]
    ),
    "joined": lambda: Net(lambda net, h, g: torch.stack([h, g.x]).amax(0) + torch.cat([h, g.x], 1).chunk(2, 1)[1]),
    "heads": lambda: Net(in_heads),
    "tokens": lambda: Net(lambda net, h, g: net.attend(*[torch.stack([h, g.x])] * 3)[0].sum(0)),
    "sequences": lambda: Net(lambda net, h, g: net.gru(torch.stack([h, g.x]))[0][1]),
    "jumps": lambda: Net(jumped("cat")),
    "recurrent jumps": lambda: Net(jumped("lstm")),
    "convolution": lambda: Net(lambda net, h, g: F.conv1d(h[:, None], torch.ones(1, 1, 3).double(), padding=1)[:, 0]),
    "embedding": lambda: Net(lambda net, h, g: h + F.embedding(g.label, net.lin.weight) + F.one_hot(g.label, WIDTH)),
    "selected": lambda: Net(chosen),
    "guarded": lambda: Net(guarded),
    "guarded by values": lambda: Net(guarded_by_values),
    "at places": lambda: Net(at_places),
    "counted": lambda: Net(lambda net, h, g: h / (torch.bincount(g.edge_index[1], minlength=h.size(0)) + 1)[:, None]),
    "masked": lambda: Net(lambda net, h, g: torch.where(g.train_mask[:, None], h, h.masked_fill(h > 0, 0.5))),
    "degrees": lambda: Net(with_degrees),
    "types of edges": lambda: Net(by_types),
    "numbers in branches": lambda: Net(by_numbers),
    "in place": lambda: Net(in_place),
    "examined": lambda: Net(examined),
    "function of autograd": lambda: Net(lambda net, h, g: Rounded.apply(2 * h)),
    "hook": lambda: Net(hooked(lambda gradient: 2 * gradient.clamp(-1, 1))),
    "hook of an unused parameter": lambda: with_doubled_gradients(Net(lambda net, h, g: h * net.lin.bias)),
    "hook that changes nothing": lambda: Net(hooked(logged)),
    "module in a layer": lambda: Net(
        lambda net, h, g: h, lambda a, b: pyg.GINConv(nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()))
    ),
    "attention": lambda: Net(lambda net, h, g: h.relu(), pyg.GATv2Conv),
    "degrees in a layer": lambda: Net(lambda net, h, g: h.relu(), pyg.MFConv),
    "layer of the user's": lambda: Net(lambda net, h, g: h, Looped),
    "outer product": lambda: Net(lambda net, h, g: torch.bmm(h[:, :, None], h[:, None]).sum(2)),
    "numbers of rows": lambda: Net(
        lambda net, h, g: (
            h + h.new_full((h.size(0), 1), 0.5) + torch.ones(h.shape[0] * 2, 1).view(-1, 2).sum(1, keepdim=True)
        )
    ),
}

WAYS: list[dict[str, Any]] = [{}, {"recompute": "layers"}, {"layout": "1d"}]
#: Each rank is a host, which keeps vertices of the other one.
PRELOADED = {"preload": Preload(2), "ranks_per_host": 1}


def steps(model: Any, g: Any, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """Trains three steps on one gradient after the other. Returns the output of the last one."""
    for _ in range(3):
        out = model(g.x, g)
        mean(out.square().sum(-1)[g.train_mask]).backward()
    return out


def refused(
    rank: int, offsets: list[int], names: list[str], options: dict[str, Any], of_part: dict[str, Any] | None = None
) -> list[str]:
    """Returns the texts of errors."""
    found = []
    for name in names:
        part = local(graph(), offsets=offsets, timeout=distributed.NEVER, **(of_part or {}))
        model = distribute(REFUSED[name][0](), part, **options)
        try:
            steps(model, part, lambda losses: loss_mean(losses, part))
            found.append("nothing was raised")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def by_offsets(names: list[str]) -> list[Any]:
    """Returns test parameters: all rows of a table over the first offsets, and a third of them over each of the others, where all are rare tests."""
    first, *others = OFFSETS
    some = [(offsets, names[at::3]) for at, offsets in enumerate(others)]
    return [(first, names), *some, *rare(*((offsets, names) for offsets in others))]


def words_of(value: list[Any]) -> str:
    return f"{len(value)} models" if isinstance(value[0], str) else str(value)


@pytest.mark.parametrize(("offsets", "names"), by_offsets([*REFUSED]), ids=words_of)
def test_what_depends_on_several_vertices_is_refused_by_name_on_every_rank(offsets, names):
    texts = distributed.run(refused, 2, offsets, names, {})
    wrong = [
        f"{name}: {text}"
        for found in texts
        for name, text in zip(names, found, strict=True)
        if not is_named(name, text)
    ]
    assert wrong == []


def is_named(name: str, text: str) -> bool:
    return (
        re.search(
            f"cannot be trained over ranks: .*({REFUSED[name][1]}).* depends on the rows of several vertices.*(loss_mean|each target)",
            text,
        )
        is not None
    )


def without_sources(rank: int) -> str:
    data = graph()
    data.edge_index = torch.cat([data.edge_index[:, data.edge_index[1] > 0], torch.tensor([[7], [0]])], 1)
    part = local(data, offsets=[0, 1, N], timeout=distributed.NEVER)
    with pytest.raises(Exception) as raised:
        distribute(REFUSED["rows of sources"][0](), part)(part.x, part)
    return str(raised.value)


def test_a_rank_of_one_vertex_and_one_edge_refuses_rows_of_sources():
    for text in distributed.run(without_sources, 2):
        assert is_named("rows of sources", text), text


def drawn_after(rank: int) -> Tensor:
    part, noise = local(graph(), offsets=OFFSETS[0], timeout=distributed.NEVER), torch.Generator().manual_seed(0)

    class Noisy(pyg.SAGEConv):
        def message(self, x_j: Tensor) -> Tensor:
            return x_j + torch.rand(1, generator=noise)

    model = distribute(Net(lambda net, h, g: h + torch.rand(1, generator=noise), Noisy), part)
    model(part.x, part)
    return torch.rand(1, generator=noise)


def test_trials_draw_from_no_generator():
    noise = torch.Generator().manual_seed(0)
    expected = [torch.rand(1, generator=noise) for _ in range(4)][-1]
    assert distributed.run(drawn_after, 2) == [expected, expected]


def alone(rank: int) -> list[Any]:
    data = graph()
    part = local(data, offsets=[0, N])
    pairs = []
    for change in (lambda net, h, g: h - h.mean(0), lambda net, h, g: h / float(h.norm()) / h.size(0)):
        net, expected = Net(change), steps(Net(change), data, torch.Tensor.mean)
        out = steps(distribute(net, part), part, lambda losses: loss_mean(losses, part))
        pairs.append(torch.allclose(expected, out))
    return pairs


def test_a_single_rank_has_all_rows():
    assert distributed.run(alone, 1) == [[True, True]]


@pytest.mark.parametrize(("options", "of_part"), [*((each, {}) for each in WAYS[1:]), ({}, PRELOADED)], ids=str)
def test_every_way_of_training_refuses(options, of_part):
    names = ["mean", "module", "number", "hook", "a later step"]
    for found in distributed.run(refused, 2, OFFSETS[0], names, options, of_part):
        assert [text for name, text in zip(names, found, strict=True) if not is_named(name, text)] == []


def kept(rank: int, offsets: list[int], names: list[str]) -> list[str]:
    data, wrong = graph(), []
    part = local(data, offsets=offsets, timeout=distributed.NEVER)
    for name in names:
        alone, net = KEPT[name](), KEPT[name]()
        expected = steps(alone, data, torch.Tensor.mean)
        out = steps(distribute(net, part), part, lambda losses: loss_mean(losses, part))
        number = part.n_id.numel()
        pairs = [(expected[part.n_id], out[:number])]
        pairs += [(one.grad, other.grad) for one, other in zip(alone.parameters(), net.parameters(), strict=True)]
        for a, b in pairs:
            if (a is None) != (b is None) or (a is not None and not torch.allclose(a, b, rtol=0, atol=1e-9)):
                wrong.append(name)
    return wrong


@pytest.mark.parametrize(("offsets", "names"), by_offsets([*KEPT]), ids=words_of)
def test_what_computes_each_row_separately_equals_one_process(offsets, names):
    assert distributed.run(kept, 2, offsets, names) == [[], []]


# --- questions about all vertices -----------------------------------------------------------------------------


class Asking(nn.Module):
    """Model that asks about all vertices. ``log`` has the answers."""

    def __init__(self, layer: Any = pyg.SAGEConv) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = pyg.SAGEConv(WIDTH, WIDTH).double(), layer(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, edge_index: Tensor, types: Tensor, edge_type: Any = None) -> Tensor:
        h = self.first(x, edge_index)
        if edge_type is not None and edge_index.size(1) > 9:
            h = h * int(edge_type.max()) + len(edge_type.unique()) * (edge_type == 1).sum() - edge_type.min()
            h = 2 * h if (edge_type == 2).any() and h.size(0) > 9 else h
        for each in types.unique():
            h = h + float(each) * int((types == each).sum()) * (types == each)[:, None]
        if (types == 2).any() and (h.argmax(1) == 1).any():
            h = int(types.max()) * h
        return self.second(h, edge_index)


class AskingLayer(pyg.MessagePassing):
    def __init__(self, *widths: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=2 * x if (x > 0.1).any() else x)


def equals(model: Any, args: tuple[Any, ...], data: Data, rows: Tensor) -> bool:
    """Returns True if a distributed model returns rows of the output in one process."""
    out, expected = model(*args), Asking()(data.x, data.edge_index, data.label, data.edge_type)[rows]
    return torch.allclose(out[: len(rows)], expected, rtol=0, atol=1e-9)


def asked_in_batches(rank: int) -> list[bool]:
    """Divides batches in several ways. Ranks have no vertices, one without edges, or as many vertices as edges."""
    data, model, found = graph(), distribute(Asking(), loader_of(2)), []
    for key, owner in enumerate((lambda n: n % 2, lambda n: 0 * n, lambda n: 0 * n + 1, lambda n: n == n[-1])):
        mfg = batch_of(data, torch.arange(3 * key, 3 * key + 3), [2, 2], key)
        mine = share_batch(data, mfg, owner(mfg.node).long(), 2, rank)
        rows = (owner(mfg.node) == rank).nonzero().view(-1)
        found.append(equals(model, (mine.x, mine.edge_index, mine.label, mine.edge_type), filled(data, mfg), rows))
    return found


def asked_in_parts(rank: int) -> list[bool]:
    """Asks with as many edges as vertices on a rank, under a plan that keeps vertices on one rank, and on hosts of one rank."""
    data, found = graph(), []
    first = (data.edge_index[1] < 15).nonzero().view(-1)
    kept = torch.ones(160, dtype=torch.bool).index_fill(0, first[15:], False)
    few = Data(edge_index=data.edge_index[:, kept], x=data.x, label=data.label, edge_type=data.edge_type[kept])
    part = local(few, offsets=OFFSETS[0], timeout=distributed.NEVER)
    args = part.x, part.edge_index, part.label.clone(), part.edge_type
    found.append(equals(distribute(Asking(), part), args, few, part.n_id))
    part = local(data, offsets=OFFSETS[0], timeout=distributed.NEVER)
    planned = part.planned(part.outer[: rank * 9], torch.ones(min(rank * 9, part.outer.numel()), dtype=torch.int64))
    under_plan = distribute(Guarded(), planned)
    assert planned.edge_index.size(1) >= part.edge_index.size(1) + 5 * rank
    out = under_plan(planned.x, part.edge_index, planned)
    found.append(torch.allclose(out, Guarded()(data.x, data.edge_index, data)[part.n_id], rtol=0, atol=1e-9))
    return [*found, asked_on_hosts(rank, OFFSETS[0], 1)]


class Outer(nn.Module):
    """Model around another one, which may be distributed on its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Tensor:
        h = self.inner(*args)
        return 2 * h if (h > 0.3).any() else h


def asked_in_a_model_in_a_model(rank: int) -> bool:
    data = graph()
    part = local(data, offsets=OFFSETS[0], timeout=distributed.NEVER)
    out = distribute(Outer(distribute(Asking(), part)), part)(part.x, part.edge_index, part.label)
    expected = Outer(Asking())(data.x, data.edge_index, data.label)
    return torch.allclose(out, expected[part.n_id], rtol=0, atol=1e-9)


def asked_on_hosts(rank: int, offsets: list[int], per_host: Any) -> bool:
    data = graph()
    part = local(data, offsets=offsets, preload=Preload(2), ranks_per_host=per_host, timeout=distributed.NEVER)
    rows = part.n_id[: part.num_counted]
    return equals(distribute(Asking(), part), (part.x, part.edge_index, part.label, part.edge_type), data, rows)


class Guarded(Asking):
    """Asks about attributes of a part, and about rows of kept vertices too."""

    def forward(self, x: Tensor, edge_index: Tensor, g: Any) -> Tensor:
        h = self.first(x, edge_index)
        if g.train_mask.any() and (g.label == 2).any():
            h = (h > 0.5).sum() * h * (g.edge_type == 1).sum() if g.edge_index.size(1) < 161 else h
        return self.second(h, edge_index)


def test_answers_equal_one_process_in_batches_parts_plans_and_hosts():
    assert distributed.run(asked_in_batches, 2) == [[True] * 4] * 2
    assert distributed.run(asked_in_parts, 2) == [[True] * 3] * 2
    assert distributed.run(asked_in_a_model_in_a_model, 2) == [True] * 2
    assert distributed.run(asked_on_hosts, 3, [0, 15, 25, N], [2, 1]) == [True] * 3


def asked_for_numbers(rank: int) -> list[Any]:
    data, found = graph(), []
    mfg = batch_of(data, torch.arange(3, 12), [3, 3], 5)
    mine, whole = share_batch(data, mfg, mfg.node % 2, 2, rank), filled(data, mfg)
    for change in (
        lambda net, h, g: 2 * h + torch.ones(g.num_nodes, 1) if g.num_nodes > 20 and g.num_edges > 40 else h,
        lambda net, h, g: h / g.num_nodes,
        lambda net, h, g: h * g.num_edges,
    ):
        try:
            out = distribute(Net(change), loader_of(2))(mine.x, mine)
            expected = Net(change)(whole.x, whole)[mfg.node % 2 == rank]
            found.append(torch.allclose(out[: len(expected)], expected, rtol=0, atol=1e-9))
        except ValueError as error:
            found.append(str(error))
    return found


def test_num_nodes_of_a_shared_batch_counts_all_ranks_or_is_refused():
    for compared, divided, multiplied in distributed.run(asked_for_numbers, 2):
        assert compared is True
        assert re.search("div in Net .* depends on the rows of several vertices", divided)
        assert re.search("mul in Net .* depends on the rows of several vertices", multiplied)


def asked_again(rank: int) -> list[str]:
    """Returns the errors where no rank could answer: in what the backward computes again, in a trimmed model, and at different places."""
    data, texts = graph(), []
    part = local(data, offsets=OFFSETS[0], timeout=distributed.NEVER)
    mfg = batch_of(data, torch.arange(3), [2, 2])
    mine = share_batch(data, mfg, mfg.node % 2, 2, rank)
    recomputed = distribute(Asking(AskingLayer), part, recompute="layers")
    trimmed = distribute(trim(Asking()), loader_of(2))
    mixing = distribute(Net(lambda net, h, g: h, Updated), loader_of(2))
    apart = distribute(Net(lambda net, h, g: h * (h > 0).any() if rank else h * (h > 0).all()), part)
    for model, args in (
        (apart, (part.x, part)),
        (recomputed, (part.x, part.edge_index, part.label)),
        (trimmed, (mine.x, mine.edge_index, mine.label)),
        (mixing, (mine.x, mine)),
    ):
        with pytest.raises(ValueError) as raised:
            model(*args)
        texts.append(str(raised.value))
    return texts


def test_questions_that_ranks_cannot_answer_together_are_refused():
    for apart, recomputed, trimmed, mixing in distributed.run(asked_again, 2):
        assert re.search(r"Updated \(first\) depends on the rows of several vertices", mixing)
        assert re.search("the next step is all over all vertices .* on rank 0 and any over all vertices", apart)
        assert re.search(r"any in AskingLayer \(second\) .* depends on the rows of several vertices", recomputed)
        assert re.search("unique in Asking .* depends on the rows of several vertices", trimmed)


#: What a trimmed model may do with numbers of rows and with rows of edges: the model, and a pattern of the error; "" if the model is right.
TRIMMED: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: Net(lambda net, h, g: h / h.size(0)), "div in Net"),
    (lambda: Net(lambda net, h, g: h / int(h.size(0))), r"int\(\) of a number of rows"),
    (
        lambda: Net(lambda net, h, g: h * math.log(h.size(0))),
        r"a number of rows \(size\(0\)\) that is used as a number in Net",
    ),
    (
        lambda: Net(lambda net, h, g: h if h.size(0) > 5 else -h),
        r"a number of rows \(size\(0\)\) that is compared in Net",
    ),
    (lambda: Net(lambda net, h, g: h if h.size(0) > 0 else -h), ""),
    (lambda: Net(lambda net, h, g: h if h.size(0) >= 1 else -h), ""),
    (lambda: Net(lambda net, h, g: h if h.size(0) == g.x.size(0) else -h), ""),
    (lambda: Net(lambda net, h, g: h if h.size(0) >= g.x.size(0) else -h), ""),
    (lambda: Net(lambda net, h, g: h if h.shape == g.x.shape else h if len(h) == len(g.x) else -h), ""),
    (lambda: Net(lambda net, h, g: h.view(h.size(0), -1) + torch.zeros(h.shape)), ""),
    (lambda: Net(times_weights, pyg.GATv2Conv), "mean in Net"),
]


def counted(rank: int) -> list[str]:
    data = graph()
    mfg = batch_of(data, torch.arange(3), [2, 2])
    batch, mine = filled(data, mfg), share_batch(data, mfg, mfg.node % 2, 2, rank)
    texts = []
    for make, _ in TRIMMED:
        model = distribute(trim(make()), loader_of(2))
        try:
            out = model(mine.x, mine)[: mine.batch_size]
            rows = [mfg.node.tolist().index(v) for v in mine.n_id[: mine.batch_size].tolist()]
            torch.testing.assert_close(out, make()(batch.x, batch)[rows])
        except ValueError as error:
            texts.append(str(error))
        else:
            texts.append("")
    return texts


def test_a_trimmed_model_may_use_numbers_of_rows_as_sizes_only():
    for texts in distributed.run(counted, 2):
        for text, (_, words) in zip(texts, TRIMMED, strict=True):
            assert re.search(words, text) if words else not text, text
