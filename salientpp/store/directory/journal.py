"""Notes which steps of a long job are done, so that a run that was stopped goes on where it was.

The directory that is written holds ``journal.jsonl`` until it is complete: a line that says what the job is, and a line for each step. A step writes its files
under ``work/``; once they are on the disk they get their names, and the journal notes the step with their checksums. So a file that the journal does not know
was left by a step that was stopped, and is written anew. So is a line that does not end: the run was killed while it wrote it.
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

#: What steps write: arrays, and runs of words that are still to be sorted.
RUNS = ".runs"
_SUFFIXES = (".npy", RUNS)

#: How :func:`~salientpp.files.replace_file` calls what a run that was killed did not finish.
_HALF_WRITTEN = (f".{JOURNAL}.", f".{MANIFEST}.")


class Journal:
    """The steps of one job into a directory.

    Attributes:
        root: the directory.
        work: the folder in it for files of steps that are not done.
        steps: name -> ``{"files": name -> checksums, "facts": ...}`` of the steps that are done.
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
        """The journal of a directory that is new, or where the same task was begun. The caller holds it :func:`alone`.

        Args:
            kind: what is made: 'conversion' or 'partition'.
            task: JSON that says what it is made of, and how.
            overwrite: remove another task's work.
            name: what the user calls the directory.
            complete: it has a manifest, and is to be replaced.

        Raises:
            ValueError: the directory holds something else.
        """
        journal = cls(root, kind, task)
        if not complete:
            journal._claim(overwrite, root if name is None else name)
        journal._save()  # so that it is known for ours from here on, and for nothing complete
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
                f"{name} was begun by a {kind} that is not this one: {'; '.join(_difference(key, task.get(key), ours.get(key)) for key in differ)}. Give that "
                "command again to go on with it, pass overwrite (--overwrite) to begin anew, or choose another directory"
            )

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
        """Give the files of these names in ``work`` their place in the directory, and note the step; its facts, as a later run reads them from JSON."""
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
        """Forget a step that no other needs any more, and remove its files."""
        done = self.steps.pop(step, None)
        if done is not None:
            self._add({"dropped": step})
            for name in done["files"]:
                (self.root / name).unlink(missing_ok=True)

    def file_entries(self) -> dict[str, dict[str, Any]]:
        return {name: entry for step in self.steps.values() for name, entry in step["files"].items()}

    def finish(self, manifest: str) -> None:
        """Write the manifest, which makes the directory complete; but for the journal, which the caller removes, what only the job needed is gone."""
        self._clear()
        save(self.root / MANIFEST, manifest)

    def _clear(self) -> None:
        """Remove what no step that is done has left, but for what is in folders."""
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
    """Whether a job was begun in a directory, of which something is done."""
    try:
        return bool(_read(root / JOURNAL)[1])
    except OSError:
        return False
    except (ValueError, KeyError, TypeError):
        return True  # nobody can say


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The first line, and the steps that are done."""
    head, *lines = path.read_text().split("\n")[:-1]
    steps: dict[str, dict[str, Any]] = {}
    for entry in map(json.loads, lines):
        if "dropped" in entry:
            steps.pop(entry["dropped"], None)
        else:
            steps[entry["step"]] = {"files": entry["files"], "facts": entry["facts"]}
    return json.loads(head), steps


def save(path: Path, text: str) -> None:
    """Write a small file whole, on the disk."""

    def write(file: Any) -> None:
        file.write(f"{text}\n".encode())
        file.flush()
        os.fsync(file.fileno())

    replace_file(path, write)
    _sync(path.parent)


@contextlib.contextmanager
def says_what_to_do(path: Path) -> Iterator[None]:
    """Have errors of the system say which file they are about, and that the job can go on."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} cannot be written ({error.strerror or error}); {what_to_do(error, 'make room or mend what is wrong')}. Then give the same command "
            "again, which goes on after the last step that was done",
        ) from error


def _difference(key: str, begun: Any, asked: Any) -> str:
    if key == "files":
        return "the files of the source have other names, sizes or times"
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
    """Hold a lock on a directory, where the system and its file system have locks. ValueError, with the user's ``name`` for it: another process has it."""
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
            is_there = False  # or renamed or removed by whoever had it
        except OSError:  # a network's file system
            is_there = True
        if not is_there:
            raise ValueError(
                f"another process is writing {root if name is None else name}; wait for it, or choose another directory"
            )
        yield
    finally:
        os.close(descriptor)
