"""Dataset directories that are copied: a directory of this host, or one at an address such as ``s3://bucket/graph``."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from salientpp.addresses import PIECE, copy_bytes, in_words, is_remote, local_path, open_place, opening
from salientpp.store.directory.files import DatasetError, quick_checksum_of, sha256_of_file, verify_file
from salientpp.store.directory.kinds import MANIFEST
from salientpp.store.directory.manifest import parse_manifest, read_manifest

#: What stands before errors of file systems.
WHAT = "dataset directory"


class CopySource(ABC):
    """A dataset directory to copy.

    Attributes:
        name: its path, or its address without passwords, for errors.
        last: last part of the path, which is the name of a copy.
        advice: what else to do if a disk lacks room for a copy.
    """

    name: str
    last: str
    advice: str

    @abstractmethod
    def manifest(self) -> tuple[dict[str, Any], str]:
        """Returns the checked manifest and its text. Raises DatasetError if it is missing or wrong, and OSError if it cannot be read."""

    @abstractmethod
    def read(self, name: str, target: BinaryIO, begin: int) -> None:
        """Writes the bytes of a file from number ``begin`` on to ``target``. DatasetError if it is missing, OSError if it cannot be read."""

    @abstractmethod
    def check(self, name: str, entry: Mapping[str, Any]) -> None:
        """Reads a whole file. Raises DatasetError if it does not match its entry of the manifest."""


class LocalDirectory(CopySource):
    """A directory of this host."""

    def __init__(self, root: Path) -> None:
        self.root, self.name, self.last = root, str(root), root.resolve().name
        self.advice = f"use {root} directly"

    def manifest(self) -> tuple[dict[str, Any], str]:
        return read_manifest(self.root), (self.root / MANIFEST).read_text()

    def read(self, name: str, target: BinaryIO, begin: int) -> None:
        try:
            source = (self.root / name).open("rb")
        except FileNotFoundError:
            raise DatasetError(f"{self.root / name} is missing; copy the directory again, or partition again") from None
        with source:
            source.seek(begin)
            shutil.copyfileobj(source, target, PIECE)

    def check(self, name: str, entry: Mapping[str, Any]) -> None:
        verify_file(self.root, name, entry, full=True)


class RemoteDirectory(CopySource):
    """A directory at an address that pyarrow or fsspec reaches.

    Raises:
        ImportError: a package is missing.
        OSError: the file system cannot be reached.
        ValueError: the address is wrong.
    """

    def __init__(self, address: str) -> None:
        with opening(WHAT, address):
            place = open_place(address, Path(), WHAT)
        self.system, self._place = place.system, place
        self._path, self.name = place.path.rstrip("/"), place.name().rstrip("/")
        self.last, self.advice = (
            PurePosixPath(self._path).name,
            "set TMPDIR to a folder of a larger disk for salientpp.load",
        )
        if self.last in ("", ".."):
            raise ValueError(f"{self.name} must name a folder, such as s3://bucket/graph")

    def path_of(self, name: str) -> str:
        """Returns the path of a file of the directory in its file system."""
        return f"{self._path}/{name}"

    def sizes(self) -> dict[str, int]:
        """Returns the names of the files below the directory, with their bytes. OSError if they cannot be listed."""
        from pyarrow import fs

        with in_words(WHAT, self.name):
            found = self.system.get_file_info(fs.FileSelector(self._path, allow_not_found=True, recursive=True))
        return {info.path[len(self._path) :].lstrip("/"): info.size for info in found if info.is_file}

    def text(self, name: str) -> str | None:
        """Returns the text of a file, or None if it does not exist."""
        try:
            with (
                in_words(WHAT, f"{self.name}/{name}"),
                self.system.open_input_stream(self.path_of(name), compression=None) as file,
            ):
                return file.read().decode()
        except FileNotFoundError:
            return None

    def manifest(self) -> tuple[dict[str, Any], str]:
        text = self.text(MANIFEST)
        if text is None:
            raise DatasetError(
                f"{self.name} is not a dataset directory: it has no {MANIFEST}; check the address, or copy a directory there with "
                "`salientpp copy-to-disk DIR --to ADDRESS`"
            )
        return parse_manifest(text, self.name), text

    def read(self, name: str, target: BinaryIO, begin: int) -> None:
        shown = f"{self.name}/{name}"
        try:
            copy_bytes(self.system, self.path_of(name), target, begin, WHAT, shown)
        except FileNotFoundError:
            raise DatasetError(f"{shown} is missing; copy the directory there again") from None

    def is_whole(self, name: str, entry: Mapping[str, Any], size: int | None, full: bool) -> bool:
        """Returns True if a file of ``size`` bytes matches its entry of the manifest: by size and sampled checksum or, if ``full``, in every byte."""
        if size is None or size != entry["bytes"]:
            return False
        with in_words(WHAT, f"{self.name}/{name}"), self.system.open_input_file(self.path_of(name)) as file:
            if full:
                return sha256_of_file(file) == entry["sha256"]
            return quick_checksum_of(file, size) == entry["quick"]

    def check(self, name: str, entry: Mapping[str, Any]) -> None:
        if not self.is_whole(name, entry, self.sizes().get(name), full=True):
            raise DatasetError(
                f"{self.name}/{name} was altered: it does not match the manifest; if another directory was copied there meanwhile, run the same command "
                "again, else copy the directory there again"
            )


def copy_source_of(root: str | os.PathLike[str]) -> CopySource:
    """Returns the directory at a path or an address. Nothing is read yet."""
    return RemoteDirectory(str(root)) if is_remote(root) else LocalDirectory(local_path(root))
