"""Suggests known names for a name that is mistyped."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def did_you_mean(word: Any, known: Iterable[Any]) -> str:
    """Returns a sentence for an error that suggests the closest of ``known`` instead of ``word``, or an empty text if none is close."""
    lowered = {name.lower(): name for name in known if isinstance(name, str)}
    close = difflib.get_close_matches(word.lower(), lowered, n=2) if isinstance(word, str) else []
    return f". Did you mean {' or '.join(lowered[match] for match in close)}?" if close else ""


def suggest_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function or an ``__init__``: the TypeError for an unknown argument names the closest argument of the function."""
    known = inspect.signature(function).parameters
    suggested = [name for name in known if name != "self"]
    own_name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{own_name}() has no argument {name!r}{did_you_mean(name, suggested)}")
        return function(*args, **kwargs)

    return called


def no_attribute(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Returns the AttributeError to raise for a name that a module does not have. Its text suggests the closest name."""
    meant = "" if name.startswith("_") else did_you_mean(name, known)
    # With the name alone, Python adds no suggestion of its own.
    return AttributeError(f"module {module!r} has no attribute {name!r}{meant}", name=name)
