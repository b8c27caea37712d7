"""Choices of which random models consist: layers, changes of layers, operations on rows, and code that changes between calls.

A choice is a few lines of Python. All rows of a model have ``WIDTH`` columns, so that any choice can follow any other, and a model stays valid without
any of them. Names in the lines: ``h`` are the rows so far, ``hs`` the rows that were kept (first ``x``), ``self.l4`` the module of choice 4.
"""

# ruff: noqa: E501 (the lines of a table are short programs)

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WIDTH = 6


@dataclass(frozen=True)
class Choice:
    """Part of a random model.

    Attributes:
        number: its number in the model, which names its module.
        kind: what it does, for people.
        top: lines before the model's class.
        init: lines of the model's constructor.
        forward: lines of the model's forward.
        change: lines that run once, on the new ``model``.
        before: lines that run before each call of ``model``, whose number is ``step``.
        needs: number of the choice whose layer it changes or calls, or None.
        refuses: pattern of the errors with which a converted model may refuse it.
        mode: "evaluation" if it draws random numbers in training, and "written" if it writes to x. "one output" if the model must return one tensor, and
            "first order" if torch has no second derivatives of it.
    """

    number: int
    kind: str
    top: str = ""
    init: str = ""
    forward: str = ""
    change: str = ""
    before: str = ""
    needs: int | None = None
    refuses: str = ""
    mode: str = ""
    #: Names of linear maps [6, columns] inside the layer.
    linears: tuple[str, ...] = ()


# --- layers of PyG ---------------------------------------------------------------------------------------------

BOOL = (False, True)
AGGR = ("add", "mean", "max", "min", "std", "var", "softmax", ["mean", "max"], ["add", "min", "std"])
#: One aggregation whose result has the columns of the messages.
ONE = AGGR[:7]
MLP = "nn.Sequential(nn.Linear({}, 8), nn.Tanh(), nn.Linear(8, {}))"
NORMED = "nn.Sequential(nn.Linear({}, 8), nn.BatchNorm1d(8), nn.Linear(8, {}))"


@dataclass(frozen=True)
class Conv:
    """Strategy for a class of layers.

    Attributes:
        args: alternative positional arguments.
        options: keyword arguments with their values.
        weight: the forward may get ``edge_weight``.
        attr: option that makes the forward get ``edge_attr``; "" if the forward always gets it, None if it never does.
        call: arguments of the forward; ``{more}`` stands for those of edges.
        out: what follows the call.
        linears: names of linear maps of x.
        mode: as for :class:`Choice`.
    """

    args: tuple[str, ...]
    options: dict[str, Any]
    weight: bool = False
    attr: str | None = None
    call: str = "h, edge_index{more}"
    out: str = ""
    linears: tuple[str, ...] = ()
    mode: str = ""


def _options(**values: Any) -> dict[str, Any]:
    return values


