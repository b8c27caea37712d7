"""Parts of the loaders that deliver PyG's batches."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch_geometric.typing
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader


def describe(batch: Data) -> SimpleNamespace:
    sizes = batch.num_sampled_edges if "num_sampled_edges" in batch else None  # PyG over torch-sparse does not give it
    ends = [0, *accumulate(sizes or [batch.num_edges])]
    hops = [tuple(batch.edge_index[:, begin:end]) for begin, end in pairwise(ends)]
    return SimpleNamespace(n_id=batch.n_id, batch_size=batch.batch_size, x=batch.x, hops=hops)


def made(loader: Callable[..., Any], graph: SimpleNamespace, options: SimpleNamespace) -> Any:
    """Returns a loader of a class with the arguments of PyG's ``NeighborLoader``."""
    return loader(
        Data(x=graph.x, edge_index=graph.edge_index, y=graph.y),
        options.fanouts,
        graph.seeds,
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
    )


def pyg_loader(graph: SimpleNamespace, options: SimpleNamespace, over_pyg_lib: bool) -> NeighborLoader:
    """Returns PyG's loader over one of its two sampling libraries.

    Raises:
        ImportError: the library is not installed.
    """
    if not (torch_geometric.typing.WITH_PYG_LIB if over_pyg_lib else torch_geometric.typing.WITH_TORCH_SPARSE):
        raise ImportError(f"PyG does not find {'pyg-lib' if over_pyg_lib else 'torch-sparse'}")
    torch_geometric.typing.WITH_PYG_LIB = over_pyg_lib
    return made(NeighborLoader, graph, options)
