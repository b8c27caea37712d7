"""View of a graph with storage ranks for work that storage ranks take no part in, such as layer-wise inference and full-graph training."""

from __future__ import annotations

from typing import Any, TypeVar

from salientpp.store.directory.load import part_of_rank
from salientpp.store.directory.opened import PartitionedGraph

In = TypeVar("In")


def of_trainers(data: In, process_group: Any) -> tuple[In | PartitionedGraph, Any]:
    """Returns the graph as the ranks that train would have opened it without storage ranks, and the process group of these ranks.

    Each of them then reads the rows of its own part from the files of the directory, or from copies that storage hosts send. Data without storage ranks
    returns unchanged.

    Raises:
        ValueError: this rank only stores, or ``process_group`` is given although the ranks that train are known.
    """
    if not isinstance(data, PartitionedGraph) or not data.num_storage_ranks or data.job is None:
        return data, process_group
    if process_group is not None:
        raise ValueError(
            "process_group= does not work with storage ranks: all ranks that train take part; leave it out, or load the graph again without storage_ranks"
        )
    whole = PartitionedGraph(data.root, data.manifest, None, arrays=data.arrays)
    view, _ = part_of_rank(whole, data.job.rank, data.job.size - data.num_storage_ranks)
    return view, data.trainers
