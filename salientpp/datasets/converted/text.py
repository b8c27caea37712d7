"""Reads tables of numbers from text. Errors name the line.

Spaces, tabs, commas or semicolons separate numbers. A line that begins with ``#`` or ``%`` is a comment. Files that end in .gz are decompressed while
they are read.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from salientpp.datasets.arrays import check_file, unreadable
from salientpp.datasets.converted.column_names import UNKNOWN, Ends, end_of, ends_of
from salientpp.datasets.converted.pieces import EdgePiece, EdgeSource, RowPiece, Rows, counted, first_row

_SEPARATORS = bytes.maketrans(b",;\t\r", b"    ")
_COMMENTS = (b"#", b"%")
#: Bytes of memory for each byte of text while it is parsed: the text, temporaries of splitting it, and an int64 per token.
_BYTES_PER_BYTE = 16
_LEAST_BLOCK = 2**12
#: Number of bytes at the beginning of a file that are searched for a header.
_HEAD_BYTES = 2**16
#: Advice in the error about letters where integers were expected.
_ADVICE = (
    ", as in skip=1 for a header, with source=NAME,target=NAME if there are other columns. Keys that are text need numbers, "
    "such as those of pandas.factorize"
)


def tables(path: Path, most_bytes: int, dtype: type, columns: int | None, skip: int = 0) -> Iterator[RowPiece]:
    """Reads a text file. Yields its numbers in pieces of whole lines, int64 or float64 [lines, columns]. ``done`` counts bytes of the file.

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
            block = block if unpacked else _without_mark(path, block)
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
    """Parses whole lines of a file. Returns None if they hold no numbers.

    Args:
        line: number of the first line in the file, for errors.
        done: bytes of the file that are read after these lines.
        skip: number of lines at the beginning of the file to leave out.
    """
    if line > skip and not any(mark in text for mark in _COMMENTS):
        values = _numbers(text, dtype, columns)
        if values is not None:
            return RowPiece(values, counted(f"{path}, line ", line), done)
    # The text has comments, empty lines or mistakes.
    lines = text.split(b"\n")
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
        shown = _shown(lines[kept[good]])
        if re.search(r"\d{19}|\d[eE]\+?\d{3}", shown):
            wanted += " in [-2^63, 2^63)" if dtype is int else " that float64 can hold"
        raise ValueError(
            f"{path}, line {line + kept[good]}: expected {wanted}, got {shown!r}; correct the line, mark it as a comment with #, or leave out the first lines "
            f"with skip={_ADVICE if dtype is int and re.search('[A-Za-z]', shown) else ''}"
        )
    numbers = [line + at for at in (*kept, kept[-1] + 1)]
    return RowPiece(values, lambda row: f"{path}, line {numbers[row]}", done)


def _numbers(text: bytes, dtype: type, columns: int | None) -> Tensor | None:
    """Returns the numbers of a text, [lines, columns], or None unless every line has exactly ``columns`` numbers."""
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
    if values.size != begins.size or _overflows(letters, begins, values):
        return None
    return torch.from_numpy(values.reshape(-1, columns))


def _overflows(letters: np.ndarray, begins: np.ndarray, values: np.ndarray) -> bool:
    """True if a number of the text is too large for its dtype.

    numpy reads such a number as the largest int64, whatever its sign, or as infinity. So each of these values is compared with the text.
    """
    suspects = values == np.iinfo(np.int64).max if values.dtype.kind == "i" else np.isinf(values)
    for at in np.flatnonzero(suspects).tolist():
        token = letters[begins[at] : begins[at] + 64].tobytes().split(maxsplit=1)[0].decode("latin-1")
        is_same = int(token) == int(values[at]) if values.dtype.kind == "i" else token.strip("+-").isalpha()
        if not is_same:
            return True
    return False


def _without_mark(path: Path, block: bytes) -> bytes:
    """Removes UTF-8's byte order mark from the beginning of a file. Raises ValueError for the mark of UTF-16 or UTF-32."""
    if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        raise ValueError(
            f"{path}, line 1: the file begins with the byte order mark of UTF-16 or UTF-32; save it as UTF-8"
        )
    return block.removeprefix(codecs.BOM_UTF8)


