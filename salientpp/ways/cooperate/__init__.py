"""Batches that the ranks of a host compute together: the owner of each vertex, and draws that are made once per host."""
