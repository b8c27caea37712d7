"""Opens the file systems of addresses such as ``s3://bucket/folder``, and puts their errors into words without secrets.

pyarrow reads local files, S3, Google Cloud Storage, Azure and HDFS itself. Other schemes need fsspec and the package that fsspec asks for. Both packages are
imported only when an address is opened.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn
from urllib.parse import unquote

from salientpp.files import first_line, what_to_do
from salientpp.suggestions import did_you_mean

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

#: Bytes that are read or written at once.
PIECE = 16 * 2**20

#: Types of file systems of pyarrow that have no folders, only names with slashes.
WITHOUT_FOLDERS = ("s3", "gcs")

#: Schemes that pyarrow reads itself.
_OF_PYARROW = {"file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs"}

#: User and password of an address without its scheme. Passwords with a slash or a question mark must be quoted; those that are not are hidden nevertheless.
_SECRET = re.compile(r"^(?:[^/?]*@|[^/?@:]*:(?!\d*(?:[/?]|$))[^@]*@)")


def is_address(place: object) -> bool:
    """Returns True for a text with a scheme, such as ``s3://bucket/folder``. A path object is always a path."""
    return isinstance(place, str) and re.match(r"[A-Za-z][\w+.-]*://", place) is not None


def is_remote(place: object) -> bool:
    """Returns True for an address, except ``file://`` and the addresses of storage hosts."""
    return is_address(place) and str(place).partition("://")[0].lower() not in ("file", "salientpp")


def local_path(address: str | os.PathLike[str]) -> Path:
    """Returns the path of a path or of ``file:///path``."""
    scheme, separator, rest = os.fspath(address).partition("://")
    if separator and scheme.lower() == "file":
        return Path(unquote("/" + rest.partition("/")[2]))
    return Path(address)


@dataclass(frozen=True)
class Place:
    """A file system, and a path or pattern in it.

    Attributes:
        shown: what stands before the path in errors.
        base: folder from which errors name the files. Empty: errors name whole paths.
    """

    system: FileSystem
    path: str
    shown: str
    base: str = ""

    def name(self, path: str | None = None) -> str:
        """Returns the name of a file or folder of the file system in errors, without passwords. None: the name of the place itself."""
        path = self.path if path is None else path
        if not self.shown and "://" not in path:
            return os.path.relpath(path, self.base) if self.base else path
        return without_password(f"{self.shown}{path.lstrip('/') if self.shown else path}")


def open_place(address: str, base: Path, what: str) -> Place:
    """Opens the file system of an address. ``base`` is the folder that a path is relative to; ``what`` stands before errors.

    Raises:
        OSError: the file system cannot be reached.
        ImportError: a package is missing.
        ValueError: the scheme is unknown, or the address cannot be read.
    """
    try:
        from pyarrow import fs
    except ImportError as error:
        raise ImportError(
            f'{what}: {without_password(address)} needs the "pyarrow" package, which is not installed: pip install salientpp[tables]'
        ) from error
    scheme, separator, rest = address.partition("://")
    if not separator:
        is_relative = not os.path.isabs(address)
        path = os.path.abspath(base / address)
        return Place(fs.LocalFileSystem(), path, "", os.path.abspath(base) if is_relative else "")
    scheme = scheme.lower()
    if scheme == "file":
        return Place(fs.LocalFileSystem(), os.path.abspath(local_path(address)), "")
    if scheme not in _OF_PYARROW:
        return _fsspec_place(f"{scheme}://{rest}", scheme, what)
    rest, _, query = rest.partition("?")
    host, _, path = rest.partition("/")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if scheme == "s3" and region and "region=" not in query:  # else pyarrow asks for the region over the network
        query = "&".join(filter(None, (query, f"region={region}")))
    try:
        # Not the whole address, in whose path pyarrow would replace %20, and not allow spaces.
        system, root = fs.FileSystem.from_uri(f"{scheme}://{host}/?{query}" if query else f"{scheme}://{host}/")
    except ValueError as error:  # of pyarrow
        raise ValueError(f"{what}: {without_password(address)} is not an address ({reason_of(error)})") from error
    inside = root if root.endswith("/") or not root else f"{root}/"  # a bucket, or the slash of HDFS
    shown = f"{scheme}://" if inside.strip("/") else f"{scheme}://{host.rpartition('@')[2]}/"
    path = f"{inside}{path}"
    return Place(system, path.rstrip("/") or path, shown)


