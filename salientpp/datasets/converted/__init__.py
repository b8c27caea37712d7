"""Converts a graph that is larger than memory to a **converted graph**: a directory of .npy files that are memory-mapped."""
