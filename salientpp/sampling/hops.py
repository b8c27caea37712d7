"""Hops of a sampled batch: the numbers of vertices and edges within 0, 1, 2, ... hops of the seeds, and the edges as lists.

Suppose that a layer's outputs are needed for the vertices within d hops of the seeds. The layer then needs the edges into these vertices, and inputs for
the vertices within d + 1 hops. Vertices are numbered, and edges ordered, by discovery, so each of these sets is a prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput

from salientpp.sampling.edge_lists import EdgeLists, group_edges, with_self_loops
from salientpp.sampling.host_share import HostShare
from salientpp.sampling.topology import Mfg

#: A relation's name in the batch; None in a batch with one vertex type.
Relation = tuple[str, str, str] | None


#: Kinds of edge lists, as (relation, has self-loops, is grouped by source too).
Asked = set[tuple[Relation, bool, bool]]


class Demand:
    """Tells the loaders of this process whether batches keep their hops. ``nn.trim`` sets ``hops`` to True, because trimmed models read them."""

    hops = False


demand = Demand()


@dataclass(eq=False)
class Hops:
    """Tells how many vertices and edges of a batch lie within each number of hops, and gives its edges as lists.

    Attributes:
        num_nodes: by vertex type, the number of vertices within 0, 1, 2, ... hops of the seeds.
        num_edges: by relation, the number of edges of the first 0, 1, 2, ... hops.
        edge_index: by relation int64 [2, e] on the CPU, as sampled.
        share: this rank's share, if the ranks of a host compute the batch together. The vertices and edges here are then the rank's own.
        asked: kinds of edge lists (by target, by source) that models have used in batches of the same loader. The
            loader's threads make lists of these kinds for later batches.
    """

    num_nodes: Mapping[str | None, list[int]]
    num_edges: Mapping[Relation, list[int]]
    edge_index: Mapping[Relation, Tensor]
    kept: dict[Any, Any] = field(default_factory=dict)
    share: HostShare | None = None
    asked: Asked = field(default_factory=set)
    is_exposed: bool = False  # True if numpy or other code may write to the edges

    def __post_init__(self) -> None:
        self.know(self.edge_index)

    def know(self, edge_index: Mapping[Relation, Tensor]) -> None:
        """Stores the edges, and torch's counts of their changes, so that :attr:`is_unchanged` sees later writes."""
        self.edge_index = edge_index
        self._versions = [edges._version for edges in edge_index.values()]

    @property
    def is_unchanged(self) -> bool:
        """True if the edges are still as sampled, as far as torch counts changes."""
        return not self.is_exposed and self._versions == [edges._version for edges in self.edge_index.values()]

    @property
    def depth(self) -> int:
        return max(map(len, self.num_nodes.values())) - 1

    def nodes_within(self, type_: str | None, hops: int) -> int:
        """Returns the number of vertices of a type within ``hops`` hops of the seeds."""
        counts = self.num_nodes[type_]
        return counts[min(hops, len(counts) - 1)]

    def edges_into(self, relation: Relation, hops: int) -> int:
        """Returns the number of edges of a relation that lead to vertices within ``hops`` hops of the seeds."""
        counts = self.num_edges[relation]
        return counts[min(hops + 1, len(counts) - 1)]

    def lists(self, relation: Relation, self_loops: bool = False) -> EdgeLists | None:
        """Returns the edges of a relation, grouped by target; None if they are not ordered by hop and by target.

        Args:
            self_loops: see :func:`~salientpp.sampling.edge_lists.with_self_loops`. None is returned if there are more targets than sources.
        """
        key = (relation, self_loops)
        if key not in self.kept:
            with torch.inference_mode(False):  # a later training step may save them for its backward
                made = self.lists(relation) if self_loops else self._grouped(relation)
                if self_loops and made is not None:
                    made = with_self_loops(made) if made.num_targets <= made.num_sources else None
            self.kept[key] = made
            self.asked.add((relation, self_loops, False))
        return self.kept[key]

    def _grouped(self, relation: Relation) -> EdgeLists | None:
        source, target = (None, None) if relation is None else (relation[0], relation[-1])
        edges = self.edge_index[relation]
        halo = 0 if self.share is None else sum(self.share.recv_counts)
        lists = group_edges(edges, self.num_nodes[source][-1] + halo, self.num_nodes[target][-1])
        if lists is None:
            return None
        for hop, (first, last) in enumerate(itertools.pairwise(self.num_edges[relation])):
            if lists.indptr[self.nodes_within(target, hop)] != last:
                return None
            if self.share is None and last > first and edges[0, first:last].max() >= self.nodes_within(source, hop + 1):
                return None
        return lists

    def make_used_lists(self) -> None:
        """Makes the edge lists that models asked for in earlier batches.

        Sampling threads call it, so that the training step does not wait for the lists.
        """
        for relation, self_loops, by_source in sorted(self.asked, key=str):
            if relation in self.edge_index:
                lists = self.lists(relation, self_loops)
                if by_source and lists is not None:
                    lists.by_source  # noqa: B018 (made on first use)

    def made_lists(self) -> dict[Any, EdgeLists]:
        """Returns the edge lists that were made so far, by (relation, has self-loops)."""
        return {key: lists for key, lists in self.kept.items() if isinstance(lists, EdgeLists)}

    def __reduce__(self) -> Any:
        """Pickles without the lists; the receiver makes them again."""
        return Hops, (self.num_nodes, self.num_edges, self.edge_index, {}, self.share)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hops:
        return self  # it is never changed


def hops_of(mfg: Mfg, asked: Asked) -> Hops | None:
    """Returns a sampled batch's hops, or None if edges were not drawn hop by hop. ``asked`` is the set that all batches of the loader share."""
    nodes, edges = mfg.num_sampled_nodes, mfg.num_sampled_edges
    if nodes is None or edges is None or mfg.orig_row is not None or mfg.row is None:
        return None
    if not isinstance(mfg, HeteroSamplerOutput):
        nodes, edges = {None: nodes}, {None: edges}
    num_nodes = {name: list(itertools.accumulate(counts)) for name, counts in nodes.items()}
    num_edges = {name: list(itertools.accumulate(counts, initial=0)) for name, counts in edges.items()}
    return Hops(num_nodes, num_edges, {}, share=getattr(mfg, "share", None), asked=asked)
