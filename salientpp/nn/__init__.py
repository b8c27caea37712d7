"""Layers of PyG's that know what the loader knows."""

from salientpp.nn.merge import merge_partial

__all__ = ["merge_partial"]
