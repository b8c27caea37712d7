"""The declaration of an option of the loaders, and the values of all options of one loader.

An option is an entry of a ``TypedDict`` that stands for a group of options; its annotation is ``Annotated[TYPE, Option(...)]``. The signature and docstring of
the loaders, the facts that ranks compare, the fingerprint of a saved state and the table in docs/loader.md are made of the declarations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from typing_extensions import Self

from salientpp.arguments import as_amount, as_integer
from salientpp.engine.way import Way

#: Takes the name of an option and what was given for it; gives the value, with Python's numbers, or raises ValueError or TypeError.
Check = Callable[[str, Any], Any]


def accept(name: str, value: Any) -> Any:
    """The check of an option that is checked where it takes effect."""
    return value


def itself(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class Option:
    """What is declared of an option beside its name and type.

    Attributes:
        default: the value where none is given.
        help: a paragraph of Markdown for docs/loader.md and the docstring of the loaders.
        check: called with the name and what was given, on each rank alone.
        agree: whether all ranks must have the same: 'yes', 'no', or 'hosts', where ranks share a host.
        identifies: batches depend on it, so it is in the fingerprint of a saved state where it is not the default.
        plain: makes a JSON value of the value, to compare and to save; None: other code compares and saves what the option leads to.
        way: makes a way of a value other than the default; it acts after the ways of the package.
        shown: the default as docs/loader.md shows it; None: its ``repr``.
    """

    default: Any
    help: str
    check: Check = accept
    agree: Literal["yes", "no", "hosts"] = "no"
    identifies: bool = False
    plain: Callable[[Any], Any] | None = itself
    way: Callable[[Any], Way] | None = None
    shown: str | None = None


def declared_in(group: type) -> dict[str, tuple[Any, Option]]:
    """The options of a ``TypedDict``, in order: name -> (type, declaration).

    Raises:
        TypeError: an entry has no :class:`Option`.
    """
    found = {}
    for name, hint in get_type_hints(group, include_extras=True).items():
        type_, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        option = next((note for note in notes if isinstance(note, Option)), None)
        if option is None:
            raise TypeError(f"{group.__name__}.{name} must be Annotated[TYPE, Option(...)], got {hint}")
        found[name] = (type_, option)
    return found


class Values:
    """The values of the options of one loader; each is an attribute.

    Args:
        given: what the user gave. A name that is not declared is an attribute too: an argument of PyG's that is used beside the options.

    Attributes:
        declared: name -> declaration.
        own_ways: the ways that the user added, by ``ways=`` or by options that make one; after :meth:`checked_alone`.
    """

    declared: ClassVar[Mapping[str, Option]] = {}

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.own_ways: Sequence[Way] = ()
        self.__dict__.update({name: option.default for name, option in self.declared.items()})
        self.__dict__.update(given)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def by_name(self) -> dict[str, Any]:
        """The values, those of PyG's arguments included."""
        return {name: value for name, value in vars(self).items() if name != "own_ways"}

    def checked_alone(self) -> Self:
        """These options with the values that their checks give.

        Raises:
            ValueError, TypeError: a value is wrong, whatever the data and the other values are.
        """
        found = copy.copy(self)
        for name, option in self.declared.items():
            setattr(found, name, option.check(name, getattr(self, name)))
        made = (
            option.way(getattr(found, name))
            for name, option in self.declared.items()
            if option.way is not None and getattr(found, name) != option.default
        )
        found.own_ways = [*found.by_name.get("ways", ()), *made]
        return found

    def facts(self, of_host: bool) -> dict[str, Any]:
        """What all ranks must have the same, as JSON values; ``of_host`` where some ranks share a host."""
        kinds = ("yes", "hosts") if of_host else ("yes",)
        return {
            name: option.plain(getattr(self, name))
            for name, option in self.declared.items()
            if option.agree in kinds and option.plain is not None
        }

    def fingerprint(self) -> dict[str, Any]:
        """What batches depend on, as JSON values, without options that have their default."""
        return {
            name: option.plain(getattr(self, name))
            for name, option in self.declared.items()
            if option.identifies and option.plain is not None and getattr(self, name) != option.default
        }


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def integer(meaning: str, least: int, most: int = 2**63 - 1, none: bool = False) -> Check:
    """A check for integers of [``least``, ``most``], or None if ``none``; ``meaning`` is for the error."""

    def check(name: str, value: Any) -> int | None:
        number = as_integer(value)
        if (value is None and none) or (number is not None and least <= number <= most):
            return number
        raise ValueError(f"{name} must be an integer >= {least} ({meaning}){' or None' if none else ''}, got {value!r}")

    return check


def amount(whole: str) -> Check:
    """A check for amounts of memory, see :func:`salientpp.arguments.as_amount`; ``whole`` says for the error what fractions are of."""

    def check(name: str, value: Any) -> float | int:
        found = as_amount(value)
        if found is None:
            expected = f"a fraction in [0, 1] of {whole}, or bytes, such as 2_000_000 or '2GiB'"
            raise ValueError(f"{name} must be {expected}, got {value!r}")
        return found

    return check
