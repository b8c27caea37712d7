"""Roles of the ranks in a job with storage ranks: a rank trains, or it only stores."""

from __future__ import annotations

import weakref
from typing import ClassVar

import torch.distributed as dist

from salientpp.ranks.members import default_group


class WithRoles:
    """Base of a partitioned graph: the roles of the ranks that opened it.

    Attributes:
        num_storage_ranks: number of ranks that only store, the last ones of the job; 0: every rank trains and stores.
        num_parts, part_id: number of parts, and the part that this rank serves.
    """

    num_storage_ranks: int
    num_parts: int
    part_id: int | None

    _made: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]] = (
        weakref.WeakKeyDictionary()
    )

    @property
    def only_stores(self) -> bool:
        """True on a rank that only stores (``storage_ranks``). Its script calls :func:`salientpp.serve` instead of training."""
        return self.num_storage_ranks > 0 and self.part_id == self.num_parts - 1

    @property
    def trainers(self) -> dist.ProcessGroup | None:
        """Process group of the ranks that train, to pass to ``DistributedDataParallel``. None, the default group, without storage ranks.

        The first use makes the group, which all ranks that train do together.

        Raises:
            ValueError: this rank only stores.
        """
        if not self.num_storage_ranks:
            return None
        if self.only_stores:
            raise ValueError(
                "this rank only stores, so it is not in the group of the ranks that train; call salientpp.serve(part) where part.only_stores is True"
            )
        made = self._made.setdefault(default_group(), {})
        number = dist.get_world_size() - self.num_storage_ranks
        if number not in made:
            made[number] = dist.new_group(range(number), use_local_synchronization=True)
        return made[number]
