"""Where does a graph come from? One way in, :func:`load_dataset`; partitions that others wrote, :func:`load_partition`; generated graphs, :func:`synthetic`."""

from salientpp.datasets.generated import synthetic
from salientpp.datasets.load import load_dataset
from salientpp.datasets.partitions.load import load_partition

__all__ = ["load_dataset", "load_partition", "synthetic"]
