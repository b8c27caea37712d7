"""Creates the folder in which a dataset directory is written, opens its journal, and moves the folder into place once it is complete."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from salientpp.files import says_where_to_write
from salientpp.store.directory.description import FORMAT
from salientpp.store.directory.journal import HALF_WRITTEN, JOURNAL, Journal, alone, discard, has_steps
from salientpp.store.directory.kinds import MANIFEST
from salientpp.store.directory.manifest import PARTS_FILE, manifest_checksum
from salientpp.store.directory.owned import hidden_name, listed_files, others_in, remove_files
from salientpp.store.directory.stored_vip import KEPT

#: Files in a dataset directory that its manifest does not list.
_KEPT = re.compile(rf"{KEPT}/\.?vip-[-0-9a-f.n]*(\.npy)?(\.[0-9a-f]{{8}})?")
_PATTERNS = (HALF_WRITTEN, _KEPT)


def check_root_is_free(root: Path, overwrite: bool) -> None:
    """Raises ValueError if ``root`` exists, unless ``overwrite`` is set and this package wrote all files in it."""
    if not root.exists():
        return
    if not overwrite:
        raise ValueError(f"{root} exists; pass overwrite=True to replace it, or choose another root")
    known = _files_of(root)
    if known is None:
        raise ValueError(f"{root} exists and is not a dataset directory, so it is not replaced; choose another root")
    if others := others_in(root, known, _PATTERNS):
        raise ValueError(
            f"{root} also holds {_listed(others)}, which no command of salientpp wrote, so it is not replaced; move the files away, or choose another root"
        )


def _files_of(root: Path) -> set[str] | None:
    """Returns the names of the files of a dataset directory, or None if ``root`` is not one."""
    listed = listed_files(root / MANIFEST, FORMAT)
    return None if listed is None else listed | {MANIFEST, PARTS_FILE, JOURNAL}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextlib.contextmanager
def folder_beside(root: Path) -> Iterator[Path]:
    """Creates and locks a hidden folder beside ``root``, in which the new directory is written.

    If writing fails after a finished step, the folder stays for the next run. If it fails
    before that, the folder is removed, and so are the parent folders that this call created.
    """
    place = Path(os.path.realpath(root))
    folder = place.parent / hidden_name(place.name, "writing")
    made = [path for path in (folder, *folder.parents) if not path.exists()]  # nearest first

    def leave() -> None:
        for path in made[1:]:
            with contextlib.suppress(OSError):  # another process may have put something there
                path.rmdir()

    try:
        with says_where_to_write(root, "choose a root in a directory that you may write to"):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        leave()
        raise
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or (not made and found.st_uid != os.geteuid()):
        raise ValueError(f"{folder} is not a directory that you own; remove it, or choose another root")
    with alone(folder, root):
        try:
            yield folder
        except BaseException:
            if (made or (folder / JOURNAL).is_file()) and not has_steps(folder):
                discard(folder)
                leave()
            raise


def begin(folder: Path, kind: str, task: Mapping[str, Any], root: Path, overwrite: bool) -> Journal:
    """Opens, in ``folder``, the journal of a task that writes ``root``. Call it inside :func:`folder_beside`, which holds the lock."""
    return Journal.open(folder, kind, task, overwrite=overwrite, name=root)


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
    old = place.parent / hidden_name(place.name, f"replaced-{os.getpid()}-{secrets.token_hex(4)}")
    place.rename(old)
    try:
        temporary.rename(place)
    except BaseException:
        old.rename(place)
        raise
    remove_files(old, _files_of(old) or (), _PATTERNS)
    try:
        old.rmdir()
    except OSError:
        warnings.warn(
            f"{old} keeps the files of the replaced directory that salientpp did not write; move them where you need them",
            UserWarning,
            stacklevel=6,
        )
