"""Computes the probability that a batch needs each vertex (VIP), and plans caches by it."""
