"""Determines which ranks a process group has, and whether this process may use it."""

from __future__ import annotations

import ctypes
import os
from typing import Any, cast

import torch.distributed as dist


def group_rank(process_group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Returns this process's rank in a group (None: the default group) and the number of ranks. For None, (0, 1) if torch.distributed is not initialised.

    Raises:
        ValueError: ``process_group`` is not a process group of this job, lacks this process, or is given although torch.distributed is not initialised.
    """
    ranks = members_of(process_group)
    return (0 if len(ranks) == 1 else ranks.index(dist.get_rank())), len(ranks)


def default_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.group.WORLD)  # None if torch.distributed is not initialised


def members_of(process_group: Any) -> tuple[int, ...]:
    """Returns the ranks of a group, as numbers of the default group, in the group's order. (0,) if torch.distributed is not initialised."""
    is_initialized = dist.is_available() and dist.is_initialized()
    if process_group is None:
        return tuple(range(dist.get_world_size())) if is_initialized else (0,)
    if not is_initialized:
        raise ValueError("process_group= needs torch.distributed, which is not initialised, or was destroyed")
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process_group must be a group that this rank is in, but rank {dist.get_rank()} is not in it; call this only on its members"
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(f"process_group must be a torch.distributed.ProcessGroup or None, got {process_group!r}")
    try:
        ranks = tuple(dist.get_process_group_ranks(process_group))
    except (KeyError, ValueError, RuntimeError):
        raise ValueError(
            "process_group must be a group of this job, got one that torch.distributed does not know; it may have been destroyed"
        ) from None
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"process_group must be a group that this rank is in, got ranks {list(ranks)} on rank {dist.get_rank()}"
        )
    return ranks


# --- forked children --------------------------------------------------------------------------------------

_parents_groups: list[dist.ProcessGroup] = []


def _leave_to_parent() -> None:
    """Keeps all groups alive in a forked child. They belong to the parent: destroying one would wait for its threads, which exist only in the parent."""
    if dist.is_available() and dist.is_initialized():
        _parents_groups.extend(dist.distributed_c10d._world.pg_map)
        for group in _parents_groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def is_parents_group() -> bool:
    """True if the default group belongs to the rank that this process was forked from."""
    return bool(_parents_groups) and any(group is dist.group.WORLD for group in _parents_groups)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
