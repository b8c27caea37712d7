"""Reads the records that the loaders of a run wrote under ``SALIENTPP_TRACE_DIR``.

Each loader of each process writes JSON lines to a file of its own. A description of the loader comes first. Then follow the spans of an epoch,
the numbers of this epoch, and the same for each further epoch. A file may end anywhere, because a process may be killed. Spans are many. So the
first pass reads only descriptions and numbers, and :func:`spans_of` later reads the spans of one epoch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from salientpp.report.damage import AGAIN, check_about, check_moment, check_numbers, epoch_of, milliseconds
from salientpp.report.parts import batches_listed
from salientpp.report.sums import Span, numbers_of_spans

#: Names of files of records: rank, host, process, and number of the loader in its process.
_NAME = re.compile(r"loader\.global_rank_(\d+)\.(.+)-(\d+)-(\d+)\.jsonl")


@dataclass(frozen=True)
class Epoch:
    """Records of one epoch on one rank.

    Attributes:
        place: where its spans are in the file, as (first byte, one past the last).
        is_whole: False if the process ended within the epoch. Its numbers are then sums of its spans.
        is_left_early: True if the loop left the epoch before its last batch.
        every: spans were recorded for one batch in this number, on average; 1 if ``is_whole``.
    """

    numbers: Mapping[str, float]
    place: tuple[int, int]
    is_whole: bool = True
    is_left_early: bool = False
    every: int = 1


@dataclass(frozen=True)
class Log:
    """Records of one loader on one rank.

    Attributes:
        loader: number of the loader in its process.
        about: description of the loader.
        started: time of the first record, in seconds since 1970. ``ended``: time of the last.
        epochs: epochs by their number. If one was begun several times, the last.
    """

    path: Path
    rank: int
    host: str
    loader: int
    about: Mapping[str, Any]
    started: float
    ended: float
    epochs: Mapping[int, Epoch]


@dataclass(frozen=True)
class Run:
    """Records of one loader on all ranks.

    Attributes:
        logs: records of each rank that has some, in the order of ranks.
        ranks: number of ranks of the run.
        others: numbers of other loaders with records.
        notes: what is missing or was left aside, in sentences.
    """

    folder: Path
    loader: int
    logs: Sequence[Log]
    ranks: int
    others: Sequence[int] = ()
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def epochs(self) -> list[int]:
        """Numbers of the epochs that any rank has begun."""
        return sorted({number for log in self.logs for number in log.epochs})

    def of_epoch(self, number: int | None = None) -> tuple[int, list[Log]]:
        """Returns an epoch's number, and the logs that have this epoch.

        Without ``number``, takes the last epoch that all ranks have finished, if possible one that no loop has left early. If there is none, takes
        the last that most ranks have.

        Raises:
            ValueError: no rank has this epoch.
        """
        known = self.epochs
        if not known or (number is not None and number not in known):
            words = f"epoch {' or '.join(map(str, known))}" if known else "at least one epoch"
            given = (
                f"{number}; choose another --epoch" if known else "none; iterate the loader, or choose another --loader"
            )
            raise ValueError(f"{self.folder}: expected {words} of loader {self.loader}, got {given}")
        chosen = max(known, key=lambda each: (*self._finished(each), each)) if number is None else number
        return chosen, [log for log in self.logs if chosen in log.epochs]

    def _finished(self, number: int) -> tuple[bool, bool, int]:
        """Returns True if all ranks have run the whole epoch, True if all have ended it, possibly early, and the number of ranks that have begun it."""
        found = [log.epochs[number] for log in self.logs if number in log.epochs]
        has_ended = len(found) == len(self.logs) and all(epoch.is_whole for epoch in found)
        return has_ended and not any(epoch.is_left_early for epoch in found), has_ended, len(found)

    def like(self, number: int) -> list[int]:
        """Returns the epochs to average with epoch ``number``: all but the first that every rank has ended in the same way. May be this epoch alone."""
        wanted = self._finished(number)
        found = [each for each in self.epochs[1:] if self._finished(each) == wanted and wanted[1]]
        return found if number in found else [number]


def read_run(folder: Path, loader: int | None = None) -> Run:
    """Reads the records of a folder, without spans.

    Args:
        loader: number of the loader in its process. None: the loader that took most time.

    Raises:
        ValueError: the folder has no records, or a file holds something else.
        OSError: a file cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a directory with records of a run, got no directory; {AGAIN}")
    paths = [path for path in sorted(folder.iterdir()) if _NAME.fullmatch(path.name)]
    if not paths:
        raise ValueError(f"{folder}: expected files loader.global_rank_*.jsonl, got none; {AGAIN}")
    logs, notes = [], []
    for path in paths:
        log = _read_log(path)
        if log is None:
            notes.append(f"{path.name} has no whole line.")
        else:
            logs.append(log)
    if not logs:
        raise ValueError(f"{folder}: expected records, got {len(paths)} files without a whole line; {AGAIN}")
    seconds: dict[int, float] = {}
    for log in logs:
        spent = sum(epoch.numbers.get("seconds", 0.0) for epoch in log.epochs.values())
        seconds[log.loader] = seconds.get(log.loader, 0.0) + spent
    chosen = max(sorted(seconds), key=lambda number: seconds[number]) if loader is None else loader
    if chosen not in seconds:
        known = ", ".join(map(str, sorted(seconds)))
        raise ValueError(f"{folder}: expected one of the loaders {known}, got {loader}; choose another --loader")
    latest, ranks, more = _latest_run([log for log in logs if log.loader == chosen])
    others = sorted(set(seconds) - {chosen})
    if others:
        words = "loader " if len(others) == 1 else "loaders "
        notes.append(f"The folder also has records of {words}{', '.join(map(str, others))}; --loader shows them.")
    return Run(folder, chosen, latest, ranks, others, (*notes, *more))


