"""Checks how a model uses numbers of rows that it reads: as sizes of tensors, which is right, or as values, which is refused.

On a rank, ``h.size(0)`` is the number of its own vertices. So ``h.view(h.size(0), -1)`` gives the same rows as on the whole graph, but ``h / h.size(0)``
gives other rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Protocol

import torch

from salientpp.containers import found, mapped
from salientpp.fullgraph.row_callers import is_of_template, is_of_user


class Checking(Protocol):
    """Interface of the check (:class:`RowCheck`) that a :class:`Count` tells of wrong uses.

    Attributes:
        compares: set if the model compares a number of rows. With fewer rows, the result may be another.
    """

    compares: bool

    def refuse(self, what: str) -> NoReturn:
        """Raises an error: a number of rows is used as a value. ``what`` names the use."""

    def whole_number(self, family: Any) -> int | None:
        """Returns the number of rows on all ranks together in ``family`` (all vertices, all edges or a selection); None if unknown. Collective for edges."""


class Count(torch.SymInt):
    """Number of rows, or integer computed from one, that the user's code may use as a size only.

    It remembers how it was computed, so that a trial can use another number of rows. It is a symbolic integer, so torch's functions accept it.

    Args:
        value: the integer.
        of: function from another number of rows to what the integer would be.
        family: the set that the rows belong to, such as all vertices (:class:`~salientpp.fullgraph.row_trials.Family`).
        form: two integers a and b if the integer is a n + b for n rows, otherwise None.
        check: object that refuses uses other than as a size.
    """

    def __init__(
        self, value: int, of: Callable[[int], int], family: Any, form: tuple[int, int] | None, check: Checking
    ) -> None:
        self.value, self.of, self.family, self.form, self.check = value, of, family, form, check
        self.refuse = check.refuse

    @property  # type: ignore[misc]  # of an object, this can be set
    def __class__(self) -> Any:
        return int  # for the user's isinstance(size, int); torch looks at the type

    @classmethod
    def rows(cls, family: Any, factor: int, check: Checking) -> Count:
        """Makes the count for a tensor that has ``factor`` rows for each vertex or edge of ``family``."""
        return cls(factor * family.number, lambda number: factor * number, family, (factor, 0), check)

    def __index__(self) -> int:
        if is_of_user():  # range(n), [0] * n or a function of math; torch's functions get plain integers
            self._refused(self)
        return self.value

    def __int__(self) -> int:
        if is_of_user():
            self.refuse("int() of a number of rows (pass size(0) itself where a size is needed)")
        return self.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __neg__(self) -> Count:
        return self._with(operator.mul, -1)

    def __abs__(self) -> Count:
        return self._with(lambda value, _: abs(value), 0)

    def _itself(self, *_: Any) -> Count:
        return self

    __pos__ = __round__ = __trunc__ = __floor__ = __ceil__ = _itself

    def _with(self, function: Callable[[Any, Any], Any], other: Any, is_reflected: bool = False) -> Any:
        """Returns ``function(self, other)``; if ``is_reflected``, ``function(other, self)``."""
        if isinstance(other, (float, complex)):
            self.refuse("a number of rows (size(0)) that is used as a number")
        if isinstance(other, torch.Tensor) or not hasattr(other, "__index__"):
            return NotImplemented
        if isinstance(other, Count) and other.family.what != self.family.what:
            value = function(other.value, self.value) if is_reflected else function(self.value, other.value)
            both = type(self.family).of(value, f"{self.family.what} and {other.family.what}", (6, 17))
            return Count(value, lambda number: number, both, (1, 0), self.check)
        theirs = other.of if isinstance(other, Count) else lambda _: int(other)

        def of(number: int) -> int:
            mine, its = self.of(number), theirs(number)
            return int(function(its, mine) if is_reflected else function(mine, its))

        form = None
        if self.form is not None and not isinstance(other, Count):
            a, b = self.form
            if function is operator.mul:
                form = a * int(other), b * int(other)
            elif function is operator.add:
                form = a, b + int(other)
        return Count(of(self.family.number), of, self.family, form, self.check)

    def _refused(self, other: Any = None) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        self.refuse("a number of rows (size(0)) that is used as a number")

    __float__ = __complex__ = __truediv__ = __rtruediv__ = __divmod__ = __rdivmod__ = __rpow__ = _refused
    __invert__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refused
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = bit_length = bit_count = as_integer_ratio = _refused

    def __pow__(self, other: Any) -> Any:
        return self._with(operator.pow, other) if isinstance(other, int) and other >= 0 else self._refused(other)


def _arithmetic(name: str) -> None:
    function = getattr(operator, name)
    setattr(Count, f"__{name}__", lambda self, other: self._with(function, other))
    setattr(Count, f"__r{name}__", lambda self, other: self._with(function, other, True))


#: Comparisons with a constant that only ask whether there are rows.
_ASK_FOR_ROWS = ("gt", 0), ("le", 0), ("ge", 1), ("lt", 1), ("eq", 0), ("ne", 0)


def _comparison(name: str) -> None:
    function = getattr(operator, name)

    def compare(self: Count, other: Any) -> bool:
        families = {each.family.what: each.family for each in (self, other) if isinstance(each, Count)}
        is_alike = isinstance(other, Count) and len(families) == 1
        if not is_alike and any(family.is_selected for family in families.values()) and is_of_user():
            self.refuse("the number of rows that a mask selects, which is compared (use mask.any() or mask.sum()),")
        mine = bool(function(self.value, _plain(other)))
        if not is_of_user():
            return mine
        asks_for_rows = type(other) is int and (name, other) in _ASK_FOR_ROWS
        self.check.compares |= not asks_for_rows and not is_of_template()
        if is_alike and self.form == other.form is not None:
            return mine
        whole: dict[str, Any] = {what: self.check.whole_number(family) for what, family in sorted(families.items())}
        # An equal number is probably the size of another tensor of this rank. But if it is zero, this rank has no edges.
        is_size = type(other) is int and name in ("eq", "ne") and self.value == other != 0
        if is_size:
            return mine
        if None in whole.values():  # in a trimmed model or a hook, where ranks cannot ask each other
            if name not in ("eq", "ne") and not asks_for_rows:
                self.refuse("a number of rows (size(0)) that is compared")
            return mine
        return bool(
            function(*(each.of(whole[each.family.what]) if isinstance(each, Count) else each for each in (self, other)))
        )

    setattr(Count, f"__{name}__", compare)


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _arithmetic(_name)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _comparison(_name)


class Shape(tuple[Any, ...]):
    """Shape of a tensor one of whose sizes is a :class:`Count`."""

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return shape_of(found) if isinstance(place, slice) else found

    def __add__(self, other: Any) -> Any:
        return shape_of((*self, *other))

    def __radd__(self, other: Any) -> Any:
        return shape_of((*other, *self))

    def numel(self) -> Any:
        product: Any = 1
        for size in self:
            product = product * size
        return product


def shape_of(sizes: Iterable[Any]) -> Any:
    """Returns a :class:`Shape` of these sizes if a :class:`Count` is among them, else a ``torch.Size``."""
    sizes = tuple(sizes)
    return Shape(sizes) if any(isinstance(size, Count) for size in sizes) else torch.Size(sizes)


def counts_in(value: Any) -> Iterator[Count]:
    """Yields each :class:`Count` in a value, also inside containers."""
    return found(value, Count)


def mapped_arguments(value: Any, function: Callable[[Any], Any]) -> Any:
    """Applies ``function`` to each value in an operation's arguments, also inside containers. Shapes become tuples."""
    return mapped(value, function, (Shape, torch.Size))


def without_counts(value: Any) -> Any:
    """Returns a value in which each :class:`Count` is replaced by its integer."""
    return mapped_arguments(value, _plain) if next(counts_in(value), None) is not None else value


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Count) else value