_W = {"weight": True}
_T = "h, edge_index, edge_type{more}"
_ATTENTION = _options(
    negative_slope=(0.1,),
    add_self_loops=BOOL,
    bias=BOOL,
    residual=BOOL,
    fill_value=("mean", 0.5, "add"),
    aggr=("mean", "max"),
)
CONVS: dict[str, Conv] = {
    "AGNNConv": Conv(("",), _options(requires_grad=BOOL, add_self_loops=BOOL)),
    "ARMAConv": Conv(("6, 6",), _options(num_stacks=(1, 2), num_layers=(1, 2), shared_weights=BOOL, bias=BOOL), **_W),
    "AntiSymmetricConv": Conv(("6", "6, pyg.GATConv(6, 6, bias=False)"), _options(num_iters=(1, 2), bias=BOOL, gamma=(0.3,))),
    "APPNP": Conv(("1, 0.2", "2, 0.1"), _options(add_self_loops=BOOL, normalize=BOOL), **_W),
    "CGConv": Conv(("6, 3",), _options(aggr=ONE, batch_norm=BOOL, bias=BOOL), attr=""),
    "ChebConv": Conv(("6, 6, 2", "6, 6, 1"), _options(bias=BOOL), **_W),
    "ClusterGCNConv": Conv(("6, 6",), _options(diag_lambda=(0.5,), bias=BOOL), linears=("lin_out", "lin_root")),
    "DNAConv": Conv(
        ("6", "6, heads=2", "6, heads=2, groups=2"), _options(normalize=BOOL, add_self_loops=BOOL, bias=BOOL), weight=True,
        call="torch.stack([hs[0][: h.size(0)], h], 1), edge_index{more}",
    ),
    "DirGNNConv": Conv(("pyg.SAGEConv(6, 6)", "pyg.GATConv(6, 6, add_self_loops=False)", "pyg.GCNConv(6, 6)"), _options(alpha=(0.2,), root_weight=BOOL)),
    "EGConv": Conv(
        ("6, 6, num_heads=2", "6, 6, num_heads=1"),
        _options(aggregators=(["symnorm"], ["mean"], ["sum", "max"], ["symnorm", "std"]), num_bases=(2,), add_self_loops=BOOL, bias=BOOL),
    ),
    "EdgeConv": Conv((MLP.format(12, 6), "nn.Linear(12, 6)", NORMED.format(12, 6)), _options(aggr=ONE)),
    "FAConv": Conv(("6",), _options(eps=(0.3,), add_self_loops=BOOL, normalize=BOOL), call="h, hs[0], edge_index"),
    "FastRGCNConv": Conv(("6, 6, 3",), _options(num_bases=(2,), aggr=("add", "mean"), root_weight=BOOL, bias=BOOL), call=_T),
    "FeaStConv": Conv(("6, 6",), _options(heads=(1, 2), add_self_loops=BOOL, bias=BOOL)),
    "FiLMConv": Conv(("6, 6, 3",), _options(aggr=ONE), call=_T),
    "GATConv": Conv(("6, 3, heads=2", "6, 6", "6, 6, heads=2, concat=False"), _ATTENTION, attr="edge_dim=3", linears=("lin",)),
    "GATv2Conv": Conv(
        ("6, 3, heads=2", "6, 6", "6, 6, heads=2, concat=False"), {**_ATTENTION, "share_weights": BOOL}, attr="edge_dim=3", linears=("lin_l", "lin_r")
    ),
    "GCN2Conv": Conv(
        ("6, 0.2", "6, 0.1, theta=0.5, layer=2"), _options(shared_weights=BOOL, normalize=BOOL, add_self_loops=BOOL), weight=True,
        call="h, hs[0], edge_index{more}",
    ),
    "GCNConv": Conv(("6, 6",), _options(improved=BOOL, add_self_loops=BOOL, normalize=BOOL, bias=BOOL, aggr=ONE), weight=True, linears=("lin",)),
    "GENConv": Conv(
        ("6, 6",),
        _options(aggr=("softmax", "add", "max"), t=(0.5,), learn_t=BOOL, msg_norm=BOOL, learn_msg_scale=BOOL, norm=("batch", "layer"), num_layers=(1, 2), bias=BOOL),
        attr="edge_dim=3",
    ),
    "GINConv": Conv((MLP.format(6, 6), "pyg.Linear(6, 6)", NORMED.format(6, 6)), _options(eps=(0.4,), train_eps=BOOL, aggr=ONE)),
    "GINEConv": Conv((MLP.format(6, 6), "nn.Linear(6, 6)"), _options(eps=(0.4,), train_eps=BOOL, aggr=ONE, edge_dim=(3,)), attr="edge_dim=3"),
    "GMMConv": Conv(("6, 6, 3, 2",), _options(separate_gaussians=BOOL, bias=BOOL, aggr=ONE), attr=""),
    "GPSConv": Conv(
        ("6, pyg.GCNConv(6, 6)", "6, pyg.SAGEConv(6, 6)", "6, None"),
        _options(heads=(2,), norm=("batch_norm", "layer_norm", None), attn_type=("multihead", "performer")), mode="first order",
    ),
    "GatedGraphConv": Conv(("6, 1", "6, 2"), _options(aggr=ONE, bias=BOOL), **_W),
    "GeneralConv": Conv(
        ("6, 6",),
        _options(aggr=ONE, skip_linear=BOOL, heads=(2,), attention=BOOL, attention_type=("additive", "dot_product"), l2_normalize=BOOL, bias=BOOL),
        attr="in_edge_channels=3",
    ),
    "GraphConv": Conv(("6, 6",), _options(aggr=ONE, bias=BOOL), weight=True, linears=("lin_rel", "lin_root")),
    "HEATConv": Conv(
        ("6, 6, 2, 3, 2, 3, 4", "6, 3, 2, 3, 2, 3, 4, heads=2", "6, 6, 2, 3, 2, 3, 4, heads=2, concat=False"), _options(residual=(), root_weight=BOOL, bias=BOOL, negative_slope=(0.1,)),
        call="h, edge_index, node_type[: h.size(0)], edge_type, edge_attr",
    ),
    "HypergraphConv": Conv(("6, 6",), _options(bias=BOOL)),
    "LEConv": Conv(("6, 6",), _options(bias=BOOL, aggr=ONE), weight=True, linears=("lin1", "lin3")),
    "LGConv": Conv(("",), _options(normalize=BOOL, aggr=("mean", "max")), **_W),
    "MFConv": Conv(("6, 6, 4", "6, 6, 2"), _options(bias=BOOL)),
    "MixHopConv": Conv(("6, 2, [0, 1, 2]", "6, 6, [1]", "6, 3, [0, 2]"), _options(add_self_loops=BOOL, bias=BOOL), **_W),
    "NNConv": Conv(("6, 6, nn.Linear(3, 36)",), _options(aggr=ONE, root_weight=BOOL, bias=BOOL), attr=""),
    "PDNConv": Conv(("6, 6, 3, 4",), _options(add_self_loops=BOOL, normalize=BOOL, bias=BOOL), attr=""),
    "PNAConv": Conv(
        ("6, 6, ['mean', 'std'], ['identity', 'amplification'], torch.tensor([1, 5, 9, 3])", "6, 6, ['max', 'min'], ['linear'], torch.tensor([1, 5, 9, 3])"),
        _options(towers=(2,), pre_layers=(2,), post_layers=(2,), divide_input=BOOL, train_norm=BOOL), attr="edge_dim=3",
    ),
    "PPFConv": Conv((f"{MLP.format(10, 6)}, {MLP.format(6, 6)}", "nn.Linear(10, 6)"), _options(add_self_loops=BOOL, aggr=("mean",)), call="h, pos[: h.size(0)], normal[: h.size(0)], edge_index"),
    "PointGNNConv": Conv(("nn.Linear(6, 3), nn.Linear(9, 6), nn.Linear(6, 6)",), _options(aggr=ONE), call="h, pos[: h.size(0)], edge_index"),
    "PointNetConv": Conv((f"{MLP.format(9, 6)}, {MLP.format(6, 6)}", "nn.Linear(9, 6)"), _options(add_self_loops=BOOL, aggr=("mean",)), call="h, pos[: h.size(0)], edge_index"),
    "PointTransformerConv": Conv(("6, 6",), _options(add_self_loops=BOOL, aggr=("mean",)), call="h, pos[: h.size(0)], edge_index", linears=("lin", "lin_src", "lin_dst")),
    "RGATConv": Conv(
        ("6, 6, 3",),
        _options(attention_mechanism=("within-relation", "across-relation"), attention_mode=("additive-self-attention", "multiplicative-self-attention"), mod=("additive", "scaled", "f-additive", "f-scaled"), num_bases=(2,), bias=BOOL),
        attr="edge_dim=3", call=_T,
    ),
    "RGCNConv": Conv(("6, 6, 3",), _options(num_bases=(2,), num_blocks=(), aggr=("add", "mean"), root_weight=BOOL, bias=BOOL), call=_T),
    "ResGatedGraphConv": Conv(("6, 6",), _options(root_weight=BOOL, bias=BOOL, aggr=ONE), attr="edge_dim=3", linears=("lin_query", "lin_value")),
    "SAGEConv": Conv(("6, 6",), _options(aggr=AGGR, normalize=BOOL, root_weight=BOOL, project=BOOL, bias=BOOL), linears=("lin_l", "lin_r")),
    "SGConv": Conv(("6, 6, 1", "6, 6, 2"), _options(add_self_loops=BOOL, bias=BOOL), weight=True, linears=("lin",)),
    "SSGConv": Conv(("6, 6, 0.2, 2", "6, 6, 0.1"), _options(add_self_loops=BOOL, bias=BOOL), weight=True, linears=("lin",)),
    "SignedConv": Conv(("6, 3, True",), _options(bias=BOOL), call="h, edge_index, edge_index"),
    "SimpleConv": Conv(("",), _options(aggr=ONE, combine_root=("sum", "self_loop")), **_W),
    "SuperGATConv": Conv(("6, 6",), _options(attention_type=("MX", "SD"), add_self_loops=BOOL, bias=BOOL), mode="evaluation"),
    "TAGConv": Conv(("6, 6, 2", "6, 6, 1"), _options(normalize=BOOL, bias=BOOL), **_W),
    "TransformerConv": Conv(
        ("6, 3, heads=2", "6, 6", "6, 6, heads=2, concat=False"), _options(beta=BOOL, bias=BOOL, root_weight=BOOL, aggr=("mean", "max")), attr="edge_dim=3",
        linears=("lin_key", "lin_query", "lin_value"),
    ),
    "WLConvContinuous": Conv(("",), {}, **_W),
}  # fmt: skip

#: Layers that random models lack, with the reason.
WITHOUT = {
    "CuGraphGATConv": "needs cugraph",
    "CuGraphRGCNConv": "needs cugraph",
    "CuGraphSAGEConv": "needs cugraph",
    "DynamicEdgeConv": "computes its own edges, with a function of pyg-lib",
    "FusedGATConv": "needs dgNN",
    "GravNetConv": "computes its own edges, with a function of pyg-lib",
    "HANConv": "takes dictionaries",
    "HGTConv": "takes dictionaries",
    "HeteroConv": "takes dictionaries",
    "MeshCNNConv": "needs four edges of each mesh edge",
    "MessagePassing": "has no forward",
    "PANConv": "computes in float32",
    "SplineConv": "needs a function of pyg-lib",
    "WLConv": "gives colours, not rows",
    "XConv": "computes its own edges, with a function of pyg-lib",
}


def conv_of(name: str, r: random.Random, number: int) -> Choice:
    """Returns a layer of PyG with random options."""
    strategy = CONVS[name]
    args = [each for each in [r.choice(strategy.args)] if each]
    chosen = {key: r.choice(values) for key, values in strategy.options.items() if values and r.random() < 0.3}
    more = ""
    if strategy.attr == "":
        more = ", edge_attr"
    elif strategy.attr is not None and (
        r.random() < 0.4 or strategy.attr.partition("=")[0] in chosen or name == "GINEConv"
    ):
        key, _, value = strategy.attr.partition("=")
        chosen[key], more = int(value), ", edge_attr"
    elif strategy.weight and r.random() < 0.5:
        more = ", edge_weight"
    if "fill_value" in chosen and not more:
        del chosen["fill_value"]
    if chosen.get("normalize") is False and name == "GCNConv":
        chosen.pop("add_self_loops", None)
    args += [f"{key}={value!r}" for key, value in chosen.items()]
    if name == "SAGEConv" and isinstance(chosen.get("aggr"), list) and chosen.get("project"):
        args = [each for each in args if not each.startswith("project")]
    call = strategy.call.format(more=more)
    if name == "FAConv" and chosen.get("normalize") is False:
        call = "h, hs[0], edge_index, edge_weight"
    return Choice(
        number, f"conv {name}", init=f"self.l{number} = pyg.{name}({', '.join(args)})", forward=f"h = self.l{number}({call}){strategy.out}",
        linears=tuple(each for each in strategy.linears if not (each == "lin_r" and (chosen.get("share_weights") or chosen.get("root_weight") is False))),
        mode=strategy.mode,
    )  # fmt: skip


