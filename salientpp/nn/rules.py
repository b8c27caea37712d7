"""Rules by which a recorder follows rows through torch's operations.

An operation is row-wise if each row of its result depends only on the same rows of its arguments. An operation without a rule mixes rows, unless torch tags
it as pointwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from salientpp.containers import tensors_of

#: Verdicts: rows of the result depend on other rows too, on no values at all, or on rows of seeds only.
MIXES, NO_VALUES, SEEDS = "mixes", "no values", "seeds"


@dataclass(frozen=True)
class RowWise:
    """Verdict: each row of the result depends only on the same rows of the arguments. In the result, ``lead`` dimensions precede the one that counts rows."""

    lead: int


@dataclass(frozen=True, eq=False)
class Operation:
    """Operation on tensors whose rows are followed.

    Attributes:
        given: the arguments whose rows are followed. Each has ``number`` rows. They come from ``base`` original rows, each of which
            may be split into the same number of rows.
        named: all arguments of the operation, by name.
        lead: number of dimensions before the one that counts rows.
    """

    given: Sequence[Tensor]
    named: dict[str, Any]
    out: Any
    lead: int
    number: int
    base: int
    num_seeds: int

    def keeps_rows(self, lead: int | None = None) -> bool:
        lead = self.lead if lead is None else lead
        return all(tensor.dim() > lead and tensor.size(lead) == self.number for tensor in tensors_of(self.out))

    def is_given(self, name: str) -> bool:
        return any(self.named.get(name) is tensor for tensor in self.given)


Rule = Callable[[Operation], "bool | str | RowWise"]


#: Rules that hold whichever dimension counts the rows. For all other rules, it must be the first dimension.
LEADING: list[Rule] = []


def pointwise(op: Operation) -> bool:
    """Handles elementwise operations. They are row-wise unless broadcasting adds dimensions to an argument whose rows are followed."""
    tensors = list(tensors_of(op.out))
    return op.keeps_rows() and all(each.dim() == tensor.dim() for tensor in tensors for each in op.given)


def _along(name: str, default: Any = None) -> Rule:
    """Returns a rule for operations along the dimensions in argument ``name``, which must not count rows. Reductions remove them."""

    def rule(op: Operation) -> str | RowWise:
        ndim = op.given[0].dim()
        value = op.named.get(name, default)
        given = value if isinstance(value, (list, tuple)) else [value]
        if not given or not all(isinstance(each, int) and each % ndim != op.lead for each in given):
            return MIXES
        is_removed = next(tensors_of(op.out)).dim() < ndim
        lead = op.lead - sum(each % ndim < op.lead for each in given) if is_removed else op.lead
        return RowWise(lead) if op.keeps_rows(lead) else MIXES

    LEADING.append(rule)
    return rule


def _new_dimension(op: Operation) -> str | RowWise:
    """Handles operations that insert a dimension, which may shift the one that counts rows."""
    lead = op.lead + (op.named.get("dim", 0) % (op.given[0].dim() + 1) <= op.lead)
    return RowWise(lead) if op.keeps_rows(lead) else MIXES


def _view(op: Operation) -> bool:
    """Handles views. A view may split each row into several, or join such rows again."""
    return op.keeps_rows() or (op.out.dim() > 0 and op.number % op.base == 0 and op.out.size(0) % op.base == 0)


def _slice(op: Operation) -> bool | str:
    if op.named.get("dim", 0) % op.given[0].dim():
        return op.keeps_rows()
    out = op.out.size(0)
    is_prefix = op.named.get("start") in (None, 0) and op.named.get("step", 1) == 1
    return is_prefix and (out == op.number or out <= op.num_seeds)


def _transpose(op: Operation) -> bool:
    ndim = op.given[0].dim()
    return op.named["dim0"] % ndim != 0 and op.named["dim1"] % ndim != 0


def _product(name: str, others: Sequence[str]) -> Rule:
    """Returns a rule for a matrix product whose left factor has the rows."""
    return lambda op: (
        op.is_given(name) and not any(map(op.is_given, others)) and op.named[name].dim() > 1 and op.keeps_rows()
    )


def _sum_of_product(op: Operation) -> bool:
    """Handles ``self + mat1 @ mat2``, where ``self`` may be followed too."""
    return (
        op.is_given("mat1")
        and not op.is_given("mat2")
        and not (op.is_given("self") and op.named["self"].dim() < 2)
        and op.keeps_rows()
    )


def _repeat(op: Operation) -> bool:
    """Handles ``repeat``, which is row-wise if it repeats no rows, only later dimensions."""
    return op.out.dim() == op.given[0].dim() and op.named["repeats"][0] == 1 and op.keeps_rows()


def _layer_norm(op: Operation) -> bool:
    return op.is_given("input") and len(op.given) == 1 and len(op.named["normalized_shape"]) < op.given[0].dim()


def _batch_norm(op: Operation) -> bool:
    return op.is_given("input") and len(op.given) == 1 and not op.named.get("training", False)


def _rows_of_seeds(op: Operation) -> str:
    """Handles indexing by positions. Only rows of seeds are needed if every position is a seed's, else all rows."""
    index = op.named.get("index") if op.named.get("dim", 0) == 0 else None
    indices = op.named.get("indices") or [index]
    first = indices[0]
    is_of_seeds = (
        op.is_given("self")
        and len(op.given) == 1
        and op.number > op.num_seeds  # otherwise the numbers prove nothing about other batches
        and all(each is None for each in indices[1:])
        and isinstance(first, Tensor)
        and first.dtype in (torch.int64, torch.int32)
        and (not first.numel() or (int(first.min()) >= 0 and int(first.max()) < op.num_seeds))
    )
    return SEEDS if is_of_seeds else MIXES


