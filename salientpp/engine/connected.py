"""A partitioned graph as one rank of a group sees it: the parts whose seeds it visits, and the rows of its host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from salientpp.ranks.comm import Comm
from salientpp.ranks.placement import Placement
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.exchange import Exchange, Message


@dataclass(frozen=True, eq=False)
class Connected:
    """A partitioned graph, with the views that one rank of a group uses.

    Attributes:
        own: view whose part has the seeds of this rank's batches. Its inclusion probabilities are for these seeds.
        held: view whose part has the rows that this rank's host holds.
        exchange: gets rows that the host does not hold.
    """

    own: PartitionedGraph
    held: PartitionedGraph
    exchange: Exchange

    @property
    def own_part(self) -> int:
        assert self.own.part_id is not None  # the view was made with a part
        return self.own.part_id

    @property
    def is_in_order(self) -> bool:
        """True if the host holds exactly this rank's part, whose rows are already in the order in which the rank needs them."""
        return self.exchange.placement.holds_own_part

    @property
    def are_in_order(self) -> bool:
        """True if :attr:`is_in_order` holds on every rank."""
        placement = self.exchange.placement
        return all(replace(placement, rank=rank).holds_own_part for rank in range(placement.world_size))


def placement_of(
    part: PartitionedGraph,
    comm: Comm,
    logical_ranks: int | None = None,
    ranks_by_host: Sequence[int] = (),
    cooperates: bool = False,
) -> Placement:
    """Returns the placement of this rank among the ranks of ``comm``. ``ranks_by_host`` is as in :class:`~salientpp.engine.basis.Basis`.

    Raises:
        ValueError: the ranks or logical ranks do not fit the parts, or this rank loaded another part.
    """
    whole = part.whole
    try:
        placement = Placement(
            comm.rank,
            comm.size,
            whole.num_parts,
            logical_ranks or 0,
            tuple(ranks_by_host),
            cooperates,
            whole.num_storage_ranks,
        )
    except ValueError as error:
        raise ValueError(f"{part.root}: {error}") from None
    mine = placement.own_parts
    # A graph is loaded with one part, also by a rank whose host visits several parts together.
    fits = part.part_id in mine if cooperates else [part.part_id] == list(mine)
    if part.offsets == whole.offsets and part.part_id is not None and not fits:
        parts = f"part {mine[0]}" if len(mine) == 1 else f"parts {mine[0]} to {mine[-1]}"
        raise ValueError(
            f"rank {comm.rank} serves {parts} of {whole.num_parts}, but its graph was loaded with part_id={part.part_id}; leave part_id out of "
            "salientpp.load, and give it the loader's process_group"
        )
    return placement


def connect_part(
    part: PartitionedGraph, comm: Comm, placement: Placement, messages: Sequence[Message] = ()
) -> Connected:
    """Connects a partitioned graph to the ranks of ``comm``, for the rank at this placement.

    ``placement`` refers either to the parts on disk, or to the parts of the view ``part``.

    Args:
        messages: kinds of requests that ranks send besides requests for rows. Only a graph with one vertex type has them.
    """
    whole = part.whole
    # The analysis may pass a view whose parts each join several parts on disk.
    at = range(whole.num_parts + 1) if placement.num_parts == whole.num_parts else part.offsets
    held = whole.joined([at[first] for first in placement.row_offsets], placement.part_id)
    own = whole.joined([at[first] for first in placement.own_offsets], placement.own_part)
    return Connected(own, held, Exchange(comm, held.row_books, placement, () if part.is_hetero else messages))