OWN = {
    "Own": """
        class Own(MessagePassing):
            def __init__(self, aggr="add"):
                super().__init__(aggr=aggr)
                self.lin = nn.Linear(6, 6)

            def forward(self, x, edge_index):
                return self.propagate(edge_index, x=self.lin(x))
    """,
    "OwnScaled": """
        class OwnScaled(pyg.SAGEConv):
            def message(self, x_j):
                return x_j.tanh()
    """,
    "OwnCentred": """
        class OwnCentred(pyg.GraphConv):
            def update(self, inputs):
                return inputs - inputs.mean(0)
    """,
    "OwnGCN": """
        class OwnGCN(pyg.GCNConv):
            def forward(self, x, edge_index):
                return super().forward(x - x.mean(0), edge_index)
    """,
    "OwnGAT": """
        class OwnGAT(pyg.GATConv):
            def edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size):
                return (alpha_j + alpha_i).sigmoid()
    """,
    "OwnAggregate": """
        class OwnAggregate(pyg.GINConv):
            def aggregate(self, inputs, index, ptr=None, dim_size=None):
                out = super().aggregate(inputs, index, ptr=ptr, dim_size=dim_size)
                return out / (1 + out.abs().max())
    """,
    "OwnLinear": """
        class OwnLinear(pyg.GCNConv):
            def __init__(self, columns, out):
                super().__init__(columns, out)
                self.lin = nn.Linear(columns, out)
    """,
}


def own_of(r: random.Random, number: int) -> Choice:
    """Returns a layer of the user's."""
    name = r.choice(sorted(OWN))
    args = {"Own": "", "OwnAggregate": "nn.Linear(6, 6)"}.get(name, "6, 6")
    return Choice(
        number,
        f"conv {name}",
        top=OWN[name],
        init=f"self.l{number} = {name}({args})",
        forward=f"h = self.l{number}(h, edge_index)",
    )


MODELS = {
    "GraphSAGE": "", "GCN": "", "GIN": "", "GAT": ", heads=2", "EdgeCNN": "",
    "PNA": ", aggregators=['mean', 'std'], scalers=['amplification'], deg=torch.tensor([1, 5, 9, 3])",
}  # fmt: skip


def model_of(r: random.Random, number: int) -> Choice:
    """Returns one of PyG's basic models, as a layer."""
    name = r.choice(sorted(MODELS))
    norm = r.choice(
        [
            None,
            None,
            "'batch_norm'",
            "'layer_norm'",
            "'graph_norm'",
            "'pair_norm'",
            "'instance_norm'",
            "'diff_group_norm', norm_kwargs=dict(groups=2)",
        ]
    )
    options = f", norm={norm}" if norm else ""
    options += r.choice(["", "", ", jk='cat'", ", jk='max'", ", jk='lstm'"]) + r.choice(
        ["", ", act='elu'", ", act_first=True"]
    )
    call = r.choice(["h, edge_index", "h, edge_index", "x=h, edge_index=edge_index"])
    if name == "GCN" and r.random() < 0.3:
        call += ", edge_weight=edge_weight"
    return Choice(
        number, f"model {name}", init=f"self.l{number} = pyg.{name}(6, 6, {r.choice((1, 2))}, 6{MODELS[name]}{options})", forward=f"h = self.l{number}({call})"
    )  # fmt: skip


def _block(r: random.Random, number: int) -> Choice:
    """Returns a layer inside another module."""
    inner = r.choice(["pyg.SAGEConv(6, 6)", "pyg.GCNConv(6, 6)", "pyg.GATConv(6, 3, heads=2)", "pyg.GENConv(6, 6)"])
    norm = r.choice(["nn.LayerNorm(6)", "nn.BatchNorm1d(6)", "pyg.LayerNorm(6)", "pyg.LayerNorm(6, mode='node')"])
    block = r.choice(["res+", "res", "dense", "plain"])
    made = r.choice(
        [
            f"pyg.DeepGCNLayer({inner}, {norm}, nn.ReLU(), '{'res' if block == 'dense' else block}', 0.0)",
            f"pyg.Sequential('x, edge_index', [({inner}, 'x, edge_index -> x'), {norm}, nn.Tanh(), (pyg.SAGEConv(6, 6), 'x, edge_index -> x')])",
            f"Wrapped({inner})",
            f"Alternating({inner})",
            f"Twofold({inner})",
        ]
    )
    top = {
        "Twofold": """
            class Twofold(nn.Module):
                def __init__(self, layer):
                    super().__init__()
                    self.layer = layer

                def forward(self, *args, **kwargs):
                    return self.layer(*args, **kwargs) + 0.5 * self.layer(*args, **kwargs)
        """,
        "Wrapped": """
            class Wrapped(nn.Module):
                def __init__(self, layer):
                    super().__init__()
                    self.layer, self.skip = layer, nn.Linear(6, 6)

                def forward(self, x, edge_index):
                    return self.layer(x, edge_index).relu() + self.skip(x)
        """,
        "Alternating": """
            class Alternating(nn.Module):
                def __init__(self, layer):
                    super().__init__()
                    self.layer, self.calls = layer, 0

                def forward(self, x, edge_index):
                    self.calls += 1
                    h = self.layer(x, edge_index)
                    return h - h.mean(0) if self.calls % 2 == 0 else h
        """,
    }.get(made.partition("(")[0], "")
    return Choice(
        number,
        f"block {made.partition('(')[0]}",
        top=top,
        init=f"self.l{number} = {made}",
        forward=f"h = self.l{number}(h, edge_index)",
    )


# --- normalisations and operations over rows ---------------------------------------------------------------------

