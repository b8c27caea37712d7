"""Waits for a collective, and finds out which rank is missing if it does not end.

A wait consists of slices of half a second. Between them, a rank looks for a failure note; see :mod:`salientpp.ranks.failure`. A killed rank leaves no note,
but its connections close. Each other rank finds the closed connections by trying to send a byte to every rank. The connections of a silent rank stay open.
But a rank that waits for longer than a slice records in the store that it waits; see :mod:`salientpp.ranks.standstill`. So after the timeout, the silent ranks
are those that have not recorded a wait.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from salientpp.ranks.failure import FailureNotes, RankFailure, in_words
from salientpp.ranks.groups import Groups
from salientpp.ranks.standstill import Progress, Wait, not_waiting

#: Seconds between two checks for a failure note while waiting.
SLICE_SECONDS = 0.5

#: Seconds between two checks after a connection was lost.
_NEWS_PAUSE = 0.1


def wait_for(
    work: dist.Work,
    number: int,
    progress: Progress,
    groups: Groups,
    notes: FailureNotes,
    numbers: Sequence[int],
    timeout: timedelta,
) -> None:
    """Waits for collective ``number`` on the host. Error texts name the ranks of the groups by ``numbers``.

    Raises:
        RankFailure: another rank failed, left or stopped answering. The groups are then broken.
    """
    groups.check_process()
    deadline = time.monotonic() + timeout.total_seconds()
    wait: Wait | None = None
    try:
        while True:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=SLICE_SECONDS))
                break
            notes.check_script()
            if groups.broken:  # another thread has broken the groups, and has told the other ranks why
                raise RankFailure(
                    f"rank {notes.rank} ended this collective, because another of its threads failed; look at the error of that thread"
                )
            failure = notes.failure()
            if failure is None and work.is_completed():
                try:
                    work.wait(timedelta(seconds=SLICE_SECONDS))
                    break  # the collective was only late
                except RuntimeError as broken:
                    raise _lost(broken, groups, notes, numbers) from broken
            if failure is None and time.monotonic() >= deadline:
                failure = _silent(progress, notes, timeout)
            if failure is None:
                wait = wait or Wait(progress, number)
                text = notes.ask(wait.turn)
                if text is None:
                    continue
                notes.report(text)
                failure = RankFailure(text)
            raise failure
    except RankFailure:
        groups.abandon()
        raise
    finally:
        if wait is not None:
            notes.ask(wait.end())
    # After Ctrl-C the collective stays in `under_way`, until a caller waits for its end.
    groups.end(work)


def _lost(error: Exception, groups: Groups, notes: FailureNotes, numbers: Sequence[int]) -> RankFailure:
    """Returns the failure to raise after a collective broke. It names the ranks whose connections are closed."""
    # Checked at once, before other ranks that notice the loss end too.
    gone = [numbers[rank] for rank in groups.others if not groups.reaches(rank)]
    until, failure = time.monotonic() + SLICE_SECONDS, notes.failure()
    while (
        failure is None and time.monotonic() < until
    ):  # a lost connection may precede the note of the rank that went down
        time.sleep(_NEWS_PAUSE)
        failure = notes.failure()
    if failure is None:
        its = "its connection is" if len(gone) == 1 else "their connections are"
        failure = RankFailure(
            f"{in_words(gone)}{notes.of} went away, {its} closed; look there first"
            if gone
            else f"a rank went away: {error}"
        )
        notes.report(str(failure))
    return failure


def _silent(progress: Progress, notes: FailureNotes, timeout: timedelta) -> RankFailure:
    """Returns the failure to raise after the timeout. It names the ranks that have not recorded a wait."""
    time.sleep(SLICE_SECONDS)  # so that ranks that have only just begun to wait can record it
    failure = notes.failure()
    if failure is not None:
        return failure
    silent = notes.ask(lambda store: not_waiting(store, progress))
    seconds = f"within {timeout.total_seconds():g} s"
    if silent is None:
        text = f"no answer from another rank {seconds}, nor from the job's key-value store (which {notes.keeper} hosts)"
    elif silent:
        text = f"no answer from {in_words(silent)}{notes.of} {seconds}"
    else:
        text = (
            f"no answer {seconds}, although every rank waits; check the network between them, and whether a rank has skipped batches, or has caught an error "
            "and gone on"
        )
    notes.report(text)
    return RankFailure(text)
