"""Folders that files of predictions are written to, on a disk or at an address, such as ``s3://bucket/predictions``.

A file has a temporary name until it is complete and every rank has written its own. Readers of folders of Parquet files skip the temporary name, because it
begins with a dot.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from salientpp.addresses import PIECE, WITHOUT_FOLDERS, is_address, local_path, open_place, reason_of, without_password
from salientpp.files import where_to_write

#: Object stores copy objects up to 5 GB by themselves. The bytes of larger ones pass through this process.
_MOST_COPIED = 2**32


def folder_at(out: str | os.PathLike[str]) -> Folder:
    """Returns the folder of a path or an address. Nothing is created yet.

    Raises:
        ImportError: the package that reaches the address is missing.
        ValueError: no package knows the address.
    """
    is_local = not is_address(out) or str(out).lower().startswith("file://")
    return LocalFolder(local_path(out)) if is_local else RemoteFolder(str(out))


class Folder(ABC):
    """Folder whose files appear completely or not at all. ``name`` is its path or address, for errors."""

    name: str

    @abstractmethod
    def prepare(self) -> None:
        """Creates the folder unless it exists, and writes and deletes an empty file. Raises ValueError if that fails."""

    @abstractmethod
    def file_names(self) -> list[str]:
        """Returns the names of the files in the folder, in any order. ValueError if it cannot be read."""

    @abstractmethod
    def _open(self, temporary: str) -> BinaryIO: ...

    @abstractmethod
    def _rename(self, temporary: str, name: str) -> None: ...

    @abstractmethod
    def _delete(self, temporary: str) -> None: ...

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[BinaryIO]:
        """Yields a new binary file, which replaces the file ``name`` when the ``with`` block ends.

        If the block raises, the new file is removed. The caller writes to the file first and ends the block when every rank has written.

        Raises:
            OSError: the file cannot be written. A file of this name is then unchanged.
        """
        temporary = f".{name[:40]}.{secrets.token_hex(4)}"
        with self.naming(name):
            file = self._open(temporary)
        try:
            yield file
            with self.naming(name):
                file.close()
                self._rename(temporary, name)
        except BaseException:
            for clean_up in file.close, partial(self._delete, temporary):
                with contextlib.suppress(Exception):
                    clean_up()
            raise

    @contextlib.contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Wraps an access to a file, so that an error of the operating system or of the object store has the file's name and advice."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            advice = where_to_write(error, "choose another place")
            raise OSError(f"{self.name}/{name} cannot be written ({reason}); {advice}") from error


class LocalFolder(Folder):
    """Folder on a disk."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)

    def prepare(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"the folder {self.name} cannot be created ({error.strerror}); choose another") from None
        try:
            # Permission bits are not enough: root ignores them, and a file system may be mounted read-only.
            probe = f".{secrets.token_hex(4)}"
            self._open(probe).close()
            self._delete(probe)
        except OSError as error:
            raise ValueError(f"the folder {self.name} cannot be written ({error.strerror}); choose another") from None

    def file_names(self) -> list[str]:
        try:
            return [path.name for path in self.path.iterdir()]
        except OSError as error:
            raise ValueError(f"the folder {self.name} cannot be read ({error.strerror}); choose another") from None

    def _open(self, temporary: str) -> BinaryIO:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self.path / temporary, flags, 0o666), "wb")

    def _rename(self, temporary: str, name: str) -> None:
        os.replace(self.path / temporary, self.path / name)

    def _delete(self, temporary: str) -> None:
        os.unlink(self.path / temporary)


class RemoteFolder(Folder):
    """Folder at an address that pyarrow or fsspec reaches."""

    def __init__(self, address: str) -> None:
        self.name = without_password(address).rstrip("/")
        try:
            place = open_place(address, Path(), "out")
        except Exception as error:  # every package has its own errors
            if type(error) is ValueError or isinstance(error, (ImportError, MemoryError)):
                raise
            raise ValueError(
                f"out: {self.name} cannot be opened ({reason_of(error)}); check the address, the network and the credentials"
            ) from error
        self._files, self._path = place.system, place.path.rstrip("/")
        if not self._path.strip("/"):
            raise ValueError(f"out: {without_password(address)} must name a folder, such as s3://bucket/folder")

    def prepare(self) -> None:
        probe = f".{secrets.token_hex(4)}"
        try:
            if self._files.type_name not in WITHOUT_FOLDERS:
                self._files.create_dir(self._path, recursive=True)
            with self._files.open_output_stream(self._at(probe)):
                pass
        except Exception as error:  # every package has its own errors
            raise ValueError(
                f"{self.name} cannot be written ({reason_of(error)}); check the address and the credentials, or choose another"
            ) from error
        with contextlib.suppress(Exception):  # some accounts may write and not delete
            self._delete(probe)

    def file_names(self) -> list[str]:
        from pyarrow import fs

        try:
            found = self._files.get_file_info(fs.FileSelector(self._path, allow_not_found=True))
        except Exception as error:
            raise ValueError(f"{self.name} cannot be read ({reason_of(error)}); choose another") from error
        return [each.base_name for each in found]

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _open(self, temporary: str) -> BinaryIO:
        return self._files.open_output_stream(self._at(temporary))

    def _rename(self, temporary: str, name: str) -> None:
        source, target = self._at(temporary), self._at(name)
        is_large = self._files.type_name == "s3" and self._files.get_file_info(source).size > _MOST_COPIED
        if not is_large:
            self._files.move(source, target)
            return
        with self._files.open_input_stream(source) as old:
            try:
                with self._files.open_output_stream(target) as new:
                    while chunk := old.read(PIECE):
                        new.write(chunk)
            except BaseException:
                # The stream was closed, so that a part of the file has the final name.
                with contextlib.suppress(Exception):
                    self._delete(name)
                raise
        self._delete(temporary)

    def _delete(self, temporary: str) -> None:
        self._files.delete_file(self._at(temporary))

    @contextlib.contextmanager
    def naming(self, name: str) -> Iterator[None]:
        with super().naming(name):
            try:
                yield
            except (OSError, MemoryError):
                raise
            except Exception as error:  # every package has its own errors
                raise OSError(reason_of(error)) from error
