"""Law of random models over batches with sums: merged, they give the seeds' outputs and all gradients of whole batches, or say why not.

One process makes the batches: some of a whole batch's last vertices are left out, as if other ranks owned them, and their rows are summed by hand.
"""

# ruff: noqa: E501 (tables)

from __future__ import annotations

import random

from random_cases.choices import CONVS
from random_cases.drawn import BY_ROW, Taste, drawn, one_of
from random_cases.models import Case, Outcome, compared

import salientpp
from salientpp.testing.steps import summed

#: Layers that need attributes of vertices, of which a batch with sums has none but x.
_PLACED = {name for name, conv in CONVS.items() if any(word in conv.call for word in ("pos", "normal", "node_type"))}
#: Layers that can be the first one, with the reduction of their sums.
_MERGES, _OTHER = (
    ("SAGEConv", "GINConv", "GraphConv", "GCNConv"),
    r"project=True|GCNConv\((?!.*normalize=False)|BatchNorm",
)
_FIRST = {
    "sum": one_of(_MERGES, refuses=_OTHER, aggr=("add", "mean")),
    "max": one_of(_MERGES[:3], refuses=_OTHER, aggr=("max",)),
}
#: Layers that read their edges in ``propagate`` only.
_LATER = one_of(
    (*_MERGES, "SAGEConv", "GraphConv", "GATConv", "GATv2Conv", "TransformerConv", "ResGatedGraphConv", "EdgeConv", "CGConv", "GINEConv", "NNConv", "GMMConv", "FiLMConv", "GatedGraphConv", "LEConv", "SimpleConv"),
    refuses=_OTHER + "|num_layers=2|6, 2",
)  # fmt: skip
#: Operations that marked tensors allow.
_ALLOWED = [each for each in BY_ROW if each[0] == "jump" or each[1] in ("nn.LayerNorm(6)", "nn.PReLU()", "nn.Softmax(dim=1)", "F.normalize(h, dim=1)", "h.masked_fill(h < 0, 0)", "nn.Linear", "nn.Dropout", "torch.cat([h[:, :3], h[:, 3:].tanh()], 1)", "torch.stack([h, h.relu()], 1).amax(1)", "pyg.MLP of layers")]  # fmt: skip


def case_of(seed: int) -> Case:
    """Returns the random case of an integer."""
    r = random.Random(f"merged {seed}")
    reduction = r.choice(("sum", "mean", "mean", "max"))
    hops = r.choice((1, 2, 2, 3))
    first = _FIRST["max" if reduction == "max" else "sum"]
    chosen = drawn(
        r,
        Taste(
            first, _LATER, _ALLOWED, ("node_type", "pos", "normal"), depths=(hops,) if r.random() < 0.9 else (hops, 3)
        ),
    )
    # Whether the largest value of a batch is among the rows that it lacks is chance.
    chosen = tuple(each for each in chosen if "OwnAggregate" not in each.init) or (first(r, 0),)
    gone = {each.needs for each in chosen} - {each.number for each in chosen} - {None}
    chosen = tuple(each for each in chosen if each.needs not in gone)
    weighted = next((each for each in chosen if each.kind.startswith("conv")), None)
    has_weight = weighted is not None and "edge_weight" in weighted.forward
    fanouts = {1: "[6]", 2: "[3, 5]", 3: "[2, 2, 4]"}[hops]
    options = {"reduction": reduction, "weight": "edge_weight" if has_weight and r.random() < 0.9 else None}
    modes = r.choice((("train", "train"), ("train", "eval"), ("eval", "train"), ("no_grad", "train")))
    penalty = r.choice(("none", "none", "none", "hessian"))
    if any(each.mode == "first order" for each in chosen):
        penalty = "none"
    if any(each.mode == "evaluation" for each in chosen):
        modes = ("eval", "eval")
    return Case(
        seed,
        chosen,
        f"{fanouts}, batch_size={r.choice((6, 6, 6, 1))}",
        modes,
        "constant",
        penalty,
        r.choice(("h", "h", "self.head(h)", "self.one(h)", "self.one(h).squeeze(1)", "h.log_softmax(1)", "h, hs[-1]")),
        "merged",
        tuple(options.items()),
    )


def outcome_of(case: Case) -> Outcome:
    """Runs a case."""
    sums = {"reduction": "mean", "weight": None, **dict(case.options)}
    return compared(
        case,
        salientpp.nn.merge_partial,
        lambda batch, data, step: summed(batch, data, case.seed + step, **sums),
        "input",
        ("partial_aggregation",),
    )
