"""The combinations of caches and other methods that a plan compares within a memory budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_geometric.sampler import NodeSamplerInput

from salientpp.arguments import as_real
from salientpp.engine.basis import Basis
from salientpp.engine.way import Way
from salientpp.ops import MAP_BUDGET_BYTES
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ways.cache import Cache
from salientpp.ways.device import DeviceRows
from salientpp.ways.lookahead.shape import check_lookahead
from salientpp.ways.lookahead.way import Lookahead
from salientpp.ways.planner.trials import Trials
from salientpp.ways.sums.plan import REDUCTIONS
from salientpp.ways.sums.way import SumsOfRows

#: Bytes of the id of a cached row.
_ID_BYTES = 8

#: Shares of the device's budget that the part's own rows may take. Cached rows take the rest.
OWN_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)


@dataclass(frozen=True)
class Choice:
    """One combination of methods that a plan compares, as values of loader options. Amounts are bytes per host, or per device.

    Attributes:
        cache: ``replication_factor``, the size of the cache of rows.
        lookahead: 'auto', or 0.
        sums: ``partial_aggregation``, or None.
        device_rows, device_cache: the entries 'part' and 'cache' of ``device_rows``.
    """

    cache: float | int = 0
    lookahead: str | int = 0
    sums: str | None = None
    device_rows: float | int = 0.0
    device_cache: float | int = 0.0

    #: Names of the loaders' options, as in :class:`~salientpp.engine.option.Values`.
    OPTIONS = {  # noqa: RUF012
        "cache": "replication_factor",
        "lookahead": "lookahead",
        "sums": "partial_aggregation",
        "device_rows": "device_rows",
        "device_cache": "device_rows_cache",
    }

    @property
    def values(self) -> dict[str, Any]:
        """The values, by names of loader options (:attr:`OPTIONS`)."""
        return {option: getattr(self, name) for name, option in self.OPTIONS.items()}

    @property
    def options(self) -> dict[str, Any]:
        """The values as arguments of a loader. Options that have their defaults are left out."""
        found = {name: value for name, value in self.values.items() if value}
        cached = found.pop("device_rows_cache", None)
        return found if cached is None else {**found, "device_rows": {"part": self.device_rows, "cache": cached}}

    @classmethod
    def of(cls, options: Any) -> Choice:
        """Makes a choice from :attr:`values`.

        Raises:
            ValueError: these are not values of the options.
        """
        names = list(cls.OPTIONS.values())
        if not isinstance(options, Mapping) or sorted(options) != sorted(names):
            raise ValueError(f"a plan must have the entries {', '.join(names)}, got {options!r}")
        values = {name: options[option] for name, option in cls.OPTIONS.items()}
        for name in ("cache", "device_rows", "device_cache"):
            amount = as_real(values[name])
            if amount is None or amount < 0:
                raise ValueError(f"{cls.OPTIONS[name]} of a plan must be a number >= 0, got {values[name]!r}")
        if values["sums"] not in (None, "auto", *REDUCTIONS):
            raise ValueError(
                f"partial_aggregation of a plan must be one of {', '.join(REDUCTIONS)} or None, got {values['sums']!r}"
            )
        return cls(**{**values, "lookahead": check_lookahead(values["lookahead"])})

    def ways(self, policy: Any = "vip", weight: str | None = None) -> list[Way]:
        """Returns the methods of this choice, in the order in which they act."""
        ways: list[Way] = []
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
        """Name of the combination in tables."""
        ways = ["lookahead" if self.lookahead else "cache"] if self.cache else []
        ways += ["sums"] if self.sums else []
        ways += ["device rows"] if self.device_rows else []
        ways += ["device cache"] if self.device_cache else []
        return " + ".join(ways) or "no cache"


def index_bytes(books: Iterable[PartitionBook]) -> int:
    """Returns the bytes of a cache's index, which finds cached rows by id. ``books`` has a partition book for each vertex type whose rows travel."""
    return sum(index_bytes_of(book.num_vertices, book.num_parts) for book in books)


