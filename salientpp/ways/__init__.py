"""Caches and other methods that move fewer bytes for the same batches, and the planner that chooses among them."""
