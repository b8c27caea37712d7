"""Vertex inclusion probabilities, and what ranks rows by them."""
