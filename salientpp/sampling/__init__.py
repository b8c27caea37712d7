"""Seeds, schedules, topologies and the sampler: from seeds to the vertices and edges of a batch."""
