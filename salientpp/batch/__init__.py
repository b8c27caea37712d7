"""Batches: assembled for the user from sampled vertices and edges and from gathered rows."""
