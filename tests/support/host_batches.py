"""Batches that the ranks of a host compute together, made without a loader: a sampled batch of a graph, and the share of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

from salientpp import NeighborSampler
from salientpp.batch.edges import mark_edges
from salientpp.ranks.comm import Comm
from salientpp.ranks.cooperation import Cooperation
from salientpp.sampling.divided_batch import share_of


@dataclass
class Loader:
    """Loader without batches, over which a model is distributed."""

    cooperation: Cooperation | None


def loader_of(ranks_per_host: int, comm: Comm | None = None) -> Loader:
    comm = comm or Comm.create()
    host = comm.rank // ranks_per_host
    return Loader(Cooperation(comm, range(host * ranks_per_host, (host + 1) * ranks_per_host), host))


def batch_of(data: Data, seeds: Tensor, fanouts: Sequence[int], key: int = 0) -> Any:
    """A sampled batch. Ids are in ``node`` and ``edge``, the edges in ``row`` and ``col``."""
    return NeighborSampler(data, list(fanouts)).sample_from_nodes(NodeSamplerInput(None, seeds), key=key)


def filled(data: Data, mfg: Any) -> Data:
    """The batch of a sample: attributes of its vertices and edges, ``n_id`` and ``batch_size``."""
    batch = Data(edge_index=torch.stack([mfg.row, mfg.col]), n_id=mfg.node, batch_size=mfg.num_sampled_nodes[0])
    for name, value in data.to_dict().items():
        if name != "edge_index" and isinstance(value, Tensor):
            batch[name] = value[mfg.edge if data.is_edge_attr(name) else mfg.node].clone()
    return batch


def share_batch(data: Data, mfg: Any, owner: Tensor, ranks: int, place: int) -> Data:
    """The share of one rank. ``owner``: place of each vertex of the batch."""
    mine = share_of(mfg, owner, ranks, place)
    batch = filled(data, mine)
    mark_edges(batch, mine, set())
    return batch
