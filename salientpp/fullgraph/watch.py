"""Tells the other ranks if a backward ends with an exception here, so that they do not wait for this rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import Tensor
from torch.autograd import Variable

from salientpp.fullgraph.agreement import RanksDiffer
from salientpp.fullgraph.exchange import Ranks


class _Backward:
    """Callback that tells the other ranks of a failed backward. torch calls it at the end of a backward.

    After an exception, torch deletes it uncalled, and the deletion tells the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._differences = ranks, RanksDiffer.raised
        self._has_ended = False

    def __call__(self) -> None:
        self._has_ended = True

    def __del__(self) -> None:
        # If the ranks differ, all of them know, and may continue.
        if not self._has_ended and self._differences == RanksDiffer.raised and not sys.is_finalizing():
            self._ranks.report_failure("failed in the backward of its model; look at the error of that rank")


def watch_backward(tensors: Iterable[Tensor], ranks: Ranks) -> None:
    """Makes an exception in the backward of these outputs known to all ranks, even if the user catches it."""
    for tensor in tensors if ranks.size > 1 else ():
        if tensor.grad_fn is not None:  # a leaf would keep the hook
            tensor.register_hook(lambda _: Variable._execution_engine.queue_callback(_Backward(ranks)))
