"""Sorts edges by target on disk, since memory may not hold them, and writes them as neighbour lists.

An edge is a **word**, ``target * 2^32 + source``. A **bucket** is a range of words; all buckets have the same width. There are two passes:

1. The edges are read in pieces. Each piece is sorted by bucket and appended to a file as a **run**.
2. Buckets are read in ascending order, as many at a time as memory holds. The words of a bucket are collected from all runs, sorted and passed on.

A bucket that alone is too large for memory, such as the bucket of a hub, is spread again into narrower buckets.

Edges into a vertex keep the order in which they were read, as in :func:`salientpp.ops.csc_from_coo`, or their sources ascend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from salientpp.datasets.converted.files import ArrayWriter, written
from salientpp.datasets.converted.pieces import EdgePiece
from salientpp.partitioning.undirected import first_of_equals
from salientpp.progress import Progress
from salientpp.store.directory.files import numpy_dtype

#: Largest number of vertices of a type, since an id takes half of a word of 64 bits.
MOST_VERTICES = 2**32

#: Bits of a word that hold the source.
SOURCE_BITS = 32
_WORD = 8

#: Order of the edges into a vertex: as they were ``read``, by ``source``, or by source with each pair ``once``.
Order = Literal["read", "source", "once"]

#: Largest number of buckets. With more, the slices of a run would be too short to be read fast.
MOST_BUCKETS = 2**12

#: Bytes of memory per word: ``SPREAD_BYTES`` in the first pass, ``SORT_BYTES`` in the second. Both include the memory of readers.
SPREAD_BYTES, SORT_BYTES = 128, 56
#: Bytes of memory for each entry of ``Runs.ends``, with temporaries.
TABLE_BYTES = 24

#: Number of offsets written at a time.
_OFFSETS_AT_ONCE = 2**17


@dataclass(frozen=True)
class Runs:
    """File of edges that the first pass writes. It consists of runs, each sorted by bucket. The bucket of a word is ``(word - base) >> shift``."""

    path: Path
    ends: (
        np.ndarray
    )  # int64 [runs, B]: end of each bucket in each run, as a number of words from the beginning of the file
    base: int
    shift: int

    @property
    def sizes(self) -> np.ndarray:
        """Number of words in each bucket, int64 [B]."""
        return np.diff(self.ends.reshape(-1), prepend=0).reshape(self.ends.shape).sum(axis=0)

    def slices(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yields where each run has the words of buckets [first, last), as (begin, end).

        Both count words from the beginning of the file. Runs without such words are left out.
        """
        flat = self.ends.reshape(-1)
        for at in range(first, flat.size, self.ends.shape[1]):
            begin = int(flat[at - 1]) if at else 0
            end = int(flat[at + last - first - 1])
            if end > begin:
                yield begin, end


def edge_words(
    pieces: Iterable[EdgePiece],
    num_sources: int,
    num_targets: int,
    both_directions: bool,
    progress: Progress,
) -> Iterator[np.ndarray]:
    """Yields the edges as words, uint64 [n]. With ``both_directions`` each edge is followed by its inverse.

    Raises ValueError with the place of an id that is out of range.
    """
    for piece in pieces:
        _check_ids(piece, "source", piece.source, num_sources)
        _check_ids(piece, "target", piece.target, num_targets)
        count = piece.source.size
        word = np.empty(count * (1 + both_directions), dtype=np.uint64)
        pair_words(piece.source, piece.target, word[:: 1 + both_directions])
        if both_directions:
            pair_words(piece.target, piece.source, word[1::2])
        progress.reach(piece.done)
        yield word


def ascending(words: Iterable[np.ndarray], pieces_are: str) -> Iterator[np.ndarray]:
    """Yields the words of edges that need no sorting, without empty arrays. Raises ValueError, which begins with ``pieces_are``, unless targets ascend."""
    last, done = np.zeros(1, dtype=np.uint64), 0
    for word in words:
        if not word.size:
            continue
        target = word >> np.uint64(SOURCE_BITS)
        before = np.concatenate([last, target[:-1]])
        falls = target < before
        if falls.any():
            raise ValueError(
                f"{pieces_are} must ascend by target, but edge {done + int(falls.argmax())} has a smaller target than the one before it; sort the edges"
            )
        last, done = target[-1:], done + word.size
        yield word


