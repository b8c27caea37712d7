"""Finds the files that an address of a table names: on this machine, in an object store, or on any file system of fsspec.

An address is a path, a path with wildcards, a folder, or a URL such as ``s3://bucket/orders/*.parquet``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from salientpp.addresses import Place, in_words, open_place, opening, without_password, worded
from salientpp.datasets.converted.named_files import by_numbers
from salientpp.suggestions import did_you_mean

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

#: Letters of an address that make it a pattern. Square brackets are plain letters, because hosts of URLs have them.
_MAGIC = re.compile(r"[*?]")

#: Name of the folder in which an unnamed value is stored. Hive and Spark write it.
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class TableFile:
    """A file of a table.

    Attributes:
        address: name of the file in errors and facts, without passwords.
        system: the file system. ``path`` is the file's path in it.
        size: in bytes.
        modified: time of the last change in nanoseconds since 1970. None: the file system does not tell.
        etag: what the file system calls this version of the file. None: it has no such name.
        folders: names and values of folders ``name=value`` on the path to the file, which Hive and Spark write. None is a null.
    """

    address: str
    system: FileSystem
    path: str
    size: int
    modified: int | None
    etag: str | None
    folders: tuple[tuple[str, str | None], ...] = ()

    @property
    def is_local(self) -> bool:
        return self.system.type_name == "local"

    @property
    def identity(self) -> str:
        """Text that is equal for two addresses of one file, such as a relative path, an absolute path and a symbolic link."""
        return os.path.realpath(self.path) if self.is_local else self.address

    def now(self) -> TableFile | None:
        """Returns the file as it is now, or None if it no longer exists. Raises OSError if the file system cannot be reached."""
        handler: Any = getattr(self.system, "handler", None)
        if hasattr(handler, "fs"):
            handler.fs.invalidate_cache()  # fsspec keeps listings
        info = self.system.get_file_info(self.path)
        return _file_of(self.system, info, self.address, self.folders) if info.is_file else None

    def check_unchanged(self, what: str) -> None:
        """Raises ValueError if the file has changed since this object was made, and OSError if this cannot be found out."""
        with in_words(what, self.address):
            now = self.now()
        if now is None:
            raise ValueError(f"{what}: {self.address} was removed while it was read; run the command again")
        for name in ("size", "modified", "etag"):
            before, after = getattr(self, name), getattr(now, name)
            if before != after:
                raise ValueError(
                    f"{what}: {self.address} changed while it was read: its {name} was {before}, and is {after}; run the command again"
                )


def find_table_files(address: str, base: Path, what: str, endings: Sequence[str]) -> list[TableFile]:
    """Returns the files that an address names, ordered by the numbers in their names.

    Args:
        address: a path or a URL, of a file, of a folder or with the wildcards ``*``, ``?`` (paths only) and ``**``. A folder stands for every file below it
            whose name ends in one of ``endings`` and does not begin with a dot or an underscore.
        base: folder that a path is relative to.
        what: the table, for errors.

    Raises:
        FileNotFoundError: no such file. The error has the name of the most similar file.
        PermissionError: the credentials do not suffice.
        OSError: the file system cannot be reached.
        ImportError: a package is missing.
        ValueError: the address cannot be read, or is the folder of a Delta or Iceberg table.
    """
    with opening(what, address):
        return _files_of(open_place(address, base, what), what, endings)


def name_of(address: str) -> str:
    """Returns the last part of an address that is not a pattern and no ``name=value``, without its endings: ``orders`` of ``s3://shop/orders/*.parquet``."""
    address = re.sub(r"/metadata/[^/]*\.metadata\.json$", "", without_password(address))
    if address.startswith("iceberg:"):  # of a catalog, or a folder
        address = re.sub(r"[\w.-]*\.(?=[\w-]+$)", "", address)
    parts = [part for part in re.split(r"[/:]", address) if part]
    plain = [part for part in parts if not _MAGIC.search(part) and "=" not in part and part not in (".", "..")]
    return plain[-1].partition(".")[0] if plain else "table"


