"""Waits for a collective, and finds out which rank is missing if it does not end.

Between slices of a wait a rank looks for a note of a failure, see :mod:`salientpp.ranks.failure`. A killed rank leaves no note, but its connections close:
every other rank finds out whose by trying to send a byte to everyone. A silent rank has open connections. But a rank that waits for longer than a slice says
so in the store, so after the time-out the silent ones are those that do not wait.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from salientpp.ranks.failure import FailureNotes, RankFailure, in_words
from salientpp.ranks.groups import Groups

#: Seconds between two looks for a failure note while waiting.
SLICE_SECONDS = 0.5


def wait_for(work: dist.Work, groups: Groups, notes: FailureNotes, numbers: Sequence[int], timeout: timedelta) -> None:
    """Wait for a collective on the host; texts name the ranks of the groups by ``numbers``.

    Raises:
        RankFailure: another rank failed, left or stopped answering. The groups are broken then.
    """
    groups.check_process()
    deadline = time.monotonic() + timeout.total_seconds()
    told = False
    try:
        while True:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=SLICE_SECONDS))
                break
            notes.check_script()
            if groups.broken:  # by another thread, which has told the others why
                raise RankFailure(f"rank {notes.rank} has ended this")
            failure = notes.failure()
            if failure is None and work.is_completed():
                try:
                    work.wait(timedelta(seconds=SLICE_SECONDS))
                    break  # it was only late
                except RuntimeError as broken:
                    raise _lost(broken, groups, notes, numbers) from broken
            if failure is None and time.monotonic() >= deadline:
                failure = _silent(notes, timeout)
            if failure is not None:
                raise failure
            if not told:
                told = True
                notes.note_waiting(True)
    except RankFailure:
        groups.abandon()
        raise
    if told:
        notes.note_waiting(False)
    # After Ctrl-C it remains under way, until somebody waits to the end.
    groups.under_way.discard(work)


def _lost(error: Exception, groups: Groups, notes: FailureNotes, numbers: Sequence[int]) -> RankFailure:
    """The failure to raise when a collective broke: which connections are closed?"""
    # At once, before others that have found it out end too.
    gone = [numbers[rank] for rank in groups.others if not groups.reaches(rank)]
    time.sleep(SLICE_SECONDS)  # a lost connection may precede the note of the rank that went down
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


def _silent(notes: FailureNotes, timeout: timedelta) -> RankFailure:
    """The failure to raise after the time-out: who does not wait?"""
    time.sleep(SLICE_SECONDS)  # for those that have only just begun to
    failure = notes.failure()
    if failure is not None:
        return failure
    silent = notes.silent()
    seconds = f"within {timeout.total_seconds():g} s"
    if silent is None:
        text = f"no answer from another rank {seconds}, nor from the job's key-value store (which rank 0 or torchrun hosts)"
    elif silent:
        text = f"no answer from {in_words(silent)}{notes.of} {seconds}"
    else:
        text = f"no answer {seconds} though every rank waits; is the network between them up?"
    notes.report(text)
    return RankFailure(text)
