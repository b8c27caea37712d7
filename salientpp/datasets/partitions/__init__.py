"""Reads partitions that other libraries wrote, see :func:`~salientpp.datasets.partitions.load.load_partition`."""
