"""Which steps of a conversion are done, so that a run that was stopped goes on where it was?

The directory holds ``journal.json`` until it is complete. A step writes its files under ``work/``; once they are on the disk they get their names, and the
journal notes the step with their checksums. So a file that the journal does not know was left by a step that was stopped, and is written anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from salientpp.datasets.converted.directory import JOURNAL, MANIFEST, is_converted
from salientpp.files import replace_file
from salientpp.store.directory.files import DatasetError, describe_file, verify_file

WORK, RUNS = "work", ".runs"
_FORMAT = "salientpp-conversion"


class Journal:
    """The steps of one conversion into a directory.

    Attributes:
        root: the directory.
        work: the folder in it for files of steps that are not done, and those that only later steps need.
        steps: name -> ``{"files": name -> checksums, "facts": ...}`` of the steps that are done.
    """

    def __init__(self, root: Path, task: Mapping[str, Any]) -> None:
        self.root, self.work = root, root / WORK
        self._task = json.loads(json.dumps(task))
        self.steps: dict[str, dict[str, Any]] = {}

    @classmethod
    @contextlib.contextmanager
    def open(cls, root: Path, task: Mapping[str, Any], overwrite: bool) -> Iterator[Journal]:
        """The journal of a directory that is new, or where the same task was begun; nobody else has it open.

        Args:
            task: JSON that says what is converted, and how.
            overwrite: remove another task's work, or a graph that is complete.

        Raises:
            ValueError: the directory holds something else.
            OSError: it cannot be made.
        """
        journal = cls(root, task)
        if root.exists() and not root.is_dir():
            raise ValueError(f"{root} exists and is no directory; choose another")
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(
                error.errno, f"{root} cannot be written ({error.strerror}); choose another directory"
            ) from None
        with _alone(root):
            journal._claim(overwrite)
            journal._save()
            shutil.rmtree(journal.work, ignore_errors=True)  # of steps that were stopped
            journal.work.mkdir()
            yield journal

    def _claim(self, overwrite: bool) -> None:
        root = self.root
        is_begun, is_complete = (root / JOURNAL).is_file(), (root / MANIFEST).is_file()
        if not is_begun and not is_complete:
            if any(root.iterdir()):
                raise ValueError(f"{root} exists and is not empty; choose another directory")
            return
        if is_complete:
            if not overwrite:
                raise ValueError(f"{root} exists; pass --overwrite to replace it, or choose another directory")
            if not is_converted(root):
                raise ValueError(
                    f"{root} exists and is no converted graph, so it is not replaced; choose another directory"
                )
            self._save()  # so that it is known for ours from here on, and for no graph
            (root / MANIFEST).unlink()
            return
        try:
            kept = json.loads((root / JOURNAL).read_text())
            is_ours = kept["format"] == _FORMAT
            task, steps = kept["task"], dict(kept["steps"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(
                f"{root / JOURNAL} cannot be read ({error}); remove {root}, or choose another directory"
            ) from None
        if not is_ours:
            raise ValueError(f"{root} holds a journal of something else; choose another directory")
        if task != self._task:
            if not overwrite:
                differ = [key for key in {**task, **self._task} if task.get(key) != self._task.get(key)]
                raise ValueError(
                    f"{root} was begun by a conversion that is not this one: {'; '.join(_difference(key, task, self._task) for key in differ)}. Give that "
                    "command again to go on with it, pass --overwrite to begin anew, or choose another directory"
                )
            return
        self.steps = steps

    def facts(self, step: str) -> dict[str, Any] | None:
        """What a step found, if it is done and its files are as it left them."""
        done = self.steps.get(step)
        if done is None:
            return None
        try:
            for name, entry in done["files"].items():
                verify_file(self.root, name, entry, full=False)
        except DatasetError:
            del self.steps[step]
            return None
        return done["facts"]

    def note(self, step: str, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Give the files of these names in ``work`` their place in the directory, and note the step.

        Args:
            files: name -> what is to be said of it beside its size and checksums.
            facts: JSON.
        """
        entries = {name: {**more, **describe_file(self.work / name)} for name, more in files.items()}
        for name in files:
            os.replace(self.work / name, self.root / name)
        _sync(self.root)
        self.steps[step] = {"files": entries, "facts": dict(facts)}
        self._save()
        return self.steps[step]["facts"]

    def drop(self, step: str) -> None:
        """Forget a step that no other needs any more, and remove its files."""
        done = self.steps.pop(step, None)
        if done is not None:
            self._save()
            for name in done["files"]:
                (self.root / name).unlink(missing_ok=True)

    def file_entries(self) -> dict[str, dict[str, Any]]:
        return {name: entry for step in self.steps.values() for name, entry in step["files"].items()}

    def close(self, manifest: Callable[[Path], None]) -> None:
        """Write the manifest, which makes the graph complete, and remove what only the conversion needed."""
        shutil.rmtree(self.work, ignore_errors=True)
        known = self.file_entries()
        for path in self.root.iterdir():  # what a conversion that was given up has left
            if path.suffix in (".npy", RUNS) and path.name not in known:
                path.unlink()
        manifest(self.root / MANIFEST)
        (self.root / JOURNAL).unlink()

    def _save(self) -> None:
        text = json.dumps({"format": _FORMAT, "task": self._task, "steps": self.steps}, indent=1)
        save(self.root / JOURNAL, text)


def save(path: Path, text: str) -> None:
    """Write a small file whole, on the disk."""

    def write(file: Any) -> None:
        file.write(f"{text}\n".encode())
        file.flush()
        os.fsync(file.fileno())

    replace_file(path, write)
    _sync(path.parent)


def _difference(key: str, begun: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    if key == "files":
        return "the files of the source have other names, sizes or times"
    return f"{key} was {json.dumps(begun.get(key))}, is {json.dumps(asked.get(key))}"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold a lock on the directory, where the system has locks.

    Raises:
        ValueError: another process has it.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is writing {root}; wait for it, or choose another directory") from None
        yield
    finally:
        os.close(descriptor)
