"""Writes a file completely or not at all: it gets a temporary name first, and is renamed when it is complete.

The temporary name is new and random. Another user who may write in the folder could otherwise guess it and put a symbolic link there. The link would
then choose which file is overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import os
import reprlib
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:  # help of the command appears at once only without numpy
    import numpy as np

#: Error number of the operating system -> remedy, for errors that the file itself does not cause.
_REMEDIES = {
    errno.EMFILE: "this process may open no more files: raise the limit (ulimit -n), or open fewer at a time",
    errno.ENFILE: "this machine may open no more files: end other processes, or raise fs.file-max",
    errno.EACCES: "this user lacks permission: change the permissions of the file and of the folders above it, or run as another user",
    errno.EPERM: "this user lacks permission: change the permissions of the file and of the folders above it, or run as another user",
    errno.ENOMEM: "this machine lacks memory: free some, or raise the limits of this process (ulimit -v, vm.max_map_count)",
    errno.ENOSPC: "the disk is full: make room",
    errno.ENAMETOOLONG: "the name is too long: choose one of at most 255 bytes, in a path of at most 4,095",
    errno.EDQUOT: "the quota of this user is used up: make room",
}


def first_line(error: BaseException) -> str:
    """Returns the first line of another library's error message, to quote in an error. If the message is empty, returns the error's type."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def what_to_do(error: BaseException, otherwise: str) -> str:
    """Returns advice for the text of an error: a remedy if the machine lacks something, such as memory or disk space, or else ``otherwise``."""
    code = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    return _REMEDIES.get(code or 0, otherwise)


def where_to_write(error: OSError, otherwise: str) -> str:
    """Returns advice on a system error while writing: a remedy for what the machine lacks, if known, then ``otherwise``.

    If permission is missing, returns only ``otherwise``.
    """
    remedy = "" if isinstance(error, PermissionError) else what_to_do(error, "")
    return f"{remedy}, or {otherwise}" if remedy else otherwise


@contextlib.contextmanager
def says_where_to_write(root: Path, otherwise: str) -> Iterator[None]:
    """Turns system errors in a ``with`` block into errors of the same type that name ``root`` and give the advice of :func:`where_to_write`."""
    try:
        yield
    except OSError as error:
        raise type(error)(
            error.errno, f"{root} cannot be written ({error.strerror}); {where_to_write(error, otherwise)}"
        ) from None


def check_output(path: Path) -> None:
    """Raises ValueError if ``path`` cannot be written, as far as that is known in advance. Call it before long work whose result goes there."""
    try:
        folder = _target(path).parent if path.is_symlink() else path.parent
        if not folder.is_dir():
            raise ValueError(f"the directory {folder} does not exist; create it, or choose another")
        if path.is_dir():
            raise ValueError(f"{path} is a directory; give the name of a file")
        found = _stat(path)
        if found is not None and (stat.S_ISSOCK(found.st_mode) or not os.access(path, os.W_OK)):
            raise ValueError(
                f"{path} cannot be written ({'a socket' if stat.S_ISSOCK(found.st_mode) else 'no permission'}); choose another"
            )
    except OSError as error:
        raise ValueError(
            f"{reprlib.repr(str(path))} cannot be written ({error.strerror}); {what_to_do(error, 'choose another')}"
        ) from None
    if is_replaced(path):
        try:
            # Permission bits are not enough: root ignores them, and a file system may be mounted read-only.
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ValueError(f"the directory {folder} cannot be written ({error.strerror}); choose another") from None


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls ``write`` with a binary file that becomes ``path`` only once it is complete.

    A symbolic link stays, and its target is written. A path that is not a regular file, such as a device or a pipe, cannot be replaced, and is written
    directly.

    Raises:
        OSError: the file cannot be written. A regular file then stays unchanged.
    """
    with written_whole(path, write):
        pass


@contextlib.contextmanager
def written_whole(path: Path, write: Callable[[BinaryIO], object]) -> Iterator[None]:
    """Writes ``path`` as :func:`write_whole` does, but replaces it only at the end of a ``with`` block. If the block raises, a regular file is unchanged."""
    with contextlib.ExitStack() as stack:
        temporary = None
        with _naming(path):
            if is_replaced(path):
                temporary = stack.enter_context(_written_beside(_target(path), write))
            else:
                with _open_in_place(path) as file:
                    write(file)
        yield
        if temporary is not None:
            with _naming(path):
                os.replace(temporary, _target(path))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"{path} cannot be written ({reason}); {where_to_write(error, 'choose another place')}"
        ) from error


def is_replaced(path: Path) -> bool:
    """True if :func:`write_whole` replaces ``path``. It does if ``path`` does not exist, or is a regular file that is neither stdout nor stderr.

    False for a link that leads to a deleted or renamed file.
    """
    found = _stat(path)
    if found is None:
        return True
    # A link in /proc, such as /dev/stdout, may lead to a file that was renamed or deleted.
    there = _stat(_target(path))
    return (
        stat.S_ISREG(found.st_mode)
        and there is not None
        and os.path.samestat(found, there)
        and _standard_stream(found) is None
    )


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls ``write`` with a new binary file that then replaces ``path``, even if ``path`` is a symbolic link. The mode of an existing file is kept.

    Raises:
        OSError: the file cannot be written. Then nothing has changed, and no temporary file is left.
    """
    with _written_beside(path, write) as temporary:
        os.replace(temporary, path)


@contextlib.contextmanager
def _written_beside(path: Path, write: Callable[[BinaryIO], object]) -> Iterator[Path]:
    """Writes a new file in the folder of ``path``, with the mode of ``path``. The block renames it; if it raises, the file is removed."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        mode = None
    else:
        mode = None if stat.S_ISLNK(found.st_mode) else stat.S_IMODE(found.st_mode)
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}")
    # Created with the final mode, so that no user can read more of the temporary file than of the final one.
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
        yield temporary
    except BaseException:
        os.unlink(temporary)
        raise


def save_array(file: BinaryIO, array: np.ndarray) -> None:
    """Writes an array in the format of :func:`numpy.save`. Unlike there, an error has the operating system's error number."""
    import numpy as np

    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    is_transposed = array.flags.f_contiguous and not array.flags.c_contiguous
    file.write((array.T if is_transposed else array).ravel().view(np.uint8).data)


def _open_in_place(path: Path) -> BinaryIO:
    descriptor = _standard_stream(os.stat(path))
    # If the file is also stdout, opening it again would give a second write position.
    return path.open("wb") if descriptor is None else os.fdopen(os.dup(descriptor), "wb")


def _standard_stream(found: os.stat_result) -> int | None:
    """Returns 1 if stdout is this file, 2 if stderr is, else None."""
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
