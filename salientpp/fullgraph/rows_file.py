"""Keeps rows of layers in a temporary file between the forward and the backward, to save memory.

Autograd keeps tensors for the backward. Within :meth:`RowsFile.storing`, large ones with a row for each vertex are written to the file, and the backward
reads them. The file has no name, so the system removes it when the process ends. Its pages count as cache of the system, which can write them to the disk.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from salientpp.ops import bytes_of

#: Least size in bytes of a tensor that is written. Smaller tensors stay in memory.
SMALLEST = 1 << 18

#: Places in the file are multiples of this number of bytes.
_PAGE = 4096


@dataclass(frozen=True, eq=False)
class _Stored:
    """Stands for a tensor that was written to the file: where its bytes are, and how to read it back."""

    begin: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class RowsFile:
    """Temporary file that holds rows of one rank's layers until the backward needs them.

    Args:
        folder: where the file is made. It should be on a local disk with room for the rows of all layers.

    Raises:
        ValueError: ``folder`` is not a folder in which files can be made.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  # open as long as this object
        except (OSError, TypeError) as error:
            raise ValueError(
                f"rows_file must be a folder in which a file can be made, got {os.fspath(folder)!r}: {error}"
            ) from error
        self._end = 0
        self._growing = threading.Lock()
        self._free: dict[int, list[int]] = {}
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[_Stored]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> RowsFile:
        return RowsFile(self.folder)

    @property
    def size(self) -> int:
        return self._end

    @contextlib.contextmanager
    def storing(self, given: Tensor, num_rows: int) -> Iterator[None]:
        """Makes autograd keep large tensors [num_rows, ...] in the file, inside the context. Views of ``given``, the caller's rows, stay in memory."""
        owned = given.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Tensor | _Stored:
            is_rows = tensor.dim() > 0 and tensor.size(0) == num_rows and tensor.layout == torch.strided
            is_rows = is_rows and not tensor.is_conj()  # its bytes do not tell that it is a conjugate
            if not is_rows or tensor.nbytes < SMALLEST or tensor.untyped_storage().data_ptr() == owned:
                return tensor
            return self._stored(tensor.detach())

        def unpack(kept: Tensor | _Stored) -> Tensor:
            return kept if isinstance(kept, Tensor) else self._read(kept)

        with saved_tensors_hooks(pack, unpack):
            yield
        self._known.clear()

    def _stored(self, tensor: Tensor) -> _Stored:
        """Writes a tensor to the file, unless the same memory was written before. Returns where it is stored."""
        storage = tensor.untyped_storage()
        key = (
            storage.data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )
        known = self._known.get(key)
        if known is not None and not known[0].expired() and (stored := known[1]()) is not None:
            return stored
        stored = self._write(tensor)
        self._known[key] = StorageWeakRef(storage), weakref.ref(stored)
        return stored

    def _write(self, tensor: Tensor) -> _Stored:
        data = bytes_of(tensor.cpu().contiguous()).numpy().data
        room = -(-len(data) // _PAGE) * _PAGE
        free = self._free.setdefault(room, [])
        begin, is_new = self._taken(free, room)
        number = self._file.fileno()
        try:
            if is_new:
                os.posix_fallocate(number, begin, room)
            written = 0
            while written < len(data):
                written += os.pwrite(number, data[written:], begin + written)
        except BaseException as error:
            free.append(begin)
            if not isinstance(error, OSError):
                raise
            raise OSError(
                error.errno,
                f"{error.strerror}: rows_file={str(self.folder)!r} must have room for the rows of all layers; {room} bytes could not be written at "
                f"{begin}. Free some space, or pass a folder on another disk",
            ) from error
        stored = _Stored(begin, tensor.shape, tensor.dtype, tensor.device)
        weakref.finalize(stored, free.append, begin).atexit = False
        return stored

    def _taken(self, free: list[int], room: int) -> tuple[int, bool]:
        """Reserves ``room`` bytes, in a gap or at the end. Returns where they begin, and True if they are at the end.

        They are reserved before the write, because other threads may free or reserve bytes meanwhile.
        """
        try:
            return free.pop(), False
        except IndexError:
            with self._growing:
                self._end += room
                return self._end - room, True

    def _read(self, stored: _Stored) -> Tensor:
        rows = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        data, read = bytes_of(rows).numpy().data, 0
        while read < len(data):
            number = os.preadv(self._file.fileno(), [data[read:]], stored.begin + read)
            if not number:
                raise OSError(f"the file of rows in {str(self.folder)!r} ended at byte {stored.begin + read}")
            read += number
        return rows.to(stored.device)
