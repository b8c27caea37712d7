"""Start, meeting and timely stop of ranks: under torchrun, under SLURM, or as a single process."""
