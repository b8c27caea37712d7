"""Which part does rank r serve, and at which place among the ranks that serve it?

``world_size = num_parts × ranks_per_part``, and rank r serves part ``r // ranks_per_part``: torchrun's order, where the ranks of one host
follow one another. Ranks of a part with the same place in it form a column of the group; a request for another part's rows stays in it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Where one rank stands in a group that serves K parts.

    Attributes:
        rank: in [0, ``world_size``).
        world_size: ranks of the group.
        num_parts: K.

    Raises:
        ValueError: the number of ranks is no multiple of the number of parts.
    """

    rank: int
    world_size: int
    num_parts: int

    def __post_init__(self) -> None:
        if self.world_size % self.num_parts != 0:
            raise ValueError(
                f"world size {self.world_size} does not fit {self.num_parts} parts: every part is served by the same number "
                f"of ranks; start {self.num_parts} ranks or a multiple of that, or partition into {self.world_size} parts"
            )

    @property
    def ranks_per_part(self) -> int:
        return self.world_size // self.num_parts

    @property
    def part_id(self) -> int:
        """The part that this rank serves."""
        return self.rank // self.ranks_per_part

    @property
    def place(self) -> int:
        """This rank's place among the ranks of its part, in [0, ``ranks_per_part``)."""
        return self.rank % self.ranks_per_part

    def server_of(self, part_id: int) -> int:
        """The rank of a part that has this rank's place: the one to ask for rows of that part."""
        return part_id * self.ranks_per_part + self.place


def parts_of(rank: int, world_size: int, num_parts: int) -> range:
    """The parts that a rank serves; with fewer ranks than parts (one per host, say), those of its share of the ranks to be."""
    return range(rank * num_parts // world_size, -((rank + 1) * num_parts // -world_size))
