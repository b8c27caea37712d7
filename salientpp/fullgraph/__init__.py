"""Full-graph training over several ranks: every step computes all vertices of a graph that the ranks divide among them."""

from salientpp.fullgraph.distribute import distribute
from salientpp.fullgraph.expansion import Preload
from salientpp.fullgraph.layouts import DistAdjacency
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.loss import accuracy, loss_mean
from salientpp.fullgraph.model import DistributedModel
from salientpp.fullgraph.opening import local
from salientpp.fullgraph.planner import Plan, plan_for
from salientpp.fullgraph.preload import PreloadedGraph
from salientpp.fullgraph.problem import Constants
from salientpp.fullgraph.trial import measured_constants

__all__ = [
    "Constants",
    "DistAdjacency",
    "DistributedModel",
    "LocalGraph",
    "Plan",
    "Preload",
    "PreloadedGraph",
    "accuracy",
    "distribute",
    "local",
    "loss_mean",
    "measured_constants",
    "plan_for",
]
