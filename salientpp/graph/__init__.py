"""Graphs, and how they are read from PyG's."""
