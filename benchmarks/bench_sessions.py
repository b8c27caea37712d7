"""Measures sessions with storage hosts under failures and load. Writes results/session_losses.json, and results/sessions.json with the other parts.

    python benchmarks/bench_sessions.py [--kills 100] [--parts kills losses slow]

Two servers (``salientpp serve``) of one directory run on the loopback interface. Jobs are processes that are forked from one that has imported the package.

* ``kills``: one job trains all the time. Other jobs begin one after the other, and each is killed at a random moment of its first 1.5 seconds. At every tenth
  kill, a third job begins and trains two epochs. Batches are compared with those of an undisturbed run by a digest of each epoch.
* ``losses``: each process of a session of two ranks is killed at each stage of the job, and stopped in sessions with a short time-out. It measures until when
  every other process of the session has ended or raised an error, and reads which process the errors name. For a rank that trains, the seconds begin when it
  next calls the package, if it computed when the other was lost.
* ``slow``: a job sleeps for 3 seconds after each large batch. It measures the anonymous memory of the job's processes on the storage hosts, and the seconds of
  an epoch of another job, with the slow job and without.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from common import generated, spread, write_results
from session_jobs import PERIOD, Job, JobSpec, epochs_of
from storage_hosts import TOKEN, Hosts, serving
from storage_server import until

import salientpp

PARTS, FANOUTS = 4, [10, 5]

#: Seconds after the start of ``load`` within which a job is killed.
MOST_SECONDS = 1.5

#: Seconds after which a process that does not notice a loss counts as hung; and time-out of sessions whose processes are stopped.
HANG, TIMEOUT = 30.0, 8.0

#: Stages of a job at which a process is lost -> the word that its ranks say when the stage begins, and the word that ends it.
STAGES = {
    "in load": ("load", "loaded"),
    "before the first loader": ("loaded", "make"),
    "making a loader": ("make", "made"),
    "in an epoch": ("inside", "between"),
    "between epochs": ("between", "never"),
}
ROLES = [(role, index) for role in ("rank", "session on host", "server on host") for index in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=MEASURES, default=[*MEASURES])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--cases", default="", help="regular expression of the losses to measure, such as 'rank 1, SIGKILL, in load'"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vertices", type=int, default=20_000)
    parser.add_argument("--slow-vertices", type=int, default=200_000)
    parser.add_argument("--slow-batches", type=int, default=12)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    found: dict[str, Any] = {}
    sizes = {(arguments.vertices, 15.0, 32): ("kills", "losses"), (arguments.slow_vertices, 50.0, 64): ("slow",)}
    for size, parts in sizes.items():
        if not {*parts} & {*arguments.parts}:
            continue
        with storage(*size) as hosts:
            for part in parts:
                if part in arguments.parts:
                    begin = time.monotonic()
                    found |= MEASURES[part](hosts, arguments)
                    print(f"{part}: {time.monotonic() - begin:.0f} s", flush=True)
    more = {"fanouts": FANOUTS, "seed": arguments.seed, "load_before": load}
    if "losses" in found:
        write_results("session_losses", **found.pop("losses"), **more)
    if found:
        write_results("sessions", [], **found, **more)


@contextmanager
def storage(vertices: int, degree: float, num_features: int) -> Iterator[Hosts]:
    """Two running servers of a generated graph in parts."""
    with tempfile.TemporaryDirectory() as made:
        folder, data = Path(made), generated(vertices, degree, num_features)
        salientpp.partition(data, PARTS, folder / "stored", FANOUTS, 64, topology="parts", refine=False)
        with serving(folder / "stored", 2, folder, is_command=True) as hosts:
            yield hosts


def spec_of(hosts: Hosts, **options: Any) -> JobSpec:
    return JobSpec(hosts.address, TOKEN, **options)


# --- processes, from /proc (Linux) --------------------------------------------------------------------------------


def is_alive(pid: int) -> bool:
    """False for a process that has ended, also if its parent has not read its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def below(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, task.read_text().split())
    return found


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that belongs to no file; pages that several processes share count in proportion. 0 if the process has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) * 1024
    return 0


def of_servers(hosts: Hosts) -> int:
    """Anonymous bytes of the servers and their fork servers."""
    return sum(anonymous_bytes(pid) for server in hosts.processes for pid in below(server.pid))


def session_pids(hosts: Hosts, but: Collection[int] = ()) -> dict[int, int]:
    """Processes of the newest session, by the index of the storage host; ``but`` are processes of others."""
    found = {}
    for index in range(len(hosts.addresses)):
        for each in hosts.status(index)["sessions"]:
            if each["pid"] is not None and each["pid"] not in but:
                found[index] = each["pid"]
    return found


