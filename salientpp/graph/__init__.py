"""Holds graphs in CSC form (in-edges grouped by target), and reads them from PyG's graph objects."""
