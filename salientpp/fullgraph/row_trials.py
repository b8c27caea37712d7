"""Tries torch's functions on a few rows, to find out whether a function computes each row separately.

Two trials contain the same rows, but at other positions and among other rows, whose number differs. If a function computes each row separately, both trials
give the same results for these rows.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from salientpp.fullgraph.outputs import output_tensors
from salientpp.fullgraph.row_counts import Count, mapped_arguments
from salientpp.nn.rehearsal import same_draws

#: Functions whose results have arbitrary values.
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

#: Functions that mark unusual values. A model may ask whether there are any.
_MARKS = ("isnan", "isinf", "isfinite", "isposinf", "isneginf")

#: Tensors with fewer elements are copied for a trial, because a function may write to them.
_SMALL = 1 << 16


@dataclass(eq=False)
class Family:
    """Set that rows belong to: all vertices or all edges of a graph, or a selection of them.

    Attributes:
        number: number of rows.
        what: "vertices", "edges", or a name of the selection.
        tables: for each of two trials, two lists. The first has the numbers of the family's rows that the trial uses. The second has the positions in
            the trial of the rows whose results are compared.
    """

    number: int
    what: str
    tables: tuple[tuple[list[int], list[int]], ...] = ()

    @classmethod
    def of(cls, number: int, what: str, sizes: Sequence[int]) -> Family:
        """Makes the set of ``number`` rows called ``what``, and chooses at random which of them the two trials of a function use.

        The first trial has ``sizes[0]`` rows. The second has ``sizes[1]`` rows: the rows of the first at other positions, and others between them. The
        results for the rows of the first trial are compared. An empty selection of vertices needs no trials. A graph without edges is tried with rows of
        zeros.
        """
        if number <= 0 and not what.startswith("edges"):
            return cls(number, what)
        draw, known = random.Random(number), range(max(1, number))
        real = draw.choices(known, k=sizes[0]) if number < sizes[0] else draw.sample(known, sizes[0])
        rows = [draw.choice(known) for _ in range(sizes[1])]
        places = sorted(draw.sample(range(1, sizes[1] - 1), sizes[0]), key=lambda _: draw.random())
        for place, row in zip(places, real, strict=True):
            rows[place] = row
        return cls(number, what, ((real, [*range(sizes[0])]), (rows, places)))

    @property
    def is_selected(self) -> bool:
        return self.what not in ("vertices", "edges")

    @property
    def is_of_edges(self) -> bool:
        """True for edges, or a selection of them."""
        return self.what.startswith("edges")

    def size(self, trial: int) -> int:
        return len(self.tables[trial][0])


@dataclass(frozen=True, eq=False)
class Rows:
    """Says where a tensor has rows of a family: along dimension ``lead``, with ``factor`` consecutive rows for each row of the family.

    Attributes:
        marks: True if the rows mark unusual values, as the result of ``isnan`` does.
        places: True if the values are positions of rows that a mask selects. On a rank they are other numbers than in one process.
        ids: True for rows of edges that are computed from numbers of vertices or of edges, which are other numbers than in one process.
        made: the rows of two trials, if the tensor is computed from a number of rows alone, such as ``torch.arange(n)``; empty for other tensors.
    """

    family: Family
    lead: int = 0
    factor: int = 1
    marks: bool = False
    places: bool = False
    ids: bool = False
    made: tuple[Tensor, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Facts about rows on which the verdict of a function depends."""
        return (
            self.family.what,
            min(self.family.number, 4),
            self.factor,
            self.marks,
            self.places,
            self.ids,
            *self._made_key,
        )

    @functools.cached_property
    def _made_key(self) -> tuple[Any, ...]:
        return tuple(self.made[1].flatten().tolist()) if self.made else ()

    def of_trial(self, tensor: Tensor, trial: int, perturbs: bool) -> Tensor:
        """Returns a tensor's rows for a trial. ``perturbs`` changes floating-point rows that are not compared."""
        if self.made:
            return self.made[trial].clone()
        rows, places = self.family.tables[trial]
        index = torch.tensor(rows, device=tensor.device)
        shape, tensor = [*tensor.shape], tensor.detach()
        if not self.family.number:
            tensor = tensor.new_zeros([self.factor if dim == self.lead else size for dim, size in enumerate(shape)])
        split = tensor.unflatten(self.lead, (max(1, self.family.number), self.factor)).index_select(self.lead, index)
        if perturbs and (tensor.is_floating_point() or tensor.is_complex()):
            others = [place for place in range(len(rows)) if place not in places]
            other = torch.tensor(others, dtype=torch.int64, device=tensor.device)
            split.index_copy_(self.lead, other, split.index_select(self.lead, other) * 1.25 + 0.125)
        shape[self.lead] = len(rows) * self.factor
        return split.reshape(shape)

    def compared(self, tensor: Tensor, trial: int) -> Tensor:
        """Returns those rows of a trial's result that must be equal in both trials."""
        rows, places = self.family.tables[trial]
        index = torch.tensor(places, device=tensor.device)
        return tensor.unflatten(self.lead, (len(rows), self.factor)).index_select(self.lead, index)


