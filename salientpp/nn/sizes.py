"""Finds out what a model does with a number of rows that it reads, as with ``h.size(0)``.

A trimmed model has fewer rows than the plain one. A number of rows that gives a tensor its shape does no harm. A number that becomes a value, as in
``h / h.size(0)``, needs all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from salientpp.containers import found


@dataclass(eq=False)
class Reading:
    """Record that a model has read a number of rows.

    Attributes:
        nodes: bit mask of the steps (the recorder's nodes) that the rows come from.
        is_used: True if the number gave a shape, or was compared with a number that a trimmed model changes as much. Otherwise its use is unknown.
    """

    nodes: int
    is_used: bool = False


class RowCount(int):
    """Number of rows, or a number computed from it, that reports how the model uses it.

    Use in a shape does no harm. For other uses, it calls ``harm``.
    """

    readings: tuple[Reading, ...]
    harm: Callable[[int], None]
    is_exact: bool  # the number itself, and not computed from it

    def __new__(
        cls, value: int, readings: tuple[Reading, ...], harm: Callable[[int], None], is_exact: bool = True
    ) -> RowCount:
        self = super().__new__(cls, value)
        self.readings, self.harm, self.is_exact = readings, harm, is_exact
        return self

    @property
    def nodes(self) -> int:
        """Bit mask of the nodes that the rows come from."""
        found = 0
        for reading in self.readings:
            found |= reading.nodes
        return found

    def use(self) -> None:
        """Records a use, such as in a shape, that does not need more rows to be computed."""
        for reading in self.readings:
            reading.is_used = True

    def need_all(self) -> None:
        """Records a use that would give another value with fewer rows, so that all rows are needed."""
        self.use()
        self.harm(self.nodes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowCount) and other.is_exact and self.is_exact and other.nodes == self.nodes:
            self.use()  # a trimmed model computes as many rows of both
            other.use()
        elif isinstance(other, int) and int.__eq__(other, 0):
            self.use()  # there is always a row
        else:
            self.need_all()
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __reduce__(self) -> Any:
        return int, (int(self),)


def _computed(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: RowCount, *others: Any) -> Any:
        value = plain(self, *others)
        if type(value) is not int:
            self.need_all()
            return value
        readings = [self.readings, *(each.readings for each in others if isinstance(each, RowCount))]
        return RowCount(value, tuple(dict.fromkeys(one for each in readings for one in each)), self.harm, False)

    return method


def _harmful(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: RowCount, *others: Any) -> Any:
        if not (name in ("__gt__", "__le__") and others == (0,)):  # there is always a row
            self.need_all()
        return plain(self, *others)

    return method


_HARMFUL = "truediv rtruediv pow rpow divmod rdivmod float lt gt le ge"
_HARMFUL += " and rand or ror xor rxor lshift rlshift rshift rrshift invert abs round"
for _name in ["add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod", "neg", "pos"]:
    setattr(RowCount, f"__{_name}__", _computed(f"__{_name}__"))
for _name in _HARMFUL.split():
    setattr(RowCount, f"__{_name}__", _harmful(f"__{_name}__"))


class _Stored(int):
    """Number of rows in the memory of a :class:`Shape`. A tuple that is compared with the shape takes it from there."""

    count: Callable[[], RowCount]

    def __eq__(self, other: object) -> bool:
        return self.count() == (other.count() if isinstance(other, _Stored) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


class Shape(tuple[int, ...]):
    """Shape of a tensor whose dimension ``lead`` counts followed rows. Reading that dimension gives a :class:`RowCount`."""

    lead: int
    nodes: int
    read: Callable[[int, int], RowCount]

    def __new__(cls, values: Any, lead: int, nodes: int, read: Callable[[int, int], RowCount]) -> Shape:
        number, stored = int(values[lead]), _Stored(values[lead])
        stored.count = lambda: read(number, nodes)
        self = super().__new__(cls, (*values[:lead], stored, *values[lead + 1 :]))
        self.lead, self.nodes, self.read = lead, nodes, read
        return self

    def _elements(self) -> Iterator[int]:
        for k, value in enumerate(tuple.__iter__(self)):
            yield self.read(value, self.nodes) if k == self.lead else value

    def __iter__(self) -> Iterator[int]:
        return self._elements()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            kept = range(len(self))[key]
            values = tuple.__getitem__(self, key)
            return Shape(values, kept.index(self.lead), self.nodes, self.read) if self.lead in kept else values
        value = tuple.__getitem__(self, key)
        return self.read(value, self.nodes) if range(len(self))[key] == self.lead else value

    def __add__(self, other: Any) -> Any:
        return tuple(self) + tuple(other)

    def __radd__(self, other: Any) -> Any:
        return tuple(other) + tuple(self)

    def numel(self) -> int:
        number = 1
        for value in self:
            number = number * value
        return number


#: Functions that make a tensor of a given shape, and functions that give a tensor a shape.
NEW = frozenset(["zeros", "ones", "empty", "full", "rand", "randn", "new_zeros", "new_ones", "new_empty", "new_full"])
SHAPERS = frozenset(["view", "reshape", "unflatten", "expand", "broadcast_to", "size"])


def counts_in(value: Any) -> Iterator[RowCount]:
    """Yields all numbers of rows in a value."""
    return found(value, RowCount)


def counts_are_shapes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the row counts in a call do no harm: each only gives a shape, or ends a slice from row 0."""
    if name in ("full", "new_full"):
        size = 0 if name == "full" else 1
        values = [kwargs.get("fill_value"), *args[size + 1 :]]
        return not list(counts_in(values))
    if name == "arange":  # position by position
        return len(args) == 1 and all(count.is_exact for count in counts_in([args, kwargs]))
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        first, others = index[:1], index[1:]
        is_prefix = all(isinstance(each, slice) and not each.start and each.step is None for each in first)
        return is_prefix and not list(counts_in(others))
    return name in NEW or name in SHAPERS
