"""Finds where a torch function leaves rows of vertices or edges: by trials, or from what is known of functions that refer to edges or select rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from salientpp.fullgraph.outputs import tensors_of
from salientpp.fullgraph.row_trials import Call, Family, Mixes, Rows, compared

#: Functions that sum rows of edges by their targets, or write them there.
_SCATTERS = frozenset(
    f"{name}{end}"
    for name in ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_reduce")
    for end in ("", "_")
)


def found_rows(
    call: Call, number: int, edge_index: Tensor, older: Callable[[Tensor], Rows | None]
) -> list[Rows | None] | None:
    """Tries a function. Returns the rows of each tensor of its result, and of each that it writes; None if it depends on other rows.

    Args:
        number: number of vertices.
        edge_index: [2, E], the graph's edges.
        older: returns the rows of a tensor that may have rows of vertices.
    """
    name, rows = call.name, call.rows
    if name in ("any", "all") and rows and rows[0].marks:
        return []
    found = _known(call, edge_index, older)
    if found is not None:
        return found
    try:
        return compared(call, number, older)
    except Mixes as error:
        is_reduced = bool(error.args) and error.args[0] == "reduced"
        if not rows and not is_reduced:  # positions, such as arange(n), which no rows can be combined with
            return []
        if not error.args and all(each.family.what == "edges" for each in rows):
            return []
        return None


def _known(call: Call, edge_index: Tensor, older: Callable[[Tensor], Rows | None]) -> list[Rows | None] | None:
    """Returns the rows of results of functions that refer to edges or select rows; None for other functions."""
    name, args = call.name, call.args
    tensors = [*tensors_of([args, call.kwargs])]
    index = [each for each in tensors if each.dtype in (torch.int64, torch.int32) and call.rows_of(each) is None]
    rows = call.rows_of(args[0]) if args else None
    if rows is None or rows.lead or rows.family.what == "edges":
        return None
    if name in _SCATTERS and index:
        is_pooling = any(
            (other := call.rows_of(each)) is not None and other.family.what != "edges" for each in tensors[1:]
        )
        return None if is_pooling or not _is_of_targets(index[0], edge_index) else [rows]
    if name in ("index_select", "__getitem__") and index:
        last = args[-1] if name == "__getitem__" else index[0]
        return [None] if last is index[0] and _is_of_targets(last, edge_index) else None
    mask = args[1] if name in ("__getitem__", "__setitem__") else None
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 1 and rows.factor == 1:
        theirs = call.rows_of(mask) or older(mask)
        if theirs is not None and theirs.family.what == rows.family.what and theirs.factor == 1:
            selected = _selected(rows.family, mask)
            given = None if name == "__getitem__" else call.rows_of(args[2])
            call.selects = name == "__getitem__" or given is not None
            if name == "__getitem__":
                return [Rows(selected)]
            if given is not None and given.family.what == selected.what and not given.lead and given.factor == 1:
                return [rows]
    return None


def _is_of_targets(index: Tensor, edge_index: Tensor) -> bool:
    """Returns True if ``index`` has the targets of ``edge_index``, perhaps followed by those of self-loops."""
    own = edge_index[1]
    index = index.select(1, 0) if index.dim() == 2 and index.size(1) else index
    return index.dim() == 1 and index.numel() >= own.numel() and torch.equal(index[: own.numel()], own.to(index.dtype))


def _selected(family: Family, mask: Tensor) -> Family:
    """Returns the family of the rows that a mask selects."""
    what = f"{family.what}, selected by {hash(mask.detach().cpu().numpy().tobytes())}"
    number = int(mask.sum())
    return Family.of(number, what, (5, 13))
