"""Storage hosts of a planned job: how long they are busy in an epoch, the memory of each, and their price.

A storage host sends the rows of T / S hosts that train. It is busy for the longer of two times: its link carries these bytes, or one of its cores gathers and
sends these rows. The epoch takes a little more than the longest of this time and the times of the hosts that train
(:mod:`salientpp.ways.planner.costs`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from salientpp.analysis.job import Job
from salientpp.display import format_bytes
from salientpp.ways.planner.costs import overlapped
from salientpp.ways.planner.machines import Link, Machines
from salientpp.ways.planner.result import Line


@dataclass(frozen=True)
class StorageHosts:
    """The storage hosts of a planned job.

    Attributes:
        number: S; 0 means that the hosts that train hold the rows.
        link: link of each.
        row_bytes: mean bytes of a row as it travels.
        memory: bytes of each: its rows, and the neighbour lists of its parts if they are stored in parts.
        price: price of each per hour.
    """

    number: int
    link: Link
    row_bytes: float
    memory: int
    price: float

    @classmethod
    def of(
        cls, number: int, job: Job, widths: Mapping[str | None, int], link: Link, price: float | None, divides: bool
    ) -> StorageHosts:
        """Describes ``number`` storage hosts of a job. All hold equally many bytes.

        Args:
            widths: by vertex type, bytes of a row as it travels.
            divides: True if the hosts divide the existing parts, so that more hosts than parts hold copies. False if the graph will have enough parts.
        """
        sizes = {type_: book.num_vertices for type_, book in job.held.items()}
        rows = sum(sizes.values())
        travelling = sum(size * widths[type_] for type_, size in sizes.items())
        stored = sum(size * job.widths[type_] for type_, size in sizes.items())
        if job.part.topology == "parts":
            stored += job.engines[0].basis.source.sampler.nbytes
        groups = max(1, min(number, job.part.whole.num_parts) if divides else number)
        memory = -(-stored // groups) if number else 0
        return cls(number, link, travelling / max(1, rows), memory, price or 0.0)

    def seconds(self, moved: float, machines: Machines) -> float:
        """Returns the seconds for which each storage host is busy in an epoch in which all together send ``moved`` bytes."""
        if not self.number:
            return 0.0
        own = moved / self.number
        cpu = machines.loading(0, own / max(1.0, self.row_bytes), own, own)
        return max(own / self.link.bytes_per_second, cpu)

    def beside(self, line: Line, moved: float, machines: Machines) -> Line:
        """Returns the cost of an epoch that also waits for the storage hosts."""
        cost = line.cost
        seconds = overlapped(cost.seconds, self.seconds(moved, machines))
        waiting = max(0.0, cost.waiting + seconds - cost.seconds)
        return dataclasses.replace(line, cost=dataclasses.replace(cost, seconds=seconds, waiting=waiting))


def check_storage(
    numbers: Sequence[int], price: float | None, machines: Machines, allow: Iterable[str], device_memory: Sequence[int]
) -> None:
    """Raises ValueError if a plan cannot have these numbers of storage hosts, or if one of the two prices is missing."""
    if wrong := [number for number in numbers if number < 0]:
        raise ValueError(f"storage_hosts must be integers >= 0, got {wrong[0]}")
    if price is not None and not 0 <= price < float("inf"):
        raise ValueError(f"storage_price must be a number >= 0, got {price}")
    if not any(numbers):
        if price is not None:
            raise ValueError("storage_price is the price of storage hosts, but there are none; pass storage_hosts too")
        return
    if (price is None) != (machines.price is None):
        missing, given = ("storage_price", "price") if price is None else ("price", "storage_price")
        raise ValueError(
            f"{missing} is missing, and {given} alone gives no cost of a job with storage hosts; pass both"
        )
    if "sums" in allow:
        raise ValueError("allow sums does not work with storage hosts; leave one of them out")
    if any(device_memory):
        raise ValueError(
            "device_memory does not work with storage hosts, because a loader with storage ranks does not plan for devices; leave one of them out"
        )


def notes_of(storage: Any, link: Link, given: bool) -> Iterator[str]:
    """Yields a sentence about what a plan with storage hosts assumes. ``given`` is False if their link is taken to be like that of the other hosts."""
    if storage:
        like = "" if given else ", as a host that trains has"
        yield (
            f"storage hosts were not measured. Each is taken to have a link of {format_bytes(link.bytes_per_second)}/s{like}, one core that gathers and "
            "sends rows, and memory for an equal share of the rows."
        )
