"""A journal of the finished steps of a long job, so that a stopped run can continue.

Until the directory is complete it holds ``journal.jsonl``: one line that describes the job, and one line per step. A step writes its files under ``work/``.
Once they are on disk, they are renamed into place, and the journal records the step with their checksums. A file that the journal does not list was left
by a stopped step, and is written again. An incomplete line was left by a run that was killed while writing; its step is repeated.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from salientpp.files import replace_file, what_to_do
from salientpp.store.directory.files import DatasetError, describe_file, verify_file

JOURNAL, MANIFEST, WORK = "journal.jsonl", "manifest.json", "work"

#: Suffixes of files that steps write: arrays, and runs of words that are not sorted yet.
RUNS = ".runs"
_SUFFIXES = (".npy", RUNS)

#: Prefixes of the temporary files of :func:`~salientpp.files.replace_file`, which a killed run may leave.
_HALF_WRITTEN = (f".{JOURNAL}.", f".{MANIFEST}.")


class Journal:
    """The steps of one job that writes a directory.

    Attributes:
        root: the directory.
        work: folder inside it for the files of unfinished steps.
        steps: finished steps, name -> ``{"files": name -> checksums, "facts": ...}``. The facts are results of the step that later steps need.
    """

    def __init__(self, root: Path, kind: str, task: Mapping[str, Any]) -> None:
        self.root, self.work = root, root / WORK
        self._head = {"format": f"salientpp-{kind}", "task": json.loads(json.dumps(task, default=str))}
        self.steps: dict[str, dict[str, Any]] = {}

    @classmethod
    def open(
        cls,
        root: Path,
        kind: str,
        task: Mapping[str, Any],
        *,
        overwrite: bool,
        name: Path | None = None,
        complete: bool = False,
    ) -> Journal:
        """Opens the journal of a new directory, or of one where the same task was begun. The caller must hold the directory's lock (:func:`alone`).

        Args:
            kind: kind of job: 'conversion' or 'partition'.
            task: JSON that identifies the input and the options.
            overwrite: if True, remove another task's work.
            name: the user's name of the directory, for errors.
            complete: True if the directory has a manifest, and is to be replaced.

        Raises:
            ValueError: the directory holds other files or the work of another task.
        """
        journal = cls(root, kind, task)
        if not complete:
            journal._claim(overwrite, root if name is None else name)
        journal._save()  # first, so that a killed run leaves a directory that is known as ours and as incomplete
        (root / MANIFEST).unlink(missing_ok=True)
        journal._clear()
        journal.work.mkdir()
        return journal

    def _claim(self, overwrite: bool, name: Path) -> None:
        root, path = self.root, self.root / JOURNAL
        if not path.is_file():
            if any(not path.name.startswith(_HALF_WRITTEN) for path in root.iterdir()):
                raise ValueError(f"{root} exists and is not empty; choose another directory")
            return
        try:
            head, steps = _read(path)
            is_same_kind, task = head["format"] == self._head["format"], head["task"]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({error}); remove {root}, or choose another directory") from None
        if not is_same_kind:
            raise ValueError(f"{root} holds a journal of something else; choose another directory")
        ours = self._head["task"]
        if task == ours:
            self.steps = steps
        elif steps and not overwrite:
            differ = [key for key in {**task, **ours} if task.get(key) != ours.get(key)]
            kind = self._head["format"].removeprefix("salientpp-")
            raise ValueError(
                f"{name} was begun by another {kind}: {'; '.join(_difference(key, task.get(key), ours.get(key)) for key in differ)}. Repeat that "
                "command to continue it, pass overwrite (--overwrite) to start over, or choose another directory"
            )

    def facts(self, step: str) -> dict[str, Any] | None:
        """Returns the facts of a finished step whose files are unchanged, or None."""
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
        """Moves these files from ``work`` to their places, and records the step. Returns the step's facts, as a later run reads them from JSON."""
        entries = {name: {**more, **describe_file(self.work / name)} for name, more in files.items()}
        folders = {self.root}
        for name in files:
            folders.add((self.root / name).parent)
            (self.root / name).parent.mkdir(exist_ok=True)
            os.replace(self.work / name, self.root / name)
        for folder in folders:
            _sync(folder)
        done = json.loads(json.dumps({"files": entries, "facts": facts}))
        self._add({"step": step, **done})
        self.steps[step] = done
        return done["facts"]

    def drop(self, step: str) -> None:
        """Removes a step that later steps do not need, and its files."""
        done = self.steps.pop(step, None)
        if done is not None:
            self._add({"dropped": step})
            for name in done["files"]:
                (self.root / name).unlink(missing_ok=True)

    def file_entries(self) -> dict[str, dict[str, Any]]:
        return {name: entry for step in self.steps.values() for name, entry in step["files"].items()}

    def finish(self, manifest: str) -> None:
        """Writes the manifest, which completes the directory. Files that only the job needed are removed, except the journal, which the caller removes."""
        self._clear()
        save(self.root / MANIFEST, manifest)

    def _clear(self) -> None:
        """Removes files that belong to no finished step, except files in folders."""
        shutil.rmtree(self.work, ignore_errors=True)
        known = self.file_entries()
        for path in self.root.iterdir():
            if (path.suffix in _SUFFIXES and path.name not in known) or path.name.startswith(_HALF_WRITTEN):
                path.unlink()

    def _save(self) -> None:
        lines = [self._head, *({"step": name, **done} for name, done in self.steps.items())]
        save(self.root / JOURNAL, "\n".join(map(json.dumps, lines)))

    def _add(self, line: Mapping[str, Any]) -> None:
        with (self.root / JOURNAL).open("a") as file:
            file.write(f"{json.dumps(line)}\n")
            file.flush()
            os.fsync(file.fileno())


