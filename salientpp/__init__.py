"""Train graph neural networks on graphs that outgrow one machine, by changing one import."""

from importlib.metadata import distributions as _distributions

from salientpp.graph.csc import Graph
from salientpp.launch.preemption import Preemption
from salientpp.launch.rendezvous import init_process_group
from salientpp.layerwise.inference import inference
from salientpp.minibatch.link_loader import LinkNeighborLoader
from salientpp.minibatch.loader import LoaderStats
from salientpp.minibatch.neighbor_sampler import NeighborSampler
from salientpp.minibatch.node_loader import NeighborLoader
from salientpp.plan.vip import inclusion_probability
from salientpp.store.directory.local_copy import stage
from salientpp.store.directory.opened import PartitionedGraph, load
from salientpp.store.directory.writer import partition

#: Of the installed package; a source tree that was not installed has none.
__version__ = next((found.version for found in _distributions(name="salientpp")), "unknown")

__all__ = [
    "Graph",
    "LinkNeighborLoader",
    "LoaderStats",
    "NeighborLoader",
    "NeighborSampler",
    "PartitionedGraph",
    "Preemption",
    "inclusion_probability",
    "inference",
    "init_process_group",
    "load",
    "partition",
    "stage",
]
