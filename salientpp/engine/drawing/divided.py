"""Draws batches that the ranks of a host compute together: each rank gets its share of the host's batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor
from torch_geometric.sampler import NodeSamplerInput

from salientpp.engine.basis import Basis
from salientpp.engine.drawing.division import Division
from salientpp.engine.drawing.drawn_once import DrawnOnce
from salientpp.engine.drawing.method import DrawingMethod, Piece
from salientpp.engine.drawing.owners import Expected, SplitBy, make_owners, shared_owners
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.topology import Mfg


class Divided(DrawingMethod):
    """Draws this rank's share of each batch: ``whole`` draws the host's batch, ``division`` divides it."""

    division: Division

    def __init__(self, whole: DrawingMethod, division: Division) -> None:
        super().__init__(whole.seeds, whole.sampler, whole.exchange)
        self._whole, self.division = whole, division

    def own(self, scores: Tensor, first: int = 0) -> Tensor:
        return self.division.masked(scores, first)

    def draw(self, pieces: Sequence[Piece], only_vertices: bool = False, turn: tuple[int, int] | None = None) -> Mfg:
        if only_vertices:
            return self.division.own_vertices(self._whole.draw(pieces, True))
        return self.division.share(lambda: self._whole.draw(pieces), pieces[0][1], turn)

    def draw_vertices(self, pieces: Sequence[Piece]) -> list[Mfg]:
        return list(map(self.division.own_vertices, self._whole.draw_vertices(pieces)))


def divide(basis: Basis, split_by: SplitBy) -> None:
    """Makes the loader of each rank get only its part of every batch of the host. Collective among the host's ranks.

    Call it before the engine is made, and only if :meth:`DrawingMethod.why_whole` gives no reason against it.

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
    basis.source = dataclasses.replace(source, drawing=Divided(source.drawing, division))
