"""The interface between the engine and the methods that draw batches.

A loader has one :class:`DrawingMethod`. The engine, the caches and the planner ask it for batches and for its properties. They do not ask which class it
has.
:mod:`salientpp.engine.drawing.choose` lists the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, HeteroSamplerOutput, NodeSamplerInput, SamplerOutput

from salientpp.engine.drawing.division import Division
from salientpp.engine.pipeline import Stage
from salientpp.engine.seeds import Seeds
from salientpp.processes import in_order
from salientpp.sampling.schedule import BatchKeys
from salientpp.sampling.topology import Mfg
from salientpp.sampling.union import disjoint_union
from salientpp.store.exchange import Exchange

Out = TypeVar("Out")

#: The positions of some seeds, int64 [B], and the keys of their draws. A batch is drawn from one or several pieces.
Piece = tuple[Tensor, BatchKeys]


class DrawingMethod:
    """Draws the batches of one loader. Several threads may call the methods that draw.

    Attributes:
        is_collective: True if ranks hold neighbour lists for each other. Then all ranks draw together, and batches need stages before the ten.
        division: divides each batch among the ranks of the host. None: the rank computes whole batches.

    Args:
        seeds, sampler: of the loader.
        exchange: connects this rank to the ranks that hold the rows and neighbour lists of other parts.
    """

    is_collective: ClassVar[bool] = False
    division: Division | None = None

    def __init__(self, seeds: Seeds, sampler: BaseSampler, exchange: Exchange) -> None:
        self.seeds, self.sampler, self.exchange = seeds, sampler, exchange

    # --- properties ---------------------------------------------------------------------------------------

    @classmethod
    def suits(cls, sampler: BaseSampler) -> bool:
        """True if this class can draw the batches of ``sampler``.

        A loader draws with the first class of ``METHODS`` (engine/drawing/choose.py) for which this is True.
        """
        raise NotImplementedError

    def excludes(self) -> Mapping[str, str]:
        """Returns loader options that do not work with this method: name -> reason. Default values always work."""
        return {}

    def why_whole(self) -> str | None:
        """Returns why batches cannot be divided among a host's ranks, and what the user can do. None if they can be."""
        return f"neighbor_sampler is a {type(self.sampler).__name__}, whose batches are not drawn hop by hop; leave one of them out"

    def prepare(self) -> None:
        """Prepares the method before the first batch, such as by computing scores. Collective."""

    def own(self, scores: Tensor, first: int = 0) -> Tensor:
        """Returns the scores with 0 for each vertex that this rank does not compute. ``scores`` [n]: of the vertices from ``first`` on."""
        return scores

    # --- draws --------------------------------------------------------------------------------------------

    def draw_piece(self, positions: Tensor, keys: BatchKeys, only_vertices: bool = False) -> Mfg:
        """Samples the MFG of the seeds at these positions. With ``only_vertices``, its edges may be missing."""
        inputs = chosen(self.seeds.inputs, positions)
        mfg = checked_sample("neighbor_sampler", self.seeds.draw(inputs, **self.arguments(keys, only_vertices)))
        if mfg.metadata is None and isinstance(inputs, NodeSamplerInput):
            mfg.metadata = (inputs.input_id, inputs.time)
        return mfg

    def arguments(self, keys: BatchKeys, only_vertices: bool) -> dict[str, Any]:
        """Returns the arguments of the sampler's method besides the seeds."""
        raise NotImplementedError

    def draw(self, pieces: Sequence[Piece], only_vertices: bool = False, turn: tuple[int, int] | None = None) -> Mfg:
        """Draws a batch: samples its pieces, each with its own keys, and joins their MFGs into one.

        Args:
            pieces: the seeds of one batch in one or several parts, as :meth:`Draws.pieces` returns them.
            only_vertices: see :meth:`draw_piece`.
            turn: epoch of the batch, and its tick in the epoch. None: the batch is drawn outside an epoch, or for a plan.
        """
        if len(pieces) == 1:
            return self.draw_piece(*pieces[0], only_vertices=only_vertices)
        return self.joined([self.draw_piece(positions, keys) for positions, keys in pieces])

    def joined(self, mfgs: Sequence[Mfg]) -> Mfg:
        inputs = self.seeds.inputs
        return disjoint_union(mfgs, inputs.input_type, of_edges=isinstance(inputs, EdgeSamplerInput))

    def draw_vertices(self, pieces: Sequence[Piece]) -> list[Mfg]:
        """Samples the pieces of a batch, and returns one MFG for each. Only ``node`` of these MFGs may be used.

        If ranks divide batches (:attr:`division`), ``node`` has only the vertices that this rank computes.
        """
        return [self.draw_piece(*piece, only_vertices=True) for piece in pieces]

    def begin(self, pieces: Sequence[Piece], turn: tuple[int, int], finish: Callable[[Mfg], Any]) -> Any:
        """Begins to draw a batch, in a sampling thread. Returns ``finish(sample)``, or the input of :meth:`stages`."""
        return finish(self.draw(pieces, turn=turn))

    def draw_each(
        self, batches: Iterable[Sequence[Piece]], measure: Callable[[Any], Out], only_vertices: bool = False
    ) -> list[Out]:
        """Returns ``measure(sample)`` for each of these batches, in order.

        Several threads may call ``measure``. If :attr:`is_collective`, all ranks make this call, each for batches of its own, of any number.
        """
        return list(in_order(lambda pieces: measure(self.draw(pieces, only_vertices)), batches, "salientpp-draw"))

    def stages(self, scout: Callable[..., Any]) -> list[list[Stage]]:
        """Returns the stages that finish drawing a batch, before its ten stages: a list of stages for each tick.

        Args:
            scout: runs a function in a sampling thread.
        """
        return []


def checked_sample(argument: str, found: Any) -> Mfg:
    """Returns a sample that the user's code may have made.

    Raises:
        TypeError: it is no sample. A function without ``return`` gives None.
    """
    if not isinstance(found, (SamplerOutput, HeteroSamplerOutput)):
        raise TypeError(f"{argument} must return a SamplerOutput or HeteroSamplerOutput, got a {type(found).__name__}")
    return found


def chosen(inputs: NodeSamplerInput | EdgeSamplerInput, positions: Tensor) -> NodeSamplerInput | EdgeSamplerInput:
    """Returns ``inputs[positions]``. For plain seeds it avoids PyG's indexing, which takes longer than many batches do."""
    if type(inputs) is not NodeSamplerInput or inputs.time is not None:
        return inputs[positions]
    input_id = positions if inputs.input_id is None else inputs.input_id.index_select(0, positions)
    return NodeSamplerInput(input_id, inputs.node.index_select(0, positions), None, inputs.input_type)
