"""Starts a job's ranks, connects them, and stops them in time before SLURM ends the job. Works under torchrun, under SLURM, or as a single process."""
