"""Combinations of ways within a memory budget, as values of the loaders' options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from salientpp.arguments import as_real
from salientpp.engine.way import Way
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ways.cache import Cache
from salientpp.ways.device import DeviceRows
from salientpp.ways.lookahead.shape import check_lookahead
from salientpp.ways.lookahead.way import Lookahead
from salientpp.ways.sums.plan import REDUCTIONS
from salientpp.ways.sums.way import SumsOfRows
from salientpp.ways.topology_cache import TopologyCache

#: Shares of the budget that copies of neighbour lists may take, if the topology is stored in parts.
LIST_SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2)

#: Shares of the device's budget that the part's own rows may take. Cached rows take the rest.
OWN_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)


@dataclass(frozen=True)
class Choice:
    """Values of the options that choose ways. Amounts are bytes: per host, or of a rank's device.

    Attributes:
        cache: ``replication_factor``, the size of the cache of rows.
        lookahead: 'auto', or 0.
        sums: ``partial_aggregation``, or None.
        lists: ``topology_cache``.
        device_rows, device_cache: as the options.
    """

    cache: float | int = 0
    lookahead: str | int = 0
    sums: str | None = None
    lists: int = 0
    device_rows: float | int = 0.0
    device_cache: float | int = 0.0

    #: Names of the loaders' options.
    OPTIONS = {  # noqa: RUF012
        "cache": "replication_factor",
        "lookahead": "lookahead",
        "sums": "partial_aggregation",
        "lists": "topology_cache",
        "device_rows": "device_rows",
        "device_cache": "device_cache",
    }

    @property
    def options(self) -> dict[str, Any]:
        """The values by the names of the loaders' options."""
        return {option: getattr(self, name) for name, option in self.OPTIONS.items()}

    @classmethod
    def of(cls, options: Any) -> Choice:
        """Reverses :attr:`options`.

        Raises:
            ValueError: these are not values of the options.
        """
        names = list(cls.OPTIONS.values())
        if not isinstance(options, Mapping) or sorted(options) != sorted(names):
            raise ValueError(f"a plan must have the entries {', '.join(names)}, got {options!r}")
        values = {name: options[option] for name, option in cls.OPTIONS.items()}
        for name in ("cache", "lists", "device_rows", "device_cache"):
            amount = as_real(values[name])
            if amount is None or amount < 0:
                raise ValueError(f"{cls.OPTIONS[name]} of a plan must be a number >= 0, got {values[name]!r}")
        if values["sums"] not in (None, "auto", *REDUCTIONS):
            raise ValueError(
                f"partial_aggregation of a plan must be one of {', '.join(REDUCTIONS)} or None, got {values['sums']!r}"
            )
        return cls(**{**values, "lookahead": check_lookahead(values["lookahead"])})

    def ways(self, policy: Any = "vip", weight: str | None = None) -> list[Way]:
        """Returns the ways of this choice, in the order in which they act."""
        ways: list[Way] = []
        if self.lists:
            ways.append(TopologyCache(self.lists))
        if self.device_rows:
            ways.append(DeviceRows(self.device_rows))
        if self.cache:
            how = self.cache, policy, self.device_cache
            ways.append(Lookahead(self.lookahead, *how) if self.lookahead else Cache(*how))  # type: ignore[arg-type]
        if self.sums is not None:
            ways.append(SumsOfRows(self.sums, weight))  # type: ignore[arg-type]
        return ways

    @property
    def words(self) -> str:
        """A name of the combination for tables."""
        ways = ["lookahead" if self.lookahead else "cache"] if self.cache else []
        ways += ["lists"] if self.lists else []
        ways += ["sums"] if self.sums else []
        ways += ["device rows"] if self.device_rows else []
        ways += ["device cache"] if self.device_cache else []
        return " + ".join(ways) or "no cache"


def index_bytes(books: Iterable[PartitionBook]) -> int:
    """Returns the bytes of the index of cached rows, for the partition books of the rows that travel."""
    # Each set of ids has a word of 8 bytes for 32 ids. α rounds to less than one byte for each part.
    return sum(8 * -(-book.num_vertices // 32) + book.num_parts for book in books)


@dataclass(frozen=True)
class Budget:
    """Memory that ways may take, and the ways that are possible.

    Attributes:
        memory: bytes of a host's memory for copies of rows and lists.
        device_memory: bytes of a rank's device.
        all_rows: bytes of all rows of other parts. A larger cache holds no more.
        index: bytes of the index of cached rows, which every cache needs beside its rows.
        all_lists: bytes of all neighbour lists of other parts; 0 if every host has the topology.
        looks_ahead: True if a lookahead cache is possible.
        prior: bytes of the probabilities that a lookahead cache needs beside its share of the budget.
        sums: reduction that sums may use; None: no sums.
        given: option values that the user gave, by the names of :class:`Choice`. They are not chosen.
    """

    memory: int
    device_memory: int = 0
    all_rows: int = 0
    index: int = 0
    all_lists: int = 0
    looks_ahead: bool = True
    prior: int = 0
    sums: str | None = None
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def choices(self) -> list[Choice]:
        """Returns the combinations to compare, each once. The first is the static cache in the whole budget."""
        return [*dict.fromkeys(dataclasses.replace(choice, **self.given) for choice in self._all())]

    def _all(self) -> Iterator[Choice]:
        for lists in dict.fromkeys(self._lists()):
            for own, cached in self._on_device():
                # Copies on the device have an index of their own, which the host holds too.
                left = self.memory - lists - (2 if cached else 1) * self.index
                cache, ahead = (max(0, min(left - beside, self.all_rows)) for beside in (0, self.prior))
                cache = ahead if self.given.get("lookahead") else cache
                on_device: dict[str, Any] = {"device_rows": own, "device_cache": cached}
                yield Choice(cache, lists=lists, **on_device)
                if self.sums is not None:
                    yield Choice(cache, sums=self.sums, lists=lists, **on_device)
                if self.looks_ahead and ahead and not cached:
                    yield Choice(ahead, lookahead="auto", lists=lists, **on_device)

    def _lists(self) -> Iterable[int]:
        """Returns amounts of memory for lists, beginning with none."""
        # A given window may be too long for a cache that gives memory to lists, which would be an error.
        is_open = self.all_lists > 0 and isinstance(self.given.get("lookahead", "auto"), str)
        shares: Sequence[float] = LIST_SHARES if is_open else (0.0,)
        return (min(self.all_lists, int(share * self.memory)) for share in shares)

    def _on_device(self) -> Iterable[tuple[int, int]]:
        """Returns amounts of the device's memory for own and for cached rows."""
        if not self.device_memory:
            return [(0, 0)]
        return [(int(share * self.device_memory), int((1 - share) * self.device_memory)) for share in OWN_SHARES]
