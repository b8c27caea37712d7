"""Reads arrays of .npy files, .npz archives and files of ``torch.save`` in pieces, so that memory holds only one piece.

Pages that are read from a memory map count as resident memory. So numpy's arrays are read without memory maps. torch maps the tensors in its files, so the
pages of these tensors are released after each piece.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from salientpp.datasets.arrays import check_file, form, unreadable
from salientpp.datasets.converted.pieces import EdgePiece, EdgeSource, RowPiece, Rows, counted
from salientpp.datasets.npz import scalar
from salientpp.files import first_line

#: Function ``read(count)``, which returns the next ``count`` entries of an array.
Read = Callable[[int], np.ndarray]

#: Version of numpy's format -> function that reads the header.
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class StoredArray:
    """Description of an array on disk: a .npy file, or a member of an .npz archive. ``member`` is the member's name without .npy. Errors use ``name``."""

    path: Path
    member: str | None
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    offset: int

    @classmethod
    def of(cls, path: Path, member: str | None = None) -> StoredArray:
        """Reads the header of an array.

        Raises:
            ValueError: the header is not valid, or the array does not have the size that the header says.
        """
        name = str(path) if member is None else f"{path}: {member}"
        with _opened(path, member, name) as (file, size):
            try:
                version = np.lib.format.read_magic(file)
                read = _HEADERS.get(version)
                header = None if read is None else read(file)
            except OSError as error:
                raise unreadable(name, error) from error
            except Exception as error:  # numpy, zipfile and zlib do not document their errors
                raise ValueError(f"{name} is not an array as numpy.save writes it ({first_line(error)})") from error
            if header is None:
                raise ValueError(
                    f"{name} has version {version[0]}.{version[1]} of numpy's format, which is not for plain numbers (3.0 is for records); it must hold "
                    "numbers; save it as a plain array"
                )
            shape, fortran, dtype = header
            if dtype.hasobject or dtype.fields is not None:
                raise ValueError(f"{name} must hold numbers, got dtype {dtype}")
            offset = file.tell()
        expected = offset + int(np.prod(shape, dtype=object)) * dtype.itemsize
        if size != expected:
            raise ValueError(
                f"{name} must have {expected} bytes for {dtype} {list(shape)}, but ends at byte {size}; copy it again"
            )
        return cls(path, member, name, tuple(shape), dtype, bool(fortran) and len(shape) > 1, offset)

    @classmethod
    def of_values(cls, path: Path, dtype: np.dtype, row_shape: tuple[int, ...]) -> StoredArray:
        """Describes a file of rows without numpy's header, as ``numpy.memmap`` writes it. Raises ValueError if the file ends within a row."""
        check_file(path)
        row_bytes = int(np.prod(row_shape, dtype=np.int64)) * dtype.itemsize
        num_rows, rest = divmod(path.stat().st_size, row_bytes)
        if rest:
            raise ValueError(
                f"{path} has no header of numpy, so it must have rows of {dtype} {list(row_shape)}, but has {rest} bytes after row {num_rows}; copy it again"
            )
        return cls(path, None, str(path), (num_rows, *row_shape), dtype, False, 0)

    @contextlib.contextmanager
    def reader(self, first: int = 0) -> Iterator[Read]:
        """Opens the array for a ``with`` block. Yields a function that reads the next ``count`` entries at each call, beginning at entry ``first``."""
        with _opened(self.path, self.member, self.name) as (file, _):
            at = self.offset + first * self.dtype.itemsize
            with _said(self.name):
                file.seek(at)

            def read(count: int) -> np.ndarray:
                nonlocal at
                data = bytearray(count * self.dtype.itemsize)
                with _said(self.name):
                    done = file.readinto(data)  # type: ignore[attr-defined]
                at += done
                if done < len(data):
                    raise ValueError(
                        f"{self.name} ends at byte {at}, in the middle of its {self.dtype} {list(self.shape)}; copy it again"
                    )
                array = np.frombuffer(data, self.dtype)
                return array if self.dtype.isnative else array.astype(self.dtype.newbyteorder("="))

            yield read


@contextlib.contextmanager
def _said(name: str) -> Iterator[None]:
    """Turns errors of zipfile and zlib, whose types are not documented, into errors that name the array."""
    try:
        yield
    except OSError as error:
        raise unreadable(name, error) from error
    except (MemoryError, ValueError):
        raise
    except Exception as error:
        raise ValueError(f"{name} cannot be read ({first_line(error)}); copy it again") from error


