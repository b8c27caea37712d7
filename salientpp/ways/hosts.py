"""Finds out which ranks run on one host, so that they can share its memory.

The hosts come from the user (``ranks_per_host=``), torchrun, or SLURM's srun. A launcher's variables may be wrong. So
the ranks compare them, and the ranks
of each host try to share memory, before anything depends on them.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

from salientpp.arguments import as_integer
from salientpp.ranks.comm import Comm
from salientpp.ranks.facts import check_same
from salientpp.ranks.members import group_rank
from salientpp.ranks.placement import Placement
from salientpp.ranks.shared_memory import sharing
from salientpp.store.directory.manifest import parts_there
from salientpp.store.directory.opened import PartitionedGraph


def checked_hosts(given: Any) -> int | list[int] | None:
    """Returns ``ranks_per_host`` as Python's numbers.

    Raises:
        ValueError: it is neither None, nor a number >= 1, nor a list of such numbers.
    """
    if given is None:
        return None
    number = as_integer(given)
    if number is not None and number >= 1:
        return number
    numbers = [as_integer(each) for each in given] if isinstance(given, Sequence) and not isinstance(given, str) else []
    if not numbers or not all(each is not None and each >= 1 for each in numbers):
        raise ValueError(
            "ranks_per_host must be the number of ranks on each host (a number >= 1, or a list with one for every host), or None (taken from torchrun "
            f"or SLURM), got {given!r}"
        )
    return [each for each in numbers if each is not None]


def host_by_launcher(rank: int, world_size: int, environ: Mapping[str, str] | None = None) -> str | None:
    """Returns a name for this process's host as torchrun or srun reports it, equal exactly for the ranks of one host. None if neither describes this rank.

    Args:
        rank, world_size: this process's rank in the default process group, and the number of ranks. A launcher whose variables have other values is ignored.
        environ: the environment; None is this process's.
    """
    environ = os.environ if environ is None else environ

    def number(name: str) -> int | None:
        text = environ.get(name, "")
        return int(text) if re.fullmatch(r"[0-9]{1,10}", text) else None

    local = number("LOCAL_RANK")
    if (number("RANK"), number("WORLD_SIZE")) == (rank, world_size) and local is not None:
        first, size = rank - local, number("LOCAL_WORLD_SIZE")
        if size is not None and first >= 0 and local < size and first + size <= world_size:
            return f"ranks {first} to {first + size - 1}"
    tasks = number("SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    if "SLURM_STEP_ID" in environ and (number("SLURM_PROCID"), tasks) == (rank, world_size):
        node = number("SLURM_NODEID")
        return None if node is None else f"node {node}"
    return None


def agree_on_hosts(
    comm: Comm, part: PartitionedGraph, given: Any, num_logical_ranks: int, own_rows: bool, cooperates: bool = False
) -> tuple[int, ...]:
    """Returns the number of ranks on each host, in the order of the ranks; empty if every rank is its own host. Collective, the same on all ranks.

    If the hosts come from a launcher and cannot be used, a warning says why.

    Args:
        given: the user's ``ranks_per_host``.
        num_logical_ranks: S, the number of logical ranks; 0 stands for the number of ranks.
        own_rows: True if this rank has its own source of rows, which other ranks cannot read.
        cooperates: True if the ranks of a host visit their seeds together.

    Raises:
        ValueError: ``given`` is wrong, differs between ranks or does not fit; on every rank.
    """
    if comm.size == 1:
        checked_hosts(given)
        return ()
    facts = {"own_rows": own_rows, "logical_ranks": [num_logical_ranks, cooperates]}
    sizes, everyone = sizes_of_hosts(comm, given, facts)
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
    trouble = _trouble(comm, part.whole.num_parts, sizes, num_logical_ranks, owning, copies, cooperates)
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


def sizes_of_hosts(
    comm: Comm, given: Any, facts: Mapping[str, Any], task: str = "make its loader"
) -> tuple[tuple[int, ...], list[dict[str, Any]]]:
    """Returns the number of ranks on each host, in the order of the ranks, and the ``facts`` of all ranks. Collective, the same on all ranks.

    Args:
        given: the user's ``ranks_per_host``.
        facts: further JSON values of this rank.
        task: what the ranks are doing, for errors.

    Raises:
        ValueError: ``given`` is wrong, differs between ranks or does not fit; on every rank.
    """
    with comm.together(task) as told:
        told.mine = {**facts, "given": checked_hosts(given), "believed": host_by_launcher(*group_rank())}
    everyone = told.everyone
    check_same([{"ranks_per_host": theirs["given"]} for theirs in everyone], comm.of)
    return _sizes(comm, everyone[0]["given"], [theirs["believed"] for theirs in everyone]), everyone


def _sizes(comm: Comm, asked: int | list[int] | None, believed: Sequence[str | None]) -> tuple[int, ...]:
    if asked is None:
        # If the ranks of a host are not consecutive, each run of them counts as a host.
        names = [rank if name is None else name for rank, name in enumerate(believed)]
        return tuple(len(list(ranks)) for _, ranks in groupby(names))
    if isinstance(asked, int):
        if comm.size % asked:
            raise ValueError(
                f"ranks_per_host={asked} does not fit {comm.size} ranks{comm.of}; start a multiple of {asked}, or pass a list with a number for every host"
            )
        return (asked,) * (comm.size // asked)
    if sum(asked) != comm.size:
        raise ValueError(
            f"ranks_per_host={asked} must add up to the {comm.size} ranks{comm.of}, got a sum of {sum(asked)}"
        )
    return tuple(asked)


def _trouble(
    comm: Comm,
    num_parts: int,
    sizes: tuple[int, ...],
    num_logical_ranks: int,
    own_rows: Sequence[bool],
    copies: Sequence[list[int] | None],
    cooperates: bool,
) -> str | None:
    """Returns why these hosts cannot be used, or None. Every rank finds the same reason without communication."""
    for rank, has_own in enumerate(own_rows):
        if has_own:
            return (
                f"rank {rank}{comm.of} has rows of its own in columns=, which the other ranks of its host cannot read; "
                "leave these rows out, or pass ranks_per_host=1"
            )
    try:
        how = comm.size, num_parts, num_logical_ranks, sizes, cooperates
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
