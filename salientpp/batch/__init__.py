"""Builds the PyG batches that users get, from sampled vertices and edges and from gathered rows."""
