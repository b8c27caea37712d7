"""Writes the files of a converted graph, which may be larger than memory."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from salientpp.store.directory.files import STORED_AS, numpy_dtype
from salientpp.store.directory.journal import says_what_to_do


class _File:
    """Binary file to write. If the system refuses to write, for example on a full disk, the error says what to do."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file

    def write(self, data: Any) -> None:
        with says_what_to_do(self._path):
            self._file.write(data)

    def seek(self, position: int) -> None:
        with says_what_to_do(self._path):
            self._file.seek(position)


@contextlib.contextmanager
def written(path: Path, to_disk: bool = True) -> Iterator[_File]:
    """Opens a new file for a ``with`` block.

    At the end of the block the file's contents are handed to the operating system; ``to_disk`` also waits until they are on the disk. If the block fails, the
    incomplete file stays.
    """
    with says_what_to_do(path):
        file = path.open("wb")
    try:
        yield _File(path, file)
        with says_what_to_do(path):
            file.flush()
            if to_disk:
                os.fsync(file.fileno())
            file.close()
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        raise


class ArrayWriter:
    """Writes rows to an .npy file piece by piece; their number is needed only at the end. Dtypes that numpy lacks, such as bf16, are stored as integers."""

    def __init__(self, file: _File, dtype: torch.dtype, row_shape: Sequence[int]) -> None:
        self._file, self.row_shape = file, torch.Size(row_shape)
        self.dtype, self._stored, self._on_disk = dtype, STORED_AS.get(dtype, dtype), numpy_dtype(dtype)
        self.num_rows = 0
        self._header_bytes = len(self._header())
        file.write(self._header())

    def _header(self) -> bytes:
        # numpy pads the header, so its size stays the same when the number of rows grows.
        header = io.BytesIO()
        shape, descr = (self.num_rows, *self.row_shape), np.lib.format.dtype_to_descr(self._on_disk)
        np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
        return header.getvalue()

    def write(self, rows: Tensor | np.ndarray) -> None:
        """Appends rows [n, ...] of the writer's dtype."""
        if isinstance(rows, Tensor):
            rows = rows.contiguous().view(self._stored).numpy()
        self.num_rows += len(rows)
        if rows.size:
            self._file.write(np.ascontiguousarray(rows))

    def write_at(self, rows: Tensor, at: np.ndarray) -> None:
        """Writes rows [n, ...] at the row numbers ``at``, int64 [n], which are distinct. Rows with consecutive numbers are written together."""
        order = np.argsort(at)
        at, array = at[order], np.ascontiguousarray(rows.contiguous().view(self._stored).numpy()[order])
        row_bytes = array.dtype.itemsize * int(np.prod(self.row_shape, dtype=np.int64))
        begins = np.flatnonzero(np.diff(at, prepend=-2) != 1)
        for begin, end in zip(begins, [*begins[1:], len(at)]):
            self._file.seek(self._header_bytes + int(at[begin]) * row_bytes)
            self._file.write(array[begin:end])
        self.num_rows += len(at)

    def finish(self) -> dict[str, Any]:
        """Writes the header again, with the final number of rows. Returns dtype and shape for the manifest."""
        header = self._header()
        assert len(header) == self._header_bytes
        self._file.seek(0)
        self._file.write(header)
        return {
            "dtype": self._on_disk.str,
            "shape": [self.num_rows, *self.row_shape],
            "torch_dtype": str(self.dtype).removeprefix("torch."),
        }
