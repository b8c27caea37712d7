"""Labels of vertices, read in pieces from arrays, text or tables, in the form that :func:`salientpp.datasets.load_dataset` gives them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from salientpp.datasets.arrays import form
from salientpp.datasets.converted.pieces import RowPiece, Rows


class Labels:
    """Labels [n] or [n, labels per vertex]; a single column becomes [n]. Integers become int64. Real numbers keep their dtype.

    Args:
        rows: the labels as they are stored.
        are_classes: real numbers stand for classes, as in the Open Graph Benchmark: NaN becomes -1 and all others int64.
    """

    def __init__(self, rows: Rows, are_classes: bool = False) -> None:
        self._rows, self._are_classes = rows, are_classes
        self.held_bytes = getattr(rows, "held_bytes", 0)
        self.num_rows, self.total, self.unit = rows.num_rows, rows.total, rows.unit

    def pieces(self, most_bytes: int) -> Iterator[RowPiece]:
        for piece in self._rows.pieces(most_bytes):
            yield RowPiece(self._read(piece), piece.where, piece.done)

    def _read(self, piece: RowPiece) -> Tensor:
        values = piece.values
        if values.dim() == 2 and values.size(1) == 1:
            values = values[:, 0]
        if values.is_floating_point():
            return self._classes(values, piece) if self._are_classes else values
        if values.dtype.is_complex or values.dtype == torch.bool:
            raise ValueError(f"{piece.where(0)}: y must hold integers or real numbers, got {form(values)}")
        if values.dtype == torch.uint64:
            too_large = values.view(torch.int64) < 0
            if bool(too_large.any()):
                at = _first_row(too_large)
                raise ValueError(f"{piece.where(at)}: y must hold numbers below 2^63, got a larger one")
        return values.to(torch.int64)

    @staticmethod
    def _classes(values: Tensor, piece: RowPiece) -> Tensor:
        values = values.nan_to_num(nan=-1.0)
        classes = values.to(torch.int64)
        wrong = classes != values
        if bool(wrong.any()):
            at = _first_row(wrong)
            raise ValueError(
                f"{piece.where(at)}: y must hold whole numbers (nan for an unlabelled vertex), got {float(values[wrong][0]):g}"
            )
        return classes


def _first_row(wrong: Tensor) -> int:
    """The first row in which an entry is true."""
    return int(wrong.reshape(len(wrong), -1).any(dim=1).nonzero()[0])