@contextlib.contextmanager
def _opened(path: Path, member: str | None, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """Opens a file or a member of an archive. Yields the file object and the number of its bytes."""
    check_file(path)
    with contextlib.ExitStack() as stack:
        with _said(name):
            if member is None:
                file: BinaryIO = stack.enter_context(path.open("rb"))
                size = path.stat().st_size
            else:
                archive = stack.enter_context(zipfile.ZipFile(path))
                file = stack.enter_context(archive.open(f"{member}.npy"))  # type: ignore[assignment]
                size = archive.getinfo(f"{member}.npy").file_size
        yield file, size


def members_of(path: Path) -> list[str]:
    """Returns the names of the arrays of an .npz archive."""
    check_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except OSError as error:
        raise unreadable(f"{path}:", error) from error
    except Exception as error:
        raise ValueError(f"{path}: not an .npz archive ({first_line(error)})") from error


def scalar_of(array: StoredArray, kinds: str) -> Any:
    """Returns the number that an array holds. Raises ValueError unless the array is a single number of one of numpy's ``kinds``."""
    with scalar(array.name, array, kinds).reader() as read:
        return read(1)[0].item()


def array_edges(arrays: Sequence[StoredArray]) -> EdgeSource:
    """Returns the edges of arrays [2, E] or [E, 2], to be read in pieces, one array after another."""
    for array in arrays:
        if len(array.shape) != 2 or 2 not in array.shape:
            raise ValueError(f"{array.name} must have shape [2, E] or [E, 2], got {list(array.shape)}")
        if array.dtype.kind not in "iu":
            raise ValueError(f"{array.name} must hold integers, got dtype {array.dtype}")
    # An array [2, 2] has the form of the others. If it is alone, it is read as [2, E], PyG's form.
    forms = {array.shape[0] == 2 for array in arrays if array.shape != (2, 2)}
    for array in arrays if len(forms) == 2 else ():
        if array.shape == (2, 2):
            raise ValueError(
                f"{array.name} has shape [2, 2], which may mean [2, E] or [E, 2], and the other files of edges have both shapes; save all files in one of them"
            )
    are_wide = [array.shape[0] == 2 if array.shape != (2, 2) else forms != {False} for array in arrays]
    sizes = [array.shape[is_wide] for array, is_wide in zip(arrays, are_wide)]

    def pieces(most: int) -> Iterator[EdgePiece]:
        for array, size, is_wide, before in zip(arrays, sizes, are_wide, accumulate(sizes, initial=0)):
            name = f"{array.name}[:, " if is_wide else f"{array.name}["
            # An array [2, E] in column order is stored like an array [E, 2] in row order: pair by pair.
            in_pairs = is_wide == array.fortran
            with array.reader() as read, array.reader(0 if in_pairs else size) as targets:
                for first in range(0, size, most):
                    count = min(most, size - first)
                    if in_pairs:
                        source, target = read(2 * count).reshape(-1, 2).T
                    else:
                        source, target = read(count), targets(count)
                    yield EdgePiece(source, target, counted(name, first, "]"), before + first + count)

    return EdgeSource(pieces, sum(sizes), sum(sizes))


def array_rows(arrays: Sequence[StoredArray]) -> Rows:
    """Returns the rows of arrays [n, ...], to be read in pieces, one array after another."""
    for array in arrays:
        if not array.shape:
            raise ValueError(f"{array.name} must have a row per vertex, got a single number")
        if array.fortran and sum(size > 1 for size in array.shape) > 1:
            raise ValueError(
                f"{array.name} is stored column by column, so it cannot be read row by row; save numpy.ascontiguousarray of it"
            )
        if (array.shape[1:], array.dtype) != (arrays[0].shape[1:], arrays[0].dtype):
            raise ValueError(
                f"{array.name} must hold rows of {arrays[0].dtype} {list(arrays[0].shape[1:])} as {arrays[0].name} does, got {array.dtype} "
                f"{list(array.shape[1:])}"
            )
        if array.dtype.kind not in "biufc" or array.dtype.newbyteorder("=") in (np.longdouble, np.clongdouble):
            raise ValueError(f"{array.name} must hold numbers of a dtype that torch has, got {array.dtype}")
    sizes = [array.shape[0] for array in arrays]

    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        for array, size, before in zip(arrays, sizes, accumulate(sizes, initial=0)):
            width = int(np.prod(array.shape[1:], dtype=object))
            most = max(1, most_bytes // max(1, width * array.dtype.itemsize))
            with array.reader() as read:
                for first in range(0, max(1, size), most):
                    count = min(most, size - first)
                    rows = torch.from_numpy(read(count * width).reshape(count, *array.shape[1:]))
                    yield RowPiece(rows, counted(f"{array.name}[", first, "]"), before + first + count)

    return Rows(pieces, sum(sizes), sum(sizes))


# --- tensors that torch.save wrote -------------------------------------------------------------------------


def saved_edges(edge_index: Tensor, name: str) -> EdgeSource:
    """Returns the edges of a memory-mapped ``edge_index`` [2, E], to be read in pieces. Raises ValueError for another shape or dtype."""
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32 [2, E], got {form(edge_index)}")
    total = edge_index.size(1)

    def pieces(most: int) -> Iterator[EdgePiece]:
        for first in range(0, total, most):
            source, target = (_copied(end[first : first + most]).numpy() for end in edge_index)
            yield EdgePiece(source, target, counted(f"{name}[:, ", first, "]"), first + source.size)

    return EdgeSource(pieces, total, total)


def saved_rows(rows: Tensor, name: str) -> Rows:
    """Returns the rows of a memory-mapped tensor [n, ...], to be read in pieces. Raises ValueError if the tensor is not dense or has no rows."""
    if rows.dim() == 0 or rows.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor with a row per vertex, got {form(rows)}")
    total = rows.size(0)

    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        most = max(1, most_bytes // max(1, rows[:1].numel() * rows.element_size()))
        for first in range(0, max(1, total), most):
            piece = _copied(rows[first : first + most])
            yield RowPiece(piece, counted(f"{name}[", first, "]"), first + len(piece))

    return Rows(pieces, total, total)


def _copied(mapped: Tensor) -> Tensor:
    """Copies memory-mapped rows and releases their pages, which would else count as resident memory."""
    copy = mapped.clone(memory_format=torch.contiguous_format)
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    page = mmap.PAGESIZE
    first = -(-mapped.data_ptr() // page) * page
    last = (mapped.data_ptr() + mapped.nbytes) // page * page
    if advise is not None and mapped.is_contiguous() and last > first:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
    return copy
