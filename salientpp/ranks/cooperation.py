"""The ranks that compute the batches of a loader together."""

from __future__ import annotations

from dataclasses import dataclass

from salientpp.ranks.comm import Comm


@dataclass(frozen=True, eq=False)
class Cooperation:
    """The ranks of a host that compute each batch together, see ``cooperate`` of :class:`salientpp.NeighborLoader`.

    Attributes:
        comm: all ranks of the loader. The loader starts collectives on it, also in a thread of its own; :meth:`Comm.among` makes connections for other uses.
        ranks_of_host: ranks of this host in ``comm``.
        host: number of this host.
    """

    comm: Comm
    ranks_of_host: range
    host: int

    @property
    def place(self) -> int:
        """Number of this rank on its host, from 0. :class:`HostShare` numbers the ranks of a host in the same way."""
        return self.comm.rank - self.ranks_of_host.start
