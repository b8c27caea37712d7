"""Checks, before each collective, that all ranks are about to start the same one.

If two ranks expect different sizes in an exchange, a thread of gloo ends the whole process. So before every collective, each rank sends every rank a message
of fixed size. It holds a digest of the sender's next collective, and has room for the values of a small sum. Such a sum needs no exchange of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from salientpp.ops import bytes_of
from salientpp.ranks.comm import Comm

#: Number of differences that an error lists.
_LISTED = 3

#: Bytes of values that a message has room for. Together with the digest they fit into an Ethernet frame.
ROOM = 1024

#: Stands for the values of a message that carries none.
NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class RanksDiffer(ValueError):
    """Raised if the ranks are about to start different collectives. Every rank raises it at once, with the same text.

    The ranks' connections stay usable, because all ranks have taken part in the same collectives.

    Attributes:
        raised: number of such errors in this process so far.
    """

    raised: ClassVar[int] = 0

    def __init__(self, text: str) -> None:
        super().__init__(text)
        RanksDiffer.raised += 1


@dataclass(eq=False)
class Agreement:
    """Checks, before each collective, that all ranks start the same one. This object has the state of one rank.

    Attributes:
        within: connections of all ranks of the job, if ``comm`` connects only some of them. If the ranks of ``comm`` differ, this object tells
            all ranks of the job. None: ``comm`` connects all.
        place: text that names the layer that is running on this rank, for errors; empty outside the model.
        calls: number of calls of distributed models so far.
        models: number of models that were distributed so far.
        exchanges: number of exchanges of rows so far.
        batch: text that names the batch of the latest call, for errors; empty in full-graph training.
    """

    comm: Comm
    within: Comm | None = None
    place: str = ""
    calls: int = 0
    models: int = 0
    exchanges: int = 0
    batch: str = ""
    _facts: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def calling(self, facts: Mapping[str, str], batch: str = "") -> Iterator[None]:
        """Wraps a model's call. The ranks compare its ``facts`` (name -> text) before their next collective."""
        self.calls += 1
        self.batch = f", {batch}" if batch else ""
        self._facts = dict(facts)
        try:
            yield
        finally:
            self.place = ""

    def name_exchange(self, rows: Tensor, kind: str) -> str:
        """Returns a numbered name for the next exchange of ``rows`` [n, ...], for errors and for comparison.

        The ranks compare names to make sure that all start the same exchange.
        """
        self.exchanges += 1
        place = self.place if kind == "forward" and self.place else kind
        return f"exchange {self.exchanges} ({place}: {words_of_rows(rows)})"

    def propose(self, operation: str, values: Tensor = NOTHING) -> Callable[[], Tensor]:
        """Tells the other ranks which collective comes next, and sends them ``values`` [n] on the CPU, at most :data:`ROOM` bytes.

        Returns a function to call before the collective starts. The function waits for the other ranks and returns the values of all, [size, n].
        It raises :class:`RanksDiffer` if a rank does something else, and ``RankFailure`` if a rank failed, left or did not answer.
        """
        facts, self._facts = self._facts, {}
        operation += f" in call {self.calls} of the model" if self.calls else ""
        size = self.comm.size
        if size == 1:
            return lambda: values[None]
        text = repr((operation, facts))
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        message = torch.zeros((size, 1 + ROOM // 8), dtype=torch.int64, device="cpu")
        message[:, 0] = digest
        message.view(torch.uint8)[:, 8 : 8 + values.nbytes] = bytes_of(values)
        self.comm.progress.task = f"for {operation}{self.batch}"
        pending = self.comm.all_to_all(message, [1] * size, [1] * size)

        def settle() -> Tensor:
            told = pending.wait()
            if told[:, 0].tolist() != [digest] * size:
                raise self.difference(operation, facts)
            return told.view(torch.uint8)[:, 8 : 8 + values.nbytes].contiguous().view(values.dtype)

        return settle

    def difference(self, operation: str, facts: dict[str, str]) -> RanksDiffer:
        """Returns the error that all ranks raise: it says how their next steps differ. Collective."""
        everyone = self.comm.gather_facts(
            {"operation": operation, "facts": facts, "calls": self.calls, "exchanges": self.exchanges}
        )
        # A caller that catches the error and continues needs the same numbers on all ranks.
        self.calls = max(theirs["calls"] for theirs in everyone)
        self.exchanges = max(theirs["exchanges"] for theirs in everyone)
        told = [theirs["facts"] for theirs in everyone]
        names = dict.fromkeys(name for each in told for name in each) if all(told) else {}
        differing = [name for name in names if len({each.get(name) for each in told}) > 1]
        if differing:
            said = [self._by_rank(name, [each.get(name, "absent") for each in told]) for name in differing[:_LISTED]]
            more = len(differing) - _LISTED
            words = f"in call {self.calls} of the model, {'; '.join(said)}{f'; {more} more differ' if more > 0 else ''}"
        else:
            words = self._by_rank("the next step", [theirs["operation"] for theirs in everyone])
        text = f"all ranks{self.comm.of} must do the same, but {words}; call the model, its loss and backward() in the same way on every rank"
        if self.within is not None and self.within.size > self.comm.size:
            self.within.report_failure(text)  # the other ranks do not take part in these collectives
        return RanksDiffer(text)

    def _by_rank(self, subject: str, values: list[str]) -> str:
        """Returns text for an error: each distinct value of ``subject``, with the ranks that have it."""
        ranks: dict[str, list[int]] = {}
        for rank, value in zip(self.comm.numbers, values, strict=True):
            ranks.setdefault(value, []).append(rank)
        pieces = [
            f"{value} on rank{'s' if len(on) > 1 else ''} {', '.join(map(str, on))}" for value, on in ranks.items()
        ]
        return f"{subject} is {' and '.join(pieces)}"


def facts_of(model: torch.nn.Module, number: int, x: Tensor) -> dict[str, str]:
    """Describes a call of model ``number`` with rows ``x`` [n, ...] by facts that must be equal on all ranks."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    facts = {
        "the distributed model that is called": f"number {number}",
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
    """Describes rows for comparison: dtype, shape without the number of rows, and whether a gradient flows back."""
    width = "".join(f", {columns}" for columns in rows.shape[1:])
    gradient = "with" if rows.requires_grad and torch.is_grad_enabled() else "without"
    return f"rows of {words_of_dtype(rows.dtype)} [*{width}] {gradient} a gradient"


def words_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
