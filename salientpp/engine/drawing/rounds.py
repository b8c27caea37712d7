"""Draws batches from a graph whose neighbour lists are divided among hosts. So all ranks draw together, in rounds of requests and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

from torch_geometric.sampler import BaseSampler
from torch_geometric.sampler.base import SubgraphType

from salientpp.engine.drawing.method import Out, Piece, chosen
from salientpp.engine.drawing.round_stages import RoundStages
from salientpp.engine.drawing.together import draw_together
from salientpp.engine.drawing.whole import Whole
from salientpp.engine.pipeline import Stage
from salientpp.sampling.edge_rows import joined_rows
from salientpp.sampling.held_lists import Reads
from salientpp.sampling.in_rounds import Round, drawing_of, in_step
from salientpp.sampling.part_topology import Drawing, PartTopology
from salientpp.sampling.topology import Mfg


class InRounds(Whole):
    is_collective = True

    @classmethod
    def suits(cls, sampler: BaseSampler) -> bool:
        topology = getattr(sampler, "topology", None)
        return isinstance(topology, PartTopology) and topology.is_shared and super().suits(sampler)

    @property
    def topology(self) -> PartTopology:
        return self.sampler.topology  # type: ignore[return-value]  # `suits` has checked it

    def why_whole(self) -> str | None:
        return "the topology is stored in parts, and draws over several hosts are not divided; partition with topology='whole'"

    def begin(self, pieces: Sequence[Piece], turn: tuple[int, int], finish: Callable[[Mfg], Any]) -> Any:
        return Round.begin(self.drawing(pieces), finish)

    def drawing(self, pieces: Sequence[Piece], only_vertices: bool = False) -> Drawing:
        """Draws a batch like :meth:`draw`, as a generator that yields requests to other ranks and is sent their answers. All pieces share these messages."""
        drawings = [self._drawing_piece(*piece, only_vertices) for piece in pieces]
        mfgs = yield from in_step(drawings)
        if len(mfgs) == 1:
            return mfgs[0]
        joined: Any = self.joined(mfgs)
        joined.edge_rows = joined_rows([mfg.edge_rows for mfg in mfgs])
        joined.reads = reduce(Reads.plus, (mfg.reads for mfg in mfgs))
        joined.list_bytes = sum(mfg.list_bytes for mfg in mfgs)
        return joined

    def _drawing_piece(self, positions: Any, keys: Any, only_vertices: bool) -> Drawing:
        inputs, how = chosen(self.seeds.inputs, positions), {"key": keys.batch, "draw_key": keys.draws}
        return drawing_of(self.sampler, inputs, self.seeds.negatives, **how, only_vertices=only_vertices)

    def draw_each(
        self, batches: Iterable[Sequence[Piece]], measure: Callable[[Any], Out], only_vertices: bool = False
    ) -> list[Out]:
        drawings = (self.drawing(pieces, only_vertices) for pieces in batches)
        return draw_together(self.topology, self.exchange, drawings, measure)

    def stages(self, scout: Callable[..., Any]) -> list[list[Stage]]:
        induced = self.sampler.subgraph_type == SubgraphType.induced
        number = self.topology.num_rounds(len(self.sampler.fanouts[0]), induced)
        return RoundStages(self.topology, self.exchange, scout).list(number)
