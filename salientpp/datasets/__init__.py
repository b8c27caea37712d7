"""Graphs from files, from other libraries and from generators.

* :func:`load_dataset` loads a graph by its name.
* :func:`synthetic` and :func:`synthetic_mag` generate graphs.
* :func:`load_partition` loads a partition that another library wrote.
* :func:`load_dgl_assignment` reads the parts that DGL assigned to vertices.
* :func:`convert` writes a graph that is larger than memory to files, which :func:`load_dataset` memory-maps.
* :func:`partition_tables` converts tables with keys and partitions the graph.
* :func:`load_link_splits` loads the link splits of such a graph.
* :func:`load_encoding` loads the encoding of such a graph of tables, which encodes later rows.
"""

from salientpp.datasets.converted.convert import convert
from salientpp.datasets.converted.links import LinkSplit, load_link_splits
from salientpp.datasets.generated import synthetic
from salientpp.datasets.generated_mag import synthetic_mag
from salientpp.datasets.load import load_dataset
from salientpp.datasets.partitions.dgl import load_dgl_assignment
from salientpp.datasets.partitions.load import load_partition
from salientpp.datasets.parts_of_tables import partition_tables
from salientpp.datasets.tabular.encoding import Encoding, load_encoding

__all__ = [
    "Encoding",
    "LinkSplit",
    "convert",
    "load_dataset",
    "load_dgl_assignment",
    "load_encoding",
    "load_link_splits",
    "load_partition",
    "partition_tables",
    "synthetic",
    "synthetic_mag",
]
