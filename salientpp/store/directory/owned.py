"""Removes files that this package wrote in a directory, and nothing else.

A manifest or a journal lists them by name. A user may have put other files beside them. These stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

#: Maximum bytes of a file's name, and how many of them are reserved for what is added to a directory's name.
_LONGEST, _ADDED = 255, 48


def hidden_name(name: str, added: str) -> str:
    """Returns ``.name.added``, a name for a file beside the directory ``name``. Long names get a checksum instead."""
    if len(os.fsencode(name)) > _LONGEST - _ADDED:
        name = f"{name[:30]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
    return f".{name}.{added}"


def half_written(names: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches the temporary files which a killed :func:`~salientpp.files.replace_file` of these files may leave."""
    return re.compile(rf"\.({'|'.join(re.escape(name[:40]) for name in names)})\.[0-9a-f]{{8}}")


def listed_files(manifest: Path, format: str) -> set[str] | None:
    """Returns the names of the files that a manifest of this format lists, or None if the file is no such manifest."""
    try:
        found = json.loads(manifest.read_text())
        names = set(found["files"]) if found["format"] == format else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return names if names is not None and all(map(_is_inside, names)) else None


def others_in(root: Path, known: Iterable[str], patterns: Iterable[re.Pattern[str]] = ()) -> list[str]:
    """Returns the files, links and empty folders in a directory that are not ``known``, and whose names no pattern matches.

    Names are relative to the directory. The folders of known files count as known. Symbolic links are not followed.
    """
    known, patterns = set(known), tuple(patterns)
    folders = {str(folder) for name in known for folder in PurePosixPath(name).parents}
    found = []
    for path, inner, files in os.walk(root):
        inside = Path(path).relative_to(root)
        links = [name for name in inner if (Path(path) / name).is_symlink()]
        for name in [*files, *links]:
            relative = str(inside / name)
            if relative not in known and not any(pattern.fullmatch(relative) for pattern in patterns):
                found.append(relative)
        is_empty = not files and not inner and inside != Path(".")
        found += [f"{inside}/"] if is_empty and str(inside) not in folders else []
    return sorted(found)


def remove_files(root: Path, known: Iterable[str], patterns: Iterable[re.Pattern[str]] = ()) -> None:
    """Removes the ``known`` files and those whose names a pattern matches, then the folders that became empty."""
    known, patterns = set(known), tuple(patterns)
    names = known | {name for name in others_in(root, known) if any(pattern.fullmatch(name) for pattern in patterns)}
    names = {name for name in names if _is_inside(name) and not _leads_through_link(root, name)}
    for name in names:
        with contextlib.suppress(NotADirectoryError):
            (root / name).unlink(missing_ok=True)
    folders = {folder for name in names for folder in PurePosixPath(name).parents if folder != PurePosixPath(".")}
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):  # somebody else's files are in it
            (root / folder).rmdir()


def _is_inside(name: str) -> bool:
    """True if a name stays inside the directory. A name in a forged manifest or journal may lead out of it."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _leads_through_link(root: Path, name: str) -> bool:
    return any((root / folder).is_symlink() for folder in PurePosixPath(name).parents if folder.parts)
