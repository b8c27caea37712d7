"""Which vertices and edges does a batch consist of?

Node-wise sampling with PyG's hops: hop h draws, for every vertex first found at hop h - 1, up to ``fanouts[h]`` of its
neighbours, uniformly and without replacement (or with). The output is the message-flow graph (MFG) of the seeds, in
PyG's type :class:`~torch_geometric.sampler.SamplerOutput`.

Everything random is a pure function of a key: :func:`salientpp.plan.schedule.batch_key` gives a batch's, and a vertex's draws
depend on (batch key, hop, vertex) alone. So threads, depth, a resumed run or another host change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch_geometric.sampler import SamplerOutput

from salientpp import ops
from salientpp.graph import Graph

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