def _latest_run(logs: Sequence[Log]) -> tuple[list[Log], int, list[str]]:
    """Finds the logs of the latest run.

    Returns the last log of each of its ranks, the number of its ranks, and notes on what was left aside.
    """
    in_order = sorted(logs, key=lambda log: log.started)
    latest = in_order[-1]
    ranks = int(latest.about.get("ranks") or 1)
    alike = [log for log in in_order if (log.about.get("ranks") or 1) == ranks]
    # A log that ended before the latest began is of an earlier run. A minute allows for clocks that differ.
    found = {log.rank: log for log in alike if log.ended > latest.started - 60}
    found = {rank: log for rank, log in found.items() if not _is_earlier(log, found, alike)}
    notes = []
    if left := len(logs) - len(found):
        words = "1 file of an earlier run was" if left == 1 else f"{left} files of earlier runs were"
        notes.append(f"{words} left aside; use one directory for each run.")
    missing = [rank for rank in range(ranks) if rank not in found]
    if missing:
        notes.append(f"Records of {_words_of_ranks(missing)} are missing: the directory may be on another host.")
    if beyond := [rank for rank in sorted(found) if rank >= ranks]:
        notes.append(f"There are records of {_words_of_ranks(beyond)}, though the run says that it had {ranks} ranks.")
    return [found[rank] for rank in sorted(found)], ranks, notes


def _is_earlier(log: Log, found: Mapping[int, Log], logs: Sequence[Log]) -> bool:
    """True if a log is of an earlier run. Another rank then has an older log that began nearer to this one than the log chosen for that rank."""

    def is_nearer(older: Log) -> bool:
        chosen = found.get(older.rank)
        if chosen is None or chosen is older or older.rank == log.rank or older.started >= chosen.started:
            return False
        is_before = log.started < older.ended
        return is_before and abs(log.started - older.started) < abs(log.started - chosen.started)

    return any(map(is_nearer, logs))


def _words_of_ranks(ranks: Sequence[int], most: int = 10) -> str:
    more = f" and {len(ranks) - most:,} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:most]))}{more}"


