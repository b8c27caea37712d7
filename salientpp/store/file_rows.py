"""Reads rows of memory-mapped arrays from their files, in blocks and in file order.

:class:`FileRows` reads past the page cache. A page that is read through a memory map stays in the page cache, with all rows beside the wanted ones. If the rows
are kept elsewhere, they would then be in memory twice. So files are opened with ``O_DIRECT`` where the file system permits it.

:class:`UnmappedRows` reads through the page cache, for rows that every epoch reads again and nobody keeps. Pages of a memory map would count as memory of this
process.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from salientpp import ops
from salientpp.graph.mapped import files_of
from salientpp.ops import bytes_of
from salientpp.processes import Lock
from salientpp.store.rows import JoinedRows, RowSource, TensorRows

Key = TypeVar("Key")

#: Number of threads that read blocks at the same time. Disks without moving parts serve about this number of requests at once.
_THREADS = 32

#: Pages between two rows are read too if they have at most this number of bytes. A request costs a disk as much time as reading this number of bytes
#: further: with 32 threads, an NVMe-like disk does 140,000 requests per second, or reads 2 GB.
_GAP_BYTES = 2**13


class _File:
    """An open file, which is closed when this object is deleted. A copy of the object opens the file again.

    Args:
        cached: True: read through the page cache. False: read past it, if the file system permits it.
    """

    def __init__(self, path: Path, cached: bool) -> None:
        self.path, self.cached = path, cached
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if cached else _opened(path)
        weakref.finalize(self, os.close, self.number).atexit = False

    def __reduce__(self) -> tuple[type[_File], tuple[Path, bool]]:
        return _File, (self.path, self.cached)


def _opened(path: Path) -> int:
    """Opens a file, and returns its descriptor. Reads bypass the page cache if the file system permits it."""
    with contextlib.suppress(OSError):
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        # Some file systems open the file, but then cannot read it. The result of a dry run tells.
        index, out = (
            torch.zeros(1, dtype=torch.int64, device="cpu"),
            torch.empty((1, 1), dtype=torch.uint8, device="cpu"),
        )
        if int(ops.read_rows(number, 0, 1, index, out, None, 0, 1)[1]) < 0:
            return number
        os.close(number)
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)
    return number


def _mappable(source: RowSource) -> list[Tensor]:
    """Returns a source's arrays, or [] if they cannot be mapped from files. Empty ones among several are left out."""
    tensors = source.pieces if isinstance(source, JoinedRows) else []
    if isinstance(source, TensorRows):
        tensors = [source.tensor]
    tensors = [tensor for tensor in tensors if tensor.size(0) or len(tensors) == 1]
    return tensors if all(tensor.device.type == "cpu" for tensor in tensors) else []


@dataclass(frozen=True)
class FilePiece:
    """Tells where consecutive rows lie in a file. The first of them begins at byte ``offset``."""

    file: _File
    offset: int
    num_rows: int


class FileRows:
    """Rows of one attribute, read from files instead of memory maps, so that they do not fill the page cache.

    Args:
        threads: number of threads that read at the same time.

    Attributes:
        row_bytes: bytes of a row.
        bytes_read: bytes read so far. Files are read in whole pages.
    """

    def __init__(self, pieces: Sequence[FilePiece], row_bytes: int, threads: int = _THREADS) -> None:
        self._pieces, self.row_bytes, self.bytes_read, self._threads = list(pieces), row_bytes, 0, threads
        self._first = [0, *accumulate(piece.num_rows for piece in pieces)]
        self._lock = Lock()

    @classmethod
    def of(cls, sources: Mapping[Key, RowSource], cached: bool = False) -> dict[Key, FileRows]:
        """Returns readers of the files behind ``sources``, by name. Leaves out sources that are not entirely memory-mapped.

        Args:
            cached: True: read through the page cache, in the caller's thread.
        """
        arrays = {name: _mappable(source) for name, source in sources.items()}
        at = iter(files_of([array for of_name in arrays.values() for array in of_name]))
        found = {}
        for name, source in sources.items():
            files = [(next(at), array) for array in arrays[name]]
            pieces = [
                FilePiece(_File(file[0], cached), file[1], array.size(0)) for file, array in files if file is not None
            ]
            if pieces and len(pieces) == len(files):
                # Not from a piece, because a piece may have no rows.
                row_bytes = math.prod(source.shape[1:]) * source.dtype.itemsize
                found[name] = cls(pieces, row_bytes, 1 if cached else _THREADS)
        return found

    @property
    def num_rows(self) -> int:
        return self._first[-1]

    def read(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        """Reads ``out[out_index] = rows[index]``. Several threads may call it.

        Args:
            index: int64 [n], ascending.
            out: contiguous uint8 [O, row bytes].
            out_index: int64 [n], or None for 0, 1, ..., n - 1.

        Raises:
            OSError: a file is shorter than when it was mapped, or cannot be read.
        """
        if len(self._pieces) == 1:
            self._read(self._pieces[0], index, out, out_index)
            return
        bounds = torch.searchsorted(index, torch.tensor(self._first, device="cpu")).tolist()
        for number, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                places = torch.arange(begin, end, device="cpu") if out_index is None else out_index[begin:end]
                self._read(self._pieces[number], index[begin:end] - self._first[number], out, places)

    def _read(self, piece: FilePiece, index: Tensor, out: Tensor, out_index: Tensor | None) -> None:
        file = piece.file
        found = ops.read_rows(
            file.number, piece.offset, piece.num_rows, index, out, out_index, _GAP_BYTES, self._threads
        ).tolist()
        num_bytes, failed_at, error = found
        with self._lock:
            self.bytes_read += num_bytes
        if failed_at < 0:
            return
        expected = piece.offset + piece.num_rows * self.row_bytes
        if error:
            raise OSError(
                error, f"{file.path} cannot be read at byte {failed_at} ({os.strerror(error)}); check the disk"
            )
        raise OSError(
            f"{file.path} was cut short while this process was reading it: it must have at least {expected} bytes, got {os.fstat(file.number).st_size} (byte "
            f"{failed_at} is missing); copy it again, and restart from the last saved state"
        )


class UnmappedRows:
    """Source of an attribute's rows that reads them from files. The rows of ``like``, which is memory-mapped, stay untouched."""

    def __init__(self, like: RowSource, files: FileRows) -> None:
        self.shape, self.dtype, self._files = like.shape, like.dtype, files

    @classmethod
    def of(cls, sources: Mapping[Key, RowSource]) -> dict[Key, RowSource]:
        """Returns sources with the same rows. Those that are not entirely memory-mapped are returned as they are, and all if their files cannot be opened."""
        try:
            files = FileRows.of(sources, cached=True)
        except OSError:  # more parts than a process may open files
            return dict(sources)
        return {name: cls(rows, files[name]) if name in files else rows for name, rows in sources.items()}

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        index, order = index.sort()
        to = bytes_of(out).view(out.size(0), self._files.row_bytes)
        self._files.read(index, to, order if out_index is None else out_index[order])
