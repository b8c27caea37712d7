"""``salientpp.NeighborLoader``."""

from types import SimpleNamespace

from _pyg import describe, made

from salientpp import NeighborLoader

__all__ = ["describe"]
NAME, DISTRIBUTIONS = "salientpp", ("salientpp", "torch_geometric")


def make(graph: SimpleNamespace, options: SimpleNamespace) -> NeighborLoader:
    return made(NeighborLoader, graph, options)
