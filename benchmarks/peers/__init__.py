"""Peers written for the benchmarks in C++, compiled on demand and called through ctypes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor


def compiled(name: str) -> ctypes.CDLL | None:
    """Returns the library of ``<name>.cpp``, compiled with the package's own flags; None if no C++ compiler is installed."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        print(f"no C++ compiler: the peer {name} is left out")
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / f"{name}.so"
        source = Path(__file__).parent / f"{name}.cpp"
        subprocess.run([compiler, "-O3", "-std=c++20", "-shared", "-fPIC", source, "-o", library], check=True)
        return ctypes.CDLL(str(library))


class LinearProbing:
    """A hash map from id to slot.

    Args:
        library: ``compiled("linear_probing")``.
        ids: int64 [n]; the slot of ``ids[i]`` is i.
    """

    def __init__(self, library: ctypes.CDLL, ids: Tensor) -> None:
        bits = max(1, (2 * ids.numel() - 1).bit_length())
        self._library, self._shift = library, 64 - bits
        self.table = torch.zeros(2**bits, 2, dtype=torch.int64)
        library.build(_pointer(ids), ctypes.c_int64(ids.numel()), _pointer(self.table), ctypes.c_int(self._shift))

    def look_up(self, ids: Tensor, offsets: Tensor, part_id: int) -> list[Tensor]:
        """Returns what ``ops.look_up`` returns for the part, one remote set and the others: position and row of each group, and the remote ids per owner."""
        groups = [torch.empty_like(ids) for _ in range(6)]
        counts, sizes = torch.empty(offsets.numel() - 1, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
        self._library.look_up(
            _pointer(ids),
            ctypes.c_int64(ids.numel()),
            _pointer(offsets),
            ctypes.c_int64(counts.numel()),
            ctypes.c_int64(part_id),
            _pointer(self.table),
            ctypes.c_int(self._shift),
            *map(_pointer, groups),
            _pointer(counts),
            _pointer(sizes),
        )
        return [*(group[: int(sizes[i // 2])] for i, group in enumerate(groups)), counts]


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
