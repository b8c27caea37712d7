"""Sorts edges without columns, which memory does not hold: pairs of vertex numbers that take one word each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from salientpp.datasets.converted.buckets import (
    MOST_VERTICES,
    SORT_BYTES,
    SOURCE_BITS,
    SPREAD_BYTES,
    in_order,
    pair_words,
    spread,
)
from salientpp.datasets.tabular.rows import gathered

if TYPE_CHECKING:
    import pyarrow as pa

#: Names of the ends, as columns of batches.
_ENDS = ("source", "target")

#: Words of a run that belong to one bucket, on average. Shorter pieces would be read slowly.
_WORDS_OF_A_BUCKET = 2**12


def sorted_pairs(
    batches: Iterable[pa.RecordBatch], num_targets: int, scratch: Path, working: int
) -> Iterator[pa.RecordBatch]:
    """Yields edges in ascending order of their targets, then sources. Both are below 2^32.

    Args:
        batches: rows with the columns ``source`` and ``target``, int64, in any order.
        num_targets: number of vertices that may be targets.
        scratch: folder for a file.
        working: bytes of memory for arrays.
    """
    import pyarrow as pa

    at_once = max(1, working // SPREAD_BYTES)
    schema = pa.schema([(name, pa.int64()) for name in _ENDS])
    together = gathered((batch.select(list(_ENDS)) for batch in batches), schema, at_once * 16)
    words = (pair_words(*(batch.column(name).to_numpy() for name in _ENDS)) for batch in together)
    num_buckets = max(1, at_once // _WORDS_OF_A_BUCKET)
    runs = spread(words, scratch / "pairs.runs", 0, max(1, num_targets) << SOURCE_BITS, num_buckets, 0, to_disk=False)
    for word in in_order(runs, max(1, working // SORT_BYTES), "source", scratch):
        source = word & np.uint64(MOST_VERTICES - 1)
        word >>= np.uint64(SOURCE_BITS)  # in place, since arrays of a batch take much of the memory
        yield pa.RecordBatch.from_arrays([pa.array(end.view(np.int64)) for end in (source, word)], schema=schema)
    runs.path.unlink()
