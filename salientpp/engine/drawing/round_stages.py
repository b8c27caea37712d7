"""The stages that draw batches over a topology in parts, before the ten stages of :mod:`salientpp.engine.stages`.

In a round, a rank asks the owners of neighbour lists to draw from them, and draws for ranks that ask it (:mod:`salientpp.sampling.part_topology`). A
round has six stages, so that neither messages nor draws keep the pipeline waiting. Every rank carries every batch through every round, also a rank that
asks nothing, because others may ask it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from salientpp.engine.drawing.together import answer_all, by_part, by_rank
from salientpp.engine.pipeline import Stage
from salientpp.engine.request import Request
from salientpp.processes import Task, Undone
from salientpp.ranks.mail import Letter
from salientpp.sampling.in_rounds import Round
from salientpp.sampling.packets import NO_BYTES
from salientpp.sampling.part_topology import PartTopology
from salientpp.store.exchange import Exchange


@dataclass(frozen=True, eq=False)
class Between:
    """Base class of the states inside a round. ``step`` is a :class:`Round`, or the result of a rank that has no batch for this tick."""

    request: Request
    step: Any

    @property
    def index(self) -> int:
        return self.request.index


@dataclass(frozen=True, eq=False)
class SizesSent(Between):
    packets: Sequence[Tensor]
    pending: Letter


@dataclass(frozen=True, eq=False)
class Sent(Between):
    sizes: Sequence[int]
    pending: Letter


@dataclass(frozen=True, eq=False)
class Answering(Between):
    answers: Task | Undone


class RoundStages:
    """Makes the stages in which an engine's batches are drawn round by round.

    Args:
        topology: the neighbour lists that this rank's host holds.
        exchange: connects this rank to the ranks that hold the other neighbour lists.
        scout: runs a function in a sampling thread.
    """

    def __init__(self, topology: PartTopology, exchange: Exchange, scout: Callable[..., Any]) -> None:
        self._topology, self._exchange, self._scout = topology, exchange, scout

    def list(self, number: int) -> list[list[Stage]]:
        """Returns the stages of ``number`` rounds, in order: a list of stages for each tick. In a tick without stages, a batch waits for a message."""
        runs: list[list[Callable[[Any], Any]]] = [
            [self.ask_sizes], [], [self.ask_lists], [], [self.draw_for_others], [self.answer_sizes], [], [self.answer_lists], [],
            [self.join_lists],
        ]  # fmt: skip
        return [
            [Stage(f"{step.__name__}_{round_ + 1}", step, "comm") for step in run]
            for round_ in range(number)
            for run in runs
        ]

    def ask_sizes(self, request: Request) -> SizesSent:
        step = request.result()
        packets = (
            by_rank(self._exchange, step.asks) if isinstance(step, Round) else [NO_BYTES] * self._exchange.comm.size
        )
        self._exchange.traffic.list_rounds += any(packet.numel() for packet in packets)
        return SizesSent(request, step, packets, self._send_sizes(packets))

    def ask_lists(self, state: SizesSent) -> Sent:
        return self._send(state)

    def draw_for_others(self, state: Sent) -> Answering:
        asked = state.pending.wait().split(list(state.sizes))
        return Answering(state.request, state.step, self._scout(answer_all, self._topology, asked))

    def answer_sizes(self, state: Answering) -> SizesSent:
        answers = state.answers.result()
        return SizesSent(state.request, state.step, answers, self._send_sizes(answers))

    def answer_lists(self, state: SizesSent) -> Sent:
        return self._send(state)

    def join_lists(self, state: Sent) -> Request:
        step, answers = state.step, state.pending.wait().split(list(state.sizes))
        if isinstance(step, Round) and state.request.is_wanted:
            sampling: Any = self._scout(step.end, by_part(self._exchange, step.asks, answers))
        else:
            sampling = Undone(lambda: step)
        return dataclasses.replace(state.request, sampling=sampling)

    def _send_sizes(self, packets: Sequence[Tensor]) -> Letter:
        sizes = torch.tensor([packet.numel() for packet in packets], dtype=torch.int64, device="cpu")
        return self._exchange.post(sizes, [1] * len(packets), [1] * len(packets))

    def _send(self, state: SizesSent) -> Sent:
        sizes = state.pending.wait().tolist()
        packets = torch.cat(list(state.packets))
        pending = self._exchange.post(packets, [packet.numel() for packet in state.packets], sizes)
        self._exchange.traffic.list_bytes_sent += packets.numel()
        self._exchange.traffic.list_bytes_received += sum(sizes)
        return Sent(state.request, state.step, sizes, pending)
