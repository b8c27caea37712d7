"""Requests huge pages for large tensors, so that batches gather rows from them faster."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from salientpp.ops import use_huge_pages
from salientpp.store.narrow import EncodedRows, NarrowRows
from salientpp.store.rows import RowSource, TensorRows

#: Smaller tensors are gathered mostly from CPU caches, where the page size does not matter.
_LARGE_BYTES = 64 * 2**20


def ask_for_huge_pages(sources: Iterable[RowSource]) -> None:
    """Requests huge pages in a background thread. For gigabytes it takes seconds, and batches need not wait for it."""
    inner = [
        rows.wide if isinstance(rows, EncodedRows) else rows.encoded if isinstance(rows, NarrowRows) else rows
        for rows in sources
    ]
    large = [rows.tensor for rows in inner if isinstance(rows, TensorRows) and rows.nbytes >= _LARGE_BYTES]

    def ask() -> None:
        for tensor in large:
            use_huge_pages(tensor)

    if large:
        threading.Thread(target=ask, name="salientpp-pages", daemon=True).start()
