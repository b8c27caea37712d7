"""Compares facts that ranks tell each other before a common step, so that either all ranks take the step, or all get an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Told:
    """Facts that the ranks tell each other in a block of :meth:`~salientpp.ranks.comm.Comm.together`.

    Attributes:
        mine: JSON values of this rank, by name. The block fills them.
        everyone: the values of all ranks, in the order of the ranks. Empty until the block has ended.
    """

    def __init__(self) -> None:
        self.mine: dict[str, Any] = {}
        self.everyone: list[dict[str, Any]] = []


def check_same(
    everyone: Sequence[Mapping[str, Any]],
    of: str,
    action: str = "have",
    kind: type[Exception] = ValueError,
    advice: str = "",
    by_entry: str = "",
) -> None:
    """Raises a ``kind`` unless all ranks have equal facts. Every rank raises the same one.

    Args:
        everyone: name -> fact, by rank.
        of: text that errors append to a rank's number, such as the name of its process group.
        action: what all ranks must do with "the same" fact, for the error.
        advice: what the user should do, for the error.
        by_entry: name of a fact that is a dictionary. The error for it lists only the entries that differ. Errors for other facts show the whole fact.
    """
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name, fact in theirs.items():
            expected = first[name]
            words = ""
            if name == by_entry and [*fact.items()] != [*expected.items()]:
                odd = sorted(key for key in fact.keys() | expected.keys() if fact.get(key) != expected.get(key))
                words = f"but rank 0 and rank {rank}{of} differ in {', '.join(odd) or 'order'}"
            elif fact != expected:
                words = f"got {expected} on rank 0 and {fact} on rank {rank}{of}"
            if words:
                raise kind(f"all ranks must {action} the same {name}, {words}{advice and '; '}{advice}")
