"""Measures a few constants of the machines while a loader is made: cores, links, and copies to the device."""

from __future__ import annotations

import dataclasses
from typing import Any

from salientpp.engine.basis import Basis
from salientpp.ways.planner.machines import Link, Machines
from salientpp.ways.planner.rates import measure_copies, measure_cores, measure_links

#: Seconds in which cores are measured, and approximate seconds of each measurement of a link.
_CORES, _LINK = 0.1, 0.05

#: Largest number of bytes that a rank sends in one exchange, so that a loader can be made with little memory beside its copies.
_LINK_BYTES = 4 * 2**20

#: Constants that are not measured, for a link of 10 Gbit/s.
_DEFAULT = Machines(between=Link(1.25e9, 5e-5))


def measure_few(basis: Basis) -> Machines:
    """Measures cores, links and copies to the device, in about half a second. The other constants are defaults. Collective; equal on all ranks.

    A link that no two ranks use has its default.
    """
    comm, placement = basis.comm, basis.source.exchange.placement
    found: dict[str, Any] = {"about": {"measured": "a few constants, when the loader was made"}}
    if comm.size > 1:
        found["cores"] = measure_cores(comm, _CORES)
        found["to_device"] = measure_copies(comm, basis.device)
        found |= {name: measured.link for name, measured in measure_links(comm, placement, _LINK, _LINK_BYTES).items()}
    return dataclasses.replace(_DEFAULT, **found)
