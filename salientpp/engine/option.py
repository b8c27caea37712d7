"""Declaration of loader options, and the option values of one loader.

An option is an entry of a ``TypedDict`` that represents a group of options. Its annotation is ``Annotated[TYPE, Option(...)]``. The declarations generate the
signature and docstring of the loaders, the facts that ranks compare, the fingerprint of a saved state, and the table in docs/reference/options.md.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from typing_extensions import Self

from salientpp.arguments import as_amount, as_integer
from salientpp.engine.way import Way
from salientpp.suggestions import did_you_mean

#: Function of an option's name and the given value. Returns the value, with numbers converted to Python's, or raises ValueError or TypeError.
Check = Callable[[str, Any], Any]


def accept(name: str, value: Any) -> Any:
    """Accepts every value, because the code that uses the option checks it later."""
    return value


def itself(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class Option:
    """Declaration of an option, apart from its name and type.

    Attributes:
        default: the value if none is given.
        help: a paragraph of Markdown for docs/reference/options.md and the docstring of the loaders.
        check: called with the name and the given value, on each rank separately.
        agree: whether all ranks must have the same value: 'yes', 'no', or 'hosts' (only if ranks share a host).
        identifies: True if batches depend on the option. A value other than the default is then part of a saved state's fingerprint.
        plain: converts the value to JSON, to compare and to save it. None: other code compares and saves the results of the option.
        way: function that makes a method (:class:`Way`) from a value other than the default. It acts after the package's own methods.
        shown: the default as docs/reference/options.md shows it. None: its ``repr``.
        entries: ``TypedDict`` of the options that a mapping may give instead of the value. None: the option takes no mapping. The option ``size`` among the
            entries of ``pad`` has the name ``pad_size`` in :class:`Values`, and users write ``pad={"size": ...}``.
        main: the entry that has the option's own value, so that ``option=value`` means ``option={main: value}``. It needs no declaration of its own.
            None: the value itself cannot be an entry.
        implied: the option's own value if a mapping does not give it.
        label: name in errors, in facts and in saved states. None: the option's own name.
    """

    default: Any
    help: str
    check: Check = accept
    agree: Literal["yes", "no", "hosts"] = "no"
    identifies: bool = False
    plain: Callable[[Any], Any] | None = itself
    way: Callable[[Any], Way] | None = None
    shown: str | None = None
    entries: type | None = None
    main: str | None = None
    implied: Any = None
    label: str | None = None

    @functools.cached_property
    def keys(self) -> Mapping[str, Option | None]:
        """The entries that a mapping may have, in order: key -> declaration, which is None for ``main``."""
        if self.entries is None:
            return {}
        declared = {} if self.main is None else {self.main: None}
        return {**declared, **{key: entry for key, (_, entry) in declared_in(self.entries, but=self.main).items()}}

    def named(self, name: str) -> str:
        """Returns how users write this option, whose name in :class:`Values` is ``name``."""
        return f"{name}=" if self.label is None else self.label


@functools.cache  # each loader asks for all groups, and reading the annotations of one takes 0.5 ms
def declared_in(group: type, but: str | None = None) -> Mapping[str, tuple[Any, Option]]:
    """Returns the options of a ``TypedDict`` in order, except ``but``: name -> (type, declaration).

    Raises:
        TypeError: an entry has no :class:`Option`.
    """
    found = {}
    for name, hint in get_type_hints(group, include_extras=True).items():
        if name == but:
            continue
        type_, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        option = next((note for note in notes if isinstance(note, Option)), None)
        if option is None:
            raise TypeError(f"{group.__name__}.{name} must be Annotated[TYPE, Option(...)], got {hint}")
        found[name] = (type_, option)
    return found


def with_entries(group: type) -> dict[str, Option]:
    """Returns the options of a ``TypedDict`` in order, each followed by its entries: name -> declaration."""
    found = {}
    for name, (_, option) in declared_in(group).items():
        found[name] = option
        for key, entry in option.keys.items():
            if entry is not None:
                found[f"{name}_{key}"] = dataclasses.replace(entry, label=f"{name}[{key!r}]")
    return found


class Values:
    """Option values of one loader; each value is an attribute.

    Args:
        given: the user's values. A name that is not declared is an argument of PyG's, and becomes an attribute too.

    Attributes:
        declared: name -> declaration.
        own_ways: methods (:class:`Way`) that the user gave in ``ways=`` or turned on by an option. Set by :meth:`checked_alone`.
        mappings: the mappings that were given, by name of the option. Each entry is an attribute, such as ``pad_size`` for ``pad={"size": ...}``.
    """

    declared: ClassVar[Mapping[str, Option]] = {}

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.own_ways: Sequence[Way] = ()
        self.__dict__.update({name: option.default for name, option in self.declared.items()})
        self.__dict__.update(given)
        self.mappings: dict[str, Any] = {}
        for name, option in self.declared.items():
            value = given.get(name)
            if isinstance(value, Mapping) and option.keys and set(value) <= set(option.keys):
                self.mappings[name] = dict(value)  # a copy, because the user may change the mapping
                entries = {name if key == option.main else f"{name}_{key}": of for key, of in value.items()}
                self.__dict__.update({name: option.implied, **entries})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def by_name(self) -> dict[str, Any]:
        """All values, including those of PyG's arguments. An option to which a mapping was given has the mapping."""
        values = {name: value for name, value in vars(self).items() if name not in ("own_ways", "mappings")}
        return values | self.mappings

    def checked_alone(self) -> Self:
        """Returns a copy of the options with the values that their checks return.

        Raises:
            ValueError, TypeError: a value is invalid, independently of the data and the other values.
        """
        found = copy.copy(self)
        for name, option in self.declared.items():
            if option.keys and name not in self.mappings:
                _check_keys(name, getattr(self, name), option)
            setattr(found, name, option.check(option.label or name, getattr(self, name)))
        made = (
            option.way(getattr(found, name))
            for name, option in self.declared.items()
            if option.way is not None and getattr(found, name) != option.default
        )
        found.own_ways = [*found.by_name.get("ways", ()), *made]
        return found

    def facts(self, of_host: bool) -> dict[str, Any]:
        """Returns the values that all ranks must share, as JSON values. ``of_host`` is True if some ranks share a host."""
        kinds = ("yes", "hosts") if of_host else ("yes",)
        return {
            option.label or name: option.plain(getattr(self, name))
            for name, option in self.declared.items()
            if option.agree in kinds and option.plain is not None
        }

    def fingerprint(self) -> dict[str, Any]:
        """Returns the values that determine the batches, as JSON values, without options that have their default."""
        return {
            option.label or name: option.plain(getattr(self, name))
            for name, option in self.declared.items()
            if option.identifies and option.plain is not None and getattr(self, name) != option.default
        }


