"""Sorts edges by target that do not fit into memory, and writes them as neighbour lists.

Two passes. An edge is a **word**, ``target * 2^32 + source``. The first pass reads the edges in pieces, sorts each by the bucket of its words (a bucket is a
range of words, all of one width) and appends it to a file, a **run**. The second reads bucket after bucket out of all runs, as many together as memory holds,
sorts and hands them on. A bucket that is too large by itself, of a hub, is spread once more into narrower ones.

Edges into a vertex keep the order in which they came, as :func:`salientpp.ops.csc_from_coo` keeps it; where each pair is wanted once, sources ascend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch

from salientpp.datasets.converted.files import ArrayWriter, written
from salientpp.datasets.converted.pieces import EdgePiece
from salientpp.partitioning.undirected import first_of_equals
from salientpp.progress import Progress
from salientpp.store.directory.files import numpy_dtype

#: Targets and sources share a word, half each.
MOST_VERTICES = 2**32

_SOURCE_BITS = 32
_WORD = 8
#: More buckets than this would make runs of slices too short to read.
MOST_BUCKETS = 2**12

#: Bytes of memory for each word of a piece that is being spread, and of a group that is being sorted, with what readers hold at the same time.
SPREAD_BYTES, SORT_BYTES = 128, 56
#: And for where a bucket of a run ends, with what is worked out of it.
TABLE_BYTES = 24

#: Offsets are written so many at a time.
_OFFSETS_AT_ONCE = 2**17


@dataclass(frozen=True)
class Runs:
    """A file of words, in runs of which each is sorted by bucket. A word's bucket is ``(word - base) >> shift``."""

    path: Path
    ends: np.ndarray  # int64 [runs, B], in words from the beginning of the file, where each bucket of each run ends
    base: int
    shift: int

    @property
    def sizes(self) -> np.ndarray:
        """int64 [B]: words in each bucket."""
        return np.diff(self.ends.reshape(-1), prepend=0).reshape(self.ends.shape).sum(axis=0)

    def slices(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """(begin, end) in words of buckets [first, last) in each run, in the order of runs."""
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
    """The edges as words, uint64 [n], each edge's opposite right behind it if asked for. ValueError names where an id is out of range."""
    for piece in pieces:
        _check_ids(piece, "source", piece.source, num_sources)
        _check_ids(piece, "target", piece.target, num_targets)
        count = piece.source.size
        word = np.empty(count * (1 + both_directions), dtype=np.uint64)
        _join(piece.target, piece.source, word[:: 1 + both_directions])
        if both_directions:
            _join(piece.source, piece.target, word[1::2])
        progress.reach(piece.done)
        yield word


def _join(target: np.ndarray, source: np.ndarray, out: np.ndarray) -> None:
    out[...] = target
    out <<= np.uint64(_SOURCE_BITS)
    out |= source.astype(np.uint64)


def _check_ids(piece: EdgePiece, end: str, ids: np.ndarray, size: int) -> None:
    if not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < size):
        return
    at = int(((ids < 0) | (ids >= size)).argmax())
    raise ValueError(
        f"{piece.where(at)}: the {end} must be a vertex id in [0, {size}), got {int(ids[at])}; mend the edge, or say how many vertices there are"
    )


def spread(
    words: Iterable[np.ndarray], path: Path, base: int, end: int, num_buckets: int, floor: int, to_disk: bool = True
) -> Runs:
    """Write words in [base, end) as runs of at most ``num_buckets`` buckets; a bucket is at least ``2**floor`` wide."""
    shift = floor
    while (end - 1 - base) >> shift >= min(num_buckets, MOST_BUCKETS):
        shift += 1
    num_buckets = max(1, ((end - 1 - base) >> shift) + 1)
    ends, done = [], 0
    with written(path, to_disk) as file:
        for word in words:
            bucket = ((word - np.uint64(base)) >> np.uint64(shift)).astype(np.uint16)
            order = np.argsort(bucket, kind="stable")  # of 16 bits it is a radix sort
            file.write(word[order])
            ends.append(np.cumsum(np.bincount(bucket, minlength=num_buckets)) + done)
            done = int(ends[-1][-1])
    return Runs(path, np.array(ends, dtype=np.int64).reshape(-1, num_buckets), base, shift)


def in_order(runs: Runs, capacity: int, unique: bool, scratch: Path) -> Iterator[np.ndarray]:
    """All words by target, uint64 arrays of at most ``capacity`` one after another.

    With ``unique`` they ascend, each once; else words of a target keep the order in which they came. ``scratch`` is a folder for buckets that are spread again.
    """
    sizes = runs.sizes
    floor = 0 if unique else _SOURCE_BITS
    first, num_buckets = 0, sizes.size
    while first < num_buckets:
        last, count = first + 1, int(sizes[first])
        while last < num_buckets and count + int(sizes[last]) <= capacity:
            count += int(sizes[last])
            last += 1
        low = runs.base + (first << runs.shift)
        if count <= capacity:
            if count:
                yield _sorted(_read(runs, first, last, count), unique)
        elif runs.shift > floor:
            path, end = scratch / f"{runs.shift}.runs", low + (1 << runs.shift)
            words = _chunks(runs, first, capacity)
            finer = spread(words, path, low, end, 1 + 4 * count // capacity, floor, to_disk=False)
            yield from in_order(finer, capacity, unique, scratch)
            finer.path.unlink()
        elif unique:  # one word, again and again
            yield np.array([low], dtype=np.uint64)
        else:  # one target, whose order is that of the runs
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
    """The words of one bucket in the order of the runs, so many at a time."""
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
            f"{path} ends at byte {begin * _WORD + done}, and was written longer; remove it, and begin again"
        )


def _sorted(words: np.ndarray, unique: bool) -> np.ndarray:
    if unique:
        words.sort()
        return words[first_of_equals(words)]
    target = words >> np.uint64(_SOURCE_BITS)
    target -= target.min()
    # The position below the target makes keys distinct, and any sort a stable one. Both are below 2^32.
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
    """Write ``indptr`` int64 [N + 1] and ``indices`` [E] of words by target; what a manifest says of each."""
    dtype = torch.int32 if num_sources < 2**31 else torch.int64
    with written(indptr_path) as indptr_file, written(indices_path) as indices_file:
        indptr, indices = ArrayWriter(indptr_file, torch.int64, ()), ArrayWriter(indices_file, dtype, ())

        def offsets_up_to(target: int, targets: np.ndarray, before: int) -> None:
            """Where the lists up to this vertex begin; the edges of ``targets`` come after ``before`` others."""
            while indptr.num_rows <= target:
                vertices = np.arange(indptr.num_rows, min(target + 1, indptr.num_rows + _OFFSETS_AT_ONCE))
                indptr.write(before + np.searchsorted(targets, vertices).astype(np.int64))

        done = 0
        for word in words:
            targets = (word >> np.uint64(_SOURCE_BITS)).astype(np.int64)
            offsets_up_to(int(targets[-1]), targets, done)
            indices.write((word & np.uint64(MOST_VERTICES - 1)).astype(numpy_dtype(dtype)))
            done += word.size
            progress.reach(done)
        offsets_up_to(num_targets, np.empty(0, dtype=np.int64), done)
        return indptr.finish(), indices.finish()
