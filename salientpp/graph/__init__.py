"""Graphs in CSC form, and the readers of PyG's graph objects."""
