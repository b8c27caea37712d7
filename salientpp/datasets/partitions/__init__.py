"""What did another partitioner write? Read by :func:`~salientpp.datasets.partitions.load.load_partition`."""
