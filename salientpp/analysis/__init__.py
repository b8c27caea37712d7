"""Computes what a training job would fetch over the network, and how long its epochs would take, without running the job."""
