"""Samples batches: checks the seeds, divides them among ranks and batches, and draws the vertices and edges around them."""
