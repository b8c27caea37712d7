"""The share of one rank in a batch that the ranks of a host compute together.

Every vertex of the batch belongs to one rank of the host, which loads its row and computes its rows in all layers. In the ``edge_index`` of a share, 0 to
n - 1 are the rank's own vertices, in the order of the batch. Numbers from n on are vertices of the host's other ranks that edges come from (the halo). They
are grouped by owner, and in the order of the batch within a group. This is also the order in which their rows arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class HostShare:
    """One rank's share of a batch. Below, "within h hops" means: at most h hops from the seeds.

    Attributes:
        num_vertices: number of vertices of the whole batch.
        own: numbers of own vertices within 0, 1, 2, ... hops. The last number is n.
        edges: numbers of edges into own vertices within 0, 1, 2, ... hops. The last number counts all edges of the share.
        send: int64, own numbers of the rows that other ranks need, grouped by receiver, ascending within a group. On the CPU.
        sent: for each rank of the host, numbers of its rows in ``send`` within 0, 1, 2, ... hops.
        received: for each rank of the host, numbers of its rows in the halo within 0, 1, 2, ... hops.
    """

    num_vertices: int
    own: tuple[int, ...]
    edges: tuple[int, ...]
    send: Tensor
    sent: tuple[tuple[int, ...], ...]
    received: tuple[tuple[int, ...], ...]

    @property
    def num_own(self) -> int:
        """Number of this rank's own vertices, n."""
        return self.own[-1]

    @property
    def send_counts(self) -> list[int]:
        """Number of rows for each rank of the host."""
        return [of_rank[-1] for of_rank in self.sent]

    @property
    def recv_counts(self) -> list[int]:
        """Number of rows from each rank of the host."""
        return [of_rank[-1] for of_rank in self.received]
