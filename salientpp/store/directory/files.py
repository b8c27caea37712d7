"""Does a file of a dataset directory hold what its manifest says? Checksums, dtypes and memory maps."""

from __future__ import annotations

import hashlib
import mmap
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from salientpp.files import what_to_do

_QUICK_BLOCK = 64 * 1024
_QUICK_BLOCKS = 64
_READ_BYTES = 2**20

#: torch dtypes that numpy lacks are stored as integers of their width; the manifest names the real one.
STORED_AS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


class DatasetError(ValueError):
    """A dataset directory is missing, incomplete or altered; the text says which file and what to do."""


def cannot_be_read(path: Path, error: OSError, again: str = "partition again") -> DatasetError:
    """The error of a file that the system did not let this process read."""
    return DatasetError(f"{path} cannot be read ({error.strerror}); {what_to_do(error, f'copy it again, or {again}')}")


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The numpy dtype that a torch dtype is stored as; TypeError where there is none."""
    return torch.empty(0, dtype=STORED_AS.get(dtype, dtype), device="cpu").numpy().dtype


def describe_file(path: Path) -> dict[str, Any]:
    """Size and checksums of a file that is complete, for :func:`verify_file`."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path), "quick": quick_checksum(path)}


def verify_file(root: Path, name: str, entry: dict[str, Any], *, full: bool) -> None:
    path = root / name
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise DatasetError(
                f"{path} must have {entry['bytes']} bytes, got {size}; copy it again, or partition again"
            )
        same = sha256_of(path) == entry["sha256"] if full else quick_checksum(path) == entry["quick"]
    except OSError as error:
        raise cannot_be_read(path, error) from None
    if not same:
        raise DatasetError(
            f"{path} was altered: its checksum does not match the manifest; copy it again, or partition again"
        )


def open_array(root: Path, name: str, entry: dict[str, Any]) -> tuple[np.ndarray, mmap.mmap | None]:
    """The array, and the memory map that it lies in; an empty one has none."""
    path = root / name
    try:
        # Copy-on-write: shared and never written back, and a stray in-place write by the user's code is private to
        # it, where a read-only map would be a segmentation fault.
        array = np.lib.format.open_memmap(path, mode="c")
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(
            f"{path} cannot be opened as an array ({reason}); {what_to_do(error, 'copy it again, or partition again')}"
        ) from None
    if [array.dtype.str, list(array.shape)] != [entry["dtype"], entry["shape"]]:
        raise DatasetError(
            f"{path} must hold {entry['dtype']} {entry['shape']}, got {array.dtype.str} {list(array.shape)}; "
            "copy it again, or partition again"
        )
    # No copy, unless another tool wrote columns first.
    return np.ascontiguousarray(array), getattr(array, "_mmap", None)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        block = memoryview(bytearray(_READ_BYTES))
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def quick_checksum(path: Path) -> int:
    size = path.stat().st_size
    checksum = zlib.crc32(str(size).encode())
    with path.open("rb") as file:
        if size <= _QUICK_BLOCK * _QUICK_BLOCKS:
            return zlib.crc32(file.read(), checksum)
        for block in range(_QUICK_BLOCKS):
            file.seek((size - _QUICK_BLOCK) * block // (_QUICK_BLOCKS - 1))
            checksum = zlib.crc32(file.read(_QUICK_BLOCK), checksum)
    return checksum
