"""``salientpp.NeighborLoader``."""

from types import SimpleNamespace

from _pyg import data_of, describe

from salientpp import NeighborLoader

__all__ = ["describe"]
NAME, DISTRIBUTIONS = "salientpp", ("salientpp", "torch_geometric")


def make(graph: SimpleNamespace, options: SimpleNamespace) -> NeighborLoader:
    return NeighborLoader(
        data_of(graph),
        options.fanouts,
        graph.seeds,
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
    )
