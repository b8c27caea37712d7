"""How do sorted edges become the neighbour lists of a relation?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from salientpp.datasets.converted.buckets import sources_of, targets_of
from salientpp.datasets.converted.files import ArrayWriter, written
from salientpp.progress import Progress

#: Offsets are written so many at a time.
_OFFSETS_AT_ONCE = 2**17


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
    numpy_dtype = np.dtype(np.int32 if dtype == torch.int32 else np.int64)
    with written(indptr_path) as indptr_file, written(indices_path) as indices_file:
        indptr, indices = ArrayWriter(indptr_file, torch.int64, ()), ArrayWriter(indices_file, dtype, ())

        def offsets_up_to(target: int, targets: np.ndarray, before: int) -> None:
            """Where the lists up to this vertex begin; the edges of ``targets`` come after ``before`` others."""
            while indptr.num_rows <= target:
                vertices = np.arange(indptr.num_rows, min(target + 1, indptr.num_rows + _OFFSETS_AT_ONCE))
                indptr.write(before + np.searchsorted(targets, vertices).astype(np.int64))

        done = 0
        for word in words:
            targets = targets_of(word)
            offsets_up_to(int(targets[-1]), targets, done)
            indices.write(sources_of(word, numpy_dtype))
            done += word.size
            progress.reach(done)
        offsets_up_to(num_targets, np.empty(0, dtype=np.int64), done)
        return indptr.finish(), indices.finish()
