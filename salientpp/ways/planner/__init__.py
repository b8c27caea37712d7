"""Chooses caches and other methods, and their memory, so that an epoch of the slowest rank takes the least time."""