def has_steps(root: Path) -> bool:
    """True if a job was begun in the directory and at least one step is finished."""
    try:
        return bool(_read(root / JOURNAL)[1])
    except OSError:
        return False
    except (ValueError, KeyError, TypeError):
        return True  # the journal is unreadable, so assume that there is work to keep


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the first line, and the finished steps."""
    head, *lines = path.read_text().split("\n")[:-1]
    steps: dict[str, dict[str, Any]] = {}
    for entry in map(json.loads, lines):
        if "dropped" in entry:
            steps.pop(entry["dropped"], None)
        else:
            steps[entry["step"]] = {"files": entry["files"], "facts": entry["facts"]}
    return json.loads(head), steps


def save(path: Path, text: str) -> None:
    """Writes a small file, whole and synced to disk."""

    def write(file: Any) -> None:
        file.write(f"{text}\n".encode())
        file.flush()
        os.fsync(file.fileno())

    replace_file(path, write)
    _sync(path.parent)


@contextlib.contextmanager
def says_what_to_do(path: Path) -> Iterator[None]:
    """Turns errors of the operating system into errors that name the file and say that the job can continue."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} cannot be written ({error.strerror or error}); {what_to_do(error, 'make room or fix the cause')}. Then repeat the same command: "
            "it continues after the last finished step",
        ) from error


def _difference(key: str, begun: Any, asked: Any) -> str:
    if key == "files":
        return "the source files have other names, sizes or times"
    if key == "data":
        differ = [entry for entry in [*begun, *asked] if entry not in begun or entry not in asked]
        return f"{', '.join(sorted({name for name, _ in differ}))} of the data differ"
    return f"{key} was {json.dumps(begun)}, is {json.dumps(asked)}"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def alone(root: Path, name: Path | None = None) -> Iterator[None]:
    """Holds a lock on a directory, if the file system has locks. ValueError if another process holds the lock; its text calls the directory ``name``."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(descriptor), os.stat(root))
        except (BlockingIOError, FileNotFoundError):
            is_there = False  # locked by another process, which may also have renamed or removed it
        except OSError:  # a network file system without locks
            is_there = True
        if not is_there:
            raise ValueError(
                f"another process is writing {root if name is None else name}; wait for it, or choose another directory"
            )
        yield
    finally:
        os.close(descriptor)
