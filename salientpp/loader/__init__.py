"""Loaders that users iterate. They take PyG's arguments; the batches come from :mod:`salientpp.engine`."""
