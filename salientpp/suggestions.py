"""Says which name a mistyped one may stand for."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def did_you_mean(word: Any, known: Iterable[Any]) -> str:
    """Returns a sentence with the texts among ``known`` that are closest to ``word``, or an empty text."""
    lowered = {name.lower(): name for name in known if isinstance(name, str)}
    close = difflib.get_close_matches(word.lower(), lowered, n=2) if isinstance(word, str) else []
    return f". Did you mean {' or '.join(lowered[match] for match in close)}?" if close else ""


def suggest_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function: the TypeError for an unknown argument names the closest argument of the function."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{function.__name__}() has no argument {name!r}{did_you_mean(name, known)}")
        return function(*args, **kwargs)

    return called