# --- kills --------------------------------------------------------------------------------------------------------


def measure_kills(hosts: Hosts, arguments: argparse.Namespace) -> dict[str, Any]:
    """One job trains while others are killed."""
    draws = random.Random(arguments.seed)
    alone = Job(spec_of(hosts, epochs=3 * PERIOD))
    alone.wait_for("end")
    alone.end()
    expected = {number: digest for number, digest, _, _ in epochs_of(alone.ranks[0])}
    until(lambda: not hosts.sessions())
    before, processes = of_servers(hosts), _number_of_processes(hosts)
    lasting = Job(spec_of(hosts))
    lasting.wait_for("ready")
    stages, admitted = Counter[str](), list[Job]()
    for kill in range(arguments.kills):
        stages[_kill_one(hosts, draws.uniform(0, MOST_SECONDS), admitted if kill % 10 == 9 else None)] += 1
        if kill % 10 == 9:
            print(f"{kill + 1} kills: {dict(stages)}", flush=True)
    for job in admitted:
        job.wait_for("end")
        job.end()
    left = until(lambda: len(hosts.sessions()) <= len(hosts.addresses), 60)
    lasting.end()
    until(lambda: not hosts.sessions(), 60)
    time.sleep(0.5)
    epochs = epochs_of(lasting.ranks[0])
    others = [each for job in admitted for each in epochs_of(job.ranks[0])]
    return {
        "kills": {
            "kills": arguments.kills,
            "stages": stages,
            "epochs": len(epochs),
            "equal_epochs": sum(expected[number] == digest for number, digest, _, _ in epochs),
            "epoch_seconds": spread([seconds for *_, seconds in epochs]),
            "longest_gap": max(gap for _, _, gap, _ in epochs),
            "epoch_seconds_alone": spread([seconds for *_, seconds in epochs_of(alone.ranks[0])]),
            "longest_gap_alone": max(gap for _, _, gap, _ in epochs_of(alone.ranks[0])),
            "admitted": len(admitted),
            "admitted_epochs": len(others),
            "equal_admitted_epochs": sum(expected[number] == digest for number, digest, _, _ in others),
            "seconds_until_only_one_session": left,
            "sessions_left": len(hosts.sessions()),
            "processes_left": _number_of_processes(hosts) - processes,
            "outcomes": _outcomes(hosts.log()),
            "server_bytes_before": before,
            "server_bytes_after": of_servers(hosts),
        }
    }


def _kill_one(hosts: Hosts, seconds: float, admitted: list[Job] | None) -> str:
    """Starts a job, and kills it ``seconds`` after it began to load. Returns what it was doing; with ``admitted``, another job begins at the same moment."""
    victim = Job(spec_of(hosts))
    rank = victim.ranks[0]
    begin = rank.wait_for("load").time
    time.sleep(max(0.0, begin + seconds - time.monotonic()))
    if admitted is not None:
        admitted.append(Job(spec_of(hosts, epochs=2)))
    victim.kill()
    words = {"load": "in load", "loaded": "in load", "make": "making a loader", "made": "making a loader"}
    return words.get(rank.messages[-1].word, "in an epoch")


def _number_of_processes(hosts: Hosts) -> int:
    return sum(len(below(server.pid)) for server in hosts.processes)


def _outcomes(log: str) -> Counter[str]:
    """Counts the ways in which sessions ended, from a server's log."""
    return Counter(re.findall(r"session [0-9a-f]+ of [0-9.:]+ (?!begins)(.*)", log))


# --- losses -------------------------------------------------------------------------------------------------------


def measure_losses(hosts: Hosts, arguments: argparse.Namespace) -> dict[str, Any]:
    """Each process of a session is lost at each stage."""
    draws, rows = random.Random(arguments.seed), []
    seconds = _stage_seconds(hosts)
    cases = [(*role, stage, signal.SIGKILL) for role in ROLES for stage in STAGES]
    cases += [(*role, stage, signal.SIGSTOP) for role in ROLES for stage in STAGES if role[0] != "server on host"]
    cases = [case for case in cases if re.search(arguments.cases, f"{case[0]} {case[1]}, {case[3].name}, {case[2]}")]
    for role, index, stage, how in cases:
        rows.append(_lose(hosts, Case(role, index, stage, how), lambda: seconds[stage] * draws.uniform(0.02, 0.9)))
        print(
            "{role} {index}, {how}, {stage}: {state}, {seconds:.2f} s, {named} of {others} name it".format(**rows[-1]),
            flush=True,
        )
        if rows[-1]["seconds"] > 1.5 or rows[-1]["state"] != "ended":
            print(f"    {rows[-1]['seconds_of']}", flush=True)
        for name, text in rows[-1]["unnamed"].items():
            print(f"    {name} says: {text}", flush=True)
    return {"losses": {"rows": rows, "timeout": TIMEOUT}}


