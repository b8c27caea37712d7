"""The signature and docstring of the loaders, made of the declarations of their options."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from salientpp.engine.option import Option, declared_in
from salientpp.loader.options import GROUPS, OPTIONS

L = TypeVar("L", bound=type)

#: Where the docstring of a loader has the options.
MARK = "        <options>\n"

#: The loaders, each with its groups of options, its own docstring, and its own signature.
_LOADERS: list[tuple[type, list[type], str, inspect.Signature]] = []


def with_options(but: tuple[type, ...] = ()) -> Callable[[L], L]:
    """A decorator of a loader: its signature and docstring have the options of all groups but those of ``but``."""

    def decorate(loader: L) -> L:
        groups = [group for group in GROUPS if group not in but]
        _LOADERS.append((loader, groups, loader.__doc__ or "", inspect.signature(loader.__init__)))  # type: ignore[misc]
        _refresh(*_LOADERS[-1])
        return loader

    return decorate


def declare(group: type) -> None:
    """Add the options of a ``TypedDict`` to every loader, see :mod:`salientpp.engine.option`. The first line of its docstring is its title in the docs.

    Raises:
        ValueError: an option is there already.
    """
    declared = {name: option for name, (_, option) in declared_in(group).items()}
    there = sorted(declared.keys() & OPTIONS.keys())
    if there:
        raise ValueError(
            f"{group.__name__} declares {', '.join(there)}, which the loaders have already; take other names"
        )
    OPTIONS.update(declared)
    GROUPS.append(group)
    for loader, groups, doc, signature in _LOADERS:
        groups.append(group)
        _refresh(loader, groups, doc, signature)


def divided(given: Mapping[str, Any], but: tuple[type, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was given for the package's options, of all groups but those of ``but``; and the rest, which is torch's."""
    names = OPTIONS.keys() - {name for group in but for name in declared_in(group)}
    own = {name: value for name, value in given.items() if name in names}
    return own, {name: value for name, value in given.items() if name not in names}


def _refresh(loader: Any, groups: list[type], doc: str, signature: inspect.Signature) -> None:
    declared = {name: of for group in groups for name, of in declared_in(group).items()}
    own = list(signature.parameters.values())
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=type_)
        for name, (type_, option) in declared.items()
    ]
    rest = own[-1].replace(name="kwargs", annotation=Any)
    loader.__init__.__signature__ = signature.replace(parameters=[*own[:-1], *options, rest])
    loader.__doc__ = doc.replace(MARK, "".join(_in_docstring(name, option) for name, (_, option) in declared.items()))


def _in_docstring(name: str, option: Option) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", option.help)
    return textwrap.fill(f"{name}: {plain}", 150, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n"
