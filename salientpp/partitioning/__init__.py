"""Assigns vertices to parts, and numbers the vertices of each part."""