@dataclass(frozen=True)
class Case:
    """Process that is lost: a rank, or the session's process or the server of a storage host; the stage of the job; and the signal."""

    role: str
    index: int
    stage: str
    how: signal.Signals

    @property
    def is_stop(self) -> bool:
        return self.how == signal.SIGSTOP


def _stage_seconds(hosts: Hosts) -> dict[str, float]:
    """Seconds of each stage of an undisturbed job. A process is lost at a random moment of these. In load, they begin when the session's process exists."""
    job = Job(spec_of(hosts, ranks=2, epochs=2))
    job.wait_for("end")
    said = {word: job.ranks[0].wait_for(word).time for word in ("load", "loaded", "make", "made")}
    job.end()
    until(lambda: not hosts.sessions())
    seconds = {"in load": 0.02, "making a loader": said["made"] - said["make"]}
    return {stage: seconds.get(stage, 0.1) for stage in STAGES}


def _lose(hosts: Hosts, case: Case, delay: Callable[[], float]) -> dict[str, Any]:
    """Loses a process, and watches the others. Tries again if the job was past the stage when the process was lost."""
    for _ in range(20):
        job = Job(spec_of(hosts, ranks=2, sleep=0.02, pause=0.5, timeout=TIMEOUT if case.is_stop else None))
        job.wait_for(STAGES[case.stage][0])
        if case.stage != "in load":
            time.sleep(delay())
        name, processes = (case.role, case.index), _processes(hosts, job)
        while (
            case.stage == "in load"
            and not {name, ("session on host", 0)} <= processes.keys()
            and not job.ranks[0].said("loaded")
        ):
            processes = _processes(hosts, job)
        if case.stage == "in load":
            time.sleep(delay())
        past = [rank.said(STAGES[case.stage][1]) for rank in job.ranks]
        if name in processes and ("session on host", 0) in processes and not any(past):
            break
        job.kill()
        until(lambda: not hosts.sessions(), 60)
    else:
        raise RuntimeError(f"no job was lost {case.stage}")
    below_victim = below(processes[name])
    log = [len(path.read_text()) for path in hosts.logs]
    os.kill(processes[name], case.how)
    lost = time.monotonic()
    others = {other: pid for other, pid in processes.items() if other != name and other[0] != "server on host"}
    ends = watch(job, others, lost)
    texts = _texts(hosts, job, name, log)
    row = _row(hosts, case, ends, texts)
    _clean_up(hosts, job, case, processes[name], [*below_victim[1:], *others.values()], row)
    return row


def _processes(hosts: Hosts, job: Job) -> dict[tuple[str, int], int]:
    """Processes of a session that exist."""
    found = {("rank", number): rank.pid for number, rank in enumerate(job.ranks)}
    found |= {("session on host", index): pid for index, pid in session_pids(hosts).items()}
    return found | {("server on host", index): server.pid for index, server in enumerate(hosts.processes)}


def watch(job: Job, others: dict[tuple[str, int], int], lost: float) -> dict[tuple[str, int], float | None]:
    """Waits until the others have ended or raised. Returns their seconds; None: it did not."""
    ends: dict[tuple[str, int], float | None] = dict.fromkeys(others)
    while None in ends.values() and time.monotonic() < lost + HANG:
        for (role, index), pid in others.items():
            if ends[role, index] is not None:
                continue
            raised = job.ranks[index].said("raised") if role == "rank" else None
            if raised is not None:
                ends[role, index] = raised.time - max(lost, raised.values[0])
            elif not is_alive(pid):
                ends[role, index] = time.monotonic() - lost
        time.sleep(0.002)
    return ends


def _texts(hosts: Hosts, job: Job, lost: tuple[str, int], log: list[int]) -> dict[tuple[str, int], str]:
    """Errors of the ranks, and what the servers that live say about the session."""
    time.sleep(0.1)
    texts = {
        ("rank", number): ": ".join(raised.values[1:])
        for number, rank in enumerate(job.ranks)
        if (raised := rank.said("raised")) is not None and lost != ("rank", number)
    }
    for index, path in enumerate(hosts.logs):
        if lost != ("server on host", index) and (line := _outcomes(path.read_text()[log[index] :])):
            texts["server on host", index] = next(iter(line))
    return texts


