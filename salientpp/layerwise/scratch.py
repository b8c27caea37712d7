"""Keeps rows of layers in files, and counts what a layer reads from them in either of two orders.

A file has no name, so the system frees its space when the last tensor over it is gone, or when the process ends for any reason. Its space is reserved when it
is made: a full disk raises an error then, and not while rows are written.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from salientpp.files import what_to_do
from salientpp.layerwise.products import Product

#: Default limit on the bytes of sums and blocks of rows, if rows are in files.
MEMORY = 2**30

#: Number of batches in which pages are counted.
_COUNTED_BATCHES = 64


def mapped_rows(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor whose memory is a new mapped file in ``folder``. The file has no name.

    Raises:
        OSError: the file cannot be made, or the disk has no room for it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)  # the tensor keeps the map alive
    except OSError as error:
        raise OSError(
            error.errno,
            f"{num_bytes:,} bytes for rows of a layer cannot be reserved in {folder} ({error.strerror}); "
            + what_to_do(error, "choose another folder as scratch="),
        ) from error
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


@dataclass(frozen=True)
class Reads:
    """Bytes that one layer reads in each order, if no page stays in memory until its next use.

    Attributes:
        pushed: bytes if it visits sources in order. Each group of targets reads all rows once, and each block of rows reads the edges into the group once.
        pulled: bytes if it visits targets in order. Each batch reads every page that holds a row of one of its sources, and every remote row.
    """

    pushed: int
    pulled: int


def count_reads(product: Product) -> Reads:
    """Counts the bytes that a layer reads in each order, to choose the cheaper one. For :attr:`Reads.pulled` it counts pages in up to 64 batches."""
    places, ranges, width, sent = product.places, product.ranges, product.row_bytes, product.sent_bytes
    number = len(product.groups)
    blocks = product.num_blocks
    entry = places.place.dtype.itemsize
    edges = sum(int(places.indptr[last] - places.indptr[first]) for first, last in ranges)
    pushed = number * (places.num_own + places.halo.numel()) * sent + blocks * edges * entry
    if sent != width:
        pushed += places.num_own * width  # the messages are made first
    counted = ranges[:: max(1, math.ceil(len(ranges) / _COUNTED_BATCHES))]
    pulled, seen = edges * entry, 0
    of_counted = 0
    for first, last in counted:
        source = places.into(first, last)[1].to(torch.int64)
        seen += last - first
        remote = source[source >= places.num_own].unique().numel()
        of_counted += remote * width + _pages(source[source < places.num_own], width) * mmap.PAGESIZE
    total = sum(last - first for first, last in ranges)
    return Reads(pushed, pulled + of_counted * total // max(1, seen))


def _pages(rows: Tensor, width: int) -> int:
    """Estimates the number of pages under some rows of ``width`` bytes: the distinct pages of their first bytes, times the pages of a row."""
    first = rows * width // mmap.PAGESIZE
    return first.unique().numel() * max(1, width // mmap.PAGESIZE)
