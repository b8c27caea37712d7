"""Which vertices and edges does a batch consist of?

Node-wise sampling with PyG's hops: hop h draws, for every vertex first found at hop h - 1, up to ``fanouts[h]`` of its
neighbours, uniformly and without replacement (or with). The output is the message-flow graph (MFG) of the seeds, in
PyG's type :class:`~torch_geometric.sampler.SamplerOutput`.

Everything random is a pure function of a key. A batch's key joins (seed, epoch, rank, batch index); a vertex's draws
depend on (batch key, hop, vertex) alone. So threads, depth, a resumed run or another host change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch_geometric.sampler import SamplerOutput

from salientpp import ops
from salientpp.graph import Graph

_MASK = 2**64 - 1


def join_key(*fields: int) -> int:
    """A signed 64-bit key that depends on every field and on their order.

    The same mixing as ``csrc/random.h``: splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014).
    """
    key = 0
    for value in fields:
        key = _mix(_mix((key + 0x9E3779B97F4A7C15) & _MASK) ^ ((value * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK))
    return key - 2**64 if key >= 2**63 else key


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


# One word per purpose, so that the order of an epoch and the draws of its batches are independent.
_ORDER, _DRAWS = 1, 2


def order_key(seed: int, epoch: int, part_id: int) -> int:
    """The key of the order in which a part's seeds are visited in an epoch."""
    return join_key(_ORDER, seed, epoch, part_id)


def batch_key(seed: int, epoch: int, rank: int, index: int) -> int:
    """The key of all draws of one batch."""
    return join_key(_DRAWS, seed, epoch, rank, index)


@dataclass(frozen=True, eq=False)
class Sampler:
    """How a batch is drawn from a graph.

    Attributes:
        graph: the topology, whole on every rank.
        fanouts: neighbours per vertex and hop, nearest the seeds first; -1 takes all.
        replace: draw with replacement.
    """

    graph: Graph
    fanouts: Sequence[int]
    replace: bool = False

    def sample(self, seeds: Tensor, key: int) -> SamplerOutput:
        """The MFG of ``seeds`` int64 [B]; a pure function of graph, fanouts, seeds and key.

        Returns:
            ``node`` int64 [n], seeds first; ``row`` and ``col`` int64 [e], local ids of sources and targets, two rows of
            one tensor; ``edge`` int64 [e], the graph's edge ids; counts per hop as lists.

        Raises:
            RuntimeError: a seed is out of range.
        """
        n_id, edge_index, e_id, num_nodes, num_edges = ops.sample_neighbors(
            self.graph.indptr, self.graph.indices, self.graph.edge_id, seeds, self.fanouts, key, self.replace
        )
        return SamplerOutput(
            node=n_id,
            row=edge_index[0],
            col=edge_index[1],
            edge=e_id,
            num_sampled_nodes=num_nodes.tolist(),
            num_sampled_edges=num_edges.tolist(),
        )
