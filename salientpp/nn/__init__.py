"""PyG models adapted to a loader's batches: trimming, and merging of partial sums."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from salientpp.nn.merge import merge_partial
from salientpp.nn.trim import trim, untrim
from salientpp.suggestions import no_attribute as _no_attribute

__all__ = ["merge_partial", "trim", "untrim"]


if not _TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        raise _no_attribute(__name__, name, __all__)
