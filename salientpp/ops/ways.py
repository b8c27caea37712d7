"""Operators of caches that know the next batches, of sums that travel instead of rows, and of full-graph training."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from salientpp.ops.library import operators


def code_ids(ids: Tensor, num_ids: int, but_from: int = 0, but_to: int = 0) -> Tensor:
    """Compresses the set of ``ids`` int64 [n], given in any order, to uint8 with 5 to 7 bits per distinct id. Leaves out ids in [but_from, but_to).

    A compressed set is called a list below. Ids are in [0, num_ids), with ``num_ids`` < 2**31.
    """
    return operators.code_ids(ids, num_ids, but_from, but_to)


def ids_of_list(list: Tensor, num_ids: int) -> Tensor:
    """Returns the ids in a compressed list that :func:`code_ids` made, ascending int64 [n]."""
    return operators.ids_of_list(list, num_ids)


def link_lists(lists: Sequence[Tensor], heads: int, num_ids: int) -> list[Tensor]:
    """Finds when each id in the first ``heads`` lists is needed next. A list has the ids that one batch needs, from :func:`code_ids`.

    Returns an int16 tensor for each of these lists, in ascending order of its ids: the number of lists until the id comes again, or 0 if it does not.
    """
    return operators.link_lists(lists, heads, num_ids)


def fill_slots(ids: Tensor, prior: Tensor, slot_id: Tensor, slot_key: Tensor, table: Tensor) -> None:
    """Initialises the tables of a cache: the first slots hold the distinct ``ids`` int64, the others are empty, and no next use is known.

    Args:
        prior: float32 [N], the probability that a batch needs each id.
        slot_id: int32 [C], written: the id whose row each slot holds; -1 for none.
        slot_key: int16 [C], written: the batch of the next use of each slot's row, as csrc/ways/slots.cpp encodes it.
        table: int16 (for C < 2**16) or int32, more than C entries, written: a hash table from ids to slots.
    """
    operators.fill_slots(ids, prior, slot_id, slot_key, table)


def note_uses(list: Tensor, batch: int, num_ids: int, slot_id: Tensor, slot_key: Tensor, table: Tensor) -> None:
    """Records that ``batch`` needs the ids of ``list`` (:func:`code_ids`): ``batch`` becomes the next use of the slots that hold them.

    A slot whose next use is known to be earlier does not change. Call the function in the order of the batches.
    """
    operators.note_uses(list, batch, num_ids, slot_id, slot_key, table)


def plan_batch(
    remote_id: Tensor,
    links: Tensor,
    batch: int,
    prior: Tensor,
    slot_id: Tensor,
    slot_key: Tensor,
    table: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Finds the rows of a batch that a cache's slots hold, and decides which of its other rows enter a slot; see :mod:`salientpp.ways.lookahead.planner`.

    Args:
        remote_id: int64 [n], distinct ids of [0, N).
        links: int16 [n] from :func:`link_lists`, the next uses of the same ids in ascending order.
        batch: number of the batch. Known later batches have numbers that are at most 2**15 - 1 larger.
        prior, slot_id, slot_key, table: as in :func:`fill_slots`; the last three are updated.

    Returns:
        Five int64 vectors. For the rows that the slots hold: ``hit_place`` (ascending positions in ``remote_id``) and ``hit_slot``. For the other rows:
        ``fetched_place`` (ascending). For the rows that enter: ``admitted_row`` (position among the fetched rows) and ``admitted_slot``.
    """
    return operators.plan_batch(remote_id, links, batch, prior, slot_id, slot_key, table)


def plan_sums(
    row: Tensor,
    col: Tensor,
    owner: Tensor,
    first: int,
    num_parts: int,
    row_bytes: int,
    id_bytes: int,
    source_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Decides which rows of a batch's deepest hop are fetched, and which are replaced by sums; see :mod:`salientpp.ways.sums.plan`.

    Args:
        row, col: int64 [e], the edges of that hop as positions in the batch; ``col`` in [0, first), and does not decrease.
        owner: int64 [d], the part that the rows of the batch's vertices ``first``, ..., ``first + d - 1`` would be fetched from; -1: not fetched.
        first: number of the batch's vertices that were found before that hop.
        num_parts: K, at most 2**20.
        row_bytes: bytes of a row. A sum takes the same number.
        id_bytes: bytes of a sent id, and of a group's size.
        source_bytes: bytes sent for each row in a sum: its id, and its weight if rows have weights.

    Returns:
        Eight int64 vectors. ``kept_vertex``, ascending in [0, d), and ``kept_edge``, ascending in [0, e), stay in the batch. ``kept_row`` has the
        sources of these edges, renumbered. ``target`` (a position in the batch) and ``size`` describe each sum, ordered by owner, then by target.
        ``summed_edge`` in [0, e) lists the edges that the sums replace, ``size`` of them for each. ``groups`` and ``sources`` [K] are the numbers of
        sums and of rows in them for each part.
    """
    return operators.plan_sums(row, col, owner, first, num_parts, row_bytes, id_bytes, source_bytes)


def minimum_cut(tail: Tensor, head: Tensor, capacity: Tensor, num_nodes: int, source: int, sink: int) -> Tensor:
    """Finds a minimum cut between two nodes of a directed graph: bool [num_nodes], True for nodes on the source's side.

    If several cuts are minimal, the one with the fewest nodes on the source's side is taken.

    Args:
        tail, head: int64 [a], the ends of each arc, in [0, num_nodes). Repeated arcs add up.
        capacity: float64 [a], at least 0; infinite for arcs that are never cut.
        source, sink: two different nodes.

    Raises:
        RuntimeError: an argument is wrong, or every cut has infinite capacity.
    """
    return operators.minimum_cut(tail, head, capacity, num_nodes, source, sink)
