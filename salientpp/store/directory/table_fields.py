"""Checks what a manifest says of the tables of PyTorch Frame."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from salientpp.store.directory.description import stored_dtype
from salientpp.store.frames import Frame, TablePiece


def check_frame(frame: Frame, where: str, name: str, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks the manifest's description of a table: its columns exist, and have the shapes that its tensors need."""
    parts = [(piece.stype, piece.key) for piece in frame.pieces]
    alone = {stype for stype, key in parts if key is None}
    if (
        name in attributes
        or len(set(parts)) != len(parts)
        or any(key is not None and stype in alone for stype, key in parts)
    ):
        raise ValueError(
            f"{where} must have another name than attributes, and one piece per stype and key, got {shown(parts)}"
        )
    widths = {stype: len(names) for stype, names in frame.names}
    if len(widths) != len(frame.names) or widths.keys() != {stype for stype, _ in parts if stype is not None}:
        raise ValueError(f"{where}.names must have every stype of the pieces once, got {shown([*widths])}")
    if len(set(frame.columns)) != len(frame.columns) or not attributes.keys() >= set(frame.columns):
        raise ValueError(f"{where}.pieces must name distinct attributes of the type, got {shown(frame.columns)}")
    for piece in frame.pieces:
        stored_dtype(piece.dtype, f"{where}.pieces")
        shapes = [attributes[column]["row_shape"] for column in piece.columns]
        if not _fits(piece, shapes, widths.get(piece.stype or "")):
            raise ValueError(
                f"{where}.pieces must fit the shapes of their columns and names, got {shown(piece.column)} with {shown(shapes)}"
            )


def _fits(piece: TablePiece, shapes: list[list[int]], width: int | None) -> bool:
    """True if columns with these row ``shapes`` can hold a tensor of a table.

    ``width`` is the number of table columns that the tensor must have. None: any number.
    """
    if piece.kind == "dense":
        return not piece.offset and (width is None or shapes[0][:1] == [width])
    if piece.kind == "ragged":
        lengths = shapes[1]
        return not piece.offset and len(shapes[0]) == 1 and len(lengths) == 1 and width in (None, lengths[0])
    offset = piece.offset
    ascends = offset[:1] == (0,) and all(first <= second for first, second in pairwise(offset))
    return ascends and shapes[0] == [offset[-1]] and width in (None, len(offset) - 1)


def shown(value: Any) -> str:
    """Returns a value of a manifest as ASCII text of limited length, for errors."""
    text = ascii(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