#: Number of rows of vertices in the first and in the second trial.
SIZES = 3, 8


class Mixes(Exception):
    """Raised if a function seems to compute a result from several rows.

    Its text is "differs" if rows of the result differ between trials, and "reduced" if a result without rows differs.
    It is empty if trials cannot tell.
    """


class Call:
    """Call of a torch function, with what is known about rows among its arguments.

    Attributes:
        func, args, kwargs, name: the function, its arguments and its name.
        rows_of: function that returns where a tensor has rows; None if the check does not follow the tensor.
        rows, counts: the arguments that have rows, and those that are numbers of rows.
        key: facts on which the result of trials depends. Calls with equal keys need no new trial.
        is_of_discrete_edges: True if all rows are integers or booleans of edges.
        selects: True if the function selects rows by values, so that the finding holds for this call only.
        has_older: True if an argument that is not followed may have rows of vertices from before the model's call.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, rows_of: Callable[[Any], Rows | None]) -> None:
        self.rows_of = rows_of
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = getattr(func, "__name__", str(func))
        self.is_property = self.name in ("__get__", "__set__", "__delete__")
        if self.name == "__get__":
            self.name = getattr(getattr(func, "__self__", None), "__name__", self.name)
        self.key: list[Any] = [func]
        self.rows: list[Rows] = []
        self.counts: list[Count] = []
        self.selects = self.has_older = False
        self.is_of_discrete_edges = True

    @property
    def is_made(self) -> bool:
        """True if all rows among the arguments were computed from numbers of rows alone, as by ``torch.arange(n)``."""
        return all(rows.made for rows in self.rows)

    def families(self) -> list[Family]:
        """Returns the families that the arguments' rows, and numbers of rows, belong to."""
        return [rows.family for rows in self.rows] + [count.family for count in self.counts]


def compared(call: Call, number: int, older: Callable[[Tensor], Rows | None]) -> list[Rows | None]:
    """Tries a function in two trials. Returns where each tensor that it returns or writes has rows.

    Args:
        number: number of vertices. A tensor with this number of rows, all equal, may be shortened for a trial.
        older: function that returns where a tensor that is older than the call of the model may have rows of vertices.

    Raises:
        Mixes: rows of the results depend on other rows.
    """
    families = [*{family.what: family for family in call.families()}.values()]
    if any(not family.tables for family in families):
        return []
    found: Mixes | None = None
    for perturbs, cut in ((True, None), (False, None), (True, 0), (True, 1), (True, 2)):
        if not perturbs and found is not None:  # equal values would hide what the first attempt has found
            continue
        try:
            with torch.no_grad(), _disable_current_modes(), NoChance():
                results = [_trial(call, trial, perturbs, number, cut, older) for trial in (0, 1)]
            if len(results[0]) == len(results[1]):
                return [_alike(call, one, other, families) for one, other in zip(*results, strict=True)]
            found = Mixes("differs")  # one result for each row
        except Mixes as error:
            found = error
        except Exception:
            continue
    raise found or Mixes()


def _trial(
    call: Call, trial: int, perturbs: bool, number: int, cut: int | None, older: Callable[[Tensor], Rows | None]
) -> list[Tensor]:
    """Calls the function on the rows of a trial, and returns its results.

    Args:
        perturbs: True gives rows that are not compared other values than the model's.
        number, older: see :func:`compared`.
        cut: None: only followed tensors are shortened to the rows of the trial. A number: tensors that are equal for all vertices, and those that ``older``
            knows, are shortened too. The number chooses among several dimensions of this size.
    """
    writes = _writes(call.name) or "out" in call.kwargs

    def given(value: Any) -> Any:
        if isinstance(value, Count):
            return value.of(value.family.size(trial))
        if not isinstance(value, Tensor):
            return value
        rows = call.rows_of(value) or (older(value) if cut is not None else None)
        if rows is not None:
            return rows.of_trial(value, trial, perturbs)
        if cut is not None and (constant := _constant(value, number, trial, cut)) is not None:
            return constant
        return value.detach().clone() if writes or value.numel() < _SMALL else value.detach()

    args, kwargs = mapped_arguments(call.args, given), mapped_arguments(call.kwargs, given)
    return [*results_of(call.name, call.func(*args, **kwargs), args, kwargs)]


