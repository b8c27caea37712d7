"""Finds out which ranks run on one host.

The hosts come from the user (``ranks_per_host=``), torchrun, or SLURM's srun. A launcher's variables may be wrong, so the ranks compare them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from salientpp.arguments import as_integer
from salientpp.ranks.comm import Comm
from salientpp.ranks.facts import check_same


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
        told.mine = {**facts, "given": checked_hosts(given), "believed": _believed(comm)}
    everyone = told.everyone
    check_same([{"ranks_per_host": theirs["given"]} for theirs in everyone], comm.of)
    return _sizes(comm, everyone[0]["given"], [theirs["believed"] for theirs in everyone]), everyone


def _believed(comm: Comm) -> str | None:
    """Returns a name for this process's host by its launcher, or None."""
    return None if comm.job is None else host_by_launcher(*comm.job.launched)


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
