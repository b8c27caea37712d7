"""Decides whether the ranks of a host share its memory, and with it one copy of rows and one cache."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from salientpp.ranks.comm import Comm
from salientpp.ranks.hosts import checked_hosts, sizes_of_hosts
from salientpp.ranks.placement import Placement
from salientpp.ranks.shared_memory import sharing
from salientpp.store.directory.manifest import parts_there
from salientpp.store.directory.opened import PartitionedGraph


def agree_on_hosts(
    comm: Comm, part: PartitionedGraph, given: Any, num_logical_ranks: int, own_rows: bool, cooperates: bool = False
) -> tuple[int, ...]:
    """Returns the number of ranks on each host, in the order of the ranks; empty if every rank is its own host. Collective, the same on all ranks.

    If the ranks of a host cannot share memory, each rank becomes its own host, and a warning says why.

    Args:
        given: the user's ``ranks_per_host``.
        num_logical_ranks: S, the number of logical ranks; 0 stands for the number of ranks.
        own_rows: True if this rank has its own source of rows, which other ranks cannot read.
        cooperates: True if the ranks of a host visit their seeds together.

    Raises:
        ValueError: ``given`` is wrong, differs between ranks or does not fit, or ``cooperates`` and ranks of a host cannot share memory; on every rank.
    """
    if comm.size == 1:
        checked_hosts(given)
        return ()
    facts = {"own_rows": own_rows, "logical_ranks": [num_logical_ranks, cooperates]}
    sizes, everyone = sizes_of_hosts(comm, given, facts)
    sizes = _divided(sizes, comm.size - part.num_storage_ranks)
    asked = everyone[0]["given"]
    # Different numbers raise an error later, when the arguments are compared.
    differ = any(theirs["logical_ranks"] != everyone[0]["logical_ranks"] for theirs in everyone)
    if max(sizes) == 1 or differ:
        return ()
    # Read only now: every rank has arrived, so a host's copy on its local disk has the parts that each of its ranks staged.
    with comm.reporting("make its loader"):
        there = parts_there(part.root)
    copies = [facts["there"] for facts in comm.gather_facts({"there": None if there is None else sorted(there)})]
    owning = [theirs["own_rows"] for theirs in everyone]
    trouble = _trouble(comm, part.whole, sizes, num_logical_ranks, owning, copies, cooperates)
    if trouble is not None and (cooperates or asked is not None):
        raise ValueError(trouble)
    if trouble is None:
        hosts = [range(*bounds) for bounds in pairwise([0, *accumulate(sizes)])]
        trouble = sharing(comm, hosts)
    if trouble is None:
        return sizes
    if cooperates:
        raise ValueError(
            f"the ranks of a host can compute batches together only if they share its memory, but {trouble}; leave cooperate out, or pass ranks_per_host=1"
        )
    if not any(owning):
        warnings.warn(
            f"the ranks of a host do not share its memory: {trouble}. Each rank has its own cache; pass ranks_per_host=1 if that is intended",
            UserWarning,
            stacklevel=4,
        )
    return ()


def _divided(sizes: Sequence[int], at: int) -> tuple[int, ...]:
    """Divides a host whose ranks stand on both sides of rank ``at``, because ranks that train and ranks that store share nothing."""
    found = []
    for first, end in pairwise([0, *accumulate(sizes)]):
        found += [at - first, end - at] if first < at < end else [end - first]
    return tuple(found)


def _trouble(
    comm: Comm,
    whole: PartitionedGraph,
    sizes: tuple[int, ...],
    num_logical_ranks: int,
    own_rows: Sequence[bool],
    copies: Sequence[list[int] | None],
    cooperates: bool,
) -> str | None:
    """Returns why the ranks of a host cannot share its memory, or None. Every rank gets the same result without communication."""
    for rank, has_own in enumerate(own_rows):
        if has_own:
            return (
                f"rank {rank}{comm.of} has rows of its own in columns=, which the other ranks of its host cannot read; "
                "leave these rows out, or pass ranks_per_host=1"
            )
    try:
        how = comm.size, whole.num_parts, num_logical_ranks, sizes, cooperates, whole.num_storage_ranks
        placements = [Placement(rank, *how) for rank in range(comm.size)]
    except ValueError as error:
        return str(error)
    for placement, there in zip(placements, copies):
        needed = placement.row_parts[placement.part_id]
        missing = [number for number in needed if there is not None and number not in there]
        if missing:
            return (
                f"rank {placement.rank}{comm.of} reads a copy without part {missing[0]}, which another rank of its host serves; let all ranks of a host stage "
                "to one directory, or pass ranks_per_host=1"
            )
    return None
