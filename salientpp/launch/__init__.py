"""How ranks are started, meet, and stop in time: under torchrun, under SLURM, or one process alone."""