#: Kind -> (module or "", expression for the new rows), in which ``self.l`` stands for the module.
ROWS: dict[str, dict[str, tuple[str, str]]] = {
    "norm": {
        **{name: (name, "self.l(h)") for name in (
            "nn.BatchNorm1d(6)", "nn.BatchNorm1d(6, track_running_stats=False)", "nn.BatchNorm1d(6, momentum=None, affine=False)", "nn.LayerNorm(6)",
            "nn.RMSNorm(6)", "nn.GroupNorm(2, 6)", "pyg.BatchNorm(6)", "pyg.LayerNorm(6)", "pyg.LayerNorm(6, mode='node')", "pyg.GraphNorm(6)",
            "pyg.PairNorm()", "pyg.PairNorm(scale_individually=True)", "pyg.DiffGroupNorm(6, groups=2)", "pyg.InstanceNorm(6)", "pyg.MeanSubtractionNorm()",
            "pyg.GraphSizeNorm()", "nn.Softmax(dim=0)", "nn.Softmax(dim=-2)", "nn.LogSoftmax(dim=-2)", "nn.Softmax(dim=1)", "nn.PReLU()",
        )},
        "nn.InstanceNorm1d(6)": ("nn.InstanceNorm1d(6)", "self.l(h.t()[None])[0].t()"),
        "nn.LayerNorm(6) of 3-D": ("nn.LayerNorm(6)", "self.l(h[:, None])[:, 0]"),
        "nn.BatchNorm1d(6) of 3-D": ("nn.BatchNorm1d(6)", "self.l(h[:, :, None])[..., 0]"),
    },
    "rows": {name: ("", name) for name in (
        "h - h.mean(0)", "h / (1e-3 + h.std(0))", "h.softmax(0)", "h.softmax(-2)", "h.cumsum(-2) / 10", "h + h.sum(-2) / 40", "h - h.amax(dim=(-2,))", "F.normalize(h, dim=-2)",
        "h - h.mean(-1, keepdim=True)", "F.normalize(h, dim=0)", "F.normalize(h, dim=1)", "h - h.max(0).values", "h.flip(0)", "h.roll(1, 0)",
        "h.cumsum(0) / 10", "h.sort(0).values", "h + h[:1]", "h + h[-1]", "h + h[h.abs().sum(1).argmax()]", "h + h[torch.tensor([0, 0])].mean(0)", "h + h[torch.tensor([0, x.size(0) - 1])].mean(0)", "h + h.index_select(0, torch.tensor([x.size(0) - 1, 0]))[:1]", "h @ (h.t() @ h).tanh()", "h + (h @ h.t()).tanh() @ h / 40",
        "torch.cdist(h, h, 2, 'donot_use_mm_for_euclid_dist').neg().softmax(1) @ h", "h.t().softmax(0).t()", "h.t().cumsum(1).t() / 10", "h.reshape(-1, 2, 3).transpose(1, 2).reshape(-1, 6)",
        "h.view(-1, 3).view(-1, 6).tanh()", "h.reshape(-1).reshape(h.shape)", "h.reshape(2, -1).flip(0).reshape(h.shape)", "torch.einsum('nd,ne->nd', h, h) / 6",
        "torch.einsum('nd,md->nm', h, h).softmax(1) @ h", "h + pyg.global_mean_pool(h, None)", "h + pyg.global_max_pool(h, h.new_zeros(h.size(0), dtype=torch.long))",
        "h * torch.linalg.vector_norm(h, dim=1, keepdim=True).clamp(max=2)", "h / (1 + torch.linalg.vector_norm(h))", "h.where(h > h.median(), h * 0.1)",
        "h.masked_fill(h < 0, 0)", "h.clamp(min=h.min().item() / 2)", "h * float(h.detach().abs().mean())", "h * torch.from_numpy(np.abs(h.detach().numpy()).mean(0))",
        "torch.cat([h[:, :3], h[:, 3:].tanh()], 1)", "torch.cat([h, h.mean(0, keepdim=True)], 0)[: h.size(0)]", "torch.cat([h.flip(0), h])[: h.size(0)]",
        "torch.stack([h, h.relu()]).mean(0)", "torch.stack([h, h.relu()], 1).amax(1)", "F.pad(h, (1, 0))[:, :6]", "h.unfold(1, 6, 1)[:, 0]",
        "h.index_select(0, torch.arange(h.size(0)))", "h[torch.arange(h.size(0) - 1, -1, -1)]", "h.index_add(0, torch.zeros(1, dtype=torch.long), h[:1])",
        "h.clone().index_fill_(0, torch.tensor([0]), 1.0)", "F.one_hot(h.argmax(1), 6).to(h) * h", "h * F.one_hot(h.argmax(0), h.size(0)).t().to(h).sum(1, keepdim=True).add(1)",
        "torch.where((h.argmax(0) == 0)[None], h, h / 2)", "h.expand(2, -1, -1).mean(0)", "h.repeat(2, 1)[: h.size(0)]", "h.repeat_interleave(2, 0)[::2]", "h.T.contiguous().T * 2",
        "torch.vmap(lambda row: row.softmax(0))(h)", "F.conv1d(h[:, None], torch.ones(1, 1, 3).double() / 3, padding=1)[:, 0]", "F.conv1d(h.t()[None], torch.ones(6, 6, 3).double() / 9, padding=1)[0].t()",
        "F.avg_pool1d(h[None].transpose(1, 2), 3, 1, 1)[0].t()", "F.scaled_dot_product_attention(h[None], h[None], h[None])[0]", "F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0]",
        "torch.logsumexp(h, 0) - h", "h - h.quantile(0.5, dim=0)", "h * (h.var() + 1).rsqrt()", "(h - h.mean()) / h.std()", "h.kthvalue(3, dim=1, keepdim=True).values + h",
        "h.gather(0, torch.zeros_like(h, dtype=torch.long)) + h", "h.topk(6, dim=1).values", "h.scatter_add(0, torch.zeros(1, 6, dtype=torch.long), h[-1:])", "torch.linalg.qr(h.t() @ h + torch.eye(6).double()).Q.detach().sum() * h",
        "h.addmm(h, (h.t() @ h).tanh())", "torch.baddbmm(h[None], h[None], (h.t() @ h).tanh()[None])[0]", "h.bernoulli(0.0) + h", "h.nan_to_num() + h.nansum(0)",
        "torch.cummax(h, 0).values", "torch.diff(h, dim=0, prepend=h[:1]) + h", "h.renorm(2, 0, 1.0)", "h.renorm(2, 1, 1.0)", "h.tril(-1) + h", "h.hypot(h.mean(0))", "h - h.logsumexp((0, 1))",
        "h.chunk(2, 0)[0].mean(0) + h", "h.split(3, 1)[1].repeat(1, 2) + h", "h + h.unbind(0)[0]", "h.unflatten(1, (2, 3)).mean(1).repeat(1, 2)", "h.movedim(0, 1).movedim(0, 1).sin()", "h.swapaxes(0, 1).softmax(1).swapaxes(0, 1)",
    )},
    "number of rows": {name: ("", name) for name in (
        "h / h.size(0)", "h / len(h) ** 0.5", "h * math.log(h.shape[0])", "h / h.numel()", "h + torch.linspace(0, 1, h.size(0))[:, None]", "h + torch.arange(len(h))[:, None] / len(h)",
        "h + torch.arange(h.size(0)).div(10)[:, None]", "h + torch.ones_like(h).mean(0) / h.shape[0]", "h + torch.ones_like(h).cumsum(0) / 10", "h + torch.ones_like(h).sum(0) / 40",
        "h + h.new_ones(h.shape).sum(0) / 40", "h + h.new_ones(len(h)).cumsum(0)[:, None].sin()", "h + torch.zeros(h.shape).add(1).sum() / 100", "h + torch.full((h.size(0), 1), 1 / h.size(0)).double()",
        "h + torch.full_like(h, 1 / h.numel())", "h + h.new_tensor([[i / 10] for i in range(len(h))])", "h * (1.0 if h.size(0) > 30 else 2.0)", "h[: max(1, len(h) // 2)].mean() * h", "h * sum(1 for _ in h) / 40",
        "h + torch.eye(len(h))[:, :1].double()", "h + torch.empty_like(h).fill_(1).sum(0, keepdim=True) / 40", "h + torch.ones(h.size()).double().norm() / 10", "h + torch.zeros_like(h)", "h + torch.ones(len(h), 6).double()",
        "h + h.new_zeros(h.size(0), 1)", "h * torch.tensor(h.shape[0]).double().rsqrt()", "h + torch.tensor(list(h.shape)).sum() / 100", "h / np.prod(h.shape)", "h / (h.nelement() / 6)", "h / (h.stride(1) + h.untyped_storage().size() / 1e4)", "h / (1 + h.nbytes / 1e4)",
        "h + degree(edge_index[1], h.size(0)).double()[:, None] / 10", "h + degree(edge_index[0], h.size(0)).double()[:, None] / 10", "h + degree(edge_index[1], x.size(0)).double()[: len(h), None]",
    )},
    "edges": {name: ("", name) for name in (
        "h + scatter(h[edge_index[0]], edge_index[1], 0, dim_size=h.size(0)) / 4", "h + torch.zeros_like(h).index_add_(0, edge_index[1], h[edge_index[0]]) / 4",
        "h + torch.sparse_coo_tensor(edge_index, edge_weight.detach(), (h.size(0),) * 2).t() @ h",
        "h + to_dense_adj(edge_index, max_num_nodes=h.size(0))[0].double().t() @ h / 4", "h + pyg.SimpleConv()(h, edge_index)", "h + softmax(h[edge_index[0]], edge_index[1], num_nodes=h.size(0)).mean(0)", "h + h[edge_index[0]].mean(0)", "h + h.index_select(0, edge_index[1]).amax(0)",
    )},
    "module": {
        **{f"{name} of {form}": (name, text) for name in ("nn.MultiheadAttention(6, 2)", "nn.MultiheadAttention(6, 2, batch_first=True)", "nn.MultiheadAttention(6, 3, bias=False, add_zero_attn=True)") for form, text in (
            ("2-D", "self.l(h, h, h)[0]"), ("[1, n, 6]", "self.l(h[None], h[None], h[None])[0][0]"), ("[n, 1, 6]", "self.l(h[:, None], h[:, None], h[:, None])[0][:, 0]"),
            ("[n, 2, 6]", "self.l(*[torch.stack([h, hs[-1][: len(h)]], 1)] * 3)[0].mean(1)"), ("2-D without weights", "self.l(h, h, h, need_weights=False)[0]"), ("seeds' query", "h + self.l(h[:1], h, h)[0]"),
        )},
        **{f"{name} of {form}": (name, text) for name in (
            "nn.TransformerEncoderLayer(6, 2, 8, 0.0)", "nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)", "nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, norm_first=True)",
            "nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 2)",
        ) for form, text in (("2-D", "self.l(h)"), ("[1, n, 6]", "self.l(h[None])[0]"), ("[n, 1, 6]", "self.l(h[:, None])[:, 0]"), ("[n, 2, 6]", "self.l(torch.stack([h, hs[-1][: len(h)]], 1)).mean(1)"))},
        **{f"{name} of {form}": (name, text) for name in ("nn.GRU(6, 6)", "nn.GRU(6, 6, batch_first=True)", "nn.LSTM(6, 6, batch_first=True)", "nn.RNN(6, 6)", "nn.GRU(6, 3, bidirectional=True, batch_first=True)") for form, text in (
            ("2-D", "self.l(h)[0]"), ("[1, n, 6]", "self.l(h[None])[0][0]"), ("[n, 1, 6]", "self.l(h[:, None])[0][:, 0]"), ("[n, 2, 6]", "self.l(torch.stack([h, hs[-1][: len(h)]], 1))[0].mean(1)"),
            ("last state", "h + self.l(h)[0][-1]"),
        )},
        "nn.GRUCell": ("nn.GRUCell(6, 6)", "self.l(h, hs[-1][: len(h)])"), "nn.LSTMCell": ("nn.LSTMCell(6, 6)", "self.l(h)[0]"), "nn.Bilinear": ("nn.Bilinear(6, 6, 6)", "self.l(h, hs[-1][: len(h)]) / 6"),
        "nn.Linear": ("nn.Linear(6, 6)", "self.l(h)"), "pyg.MLP": ("pyg.MLP([6, 8, 6])", "self.l(h)"), "pyg.MLP of layers": ("pyg.MLP([6, 8, 6], norm='layer_norm')", "self.l(h)"), "pyg.HeteroLinear": ("pyg.HeteroLinear(6, 6, 2)", "self.l(h, node_type[: len(h)])"),
        "nn.Conv1d": ("nn.Conv1d(6, 6, 3, padding=1)", "self.l(h.t()[None])[0].t()"), "nn.Conv1d of columns": ("nn.Conv1d(1, 2, 3, padding=1)", "self.l(h[:, None]).mean(1)"), "nn.Flatten": ("nn.Flatten(0)", "self.l(h).view(-1, 6).tanh()"),
        "pyg.AttentionalAggregation": ("pyg.AttentionalAggregation(nn.Linear(6, 1))", "h + self.l(h)"), "pyg.Set2Set": ("pyg.Set2Set(3, 2)", "h + self.l(h[:, :3])"), "pyg.SoftmaxAggregation": ("pyg.SoftmaxAggregation(learn=True)", "h + self.l(h)"),
        "pyg.TopKPooling": ("pyg.TopKPooling(6, 0.5)", "h + self.l(h, edge_index)[0].mean(0)"), "pyg.SAGPooling": ("pyg.SAGPooling(6, 0.5)", "h + self.l(h, edge_index)[0].mean(0)"), "pyg.ASAPooling": ("pyg.LayerNorm(6)", "h + self.l(h)"),
        "pyg.DMoNPooling": ("nn.Linear(6, 3)", "h + self.l(h).softmax(1) @ (self.l(h).softmax(1).t() @ h) / 40"), "virtual vertex": ("nn.Linear(6, 6)", "h + self.l(h.sum(0, keepdim=True)) / 40"), "nn.EmbeddingBag": ("nn.EmbeddingBag(6, 6)", "h + self.l(h.argmax(1)[:, None])"),
        "nn.Dropout": ("nn.Dropout(0.0)", "self.l(h)"), "nn.ReLU in place": ("nn.ReLU(inplace=True)", "self.l(h.clone())"), "pyg.JumpingKnowledge cat": ("nn.Linear(12, 6)", "self.l(torch.cat([hs[-1][: len(h)], h], -1))"),
        "pyg.PerformerAttention": ("nn.Linear(6, 6)", "self.l(h) * torch.sigmoid(h).sum(0) / 40"), "linear attention": ("nn.Linear(6, 18)", "(lambda q, k, v: q.softmax(1) @ (k.softmax(0).t() @ v))(*self.l(h).chunk(3, -1))"),
    },
    "jump": {
        **{f"pyg.JumpingKnowledge('{mode}')": (f"pyg.JumpingKnowledge('{mode}', 6, 2)", "self.l([*(each[: len(h)] for each in hs), h])" if mode != "cat" else "self.l([hs[-1][: len(h)], h])[:, :6]") for mode in ("max", "lstm", "cat")},
        "pyg.JumpingKnowledge of whole rows": ("pyg.JumpingKnowledge('max')", "self.l([hs[0], h, hs[-1]])"),
        **{text: ("", text) for text in ("h + hs[-1]", "h + hs[0]", "h + hs[0] * 0.5 + hs[-1]", "h * hs[-1].sigmoid()", "torch.cat([h[:, :3], hs[-1][:, 3:]], 1)", "torch.stack([hs[0], h]).mean(0)", "torch.maximum(h, hs[-1])", "h + hs[0].mean(0)", "torch.where(h > 0, h, hs[0])", "hs[0].addcmul(h, h)", "h - hs[-1].mean(0)", "h.lerp(hs[0], 0.3)")},
    },
}  # fmt: skip


