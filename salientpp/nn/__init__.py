"""PyG models adapted to a loader's batches: trimming, and merging of partial sums."""

from salientpp.nn.merge import merge_partial
from salientpp.nn.trim import trim, untrim

__all__ = ["merge_partial", "trim", "untrim"]
