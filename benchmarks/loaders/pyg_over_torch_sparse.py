"""PyG's ``NeighborLoader`` over torch-sparse."""

from types import SimpleNamespace

from _pyg import describe, pyg_loader
from torch_geometric.loader import NeighborLoader

__all__ = ["describe"]
NAME, DISTRIBUTIONS = "PyG over torch-sparse", ("torch_geometric", "torch_sparse")


def make(graph: SimpleNamespace, options: SimpleNamespace) -> NeighborLoader:
    return pyg_loader(graph, options, over_pyg_lib=False)
