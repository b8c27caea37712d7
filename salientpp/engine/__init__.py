"""Runs epochs: draws batches, carries them through ten stages in a pipeline, and resumes a stopped run."""