def _rows(kind: str, r: random.Random, number: int) -> Choice:
    return rows_of(kind, r.choice(sorted(ROWS[kind])), number)


def rows_of(kind: str, name: str, number: int) -> Choice:
    """Returns an operation over rows of :data:`ROWS`."""
    made, text = ROWS[kind][name]
    init = f"self.l{number} = {made}" if made else ""
    once = "Transformer" in made or "need_weights" in text or "scaled_dot" in text
    return Choice(
        number, f"{kind}: {name}", mode="first order" if once else "", init=init, forward=f"h = {text.replace('self.l', f'self.l{number}')}",
    )  # fmt: skip


def activation_of(r: random.Random, number: int) -> Choice:
    """Returns an operation on single elements."""
    text = r.choice(
        [
            "h.relu()",
            "h.tanh()",
            "F.elu(h)",
            "F.leaky_relu(h)",
            "F.gelu(h)",
            "h.sigmoid()",
            "F.silu(h)",
            "h * 2",
            "-h",
            "F.dropout(h, 0.5, False)",
            "h.relu_()",
        ]
    )
    return Choice(number, f"act {text}", forward=f"h = {text}" if text != "h.relu_()" else "h = (h + 0).relu_()")


def kept(r: random.Random, number: int) -> Choice:
    """Returns a choice that keeps the rows for later ones."""
    return Choice(number, "keep", forward="hs.append(h)")


# --- changes of a layer --------------------------------------------------------------------------------------------

