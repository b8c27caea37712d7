"""The result of planning a memory budget, and the table in which combinations of methods are printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from salientpp.display import format_bytes, html, short, text
from salientpp.ways.planner.choices import Choice
from salientpp.ways.planner.costs import Cost
from salientpp.ways.planner.machines import Machines
from salientpp.ways.planner.trials import Batch

if TYPE_CHECKING:  # importing rich takes as long as making a small loader
    from salientpp.tables import FittedTable

#: Largest number of combinations in a table.
_MOST_LINES = 12

#: Width of a table in columns.
_WIDTH = 80

#: Parts of an epoch, with their colours in plots.
CAUSES = {"training": "#4c78a8", "loading": "#f2b134", "waiting": "#d1495b"}

#: Names of memory that copies take on the host, as ``loader.memory_used()`` has them.
COPIES = {"cache": "cached rows", "lookahead": "lookahead"}

#: Names of other memory, which the budget does not contain.
OTHERS = {"host": "own rows", "graph": "topology", "batches": "batches in flight", "exchange": "rows that travel"}


@dataclass(frozen=True)
class Line:
    """Expected cost of one combination of methods, for one rank or the slowest.

    Attributes:
        memory: bytes by name: 'cache' and 'lookahead' in a host's memory, 'device' on a rank's device.
    """

    choice: Choice
    cost: Cost
    memory: Mapping[str, int]

    @property
    def copies(self) -> int:
        """Bytes of a host's memory that copies of rows take: the cache, and what lookahead adds."""
        return sum(self.memory.get(name, 0) for name in COPIES)


@dataclass(frozen=True, repr=False)
class MemoryPlan:
    """The combination of methods that a loader uses within its memory budget. Its text is a table of 80 columns.

    Attributes:
        chosen: the combination.
        lines: the compared combinations, the fastest first.
        batch: mean size of a batch of this rank, and number of its batches.
        machines: the constants of the machines.
        memory, device_memory: the budget in bytes.
        saves, device_saves: seconds of an epoch that one more GiB would save. None: no budget was given.
        beside: bytes of ``memory`` that are not for copies. Only ranks that store nothing have them.
        held: bytes that the rank holds, by the names of ``loader.memory_used()``. Empty: unknown.
        reason: why this combination was chosen.
    """

    chosen: Line
    lines: Sequence[Line]
    batch: Batch
    machines: Machines
    memory: int
    device_memory: int
    saves: float | None = None
    device_saves: float | None = None
    beside: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    reason: str = "the slowest rank's epoch is expected to take the least time"

    def __repr__(self) -> str:
        return text([self._table(), *self._sentences()], _WIDTH)

    def _repr_html_(self) -> str:
        return html(self._table(), *self._sentences())

    @property
    def exceeds(self) -> str:
        """Warning text if options that the user gave need more memory than the budget, else an empty text."""
        if not self.memory or self.chosen.copies + self.beside <= self.memory:
            return ""
        needed, budget = format_bytes(self.chosen.copies), format_bytes(self.memory - self.beside)
        return (
            f"the options that were given need {needed} per host for copies of rows, more than the budget of {budget}"
        )

    def _table(self) -> Any:
        lines = [(line.choice.words, line.cost, line.cost.bytes_in, line.copies) for line in self.lines]
        place = next(place for place, line in enumerate(self.lines) if line is self.chosen)
        return table_of_ways("Expected epoch of the slowest rank", lines, place)

    def _sentences(self) -> Iterator[str]:
        """Yields the sentences below the printed table."""
        chosen, hidden = self.chosen, len(self.lines) - _MOST_LINES
        if hidden > 0:
            yield f"{hidden} slower combinations are not shown."
        yield f"chosen: {chosen.choice.words}, because {self.reason}."
        if any(not line.choice.cache and not line.cost.bytes_in for line in self.lines):
            yield "all ranks share one host, or need no rows that they lack, so nothing is fetched, and copies on the host save nothing."
        of_host = [
            f"{format_bytes(chosen.memory[name])} {words}" for name, words in COPIES.items() if name in chosen.memory
        ]
        yield f"copies per host: {' + '.join(of_host) or 'none'}, of {format_bytes(self.memory)}."
        if self.beside:
            yield f"{format_bytes(self.beside)} of the budget are for ids of cached rows, seeds, and memory of threads."
        if self.device_memory or "device" in chosen.memory:
            yield f"copies on the device: {format_bytes(chosen.memory.get('device', 0))} of {format_bytes(self.device_memory)}."
        if self.exceeds:
            yield f"note: {self.exceeds}."
        if self.held:
            others = [f"{format_bytes(self.held.get(name, 0))} {words}" for name, words in OTHERS.items()]
            yield f"besides the budget, this rank holds {', '.join(others)}."
        for saved, where in ((self.saves, "memory per host"), (self.device_saves, "device memory")):
            if saved is not None:
                seconds = f"{short(saved)} s" if saved >= 1e-3 else "no time"
                yield f"one more GiB of {where} would save {seconds} of an epoch."
        link, cores = self.machines.between, self.machines.cores
        yield f"constants: {link.bytes_per_second / 1e6:,.4g} MB/s between hosts, {_cores(cores)} for a rank."
        if self.machines.step is None:
            yield "note: no training step was measured, so this plan is for loading alone (salientpp calibrate --step)."


def table_of_ways(title: str, lines: Sequence[tuple[str, Any, float, int]], best: int) -> FittedTable:
    """Returns a printable table of combinations of methods, at most 12, in which line ``best`` is marked.

    Args:
        lines: for each combination: its name; its :class:`Cost`, or another object with these seconds; the bytes that arrive; the bytes of its copies.
    """
    from salientpp.tables import simple_table

    table = simple_table(title, ["ways", "seconds", *CAUSES, "network", "copies"], ["ways"])
    shown = range(len(lines))[:_MOST_LINES]
    for place in shown if best in shown else [best, *shown[:-1]]:
        words, cost, moved, copies = lines[place]
        seconds = (short(getattr(cost, name)) for name in ("seconds", *CAUSES))
        mark, style = (">", "bold") if place == best else (" ", "")
        table.add_row(f"{mark} {words}", *seconds, format_bytes(moved), format_bytes(copies), style=style)
    return table


def _cores(number: float) -> str:
    text = f"{number:.2g}"
    return f"{text} core{'' if text == '1' else 's'}"
