"""Finds which results of a torch function have rows of vertices or edges, so that the check of rows can follow them.

It tries the function on a few rows; some functions have rules instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from salientpp.fullgraph.outputs import output_tensors
from salientpp.fullgraph.rank_graph import RankGraph
from salientpp.fullgraph.row_counts import Count
from salientpp.fullgraph.row_trials import Call, Family, Mixes, Rows, compared, is_discrete

#: Functions that sum rows of edges by their targets, or write them there.
_SCATTERS = frozenset(
    f"{name}{end}"
    for name in ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_reduce")
    for end in ("", "_")
)

#: Functions that may sum edges by their targets.
SUMS = _SCATTERS | {"bincount"}

#: Functions that read or write rows at given places.
_BY_PLACE = frozenset(
    f"{name}{end}" for name in ("index_select", "index_add", "index_copy", "index_fill") for end in ("", "_")
) | {"__getitem__", "__setitem__"}

#: Functions that give the numbers of selected rows another form.
_FORMS = frozenset(["view", "reshape", "flatten", "ravel", "squeeze", "unsqueeze", "contiguous", "clone", "detach"])
_FORMS |= {"to", "long", "cpu", "cuda", "t", "T", "__getitem__", "unbind", "select"}

#: Functions whose result for all vertices can be computed from the results of the ranks -> the function that does so.
_JOINS: dict[str, Callable[[Tensor], Tensor]] = {
    "any": lambda results: results.any(0),
    "all": lambda results: results.all(0),
    "sum": lambda results: results.sum(0),
    "count_nonzero": lambda results: results.sum(0),
}

#: Functions whose result depends only on the values that occur, and not on how often they occur.
_OF_VALUES: dict[str, Callable[[Tensor], Tensor]] = {"max": torch.max, "min": torch.min, "unique": torch.unique}

#: Functions that are not tried, because the outcome of a trial would depend on the values of integers.
_OF_ALL_VALUES = frozenset(["unique", "unique_consecutive", "bincount", "histc"])

#: Functions that put edges in another order, which changes no result of a layer.
_ORDERS = frozenset(["sort", "argsort", "msort"])

#: Functions that give the same values another shape.
_VIEWS = frozenset(["view", "reshape", "unflatten"])

#: Functions that compare integers.
_COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal", "isin"])

#: Functions that cut rows at positions, which may lie beyond the last row -> position of their argument ``dim``.
_CUTS = {"split": 2, "tensor_split": 2, "chunk": 2, "unsafe_split": 2, "unsafe_chunk": 2}


def found_rows(
    call: Call, number: int, edge_index: Tensor, older: Callable[[Tensor], Rows | None], seeds: int | None = None
) -> list[Rows | None] | None:
    """Finds, for each tensor that a function returns or writes, where it has rows. None if the function mixes rows.

    Args:
        number: number of vertices.
        edge_index: [2, E], the graph's edges.
        seeds: number of seeds of a batch, which are the first vertices; None without seeds.
        older: function that returns where a tensor that is older than the call of the model may have rows of vertices.
    """
    name, rows = call.name, call.rows
    of_edges = bool(rows) and all(each.family.is_of_edges for each in rows)
    if rows and (_is_of_all_rows(call, seeds) or (of_edges and (_compares_ids(call) or name.startswith("sparse_")))):
        return None
    found = _selected_edges(call) if of_edges else None
    if found is None:
        found = _joined_edges(call)
    if found is None:
        found = _known(call, edge_index, older)
    if found is None and not (rows and name in _OF_ALL_VALUES):
        found = _tried(call, number, older, of_edges)
    if found is None or not of_edges or name.strip("_") in _COMPARISONS or not any(each.ids for each in rows):
        return found
    is_new = name.startswith("new_") or name.endswith("_like")
    return [each and replace(each, ids=not is_new and each.family.is_of_edges) for each in found]


def _tried(call: Call, number: int, older: Callable[[Tensor], Rows | None], of_edges: bool) -> list[Rows | None] | None:
    """Finds the rows of a function's results by trials. Arguments and result are as of :func:`found_rows`; ``of_edges``: all rows are of edges."""
    rows = call.rows
    if any(each.places for each in rows):
        return _moved_places(call, number, older)
    if any(each.ids for each in rows) and not all(each.family.is_of_edges or each.made for each in rows):
        return None  # numbers of the halo may happen to fit the rows of a trial
    try:
        return compared(call, number, older)
    except Mixes as error:
        is_reduced = bool(error.args) and error.args[0] == "reduced"
        if call.is_made and not is_reduced:
            return []
        if call.is_of_discrete_edges and call.name in _ORDERS:
            return _sorted(call)
        return [] if of_edges and not error.args and call.name not in _VIEWS else None


