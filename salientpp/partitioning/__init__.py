"""Which part owns which vertex, and how vertices are numbered."""