def _whole_lines(path: Path, first: int = 0, last: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yields (offset after the line, line) for the whole lines between two byte offsets of a file."""
    with path.open("rb") as file:
        file.seek(first)
        place = first
        for line in file:
            if not line.endswith(b"\n") or (last is not None and place >= last):
                return
            place += len(line)
            yield place, line


#: Fields that are read, and the types of their values.
_FIELDS: Mapping[str, Any] = {
    "log_type_name": str,
    "time_us": (int, float),
    "step": (int, type(None)),
    "context": (dict, type(None)),
}


def _record(path: Path, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict) and all(isinstance(record.get(name), kinds) for name, kinds in _FIELDS.items()):
        check_moment(path, record)
        return record
    shown = line[:60].decode(errors="replace").strip()
    raise ValueError(f"{path}: expected a record of a loader on each line, got {shown!r}; remove the file, or {AGAIN}")


def _read_log(path: Path) -> Log | None:
    """Returns the records of a file, or None if it has no whole line."""
    matched = _NAME.fullmatch(path.name)
    assert matched is not None  # the caller has chosen such files
    about: dict[str, Any] | None = None
    epochs: dict[int, Epoch] = {}
    rank, host, _, loader = matched.groups()
    started, begin, end, has_spans, line = 0.0, 0, 0, False, b""
    for end, line in _whole_lines(path):
        if about is not None and b'"instant"' not in line:
            has_spans = True
            continue
        record = _record(path, line)
        context = record.get("context") or {}
        if about is None:
            if record["log_type_name"] != "loader":
                kind = record["log_type_name"]
                raise ValueError(f"{path}: expected a description of a loader on line 1, got {kind!r}; remove the file")
            check_about(path, context)
            about, started, begin = context, record["time_us"] / 1e6, end
        elif record["log_type_name"] == "epoch":
            text = str(record.get("event_name") or context.get("epoch"))
            number, numbers = epoch_of(path, text), _numbers(path, context)
            is_left = _is_left_early(path, (begin, end), numbers, batches_listed(about, int(rank)))
            epochs[len(epochs) if number is None else number] = Epoch(numbers, (begin, end), is_left_early=is_left)
            begin, has_spans = end, False
        else:
            has_spans = True
    if about is None:
        return None
    if has_spans:
        # The process ended within this epoch, whose numbers are sums of its spans.
        numbers, every = numbers_of_spans(list(_spans(path, (begin, end))))
        if numbers["batches"]:
            number = max(epochs) + 1 if epochs else 0
            epochs[number] = Epoch(numbers, (begin, end), is_whole=False, every=every)
    ended = _record(path, line)["time_us"] / 1e6
    return Log(path, int(rank), host, int(loader), about, started, ended, epochs)


def _is_left_early(path: Path, place: tuple[int, int], numbers: Mapping[str, float], listed: int | None) -> bool:
    """True if an epoch has fewer batches than ``listed``. An epoch that a loaded state began in its middle does not count."""
    if listed is None or numbers.get("batches", 0) >= listed:
        return False
    return next((span.batch for span in _spans(path, place, "next") if span.name == "next"), 0) == 0


def _numbers(path: Path, context: Mapping[str, Any]) -> dict[str, float]:
    check_numbers(path, context)
    return {name: value for name, value in context.items() if isinstance(value, (int, float)) and math.isfinite(value)}


#: The batch of a span. Lines of other batches need not be parsed.
_STEP = re.compile(rb'"step": (\d+)')


def spans_of(log: Log, epoch: int, name: str = "", batches: tuple[int, int] | None = None) -> list[Span]:
    """Returns the spans of an epoch, in the order of their ends; only those of this name and between these batches, if given.

    Raises:
        ValueError: a line is no record.
    """
    return [span for span in _spans(log.path, log.epochs[epoch].place, name, batches) if name in ("", span.name)]


def _spans(
    path: Path, place: tuple[int, int], name: str = "", batches: tuple[int, int] | None = None
) -> Iterator[Span]:
    for _, line in _whole_lines(path, *place):
        step = _STEP.search(line) if batches is not None else None
        if name.encode() not in line or (batches and step and not batches[0] <= int(step[1]) <= batches[1]):
            continue
        record = _record(path, line)
        kind, value = record["log_type_name"], record.get("value")
        if record.get("log_type") == "event" and kind.endswith("_end") and isinstance(value, (int, float)):
            seconds = milliseconds(path, value) / 1e3
            start = record["time_us"] / 1e6 - seconds
            track, batch = str(record.get("task_name") or "main"), int(record.get("step") or 0)
            yield Span(kind.removesuffix("_end"), track, batch, start, seconds)
