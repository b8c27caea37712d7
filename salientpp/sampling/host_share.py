"""The share of one rank in a batch that the ranks of a host compute together.

Every vertex of the batch belongs to one rank of the host, which loads its row and computes its rows in all layers. In the ``edge_index`` of a share, 0 to
n - 1 are the rank's own vertices, in the order of the batch. Numbers from n on are vertices of the host's other ranks that edges come from (the halo). They
are grouped by owner, and in the order of the batch within a group. This is also the order in which their rows arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

#: Number of seeds that a description of a batch lists.
LISTED_SEEDS = 3


@dataclass(frozen=True)
class WholeBatch:
    """Description of the batch that a share belongs to. Ranks of a host compare it, because only shares of one batch fit together.

    Attributes:
        num_seeds: number of seeds of the whole batch.
        first_seeds: ids of the first :data:`LISTED_SEEDS` seeds, or fewer.
        digest: checksum of all seeds, and of the numbers of vertices, edges and rows of all shares.
        name: number and epoch of the batch; empty if it was drawn outside an epoch.
        origin: checksum of the loader and of the keys of the batch's draws; 0 if it was drawn outside an epoch.
    """

    num_seeds: int = 0
    first_seeds: tuple[int, ...] = ()
    digest: int = 0
    name: str = ""
    origin: int = 0

    def __str__(self) -> str:
        first = ", ".join(map(str, self.first_seeds))
        seeds = (
            f"{self.num_seeds} seeds{f': {first}' if first else ''}{', ...' if self.num_seeds > LISTED_SEEDS else ''}"
        )
        return f"{self.name or 'a batch'} ({seeds}; checksum {(self.digest ^ self.origin) % 2**32:08x})"


@dataclass(frozen=True, eq=False)
class HostShare:
    """Tells one rank which rows it sends and receives while the ranks of a host compute a batch together.

    Below, "within h hops" means: at most h hops from the seeds.

    Attributes:
        num_vertices: number of vertices of the whole batch.
        own: numbers of own vertices within 0, 1, 2, ... hops. The last number is n.
        edges: numbers of edges into own vertices within 0, 1, 2, ... hops. The last number counts all edges of the share.
        send: int64, numbers (0 to n - 1) of own vertices whose rows other ranks need, grouped by receiver, ascending within a group. On the CPU.
        sent: for each rank of the host, numbers of the rows in ``send`` that go to it, within 0, 1, 2, ... hops.
        received: for each rank of the host, numbers of the rows in the halo that come from it, within 0, 1, 2, ... hops.
        whole: description of the whole batch, which the ranks compare.
    """

    num_vertices: int
    own: tuple[int, ...]
    edges: tuple[int, ...]
    send: Tensor
    sent: tuple[tuple[int, ...], ...]
    received: tuple[tuple[int, ...], ...]
    whole: WholeBatch = field(default=WholeBatch())

    @property
    def num_own(self) -> int:
        """Number of this rank's own vertices, n."""
        return self.own[-1]

    @property
    def send_counts(self) -> list[int]:
        """Number of rows to send to each rank of the host."""
        return [of_rank[-1] for of_rank in self.sent]

    @property
    def recv_counts(self) -> list[int]:
        """Number of rows to receive from each rank of the host."""
        return [of_rank[-1] for of_rank in self.received]
