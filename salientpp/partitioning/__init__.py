"""Assignment of vertices to parts, and numbering of vertices."""
