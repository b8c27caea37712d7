"""Finds the vertices with the largest personalised PageRank of a rank's seeds, if ranks hold different neighbour lists.

The number of exchanges between ranks depends on the graph, so they cannot be stages of an epoch. The scores depend only on the graph, so they are found
once, before the first epoch. Batches look them up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import NodeSamplerInput

from salientpp.engine.source import BatchSource
from salientpp.engine.together import draw_together
from salientpp.sampling.in_rounds import in_step
from salientpp.sampling.part_topology import PartTopology
from salientpp.sampling.ppr import SEEDS_AT_ONCE, PPRSampler, Top, degrees_held
from salientpp.store.exchange import Exchange


def find_ppr(source: BatchSource) -> None:
    """Lets the sampler keep the results of this rank's seeds. It does nothing unless a PPRSampler needs neighbour lists of other ranks. Then it is
    collective.
    """
    sampler, topology, inputs = source.sampler, source.rounds_topology, source.seeds.inputs
    if topology is None or not isinstance(sampler, PPRSampler):
        return
    assert isinstance(inputs, NodeSamplerInput)  # the loader has refused edges
    degree = _degrees(topology, source.exchange)
    seeds = torch.unique(inputs.node)
    drawings: Iterable[Any] = (
        in_step([sampler.finding(chunk, degree)]) for chunk in seeds.split(SEEDS_AT_ONCE) if chunk.numel()
    )
    found = draw_together(topology, source.exchange, drawings, lambda tops: tops[0])
    if found:
        sampler.keep(seeds, Top(*(torch.cat(columns) for columns in zip(*found))))


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
