"""Checks the name of a dataset before the other arguments, so that a user with a wrong name reads about it first.

It reads no graph, and imports torch only for a name that no command accepts.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from salientpp.addresses import without_password
from salientpp.store.directory.kinds import has_manifest, is_converted
from salientpp.suggestions import did_you_mean

#: Kinds of datasets that commands load; :mod:`salientpp.datasets.load` has the same.
KINDS = ("synthetic", "synthetic-mag", "npz", "pyg", "python", "converted", "pyg-partition", "glt-partition")

#: Kind of dataset that an ending of a file means.
_ENDINGS = {".npz": "npz", ".pt": "pyg", ".pth": "pyg"}


class WrongName(Exception):
    """Raised for a name that is no dataset.

    Attributes:
        instead: a name that would work. Empty: unknown.
    """

    def __init__(self, message: str, name: str, instead: str = "") -> None:
        super().__init__(message)
        self.name, self.instead = name, instead

    def in_words(self, words: Sequence[str]) -> str:
        """Returns the text of the error, with the corrected command if it is known. ``words`` is the command that failed."""
        if not self.instead:
            return f"{self}; `salientpp {words[0]} --help` names the kinds of datasets"
        if words.count(self.name) > 1:  # it is unknown which of these words is the dataset
            return f"{self}: {self.instead}"
        at = words.index(self.name)
        return f"{self}: salientpp {shlex.join([*words[:at], self.instead, *words[at + 1 :]])}"


def dataset_of(text: str) -> str:
    """Checks the name of a dataset, and returns it.

    Raises:
        WrongName: there is no such file, directory or dataset, or a name without its kind.
    """
    with contextlib.suppress(OSError, ValueError):  # if the file system refuses the name, loading says why
        _check(text)
    return text


def dataset_or_tables(text: str) -> str:
    """Checks the name of a dataset or of tables, ``tables:FILE.toml``, and returns it. Raises WrongName as :func:`dataset_of` does."""
    kind, _, rest = text.partition(":")
    if kind != "tables" and Path(text).suffix == ".toml" and Path(text).is_file():
        raise WrongName(f"{text} describes tables; put tables: before its name; write", text, f"tables:{text}")
    if kind == "tables" and not Path(rest).is_file():
        raise WrongName(f"{rest}: no such file", text)
    return text if kind == "tables" else dataset_of(text)


def _check(text: str) -> None:
    kind, _, rest = text.partition(":")
    is_directory = has_manifest(text)
    if is_directory and ":" in text:  # a dataset directory of this name
        return
    if kind in KINDS or kind.startswith("ogbn-"):
        path = rest.partition(",")[0] if kind == "converted" else rest
        if kind in ("npz", "pyg", "converted") and rest and not Path(path).exists():
            raise WrongName(f"{path}: no such {'directory' if kind == 'converted' else 'file'}", text)
        return
    if is_converted(text):
        raise WrongName(
            f"{text} is a converted graph; put converted: before its name; write", text, f"converted:{text}"
        )
    if is_directory:
        return
    from salientpp.datasets.load import to_convert, undirected_hint

    try:
        source = to_convert(text)
    except FileNotFoundError as error:
        raise WrongName(str(error), text) from None
    if source is not None:
        first = f"salientpp convert {shlex.quote(source)} graph{undirected_hint(source)}"
        raise WrongName(f"{text} must be converted first: {first}; then", text, "converted:graph")
    if "://" in text:
        shown = without_password(text)
        copied = f"DIR/{shown.rstrip('/').rpartition('/')[2]}"
        raise WrongName(
            f"{shown} must be copied first: salientpp copy-to-disk {shlex.quote(shown)} --to DIR; then", text, copied
        )
    if not Path(text).exists():
        raise WrongName(f"{text}: no such file, directory or dataset{did_you_mean(kind, KINDS)}", text)
    if (of := _ENDINGS.get(Path(text).suffix)) is not None:
        raise WrongName(f"{text} holds a graph; put {of}: before its name; write", text, f"{of}:{text}")
    what = "a directory, but not a dataset directory" if Path(text).is_dir() else "not a file that holds a graph"
    raise WrongName(f"{text} is {what}", text)