def text_edges(paths: Sequence[Path], skip: int | None = 0, ends: Ends = UNKNOWN, name: str = "") -> EdgeSource:
    """Returns the edges of text with two integers a line: source, then target, unless a header names the target first. An unclear header is refused.

    ``skip`` is the number of first lines to leave out; None finds a header that names the two ends. ``name`` is the user's name of the files, for errors.
    """
    sizes, heads = _sizes_of(paths), _heads_of(paths, skip or 0)
    skips = _headers_of(paths, heads, ends, name) if skip is None else [skip] * len(paths)
    steps = [-1 if _is_reversed(path, head, lines, ends) else 1 for path, head, lines in zip(paths, heads, skips)]

    def pieces(most: int) -> Iterator[EdgePiece]:
        # A line has four bytes or more.
        for number, table in _tables_of(paths, sizes, 4 * most * _BYTES_PER_BYTE, int, 2, skips):
            source, target = table.values.numpy().T[:: steps[number]]
            yield EdgePiece(source, target, table.where, table.done)

    return EdgeSource(pieces, sum(sizes), unit="bytes")


def text_rows(paths: Sequence[Path], dtype: type, num_rows: int | None = None, skip: int = 0) -> Rows:
    """Returns rows of numbers, one row a line: int64, or float32 if ``dtype`` is float."""
    sizes = _sizes_of(paths)
    stored = torch.int64 if dtype is int else torch.float32
    _heads_of(paths, skip)

    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        for _, table in _tables_of(paths, sizes, most_bytes, dtype, None, [skip] * len(paths)):
            values = table.values.to(stored)
            if stored.is_floating_point:
                lost = values.isinf() & table.values.isfinite()
                if bool(lost.any()):
                    raise ValueError(
                        f"{table.where(first_row(lost))}: {float(table.values[lost][0]):g} is too large for float32, as which text is stored; save the "
                        "rows as float64 in an .npy file, or correct the number"
                    )
            yield RowPiece(values, table.where, table.done)

    return Rows(pieces, sum(sizes), num_rows, "bytes")


def _tables_of(
    paths: Sequence[Path], sizes: Sequence[int], most_bytes: int, dtype: type, columns: int | None, skips: Sequence[int]
) -> Iterator[tuple[int, RowPiece]]:
    """Reads the files one after another. Yields (index of the file, piece). ``done`` counts bytes over all files. ValueError if no file has numbers."""
    is_empty = True
    for number, (path, before) in enumerate(zip(paths, accumulate(sizes, initial=0))):
        for table in tables(path, most_bytes, dtype, columns, skips[number]):
            is_empty, columns = False, table.values.shape[1]
            yield number, replace(table, done=before + table.done)
    if is_empty:
        raise _nothing_in(paths, max(skips))


def _nothing_in(paths: Sequence[Path], skip: int) -> ValueError:
    files = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more files"
    after = f" after the first {skip} lines, which are left out" if skip else ""
    return ValueError(
        f"{files}: expected lines of numbers, got none{after}; give files with numbers, or leave them out"
    )


def _heads_of(paths: Sequence[Path], skip: int) -> list[list[bytes]]:
    """Returns the first lines of each file, after a check of their separators and of ``skip``.

    Raises:
        ValueError: a line mixes separators, as with decimal commas. Or ``skip`` would leave out numbers of some files,
            but not of the first.
    """
    heads = [_head(path) for path in paths]
    for path, head in zip(paths, heads):
        first = next((at for at, line in enumerate(head) if at >= skip and _has_text(line)), None)
        fields = [] if first is None else re.split(rb"[,;]", head[first])
        is_mixed = first is not None and b"," in head[first] and b";" in head[first]
        if first is not None and (is_mixed or (len(fields) > 1 and any(len(each.split()) > 1 for each in fields))):
            raise ValueError(
                f"{path}, line {first + 1}: expected one separator between numbers, got {_shown(head[first])!r} with several; if its commas are decimal "
                "commas, write them as points"
            )
    are_numbers = [any(_is_numbers(line) for line in head[:skip]) for head in heads]
    if any(are_numbers) and not are_numbers[0]:
        raise ValueError(
            f"{paths[are_numbers.index(True)]}: skip={skip} would skip numbers at the start of this file, but none in {paths[0]}; give all files a "
            "header of as many lines, or give none a header and leave skip out"
        )
    return heads


