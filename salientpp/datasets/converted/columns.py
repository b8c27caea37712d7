"""Writes the rows of attributes and the masks of splits into the files of a converted graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salientpp.datasets.arrays import form
from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.files import ArrayWriter, written
from salientpp.datasets.converted.pieces import RowPiece, Rows, Split, first_row
from salientpp.progress import Progress
from salientpp.store.directory.labels import is_unlabelled, warn_of_unlabelled

#: Names that ``--dtype`` takes.
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

#: Number of copies of a piece that are in memory while the piece is read, converted, checked and written.
_COPIES = 12


def write_column(
    name: str,
    rows: Rows,
    num_rows: int | None,
    path: Path,
    budget: Budget,
    *,
    dtype: str | None,
    finite: bool,
    progress: Progress,
    of: str = "vertex",
) -> dict[str, Any]:
    """Writes the rows of an attribute in their order. Returns the manifest's description of the array.

    Args:
        of: what has a row, 'vertex' or 'edge', for errors.

    Raises:
        ValueError: the number of rows is not ``num_rows``, or a value does not fit ``dtype`` (a key of ``DTYPES``). With ``finite``, a value is not finite.
            The text of the error names the place.
    """
    writer: ArrayWriter | None = None
    budget.needs(rows.held_bytes, f"reading all columns of {name} at once")
    places = _Places(num_rows or 0, budget)
    with written(path) as file:
        for piece in rows.pieces(max(1, (budget.working - rows.held_bytes) // _COPIES)):
            values = narrowed(name, piece, dtype, finite)
            if writer is None:
                writer = ArrayWriter(file, values.dtype, values.shape[1:])
            elif (values.dtype, values.shape[1:]) != (writer.dtype, writer.row_shape):
                before = f"{str(writer.dtype).removeprefix('torch.')} {list(writer.row_shape)}"
                raise ValueError(
                    f"{piece.where(0)}: {name} must have rows of {before}, as earlier rows, got {form(values[0])}; write all rows with one dtype and shape"
                )
            if num_rows is not None and writer.num_rows + len(values) > num_rows:
                raise ValueError(
                    f"{piece.where(num_rows - writer.num_rows)}: {name} must have {num_rows} rows, one per {of}, but has more"
                )
            if piece.at is None:
                writer.write(values)
            else:
                writer.write_at(values, places.take(name, piece))
            progress.reach(piece.done)
        assert writer is not None  # there is at least one piece
        if num_rows is not None and writer.num_rows != num_rows:
            raise ValueError(
                f"{piece.where(len(values))}: {name} must have {num_rows} rows, one per {of}, but ends after {writer.num_rows}"
            )
        return writer.finish()


class _Places:
    """Checks the vertex ids of rows that a file has in another order. A byte per vertex records the ids so far, so that a repeated id raises an error."""

    def __init__(self, num_rows: int, budget: Budget) -> None:
        self._budget, self._num_rows = budget, num_rows
        self._taken: np.ndarray | None = None

    def take(self, name: str, piece: RowPiece) -> np.ndarray:
        """Returns the vertex ids of some rows, int64 [n]. Raises ValueError if one is out of range or an earlier row had it."""
        assert piece.at is not None
        if self._taken is None:
            self._budget.needs(self._num_rows, f"sorting {name} by id (a byte per vertex)")
            self._taken = np.zeros(self._num_rows, dtype=bool)
        at = piece.at
        if at.dtype.kind not in "iu" or at.ndim != 1:
            raise ValueError(f"{piece.where(0)}: the id must be an integer, got {at.dtype} {list(at.shape[1:])}")
        wrong = (at < 0) | (at >= self._num_rows)
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"{piece.where(row)}: the id must be a vertex id in [0, {self._num_rows}), got {int(at[row])}"
            )
        at = at.astype(np.int64)
        repeated = self._taken[at]
        repeated[np.setdiff1d(np.arange(len(at)), np.unique(at, return_index=True)[1])] = True
        if repeated.any():
            row = int(repeated.argmax())
            raise ValueError(f"{piece.where(row)}: the id {int(at[row])} comes twice; each vertex must have one row")
        self._taken[at] = True
        return at


def narrowed(name: str, piece: RowPiece, dtype: str | None, finite: bool) -> Tensor:
    """Returns the rows of a piece in a format of :data:`DTYPES`; None keeps their dtype. Raises ValueError as :func:`write_column` does."""
    values = piece.values
    if finite and values.is_floating_point():
        wrong = ~values.isfinite()
        if bool(wrong.any()):
            raise ValueError(
                f"{piece.where(first_row(wrong))}: {name} must be finite, got nan or infinity; correct it, or leave out --finite"
            )
    if dtype is None or values.dtype == DTYPES[dtype]:
        return values
    if not values.is_floating_point():
        raise ValueError(
            f"{piece.where(0)}: {name} cannot be stored as {dtype}, since it holds {values.dtype}; leave out --dtype"
        )
    most = torch.finfo(DTYPES[dtype]).max
    if most < torch.finfo(values.dtype).max:
        lost = (values.abs() > most) & values.isfinite()
        if bool(lost.any()):
            raise ValueError(
                f"{piece.where(first_row(lost))}: {name} cannot be stored as {dtype}, since {float(values[lost][0]):g} is too large; "
                "store it as bf16 or fp32"
            )
    return values.to(DTYPES[dtype])


def write_mask(
    name: str,
    split: Split,
    num_vertices: int,
    labels: Rows | None,
    path: Path,
    budget: Budget,
    progress: Progress,
) -> dict[str, Any]:
    """Writes the mask of a split, bool [N]. Vertices without a label (-1 in ``labels``) are left out, and a warning says how many.

    Returns the manifest's description of the array. Raises ValueError if an id is out of range, the mask does not have N entries, or the budget is too small.
    """
    budget.needs(2 * num_vertices, f"the mask of {name!r} (a byte per vertex, and as much for ids)")
    mask = torch.zeros(num_vertices, dtype=torch.bool, device="cpu")
    places = _Places(num_vertices, budget)
    first = 0
    for piece in split.rows.pieces(max(8, (budget.working - num_vertices) // _COPIES)):
        values = piece.values
        if values.dim() == 2 and values.size(1) == 1:
            values = values[:, 0]
        if piece.at is not None and not split.is_mask:
            raise ValueError(
                f"{piece.where(0)}: the split {name!r} must be vertex ids alone, but the file has other columns beside the ids; write only the ids of the split"
            )
        is_whole = not values.is_floating_point() and not values.dtype.is_complex
        if values.dim() != 1 or not is_whole or (values.dtype == torch.bool) != split.is_mask:
            expected = "a bool per vertex" if split.is_mask else "vertex ids, one after another"
            raise ValueError(f"{piece.where(0)}: the split {name!r} must be {expected}, got {form(values)}")
        if split.is_mask and first + len(values) > num_vertices:
            raise ValueError(f"{piece.where(0)}: the mask of {name!r} must have {num_vertices} entries, but has more")
        if split.is_mask and piece.at is not None:
            mask[torch.from_numpy(places.take(name, piece))] = values
        elif split.is_mask:
            mask[first : first + len(values)] = values
        else:
            ids = values.numpy()
            wrong = (ids < 0) | (ids >= num_vertices)
            if wrong.any():
                at = int(wrong.argmax())
                raise ValueError(
                    f"{piece.where(at)}: the split {name!r} must hold vertex ids in [0, {num_vertices}), got {ids[at]}"
                )
            ids = ids.astype(np.int64, copy=False)
            repeated = mask.numpy()[ids]
            ascending = np.sort(ids)
            if repeated.any() or (ascending[1:] == ascending[:-1]).any():
                repeated[np.setdiff1d(np.arange(len(ids)), np.unique(ids, return_index=True)[1])] = True
                at = int(repeated.argmax())
                raise ValueError(
                    f"{piece.where(at)}: the split {name!r} must hold each vertex id once, got {ids[at]} again; if the file has a flag per vertex, write the "
                    "ids of the flagged vertices (numpy.flatnonzero)"
                )
            mask[torch.from_numpy(ids)] = True
        first += len(values)
        progress.reach(piece.done)
    if split.is_mask and first != num_vertices:
        raise ValueError(
            f"{piece.where(len(values))}: the mask of {name!r} must have {num_vertices} entries, but has {first}"
        )
    first, left_out, in_split = 0, 0, int(mask.sum())
    for y in labels.pieces(max(1, (budget.working - num_vertices) // _COPIES)) if labels is not None else ():
        unlabelled = is_unlabelled(y.values)
        piece_of_mask = mask[first : first + len(unlabelled)]
        left_out += int((piece_of_mask & unlabelled).sum())
        piece_of_mask &= ~unlabelled
        first += len(unlabelled)
    warn_of_unlabelled(
        left_out, in_split, f"the split {name!r}", "To keep them, set the mask after load_dataset.", stacklevel=7
    )
    with written(path) as file:
        writer = ArrayWriter(file, torch.bool, ())
        writer.write(mask)
        return writer.finish()
