"""PyG's ``NeighborLoader`` over pyg-lib."""

from types import SimpleNamespace

from _pyg import describe, pyg_loader
from torch_geometric.loader import NeighborLoader

__all__ = ["describe"]
NAME, DISTRIBUTIONS = "PyG over pyg-lib", ("torch_geometric", "pyg-lib")


def make(graph: SimpleNamespace, options: SimpleNamespace) -> NeighborLoader:
    return pyg_loader(graph, options, over_pyg_lib=True)
