"""Measures the constants of the machines of a job (:class:`~salientpp.ways.planner.machines.Machines`), on all its ranks at once.

The constants of the loader are CPU seconds, which other processes on the machine hardly change. :mod:`salientpp.ways.planner.rates` measures cores and links,
and :mod:`salientpp.ways.planner.loads` the work of the loader. The CPU time of a short epoch is the sum of draws, gathers, exchanges and a remainder. The
remainder of an epoch without caches or sums is the cost of its batches. Each method adds its own cost to the remainder.

CPU seconds are means over the ranks, because the machines of a job are taken to be alike. The slowest rank determines rates, cores and the seconds of a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from salientpp.arguments import as_real
from salientpp.engine.basis import Basis
from salientpp.engine.engine import Engine
from salientpp.engine.way import Way
from salientpp.ranks.comm import Comm
from salientpp.ways.lookahead.way import Lookahead
from salientpp.ways.planner.loads import Draws, Load, TrialEpochs, measure_draws, measure_rows
from salientpp.ways.planner.machines import LINKS, Link, Machines, Step
from salientpp.ways.planner.rates import (
    largest,
    mean,
    measure_copies,
    measure_cores,
    measure_links,
    smallest,
    wait_for_device,
)
from salientpp.ways.sums.check import check_partial
from salientpp.ways.sums.moved import SUMS
from salientpp.ways.sums.way import SumsOfRows

#: Seconds and bytes of short measurements while a loader is made: of cores, of a link, and of the largest exchange of a rank. The loader can then be made
#: with little memory beside its copies.
_BRIEF = 0.1, 0.05, 4 * 2**20

#: Default and largest approximate time of all measurements, in seconds. If a batch takes a second, they take longer.
SECONDS, MOST_SECONDS = 20.0, 3600.0

#: Fractions of these seconds for measuring cores, draws, rows, each kind of short epochs, and steps.
_CORES, _DRAWS, _ROWS, _EPOCHS, _STEPS = 0.02, 0.04, 0.02, 0.15, 0.15

#: Limits of the number of timed steps.
_FEWEST_STEPS, _MOST_STEPS = 3, 256

#: Largest number of batches in flight while epochs are measured. It limits the time until the pipeline is full; the CPU time of a batch is the same.
_DEPTH = 4

#: The lookahead cache that is measured has the memory of this many batches' remote rows, so that its window is short.
_LOOKAHEAD_BATCHES = 4


def calibrate(
    basis: Basis,
    step: Callable[[Any], Any] | None = None,
    *,
    seconds: float = SECONDS,
    between: Link | None = None,
    gradient_bytes: float = 0.0,
    about: Mapping[str, Any] | None = None,
) -> Machines:
    """Measures the constants of the machines. Collective; all ranks get the same values.

    * ``cores``: every rank keeps as many threads busy as it may use cores. The number is their CPU time per second.
    * ``between``, ``within``: exchanges with all ranks of other hosts, and with the other ranks of the own host. At first they carry almost nothing, and
      then enough bytes that the rate dominates. ``within`` has its default if every rank is alone on its host.
    * ``to_device``: copies from pinned memory, if batches are on a device.
    * ``draw``: CPU time of drawing some batches, per edge.
    * ``row``, ``byte``: CPU time of looking up and gathering the own rows of these batches. Gathers of rows with twice the width separate the two.
    * ``wire``: CPU time of the exchanges, per byte sent or received.
    * ``batch``: remainder of the CPU time of short epochs without caches and sums, per batch.
    * ``look_ahead``: what a small lookahead cache adds, per vertex of a batch. It has its default if no cache can be used.
    * ``sum``: what sums add, per edge of the last hop. It has its default if the ranks cannot send sums.
    * ``step``: time of training steps on batches that were loaded before.

    Args:
        basis: the basis of a loader on a partitioned graph; every rank passes its own for the same loader.
        step: training step, called with a batch. It may average gradients over the ranks: all ranks call it equally often.
        seconds: approximate time of all measurements.
        between: link between hosts. None: it is measured.
        gradient_bytes: bytes that a rank receives in a step to average gradients.
        about: further entries of :attr:`Machines.about`.

    Raises:
        ValueError: ``seconds`` is not in (0, 3600], a rank has no batches, or ``between`` is None and all ranks are on one host.
        RankFailure: another rank failed.
        Exception: ``step`` failed.
    """
    with basis.comm.reporting("calibrate"):
        return _calibrated(basis, step, seconds, between, gradient_bytes, about or {})


def _calibrated(
    basis: Basis,
    step: Callable[[Any], Any] | None,
    seconds: float,
    between: Link | None,
    gradient_bytes: float,
    about: Mapping[str, Any],
) -> Machines:
    began, comm, order = time.perf_counter(), basis.comm, basis.epochs.order
    real = as_real(seconds)
    if real is None or not 0 < real <= MOST_SECONDS:
        raise ValueError(
            f"seconds must be a number > 0 and at most {MOST_SECONDS:g} (the time that measuring takes), got {seconds!r}"
        )
    hosts, number = basis.source.exchange.placement.ranks_by_host, min(order.batches_by_rank)
    if between is None and len(hosts) == 1:
        raise ValueError(
            f"the link between hosts can be measured with ranks on several hosts, but all {comm.size} rank{'s are' * (comm.size > 1) or ' is'} on one; "
            "start ranks on at least two hosts, or pass the link between them"
        )
    if number == 0:
        rank = order.batches_by_rank.index(0)
        raise ValueError(
            f"every rank must have at least one batch to measure, but rank {rank} has none; choose other seeds"
        )
    basis = dataclasses.replace(basis, depth=min(basis.depth, _DEPTH))
    found = _rates(basis, min(0.5, max(0.1, _CORES * seconds)))
    machines = Machines(**found) if between is None else Machines(**{**found, "between": between})
    engine = Engine(basis, ())
    with _one_thread():
        trial, machines = _loading(engine, machines, number, seconds)
    if step is not None:
        taken = _measure_step(comm, step, trial.keep(engine), _STEPS * seconds, basis.device)
        machines = dataclasses.replace(machines, step=dataclasses.replace(taken, gradient_bytes=gradient_bytes))
    return dataclasses.replace(machines, about={**_about(basis, hosts, time.perf_counter() - began), **about})


def measure_few(basis: Basis) -> Machines:
    """Measures cores, links and copies to the device, in about half a second. The other constants are defaults. Collective; equal on all ranks.

    A link that no two ranks use has its default, which is 10 Gbit/s between hosts.
    """
    found = _rates(basis, *_BRIEF) if basis.comm.size > 1 else {}
    found.pop("wire", None)  # so few exchanges do not tell it
    about = {"measured": "a few constants, when the loader was made"}
    return Machines(**{"between": LINKS["10GbE"], **found}, about=about)


def _rates(basis: Basis, core_seconds: float, *of_link: Any) -> dict[str, Any]:
    """Measures cores, links and copies: constants by name. ``of_link``: limits of :func:`measure_link`. Collective."""
    comm = basis.comm
    links = measure_links(comm, basis.source.exchange.placement, *of_link)
    found: dict[str, Any] = {name: measured.link for name, measured in links.items()}
    if links:
        found["wire"] = next(iter(links.values())).cpu_per_byte
    return {**found, "cores": measure_cores(comm, core_seconds), "to_device": measure_copies(comm, basis.device)}


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Lets torch use one thread per operator, because waiting threads would count as CPU time."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


def _loading(engine: Engine, machines: Machines, per_epoch: int, seconds: float) -> tuple[TrialEpochs, Machines]:
    """Measures the constants of loading. Returns the epochs that it ran, and ``machines`` with these constants. Collective."""
    basis, comm = engine.basis, engine.basis.comm
    draws = measure_draws(basis, _DRAWS * seconds)
    row, byte = measure_rows(engine, draws.ids, _ROWS * seconds)
    alone = {"draw": mean(comm, draws.seconds), "row": mean(comm, row), "byte": mean(comm, byte)}
    known: dict[str, Any] = {name: value for name, value in alone.items() if not math.isnan(value)}
    machines = dataclasses.replace(machines, batch=0.0, **known)
    trial = TrialEpochs.of(engine, per_epoch, _EPOCHS * seconds)
    plain = trial.load(engine)
    machines = dataclasses.replace(machines, batch=max(0.0, mean(comm, plain.left(machines) / plain.batches)))
    return trial, dataclasses.replace(machines, **_measure_ways(basis, trial, plain, machines, draws))


def _about(basis: Basis, hosts: Sequence[int], seconds: float) -> dict[str, Any]:
    source = basis.source
    fanouts = [list(each) for each in getattr(source.sampler, "fanouts", [])]
    name = socket.gethostname()
    # Every rank sends the bytes of its host's name, and rank 0 is the first.
    words = basis.comm.gather_numbers(list(name.encode()[:64].ljust(64)))[0]
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "ranks": basis.comm.size,
        "hosts": len(hosts),
        "host": bytes(words).decode(errors="replace").rstrip(),
        "dataset": "" if source.part is None else str(source.part.root),
        "num_neighbors": fanouts[0] if len(fanouts) == 1 else fanouts,
        "batch_size": basis.batch_size,
        "seconds": round(largest(basis.comm, seconds), 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _measure_ways(basis: Basis, trial: TrialEpochs, plain: Load, machines: Machines, draws: Draws) -> dict[str, Any]:
    """Measures the constants ``look_ahead`` and ``sum`` by name. It leaves out a method that this loader cannot use. Collective."""
    comm, source, found = basis.comm, basis.source, {}

    def measured(way: Way) -> Load:
        return trial.load(Engine(basis, [way]))

    rows = largest(comm, plain.remote / plain.batches)
    if source.travelling and source.part is not None and rows > 0:
        width = max(source.row_bytes[type_] for type_ in source.travelling)
        way = Lookahead("auto", max(2, int(_LOOKAHEAD_BATCHES * rows * width)), "vip")
        load = measured(way)
        # A batch over lists in parts waits after its draw. Other batches are drawn again, for their vertices.
        left = load.left(machines, 1 if source.drawing.is_collective else 2)
        found["look_ahead"] = mean(comm, left / load.vertices if way.planners else math.nan)
    if comm.size > 1 and draws.last and _has_sums(basis):
        load = measured(SumsOfRows("mean", None))
        # All edges are drawn, and all vertices are looked up, before sums replace some of them.
        load = dataclasses.replace(load, edges=plain.edges, vertices=plain.vertices, num_bytes=plain.num_bytes)
        found["sum"] = mean(comm, load.left(machines) / (draws.last * load.batches))
    return {name: max(0.0, value) for name, value in found.items() if not math.isnan(value)}


def _has_sums(basis: Basis) -> bool:
    """Returns True if batches can have sums, and ranks can send their messages."""
    if SUMS.name not in basis.source.exchange.types:
        return False
    try:
        check_partial(basis.source.part, basis.source, "mean", None)
    except ValueError:
        return False
    return True


# --- steps ------------------------------------------------------------------------------------------------


def _measure_step(
    comm: Comm, step: Callable[[Any], Any], batches: Sequence[Any], seconds: float, device: torch.device
) -> Step:
    """Measures a training step on all ranks at once, after a few untimed ones. Collective."""
    batches = batches[: int(smallest(comm, len(batches)))]

    def take(number: int) -> tuple[float, float]:
        comm.gather_numbers([0])
        began, cpu = time.perf_counter(), time.process_time()
        for place in range(number):
            step(batches[place % len(batches)])
        wait_for_device(device)
        return time.perf_counter() - began, time.process_time() - cpu

    take(1)
    each = largest(comm, take(2)[0]) / 2
    number = min(_MOST_STEPS, max(_FEWEST_STEPS, int(seconds / each)))
    passed, cpu = take(number)
    num_edges = [batch.num_edges for batch in batches]
    edges = statistics.fmean(num_edges[place % len(batches)] for place in range(number))
    return Step(largest(comm, passed) / number, mean(comm, cpu / number), mean(comm, edges))
