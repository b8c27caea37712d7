"""Counts the classes of labels, and finds vertices that the label -1 marks as unlabelled."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from salientpp.graph.mapped import releaser

#: Number of labels per piece.
_PIECE = 2**20


def num_classes_of(labels: Tensor | None) -> int:
    """Returns the number of classes of labels [N, ...], as ``num_classes`` of PyG's datasets.

    With one label per vertex: one more than the largest integer, or the number of distinct real values. With several labels per vertex: the number of
    labels that a vertex has. Without labels: 0. NaN is not a class.
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
    return max(0, int(labels.to(torch.int64).max()) + 1)  # torch has no max() for some integer types


def marks_unlabelled(labels: Iterable[Tensor]) -> bool:
    """True if the label -1 marks unlabelled vertices. ``labels`` yields all labels, in pieces of any shape.

    It does so if the labels are classes: integers, none below -1, with 0 and -1 among them. Labels of -1 and 1 are not classes.
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
    """Returns bool [n]: True for vertices whose labels are all -1. Call it only if :func:`marks_unlabelled` is true."""
    unlabelled = labels == -1
    return unlabelled if unlabelled.dim() == 1 else unlabelled.flatten(1).all(dim=1)


def warn_of_unlabelled(number: int, total: int, split: str, remedy: str, stacklevel: int) -> None:
    """Warns that ``number`` of a split's ``total`` vertices are left out, unless ``number`` is 0."""
    if number:
        warnings.warn(
            f"{split}: {number} of {total} vertices are left out, because their label y is -1, which means unlabelled. {remedy}",
            UserWarning,
            stacklevel=stacklevel,
        )


def in_pieces(labels: Tensor) -> Iterator[Tensor]:
    """Yields labels in pieces. The pages of a memory-mapped file are released after each piece."""
    release = releaser(labels)
    for piece in labels.split(max(1, _PIECE // max(1, labels[:1].numel()))):
        yield piece
        release()
