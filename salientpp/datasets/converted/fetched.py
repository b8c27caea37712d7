"""Fetches the files of a source that lie at addresses, such as ``s3://bucket/edges-*.npy``, for readers that map files or read them in any order.

A file gets the name of its version: of its address, size, time and etag. So a stopped run goes on with the same bytes, and a file that has changed is fetched
again. So is a file of a web server that tells neither time nor etag. Links with the names of the addresses lead to the files, for the readers and for errors.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from salientpp.addresses import copy_bytes, is_remote, without_password
from salientpp.datasets.converted.named_files import FILES, ON_THIS_HOST, Finder, check_kinds
from salientpp.datasets.tabular.addresses import TableFile, find_files_below, find_table_files
from salientpp.datasets.tabular.steps import DONE, staged_beside, working_folder
from salientpp.progress import Progress
from salientpp.store.directory.files import sha256_of
from salientpp.store.directory.journal import says_what_to_do, to_disk


def names_addresses(source: object) -> bool:
    """Returns True if the name of a source has an address, such as ``npy:s3://bucket/graph``."""
    return isinstance(source, str) and "://" in source


@contextlib.contextmanager
def finder_for(source: str, root: Path, progress: Progress) -> Iterator[Finder]:
    """Yields what finds the files of a source for a ``with`` block that converts it to ``root``.

    Files at addresses are fetched to a working folder beside ``root``. It is removed at the end; if the block raises, it stays, and the next call goes on.
    """
    if not names_addresses(source):
        yield ON_THIS_HOST
        return
    work = staged_beside(root)
    with working_folder(work, root):
        yield FetchingFinder(work / "fetched", progress)


class FetchingFinder(Finder):
    """Finds files on this host and at addresses. Those at addresses are fetched to the folder ``work``, which is made when the first one is."""

    def __init__(self, work: Path, progress: Progress) -> None:
        self._work, self._progress = work, progress
        self._files, self._links = work / "files", work / "links"
        self.versions: list[tuple[str, int, int | None, str | None]] = []
        shutil.rmtree(self._links, ignore_errors=True)

    def files(self, name: str, pattern: str) -> list[Path]:
        """Returns the files that match an address or a pattern. Raises the errors of :func:`find_table_files` for addresses."""
        if not is_remote(pattern):
            return super().files(name, pattern)
        found = find_table_files(pattern, Path(), name, FILES)
        check_kinds(name, without_password(pattern), [self._link_of(name, file.address) for file in found])
        return self._fetch(name, pattern, found)

    def path(self, name: str, place: str) -> Path:
        """Returns the path of a file or folder. All files below a folder at an address are fetched."""
        if not is_remote(place):
            return super().path(name, place)
        shown, found = find_files_below(place, name)
        self._fetch(name, place, found)
        return self._link_of(name, shown.rstrip("/"))

    def _fetch(self, name: str, given: str, files: Sequence[TableFile]) -> list[Path]:
        """Fetches the files that the address ``given`` names, unless that is done. Returns links to them."""
        wanted = [(file, self._file_of(given, file)) for file in files]
        for file, path in wanted:
            if file.size is None:
                raise ValueError(
                    f"{name}: the web server does not tell the size of {file.address}; download it, and name the file"
                )
            if not _tells_version(file):  # files of a stopped run may be of another version
                for old in path, _begun(path):
                    old.unlink(missing_ok=True)
        need = sum(file.size - _bytes_of(path) - _bytes_of(_begun(path)) for file, path in wanted)
        with says_what_to_do(self._files):
            self._files.mkdir(parents=True, exist_ok=True)
            (self._work / DONE).touch()  # so that the files stay if the run is stopped
            free = shutil.disk_usage(self._files).free
        if need > free:
            raise ValueError(
                f"{name}: its files at addresses need {need / 1e6:,.1f} MB more on the disk of {self._files}, which has only {free / 1e6:,.1f} MB left; "
                "make room, or write to a directory of another disk"
            )
        links = []
        for file, path in wanted:
            if _bytes_of(path) != file.size or not path.exists():
                self._fetch_file(name, file, path)
            links.append(self._link_of(name, file.address))
            self._link(name, links[-1], path)
            etag = file.etag if _tells_version(file) else sha256_of(path)
            self.versions.append((file.address, file.size, file.modified, etag))
        return links

    def _file_of(self, given: str, file: TableFile) -> Path:
        # The path of a file may lack the host.
        version = json.dumps([file.size, file.modified, file.etag])
        return self._files / _digest(f"{without_password(given)}\n{file.path}") / _digest(version)

    def _fetch_file(self, name: str, file: TableFile, path: Path) -> None:
        """Fetches a file, or the rest of it, to ``path``. Other versions of the file are removed."""
        self._progress.begin(f"fetching {file.address}", file.size, "bytes")
        begun = _begun(path)
        with says_what_to_do(path):
            path.parent.mkdir(exist_ok=True)
            for other in set(path.parent.iterdir()) - {begun}:
                other.unlink()
        try:
            with begun.open("ab") as target:
                copy_bytes(file.system, file.path, target, target.tell(), name, file.address, self._progress.reach)
        except OSError as error:
            if error.errno is None:  # of the file system; it names the address
                raise
            with says_what_to_do(begun):
                raise
        try:
            file.check_unchanged(name)
        except ValueError:
            begun.unlink()
            raise
        if _bytes_of(begun) != file.size:
            got = _bytes_of(begun)
            begun.unlink()
            raise OSError(
                f"{name}: {file.address} ended after {got} of {file.size} bytes; check the connection, and run the same command again"
            )
        with says_what_to_do(path):
            # The version says if the file has changed, so the time of the copy must not.
            os.utime(begun, ns=(file.modified or 0, file.modified or 0))
            to_disk(begun)
            os.replace(begun, path)

    def _link_of(self, name: str, address: str) -> Path:
        scheme, _, rest = address.partition("://")
        parts = rest.split("/")
        if {"", ".", ".."} & set(parts):
            raise ValueError(f"{name}: {address} has an empty name or dots in its path; rename the file or folder")
        return self._links.joinpath(scheme, *parts)

    def _link(self, name: str, link: Path, path: Path) -> None:
        if os.path.lexists(link):
            if os.readlink(link) == str(path.absolute()):
                return
            raise ValueError(
                f"{name}: two of its addresses differ only in what follows the question mark; rename a file"
            )
        with says_what_to_do(link):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.absolute())


def _tells_version(file: TableFile) -> bool:
    return file.modified is not None or file.etag is not None


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def _begun(path: Path) -> Path:
    """Returns the path of a file that is not whole yet."""
    return path.with_name(f"{path.name}.part")


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
