"""The partition book: part p owns the contiguous range ``[offsets[p], offsets[p + 1])`` of global ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp.ids import check_range


@dataclass(frozen=True, eq=False)
class PartitionBook:
    """The ranges of global ids that K parts own.

    Attributes:
        offsets: int64 [K + 1], non-decreasing from 0 to N. Equal neighbours make an empty part.
    """

    offsets: Tensor

    def __post_init__(self) -> None:
        offsets = torch.as_tensor(self.offsets, dtype=torch.int64, device="cpu")
        ends = offsets.tolist()
        if offsets.dim() != 1 or len(ends) < 2 or ends[0] != 0 or ends != sorted(ends):
            raise ValueError(f"offsets must run from 0 to N without decreasing, for K >= 1 parts, got {ends}")
        object.__setattr__(self, "offsets", offsets)

    @property
    def num_parts(self) -> int:
        return self.offsets.numel() - 1

    @property
    def num_vertices(self) -> int:
        return int(self.offsets[-1])

    def range_of(self, part_id: int) -> tuple[int, int]:
        """Returns the first and one past the last global id of a part."""
        if not 0 <= part_id < self.num_parts:
            raise ValueError(f"part_id must be in [0, {self.num_parts}), got {part_id}")
        return int(self.offsets[part_id]), int(self.offsets[part_id + 1])

    def size_of(self, part_id: int) -> int:
        begin, end = self.range_of(part_id)
        return end - begin

    def owner(self, global_id: Tensor) -> Tensor:
        """Returns the parts that own global ids, int64 [n] for int64 [n]. ValueError if an id is not in [0, N)."""
        check_range(global_id.flatten(), self.num_vertices, "global ids must be")
        return torch.searchsorted(self.offsets, global_id, right=True) - 1

    @classmethod
    def trivial(cls, num_vertices: int) -> PartitionBook:
        """Returns a book with one part that owns everything."""
        return cls(torch.tensor([0, num_vertices], device="cpu"))
