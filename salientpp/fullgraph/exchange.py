"""Exchanges of rows between ranks. Gradients travel back along the same routes.

Every exchange begins early and is awaited late, so that other work of the forward or the backward overlaps with it. All ranks take part in every exchange,
even those that neither send nor receive rows. The ranks agree on an exchange before it starts (:mod:`salientpp.fullgraph.agreement`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from salientpp.fullgraph.agreement import ROOM, Agreement, RanksDiffer, words_of_dtype
from salientpp.fullgraph.once import once_differentiable
from salientpp.ranks.comm import Comm, Pending
from salientpp.ranks.failure import RankFailure
from salientpp.ranks.host_memory import HostMemory, HostPending
from salientpp.ranks.placement import runs

#: Names of sums in errors.
_SUMS = {
    "loss": "loss_mean",
    "score": "accuracy",
    "sums": "a sum over all vertices",
    "sums backward": "the gradient of a sum over all vertices",
    "gradients": "the sum of the parameters' gradients",
}

#: Most ranks for which the message of an agreement has room to say where rows are in shared memory.
_MOST_TOLD = ROOM // 8 - 8


@dataclass(frozen=True, eq=False)
class Route:
    """Says which rows this rank sends to each rank in an exchange, and how many it receives. Every training step uses it again.

    Attributes:
        send: int64 [sum(send_counts)], numbers of the rows of this rank's table to send, grouped by receiver.
        send_counts, recv_counts: numbers of rows that this rank sends to, and receives from, each rank.
    """

    send: Tensor
    send_counts: Sequence[int]
    recv_counts: Sequence[int]

    @classmethod
    def asking(cls, ranks: Ranks, wanted: Tensor, offsets: Sequence[int]) -> Route:
        """Tells the owners which rows this rank wants. Returns the route of the exchanges that bring these rows. Collective.

        Args:
            wanted: ascending global ids of the rows' vertices, int64 [n].
            offsets: the first global id of each rank, and N at the end.
        """
        bounds = torch.searchsorted(wanted, torch.tensor(offsets, device="cpu")).tolist()
        recv_counts = [last - first for first, last in pairwise(bounds)]
        send_counts = [numbers[ranks.rank] for numbers in ranks.gather_numbers("to ask for rows", recv_counts)]
        asked = ranks.comm.all_to_all(wanted, recv_counts, send_counts).wait()
        return cls((asked - offsets[ranks.rank]).to(ranks.device), send_counts, recv_counts)

    @property
    def num_received(self) -> int:
        return sum(self.recv_counts)


@dataclass(eq=False)
class Ranks:
    """Connects ranks that share a graph: differentiable collectives between them, and counts of their traffic.

    Attributes:
        device: device of the rows in computations.
        received: numbers of words (elements of rows) that came from other ranks, by kind of traffic: 'forward', 'backward', 'gradients', 'sums', ....
        within: all ranks of the job, if these are only some of them; None: these are all.
        memory: exchanges rows through memory that these ranks share. None: rows travel over the network.
    """

    comm: Comm
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # immutable
    received: Counter[str] = field(default_factory=Counter)
    within: Ranks | None = None
    memory: HostMemory | None = None
    agreement: Agreement = field(init=False)

    def __post_init__(self) -> None:
        self.agreement = Agreement(self.comm, None if self.within is None else self.within.comm)

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def among(self, ranks: Sequence[int]) -> Ranks:
        """Connects some of these ranks, such as a host's, in ascending order. Collective among the chosen ranks.

        All ranks of this larger group are told of failures in the new one. The new group exchanges rows over NCCL if
        this one does, otherwise through shared memory if possible.
        """
        comm = self.comm.among(ranks, between_devices=True)
        memory = HostMemory.create(comm) if comm.device.type == "cpu" else None
        return Ranks(comm, self.device, within=self, memory=memory)

    def report_failure(self, text: str) -> None:
        """Tells the other ranks that this rank failed. Never raises."""
        self.comm.report_failure(f"rank {self.rank}{self.comm.of} {text}")

    @contextlib.contextmanager
    def reporting(self, task: str) -> Iterator[None]:
        """Wraps a ``task``. If it fails here, also by Ctrl-C, the other ranks are told, so that none waits."""
        try:
            yield
        except (RankFailure, RanksDiffer):  # the other ranks have been told
            raise
        except BaseException as error:
            self.report_failure(f"failed in {task}: {type(error).__name__}: {error}")
            raise

    @contextlib.contextmanager
    def preparing(self, task: str) -> Iterator[None]:
        """Wraps steps before a ``task``'s first collective. After an error, all ranks raise, and stay connected."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(RankFailure, RanksDiffer):  # this rank raises its own error
                self.agree(f"{task}, which failed ({type(error).__name__}: {error})")
            raise

    @contextlib.contextmanager
    def calling(self, facts: Mapping[str, str], exchanging: Ranks, own: Mapping[str, str]) -> Iterator[None]:
        """Wraps a call of a model that exchanges rows among the ranks ``exchanging``.

        All ranks compare ``facts``, see :meth:`Agreement.calling`. Only the ranks ``exchanging`` also compare ``own``.
        """
        told = {id(self): (self, dict(facts)), id(exchanging): (exchanging, {**facts, **own})}
        with contextlib.ExitStack() as stack:
            for ranks, theirs in told.values():
                stack.enter_context(ranks.agreement.calling(theirs, own.get("the batch", "")))
            yield

    def agree(self, operation: str) -> None:
        """Waits until all ranks are about to do ``operation``. Raises RanksDiffer if one is about to do another."""
        self.agreement.propose(operation)()

    def agree_to_exchange(self, rows: Tensor) -> str:
        """Agrees with the other ranks, once, on several exchanges of rows like ``rows`` [n, ...]. Returns a name for all of them."""
        name = self.agreement.name_exchange(rows, "forward")
        self.agree(name)
        return name

    def gather_numbers(self, operation: str, numbers: Sequence[int]) -> list[list[int]]:
        """Returns every rank's ``numbers``: a list per rank, all of one length, 64-bit. Collective; it blocks."""
        operation = f"{operation} ({len(numbers)} number{'s' if len(numbers) > 1 else ''})"
        values = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        if values.nbytes <= ROOM:
            return self.agreement.propose(operation, values)().tolist()
        self.agree(operation)
        return self.comm.gather_numbers(numbers)

    def begin(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], kind: str
    ) -> Pending | HostPending:
        """Starts an exchange of rows [sum(send_counts), ...] on which the ranks have agreed. ``kind``: its counter in :attr:`received`."""
        self.received[kind] += (sum(recv_counts) - recv_counts[self.rank]) * width_of(rows)
        if self.memory is not None:
            return self.memory.begin(rows.detach(), send_counts, recv_counts)
        return self.comm.all_to_all(rows.detach().to(self.comm.device).contiguous(), send_counts, recv_counts)

    def begin_together(
        self, operation: str, rows: Tensor, take: Tensor | None, counts: tuple[Sequence[int], Sequence[int]], kind: str
    ) -> Pending | HostPending:
        """Agrees with the other ranks on an exchange, and starts it.

        Args:
            operation: name of the exchange in errors.
            rows: [n, ...]
            take: int64 [sum(send_counts)], the rows to send, grouped by receiver; None: all.
            counts: the numbers of rows that this rank sends to each rank, and that it receives from each rank.
        """
        send_counts, recv_counts = counts
        if self.memory is None or self.size > _MOST_TOLD:
            settle = self.agreement.propose(operation)
            sent = rows if take is None else rows.index_select(0, take)  # overlaps with the other ranks' answers
            settle()
            return self.begin(sent, send_counts, recv_counts, kind)
        # The message of the agreement also says where the rows are, so that shared memory needs no message of its own.
        messages = self.agreement.propose(operation, self.memory.write(rows.detach(), take, send_counts))()
        self.received[kind] += (sum(recv_counts) - recv_counts[self.rank]) * width_of(rows)
        return self.memory.told(messages, rows, recv_counts)

    def arrived(self, pending: Pending | HostPending) -> Tensor:
        return pending.wait().to(self.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # connections are shared

    def __reduce__(self) -> Any:
        raise TypeError(
            "a distributed model and a rank's part of a graph cannot be pickled, because they hold connections to other ranks; save model.state_dict() or "
            "model.module, and call salientpp.distribute after loading"
        )

    # --- differentiable -------------------------------------------------------------------------------------

    def fetch(self, rows: Tensor, route: Route, kind: str = "forward", name: str | None = None) -> Tensor:
        """Returns the rows [route.num_received, ...] that arrive, by sender. Arguments as in :class:`Flight`."""
        return Flight(self, rows, route, kind, name).rows()

    def replicated(self, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns stand-ins for parameters. In the backward, each parameter gets the sum of all ranks' gradients of its stand-in."""
        for parameter in parameters:
            hooks: dict[int, Any] = parameter._backward_hooks or {}
            for key, hook in hooks.items():
                hooks[key] = hook if isinstance(hook, _OfGradients) else _OfGradients(hook)
        return _Replicated.apply(self, *parameters) if parameters else ()

    def sum_up(self, values: Tensor, kind: str) -> Tensor:
        """Returns the sum of all ranks' ``values``, bitwise equal on all ranks. Of a large tensor, each rank sums one part. Collective."""
        size = self.size
        if size == 1:
            return values.detach().clone()
        operation = f"{_SUMS.get(kind, f'the sum of {kind}')} ({words_of_dtype(values.dtype)} {list(values.shape)})"
        flat = values.detach().reshape(-1)
        if flat.nbytes <= ROOM and self.comm.device.type == "cpu":
            self.received[kind] += flat.numel() * (size - 1)
            every = self.agreement.propose(operation, flat.cpu())().to(values.device)
            # Adds one rank's values at a time. Unlike `Tensor.sum`, this has the same order on every processor.
            return functools.reduce(torch.add, every).view(values.shape)
        self.agree(operation)
        bounds = runs(flat.numel(), size)
        pieces = [last - first for first, last in pairwise(bounds)]
        mine = pieces[self.rank]
        addends = self.arrived(self.begin(flat, pieces, [mine] * size, kind)).view(size, mine)
        summed = addends.sum(0)
        whole = self.arrived(self.begin(summed.repeat(size), [mine] * size, pieces, kind))
        return whole.view(values.shape)


def width_of(rows: Tensor) -> int:
    return math.prod(rows.shape[1:])


class Flight:
    """One exchange of rows along a route. Its construction starts it, :meth:`rows` waits. The backward sends gradients.

    Args:
        rows: [n, ...], this rank's table. The route says which of its rows to send.
        kind: name under which :attr:`Ranks.received` counts the traffic.
        name: result of :meth:`Ranks.agree_to_exchange`, if the ranks have already agreed on this exchange. None: they agree on it here.
    """

    def __init__(
        self, ranks: Ranks, rows: Tensor, route: Route, kind: str = "forward", name: str | None = None
    ) -> None:
        self.ranks, self.route, self.kind = ranks, route, kind
        self.is_agreed = name is not None
        self.name = ranks.agreement.name_exchange(rows, kind) if name is None else name
        self.shape = rows.shape
        self.forth: Pending | HostPending | None = None
        self.back: Pending | HostPending | None = None
        self._token: Tensor | None = _Start.apply(rows, self)

    def begin_agreed(self, rows: Tensor) -> Pending | HostPending:
        """Starts to send the rows, without asking the other ranks, because they have agreed on this exchange."""
        route = self.route
        return self.ranks.begin(rows.index_select(0, route.send), route.send_counts, route.recv_counts, self.kind)

    def rows(self) -> Tensor:
        """Waits for the rows [route.num_received, ...], and returns them grouped by sender."""
        # Autograd's node refers to this object. A reference back would be a cycle, which keeps the rows of the graph.
        token, self._token = self._token, None
        return _Arrive.apply(token, self)


class _Start(torch.autograd.Function):
    """Starts to send rows. Its backward waits for the gradients of these rows, and adds up those of the same row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        route = flight.route
        counts = route.send_counts, route.recv_counts
        if flight.is_agreed:
            flight.forth = flight.begin_agreed(rows)
        else:
            flight.forth = flight.ranks.begin_together(flight.name, rows, route.send, counts, flight.kind)
        return rows.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        assert flight.back is not None  # _Arrive.backward runs before
        gradient = flight.ranks.arrived(flight.back)
        flight.back = None
        return gradient.new_zeros(flight.shape).index_add_(0, flight.route.send, gradient), None


class _Arrive(torch.autograd.Function):
    """Waits for rows of other ranks. Its backward sends the gradients of these rows back."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        assert flight.forth is not None
        rows = flight.ranks.arrived(flight.forth)
        flight.forth = None
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        flight, route = ctx.flight, ctx.flight.route
        kind = "backward" if flight.kind == "forward" else f"{flight.kind} backward"
        operation = f"the gradient of {flight.name}, {words_of_dtype(gradient.dtype)}"
        counts = route.recv_counts, route.send_counts
        flight.back = flight.ranks.begin_together(operation, gradient, None, counts, kind)
        return gradient.new_zeros(()), None


def total(values: Tensor, ranks: Ranks) -> Tensor:
    """Returns the sum of all ranks' ``values``, bitwise equal on every rank. Its backward sums the ranks' gradients."""
    return _Total.apply(values, ranks)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum_up(values, "sums")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum_up(gradient, "sums backward"), None


@dataclass
class _OfGradients:
    """Wraps a hook of a parameter, so that it runs only if the parameter has a gradient. In one process, autograd does the same."""

    hook: Any

    def __call__(self, gradient: Tensor | None) -> Any:
        return None if gradient is None else self.hook(gradient)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.parameters = [parameter.detach() for parameter in parameters]
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Sums gradients over the ranks. A parameter gets none only if no rank used it."""
        ranks: Ranks = ctx.ranks
        if ranks.size == 1:
            return None, *gradients
        flags = ranks.gather_numbers(
            "the gradients of the parameters", [gradient is not None for gradient in gradients]
        )
        addends: dict[int, Tensor] = {}
        for number, (gradient, used) in enumerate(zip(gradients, zip(*flags), strict=True)):
            if any(used):
                addends[number] = torch.zeros_like(ctx.parameters[number]) if gradient is None else gradient
        summed: list[Tensor | None] = [None] * len(gradients)
        for dtype in dict.fromkeys(gradient.dtype for gradient in addends.values()):
            alike = {number: gradient for number, gradient in addends.items() if gradient.dtype == dtype}
            whole = ranks.sum_up(torch.cat([gradient.reshape(-1) for gradient in alike.values()]), "gradients")
            for number, piece in zip(alike, whole.split([each.numel() for each in alike.values()]), strict=True):
                summed[number] = piece.view(ctx.parameters[number].shape)
        return None, *summed