#: Changes of any layer {l}.
OF_LAYERS: dict[str, str] = {
    **{f"{name} on the instance": f"change_method({{l}}, {name!r}, lambda out: {value})" for name, value in (
        ("message", "2 * out"), ("message", "out.tanh()"), ("aggregate", "out.tanh()"), ("aggregate", "out - out.mean(0)"), ("update", "out.sin()"), ("propagate", "2 * out"), ("forward", "out - out.mean(0)"), ("forward", "out.sin()"),
    )},
    "update over all rows": "change_method({l}, 'update', lambda out: out - out.mean(0))",
    "forward hook": "{l}.register_forward_hook(lambda module, args, out: out.sin())",
    "forward hook over all rows": "{l}.register_forward_hook(lambda module, args, out: out - out.mean(0))",
    "forward hook that counts rows": "{l}.register_forward_hook(lambda module, args, out: out / out.size(0) ** 0.5)",
    "forward pre-hook": "{l}.register_forward_pre_hook(lambda module, args: (args[0].tanh(), *args[1:]))",
    "forward pre-hook over all rows": "{l}.register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(0), *args[1:]))",
    "backward hook": "{l}.register_full_backward_hook(lambda module, grads, outs: tuple(None if g is None else 2 * g for g in grads))",
    "backward pre-hook": "{l}.register_full_backward_pre_hook(lambda module, grads: tuple(None if g is None else g - g.mean(0) for g in grads))",
    "hook of the messages": "{l}.register_message_forward_hook(lambda module, args, out: 2 * out)",
    "hook of aggregate": "{l}.register_aggregate_forward_hook(lambda module, args, out: out.tanh())",
    "hook of propagate": "{l}.register_propagate_forward_hook(lambda module, args, out: out - out.mean(0))",
    "hook of the aggregation": "{l}.aggr_module.register_forward_hook(lambda module, args, out: 2 * out)",
    "hook of the aggregation over all rows": "{l}.aggr_module.register_forward_hook(lambda module, args, out: out - out.mean(0))",
    "hook before the aggregation": "{l}.aggr_module.register_forward_pre_hook(lambda module, args: (args[0].tanh(), *args[1:]))",
    "another aggregation": "{l}.aggr_module = {l}.aggr_module if isinstance({l}.aggr_module, pyg.aggr.DegreeScalerAggregation) else pyg.MaxAggregation()",
    "aggregation of a subclass": "{l}.aggr_module = Twice()",
    "forward of the aggregation": "{l}.aggr_module.forward = lambda *args, old={l}.aggr_module.forward, **kwargs: 2 * old(*args, **kwargs)",
    "explain": "{l}.explain = False",
    "gradient hook of a parameter": "[p.register_hook(lambda g: 2 * g) for p in {l}.parameters()]",
    "spectral_norm of all linear maps": "[parametrizations.spectral_norm(m) for m in {l}.modules() if isinstance(m, (nn.Linear, pyg.Linear))]",
    "hook of all linear maps": "[m.register_forward_hook(lambda m, args, out: out.sin()) for m in {l}.modules() if isinstance(m, (nn.Linear, pyg.Linear))]",
    "hook over all rows of all linear maps": "[m.register_forward_hook(lambda m, args, out: out - out.mean(0)) for m in {l}.modules() if isinstance(m, (nn.Linear, pyg.Linear))]",
    "backward hook of all linear maps": "[m.register_full_backward_hook(lambda m, grads, outs: tuple(None if g is None else 2 * g for g in grads)) for m in {l}.modules() if isinstance(m, (nn.Linear, pyg.Linear))]",
    "frozen": "{l}.requires_grad_(False)",
    "flow": "{l}.flow = 'target_to_source'",
    "data of parameters": "[p.data.mul_(0.5) for p in {l}.parameters()]",
    "hook for all modules": "handles or handles.append(nn.modules.module.register_module_forward_hook(lambda m, args, out: out.sin() if isinstance(m, (nn.Linear, pyg.Linear)) else None))",
    "hook before all modules": "handles or handles.append(nn.modules.module.register_module_forward_pre_hook(lambda m, args: (args[0].tanh(), *args[1:]) if isinstance(m, pyg.aggr.Aggregation) else None))",
}  # fmt: skip
#: Changes of a linear map {l}.{lin} of six columns inside a layer.
OF_LINEAR: dict[str, str] = {
    "linear map of torch": "{l}.{lin} = nn.Linear(6, columns({l}.{lin}))",
    "MLP": "{l}.{lin} = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, columns({l}.{lin})))",
    "LayerNorm": "{l}.{lin} = nn.Sequential({l}.{lin}, nn.LayerNorm(columns({l}.{lin})))",
    "BatchNorm": "{l}.{lin} = nn.Sequential({l}.{lin}, nn.BatchNorm1d(columns({l}.{lin})))",
    "adapter": "{l}.{lin} = Adapter({l}.{lin})",
    "counter": "{l}.{lin} = Counting({l}.{lin})",
    "hook": "{l}.{lin}.register_forward_hook(lambda m, args, out: out.sin())",
    "hook over all rows": "{l}.{lin}.register_forward_hook(lambda m, args, out: out - out.mean(0))",
    "hook that counts": "{l}.{lin}.register_forward_hook(count_calls)",
    "pre-hook": "{l}.{lin}.register_forward_pre_hook(lambda m, args: (args[0].tanh(),))",
    "backward hook": "{l}.{lin}.register_full_backward_hook(lambda m, grads, outs: tuple(None if g is None else 2 * g for g in grads))",
    "backward hook over all rows": "{l}.{lin}.register_full_backward_hook(lambda m, grads, outs: tuple(None if g is None else g - g.mean(0) for g in grads))",
    "weight_norm": "parametrizations.weight_norm({l}.{lin})",
    "old weight_norm": "torch.nn.utils.weight_norm({l}.{lin})",
    "spectral_norm": "parametrizations.spectral_norm({l}.{lin})",
    "old spectral_norm": "torch.nn.utils.spectral_norm({l}.{lin})",
    "parametrised": "torch.nn.utils.parametrize.register_parametrization({l}.{lin}, 'weight', Squared())",
    "parametrised counter": "torch.nn.utils.parametrize.register_parametrization({l}.{lin}, 'weight', Counted())",
    "forward": "{l}.{lin}.forward = lambda x, old={l}.{lin}.forward: old(x).sin()",
    "forward over all rows": "{l}.{lin}.forward = lambda x, old={l}.{lin}.forward: old(x - x.mean(0))",
    "subclass": "{l}.{lin}.__class__ = Doubled",
    "frozen": "{l}.{lin}.requires_grad_(False)",
    "pruned": "torch.nn.utils.prune.l1_unstructured({l}.{lin}, 'weight', 0.5)",
}  # fmt: skip
#: Modules of other layers, which pass no messages themselves.
OF_OTHERS = {"AntiSymmetricConv", "DirGNNConv", "GPSConv"}
HELPERS = """
    def change_method(layer, name, change):
        old = getattr(type(layer), name)
        setattr(layer, name, types.MethodType(lambda self, *args, **kwargs: change(old(self, *args, **kwargs)), layer))

    def columns(linear):
        return linear.weight.size(0)

    def count_calls(module, args, out):
        module.calls = getattr(module, "calls", 0) + 1
        return out * module.calls

    class Twice(pyg.SumAggregation):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    class Doubled(pyg.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Adapter(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear, self.down, self.up = linear, nn.Linear(6, 2), nn.Linear(2, columns(linear))

        def forward(self, x):
            return self.linear(x) + self.up(self.down(x).relu())

    class Counting(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.linear(x) * self.calls

    class Squared(nn.Module):
        def forward(self, weight):
            return weight * weight.abs()

    class Counted(nn.Module):
        calls = 0

        def forward(self, weight):
            self.calls += 1
            return weight * self.calls
"""


def changes_of(layer: Choice, r: random.Random, number: int) -> Choice:
    """Returns a change of a layer, which may happen when the model is made or later."""
    path = f"model.l{layer.number}"
    linears = list(layer.linears)
    if linears and r.random() < 0.5:
        kind = r.choice(sorted(OF_LINEAR.keys() - LEFT_OUT.keys()))
        lin = r.choice(linears)
        text, name = OF_LINEAR[kind].format(l=path, lin=lin), f"change {lin}: {kind}"
    else:
        is_layer = layer.kind.partition(" ")[2] not in OF_OTHERS
        kind = r.choice(
            [
                each
                for each in sorted(OF_LAYERS)
                if is_layer or re.search(r"register_f|modules\(|parameters\(|requires_grad", OF_LAYERS[each])
            ]
        )
        text, name = OF_LAYERS[kind].format(l=path, name=f"l{layer.number}"), f"change: {kind}"
    if r.random() < 0.25:
        step = r.choice((1, 2))
        return Choice(
            number, f"{name} later", before=f"if step == {step}:\n    {text}\n    model.double()", needs=layer.number
        )
    return Choice(number, name, change=text, needs=layer.number)


# --- code that changes, and code that writes -----------------------------------------------------------------------