def entry_meant(name: str, declared: Mapping[str, Option]) -> str:
    """Returns a hint for an unknown argument: the entry of an option's mapping that the user may mean; or ``""``."""
    words = name.split("_")
    for option, key in ((lead, entry) for lead in declared for entry in declared[lead].keys):
        there = [*option.split("_"), *key.split("_")]
        if set(key.split("_")) <= set(words) and all(any(of.startswith(word) for of in there) for word in words):
            return f". Did you mean {option}={{{key!r}: ...}}?"
    return ""


def _check_keys(name: str, value: Any, option: Option) -> None:
    """Raises ValueError if a mapping has an entry that the option does not have."""
    wrong = [key for key in value if key not in option.keys] if isinstance(value, Mapping) else []
    if wrong:
        keys = ", ".join(option.keys)
        raise ValueError(
            f"{name} may be a mapping with the entries {keys}; got the entry {wrong[0]!r}{did_you_mean(wrong[0], option.keys)}"
        )


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def integer(meaning: str, least: int, most: int = 2**63 - 1, none: bool = False) -> Check:
    """Returns a check that accepts integers in [``least``, ``most``], and None if ``none`` is True. The error shows ``meaning``."""

    def check(name: str, value: Any) -> int | None:
        number = as_integer(value)
        if (value is None and none) or (number is not None and least <= number <= most):
            return number
        raise ValueError(f"{name} must be an integer >= {least} ({meaning}){' or None' if none else ''}, got {value!r}")

    return check


def num_bytes(name: str, value: Any) -> int:
    """Returns a number of bytes that is given as an integer or as text; see :func:`salientpp.arguments.as_amount`."""
    number = as_amount(value) if isinstance(value, str) else as_integer(value)
    if not isinstance(number, int) or number < 0:
        raise ValueError(f"{name} must be a number of bytes >= 0, such as 2_000_000 or '2GiB', got {value!r}")
    if number >= 2**63:
        raise ValueError(f"{name} must be fewer than 2^63 bytes, got {value!r}")
    return number


def amount(whole: str) -> Check:
    """Returns a check for amounts of memory: bytes or a fraction of ``whole``, as :func:`as_amount` reads them."""

    def check(name: str, value: Any) -> float | int:
        found = as_amount(value)
        if found is None:
            expected = f"a fraction in [0, 1] of {whole}, or bytes, such as 2_000_000 or '2GiB'"
            raise ValueError(f"{name} must be {expected}, got {value!r}")
        return found

    return check
