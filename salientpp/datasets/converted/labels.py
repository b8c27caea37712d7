"""Converts the values of a source to labels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from salientpp.datasets.arrays import form
from salientpp.datasets.converted.pieces import RowPiece, Rows, first_row


def labels_of(rows: Rows, are_classes: bool = False) -> Rows:
    """Returns rows whose pieces `_read_labels` converts to labels while they are read."""
    return replace(
        rows,
        pieces=lambda most_bytes: (
            replace(piece, values=_read_labels(piece, are_classes)) for piece in rows.pieces(most_bytes)
        ),
    )


def _read_labels(piece: RowPiece, are_classes: bool) -> Tensor:
    """Returns labels [n] or [n, labels per vertex]; a single column becomes [n]. Integers become int64. Real numbers keep their dtype.

    With ``are_classes`` real numbers stand for classes, as in the Open Graph Benchmark. They become int64, and NaN becomes -1.
    """
    values = piece.values
    if values.dim() == 2 and values.size(1) == 1:
        values = values[:, 0]
    if values.is_floating_point() and not are_classes:
        return values
    if values.is_floating_point():
        values = values.nan_to_num(nan=-1.0)
        classes = values.to(torch.int64)
        wrong = classes != values
        if bool(wrong.any()):
            raise ValueError(
                f"{piece.where(first_row(wrong))}: y must hold whole numbers (nan for an unlabelled vertex), got {float(values[wrong][0]):g}"
            )
        return classes
    if values.dtype.is_complex or values.dtype == torch.bool:
        raise ValueError(f"{piece.where(0)}: y must hold integers or real numbers, got {form(values)}")
    if values.dtype == torch.uint64:
        too_large = values.view(torch.int64) < 0
        if bool(too_large.any()):
            raise ValueError(f"{piece.where(first_row(too_large))}: y must hold numbers below 2^63, got a larger one")
    return values.to(torch.int64)
