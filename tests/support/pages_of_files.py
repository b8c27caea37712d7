"""Maps rows from files, and tells which mapped files count as memory of this process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def rows_in_file(rows: Tensor, path: Path) -> Tensor:
    """Writes rows to a file, and returns them as a memory map of it. An empty file cannot be mapped, so it gets a byte."""
    path.write_bytes(bytes(rows.view(torch.uint8).numpy()) or b"-")
    numbers = torch.from_file(str(path), size=max(1, rows.numel()), dtype=rows.dtype)
    return numbers[: rows.numel()].view(rows.shape)


def resident_bytes_of(path: Path) -> int:
    """Returns the bytes of a file's mappings that count as memory of this process."""
    found, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line[0].isupper():
            is_of_file = line.endswith(str(path))
        elif is_of_file and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found
