"""Converts a graph that outgrows memory to a **converted graph**: a directory of .npy files, which are mapped."""
