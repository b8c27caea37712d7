"""Generates the signature and the docstring of the loaders from the declarations of their options."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from salientpp.engine.option import Option, declared_in, with_entries
from salientpp.loader.options import GROUPS, OPTIONS

L = TypeVar("L", bound=type)

#: Placeholders in a loader's docstring: for the names of the first group, for a list of the other groups, and for the options.
START, REST, MARK = "<start>", "    <groups>\n", "        <options>\n"

#: The loaders, each with its groups of options, its handwritten docstring and its handwritten signature.
_LOADERS: list[tuple[type, list[type], str, inspect.Signature]] = []


def with_options(but: tuple[type, ...] = ()) -> Callable[[L], L]:
    """Returns a decorator that adds the package's options to a loader's signature and docstring. ``but`` names the groups of options to leave out."""

    def decorate(loader: L) -> L:
        groups = [group for group in GROUPS if group not in but]
        _LOADERS.append((loader, groups, loader.__doc__ or "", inspect.signature(loader.__init__)))  # type: ignore[misc]
        _refresh(*_LOADERS[-1])
        return loader

    return decorate


def declare(group: type) -> None:
    """Adds the options of a ``TypedDict`` to every loader, see :mod:`salientpp.engine.option`.

    The first line of the docstring of ``group`` is the title of the group in the documentation.

    Raises:
        ValueError: an option of this name exists already.
    """
    declared = with_entries(group)
    there = sorted(declared.keys() & OPTIONS.keys())
    if there:
        raise ValueError(
            f"{group.__name__} declares {', '.join(there)}, which the loaders already have; choose other names"
        )
    OPTIONS.update(declared)
    GROUPS.append(group)
    for loader, groups, doc, signature in _LOADERS:
        groups.append(group)
        _refresh(loader, groups, doc, signature)


def divided(given: Mapping[str, Any], but: tuple[type, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits ``given`` into the package's options and all other arguments. Options of the groups ``but`` count as others."""
    names = {name for group in GROUPS if group not in but for name in declared_in(group)}
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
    first, *others = groups
    doc = doc.replace(START, _names(first)).replace(REST, "".join(_in_list(group) for group in others))
    loader.__doc__ = doc.replace(MARK, "".join(_in_docstring(name, option) for name, (_, option) in declared.items()))


def _names(group: type) -> str:
    return ", ".join(f"``{name}``" for name in declared_in(group))


def title_of(group: type) -> str:
    """Returns the title of a group of options, in Markdown."""
    return (group.__doc__ or group.__name__).splitlines()[0].rstrip(".")


def _in_list(group: type) -> str:
    return (
        textwrap.fill(
            f"* {title_of(group).replace('`', '``')}: {_names(group)}",
            100,
            initial_indent=" " * 4,
            subsequent_indent=" " * 6,
        )
        + "\n"
    )


def _in_docstring(name: str, option: Option) -> str:
    """Returns an option with the first sentence of its help, which docs/reference/options.md has in full."""
    first = re.sub(r"(, see | \(see )\[[^\]]*\]\([^)]*\)\)?", "", option.help.split(". ")[0])
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first)
    keys = f"; a mapping may have the entries {', '.join(option.keys)}" if option.keys else ""
    return textwrap.fill(f"{name}: {plain}{keys}", 100, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n"