#: Name -> (constructor, forward, lines before a call, mode).
MOMENTS: dict[str, tuple[str, str, str, str]] = {
    **{f"{how}: {what}": ("self.epoch = 0", f"if {condition}:\n    h = {what}", "model.epoch = step", "") for how, condition in (
        ("attribute", "self.epoch > 0"), ("int argument", "step > 0"), ("late attribute", "self.epoch == 2"), ("training", "self.training"), ("gradients", "torch.is_grad_enabled()"), ("requires_grad", "h.requires_grad"),
        ("size of the batch", "x.size(0) > 34"), ("edges of the batch", "edge_index.size(1) > 30"), ("values", "float(x.detach().sum()) > 0"), ("inference", "not torch.is_inference_mode_enabled()"),
    ) for what in ("h - h.mean(0)", "h.tanh()", "h / h.size(0) ** 0.5", "h.flip(0)")},
    "float argument": ("", "h = h * (1 + step / 10)", "", ""),
    "tensor argument": ("", "h = h - h.mean(0) * (torch.tensor(step) > 0)", "", ""),
    "module switched on": ("self.n{k} = nn.Identity()", "h = self.n{k}(h)", "if step == 1:\n    model.n{k} = nn.BatchNorm1d(6).double()", ""),
    "module set later": ("self.n{k} = None", "h = h if self.n{k} is None else self.n{k}(h)", "if step == 1:\n    model.n{k} = nn.BatchNorm1d(6).double()", ""),
    "function set later": ("self.f{k} = torch.tanh", "h = self.f{k}(h)", "if step == 1:\n    model.f{k} = lambda h: h - h.mean(0)", ""),
    "statistics set to None": ("self.n{k} = nn.BatchNorm1d(6)", "h = self.n{k}(h)", "model.eval()\nif step == 1:\n    model.n{k}.running_mean = model.n{k}.running_var = None\n    model.n{k}.track_running_stats = False", ""),
    "norm in evaluation": ("self.n{k} = nn.BatchNorm1d(6)", "h = self.n{k}(h)", "model.n{k}.train(step == 1)", ""),
    "layer dropped later": ("self.n{k} = nn.ModuleList([pyg.SAGEConv(6, 6), pyg.GCNConv(6, 6)])", "for layer in self.n{k}:\n    h = layer(h, edge_index)", "if step == 1:\n    del model.n{k}[1]", ""),
    "layer added later": ("self.n{k} = nn.ModuleList([pyg.SAGEConv(6, 6)])", "for layer in self.n{k}:\n    h = layer(h, edge_index)", "if step == 1:\n    model.n{k}.append(pyg.GATConv(6, 6).double())", ""),
    "layers in another order": ("self.n{k} = nn.ModuleList([pyg.SAGEConv(6, 6), pyg.GCNConv(6, 6)])", "for layer in self.n{k} if step % 2 else reversed(self.n{k}):\n    h = layer(h, edge_index)", "", ""),
    "layer replaced later": ("self.n{k} = pyg.SAGEConv(6, 6)", "h = self.n{k}(h, edge_index)", "if step == 1:\n    model.n{k} = pyg.GATConv(6, 6).double()", ""),
    "mixup later": ("", "h = h if step == 0 else 0.7 * h + 0.3 * h.flip(0)", "", ""),
    "residual later": ("", "h = h if step == 0 else h + hs[0]", "", ""),
    "cumsum later": ("", "h = h if step < 2 else h.cumsum(0) / 10", "", ""),
    "norm over all later": ("", "h = h if step == 0 else F.normalize(h, dim=0)", "", ""),
    "attention over rows later": ("self.n{k} = nn.MultiheadAttention(6, 2)", "h = h if step == 0 else self.n{k}(h, h, h)[0]", "", ""),
    "3-D later": ("self.n{k} = nn.GRU(6, 6, batch_first=True)", "h = self.n{k}(h[:, None])[0][:, 0] if step == 0 else self.n{k}(h)[0]", "", ""),
    "call counter": ("self.count = 0", "self.count += 1\nh = h * self.count", "", ""),
    "mean of the last call": ("self.mean = 0", "h, self.mean = h - self.mean, h.detach().mean(0)", "", ""),
    "mean of the last call, columns": ("self.mean = 0", "h, self.mean = h - self.mean, float(h.detach()[0].mean())", "", ""),
    "buffer by assignment": ("self.register_buffer('ema', torch.zeros(6))", "self.ema = 0.9 * self.ema + x.detach().mean(0)\nh = h + self.ema", "", ""),
    "buffer by assignment, of h": ("self.register_buffer('ema', torch.zeros(6))", "self.ema = 0.9 * self.ema + h.detach().mean(0)\nh = h + self.ema", "", ""),
    "buffer in place": ("self.register_buffer('ema', torch.zeros(6))", "self.ema.mul_(0.9).add_(h.detach().mean(0))\nh = h + self.ema", "", ""),
    "dictionary": ("self.seen = {{}}", "self.seen['n'] = self.seen.get('n', 0) + 1\nh = h / self.seen['n']", "", ""),
    "list": ("self.log = []", "self.log.append(1)\nh = h * len(self.log)", "", ""),
    "list of rows": ("self.log = []", "self.log.append(h.detach().mean(0))\nh = h + sum(self.log)", "", ""),
    "object": ("self.state = types.SimpleNamespace(n=0)", "self.state.n += 1\nh = h * self.state.n", "", ""),
    "generator": ("self.numbers = itertools.count(1)", "h = h * next(self.numbers)", "", ""),
    "parameter data": ("self.p{k} = nn.Parameter(torch.ones(6))", "self.p{k}.data.mul_(1.1)\nh = h * self.p{k}", "", ""),
    "parameter in place": ("self.p{k} = nn.Parameter(torch.ones(6))", "with torch.no_grad():\n    self.p{k}.add_(0.1)\nh = h * self.p{k}", "", ""),
    "x in place": ("", "x.mul_(2)", "", "written"),
    "x in place through h": ("", "hs[0].add_(1)", "", "written"),
    "x in place of rows": ("", "x[:3] = 0", "", "written"),
    "x in place by a module": ("self.r{k} = nn.ReLU(inplace=True)", "self.r{k}(x)", "", "written"),
    "edge weights in place": ("", "edge_weight.mul_(2)", "", "written"),
    "gradient hook": ("", "if h.requires_grad:\n    h.register_hook(lambda g: g / (1 + g.abs().mean()))", "", ""),
    "gradient hook of rows": ("", "if h.requires_grad:\n    h.register_hook(lambda g: 2 * g)", "", ""),
    "retain_grad": ("", "if h.requires_grad:\n    h.retain_grad()", "", ""),
    "gradient inside": ("", "if h.requires_grad:\n    h = h + torch.autograd.grad(h.square().sum(), h, create_graph=True)[0]", "", ""),
    "gradient of x inside": ("", "if x.requires_grad:\n    h = h + torch.autograd.grad(h.sin().sum(), x, create_graph=True)[0][: len(h)]", "", ""),
    "detached": ("", "h = h.detach() + h * 0.5", "", ""),
    "no_grad inside": ("", "with torch.no_grad():\n    m = h.mean(0)\nh = h - m", "", ""),
    "enable_grad inside": ("", "with torch.enable_grad():\n    h = h * 2", "", ""),
    "autograd.Function": ("", "h = Mixing.apply(h)", "", ""),
    "checkpoint": ("self.n{k} = nn.Linear(6, 6)", "h = torch.utils.checkpoint.checkpoint(self.n{k}, h, use_reentrant=False)", "", ""),
    "numpy": ("", "h = h + torch.from_numpy(h.detach().numpy().mean(0))", "", ""),
    "try": ("", "try:\n    h = h.view(7, -1).view(-1, 6)\nexcept RuntimeError:\n    h = h.tanh()", "", ""),
    "inner model": ("self.n{k} = pyg.GCN(6, 6, 2)", "h = self.n{k}(x, edge_index)[: len(h)] + h", "", ""),
    "random with a seed": ("", "h = h + torch.rand(6, generator=torch.Generator().manual_seed(step)).double()", "", ""),
    "random of all rows": ("", "h = h + torch.rand(x.shape, generator=torch.Generator().manual_seed(step)).double()[: len(h)]", "", ""),
    "edges of its own": ("", "h = pyg.SimpleConv('mean')(h, edge_index.flip(0)) if len(h) == x.size(0) else h", "", ""),
    "other edges": ("self.n{k} = pyg.SAGEConv(6, 6)", "h = self.n{k}(h, edge_index[:, ::2])", "", ""),
    "edges with loops": ("self.n{k} = pyg.SAGEConv(6, 6)", "h = self.n{k}(h, torch_geometric.utils.add_self_loops(edge_index, num_nodes=len(h))[0])", "", ""),
    "other edges later": ("self.n{k} = pyg.SAGEConv(6, 6)", "h = self.n{k}(h, edge_index if step == 0 else edge_index[:, ::2])", "", ""),
    "weights later": ("self.n{k} = pyg.GCNConv(6, 6)", "h = self.n{k}(h, edge_index, None if step == 0 else edge_weight)", "", ""),
    "learnt weights": ("self.n{k}, self.w{k} = pyg.GCNConv(6, 6), nn.Linear(3, 1)", "h = self.n{k}(h, edge_index, self.w{k}(edge_attr).sigmoid().view(-1))", "", ""),
    "attention weights": ("self.n{k} = pyg.GATConv(6, 6)", "h, a = self.n{k}(h, edge_index, return_attention_weights=True)\nh = h * a[1].mean()", "", ""),
    "same layer twice": ("self.n{k} = pyg.SAGEConv(6, 6)", "h = self.n{k}(self.n{k}(h, edge_index).relu(), edge_index)", "", ""),
    "pair of rows": ("self.n{k} = pyg.SAGEConv(6, 6)", "h = self.n{k}((h, h), edge_index)", "", ""),
    "pair of other rows": ("self.n{k} = pyg.SAGEConv(6, 6)", "h = self.n{k}((h, hs[0]), edge_index)", "", ""),
    "size": ("self.n{k} = pyg.SAGEConv(6, 6)", "h = self.n{k}(h, edge_index, size=(h.size(0), h.size(0)))", "", ""),
    "unused layer": ("self.n{k} = pyg.SAGEConv(6, 6)", "self.n{k}(h, edge_index)", "", ""),
    "layer for a penalty": ("self.n{k} = pyg.SAGEConv(6, 6)", "h = h + self.n{k}(h, edge_index).square().mean() / 10", "", ""),
    "parallel layers": ("self.n{k} = nn.ModuleList([pyg.SAGEConv(6, 6), pyg.GATConv(6, 6)])", "h = sum(layer(h, edge_index) for layer in self.n{k})", "", ""),
    "product of layers": ("self.n{k} = nn.ModuleList([pyg.SAGEConv(6, 6), pyg.GATConv(6, 6)])", "h = self.n{k}[0](h, edge_index) * self.n{k}[1](x, edge_index).sigmoid()", "", ""),
    **{f"one column of {layer}": (f"self.n{{k}}, self.m{{k}} = pyg.{layer}, nn.Linear(1, 6)", "h = self.m{k}(self.n{k}(h, edge_index))", "", "") for layer in (
        "SAGEConv(6, 1)", "SAGEConv(6, 1, 'max')", "GCNConv(6, 1)", "GraphConv(6, 1)", "GATConv(6, 1)", "GATv2Conv(6, 1)", "TransformerConv(6, 1)",
    )},
    "loop over a layer": ("self.n{k} = pyg.GCNConv(6, 6)", "for _ in range(2):\n    h = self.n{k}(h, edge_index).tanh()", "", ""),
    "loop that grows": ("self.n{k} = pyg.GCNConv(6, 6)", "for _ in range(1 + min(step, 1)):\n    h = self.n{k}(h, edge_index).tanh()", "", ""),
}  # fmt: skip
#: Moments with which a converted model may refuse to run, and the words.
REFUSED = {
    "layer dropped later": "same layers in the same order",
    "layer added later": "same layers in the same order",
    "layers in another order": "same layers in the same order",
    "loop that grows": "same layers in the same order",
    "other edges later": "other edges or further arguments now",
    # Products keep the rows that they get for the backward, where PyG keeps copies, so torch raises an error.
    **{name: "modified (by an )?inplace" for name in MOMENTS if name.startswith("x in place")},
}
#: Choices that are not generated, with what a trimmed model does wrong.
LEFT_OUT = {
    "generator": "further passes advance it",
}
MIXING = """
    class Mixing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return h * 2

        @staticmethod
        def backward(ctx, g):
            return g - g.mean(0)
"""


