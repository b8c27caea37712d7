"""Checks, before each collective, that all ranks are about to take part in the same one.

The size of an exchange depends on what the user's model does: its layers, its mode, the width and the dtype of its rows. Sizes that differ between two ranks
end the process in a thread of gloo. So every collective is preceded by a message to each rank, with a digest of what this rank is about to do. Its size
never changes. If the digests differ, all ranks know it at the same point. They exchange what they do in words, and all raise the same error.

The message takes as long as an exchange of nothing. It has room for the values of a small sum, such as a loss or the totals of a batch normalisation. These
need no other exchange.

A call of the model adds facts of its own to the next digest: mode, parameters, dtype of the input. They cost no exchange.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from salientpp.ops import bytes_of
from salientpp.ranks.comm import Comm, Pending

#: Differences that an error lists.
_LISTED = 3

#: Bytes of values that a message has room for. With the digest they fit a frame of Ethernet.
ROOM = 1024


class RanksDiffer(ValueError):
    """The ranks do different things. Every rank raises it, at the same collective and with the same text.

    The ranks' connections stay usable: all have taken part in the same collectives.
    """


@dataclass(eq=False)
class Agreement:
    """What this rank is doing, compared with the other ranks before each collective.

    Attributes:
        comm: connections to the other ranks.
        place: where in the model this rank is, in words; empty outside.
        calls: calls of models so far.
        models: models so far.
        exchanges: exchanges of rows so far.
    """

    comm: Comm
    place: str = ""
    calls: int = 0
    models: int = 0
    exchanges: int = 0
    _facts: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def calling(self, facts: Mapping[str, str]) -> Iterator[None]:
        """While a model is called. The next collective compares the facts: what is said of the call -> in words."""
        self.calls += 1
        self._facts = dict(facts)
        try:
            yield
        finally:
            self.place = ""

    def number_model(self) -> int:
        """The number of the model that is made now, the same on all ranks."""
        self.models += 1
        return self.models

    def name_exchange(self, rows: Tensor, kind: str) -> str:
        """What errors call the next exchange of rows [n, ...]. All ranks must find the same name."""
        self.exchanges += 1
        place = self.place if kind == "forward" and self.place else kind
        return f"exchange {self.exchanges} ({place}: {words_of_rows(rows)})"

    def propose(self, operation: str, values: Tensor | None = None) -> Proposal:
        """Tell the other ranks which collective comes next. :meth:`Proposal.settle` must return before the collective starts.

        Args:
            values: [n] on the CPU, at most :data:`ROOM` bytes, for :meth:`Proposal.gathered`.
        """
        facts, self._facts = self._facts, {}
        operation += f" in call {self.calls} of the model" if self.calls else ""
        if self.comm.size == 1:
            return Proposal(self, operation, facts, 0, values, None)
        text = repr((operation, facts))
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        ones = [1] * self.comm.size
        message = torch.zeros((self.comm.size, 1 + ROOM // 8), dtype=torch.int64, device="cpu")
        message[:, 0] = digest
        if values is not None:
            message.view(torch.uint8)[:, 8 : 8 + values.nbytes] = bytes_of(values)
        return Proposal(self, operation, facts, digest, values, self.comm.all_to_all(message, ones, ones))

    def difference(self, operation: str, facts: dict[str, str]) -> RanksDiffer:
        """The error that all ranks raise. Collective."""
        everyone = self.comm.gather_facts(
            {"operation": operation, "facts": facts, "calls": self.calls, "exchanges": self.exchanges}
        )
        # Whoever catches the error and goes on needs the same numbers on all ranks.
        self.calls = max(theirs["calls"] for theirs in everyone)
        self.exchanges = max(theirs["exchanges"] for theirs in everyone)
        told = [theirs["facts"] for theirs in everyone]
        names = dict.fromkeys(name for each in told for name in each) if all(told) else {}
        differing = [name for name in names if len({each.get(name) for each in told}) > 1]
        if differing:
            said = [_by_rank(name, [each.get(name, "absent") for each in told]) for name in differing[:_LISTED]]
            more = len(differing) - _LISTED
            words = f"in call {self.calls} of the model {'; '.join(said)}{f'; {more} more differ' if more > 0 else ''}"
        else:
            words = _by_rank("the next step", [theirs["operation"] for theirs in everyone])
        return RanksDiffer(
            f"all ranks{self.comm.of} must do the same, but {words}; call the model, its loss and backward() alike on every rank"
        )


@dataclass(frozen=True, eq=False)
class Proposal:
    """A digest under way to the other ranks."""

    agreement: Agreement
    operation: str
    facts: dict[str, str]
    digest: int
    values: Tensor | None
    pending: Pending | None

    def settle(self) -> None:
        """Wait for the other ranks.

        Raises:
            RanksDiffer: a rank does something else.
            RankFailure: a rank failed, left or did not answer.
        """
        if self.pending is None:
            return
        if self.pending.wait()[:, 0].tolist() != [self.digest] * self.agreement.comm.size:
            raise self.agreement.difference(self.operation, self.facts)

    def gathered(self) -> Tensor:
        """The values of all ranks, [size, n]. Settles."""
        self.settle()
        assert self.values is not None
        if self.pending is None:
            return self.values[None]
        told = self.pending.output.view(torch.uint8)[:, 8 : 8 + self.values.nbytes]
        return told.contiguous().view(self.values.dtype)


def facts_of(model: torch.nn.Module, number: int, x: Tensor) -> dict[str, str]:
    """What must be alike on all ranks when they call the model of a number with rows ``x`` [n, ...] of their vertices."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    facts = {
        "the model that is called": f"number {number} of those distributed",
        "grad mode": "enabled" if torch.is_grad_enabled() else "disabled",
        "autocast": words_of_dtype(torch.get_autocast_dtype(device)) if autocast else "disabled",
        "the model's first argument": words_of_rows(x),
    }
    for path, module in model.named_modules():
        mode = "training" if module.training else "evaluation"
        facts[f"module {path or 'model'} ({type(module).__name__})"] = f"in {mode} mode"
    for name, parameter in model.named_parameters():
        state = "trained" if parameter.requires_grad else "frozen (requires_grad=False)"
        facts[f"parameter {name}"] = f"{words_of_dtype(parameter.dtype)} {list(parameter.shape)} and {state}"
    return facts


def words_of_rows(rows: Tensor) -> str:
    """Dtype, shape without the number of rows, and whether a gradient goes back."""
    width = "".join(f", {columns}" for columns in rows.shape[1:])
    gradient = "with" if rows.requires_grad and torch.is_grad_enabled() else "without"
    return f"rows of {words_of_dtype(rows.dtype)} [*{width}] {gradient} a gradient"


def words_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _by_rank(subject: str, values: list[str]) -> str:
    """The distinct values, each with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    pieces = [f"{value} on rank{'s' if len(on) > 1 else ''} {', '.join(map(str, on))}" for value, on in ranks.items()]
    return f"{subject} is {' and '.join(pieces)}"
