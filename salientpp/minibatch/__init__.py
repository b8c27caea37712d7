"""Sampled training: seeds to mini-batches."""
