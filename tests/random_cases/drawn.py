"""Random models for conversions that refuse many models: most choices are such as the conversion accepts, and a few are any others.

A case is a function of one integer. It is a :class:`~random_cases.models.Case` with the options of its conversion.
"""

# ruff: noqa: E501 (tables)

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from random_cases.choices import (
    CONVS,
    ROWS,
    Choice,
    activation_of,
    changes_of,
    choices,
    conv_of,
    kept,
    model_of,
    moment_of,
    own_of,
    rows_of,
)

#: Operations of :data:`~random_cases.choices.ROWS` that compute each row separately, so that most conversions accept them.
BY_ROW: tuple[tuple[str, str], ...] = (
    *(("norm", name) for name in ("nn.LayerNorm(6)", "nn.RMSNorm(6)", "nn.Softmax(dim=1)", "nn.PReLU()", "pyg.LayerNorm(6, mode='node')", "nn.BatchNorm1d(6)", "pyg.BatchNorm(6)")),
    *(("rows", name) for name in (
        "F.normalize(h, dim=1)", "torch.cat([h[:, :3], h[:, 3:].tanh()], 1)", "torch.stack([h, h.relu()], 1).amax(1)", "h.masked_fill(h < 0, 0)",
        "h.reshape(-1, 2, 3).transpose(1, 2).reshape(-1, 6)", "h.topk(6, dim=1).values",
    )),
    *(("module", name) for name in ("nn.Linear", "pyg.MLP of layers", "nn.Dropout", "nn.GRUCell", "nn.LSTMCell", "nn.TransformerEncoderLayer(6, 2, 8, 0.0) of [1, n, 6]")),
    *(("jump", name) for name in ("h + hs[-1]", "h * hs[-1].sigmoid()", "torch.maximum(h, hs[-1])", "h + hs[0]", "h.lerp(hs[0], 0.3)")),
)  # fmt: skip

Draw = Callable[[random.Random, int], Choice]


@dataclass(frozen=True)
class Taste:
    """Choices that a conversion accepts.

    Attributes:
        first: draws the first layer.
        layers: draws another layer.
        ops: operations over rows, of :data:`BY_ROW`.
        lacks: names of a model's arguments that do not exist there.
        depths: numbers of layers.
        wild: share of models that may hold any choice.
    """

    first: Draw
    layers: Draw
    ops: Sequence[tuple[str, str]] = BY_ROW
    lacks: tuple[str, ...] = ()
    depths: tuple[int, ...] = (1, 2, 2, 3)
    wild: float = 0.45


#: Layers that are not generated here. PyG adds no loops to isolated vertices above the largest id of an edge. Which these are depends on the edges it gets.
LEFT_OUT = r"EGConv\((?!.*symnorm)(?!.*add_self_loops=False)"


def one_of(names: Sequence[str], accepts: str = "", refuses: str = "^$", aggr: Sequence[str] = ()) -> Draw:
    """Returns a strategy for layers of these classes, whose constructors match ``accepts`` and not ``refuses`` if a few tries find such.

    Args:
        aggr: aggregations of the layers; empty: any.
    """

    def draw(r: random.Random, number: int) -> Choice:
        for _ in range(12):
            found = conv_of(r.choice(names), r, number)
            if aggr:
                plain = re.sub(r", aggr=(\[[^\]]*\]|'[^']*')", "", found.init)
                found = dataclasses.replace(found, init=f"{plain[:-1]}, aggr={r.choice(aggr)!r})")
            if re.search(accepts, found.init) and not re.search(f"{refuses}|{LEFT_OUT}", found.init):
                break
        return found

    return draw


def drawn(r: random.Random, taste: Taste) -> tuple[Choice, ...]:
    """Returns the choices of a random model."""
    is_wild = r.random() < taste.wild
    if is_wild and r.random() < 0.1:
        found = list(choices(r))
    else:
        found = []
        for depth in range(r.choice(taste.depths)):
            draw = taste.first if depth == 0 else taste.layers
            if is_wild and r.random() < 0.25:
                draw = r.choice((lambda r, k: conv_of(r.choice(sorted(CONVS)), r, k), own_of, model_of))
            found.append(draw(r, len(found)))
            for _ in range(r.choice((0, 1, 1, 2))):
                found.append(_operation(r, len(found), taste, is_wild))
    layers = [each for each in found if each.kind.startswith("conv")]
    if layers and is_wild and r.random() < 0.4:
        found.append(changes_of(r.choice(layers), r, len(found)))
    lacks = re.compile(rf"\b({'|'.join(taste.lacks)})\b") if taste.lacks else None
    if lacks is not None:
        gone = {each.number for each in found if lacks.search(each.forward)}
        found = [each for each in found if each.number not in gone and each.needs not in gone]
    gone = {each.number for each in found if re.search(LEFT_OUT, each.init)}
    found = [each for each in found if each.number not in gone and each.needs not in gone]
    if not any(each.kind.startswith(("conv", "model", "block")) for each in found):
        found.append(taste.first(r, 1 + max((each.number for each in found), default=0)))
    return tuple(found)


def _operation(r: random.Random, number: int, taste: Taste, is_wild: bool) -> Choice:
    if is_wild and r.random() < 0.2:
        kind = r.choice(sorted(ROWS))
        return moment_of(r, number) if r.random() < 0.4 else rows_of(kind, r.choice(sorted(ROWS[kind])), number)
    chance = r.random()
    if chance < 0.3:
        return activation_of(r, number)
    if chance < 0.4:
        return kept(r, number)
    return rows_of(*r.choice(taste.ops), number)
