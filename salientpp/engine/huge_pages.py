"""Ask for large pages for tensors that batches gather rows from."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from salientpp.ops import use_huge_pages
from salientpp.store.narrow import EncodedRows, NarrowRows
from salientpp.store.rows import RowSource, TensorRows

#: Rows of less than this are gathered mostly from caches, where the size of a page does not matter.
_LARGE_BYTES = 64 * 2**20


def ask_for_huge_pages(sources: Iterable[RowSource]) -> None:
    """In the background: it takes seconds for gigabytes, and batches need not wait for it."""
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