def pair_words(source: np.ndarray, target: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Returns the word of each edge, uint64 [n]. ``source`` and ``target`` are integers [n] in [0, 2^32)."""
    word = np.empty(len(target), dtype=np.uint64) if out is None else out
    word[...] = target
    word <<= np.uint64(SOURCE_BITS)
    word |= source.astype(np.uint64)
    return word


def _check_ids(piece: EdgePiece, end: str, ids: np.ndarray, size: int) -> None:
    if not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < size):
        return
    at = int(((ids < 0) | (ids >= size)).argmax())
    raise ValueError(
        f"{piece.where(at)}: the {end} must be a vertex id in [0, {size}), got {int(ids[at])}; correct the edge or the number of vertices"
    )


def spread(
    words: Iterable[np.ndarray], path: Path, base: int, end: int, num_buckets: int, floor: int, to_disk: bool = True
) -> Runs:
    """Does the first pass: sorts each array of words by bucket and writes it to the file as one run.

    All words lie in [base, end). This range is divided into at most ``num_buckets`` buckets, each at least ``2**floor`` wide.
    """
    shift = floor
    while (end - 1 - base) >> shift >= min(num_buckets, MOST_BUCKETS):
        shift += 1
    num_buckets = max(1, ((end - 1 - base) >> shift) + 1)
    ends, done = [], 0
    with written(path, to_disk) as file:
        for word in words:
            bucket = ((word - np.uint64(base)) >> np.uint64(shift)).astype(np.uint16)
            order = np.argsort(bucket, kind="stable")  # a radix sort, since keys have 16 bits
            file.write(word[order])
            ends.append(np.cumsum(np.bincount(bucket, minlength=num_buckets)) + done)
            done = int(ends[-1][-1])
    return Runs(path, np.array(ends, dtype=np.int64).reshape(-1, num_buckets), base, shift)


def in_order(runs: Runs, capacity: int, order: Order, scratch: Path) -> Iterator[np.ndarray]:
    """Does the second pass: yields all words in the order of their targets, in uint64 arrays of at most ``capacity`` words.

    ``order`` applies to the edges into one vertex. ``scratch`` is a folder for buckets that are spread again.
    """
    sizes = runs.sizes
    floor = SOURCE_BITS if order == "read" else 0
    first, num_buckets = 0, sizes.size
    while first < num_buckets:
        last, count = first + 1, int(sizes[first])
        while last < num_buckets and count + int(sizes[last]) <= capacity:
            count += int(sizes[last])
            last += 1
        low = runs.base + (first << runs.shift)
        if count <= capacity:
            if count:
                yield _sorted(_read(runs, first, last, count), order)
        elif runs.shift > floor:
            path, end = scratch / f"{runs.shift}.runs", low + (1 << runs.shift)
            words = _chunks(runs, first, capacity)
            finer = spread(words, path, low, end, 1 + 4 * count // capacity, floor, to_disk=False)
            yield from in_order(finer, capacity, order, scratch)
            finer.path.unlink()
        elif order == "once":  # the bucket holds repeats of one word
            yield np.array([low], dtype=np.uint64)
        else:  # the bucket holds words of one target, which keep the order of the runs, or repeats of one word
            yield from _chunks(runs, first, capacity)
        first = last


def _read(runs: Runs, first: int, last: int, count: int) -> np.ndarray:
    words = np.empty(count, dtype=np.uint64)
    done = 0
    with runs.path.open("rb") as file:
        for begin, end in runs.slices(first, last):
            _fill(file, begin, words[done : done + end - begin], runs.path)
            done += end - begin
    return words


def _chunks(runs: Runs, bucket: int, most: int) -> Iterator[np.ndarray]:
    """Yields the words of a bucket that is too large for memory, ``most`` at a time, in the order of the runs."""
    words, done = np.empty(most, dtype=np.uint64), 0
    with runs.path.open("rb") as file:
        for begin, end in runs.slices(bucket, bucket + 1):
            while begin < end:
                count = min(most - done, end - begin)
                _fill(file, begin, words[done : done + count], runs.path)
                begin, done = begin + count, done + count
                if done == most:
                    yield words
                    words, done = np.empty(most, dtype=np.uint64), 0
    if done:
        yield words[:done]


def _fill(file: BufferedReader, begin: int, words: np.ndarray, path: Path) -> None:
    file.seek(begin * _WORD)
    done = file.readinto(words.data)
    if done < words.nbytes:
        raise ValueError(
            f"{path} ends at byte {begin * _WORD + done}, but was longer when it was written; remove it and start again"
        )


def _sorted(words: np.ndarray, order: Order) -> np.ndarray:
    if order != "read":
        words.sort()
        return words[first_of_equals(words)] if order == "once" else words
    target = words >> np.uint64(SOURCE_BITS)
    target -= target.min()
    # The low bits get the position, so keys are distinct and any sort is stable. Target and position are below 2^32.
    bits = np.uint64(words.size.bit_length())
    target <<= bits
    target |= np.arange(words.size, dtype=np.uint64)
    target.sort()
    target &= np.uint64((1 << int(bits)) - 1)
    return words[target.astype(np.int64, copy=False)]


def write_lists(
    words: Iterable[np.ndarray],
    num_sources: int,
    num_targets: int,
    indptr_path: Path,
    indices_path: Path,
    progress: Progress,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes words, which are sorted by target, as ``indptr`` int64 [N + 1] and ``indices`` [E]. Returns the descriptions of both arrays for the manifest."""
    dtype = torch.int32 if num_sources < 2**31 else torch.int64
    with written(indptr_path) as indptr_file, written(indices_path) as indices_file:
        indptr, indices = ArrayWriter(indptr_file, torch.int64, ()), ArrayWriter(indices_file, dtype, ())

        def offsets_up_to(target: int, targets: np.ndarray, before: int) -> None:
            """Appends to ``indptr`` the starts of the lists up to vertex ``target``. ``targets`` has the targets of the next edges, after ``before`` edges."""
            while indptr.num_rows <= target:
                vertices = np.arange(indptr.num_rows, min(target + 1, indptr.num_rows + _OFFSETS_AT_ONCE))
                indptr.write(before + np.searchsorted(targets, vertices).astype(np.int64))

        done = 0
        for word in words:
            targets = (word >> np.uint64(SOURCE_BITS)).astype(np.int64)
            offsets_up_to(int(targets[-1]), targets, done)
            indices.write((word & np.uint64(MOST_VERTICES - 1)).astype(numpy_dtype(dtype)))
            done += word.size
            progress.reach(done)
        offsets_up_to(num_targets, np.empty(0, dtype=np.int64), done)
        return indptr.finish(), indices.finish()
