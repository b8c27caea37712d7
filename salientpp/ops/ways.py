"""Operators of lookahead and of sums."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from salientpp.ops.library import operators


def code_ids(ids: Tensor, num_ids: int, but_from: int = 0, but_to: int = 0) -> Tensor:
    """The distinct of the ``ids`` int64 [n], in any order, as a list of 5 to 7 bits an id, uint8; but for those in [but_from, but_to).

    Ids are in [0, num_ids), of fewer than 2**31.
    """
    return operators.code_ids(ids, num_ids, but_from, but_to)


def ids_of_list(list: Tensor, num_ids: int) -> Tensor:
    """The ids of a list that :func:`code_ids` made, int64 [n], ascending."""
    return operators.ids_of_list(list, num_ids)


def link_lists(lists: Sequence[Tensor], heads: int, num_ids: int) -> list[Tensor]:
    """For every id of each of the first ``heads`` lists, in ascending order, how many lists later it comes next, int16; 0: in none of these."""
    return operators.link_lists(lists, heads, num_ids)


def fill_slots(ids: Tensor, prior: Tensor, slot_id: Tensor, slot_key: Tensor, table: Tensor) -> None:
    """Let the first slots hold the distinct ``ids`` int64 and the others nothing, with no batch known.

    Args:
        prior: float32 [N], how probably a batch needs each id.
        slot_id, slot_key: int32 [C] and int16 [C], written.
        table: int16 (for C < 2**16) or int32, more than C entries, written.
    """
    operators.fill_slots(ids, prior, slot_id, slot_key, table)


def note_uses(list: Tensor, batch: int, num_ids: int, slot_id: Tensor, slot_key: Tensor, table: Tensor) -> None:
    """Let slots whose next use is not known have it at ``batch``, if their ids are in the list. Lists come in the order of their batches."""
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
    """Which rows of a batch the slots have, and which of the others enter; see :mod:`salientpp.ways.lookahead.planner`.

    Args:
        remote_id: int64 [n], distinct ids of [0, N).
        links: int16 [n], for the same ids in ascending order, as :func:`link_lists` gives them.
        batch: its number; those of known batches are at most 2**15 - 1 larger.
        prior, slot_id, slot_key, table: as in :func:`fill_slots`; the last three are brought up to date.

    Returns:
        Five int64 vectors: ``hit_place`` (ascending, in ``remote_id``) and ``hit_slot``, ``fetched_place`` (ascending), and for what enters
        ``admitted_row`` (which of the fetched) and ``admitted_slot``.
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
    """Which rows of a batch's deepest hop are fetched, and which are replaced by sums; see :mod:`salientpp.ways.sums.plan`.

    Args:
        row, col: int64 [e], the edges of that hop as positions in the batch; ``col`` in [0, first), and does not decrease.
        owner: int64 [d], for the batch's vertices first, ..., first + d - 1 the part that their rows would be fetched from; -1: from none.
        first: the vertices that were found before.
        num_parts: K, at most 2**20.
        row_bytes: of a row, and of a sum.
        id_bytes: of an id that is sent, and of the size of a group.
        source_bytes: of what is sent for a row in a sum: its id, and its weight if there are such.

    Returns:
        Eight int64 vectors. ``kept_vertex``, ascending in [0, d), and ``kept_edge``, ascending in [0, e): what stays in the batch; ``kept_row``, the
        sources of these edges, renumbered. By owner, and then by target: ``target`` (a position in the batch) and ``size`` of each sum, and, of all
        their sizes together, ``summed_edge`` in [0, e), the edges that they replace. ``groups`` and ``sources`` [K]: how many of these each part has.
    """
    return operators.plan_sums(row, col, owner, first, num_parts, row_bytes, id_bytes, source_bytes)
