"""From seeds to the vertices and edges of a batch."""
