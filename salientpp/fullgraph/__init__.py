"""How does a model train on a graph as a whole, over machines?"""

from salientpp.fullgraph.distribute import DistributedModel, distribute
from salientpp.fullgraph.layouts import DistAdjacency
from salientpp.fullgraph.local import LocalGraph, local
from salientpp.fullgraph.loss import accuracy, loss_mean

__all__ = ["DistAdjacency", "DistributedModel", "LocalGraph", "accuracy", "distribute", "local", "loss_mean"]
