"""Remembers the finished steps of staging in their folder, so that a stopped conversion goes on, and unchanged tables are not read again.

Each step writes into a folder of its own. Once its files are on disk, ``done.json`` there records its results. A folder without this file is of a step that
was stopped; the step begins again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from salientpp.store.directory.journal import alone, save, says_what_to_do

T = TypeVar("T")

#: File that marks a folder as one of this module, and file that marks the folder of a step as finished.
_STAGED, _DONE = "staged.json", "done.json"

#: Version of the staged files. With another version, all steps begin again.
_VERSION = 1


class Steps:
    """Folder ``work`` with the finished steps of one task. ``task`` is a text that differs if the input or its meaning does."""

    def __init__(self, work: Path, task: str) -> None:
        self.work = work.absolute()
        head = {"format": "salientpp-staged", "version": _VERSION, "work": str(self.work), "task": task}
        with says_what_to_do(work):
            if _head_of(self.work) != head:
                remove_staged(self.work)
                self.work.mkdir(parents=True, exist_ok=True)
                save(self.work / _STAGED, json.dumps(head))

    def run(self, name: str, kind: type[T], step: Callable[[Path], T]) -> T:
        """Returns the result of ``step(folder)``, or its stored result if the step is finished.

        The result is a ``kind``: a dataclass of numbers, texts, paths in the folder, and such dataclasses; or a dictionary that JSON can hold.
        """
        folder = self.work / name
        done = folder / _DONE
        if done.is_file():
            return _restored(kind, json.loads(done.read_text()))
        with says_what_to_do(folder):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
        result = step(folder)
        facts = dataclasses.asdict(result) if dataclasses.is_dataclass(result) else result  # type: ignore[call-overload]
        text = json.dumps(facts, default=str)
        with says_what_to_do(folder):
            _to_disk(folder)
            save(done, text)
        return _restored(kind, json.loads(text))

    def drop(self, name: str) -> None:
        """Removes the folder of a step whose files no later step needs. A later run with the same task repeats the step."""
        shutil.rmtree(self.work / name, ignore_errors=True)


@contextlib.contextmanager
def working_folder(work: Path, root: Path) -> Iterator[None]:
    """Locks the folder ``work`` for a ``with`` block, and removes it at the end. If the block raises, the folder stays for the next run.

    ``root`` is the directory that is written, for errors.

    Raises:
        ValueError: another process is writing ``root``, or ``work`` holds other files.
    """
    with says_what_to_do(work):
        work.mkdir(parents=True, exist_ok=True)
    with alone(work, root):
        if _head_of(work) is None and any(work.iterdir()):
            raise ValueError(
                f"{work} holds files that no conversion wrote; move them away, or choose another directory than {root}"
            )
        yield
        shutil.rmtree(work, ignore_errors=True)


def remove_staged(work: Path) -> None:
    """Removes what earlier steps wrote in the folder, if it is marked as a folder of steps. The folder itself stays, since it may be locked."""
    if _head_of(work) is None:
        return
    for path in work.iterdir():
        if path.name != _STAGED:
            shutil.rmtree(path, ignore_errors=True)
    (work / _STAGED).unlink(missing_ok=True)


def _head_of(work: Path) -> dict[str, Any] | None:
    try:
        head = json.loads((work / _STAGED).read_text())
    except (OSError, ValueError):
        return None
    return head if isinstance(head, dict) and head.get("format") == "salientpp-staged" else None


def _to_disk(folder: Path) -> None:
    """Waits until the files in the folder are on disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _restored(kind: Any, value: Any) -> Any:
    """Makes a value of type ``kind`` from what JSON kept of it."""
    if value is None:
        return None
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        held = {each.name: _restored(hints[each.name], value[each.name]) for each in dataclasses.fields(kind)}
        return kind(**held)  # type: ignore[operator]
    if kind is Path:
        return Path(value)
    return tuple(value) if typing.get_origin(kind) is tuple else value