def _constant(tensor: Tensor, number: int, trial: int, cut: int) -> Tensor | None:
    """Returns what a trial uses instead of a tensor whose rows are not followed. None: it keeps the tensor.

    A trial has another number of vertices than the graph, so a tensor with a row per vertex does not fit its other
    arguments. Tensors of two kinds can be made for any number of vertices: those with equal rows, and 0, 1, 2, ....

    Args:
        number: number of vertices of the graph, see :func:`compared`.
        trial, cut: see :func:`_trial`.
    """
    size = SIZES[trial]
    if tensor.dtype == torch.int64 and torch.equal(tensor, torch.arange(number, device=tensor.device)):
        return torch.arange(size, device=tensor.device, dtype=tensor.dtype)
    dims = [dim for dim in range(tensor.dim()) if tensor.size(dim) == number]
    dims = [dim for dim in dims if bool((tensor == tensor.narrow(dim, 0, 1)).all())]
    if not dims:
        return None
    dim = dims[min(cut, len(dims) - 1)]
    return tensor.detach().narrow(dim, 0, 1).repeat_interleave(size, dim)


def _alike(call: Call, one: Tensor, other: Tensor, families: list[Family]) -> Rows | None:
    """Compares the results of two trials. Returns where they have rows, or None if they have none."""
    name, has_rows = call.name, False
    for family in families:
        sizes = family.size(0), family.size(1)
        for dim in range(min(one.dim(), other.dim())):
            a, b = one.size(dim), other.size(dim)
            rest = [each.shape[:dim] + each.shape[dim + 1 :] for each in (one, other)]
            if not a or a % sizes[0] or a * sizes[1] != b * sizes[0] or rest[0] != rest[1]:
                continue
            has_rows = True
            rows = Rows(family, dim, a // sizes[0], name in _MARKS)
            if name in _EMPTY or is_close(rows.compared(one, 0), rows.compared(other, 1)):
                return rows
    if has_rows and call.is_made:
        return replace(rows, made=(one, other))
    if has_rows:
        raise Mixes("differs")
    if one.shape == other.shape:
        keeps_values = name.startswith("new_") or name.endswith("_like") or _writes(name)
        if keeps_values and (name in _EMPTY or is_close(one, other)):
            return None
        raise Mixes("reduced")
    raise Mixes


class NoChance(TorchDispatchMode):
    """Mode in which random functions give every row the same numbers, so that trials can be compared."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args)), **kwargs}
        if func._schema.name == "aten::native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        for name in ("dropout_p", "dropout"):
            if name in names:  # torch leaves out an argument that has its default
                return func(**{**given, name: 0.0})
        generator = given.get("generator")  # of the user's
        state = None if generator is None else generator.get_state()
        with same_draws([args, kwargs]):
            out = func(*args, **kwargs)
        if generator is not None:
            generator.set_state(state)
        for tensor in output_tensors(out):
            tensor.fill_(0.5 if tensor.is_floating_point() else 1)
        return out


def _writes(name: str) -> bool:
    """True if a function of this name writes to its first argument, such as ``add_``."""
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__",) or name.startswith("__i")


def results_of(name: str, out: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yields the tensors that a function returned, and then the argument that it wrote to, if any."""
    yield from output_tensors(out)
    if _writes(name) and args and isinstance(args[0], Tensor):
        yield args[0]
    if kwargs.get("inplace") is True and args and isinstance(args[0], Tensor):
        yield args[0]


def is_discrete(tensor: Tensor) -> bool:
    """True for tensors of integers or booleans, such as types, labels and masks."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def is_close(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are equal up to rounding errors. Integers must be equal."""
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    precision = torch.finfo(one.dtype).eps ** 0.5
    wide = torch.promote_types(one.dtype, torch.float32)
    one, other = (torch.nan_to_num(each.to(wide)) for each in (one, other))
    scale = float(one.abs().clamp(max=1e30).max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=precision, atol=precision * scale)
