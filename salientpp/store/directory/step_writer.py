"""Writes arrays as .npy files, piece by piece, in steps that a journal records."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from salientpp.graph.mapped import nothing, releaser
from salientpp.store.directory.files import ARROW, JSON, STORED_AS, numpy_dtype
from salientpp.store.directory.journal import Journal, says_what_to_do
from salientpp.store.rows import put_rows

_COPY_BYTES = 64 * 2**20

#: Approximate bytes of a memory-mapped file that stay resident while its rows are copied.
_SPAN_BYTES = 256 * 2**20


class StepWriter:
    """Writes arrays to files piece by piece, in steps that a journal records, so that a stopped job can continue."""

    def __init__(self, journal: Journal) -> None:
        self.root = journal.root
        self._journal = journal
        self._written: dict[str, dict[str, Any]] = {}

    def step(self, name: str, write: Callable[[], Mapping[str, Any] | None]) -> Mapping[str, Any]:
        """Runs ``write`` and records its files in the journal, unless the journal has the step. Returns the step's facts, the results of ``write``."""
        facts = self._journal.facts(name)
        if facts is None:
            found = write()
            facts = self._journal.note(name, self._written, found or {})
            self._written = {}
        return facts

    def write(self, name: str, dtype: torch.dtype, shape: Sequence[int], pieces: Iterable[Tensor]) -> None:
        """Writes one .npy file of this dtype and shape: the ``pieces``, concatenated along dimension 0."""
        stored, on_disk = STORED_AS.get(dtype, dtype), numpy_dtype(dtype)
        path = self._journal.work / name
        header = {"descr": np.lib.format.dtype_to_descr(on_disk), "fortran_order": False, "shape": tuple(shape)}
        with says_what_to_do(self.root / name):
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for piece in pieces:
                    file.write(
                        piece.to(dtype).contiguous().view(stored).numpy().data.cast("B") if piece.numel() else b""
                    )
                file.flush()
                os.fsync(file.fileno())
        self._written[name] = {"dtype": on_disk.str, "shape": list(shape)}

    def write_file(self, name: str, write: Callable[[BinaryIO], int], dtype: str = ARROW) -> None:
        """Writes one file that is no array, of the manifest's ``dtype``. ``write`` gets the open file, and returns the number of rows."""
        path = self._journal.work / name
        with says_what_to_do(self.root / name):
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                num_rows = write(file)
                file.flush()
                os.fsync(file.fileno())
        self._written[name] = {"dtype": dtype, "shape": [num_rows]}

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        def write(file: BinaryIO) -> int:
            file.write(f"{json.dumps(value, sort_keys=True)}\n".encode())
            return 1

        self.write_file(name, write, JSON)

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        self.write(name, tensor.dtype, tensor.shape, [tensor])


def take_rows(rows: Tensor, ids: Tensor) -> Iterator[Tensor]:
    """Yields ``rows[ids]`` in pieces. Reads a large memory-mapped file from start to end for each piece, and releases its pages meanwhile."""
    release = releaser(rows)
    num_runs = 1 if release is nothing else -(-rows.nbytes // _SPAN_BYTES)
    for some in ids.split(max(1, _COPY_BYTES // max(1, rows.nbytes // max(1, rows.size(0))))):
        if num_runs <= 1:
            yield rows[some]
            continue
        piece = torch.empty((some.numel(), *rows.shape[1:]), dtype=rows.dtype, device="cpu")
        ascending = some.argsort()
        for run in ascending.split(-(-some.numel() // num_runs)):
            put_rows(rows, some[run], piece, run)
            release()
        yield piece
