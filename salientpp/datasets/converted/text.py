"""Reads tables of numbers from text. Errors name the line.

Spaces, tabs, commas or semicolons separate numbers. A line that begins with ``#`` or ``%`` is a comment. Files that end in .gz are decompressed while
they are read.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from salientpp.datasets.arrays import check_file, unreadable
from salientpp.datasets.converted.pieces import EdgePiece, Edges, RowPiece, Rows, counted

_SEPARATORS = bytes.maketrans(b",;\t\r", b"    ")
_COMMENTS = (b"#", b"%")
#: Bytes of memory for each byte of text while it is parsed: the text, temporaries of splitting it, and an int64 per token.
_BYTES_PER_BYTE = 16
_LEAST_BLOCK = 2**12


def tables(path: Path, most_bytes: int, dtype: type, columns: int | None, skip: int = 0) -> Iterator[RowPiece]:
    """Yields a file in pieces of whole lines, int64 or float64 [lines, columns]. ``done`` counts bytes of the file.

    A piece takes at most ``most_bytes`` of memory. A line has ``columns`` numbers; if None, the first line decides. The first ``skip`` lines are left
    out. ValueError names the first wrong line, or the place where a compressed stream breaks off.
    """
    check_file(path)
    block_bytes = max(_LEAST_BLOCK, most_bytes // _BYTES_PER_BYTE)
    with path.open("rb") as raw, contextlib.ExitStack() as stack:
        file = stack.enter_context(gzip.open(raw)) if path.suffix == ".gz" else raw
        line, rest, unpacked = 1, b"", 0
        while True:
            try:
                block = file.read(block_bytes)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(
                    f"{path} is damaged or ends in the middle, after line {line} and {unpacked} bytes unpacked ({error}); copy it again"
                ) from None
            except OSError as error:
                raise unreadable(path, error) from error
            unpacked += len(block)
            whole = rest + block
            cut = whole.rfind(b"\n") + 1 if block else len(whole)
            if not cut and block:
                rest = whole
                if len(rest) > 64 * block_bytes:
                    raise ValueError(
                        f"{path}, line {line}: longer than {len(rest):,} bytes; if this is correct, give more memory"
                    )
                continue
            text, rest = whole[:cut], whole[cut:]
            del whole
            number = text.count(b"\n") + (bool(text) and not text.endswith(b"\n"))
            table = _parse(path, text, line, raw.tell(), dtype, columns, skip)
            if table is not None:
                columns = table.values.shape[1]
                yield table
            line += number
            if not block:
                return


def _parse(
    path: Path, text: bytes, line: int, done: int, dtype: type, columns: int | None, skip: int
) -> RowPiece | None:
    """Parses whole lines. The first has the number ``line``."""
    if line > skip and not any(mark in text for mark in _COMMENTS):
        values = _numbers(text, dtype, columns)
        if values is not None:
            return RowPiece(values, counted(f"{path}, line ", line), done)
    # The text has comments, empty lines or mistakes.
    lines = text.splitlines()
    stripped = [one.translate(_SEPARATORS).strip() for one in lines]
    kept = [at for at, one in enumerate(stripped) if line + at > skip and one and not one.startswith(_COMMENTS)]
    if not kept:
        return None
    columns = columns or len(stripped[kept[0]].split())

    def read(first: int, last: int) -> Tensor | None:
        return _numbers(b"\n".join(stripped[at] for at in kept[first:last]), dtype, columns)

    values = read(0, len(kept))
    if values is None:
        good, bad = 0, len(kept)  # all lines before `good` are correct; a line before `bad` is not
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (good, middle) if read(good, middle) is None else (middle, bad)
        wanted = f"{columns} {'integers' if dtype is int else 'numbers'}"
        shown = lines[kept[good]][:80].decode(errors="backslashreplace")
        raise ValueError(
            f"{path}, line {line + kept[good]}: expected {wanted}, got {shown!r}; correct the line, mark it as a comment with #, or leave out the first lines "
            "with skip="
        )
    numbers = [line + at for at in (*kept, kept[-1] + 1)]
    return RowPiece(values, lambda row: f"{path}, line {numbers[row]}", done)


def _numbers(text: bytes, dtype: type, columns: int | None) -> Tensor | None:
    """Returns [lines, columns], or None unless every line has ``columns`` numbers and nothing else."""
    letters = np.frombuffer(text.translate(_SEPARATORS), np.uint8)
    is_token = letters > ord(" ")
    is_begin = is_token.copy()
    is_begin[1:] &= ~is_token[:-1]
    begins = np.flatnonzero(is_begin)
    breaks = np.flatnonzero(letters == ord("\n"))
    if not text.endswith(b"\n"):
        breaks = np.append(breaks, len(text))
    columns = columns or (int(np.searchsorted(begins, breaks[0])) if len(breaks) else 0)
    if not columns or begins.size != columns * breaks.size:
        return None
    if (begins[columns - 1 :: columns] > breaks).any() or (begins[columns::columns] < breaks[:-1]).any():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy before 2.3 only warns of text that is no number, and stops there
            values = np.fromstring(letters.tobytes(), dtype=np.int64 if dtype is int else np.float64, sep=" ")
    except ValueError:
        return None
    return torch.from_numpy(values.reshape(-1, columns)) if values.size == begins.size else None


def text_edges(paths: Sequence[Path], skip: int = 0) -> Edges:
    """Returns the edges of text with two integers a line: source and target."""
    sizes = _sizes_of(paths)

    def pieces(most: int) -> Iterator[EdgePiece]:
        for path, before in zip(paths, accumulate(sizes, initial=0)):
            # A line has four bytes or more.
            for table in tables(path, 4 * most * _BYTES_PER_BYTE, int, 2, skip):
                source, target = table.values.numpy().T
                yield EdgePiece(source, target, table.where, before + table.done)

    return Edges(pieces, sum(sizes), unit="bytes")


def text_rows(paths: Sequence[Path], dtype: type, num_rows: int | None = None, skip: int = 0) -> Rows:
    """Returns rows of numbers, one row a line: int64, or float32 if ``dtype`` is float."""
    sizes = _sizes_of(paths)
    stored = torch.int64 if dtype is int else torch.float32

    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        columns = None
        for path, before in zip(paths, accumulate(sizes, initial=0)):
            for table in tables(path, most_bytes, dtype, columns, skip):
                columns = table.values.shape[1]
                yield RowPiece(table.values.to(stored), table.where, before + table.done)
        if columns is None:
            empty = torch.empty(0, 1, dtype=stored, device="cpu")
            yield RowPiece(empty, lambda row: f"{paths[-1]}, line 1", sum(sizes))

    return Rows(pieces, sum(sizes), num_rows, "bytes")


def _sizes_of(paths: Sequence[Path]) -> list[int]:
    for path in paths:
        check_file(path)
    return [os.stat(path).st_size for path in paths]