def index_bytes_of(num_vertices: int, num_parts: int) -> int:
    """Returns the bytes of a cache's index for one vertex type."""
    # Each set of ids has a word of 8 bytes for 32 ids. α rounds to less than one byte for each part.
    return 8 * -(-num_vertices // 32) + num_parts


#: Bytes of a rank's memory for each of its seeds: its id, and its place in the order of an epoch.
_SEED_BYTES = 16

#: Working memory of a thread, in bytes for each vertex and each edge of a batch. It stays when batches are gone. Kernels keep 52 bytes for each vertex
#: (csrc/store/look_up.cpp, csrc/sampling/join_drawn.cpp, merge_lists.cpp). The rest are short-lived tensors, whose memory the C library keeps: ids as they
#: travel, and for each edge its source and its ends while a hop is joined.
_VERTEX_BYTES, _EDGE_BYTES = 64, 24


class Beside(NamedTuple):
    """Needs besides copies that the budget of a host that only trains includes. So the budget is for all memory of the host but that of batches.

    Attributes:
        tables: bytes of the seeds, of the tables of the threads that draw, and of the working memory of these threads and of the one that drives the pipeline.
        num_rows, row_bytes: number of the rows that may be cached, and bytes of the smallest. They bound the ids of cached rows. 0: ids are not included.
    """

    tables: int = 0
    num_rows: int = 0
    row_bytes: int = 0

    @classmethod
    def of(cls, basis: Basis) -> Beside:
        """Returns the values of a rank. They are 0 unless other ranks store its rows. Collective, because trial batches are drawn."""
        source, placement = basis.source, basis.epochs.placement
        books = [source.books[type_] for type_ in source.travelling]
        if not (placement.num_storage_ranks and books):
            return cls()
        batch = Trials(basis).batch
        if not placement.logical_ranks:
            return cls()
        # Threads find the vertices of trees, and those of very large graphs, in a table of the batch.
        table = 4 * sum(book.num_vertices for book in source.books.values())
        has_tables = table <= MAP_BUDGET_BYTES and not getattr(source.sampler, "disjoint", False)
        inputs: Any = source.seeds.inputs
        num_seeds = inputs.node.numel() if isinstance(inputs, NodeSamplerInput) else inputs.row.numel()
        working = int(_VERTEX_BYTES * batch.vertices + _EDGE_BYTES * batch.edges)
        of_rank = has_tables * table * max(1, basis.num_workers) + _SEED_BYTES * num_seeds
        of_rank += working * (1 + basis.num_workers)
        return cls(
            of_rank * basis.ranks_on_host,
            sum(book.num_vertices for book in books),
            max(1, min(source.row_bytes[type_] for type_ in source.travelling)),
        )

    @classmethod
    def largest(cls, of_ranks: Iterable[Sequence[int]]) -> Beside:
        """Returns the largest of the values of several ranks."""
        return cls(*map(max, zip(*of_ranks)))

    def bytes_of(self, memory: int) -> int:
        """Returns the bytes of a budget that are not for copies: seeds and tables, which get at most half, and ids of as many rows as fit into the rest."""
        tables = min(self.tables, memory // 2)
        most = -(-(memory - tables) // (_ID_BYTES + self.row_bytes)) if self.row_bytes else 0
        return tables + _ID_BYTES * min(most, self.num_rows)


@dataclass(frozen=True)
class Budget:
    """Memory that copies may take, and the methods that this loader can use.

    Attributes:
        memory: bytes of a host's memory for copies of rows.
        device_memory: bytes of a rank's device.
        all_rows: bytes of all rows of other parts. A larger cache holds no more.
        index: bytes of the index of cached rows, which every cache needs beside its rows.
        beside: needs that the budget includes besides copies.
        looks_ahead: True if a lookahead cache is possible.
        prior: bytes of the probabilities that a lookahead cache needs beside its share of the budget.
        sums: reduction that sums may use; None: no sums.
        given: option values that the user gave, by the names of :class:`Choice`. They are not chosen.
    """

    memory: int
    device_memory: int = 0
    all_rows: int = 0
    index: int = 0
    beside: Beside = Beside()  # noqa: RUF009  # immutable
    looks_ahead: bool = True
    prior: int = 0
    sums: str | None = None
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def choices(self) -> list[Choice]:
        """Returns the combinations to compare, each once. The first is the static cache in the whole budget."""
        return [*dict.fromkeys(dataclasses.replace(choice, **self.given) for choice in self._all())]

    def _all(self) -> Iterator[Choice]:
        for own, cached in self._on_device():
            # Copies on the device have an index of their own, which the host holds too.
            left = self.memory - self.beside.bytes_of(self.memory) - (2 if cached else 1) * self.index
            cache, ahead = (max(0, min(left - beside, self.all_rows)) for beside in (0, self.prior))
            cache = ahead if self.given.get("lookahead") else cache
            on_device: dict[str, Any] = {"device_rows": own, "device_cache": cached}
            yield Choice(cache, **on_device)
            if self.sums is not None:
                yield Choice(cache, sums=self.sums, **on_device)
            if self.looks_ahead and ahead and not cached:
                yield Choice(ahead, lookahead="auto", **on_device)

    def _on_device(self) -> Iterable[tuple[int, int]]:
        """Returns the divisions of device memory to compare: (bytes for the part's rows, bytes for cached rows)."""
        if not self.device_memory:
            return [(0, 0)]
        return [(int(share * self.device_memory), int((1 - share) * self.device_memory)) for share in OWN_SHARES]
