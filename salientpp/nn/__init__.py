"""Models of PyG's that use what the loader knows."""

from salientpp.nn.merge import merge_partial
from salientpp.nn.trim import trim

__all__ = ["merge_partial", "trim"]
