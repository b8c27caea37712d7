"""Divides the vertices of a graph among the ranks of a host, before the first batch."""

from __future__ import annotations

import dataclasses

from torch_geometric.sampler import NodeSamplerInput

from salientpp.engine.basis import Basis
from salientpp.engine.division import Division
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.ways.cooperate.drawn_once import DrawnOnce
from salientpp.ways.cooperate.owners import Expected, SplitBy, make_owners, shared_owners


def divide(basis: Basis, split_by: SplitBy) -> None:
    """Makes the loader of each rank get only its part of every batch of the host. Collective among the host's ranks.

    Call it before the engine is made.

    Raises:
        ValueError: the vertices cannot be divided; on every rank of the host.
    """
    source, placement = basis.source, basis.source.exchange.placement
    part, inputs, sampler = source.part, source.seeds.inputs, source.sampler
    # The loader has checked this.
    assert part is not None and isinstance(inputs, NodeSamplerInput) and isinstance(sampler, NeighborSampler)
    whole, seeds = part.whole, inputs.node
    # The parts that each rank would serve alone. Logical ranks only concern seeds.
    alone = dataclasses.replace(placement, num_logical_ranks=0, cooperates=False)

    def expected() -> Expected:
        fanouts = sampler.fanouts[0] or [0]  # no hops: a batch has only its seeds
        return Expected.of(part.graph, seeds, fanouts, basis.batch_size, sampler.replace)

    owner = shared_owners(
        basis.host,
        whole.num_vertices,
        lambda: make_owners(split_by, part.graph, whole.books[None], alone, expected()),
    )
    with basis.comm.patient():  # hosts take different times
        basis.comm.gather_numbers([0])
    once = DrawnOnce(basis.host, owner, basis.most_ahead + basis.depth)
    host = basis.host
    division = Division(owner, host.size, host.rank, once, host.number)
    basis.source = dataclasses.replace(source, division=division)
