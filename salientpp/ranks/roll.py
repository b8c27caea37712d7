"""Calls the ranks that make a Comm together, and names those that do not come."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from salientpp.ranks import greeting
from salientpp.ranks.failure import RankFailure, in_words
from salientpp.ranks.groups import Circle
from salientpp.ranks.job_store import attempt, job_store
from salientpp.ranks.waiting import SLICE_SECONDS


class Roll:
    """The call of the ranks that make a Comm together. torch's own errors would not say who is missing.

    Attributes:
        ranks: of the default group, in the group's order; ``rank`` is this process's number among them.
        prefix: of what concerns this Comm in the store.
        of: after a rank's number, says which numbers are meant.
    """

    def __init__(self, ranks: tuple[int, ...], circle: Circle) -> None:
        self.ranks, self.rank = ranks, ranks.index(dist.get_rank())
        self._circle = circle
        self._store = job_store()
        circle.calls += 1
        self._number = circle.calls
        are_all = ranks == tuple(range(dist.get_world_size()))
        self.prefix = f"salientpp/{'all' if are_all else '-'.join(map(str, ranks))}/{self._number}"
        self.of = "" if are_all else f" of the process_group of ranks {list(ranks)}"

    @property
    def keys_of_this_rank(self) -> list[str]:
        return [self._keys(call)[self.rank] for call in ("before", "after")]

    def _keys(self, call: str) -> list[str]:
        return [f"{self.prefix}/{call}/{rank}" for rank in range(len(self.ranks))]

    def tell(self, mistake: str, astray: bool = False) -> None:
        """Let all who come know of this rank's mistake, in place of an answer; ``astray``: see :func:`salientpp.ranks.mistakes.go_astray`."""
        attempt(lambda: self._store.compare_set(f"{self.prefix}/error", "", json.dumps([self.rank, mistake, astray])))

    def agree(self, over: str, free: list[int], timeout: timedelta) -> int:
        """Answer, and hear the others; the number of the group to take or to make.

        Args:
            over: how rows of this rank travel, 'gloo' or 'nccl'.
            free: numbers of the groups that are free here.

        Raises:
            DifferentVersions: the ranks run different versions of this package.
        """
        if not self._circle.has_compared:
            with _store_needed():
                greeting.greet(self._store, self.ranks[self.rank])
        missing = self.missing("before", timeout.total_seconds(), json.dumps([over, free]))
        if missing:
            raise RankFailure(
                f"{in_words(missing)}{self.of} did not come to make a loader within {timeout.total_seconds():g} s; "
                "every rank makes its loaders in the same order: look at its output first"
            )
        # An answer of another version may mean anything, so this comes before the answers are read.
        self._compare_greetings()
        with _store_needed():
            answers = [json.loads(self._store.get(key)) for key in self._keys("before")]
        for rank, (way, _) in enumerate(answers):
            if way != answers[0][0]:
                raise ValueError(
                    f"all ranks must exchange rows in the same way, got {answers[0][0]} on rank 0 and {way} on rank {rank}{self.of}; "
                    "give every rank a device of the same kind"
                )
        everywhere = set.intersection(*(set(numbers) for _, numbers in answers))
        return min(everywhere, default=self._number)

    def missing(self, call: str, seconds: float, answer: str = "") -> list[int]:
        """Answer a call of the roll, and wait for the others to; the ranks that have not within that time.

        Raises:
            RankFailure: the store is gone.
            ValueError: a rank has made a mistake, by which it does not come.
        """
        keys = self._keys(call)
        started, pause = time.monotonic(), 0.005
        with _store_needed():
            self._store.set(keys[self.rank], answer)
            # Looking now and then, because a wait of torch's store complains on stderr when it ends without an answer.
            while time.monotonic() < started + seconds and not self._store.check(keys):
                if call == "before":
                    # A rank of another version may never answer, but it has greeted.
                    if not self._circle.has_compared and greeting.have_greeted(self._store, self.ranks):
                        self._compare_greetings()
                    self._look_for_mistakes(keys, also_astray=time.monotonic() > started + SLICE_SECONDS)
                time.sleep(pause)
                pause = min(2 * pause, SLICE_SECONDS)
            return [rank for rank, key in enumerate(keys) if seconds and not self._store.check([key])]

    def _compare_greetings(self) -> None:
        if not self._circle.has_compared:
            with _store_needed():
                greeting.compare_greetings(self._store, self.ranks, self.ranks[self.rank], self.of)
            self._circle.has_compared = True

    def _look_for_mistakes(self, keys: list[str], also_astray: bool) -> None:
        told = self._circle.told
        if self._store.check([f"{self.prefix}/error"]):
            rank, text, astray = json.loads(self._store.get(f"{self.prefix}/error"))
            told[rank] += astray
            raise ValueError(f"rank {rank}{self.of} could not make its loader: {text}")
        for rank, key in enumerate(keys) if also_astray else ():
            note = astray_key(self.ranks[rank])
            if not self._store.check([key]) and self._store.check([note]):
                count, text = json.loads(self._store.get(note))
                if count > told[rank]:
                    told[rank] += 1
                    raise ValueError(f"rank {rank}{self.of} could not make its loader: {text}")


def astray_key(rank: int) -> str:
    """Key of the note of a rank that does not come, see :func:`salientpp.ranks.mistakes.go_astray`."""
    return f"salientpp/astray/{rank}"


@contextlib.contextmanager
def _store_needed() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RankFailure(
            "the job's key-value store (which rank 0 or torchrun hosts) went away while loaders were made"
        ) from error
