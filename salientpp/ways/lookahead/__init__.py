"""Lookahead cache: keeps the remote rows that the next batches need."""
