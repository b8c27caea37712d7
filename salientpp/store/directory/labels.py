"""Labels of vertices: the number of classes, and -1 where a vertex is unlabelled."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from salientpp.graph.mapped import releaser

#: Labels are looked at in pieces of this many.
_PIECE = 2**20


def num_classes_of(labels: Tensor | None) -> int:
    """The number of classes of labels [N, ...], as ``num_classes`` of PyG's datasets.

    One label per vertex: one more than the largest integer, or the number of different reals. Several: their number. 0 without labels. NaN is no class.
    """
    if labels is None or labels.dtype.is_complex or labels.dim() == 0:
        return 0
    if labels.shape[1:].numel() != 1:
        return labels.size(-1)
    if labels.dtype.is_floating_point:
        values = labels.flatten().to(torch.float64)
        return values[~values.isnan()].unique().numel()
    if labels.numel() == 0:
        return 0
    return max(0, int(labels.to(torch.int64).max()) + 1)  # not all integer types have a largest entry


def marks_unlabelled(labels: Iterable[Tensor]) -> bool:
    """Whether -1 among the labels of all vertices, in pieces of any shape, marks an unlabelled one.

    This holds where labels are classes: integers, none below -1, and 0 among them. Labels of -1 and 1, temperatures and other numbers are values.
    """
    has_minus_one = has_zero = False
    for piece in labels:
        if not piece.dtype.is_signed or piece.dtype.is_floating_point or piece.dtype.is_complex:
            return False
        if not piece.numel():
            continue
        least = int(piece.min())
        if least < -1:
            return False
        has_minus_one |= least == -1
        has_zero |= least == 0 or bool((piece == 0).any())
    return has_minus_one and has_zero


def is_unlabelled(labels: Tensor) -> Tensor:
    """bool [n]: the label is -1, or every one of several is. For labels of which :func:`marks_unlabelled` is true."""
    unlabelled = labels == -1
    return unlabelled if unlabelled.dim() == 1 else unlabelled.flatten(1).all(dim=1)


def warn_of_unlabelled(number: int, total: int, split: str, remedy: str, stacklevel: int) -> None:
    """Warn that so many vertices of a split are left out, if there are any."""
    if number:
        warnings.warn(
            f"{split}: {number} of {total} vertices are left out, since their label y is -1, which means unlabelled. {remedy}",
            UserWarning,
            stacklevel=stacklevel,
        )


def in_pieces(labels: Tensor) -> Iterator[Tensor]:
    """Labels in pieces. A mapped file is not held."""
    release = releaser(labels)
    for piece in labels.split(max(1, _PIECE // max(1, labels[:1].numel()))):
        yield piece
        release()