def find_files_below(address: str, what: str) -> tuple[str, list[TableFile]]:
    """Returns the name of a file or folder at an address, and the file, or all files below the folder. Names that begin with a dot are left out.

    Raises the errors of :func:`find_table_files`.
    """
    from pyarrow import fs

    with opening(what, address):
        place = open_place(address, Path(), what)
        root = place.system.get_file_info(place.path)
        if root.type == fs.FileType.NotFound:
            raise _missing(place, what)
        found = [root]
        if not root.is_file:
            found = place.system.get_file_info(fs.FileSelector(place.path, recursive=True))
        inside = len(place.path)
        kept = [info for info in found if info.is_file and not re.search(r"/\.(?!\.?/)", info.path[inside:])]
        if not kept:
            raise worded(FileNotFoundError, f"{what}: there is no file below {place.name()}")
        return place.name(), [_file_of(place.system, info, place.name(info.path), ()) for info in kept]


def _files_of(place: Place, what: str, endings: Sequence[str]) -> list[TableFile]:
    from pyarrow import fs

    root = place.system.get_file_info(place.path)
    if root.is_file:
        return [_file_of(place.system, root, place.name(root.path), ())]
    if root.type == fs.FileType.Directory:
        found = place.system.get_file_info(fs.FileSelector(place.path, recursive=True))
        _refuse_lake(place, found, place.path, what)
        infos = [info for info in found if _is_data(info, place.path, endings)]
        if not infos:
            raise worded(
                FileNotFoundError,
                f"{what}: no file below {place.name()} ends in {', '.join(endings)} (also with .gz)",
            )
    elif _is_pattern(place):
        infos = _matches(place, what, endings)
    else:
        raise _missing(place, what)
    infos.sort(key=lambda info: by_numbers(info.path))
    folder = os.path.dirname(_fixed(place.path)) if _is_pattern(place) else place.path
    return [_file_of(place.system, info, place.name(info.path), _folders(info.path, folder)) for info in infos]


def _is_pattern(place: Place) -> bool:
    """Whether the path has wildcards. Addresses of web servers have a question mark before their query."""
    return _MAGIC.search(place.path) is not None and "://" not in place.path


def _fixed(pattern: str) -> str:
    """Returns the part of a pattern before its first wildcard."""
    found = _MAGIC.search(pattern)
    return pattern[: found.start()] if found else pattern


def _matches(place: Place, what: str, endings: Sequence[str]) -> list[Any]:
    """Returns the files that match a pattern, in any order. ValueError if it also matches a folder whose files would be left out."""
    from pyarrow import fs

    folder = os.path.dirname(_fixed(place.path))
    rest = place.path[len(folder) :].lstrip("/")
    is_deep = bool(re.search(r"/|\*\*", rest))
    listed = place.system.get_file_info(fs.FileSelector(folder, allow_not_found=True, recursive=is_deep))
    _refuse_lake(place, listed, folder, what)
    pattern = re.compile(_expression(rest))
    inside = len(folder) + bool(folder) if folder != "/" else 1
    plain = ((info, info.path[inside:]) for info in listed)
    matched = [info for info, path in plain if pattern.fullmatch(path) and not _is_hidden(path)]
    found = [info for info in matched if info.is_file]
    folders = {info.path for info in matched if not info.is_file}
    below = listed if is_deep else []
    for path in () if is_deep else folders:
        below += place.system.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
    _refuse_folders(place, folders, below, {info.path for info in found}, what, endings)
    if not found:
        names = [info.base_name for info in listed]
        some = ", ".join(sorted(names)[:5]) + (" ..." if len(names) > 5 else "")
        has = f"has {some}" if names else "does not exist or is empty"
        text = f"{what}: no file matches {place.name()}; the folder {place.name(folder)} {has}"
        raise worded(FileNotFoundError, text)
    return found