def _sorted(call: Call) -> list[Rows | None]:
    """Describes the rows of edges that a function has sorted. The check does not follow the index that sorting also returns."""
    rows = call.rows[0]
    if call.name == "argsort" or rows.ids or rows.lead or rows.factor != 1:
        return []
    return [_in_other_order(call, rows.family.number)]


def _in_other_order(call: Call, number: int, lead: int = 0) -> Rows:
    """Describes rows of edges in a new order.

    :func:`over_ranks` computes nothing from such rows, because it cannot tell which of them are edges into own vertices.
    """
    call.selects = True
    return Rows(Family.of(number, "edges, in another order", (4, 11)), lead)


def _is_of_all_rows(call: Call, seeds: int | None) -> bool:
    """True if a function does not compute each row separately, but trials with few rows would not show it, as with ``h[:1000]``."""
    name = call.name
    given: Any = call.args[0] if call.args else call.kwargs.get("input")
    rows = call.rows_of(given)
    if rows is None:
        return False
    if name == "one_hot":
        classes = call.args[1] if len(call.args) > 1 else call.kwargs.get("num_classes", -1)
        return bool(classes == -1)
    if name in ("tril", "triu", "tril_", "triu_"):
        return rows.lead >= given.dim() - 2
    if name == "roll":
        dims = call.args[2] if len(call.args) > 2 else call.kwargs.get("dims", ())
        dims = dims if isinstance(dims, (list, tuple)) else () if dims is None else (dims,)
        return not dims or rows.lead in [dim % given.dim() for dim in dims]
    if name in _CUTS:
        place = _CUTS[name]
        dim = call.kwargs.get("dim", call.args[place] if len(call.args) > place else 0)
        return isinstance(dim, int) and rows.lead == dim % given.dim()
    if name in ("__getitem__", "__setitem__"):
        index = _index_along(rows.lead, call.args[1], given.dim())
        if isinstance(index, slice):
            bounds = index.start or None, index.stop, None if index.step == 1 else index.step
            has_bounds = any(
                type(bound) is int or (isinstance(bound, Count) and bound.form != (1, 0)) for bound in bounds
            )
            call.selects = has_bounds and seeds is not None  # batches have different numbers of seeds
            return has_bounds and (rows.family.what != "vertices" or bounds != (None, seeds, None))
    return False


def _compares_ids(call: Call) -> bool:
    """True if a function compares numbers of vertices or edges, which differ between ranks, with other values."""
    given = [call.rows_of(each) for each in call.args]
    name = call.name.strip("_")
    is_alike = name in ("eq", "ne") and all(each is not None and each.ids for each in given)
    return name in _COMPARISONS and any(each.ids for each in call.rows) and not is_alike


def _joined_edges(call: Call) -> list[Rows | None] | None:
    """Describes the rows of a ``cat`` of edges and other rows, such as a self-loop for each vertex. Returns None for other functions."""
    if call.name not in ("cat", "concat", "concatenate") or not any(each.family.is_of_edges for each in call.rows):
        return None
    tensors = call.args[0]
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else 0) % tensors[0].dim()
    if any(each.lead != dim for each in call.rows):
        return None
    number = sum(tensor.size(dim) for tensor in tensors)
    call.selects = True
    joined = Family.of(number, "edges, joined to others", (5, 13))
    return [Rows(joined, dim, ids=any(each.ids for each in call.rows))]


def _selected_edges(call: Call) -> list[Rows | None] | None:
    """Describes the rows that a function selects from rows of edges, such as by a mask. Returns None for other functions."""
    name, args = call.name, call.args
    rows = call.rows_of(args[0]) if args else None
    if rows is None or rows.factor != 1:
        return None
    if name in ("nonzero", "argwhere") or (name == "where" and len(args) == 1):
        if not _is_mask(args[0]):
            return []
        call.selects = True
        return [Rows(_selected(rows.family, args[0]), ids=True)]
    if name == "index_select" and len(args) == 3 and args[1] % args[0].dim() == rows.lead:
        args = args[0], (*[slice(None)] * rows.lead, args[2])
    elif name != "__getitem__":
        return None
    index = _index_along(rows.lead, args[1], args[0].dim())
    if not isinstance(index, Tensor) or index.dim() != 1:
        return None
    theirs = call.rows_of(index)
    lead = sum(isinstance(each, slice) for each in args[1][:-1]) if isinstance(args[1], tuple) else 0
    if theirs is None or not (theirs.ids or index.dtype == torch.bool):
        is_order = index.dtype == torch.int64 and index.numel() in (0, rows.family.number)
        return [_in_other_order(call, index.numel(), lead)] if is_order else None
    if index.dtype == torch.bool and theirs.family.what == rows.family.what:
        selected = _selected(rows.family, index)
    elif theirs.ids and theirs.family.is_selected:
        selected = theirs.family
    else:
        return None
    call.selects = True
    return [Rows(selected, lead)]


