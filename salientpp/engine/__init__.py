"""Epochs: the ten stages, the pipeline that drives them, and resuming a stopped run."""
