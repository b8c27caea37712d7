"""Graphs from elsewhere: one way in, :func:`load_dataset`; generated graphs, :func:`synthetic` and :func:`synthetic_mag`; partitions that
others wrote, :func:`load_partition`, and DGL's assignment of vertices, :func:`load_dgl_assignment`; and files for graphs that outgrow memory, :func:`convert`.
"""

from salientpp.datasets.converted.convert import convert
from salientpp.datasets.generated import synthetic
from salientpp.datasets.generated_mag import synthetic_mag
from salientpp.datasets.load import load_dataset
from salientpp.datasets.partitions.dgl import load_dgl_assignment
from salientpp.datasets.partitions.load import load_partition

__all__ = ["convert", "load_dataset", "load_dgl_assignment", "load_partition", "synthetic", "synthetic_mag"]