def _index_along(dim: int, index: Any, number: int) -> Any:
    """Returns the part of ``index`` that selects along ``dim``, or None. ``number``: dimensions of the tensor."""

    def size_of(part: Any) -> int:
        if part is None or part is Ellipsis:
            return 0
        return part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1

    parts = index if isinstance(index, tuple) else (index,)
    sizes, begin = [*map(size_of, parts)], 0
    for part, size in zip(parts, sizes, strict=True):
        end = begin + (number - sum(sizes) if part is Ellipsis else size)
        if begin <= dim < end:
            return part
        begin = end
    return None


def _moved_places(call: Call, number: int, older: Callable[[Tensor], Rows | None]) -> list[Rows | None] | None:
    """Follows positions of rows that a mask selected (``mask.nonzero()``), if a function only reshapes, copies or selects them.

    Returns :class:`Rows` with ``places`` set for each result, or None if the function does anything else, such as arithmetic.
    """
    if call.name not in _FORMS or len(call.rows) > 1:
        return None
    try:
        found = compared(call, number, older)
    except Mixes:
        return None
    return [None if rows is None else replace(rows, places=True) for rows in found]


def number_of_edges(graph: RankGraph, place: str) -> int:
    """Returns the number of edges on all ranks. Collective. ``place`` names the user's line, for errors."""
    mine = int((graph.edge_index[1] < graph.num_counted).sum())
    return sum(number for (number,) in graph.averaging.gather_numbers(f"the number of edges{place}", [mine]))


def over_ranks(call: Call, graph: RankGraph, place: str) -> Tensor | None:
    """Computes a function such as ``mask.any()`` over the integers or booleans of all ranks' vertices or edges. Collective.

    Returns None for other functions and values; it is then None on every rank. The results have no gradient, so the backward needs no other ranks.

    Args:
        place: text that names the user's line. It must be the same on all ranks.
    """
    name = call.name
    given: Any = call.args[0] if call.args else None
    rows = call.rows_of(given)
    if rows is None or len(call.rows) != 1 or call.counts or "out" in call.kwargs or not is_discrete(given):
        return None
    if rows.family.is_selected or rows.lead or rows.factor != 1 or rows.ids or rows.made:
        return None
    number = graph.num_counted
    own = given[:number] if rows.family.what == "vertices" else given[graph.edge_index[1] < number]
    ranks, operation = graph.averaging, f"{name} over all {rows.family.what}{place}"
    if name in _JOINS:
        mine = call.func(own, *call.args[1:], **call.kwargs)
        if not is_discrete(mine):
            return None
        told = torch.tensor(ranks.gather_numbers(operation, mine.flatten().tolist()), device=mine.device)
        return _JOINS[name](told.view(len(told), *mine.shape)).to(mine.dtype)
    options = [*call.args[1:], *(value for key, value in call.kwargs.items() if key != "sorted")]
    if name not in _OF_VALUES or any(value is not None and value is not False for value in options):
        return None
    values = (own.unique() if name == "unique" or not own.numel() else call.func(own).view(1)).tolist()
    most = max(number for (number,) in ranks.gather_numbers(f"{operation}: numbers of values", [len(values)]))
    numbers = ranks.gather_numbers(operation, [len(values), *values, *[0] * (most - len(values))])
    every = [value for number, *theirs in numbers for value in theirs[:number]]
    return _OF_VALUES[name](torch.tensor(every, dtype=own.dtype, device=own.device))


