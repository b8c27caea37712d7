"""Vertex inclusion probabilities, and the policies that rank rows by them."""