def _names(names: str, rule: Rule) -> Iterable[tuple[str, Rule]]:
    return ((f"aten::{name}", rule) for name in names.split())


LEADING += [pointwise, _new_dimension]
RULES: dict[str, Rule] = dict(
    [
        *_names("copy_", lambda op: op.is_given("self") and pointwise(op)),
        *_names(
            "clone _to_copy detach alias lift_fresh contiguous dropout native_dropout relu_ masked_fill masked_fill_",
            pointwise,
        ),
        *_names("empty_like zeros_like ones_like full_like rand_like randn_like fill_ zero_", pointwise),
        *_names("bernoulli bernoulli_ uniform_ normal_ exponential_ geometric_ log_normal_ cauchy_ random_", pointwise),
        # Functions that read a number of rows for a shape are followed where they are called.
        *_names("new_empty new_zeros new_ones new_full", lambda op: NO_VALUES),
        *_names("new_empty_strided sym_size sym_numel sym_stride", lambda op: NO_VALUES),
        *_names(
            "_softmax _log_softmax sum mean amax amin max min var std var_mean linalg_vector_norm norm cumsum logsumexp argmax prod cat",
            _along("dim"),
        ),
        *_names("glu", _along("dim", -1)),
        *_names("split split_with_sizes unsafe_split unsafe_chunk unbind", _along("dim", 0)),
        *_names("unsqueeze stack", _new_dimension),
        *_names("view _unsafe_view reshape squeeze _reshape_alias", _view),
        *_names("slice", _slice),
        *_names("select", lambda op: op.named["dim"] % op.given[0].dim() != 0 and op.keeps_rows()),
        *_names("permute", lambda op: op.named["dims"][0] % op.given[0].dim() == 0),
        *_names("transpose", _transpose),
        *_names("expand", lambda op: op.given[0].dim() == op.out.dim() and op.keeps_rows()),
        *_names("repeat", _repeat),
        *_names("mm", _product("self", ["mat2"])),
        *_names("addmm", _sum_of_product),
        *_names("bmm", lambda op: op.keeps_rows()),
        *_names("native_layer_norm _fused_rms_norm", _layer_norm),
        *_names("native_group_norm", lambda op: op.is_given("input") and len(op.given) == 1),
        *_names("native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm", _batch_norm),
        *_names("index index_select", _rows_of_seeds),
    ]
)
