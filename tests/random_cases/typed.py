"""Law of random typed models: trimmed, they give the seeds' outputs and all gradients of the plain model, or an error says why not."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

import random

import torch
from random_cases.choices import Choice
from random_cases.models import (
    Case,
    Failure,
    Invalid,
    Outcome,
    Refused,
    cleared,
    namespace_of,
)
from torch_geometric.data import HeteroData

import salientpp
from salientpp.testing.steps import copy_values, difference, is_in_words

_TYPES = "a", "b"
_RELATIONS = ("a", "to", "a"), ("a", "of", "b"), ("b", "by", "a")
#: Layers for a relation, between two types or within one.
_CONVS = (
    "pyg.SAGEConv((6, 6), 6)", "pyg.SAGEConv((6, 6), 6, aggr='max')", "pyg.GraphConv((6, 6), 6)", "pyg.GATConv((6, 6), 3, heads=2, add_self_loops=False)",
    "pyg.GATv2Conv((6, 6), 6, add_self_loops=False)", "pyg.TransformerConv((6, 6), 3, heads=2)", "pyg.ResGatedGraphConv((6, 6), 6)", "pyg.GeneralConv((6, 6), 6)",
    "pyg.GENConv((6, 6), 6)", "pyg.SAGEConv((6, 6), 6, normalize=True)",
)  # fmt: skip
_HOMOGENEOUS = ("pyg.SAGEConv((6, 6), 6)", "pyg.GATConv((6, 6), 6, add_self_loops=False)", "pyg.GraphConv((6, 6), 6)")
#: Operations over rows of one type, {t}, or of all.
_ROWS = (
    "h = {{k: v.relu() for k, v in h.items()}}", "h = {{k: F.normalize(v, dim=1) for k, v in h.items()}}", "h = {{k: v - v.mean(0) for k, v in h.items()}}",
    "h = {{**h, '{t}': h['{t}'].softmax(0)}}", "h = {{**h, '{t}': h['{t}'] / h['{t}'].size(0) ** 0.5}}", "h = {{**h, 'a': h['a'] + h['b'].mean(0)}}",
    "h = {{**h, 'b': h['b'] * h['a'].sum().tanh()}}", "h = {{**h, '{t}': h['{t}'] + x['{t}'][: len(h['{t}'])]}}", "h = {{**h, '{t}': h['{t}'].cumsum(0) / 10}}",
)  # fmt: skip
_MODULES = {
    "self.l{n} = pyg.HeteroDictLinear(6, 6, ('a', 'b'))": "h = self.l{n}(h)",
    "self.l{n} = pyg.HeteroBatchNorm(6, 2)": "h = dict(zip(h, self.l{n}(torch.cat(list(h.values())), torch.arange(2).repeat_interleave(torch.tensor([len(v) for v in h.values()]))).split([len(v) for v in h.values()])))",
    "self.l{n} = nn.ModuleDict({{'a': nn.BatchNorm1d(6), 'b': nn.LayerNorm(6)}})": "h = {{k: self.l{n}[k](v) for k, v in h.items()}}",
}


def _layer(r: random.Random, number: int) -> Choice:
    kind = r.choice(("HeteroConv", "HeteroConv", "HGTConv", "to_hetero"))
    metadata = f"({list(_TYPES)!r}, {list(_RELATIONS)!r})"
    if kind == "HGTConv":
        made = f"pyg.HGTConv(6, 6, {metadata}, heads={r.choice((1, 2))})"
    elif kind == "to_hetero":
        made = f"pyg.to_hetero(Inner({r.choice(_HOMOGENEOUS)}, {r.choice(('nn.Identity()', 'nn.LayerNorm(6)', 'nn.BatchNorm1d(6)'))}), {metadata}, aggr={r.choice(('sum', 'mean', 'max'))!r})"
    else:
        convs = ", ".join(f"{relation!r}: {r.choice(_CONVS)}" for relation in _RELATIONS)
        made = f"pyg.HeteroConv({{{convs}}}, aggr={r.choice(('sum', 'mean', 'max', 'min'))!r})"
    top = """
        class Inner(nn.Module):
            def __init__(self, layer, norm):
                super().__init__()
                self.layer, self.norm = layer, norm

            def forward(self, x, edge_index):
                return self.norm(self.layer(x, edge_index)).relu()
    """
    return Choice(
        number,
        f"conv {kind}",
        top=top if kind == "to_hetero" else "",
        init=f"self.l{number} = {made}",
        forward=f"h = self.l{number}(h, edge_index)",
    )


def case_of(seed: int) -> Case:
    """Returns the random case of an integer."""
    r, found = random.Random(f"typed {seed}"), []
    for _ in range(r.choice((1, 2, 2, 3))):
        found.append(_layer(r, len(found)))
        for _ in range(r.choice((0, 1, 1))):
            number = len(found)
            if r.random() < 0.3:
                init, forward = r.choice(sorted(_MODULES.items()))
                found.append(
                    Choice(
                        number,
                        f"module {init.split('= ', 1)[1][:20]}",
                        init=init.format(n=number),
                        forward=forward.format(n=number),
                    )
                )
            else:
                text = r.choice(_ROWS).format(t=r.choice(_TYPES))
                found.append(Choice(number, f"rows {text}", forward=text))
    return Case(
        seed,
        tuple(found),
        modes=r.choice((("train",) * 3, ("train", "eval", "train"), ("eval",) * 3)),
        output=r.choice(("h['a']", "h['a']", "self.one(h['a'])", "self.one(h['a']).squeeze(1)")),
        target="typed",
    )


def graph() -> HeteroData:
    """Makes a graph with two types of vertices."""
    draw, data = torch.Generator().manual_seed(2), HeteroData()
    sizes = {"a": 60, "b": 40}
    for name, size in sizes.items():
        data[name].x = torch.randn(size, 6, generator=draw).double()
    for source, name, target in _RELATIONS:
        ends = [torch.randint(sizes[each] - 5, (130,), generator=draw) for each in (source, target)]
        data[source, name, target].edge_index = torch.stack(ends)
    return data


def _step(model: torch.nn.Module, batch: HeteroData, step: int, mode: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    model.train(mode == "train")
    x = {name: rows.clone().requires_grad_() for name, rows in batch.x_dict.items()}
    out = model(x, batch.edge_index_dict, *[None] * 6, step)[: batch["a"].batch_size]
    model.zero_grad()
    ((out * torch.arange(1.0, out.numel() + 1).double().view(out.shape).cos()).sum() + out.square().sum()).backward()
    found = {"output": out.detach(), **{f"buffer {name}": value.clone() for name, value in model.named_buffers()}}
    slopes = {**dict(model.named_parameters()), **{f"x of {name}": rows for name, rows in x.items()}}
    return found | {f"gradient of {name}": value.grad for name, value in slopes.items() if value.grad is not None}


def outcome_of(case: Case) -> Outcome:
    """Runs a case."""
    data = graph()
    loader = salientpp.NeighborLoader(
        data,
        [3, 2],
        input_nodes=("a", torch.arange(50).roll(case.seed % 7)),
        batch_size=1 if case.seed % 7 == 0 else 6,
        seed=case.seed,
    )
    with cleared():
        try:
            space = namespace_of(case)
            plain, other = space["make"](), space["make"]()
            copy_values(plain, other)
        except Exception as error:
            raise Invalid(f"{type(error).__name__}: {error}") from error
        converted = salientpp.nn.trim(other, check=case.seed % 3 == 0)  # otherwise the check would correct wrong rules
        for step, (batch, mode) in enumerate(zip(loader, case.modes)):
            try:
                expected = _step(plain, batch, step, mode)
            except Exception as error:
                raise Invalid(f"{type(error).__name__}: {error}") from error
            try:
                got = _step(converted, batch, step, mode)
            except Exception as error:
                if is_in_words(error, plain):
                    return Refused(str(error))
                return Failure(step, type(error).__name__, str(error)[:300])
            found = difference(expected, got)
            if found is not None:
                return Failure(step, *found)
    return None
