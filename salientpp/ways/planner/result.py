"""The result of planning a memory budget, and the table in which it is printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from salientpp.display import format_bytes, html, text
from salientpp.ways.planner.choices import Choice
from salientpp.ways.planner.costs import Cost
from salientpp.ways.planner.machines import Machines
from salientpp.ways.planner.trials import Batch

#: Largest number of combinations in a table.
_MOST_LINES = 12

#: Width of a table in columns.
_WIDTH = 80

#: Names of memory that copies take on the host, as ``loader.memory_used()`` has them.
COPIES = {"cache": "cached rows", "lookahead": "lookahead"}

#: Names of other memory, which the budget does not contain.
OTHERS = {"host": "own rows", "graph": "topology", "batches": "batches in flight", "exchange": "rows that travel"}


@dataclass(frozen=True)
class Line:
    """Expected cost of one combination of methods, for one rank or the slowest.

    Attributes:
        memory: bytes by name: cache and lookahead count a host's memory, device counts a rank's device.
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
    held: Mapping[str, int] = field(default_factory=dict)
    reason: str = "the slowest rank's epoch is expected to take the least time"

    def __repr__(self) -> str:
        return text([self._table(), *self._sentences()], _WIDTH)

    def _repr_html_(self) -> str:
        return html(self._table(), *self._sentences())

    @property
    def exceeds(self) -> str:
        """Warning text if options that the user gave need more memory than the budget, else an empty text."""
        if not self.memory or self.chosen.copies <= self.memory:
            return ""
        needed, budget = format_bytes(self.chosen.copies), format_bytes(self.memory)
        return (
            f"the options that were given need {needed} per host for copies of rows, more than the budget of {budget}"
        )

    def _table(self) -> Any:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), width=_WIDTH)
        table.add_column("")
        table.add_column("ways", ratio=1)
        for name in ("epoch s", "training", "loading", "waiting", "MB in", "copies"):
            table.add_column(name, justify="right", no_wrap=True)
        for line in self._shown:
            cost = line.cost
            # Less than a microsecond is the rounding of a sum.
            parts = (each if each > 1e-6 else 0 for each in (cost.training, cost.loading, cost.waiting))
            seconds = [f"{each:.3g}" for each in (cost.seconds, *parts)]
            mark = ">" if line is self.chosen else ""
            table.add_row(mark, line.choice.words, *seconds, _megabytes(cost.bytes_in), format_bytes(line.copies))
        return table

    @property
    def _shown(self) -> list[Line]:
        lines = list(self.lines[:_MOST_LINES])
        return lines if any(line is self.chosen for line in lines) else [self.chosen, *lines[: _MOST_LINES - 1]]

    def _sentences(self) -> Iterator[str]:
        """Yields the sentences below the printed table."""
        chosen, hidden = self.chosen, len(self.lines) - len(self._shown)
        if hidden > 0:
            yield f"{hidden} slower combinations are not shown."
        yield f"chosen: {chosen.choice.words}, because {self.reason}."
        if any(not line.choice.cache and not line.cost.bytes_in for line in self.lines):
            yield "all ranks share one host, or need no rows that they lack, so nothing is fetched, and copies on the host save nothing."
        of_host = [
            f"{format_bytes(chosen.memory[name])} {words}" for name, words in COPIES.items() if name in chosen.memory
        ]
        yield f"copies per host: {' + '.join(of_host) or 'none'}, of {format_bytes(self.memory)}."
        if self.device_memory or "device" in chosen.memory:
            yield f"copies on the device: {format_bytes(chosen.memory.get('device', 0))} of {format_bytes(self.device_memory)}."
        if self.exceeds:
            yield f"note: {self.exceeds}."
        if self.held:
            others = [f"{format_bytes(self.held.get(name, 0))} {words}" for name, words in OTHERS.items()]
            yield f"besides the budget, this rank holds {', '.join(others)}."
        for saved, where in ((self.saves, "memory per host"), (self.device_saves, "device memory")):
            if saved is not None:
                seconds = f"{saved:.3g} s" if saved >= 1e-3 else "no time"
                yield f"one more GiB of {where} would save {seconds} of an epoch."
        link, cores = self.machines.between, self.machines.cores
        yield f"constants: {link.bytes_per_second / 1e6:,.4g} MB/s between hosts, {_cores(cores)} for a rank."
        if self.machines.step is None:
            yield "note: no training step was measured, so this plan is for loading alone (salientpp calibrate --step)."


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3g}" if num_bytes < 1e9 else f"{num_bytes / 1e6:,.0f}"


def _cores(number: float) -> str:
    text = f"{number:.2g}"
    return f"{text} core{'' if text == '1' else 's'}"
