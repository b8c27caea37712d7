"""A journal of the finished steps of a long job, so that a stopped run can continue.

Until the directory is complete it holds ``journal.jsonl``: one line that describes the job, and lines per step. A step
writes its files under ``work/``. Once they are on disk, the journal names them, they are renamed into place, and the
journal records the step with their checksums. If the journal names a file, but does not record its step, the step was
stopped, and the next run writes the file again. An incomplete last line comes from a run that was killed while writing;
its step is repeated. If a step is repeated, so are the steps after it, because its result may differ. Files that the
journal does not name are not touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from salientpp.files import replace_file, what_to_do
from salientpp.store.directory.files import DatasetError, describe_file, verify_file
from salientpp.store.directory.kinds import MANIFEST
from salientpp.store.directory.owned import half_written, remove_files

JOURNAL, WORK = "journal.jsonl", "work"

#: Suffix of files with edges that are not sorted yet.
RUNS = ".runs"

#: Files of unfinished steps.
_UNFINISHED = re.compile(rf"{WORK}/.*(\.npy|\.arrow|\.json|{re.escape(RUNS)})", re.DOTALL)

#: Temporary files of :func:`~salientpp.files.replace_file`, which a killed run may leave.
HALF_WRITTEN = half_written((JOURNAL, MANIFEST))


class Journal:
    """Records the finished steps of one job that writes a directory, so that a later run skips them.

    Attributes:
        root: the directory.
        work: folder inside it for the files of unfinished steps.
        steps: finished steps, name -> ``{"files": name -> checksums, "facts": ...}``. The facts are results of the step that later steps need.
        known: names of all files in the directory that jobs wrote, also of dropped steps.
    """

    def __init__(self, root: Path, kind: str, task: Mapping[str, Any]) -> None:
        self.root, self.work = root, root / WORK
        self._head = {"format": f"salientpp-{kind}", "task": json.loads(json.dumps(task, default=str))}
        self.steps: dict[str, dict[str, Any]] = {}
        self.known: set[str] = set()

    @classmethod
    def open(
        cls,
        root: Path,
        kind: str,
        task: Mapping[str, Any],
        *,
        overwrite: bool,
        name: Path | None = None,
        replaced: Iterable[str] | None = None,
    ) -> Journal:
        """Opens the journal of a new directory, or of one where the same task was begun. The caller must hold the directory's lock (:func:`alone`).

        Args:
            kind: kind of job: 'conversion' or 'partition'.
            task: JSON that identifies the input and the options.
            overwrite: if True, remove another task's work.
            name: the user's name of the directory, for errors.
            replaced: names of the files of a complete directory that this job replaces (:func:`~salientpp.store.directory.owned.listed_files`). They
                are removed.

        Raises:
            ValueError: the directory holds other files or the work of another task.
        """
        journal = cls(root, kind, task)
        if replaced is None:
            journal._claim(overwrite, root if name is None else name)
        else:
            journal.known = set(replaced)
        journal._save()  # first, so that a killed run leaves a directory that is known as ours and as incomplete
        (root / MANIFEST).unlink(missing_ok=True)
        journal._clear()
        with says_what_to_do(journal.work):
            journal.work.mkdir()
        return journal

    def _claim(self, overwrite: bool, name: Path) -> None:
        root, path = self.root, self.root / JOURNAL
        if not path.is_file():
            check_empty(root)
            return
        try:
            head, steps, self.known = _read(path)
            is_same_kind, task = head["format"] == self._head["format"], head["task"]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({error}); remove {root}, or choose another directory") from None
        if not is_same_kind:
            raise ValueError(f"{root} has the journal of a job of another kind; choose another directory")
        for folder, _, files in os.walk(self.work):
            for other in (file for file in files if not _UNFINISHED.fullmatch(f"{WORK}/{file}")):
                raise ValueError(
                    f"{Path(folder) / other} was not written by this command; move it away, then repeat the command"
                )
        ours = self._head["task"]
        if task == ours:
            self.steps = steps
        elif steps and not overwrite:
            differ = [key for key in {**task, **ours} if task.get(key) != ours.get(key)]
            kind = self._head["format"].removeprefix("salientpp-")
            raise ValueError(
                f"{name} was begun by another {kind}: {'; '.join(difference(key, task.get(key), ours.get(key)) for key in differ)}. Repeat that "
                "command to continue it, pass overwrite (--overwrite) to start over, or choose another directory"
            )

    def facts(self, step: str) -> dict[str, Any] | None:
        """Returns a finished step's facts, or None if the step must run. If one of its files was changed, drops this step and later ones."""
        done = self.steps.get(step)
        if done is None:
            return None
        try:
            for name, entry in done["files"].items():
                verify_file(self.root, name, entry, full=False)
        except DatasetError:
            # They were made from this step. Repeated, it may give another result: a partitioner with several threads does.
            names = list(self.steps)
            for later in names[names.index(step) :]:
                del self.steps[later]
                self._add({"dropped": later})
            return None
        return done["facts"]

    def note(self, step: str, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Records a finished step, after moving its files from ``work`` into the directory. Returns its facts as read back from JSON."""
        entries = {name: {**more, **describe_file(self.work / name)} for name, more in files.items()}
        for name in files:
            if name not in self.known and os.path.lexists(self.root / name):
                raise ValueError(
                    f"{self.root / name} was not written by this command; move it away, then repeat the command"
                )
        if not self.known.issuperset(files):
            self.known.update(files)
            self._add({"known": sorted(files)})
        folders = {self.root}
        for name in files:
            folders.add((self.root / name).parent)
            (self.root / name).parent.mkdir(exist_ok=True)
            os.replace(self.work / name, self.root / name)
        for folder in folders:
            to_disk(folder)
        done = json.loads(json.dumps({"files": entries, "facts": facts}))
        self._add({"step": step, **done})
        self.steps[step] = done
        return done["facts"]

    def drop(self, step: str) -> None:
        """Removes a step and its files, once no later step needs them."""
        done = self.steps.pop(step, None)
        if done is not None:
            self._add({"dropped": step})
            remove_files(self.root, done["files"])

    def file_entries(self) -> dict[str, dict[str, Any]]:
        return {name: entry for step in self.steps.values() for name, entry in step["files"].items()}

    def finish(self, manifest: str) -> None:
        """Removes files that only the job needed, and writes the manifest. The caller then removes the journal."""
        self._clear()
        with says_what_to_do(self.root / MANIFEST):
            save(self.root / MANIFEST, manifest)

    def _clear(self) -> None:
        """Removes the folder ``work``, and files that jobs wrote for steps that are not finished."""
        shutil.rmtree(self.work, ignore_errors=True)
        remove_files(self.root, self.known - set(self.file_entries()), [HALF_WRITTEN])

    def _save(self) -> None:
        lines = [self._head, {"known": sorted(self.known)}]
        lines += [{"step": name, **done} for name, done in self.steps.items()]
        with says_what_to_do(self.root / JOURNAL):
            save(self.root / JOURNAL, "\n".join(map(json.dumps, lines)))

    def _add(self, line: Mapping[str, Any]) -> None:
        with says_what_to_do(self.root / JOURNAL), (self.root / JOURNAL).open("a") as file:
            file.write(f"{json.dumps(line)}\n")
            file.flush()
            os.fsync(file.fileno())


def check_empty(root: Path) -> None:
    """Raises ValueError if a directory without a journal holds files, except unfinished ones of a killed job."""
    if any(not HALF_WRITTEN.fullmatch(path.name) for path in root.iterdir()):
        raise ValueError(f"{root} exists and is not empty; choose another directory")


def has_steps(root: Path) -> bool:
    """True if a job was begun in the directory and at least one step is finished."""
    try:
        return bool(_read(root / JOURNAL)[1])
    except OSError:
        return False
    except (ValueError, KeyError, TypeError):
        return True  # the journal is unreadable, so assume that there is work to keep


def discard(root: Path) -> None:
    """Removes the files of a job without finished steps, and the directory if it is empty then."""
    known: set[str] = set()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = _read(root / JOURNAL)[2] | {JOURNAL}
    remove_files(root, known, [HALF_WRITTEN, *([_UNFINISHED] if known else [])])
    for folder, _, _ in os.walk(root / WORK, topdown=False) if known else ():
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    with contextlib.suppress(OSError):  # somebody else's files are in it
        root.rmdir()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]], set[str]]:
    """Reads a journal. Returns its first line, the finished steps, and the names of all files that steps wrote."""
    head, *lines = path.read_text().split("\n")[:-1]
    steps: dict[str, dict[str, Any]] = {}
    known: set[str] = set()
    for entry in map(json.loads, lines):
        if "known" in entry:
            known.update(entry["known"])
        elif "dropped" in entry:
            steps.pop(entry["dropped"], None)
        else:
            name, names = entry["step"], list(steps)
            # An earlier release repeated a step without dropping those after it.
            for later in names[names.index(name) :] if name in steps else ():
                del steps[later]
            steps[name] = {"files": entry["files"], "facts": entry["facts"]}
            known.update(entry["files"])
    return json.loads(head), steps, known


def save(path: Path, text: str) -> None:
    """Writes a small file. A crash leaves the old file or the new one, both complete."""

    def write(file: Any) -> None:
        file.write(f"{text}\n".encode())
        file.flush()
        os.fsync(file.fileno())

    replace_file(path, write)
    to_disk(path.parent)


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


def difference(key: str, begun: Any, asked: Any) -> str:
    """Returns a text that says how an entry of a task differs from the entry of another task."""
    if key == "parameters":
        return "the tables or their description differ"
    if key == "files":
        return "the source files have other names, sizes or times"
    if key == "data":
        differ = [entry for entry in [*begun, *asked] if entry not in begun or entry not in asked]
        return f"{', '.join(sorted({name for name, _ in differ}))} of the data differ"
    return f"{key} was {json.dumps(begun)}, is {json.dumps(asked)}"


def to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def alone(root: Path, name: Path | None = None) -> Iterator[None]:
    """Locks a directory during the ``with`` block, if its file system has locks. ValueError if another process holds the lock."""
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
