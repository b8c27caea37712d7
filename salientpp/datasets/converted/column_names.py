"""Decides by the names of columns which of them hold the sources of edges, the targets, and the ids of vertices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Words for the two ends of an edge. A column's name may also say that it holds ids, as in ``source_id`` or ``fromNodeId``.
_SOURCE = ("source", "src", "from", "head", "start", "sender", "u")
_TARGET = ("target", "dst", "to", "tail", "end", "receiver", "v", "dest", "destination")

#: Words that a name may add to the word for an end.
_ADDED = re.compile(r"(node|nodes|vertex|vertices|id|ids|idx|index)+")

#: Names (as :func:`_letters` returns them) of the ends of an edge or of an interval.
_INTERVAL = re.compile(r"(start|end)(idx|index)?")

#: Names such as ``uid`` and ``vid``. They mean users and videos as often as the two ends u and v of an edge.
_AMBIGUOUS = re.compile(r"[uv](id|ids|idx|index)")

#: Names of a column of vertex ids, without capitals and underscores.
_IDS = ("id", "nodeid", "vertexid", "node", "vertex", "nid", "vid")

#: If a table has one of these pairs, its other columns do not count.
_EXACT = (("source", "target"), ("src", "dst"))


@dataclass(frozen=True)
class Ends:
    """Hints for :func:`ends_of`. ``named``: the columns of sources and targets that the user named. ``types``: the vertex types of sources and of targets."""

    named: tuple[str, str] | None = None
    types: tuple[str, str] | None = None


UNKNOWN = Ends()


def ends_of(names: Sequence[str], where: str, known: Ends = UNKNOWN) -> tuple[str, str]:
    """Returns the column of sources and the column of targets.

    The names of columns decide, not their order: ``source`` and ``target``, ``src`` and ``dst``, ``from`` and ``to`` and similar, also with endings such as
    ``_id``. Two columns whose names differ only by consecutive numbers, such as ``_c0`` and ``_c1``, are source and target in the order of the numbers. If
    the two ends have different types, columns named after the types count too. ValueError lists the columns if no rule decides, or if two rules disagree.
    """
    if known.named is not None:
        for name in known.named:
            if names.count(name) != 1:
                raise ValueError(
                    f"{where} must have one column {name!r}, got {', '.join(names) or 'none; the first line of text must be a header with the two names'}"
                )
        return known.named
    for source, target in _EXACT:
        if names.count(source) == names.count(target) == 1:
            return source, target
    found = {_by_number(names), _by_words(names)} - {None}
    if known.types is not None:
        found |= {_by_types(names, known.types)} - {None}
    if len(found) == 1 and (ends := found.pop()) is not None:
        return ends
    raise ValueError(
        f"{where}: the columns ({', '.join(names) or 'none'}) do not say which holds the sources of edges and which the targets; call them source and "
        "target, or name them as in edges:FILES,source=NAME,target=NAME, if both hold ids of the same vertices. Two types of vertices need a folder for each: "
        "npy:DIR"
    )


def end_of(name: str) -> int | None:
    """Returns 0 if a column of this name holds the sources of edges, 1 for the targets, or None if the name says neither."""
    word = re.sub(r"\d", "", _letters(name))
    if _AMBIGUOUS.fullmatch(word):
        return None
    return next((end for end, words in enumerate((_SOURCE, _TARGET)) if _says(word, words)), None)


def is_id(name: str) -> bool:
    """True if a column of this name holds the ids of vertices."""
    return re.sub(r"[\s_:.-]", "", name.lower()) in _IDS


def _says(word: str, words: Sequence[str]) -> bool:
    """True if ``word`` is one of ``words``, possibly with an addition such as ``node`` or ``id`` before or after it."""
    return any(
        word == one
        or (word.startswith(one) and _ADDED.fullmatch(word[len(one) :]) is not None)
        or (word.endswith(one) and _ADDED.fullmatch(word[: -len(one)]) is not None)
        for one in words
    )


def _letters(name: str) -> str:
    """Returns the letters and digits of a name in lower case, so that ``Source_ID`` equals ``sourceid``."""
    return re.sub(r"[\W_]", "", name.lower())


def _by_words(names: Sequence[str]) -> tuple[str, str] | None:
    # Beside other columns, start and end may be the times or the positions of something.
    clear = names if len(names) == 2 else [name for name in names if not _INTERVAL.fullmatch(_letters(name))]
    return _only(*([name for name in clear if end_of(name) == end] for end in (0, 1)))


def _by_types(names: Sequence[str], types: tuple[str, str]) -> tuple[str, str] | None:
    return _only(*([name for name in names if _says(_letters(name), (_letters(type_),))] for type_ in types))


def _only(sources: Sequence[str], targets: Sequence[str]) -> tuple[str, str] | None:
    """Returns (column of sources, column of targets) if there is exactly one of each, else None."""
    return (sources[0], targets[0]) if len(sources) == len(targets) == 1 and sources != targets else None


def _by_number(names: Sequence[str]) -> tuple[str, str] | None:
    if len(names) != 2:
        return None
    found = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    first, second = found
    if first is None or second is None or first[1] != second[1] or abs(int(first[2]) - int(second[2])) != 1:
        return None
    low, high = sorted(names, key=lambda name: int(name[len(first[1]) :]))
    return low, high
