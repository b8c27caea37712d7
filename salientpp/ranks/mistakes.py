"""Tells ranks that wait for this one to make a loader that it made a mistake and does not come."""

from __future__ import annotations

import json
import weakref
from typing import ClassVar

import torch.distributed as dist

from salientpp.ranks.groups import Circle
from salientpp.ranks.job_store import attempt, job_store
from salientpp.ranks.members import default_group, is_parents_group
from salientpp.ranks.roll import Roll, astray_key


class _Mistakes:
    """What this rank did wrong where it could not know which ranks would wait for it, and how much of it the next ones to meet have been told."""

    made: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, _Mistakes]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.num_told = 0


def go_astray(error: Exception) -> None:
    """Let ranks that wait for this one to make a loader know why it does not come, where its mistake hides who they are.

    It leaves a note, and they look for one. Should this rank go on, it makes up for the call that the others have counted and it
    has not.
    """
    if dist.is_available() and dist.is_initialized() and not is_parents_group():
        mistakes = _Mistakes.made.setdefault(default_group(), _Mistakes())
        mistakes.texts.append(words_of(error))
        attempt(
            lambda: job_store().set(astray_key(dist.get_rank()), json.dumps([len(mistakes.texts), mistakes.texts[-1]]))
        )


def own_up(ranks: tuple[int, ...], circle: Circle) -> None:
    """Make up for the calls that these ranks have counted and this one has not."""
    mistakes = _Mistakes.made.get(default_group())
    if mistakes is not None and mistakes.num_told < len(mistakes.texts):
        for text in mistakes.texts[mistakes.num_told :]:
            Roll(ranks, circle).tell(text, astray=True)
        mistakes.num_told = len(mistakes.texts)
        attempt(lambda: job_store().delete_key(astray_key(dist.get_rank())))


def words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
