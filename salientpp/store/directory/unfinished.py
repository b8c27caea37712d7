"""The folder in which a dataset directory is written until it is complete: creates it, opens its journal, and moves it into place."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from salientpp.files import where_to_write
from salientpp.store.directory.journal import JOURNAL, Journal, alone, has_steps
from salientpp.store.directory.manifest import manifest_checksum


def check_root_is_free(root: Path, overwrite: bool) -> None:
    """Raises ValueError if ``root`` exists and may not be replaced."""
    if root.exists() and not overwrite:
        raise ValueError(f"{root} exists; pass overwrite=True to replace it, or choose another root")
    if root.exists() and not (root / "manifest.json").is_file():
        raise ValueError(f"{root} exists and is not a dataset directory, so it is not replaced; choose another root")


@contextlib.contextmanager
def folder_beside(root: Path) -> Iterator[Path]:
    """Creates and locks the directory that becomes ``root``.

    On failure the directory stays if the next run can continue the work. If not, it is removed, with the parents that were made for it.
    """
    place = Path(os.path.realpath(root))
    folder = place.parent / f".{place.name}.writing"
    made = [path for path in (folder, *folder.parents) if not path.exists()]  # nearest first

    def leave() -> None:
        for path in made[1:]:
            with contextlib.suppress(OSError):  # another process may have put something there
                path.rmdir()

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        leave()
        raise type(error)(
            error.errno,
            f"{root} cannot be written ({error.strerror}); {where_to_write(error, 'choose a root in a directory that you may write to')}",
        ) from None
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or (not made and found.st_uid != os.geteuid()):
        raise ValueError(f"{folder} is not a directory that you own; remove it, or choose another root")
    with alone(folder, root):
        try:
            yield folder
        except BaseException:
            if (made or (folder / JOURNAL).is_file()) and not has_steps(folder):
                shutil.rmtree(folder, ignore_errors=True)
                leave()
            raise


def begin(folder: Path, kind: str, task: Mapping[str, Any], root: Path, overwrite: bool) -> Journal:
    """Opens the journal of a task that writes ``root``. The caller holds the folder's lock (:func:`folder_beside`)."""
    journal = Journal.open(folder, kind, task, overwrite=overwrite, name=root)
    for part in folder.glob("part-*") if not journal.steps else ():  # left by a call that was abandoned
        shutil.rmtree(part)
    return journal


def complete(journal: Journal, manifest: dict[str, Any], folder: Path, root: Path, overwrite: bool) -> None:
    """Writes the manifest with the files of all steps, and moves the directory to ``root``."""
    manifest["files"] = journal.file_entries()
    manifest["checksum"] = manifest_checksum(manifest)
    journal.finish(json.dumps(manifest, indent=1, sort_keys=True))
    check_root_is_free(root, overwrite)  # checked again, because hours may have passed
    move_into_place(folder, root)
    (root / JOURNAL).unlink()


def move_into_place(temporary: Path, root: Path) -> None:
    """Renames a complete directory to ``root``, and removes the previous one."""
    place = Path(os.path.realpath(root))  # if root is a link, the link stays
    if not place.exists():
        temporary.rename(place)
        return
    # The process id alone is not enough: in a container it is often the same in every run, and a killed run leaves its files.
    old = place.parent / f".{place.name}.replaced-{os.getpid()}-{secrets.token_hex(4)}"
    place.rename(old)
    try:
        temporary.rename(place)
    except BaseException:
        old.rename(place)
        raise
    shutil.rmtree(old)