def _headers_of(paths: Sequence[Path], heads: Sequence[list[bytes]], ends: Ends, name: str) -> list[int]:
    """Returns the number of lines to skip in each file: up to the end of its header, 0 without one.

    Raises:
        ValueError: a header does not name the two ends, or only some of the files have a header.
    """
    found = [_header_of(path, head, ends, name) for path, head in zip(paths, heads)]
    of_text = [(lines, path) for lines, path in zip(found, paths) if lines is not None]
    if of_text and min(of_text)[0] == 0 < max(of_text)[0]:
        raise ValueError(
            f"{min(of_text)[1]} begins with numbers, but {max(of_text)[1]} has a header; give the header to all files or to none"
        )
    return [lines or 0 for lines in found]


def _header_of(path: Path, head: list[bytes], ends: Ends, name: str) -> int | None:
    """Returns the number of lines up to the end of the header of a file of edges, 0 without a header, or None if the file holds no text.

    A line of numbers is never a header, so that no edge is left out.
    """
    texts = [at for at, line in enumerate(head) if _has_text(line)]
    if not texts:
        return None
    first, names = texts[0], _names_in(head[texts[0]])
    if _is_numbers(" ".join(names).encode()):
        return 0
    if ends.named is not None:
        if any(sorted(_names_in(line)) == sorted(ends.named) for line in head[:first]):  # a comment has the names
            return 0
        ends_of(names, f"{path}, line {first + 1}", ends)
        return first + 1
    # With digits, as in v1,u2, the words may be ids of vertices.
    if len(names) == 2 and {end_of(one) for one in names} == {0, 1} and not re.search(r"\d", "".join(names)):
        return first + 1
    is_followed = len(texts) > 1 and _is_numbers(head[texts[1]])
    if len({*names}) == len(names) == 2 and _are_names(names) and is_followed:
        raise ValueError(
            f"{path}, line {first + 1} looks like a header ({', '.join(names)}); write {name},source={names[0]},target={names[1]} if the edges lead "
            f"from {names[0]} to {names[1]}, else exchange the two names"
        )
    return 0


def _are_names(words: Sequence[str]) -> bool:
    return all(re.match(r"[^\W\d]|_|:", word) for word in words)


def _head(path: Path) -> list[bytes]:
    # Reading the file will meet an error again, and say where.
    with (
        contextlib.suppress(OSError, EOFError, zlib.error),
        gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file,
    ):
        return file.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8).split(b"\n")
    return []


def _has_text(line: bytes) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(_COMMENTS)


def _is_numbers(line: bytes) -> bool:
    return _has_text(line) and _numbers(line.rstrip(b"\r"), float, None) is not None


def _shown(line: bytes) -> str:
    return line.rstrip(b"\r")[:80].decode(errors="backslashreplace")


def _is_reversed(path: Path, lines: list[bytes], skip: int, ends: Ends) -> bool:
    """True if the header of a file of edges names the target first. ValueError if its names do not tell the ends apart.

    The header is the last of the lines that are skipped. A skipped line or a comment before the edges also counts if it names a target, then a source.
    """
    before = lines[:skip]
    before += takewhile(lambda line: not _has_text(line), lines[skip:])
    tables = [_names_in(line) for line in before]
    if ends.named is not None:
        chosen = [names for names in tables if sorted(names) == sorted(ends.named)] or tables[:1] or [[]]
        return ends_of(chosen[0], str(path), ends)[0] != chosen[0][0]
    if 0 < skip <= len(lines) and not lines[skip - 1].lstrip().startswith(_COMMENTS):
        names = tables[skip - 1]
        if len(names) == 2 and _are_names(names):
            return ends_of(names, f"{path}, line {skip}", ends)[0] != names[0]
    return any([end_of(name) for name in names] == [1, 0] for names in tables)


def _names_in(line: bytes) -> list[str]:
    """Returns the words of a header or comment, without quotes."""
    words = re.split(r"[\s,;]+", line.decode(errors="replace").strip("#% \t\r"))
    return [word.strip("\"'") for word in words]


def _sizes_of(paths: Sequence[Path]) -> list[int]:
    for path in paths:
        check_file(path)
    return [os.stat(path).st_size for path in paths]
