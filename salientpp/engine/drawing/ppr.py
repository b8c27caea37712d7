"""Draws the batches of a :class:`~salientpp.PPRSampler`: the vertices with the largest personalised PageRank of each seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput

from salientpp.engine.drawing.rounds import InRounds
from salientpp.engine.drawing.together import draw_together
from salientpp.engine.drawing.whole import Whole
from salientpp.engine.seeds import Seeds
from salientpp.sampling.in_rounds import in_step
from salientpp.sampling.part_topology import PartTopology
from salientpp.sampling.ppr import SEEDS_AT_ONCE, PPRSampler, Top, degrees_held
from salientpp.store.exchange import Exchange


class Pagerank(Whole):
    sampler: PPRSampler

    @classmethod
    def suits(cls, sampler: BaseSampler) -> bool:
        return isinstance(sampler, PPRSampler) and super().suits(sampler)

    def excludes(self) -> Mapping[str, str]:
        by_hop = "a plan prices draws by neighbours per hop"
        found = {
            "pad": "sizes of batches are computed from neighbours per hop",
            "partial_aggregation": "sums need the edges of single hops",
            "memory": by_hop,
            "memory_device": by_hop,
            "logical_ranks_join": "the positions in ppr_index count inside one batch",
            "policy": "it knows the exact probability of each vertex",
            "shared_draws_block": "it draws no random numbers",
        }
        if isinstance(self.seeds.inputs, EdgeSamplerInput):
            of_edges = "it knows the probability of a vertex only for seeds that are vertices"
            found |= {"replication_factor": of_edges, "device_rows": of_edges}
        return found


class PagerankInRounds(Pagerank, InRounds):
    """Draws from a graph whose neighbour lists are divided among hosts.

    The number of exchanges between ranks depends on the graph, so they cannot be stages of an epoch. The scores depend only on the graph, so they are found
    once, before the first epoch. Batches look them up.
    """

    def __init__(self, seeds: Seeds, sampler: BaseSampler, exchange: Exchange) -> None:
        super().__init__(seeds, sampler, exchange)
        if isinstance(seeds.inputs, EdgeSamplerInput):
            raise ValueError(
                "a PPRSampler over a topology in parts finds the scores of its seeds beforehand, so they must be vertices, got edges; use a NeighborLoader, "
                "or a directory with topology='whole'"
            )

    def prepare(self) -> None:
        degree = _degrees(self.topology, self.exchange)
        seeds = torch.unique(self.seeds.inputs.node)
        drawings: Iterable[Any] = (
            in_step([self.sampler.finding(chunk, degree)]) for chunk in seeds.split(SEEDS_AT_ONCE) if chunk.numel()
        )
        found = draw_together(self.topology, self.exchange, drawings, lambda tops: tops[0])
        if found:
            self.sampler.keep(seeds, Top(*(torch.cat(columns) for columns in zip(*found))))


def _degrees(topology: PartTopology, exchange: Exchange) -> Tensor:
    """Returns the in-degrees of all vertices, int32 or int64 [N]. Collective."""
    comm, own = exchange.comm, degrees_held(topology)
    first = topology.part.lists[0][0].first_target
    facts = comm.gather_numbers([first, own.numel(), int(own.max()) if own.numel() else 0])
    dtype = torch.int32 if max(longest for *_, longest in facts) < 2**31 else torch.int64
    counts = [number for _, number, _ in facts]
    told = comm.all_to_all(own.to(dtype).repeat(comm.size), [own.numel()] * comm.size, counts).wait()
    degree = torch.zeros(topology.num_vertices[None], dtype=dtype, device="cpu")
    for (begin, number, _), piece in zip(facts, told.split(counts)):
        degree[begin : begin + number] = piece
    return degree
