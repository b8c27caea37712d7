"""Writes a file whole, or not at all: under another name, which is then renamed.

The other name is new and random: a symbolic link under a name that can be guessed would let whoever may write in the folder choose the file that is
written over.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

#: What to do about errors of the system that are no fault of the file.
_REMEDIES = {
    errno.EMFILE: "this process may open no more files: raise the limit (ulimit -n), or open fewer at a time",
    errno.ENFILE: "this machine may open no more files: end other processes, or raise fs.file-max",
    errno.EACCES: "this user lacks permission: change the permissions of the file and of the folders above it, or run as another user",
    errno.EPERM: "this user lacks permission: change the permissions of the file and of the folders above it, or run as another user",
    errno.ENOMEM: "this machine lacks memory: free some, or raise the limits of this process (ulimit -v, vm.max_map_count)",
    errno.ENOSPC: "the disk is full: make room",
    errno.EDQUOT: "the quota of this user is used up: make room",
}


def what_to_do(error: BaseException, otherwise: str) -> str:
    """Advice on an error of the system, or of memory that ran out: what the machine lacks, or else ``otherwise``."""
    code = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    return _REMEDIES.get(code or 0, otherwise)


def where_to_write(error: OSError, otherwise: str) -> str:
    """Advice on an error of the system while something was written: what the machine lacks, and ``otherwise``, which helps without permission."""
    remedy = "" if isinstance(error, PermissionError) else what_to_do(error, "")
    return f"{remedy}, or {otherwise}" if remedy else otherwise


def check_output(path: Path) -> None:
    """Raise ValueError unless :func:`write_whole` can be expected to write ``path``."""
    folder = _target(path).parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise ValueError(f"the directory {folder} does not exist; make it, or choose another")
    if path.is_dir():
        raise ValueError(f"{path} is a directory; give the name of a file")
    try:
        found = _stat(path)
        if found is not None and (stat.S_ISSOCK(found.st_mode) or not os.access(path, os.W_OK)):
            raise ValueError(
                f"{path} cannot be written ({'a socket' if stat.S_ISSOCK(found.st_mode) else 'no permission'}); choose another"
            )
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}); choose another") from None
    if is_replaced(path):
        try:
            # Permissions say too little: of root, of file systems mounted to be read.
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ValueError(f"the directory {folder} cannot be written ({error.strerror}); choose another") from None


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call ``write`` with a binary file that becomes ``path`` only once it is complete.

    A symbolic link stays, and what it leads to is written. What is no regular file, such as a device or a pipe, cannot be replaced and is
    written as the bytes come.

    Raises:
        OSError: it cannot be written; a regular file is then as it was.
    """
    try:
        if is_replaced(path):
            replace_file(_target(path), write)
        else:
            with _open_in_place(path) as file:
                write(file)
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror or error})") from error


def is_replaced(path: Path) -> bool:
    """Whether ``path``, behind links, is absent or a regular file that has this name."""
    found = _stat(path)
    if found is None:
        return True
    # A link of /proc, such as /dev/stdout, may lead to a file that has another name by now, or none.
    there = _stat(_target(path))
    return (
        stat.S_ISREG(found.st_mode)
        and there is not None
        and os.path.samestat(found, there)
        and _standard_stream(found) is None
    )


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call ``write`` with a new binary file that then takes the place of ``path``, also of a symbolic link there, and keeps the mode of a file there.

    Raises:
        OSError: it cannot be written; nothing has changed then, and nothing is left beside it.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        mode = None
    else:
        mode = None if stat.S_ISLNK(found.st_mode) else stat.S_IMODE(found.st_mode)
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}")
    # Others may never read more of it than they will be able to.
    descriptor = os.open(
        temporary,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
        0o666 if mode is None else mode & 0o777,
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _open_in_place(path: Path) -> BinaryIO:
    descriptor = _standard_stream(os.stat(path))
    # Opened anew, a file that is also stdout would be written at two places at once.
    return path.open("wb") if descriptor is None else os.fdopen(os.dup(descriptor), "wb")


def _standard_stream(found: os.stat_result) -> int | None:
    """The descriptor of stdout or stderr, if one of them is this file."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(found, os.fstat(descriptor)):
                return descriptor
    return None


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
