"""Seconds of an epoch of one rank, predicted from the price of a batch and the constants of the machines.

Loading and training run at the same time, and each needs cores and the link. For n batches:

* Loading takes ``L = n (batch + drawing + gathering + sending + work of lookahead and sums)`` seconds of one thread.
* Training steps take ``S = n step``, as measured on all ranks at once.
* Loading prolongs the steps by ``E = max(0, L - S max(0, cores - 1)) / min(cores, 2)``, because it uses the cores that the step leaves free.
* It also uses the time in which steps wait for gradients: the smaller of ``n gradients / rate`` and ``S - n cpu / min(cores, 1)``. The cores are busy for
  C, which is S and what then remains of E.
* The link is busy for ``N = n max(arriving / rate, delay / 2)``. Rows, requests, neighbour lists and gradients arrive.
* Copies to the device take ``D = n copied / rate``.

The three overlap, so the epoch takes a little more than the longest of them: ``(C^p + N^p + D^p)^(1/p)`` with p = 10. docs/results/plan.md compares predictions
with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from salientpp.engine.way import Price
from salientpp.ways.planner.choices import Choice
from salientpp.ways.planner.machines import Machines, Step
from salientpp.ways.planner.trials import Batch

#: Exponent p: infinite would mean that cores, link and copies overlap completely.
OVERLAP = 10.0

_NO_STEP = Step(seconds=0.0)

#: Number of ticks that the first batch needs to pass through the pipeline.
FILL = 10


@dataclass(frozen=True)
class Cost:
    """Expected cost of an epoch of one rank.

    Attributes:
        seconds: time of the epoch.
        training: time of the training steps alone; part of ``seconds``.
        loading: time by which loading prolongs the training steps, because both need cores.
        waiting: time in which the cores wait for the link or for copies to the device. The three parts add up to ``seconds``.
        link: time for which the link is busy.
        cpu: seconds of one thread for loading.
        bytes_in: bytes that arrive over the link for the loader.
    """

    seconds: float
    training: float
    loading: float
    waiting: float
    link: float
    cpu: float
    bytes_in: float


def overlapped(*seconds: float) -> float:
    """Returns the time that works take which overlap almost completely: a little more than the longest."""
    longest = max(seconds)
    return longest * sum((each / longest) ** OVERLAP for each in seconds) ** (1 / OVERLAP) if longest else 0.0


def cost_of(price: Price, batch: Batch, choice: Choice, machines: Machines, sends: bool = True) -> Cost:
    """Predicts the cost of an epoch of ``batch.number`` batches, from the price of one batch.

    ``sends`` is False on a rank that sends no rows, because storage ranks hold them.
    """
    n, step = batch.number, machines.step or _NO_STEP
    rows = sum(price.fetched.values())
    # On average a rank that holds rows sends as many rows and lists as it receives, and receives as many requests as it sends.
    incoming = rows + price.requests + price.lists
    gathered, moved = (batch.row_bytes + rows, 2 * incoming) if sends else (batch.row_bytes, incoming)
    cpu = price.seconds + machines.loading(1, batch.vertices, gathered, moved)
    if choice.lookahead and choice.cache:
        cpu += machines.look_ahead * batch.vertices
    if choice.sums:
        cpu += machines.sum * batch.last_edges
    loading = n * cpu
    scale = batch.edges / step.edges if step.edges else 1.0
    training = n * step.seconds * scale
    spare = training * max(0.0, machines.cores - 1)
    exposed = max(0.0, loading - spare) / min(machines.cores, 2.0)
    gradients = n * step.gradient_bytes / machines.between.bytes_per_second
    idle = max(0.0, training - n * step.cpu_seconds * scale / min(machines.cores, 1.0))
    exposed = max(0.0, exposed - min(idle, gradients))
    cores, link = training + exposed, gradients
    if incoming:
        arriving = gradients + n * incoming / machines.between.bytes_per_second
        link = max(arriving, n * machines.between.delay / 2) + FILL * machines.between.delay
    to_device = rows + sum(price.copied.values())
    copies = n * to_device / machines.to_device if machines.to_device else 0.0
    seconds = overlapped(cores, link, copies)
    waiting = seconds - cores
    return Cost(
        seconds=seconds,
        training=training,
        loading=exposed,
        waiting=waiting if waiting > 1e-9 * seconds else 0.0,  # rounding leaves less
        link=link,
        cpu=loading,
        bytes_in=n * incoming,
    )
