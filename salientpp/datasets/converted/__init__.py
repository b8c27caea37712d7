"""How does a graph that outgrows memory become files that can be mapped?

:func:`~salientpp.datasets.converted.convert.convert` reads a source in pieces, sorts its edges outside memory and writes a **converted graph**: a directory of
plain .npy files, the neighbour lists of every relation and the attributes of every type of vertices.
"""
