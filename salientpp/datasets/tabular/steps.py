"""Remembers the finished steps of staging in their folder, so that a stopped conversion goes on, and unchanged tables are not read again.

Each step writes into a folder of its own. Once its files are on disk, ``done.json`` there records its results and the sizes of the files. A folder without
this file, or with other files, is of a step that was stopped or damaged; the step begins again.
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

from salientpp.store.directory.journal import alone, save, says_what_to_do, to_disk
from salientpp.store.directory.owned import half_written, hidden_name

T = TypeVar("T")

#: File that marks a folder as one of this module, and file that marks the folder of a step as finished.
_STAGED, DONE = "staged.json", "done.json"

#: Folder inside ``work`` for copies of streams, which can be read only once. A run begins with an empty one.
_SPOOL = "spool"

#: Value of ``format`` in the marking file.
_FORMAT = "salientpp-staged"

#: Temporary files of the marking file, which a killed run may leave.
_HALF_WRITTEN = half_written([_STAGED])

#: Version of the staged files. With another version, all steps begin again.
_VERSION = 1


class Steps:
    """Folder ``work`` with the finished steps of one task. ``task`` is a text that differs if the input or its meaning does.

    The folder must be locked by :func:`working_folder`.
    """

    def __init__(self, work: Path, task: str) -> None:
        self.work = work.absolute()
        head = {"format": _FORMAT, "version": _VERSION, "work": str(self.work), "task": task}
        with says_what_to_do(work):
            if _head_of(self.work) != head:
                _forget(self.work)
                save(self.work / _STAGED, json.dumps(head))

    def run(self, name: str, kind: type[T], step: Callable[[Path], T]) -> T:
        """Returns the result of ``step(folder)``, or its stored result if the step is finished. The step need not wait until its files are on the disk.

        The result is a ``kind``: a dataclass of numbers, texts, paths in the folder, and such dataclasses; or a dictionary that JSON can hold.
        """
        folder = self.work / name
        finished = _finished(folder)
        if finished is not None:
            return _restored(kind, finished)
        with says_what_to_do(folder):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
        result = step(folder)
        sizes = {}
        with says_what_to_do(folder):
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    to_disk(path)
                    sizes[str(path.relative_to(folder))] = path.stat().st_size
            save(folder / DONE, json.dumps({"result": _facts_of(result), "sizes": sizes}, default=str))
        return _restored(kind, _finished(folder))


def staged_beside(root: Path) -> Path:
    """Returns the working folder of a conversion that writes ``root``."""
    return root.absolute().with_name(hidden_name(root.absolute().name, "staged"))


@contextlib.contextmanager
def working_folder(work: Path, root: Path) -> Iterator[Path]:
    """Makes and locks the folder ``work`` for a ``with`` block, and removes it at the end. If the block raises, finished steps stay for the next run.

    Yields an empty folder inside it, for copies of streams. ``root`` is the directory that is written, for errors.

    Raises:
        ValueError: another process is writing ``root``, ``work`` holds other files, or its name is not UTF-8.
    """
    try:
        os.fsencode(work).decode()
    except UnicodeDecodeError:
        raise ValueError(
            f"{str(root)!r} must be a name in UTF-8, because pyarrow takes no other; choose another"
        ) from None
    with says_what_to_do(work):
        work.mkdir(parents=True, exist_ok=True)
    with alone(work, root):
        if _head_of(work) is None:
            if any(not _HALF_WRITTEN.fullmatch(path.name) for path in work.iterdir()):
                raise ValueError(
                    f"{work} holds files that no conversion wrote; move them away, or choose another directory than {root}"
                )
            with says_what_to_do(work):
                save(work / _STAGED, json.dumps({"format": _FORMAT}))
        with says_what_to_do(work):
            shutil.rmtree(work / _SPOOL, ignore_errors=True)
            (work / _SPOOL).mkdir()
        is_complete = False
        try:
            yield work / _SPOOL
            is_complete = True
        finally:
            shutil.rmtree(work / _SPOOL, ignore_errors=True)
            if is_complete or not any(work.glob(f"*/{DONE}")):  # or no step is finished
                with contextlib.suppress(OSError):
                    _forget(work)
                shutil.rmtree(work, ignore_errors=True)


def discard_staged(work: Path, root: Path, task: str) -> None:
    """Removes the folder ``work`` if it holds steps of ``task``, or none: a run that was killed after it had written ``root`` left it."""
    with contextlib.suppress(OSError, ValueError), alone(work, root):  # missing, or another process uses it
        head = _head_of(work)
        if head is None:
            work.rmdir()  # if it is empty
        elif head.get("task", task) == task:
            _forget(work)
            shutil.rmtree(work)


def _forget(work: Path) -> None:
    """Removes all steps. The task goes first, so that no step seems finished whose files are removed in part, if the run is killed."""
    save(work / _STAGED, json.dumps({"format": _FORMAT}))
    for path in work.iterdir():
        if path.is_dir() and path.name != _SPOOL:
            shutil.rmtree(path)


def _head_of(work: Path) -> dict[str, Any] | None:
    try:
        head = json.loads((work / _STAGED).read_text())
    except (OSError, ValueError):
        return None
    return head if isinstance(head, dict) and head.get("format") == _FORMAT else None


def _finished(folder: Path) -> Any | None:
    """Returns the result of a finished step, as JSON kept it. None: the step is not finished, or its files are no longer as it left them."""
    try:
        done = json.loads((folder / DONE).read_text())
        is_whole = all((folder / name).stat().st_size == size for name, size in done["sizes"].items())
        return done["result"] if is_whole else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _facts_of(result: Any) -> Any:
    is_instance = dataclasses.is_dataclass(result) and not isinstance(result, type)
    return dataclasses.asdict(result) if is_instance else result


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
