"""Draws batches outside an epoch, such as for trials, if ranks hold different neighbour lists. All ranks take part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from salientpp.ops import mark_thread
from salientpp.processes import Threads
from salientpp.sampling.in_rounds import Round, answer_joined
from salientpp.sampling.packets import NO_BYTES, pack, unpack
from salientpp.sampling.part_topology import Drawing, Packets, PartTopology
from salientpp.sampling.topology import Mfg
from salientpp.store.exchange import Exchange

Out = TypeVar("Out")

#: Number of batches that a rank draws at once.
_AT_ONCE = 16


def by_rank(exchange: Exchange, asks: Packets) -> list[Tensor]:
    """Returns the packet for each rank: the one in ``asks`` for the part that the rank serves, or an empty one."""
    packets = [NO_BYTES] * exchange.comm.size
    for part, packet in asks.items():
        packets[exchange.placement.server_of(part)] = packet
    return packets


def by_part(exchange: Exchange, asks: Packets, answers: Sequence[Tensor]) -> dict[int, Tensor]:
    """Returns the answers to ``asks`` by part, picked from the ``answers`` of all ranks."""
    return {part: answers[exchange.placement.server_of(part)] for part in asks}


def answer_all(topology: PartTopology, asked: Sequence[Tensor]) -> list[Tensor]:
    return [answer_joined(topology, packet) for packet in asked]


def draw_together(
    topology: PartTopology, exchange: Exchange, drawings: Iterable[Drawing], measure: Callable[[Mfg], Out]
) -> list[Out]:
    """Draws this rank's ``drawings`` together with the other ranks. Returns ``measure(sample)`` of each, in order.

    Collective: all ranks call it, each with drawings of its own, of any number.
    """
    # A thread that draws keeps a table with an entry for each vertex. This one ends with the call, and its table with it.
    thread = Threads(1, "salientpp-draw")
    thread.submit(mark_thread).result()
    found: dict[int, Any] = {}
    waiting: dict[int, Round] = {}
    remaining, is_last, number = iter(drawings), False, 0

    def note(at: int, step: Any) -> None:
        if isinstance(step, Round):
            waiting[at] = step
        else:
            found[at] = step

    while True:
        while len(waiting) < _AT_ONCE and not is_last:
            drawing = next(remaining, None)
            is_last = drawing is None
            if drawing is not None:
                note(number, thread.submit(Round.begin, drawing, measure).result())
                number += 1
        rounds, waiting = waiting, {}
        answers, goes_on = _one_round(topology, exchange, list(rounds.values()), bool(rounds) or not is_last)
        for (at, step), of_step in zip(rounds.items(), answers):
            note(at, thread.submit(step.end, of_step).result())
        if not goes_on:
            return [found[at] for at in range(number)]


def _one_round(
    topology: PartTopology, exchange: Exchange, rounds: list[Round], goes_on: bool
) -> tuple[list[dict[int, Tensor]], bool]:
    """Exchanges one round of requests and answers. Returns the answers, and whether any rank has more (``goes_on``)."""
    parts = sorted({part for step in rounds for part in step.asks})
    asks = {part: pack([step.asks[part] for step in rounds if part in step.asks]) for part in parts}
    asked, flags = _exchange_packets(exchange, by_rank(exchange, asks), goes_on)
    packets = [unpack(packet) if packet.numel() else [] for packet in asked]
    answered = [pack(answer_all(topology, of_rank)) if of_rank else packet for of_rank, packet in zip(packets, asked)]
    arrived, _ = _exchange_packets(exchange, answered, goes_on)
    of_part = {part: iter(unpack(packet)) for part, packet in by_part(exchange, asks, arrived).items()}
    return [{part: next(of_part[part]) for part in sorted(step.asks)} for step in rounds], any(flags)


def _exchange_packets(exchange: Exchange, packets: Sequence[Tensor], flag: bool) -> tuple[list[Tensor], list[int]]:
    """Sends a packet and a flag to each rank. Returns the packets and flags that arrive, by rank."""
    comm = exchange.comm
    sizes = torch.tensor([[packet.numel(), int(flag)] for packet in packets], dtype=torch.int64, device="cpu")
    heads = comm.all_to_all(sizes, [1] * comm.size, [1] * comm.size).wait().tolist()
    numbers = [number for number, _ in heads]
    sent = [packet.numel() for packet in packets]
    arrived = comm.all_to_all(torch.cat(list(packets)), sent, numbers).wait()
    return list(arrived.split(numbers)), [of_rank for _, of_rank in heads]
