"""Loaders that users iterate: PyG's loaders on top of the engine."""
