"""Train graph neural networks on graphs that outgrow one machine, by changing one import."""

from salientpp.graph import Graph
from salientpp.minibatch.loader import LoaderStats, NeighborLoader
from salientpp.plan.vip import inclusion_probability
from salientpp.store.dataset_dir import PartitionedGraph, load, partition

__all__ = ["Graph", "LoaderStats", "NeighborLoader", "PartitionedGraph", "inclusion_probability", "load", "partition"]