def _fsspec_place(address: str, scheme: str, what: str) -> Place:
    from pyarrow import fs

    try:
        import fsspec
    except ImportError as error:
        raise ImportError(
            f'{what}: {without_password(address)} needs the "fsspec" package, which is not installed: pip install salientpp[tables]'
        ) from error
    try:
        system, path = fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise ImportError(f"{what}: {without_password(address)}: {reason_of(error)}") from error
    except ValueError as error:
        known = sorted({*_OF_PYARROW, *fsspec.available_protocols()})
        if scheme in known:
            raise ValueError(f"{what}: {without_password(address)} is not an address ({reason_of(error)})") from error
        meant = (
            did_you_mean(scheme, known) or f"; write {', '.join(sorted(_OF_PYARROW))} or another one that fsspec knows"
        )
        raise ValueError(f"{what}: {without_password(address)} has the unknown scheme {scheme}://{meant}") from error
    system.invalidate_cache()  # one object serves the whole process and may keep listings, but each call shall see the files as they are
    if scheme not in ("http", "https"):
        return Place(fs.PyFileSystem(fs.FSSpecHandler(system)), path, f"{scheme}://")

    class WebFiles(fs.FSSpecHandler):
        """Reads a stream in one request, because some web servers send files only from their beginning."""

        def open_input_stream(self, path: str) -> Any:
            from pyarrow import PythonFile

            return PythonFile(self.fs.open(path, block_size=0), mode="r")

    return Place(fs.PyFileSystem(WebFiles(system)), path, "")


@contextlib.contextmanager
def opening(what: str, address: str) -> Iterator[None]:
    """Wraps the opening of an address, so that errors name it. An address that cannot be understood is a ValueError, others as in :func:`raise_in_words`."""
    try:
        yield
    except UnicodeError as error:
        raise ValueError(
            f"{what}: {without_password(address)}, or a name in its folder, is not UTF-8 ({reason_of(error)}); rename it"
        ) from error
    except Exception as error:  # packages of file systems have many types of errors
        if type(error) is ValueError or isinstance(error, (ImportError, MemoryError)):  # pyarrow's are of other types
            raise
        raise_in_words(what, without_password(address), error)


@contextlib.contextmanager
def in_words(what: str, address: str, *, writes: bool = False) -> Iterator[None]:
    """Wraps the reading or writing of a file, so that each error becomes that of :func:`raise_in_words`. Packages have many types of errors."""
    try:
        yield
    except (MemoryError, ImportError):
        raise
    except Exception as error:
        raise_in_words(what, address, error, writes=writes)


def copy_bytes(
    system: Any,
    path: str,
    target: BinaryIO,
    begin: int,
    what: str,
    shown: str,
    reach: Callable[[int], None] | None = None,
) -> None:
    """Writes the bytes of a file from number ``begin`` on to ``target``. ``reach`` is told how many bytes of the file were written so far.

    Raises:
        OSError: the file cannot be read; ``what`` and ``shown`` name it in the error, which has no number. Errors of ``target`` pass as they are.
    """
    with in_words(what, shown):
        source = _opened_at(system, path, begin)
    with source:
        while True:
            with in_words(what, shown):
                piece = source.read(PIECE)
            if not piece:
                return
            target.write(piece)
            begin += len(piece)
            if reach is not None:
                reach(begin)


def _opened_at(system: Any, path: str, begin: int) -> Any:
    """Opens a file, of which the bytes from number ``begin`` on are read in order."""
    if begin:
        source = system.open_input_file(path)
        try:
            source.seek(begin)
            source.read(1)
            source.seek(begin)
            return source
        except Exception:
            source.close()
            if "://" not in path:  # not of a web server, which may send files only from their beginning
                raise
    source = system.open_input_stream(path, compression=None)
    while begin and (piece := source.read(min(begin, PIECE))):
        begin -= len(piece)
    return source


def raise_in_words(what: str, address: str, error: BaseException, *, writes: bool = False) -> NoReturn:
    """Raises the OSError for a file that could not be read or, if ``writes``, written.

    Its type and text say if the file is missing or forbidden, or if the connection broke.
    """
    reason, verb = reason_of(error), "write" if writes else "read"
    if getattr(error, "is_in_words", False):
        raise error
    if isinstance(error, FileNotFoundError):
        raise worded(FileNotFoundError, f"{what}: {address}: no such file ({reason})") from error
    if isinstance(error, PermissionError) or re.search(
        r"ACCESS_DENIED|AccessDenied|HTTP (status )?403|\b403\b", reason
    ):
        text = f"{what}: no permission to {verb} {address} ({reason}); check the credentials, and what they may {verb}"
        raise worded(PermissionError, text) from error
    advice = what_to_do(error, "check the connection and the address, and run the same command again")
    raise worded(
        OSError, f"{what}: {address} cannot be {'written' if writes else 'read'} ({reason}); {advice}"
    ) from error


def reason_of(error: BaseException) -> str:
    """Returns the first line of an error's text without the passwords of addresses."""
    text = getattr(error, "strerror", None) or first_line(error)
    return re.sub(r"\w[\w+.-]*://[^\s'\")]+", lambda found: without_password(found[0]), text)


def worded(kind: type[OSError], text: str) -> OSError:
    """Returns an error that :func:`raise_in_words` raises again as it is."""
    error: Any = kind(text)
    error.is_in_words = True
    return error


def without_passwords(text: str) -> str:
    """Returns a text, such as the name of a source, whose addresses end at commas, without what :func:`without_password` leaves out of each."""
    return re.sub(r"[A-Za-z][\w+.-]*://[^,]*", lambda found: without_password(found[0]), text)


def without_password(address: str) -> str:
    """Returns an address without user, password and query, which may hold secrets."""
    scheme, separator, rest = address.partition("://")
    return f"{scheme}://{_SECRET.sub('', rest).partition('?')[0]}" if separator else address
