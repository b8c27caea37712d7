"""Checks the files of a dataset directory by checksums, and opens their arrays as memory maps."""

from __future__ import annotations

import hashlib
import mmap
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salientpp.files import what_to_do

_QUICK_BLOCK = 64 * 1024
_QUICK_BLOCKS = 64
_READ_BYTES = 2**20

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
#: numpy lacks these torch dtypes. They are stored as integers of the same width; the manifest names the torch dtype.
STORED_AS = {torch.bfloat16: torch.int16, **dict.fromkeys(_FLOAT8, torch.uint8)}


#: In the manifest, the ``dtype`` of an Arrow file, whose ``shape`` is [number of rows], and of a file of JSON, whose ``shape`` is [1]. They have no dtype of
#: numpy.
ARROW, JSON = "arrow", "json"


class DatasetError(ValueError):
    """A dataset directory is missing, incomplete or altered. The text names the file and says what to do."""


def cannot_be_read(path: Path, error: OSError, again: str = "partition again") -> DatasetError:
    """Returns the error for a file that the operating system did not let this process read."""
    return DatasetError(f"{path} cannot be read ({error.strerror}); {what_to_do(error, f'copy it again, or {again}')}")


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Returns the numpy dtype in which a torch dtype is stored. TypeError if there is none."""
    return torch.empty(0, dtype=STORED_AS.get(dtype, dtype), device="cpu").numpy().dtype


def describe_file(path: Path) -> dict[str, Any]:
    """Returns size and checksums of a complete file, for :func:`verify_file`."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path), "quick": quick_checksum(path)}


def verify_file(root: Path, name: str, entry: Mapping[str, Any], *, full: bool) -> None:
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


def open_array(path: Path, entry: Mapping[str, Any]) -> tuple[np.ndarray, mmap.mmap | None]:
    """Maps the array of a file into memory. Returns the array and its map, which is None for an empty array."""
    try:
        # Copy-on-write: pages are shared and never written back. A stray in-place write by the user's code stays private to its process;
        # with a read-only map it would be a segmentation fault.
        # numpy resolves a Path, which takes longer than all else.
        array = np.lib.format.open_memmap(str(path), mode="c")
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
    # Copies nothing, unless another tool wrote the file in Fortran order.
    return np.ascontiguousarray(array), getattr(array, "_mmap", None)


class Arrays:
    """Opens the arrays of a dataset directory as memory maps. All views of one directory share this object.

    Attributes:
        root: the directory.
        files: name -> size, checksums, dtype and shape, as in the manifest.
    """

    def __init__(self, root: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
        self.root, self.files = root, files
        self._maps: weakref.WeakKeyDictionary[mmap.mmap, str] = weakref.WeakKeyDictionary()  # open maps -> file names

    def check_can_be_pickled(self) -> None:
        """Raises TypeError if another process cannot open the files."""

    def open(self, name: str, dtype: str | None = None) -> Tensor:
        """Returns the array of a file.

        Args:
            dtype: torch's name of the dtype of the result. Needed for dtypes that numpy lacks, such as bfloat16.

        Raises:
            DatasetError: the file does not match the manifest.
        """
        # Checked again, because the directory may have been overwritten after it was opened. Files of two datasets must never be mixed.
        verify_file(self.root, name, self.files[name], full=False)
        return self._map(self.root / name, name, dtype)

    def path_of(self, name: str) -> Path:
        """Returns the path of a file on this host, such as an Arrow file, which another class reads. DatasetError if it does not match the manifest."""
        verify_file(self.root, name, self.files[name], full=False)
        return self.root / name

    def watch(self, map_: mmap.mmap, name: str) -> None:
        """Includes the memory map of the file ``name`` in :meth:`check_sizes`."""
        self._maps[map_] = name

    def _map(self, path: Path, name: str, dtype: str | None) -> Tensor:
        """Returns the array of the file ``name``, which lies at ``path``."""
        array, map_ = open_array(path, self.files[name])
        if map_ is not None:
            self._maps[map_] = name
        tensor = torch.from_numpy(array)
        return tensor if dtype is None else tensor.view(getattr(torch, dtype))

    def check_sizes(self) -> None:
        """Checks that no file behind an open memory map has become shorter than the map.

        Reading a map beyond the end of its file kills the process (SIGBUS). A file that was replaced or deleted does no harm: the map keeps the
        original file.

        Raises:
            DatasetError: a file was cut short.
        """
        for map_, name in list(self._maps.items()):
            size, expected = map_.size(), self.files[name]["bytes"]
            if size < expected:
                raise DatasetError(
                    f"{self.root / name} was cut short while this process was reading it: it must have {expected} bytes, got {size}; copy it again, or "
                    "partition again, and restart from the last saved state"
                )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return sha256_of_file(file)


def sha256_of_file(file: Any) -> str:
    """Returns the SHA-256 of the bytes of an open binary file from its position on, in hexadecimal digits."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(_READ_BYTES))
    while count := file.readinto(block):
        digest.update(block[:count])
    return digest.hexdigest()


def quick_checksum(path: Path) -> int:
    with path.open("rb") as file:
        return quick_checksum_of(file, path.stat().st_size)


def quick_checksum_of(file: Any, size: int) -> int:
    """Returns the checksum of sampled blocks of an open binary file of ``size`` bytes, which may be seeked."""
    checksum = zlib.crc32(str(size).encode())
    if size <= _QUICK_BLOCK * _QUICK_BLOCKS:
        return zlib.crc32(file.read(), checksum)
    for block in range(_QUICK_BLOCKS):
        file.seek((size - _QUICK_BLOCK) * block // (_QUICK_BLOCKS - 1))
        checksum = zlib.crc32(file.read(_QUICK_BLOCK), checksum)
    return checksum
