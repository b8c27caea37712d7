"""Tables of docs/results/sessions.md: sessions with storage hosts, and jobs with storage ranks, under failures and load."""

from __future__ import annotations

import statistics

from .base import Drawn, Row, joined, source, table

_MIB = 2**20

#: Role in the result -> its name on the page.
_ROLES = {
    "rank": "rank that trains",
    "session on host": "session's process on a storage host",
    "server on host": "server of a storage host",
    "trains": "rank that trains",
    "stores": "storage rank",
}


def draw_kills(result: Row) -> str:
    """Draws what the job that trains all the time saw, beside the same job alone."""
    found = result["kills"]
    stages = ", ".join(f"{number} {stage}" for stage, number in sorted(found["stages"].items()))
    text = (
        f"**Killed jobs.** {found['kills']} jobs began one after the other, and each was killed within 1.5 s of its start ({stages}). One job trained all the "
        f"time, and {found['admitted']} more jobs began at kills and trained two epochs each. *Gap*: longest time between two batches."
    )
    lines = [
        ["the job, alone", "", _seconds(found["epoch_seconds_alone"]["median"]), _seconds(found["longest_gap_alone"])],
        [
            "the job, while others are killed",
            f"{found['equal_epochs']} of {found['epochs']}",
            _seconds(found["epoch_seconds"]["median"]),
            _seconds(found["longest_gap"]),
        ],
        ["jobs that begin at kills", f"{found['equal_admitted_epochs']} of {found['admitted_epochs']}", "", ""],
    ]
    after = (
        f"Afterwards {found['sessions_left']} sessions and {found['processes_left']} processes of sessions were left. The servers with their fork servers held "
        f"{found['server_bytes_before'] / _MIB:,.0f} MiB of anonymous memory before the kills and {found['server_bytes_after'] / _MIB:,.0f} MiB after them."
    )
    return joined(text, table(["", "equal epochs", "epoch, s", "gap, s"], lines), after, source(result))


def draw_losses(result: Row) -> str:
    """Draws for each kind of process of a session and each stage how soon the others ended, and how many named the right process."""
    text = (
        "**Losses.** Sessions of two ranks with two storage hosts. Each line is two losses, one of each rank or host. *s*: longest time until another process "
        "of the session had ended or raised an error. For a rank that computes, it begins with the rank's next call. *Texts*: errors of ranks, and lines "
        f"in the logs of servers that live. Sessions with stopped processes had a time-out of {result['timeout']:g} s."
    )
    return joined(text, _losses(result["rows"]), source(result))


def draw_losses_of_jobs(result: Row) -> str:
    """Draws the same for jobs with storage ranks."""
    text = (
        f"**Losses in one job.** {result['trainers']} ranks train and {result['storage']} store. Each line is two losses, one of each rank of the role. *s*: "
        "longest time until another rank had raised an error or ended. For a rank that computes, it begins with the rank's next call. *Texts*: errors of the "
        f"other ranks. Loaders of jobs with stopped ranks had a time-out of {result['timeout']:g} s."
    )
    return joined(text, _losses(result["rows"]), source(result))


def _losses(rows: list[Row]) -> str:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["role"], row["how"], row["stage"]), []).append(row)
    lines = []
    for (role, how, stage), each in groups.items():
        ended = [row for row in each if row["state"] == "ended"]
        seconds = max((row["seconds"] for row in ended), default=None)
        named = f"{sum(row['named'] for row in each)} of {sum(row['others'] for row in each)}"
        shown = "—" if seconds is None else _seconds(seconds)
        left = str(sum(row["left"] for row in each))
        lines.append([_ROLES[role], how, stage, f"{len(ended)} of {len(each)}", shown, named, left])
    header = ["lost", "signal", "stage", "all others ended", "s", "texts that name it", "processes left"]
    return table(header, lines, left=3)


def draw_slow(result: Row) -> str:
    """Draws the memory of the slow job's storage processes, and the epochs of another job."""
    found = result["slow"]
    lines = [
        [
            f"{index}",
            *(f"{found[name][index]:,.0f}" for name in ("mib_at_first", "mib_most", "mib_at_last")),
            f"{_growth(found['memory'], index):+,.1f}",
        ]
        for index in range(len(found["mib_most"]))
    ]
    other = [[name, _seconds(found[key]["median"]), f"{found[key]['repeats']}"] for name, key in _OTHER.items()]
    text = (
        f"**A slow job** sleeps for 3 s after each of {found['batches']} batches of about {found['rows_of_batch']:,.0f} rows; the graph has "
        f"{found['vertices']:,} vertices. Anonymous MiB of its processes on the storage hosts. *Growth*: median of the last third less that of the middle one."
    )
    header = ["storage host", "at first", "most", "at last", "growth"]
    about = "Epochs of another job on the same storage:"
    return joined(text, table(header, lines), about, table(["", "median, s", "epochs"], other), source(result))


_OTHER = {"without the slow job": "epoch_seconds_without", "with the slow job": "epoch_seconds_with"}


def _growth(memory: list[list[float]], index: int) -> float:
    column, third = [row[1 + index] for row in memory], len(memory) // 3
    return statistics.median(column[-third:]) - statistics.median(column[third:-third])


def _seconds(value: float) -> str:
    return f"{value:.2f}"


DRAWN: Drawn = {
    "sessions_kills": ("sessions", draw_kills),
    "sessions_losses": ("session_losses", draw_losses),
    "losses_of_jobs": ("losses", draw_losses_of_jobs),
    "sessions_slow": ("sessions", draw_slow),
}