def _known(call: Call, edge_index: Tensor, older: Callable[[Tensor], Rows | None]) -> list[Rows | None] | None:
    """Describes the results of functions that have rules: sums by targets of edges, look-ups by targets, selections of vertices.

    Returns None for other functions.
    """
    name, args = call.name, call.args
    tensors = [*output_tensors([args, call.kwargs])]
    if name in ("nonzero", "argwhere") or (name == "where" and len(args) == 1):
        return _places(call, tensors[0], older)
    if name == "bincount" and args and _is_of_targets(args[0], edge_index) and len(tensors) == 1:
        lengths = [*args[1:], *call.kwargs.values()]
        counts = [each for each in lengths if isinstance(each, Count) and each.form == (1, 0)]
        return [Rows(each.family) for each in counts if each.family.what == "vertices"] or None
    integers = [each for each in tensors if each.dtype in (torch.int64, torch.int32)]
    index = [each for each in integers if (theirs := call.rows_of(each)) is None or theirs.ids]
    rows = call.rows_of(args[0]) if args else None
    if rows is None or rows.lead or rows.family.is_of_edges:
        return None
    if name in _BY_PLACE and rows.family.what == "vertices" and rows.factor == 1:
        places = args[1] if name.startswith("__") else _places_given(*args[1:], **call.kwargs)
        selected = _selected_at(places, rows.family, call)
        if selected is not None and name in ("__getitem__", "index_select"):
            call.selects = True
            return [Rows(selected)]
        if selected is not None and all(_fits(each, selected, call) for each in tensors[1:] if each is not places):
            call.selects = True
            return [rows]
    if name in _SCATTERS and index:
        is_pooling = any(
            (other := call.rows_of(each)) is not None and not other.family.is_of_edges for each in tensors[1:]
        )
        return None if is_pooling or not _is_of_targets(index[0], edge_index) else [rows]
    if name in ("index_select", "__getitem__") and index:
        last = args[-1] if name == "__getitem__" else index[0]
        if last is not index[0] or not _is_of_targets(last, edge_index):
            return None
        targets = call.rows_of(last)
        return [targets and Rows(targets.family)]
    mask = args[1] if name in ("__getitem__", "__setitem__") else None
    if _is_mask(mask) and rows.factor == 1:
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


def _places(call: Call, mask: Tensor, older: Callable[[Tensor], Rows | None]) -> list[Rows | None] | None:
    """Describes ``mask.nonzero()``, whose values are the positions of the selected vertices. Returns None if ``mask`` is no mask of vertices."""
    rows = call.rows_of(mask) or older(mask)
    if not _is_mask(mask) or rows is None or rows.family.what != "vertices" or rows.factor != 1:
        return None
    call.selects = True
    return [Rows(_selected(rows.family, mask), places=True)]


def _places_given(dim: Any = None, index: Any = None, *_: Any, **__: Any) -> Any:
    """Returns the argument ``index`` of a function such as ``index_select(dim, index)``, if it selects along dimension 0. Else None."""
    return index if type(dim) is int and dim == 0 else None


def _selected_at(places: Any, family: Family, call: Call) -> Family | None:
    """Returns the selection of rows at the positions ``places``, if these are the result of ``mask.nonzero()`` for some mask. Else None."""
    if not isinstance(places, Tensor) or places.dim() != 1 or places.dtype != torch.int64:
        return None
    rows = call.rows_of(places)
    if places.numel() and (rows is None or not rows.places):
        return None
    mask = torch.zeros(family.number, dtype=torch.bool, device=places.device)
    mask[places] = True
    selected = _selected(family, mask)
    is_other = rows is not None and rows.family.what != selected.what
    return None if is_other or not torch.equal(mask.nonzero().view(-1), places) else selected


def _fits(values: Tensor, selected: Family, call: Call) -> bool:
    """True if ``values`` may be written to the selected rows: they are of the same selection, or equal for all rows."""
    rows = call.rows_of(values)
    if rows is not None:
        return rows.family.what == selected.what and not rows.lead and rows.factor == 1 and not rows.places
    if values.dim() < call.args[0].dim():
        return True
    return bool((values == values[:1]).all())


def _is_of_targets(index: Tensor, edge_index: Tensor) -> bool:
    """True if ``index`` begins with the targets of ``edge_index``. Targets of self-loops may follow."""
    own = edge_index[1]
    index = index.select(1, 0) if index.dim() == 2 and index.size(1) else index
    return index.dim() == 1 and index.numel() >= own.numel() and torch.equal(index[: own.numel()], own.to(index.dtype))


def _is_mask(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() == 1


def _selected(family: Family, mask: Tensor) -> Family:
    """Makes a family of those rows of ``family`` that the mask selects.

    The new family's name contains a hash of the mask, so equal masks give equal names.
    """
    what = f"{family.what}, selected by {hash(mask.detach().cpu().numpy().tobytes())}"
    number = int(mask.sum())
    return Family.of(number, what, (5, 13))