def _row(
    hosts: Hosts, case: Case, ends: dict[tuple[str, int], float | None], texts: dict[tuple[str, int], str]
) -> dict[str, Any]:
    """Returns the figures of a loss."""
    seconds = {f"{role} {index}": end for (role, index), end in ends.items()}
    known = [end for end in ends.values() if end is not None]
    named = {f"{role} {index}": _names(text, case, hosts) for (role, index), text in texts.items()}
    return {
        "role": case.role,
        "index": case.index,
        "stage": case.stage,
        "how": case.how.name,
        "state": "ended" if len(known) == len(ends) else "HUNG",
        "seconds": max(known, default=0.0),
        "seconds_of": seconds,
        "named": sum(named.values()),
        "others": len(named),
        "unnamed": {name: texts[key] for key, name in zip(texts, named) if not named[name]},
        "example": next(iter(texts.values()), ""),
    }


def _names(text: str, case: Case, hosts: Hosts) -> bool:
    """True if a text names the process that is lost, and no other one as lost."""
    plain = re.sub(r" of a session with storage hosts \(.*?\)", "", text)
    lost = r"\branks \d+, \d+"  # also names a process that is not lost
    if re.search(lost, plain):
        return False
    if case.role == "rank":
        return bool(re.search(rf"\branks? {case.index}\b", plain))
    address = hosts.addresses[case.index]
    if text.startswith("was killed by signal"):
        return True  # the server says so of its own process
    return bool(re.search(rf"\branks? {2 + case.index}\b", plain)) or address in plain


def _clean_up(hosts: Hosts, job: Job, case: Case, lost: int, processes: list[int], row: dict[str, Any]) -> None:
    """Counts processes that are left, and makes the storage as it was before."""
    if case.is_stop and case.role == "rank":
        os.kill(lost, signal.SIGKILL)
    if case.is_stop and case.role != "rank" and is_alive(lost):
        os.kill(lost, signal.SIGCONT)
    begin = time.monotonic()
    with suppress(AssertionError):
        until(lambda: not any(map(is_alive, processes)), 15)
    row["left"] = sum(map(is_alive, processes))
    row["seconds_until_none_is_left"] = time.monotonic() - begin
    job.kill()
    if not hosts.are_alive:
        hosts.restart(case.index)
    until(lambda: not hosts.sessions(), 60)


# --- a slow job ---------------------------------------------------------------------------------------------------


def measure_slow(hosts: Hosts, arguments: argparse.Namespace) -> dict[str, Any]:
    """A slow job with large batches, and another job."""
    other = Job(spec_of(hosts, batch_size=256))
    other.wait_for("ready")
    theirs = {*session_pids(hosts).values()}
    time.sleep(12)
    begin, memory = time.monotonic(), list[list[float]]()
    slow = Job(spec_of(hosts, fanouts=(50, 50), sleep=3.0, epochs=1))
    slow.wait_for("made")
    pids, batches = session_pids(hosts, theirs), list[int]()
    while len(batches) <= arguments.slow_batches and time.monotonic() < begin + 300:
        used = [round(anonymous_bytes(pid) / 2**20, 1) for pid in pids.values()]
        memory.append([round(time.monotonic() - begin, 2), *used])
        batches = [each.values[0] for each in slow.ranks[0].messages if each.word == "batch"]
        time.sleep(0.25)
    end = time.monotonic()
    slow.kill()
    until(lambda: len(hosts.sessions()) <= 2, 20)
    after = time.monotonic()
    time.sleep(12)
    other.end()
    epochs = [(each.time, each.values[-1]) for each in other.ranks[0].messages if each.word == "epoch"]
    with_slow = [seconds for at, seconds in epochs if begin < at - seconds and at < end]
    without = [seconds for at, seconds in epochs if at < begin or at - seconds > after]
    return {
        "slow": {
            "vertices": arguments.slow_vertices,
            "batches": len(batches),
            "rows_of_batch": statistics.median(batches),
            "mib_at_first": memory[0][1:],
            "mib_most": [max(column) for column in [*zip(*memory)][1:]],
            "mib_at_last": memory[-1][1:],
            "memory": memory,
            "epoch_seconds_with": spread(with_slow),
            "epoch_seconds_without": spread(without),
        }
    }


MEASURES: dict[str, Callable[[Hosts, argparse.Namespace], dict[str, Any]]] = {
    "kills": measure_kills,
    "losses": measure_losses,
    "slow": measure_slow,
}

if __name__ == "__main__":
    main()