def moment_of(r: random.Random, number: int) -> Choice:
    """Returns code that changes between calls, or that writes."""
    kind = r.choice(sorted(MOMENTS.keys() - LEFT_OUT.keys()))
    init, forward, before, mode = (text.format(k=number) if text else "" for text in MOMENTS[kind])
    return Choice(
        number, f"moment {kind}", top=MIXING if "Mixing" in forward else "", init=init, forward=forward, before=before, mode=mode,
        refuses=REFUSED.get(kind, ""),
    )  # fmt: skip


#: Changes of the whole model.
OF_MODEL: dict[str, str] = {
    "forward hook": "model.register_forward_hook(lambda module, args, out: out - out.mean(0))",
    "forward hook of rows": "model.register_forward_hook(lambda module, args, out: out.sin())",
    "forward hook of the number of rows": "model.register_forward_hook(lambda module, args, out: out / out.size(0) ** 0.5)",
    "forward pre-hook": "model.register_forward_pre_hook(lambda module, args: (args[0].tanh(), *args[1:]))",
    "forward pre-hook over all rows": "model.register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(0), *args[1:]))",
    "backward hook": "model.register_full_backward_hook(lambda module, grads, outs: None)",
    "forward on the instance": "model.forward = lambda *args, old=model.forward: (lambda out: out - out.mean(0))(old(*args))",
    "gradient hook": "[p.register_hook(lambda g: 2 * g) for p in model.parameters()]",
    "half the layers frozen": "[p.requires_grad_(False) for p in list(model.parameters())[::2]]",
    "inner modules in evaluation": "model.train(); [m.eval() for m in list(model.modules())[1:][::2]]",
}


def _whole(r: random.Random, number: int) -> Choice:
    kind = r.choice(sorted(OF_MODEL))
    return Choice(
        number, f"whole model: {kind}", change=OF_MODEL[kind], mode="one output" if kind.startswith("forward") else ""
    )


def _conv(r: random.Random, number: int) -> Choice:
    return conv_of(r.choice(sorted(CONVS)), r, number)


#: Strategies with their weights.
STRATEGIES: list[tuple[Callable[[random.Random, int], Choice], int]] = [
    (_conv, 34), (own_of, 3), (model_of, 4), (_block, 4), (activation_of, 6), (kept, 5), (moment_of, 14), (_whole, 2),
    (lambda r, k: _rows("norm", r, k), 6), (lambda r, k: _rows("rows", r, k), 7), (lambda r, k: _rows("number of rows", r, k), 5), (lambda r, k: _rows("edges", r, k), 2),
    (lambda r, k: _rows("module", r, k), 8), (lambda r, k: _rows("jump", r, k), 6),
]  # fmt: skip


def again(layer: Choice, number: int) -> Choice:
    """Returns a second call of a layer."""
    return Choice(number, "shared", forward=layer.forward, needs=layer.number)


def choices(r: random.Random) -> tuple[Choice, ...]:
    """Returns the choices of a random model. The first and the last layers are mostly layers of PyG."""
    found: list[Choice] = []
    for number in range(r.choice((1, 2, 2, 3, 3, 4, 5))):
        strategies, weights = zip(*STRATEGIES, strict=True)
        found.append(r.choices(strategies, weights)[0](r, number))
    common = ("SAGEConv", "GCNConv", "GATConv", "GINConv", "GraphConv", "TransformerConv", "GATv2Conv")
    for _ in range(r.choice((0, 1, 1, 2))):
        found.append(conv_of(r.choice(common), r, len(found)))
    layers = [each for each in found if each.kind.startswith("conv")]
    for layer in r.sample(layers, min(len(layers), r.choice((0, 0, 1, 1, 2)))):
        found.append(changes_of(layer, r, len(found)))
    if layers and r.random() < 0.15:
        found.append(again(r.choice(layers), len(found)))
    if not any(each.kind.startswith(("conv", "model", "block")) for each in found):
        found.append(conv_of("SAGEConv", r, len(found)))
    return tuple(found)