def _refuse_folders(
    place: Place, folders: set[str], below: Sequence[Any], found: set[str], what: str, endings: Sequence[str]
) -> None:
    """Raises ValueError if a table's file ``below`` a folder that matches a pattern is not ``found``. Spark writes ``orders.parquet`` as a folder."""
    for info in sorted(below, key=lambda info: info.path):
        folder = next((str(above) for above in PurePosixPath(info.path).parents if str(above) in folders), None)
        if folder is not None and info.path not in found and _is_data(info, folder, endings):
            shown = place.name()
            raise ValueError(
                f"{what}: {shown} also matches the folder {place.name(folder)}, whose files, such as {place.name(info.path)}, would be left out; "
                f"write {shown}/* for the files of folders, or name folders and files one by one"
            )


def _expression(pattern: str) -> str:
    """Returns the regular expression of a pattern. ``*`` and ``?`` do not match a slash, and ``**/`` matches any number of folders."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(meanings.get(part) or re.escape(part) for part in parts)


def _missing(place: Place, what: str) -> OSError:
    """Returns the error for a file that does not exist. It names the most similar file of the folder."""
    from pyarrow import fs

    folder, _, name = place.path.rpartition("/")
    names: list[str] = []
    with contextlib.suppress(Exception):  # the suggestion is all that is lost
        listed = place.system.get_file_info(fs.FileSelector(folder or "/", allow_not_found=True)) if folder else []
        names += [info.base_name for info in listed]
    text = f"{what}: {place.name()}: no such file or folder{did_you_mean(name, names)}"
    return worded(FileNotFoundError, text)


def _refuse_lake(place: Place, listed: Sequence[Any], folder: str, what: str) -> None:
    """Raises ValueError if the files belong to a Delta or Iceberg table, some of whose files may hold deleted rows."""
    for info in listed:
        inside = info.path[len(folder) :].strip("/")
        kind = "delta" if "_delta_log" in inside.split("/") else ""
        if re.fullmatch(r"(.*/)?metadata/[^/]*\.metadata\.json", inside):
            kind = "iceberg"
        if kind:
            shown = place.name(folder)
            raise ValueError(
                f"{what}: {shown} is a table of {kind.title()}; write {kind}:{shown}, which leaves out its deleted rows"
            )


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _is_data(info: Any, root: str, endings: Sequence[str]) -> bool:
    inside = info.path[len(root) :].strip("/")
    return info.is_file and ending_of(inside) in endings and not _is_hidden(inside)


def ending_of(path: str) -> str:
    """Returns the ending of a file's name that says its format, in lower case: ``.csv`` of ``a.CSV.gz``."""
    name = path.partition("?")[0] if "://" in path else path
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    while suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


#: Endings of compressed text, which pyarrow recognises.
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")


def _folders(path: str, root: str) -> tuple[tuple[str, str | None], ...]:
    """Returns the names and values of the folders ``name=value`` below ``root``."""
    pairs = [part.partition("=") for part in os.path.dirname(path[len(root) :]).split("/")]
    return tuple(
        (unquote(name), None if value == _HIVE_NULL else unquote(value)) for name, equals, value in pairs if equals
    )


def _file_of(system: Any, info: Any, address: str, folders: tuple[tuple[str, str | None], ...]) -> TableFile:
    etag = None
    if system.type_name == "s3":
        etag = _etag_of(system, info.path)
    elif hasattr(getattr(system, "handler", None), "fs"):
        etag = _version_of(system.handler.fs, info.path)
    return TableFile(address, system, info.path, info.size, info.mtime_ns, etag, folders)


def _version_of(files: Any, path: str) -> str | None:
    """Returns what a file system of fsspec tells of a file's version. None for a web server that tells nothing, whose ``ukey`` is the same for all versions."""
    about = files.info(path)
    told = [str(about[name]) for name in ("ETag", "Content-MD5", "Digest", "Last-Modified") if about.get(name)]
    return " ".join(told) or (None if "://" in path else files.ukey(path))


def _etag_of(system: Any, path: str) -> str | None:
    with system.open_input_stream(path, compression=None) as stream:
        about = {_text(key).lower(): _text(value) for key, value in (stream.metadata() or {}).items()}
    return about.get("etag", "").strip('"') or None


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
