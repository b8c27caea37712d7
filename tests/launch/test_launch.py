"""Laws of starting: the identity of a process, the meeting of ranks, their common stop, and batch scripts.

Environment variables and small scripts stand for SLURM; tests/slurm has the real one.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
import torch.distributed as dist
from distributed import HANG, NEVER

import salientpp
from salientpp import cli
from salientpp.launch import rendezvous
from salientpp.launch.environment import Launch, LaunchError, detect, first_host, tasks_per_host
from salientpp.launch.rendezvous import meet
from salientpp.launch.sbatch import Batch, Partitioning, script
from salientpp.ranks import greeting

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu07",
    "MASTER_PORT": "29400",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "12",
}
STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_CLUSTER_NAME": "big",
}
ONE_PER_HOST = {
    **STEP,
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# --- identity of this process -----------------------------------------------------------------------------


def test_a_rank_is_the_same_to_torchrun_and_to_srun():
    ours = Launch("torchrun", 5, 8, 1, 4, "gpu07", 29400)
    assert detect(TORCHRUN) == ours
    assert detect(STEP) == replace(ours, launcher="slurm", master_port=None, job="big-12-3-0")
    assert detect({**STEP, "SLURM_RESTART_COUNT": "2"}).job == "big-12-3-2"
    assert detect({**STEP, "MASTER_ADDR": "head", "MASTER_PORT": "4000"}).master_port == 4000
    assert detect({**STEP, "MASTER_ADDR": "head", "MASTER_PORT": "4000"}).master_addr == "head"
    assert detect({**STEP, "SLURM_STEP_TASKS_PER_NODE": "6,2"}).ranks_per_host == 2


def test_a_process_without_a_launcher_is_a_single_process():
    for environ in (
        {},
        {"MASTER_ADDR": "here", "MASTER_PORT": "1"},
        {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    ):
        assert detect(environ) == Launch("none")


def test_torchrun_under_srun_and_manual_variables_are_used_if_consistent():
    assert detect({**ONE_PER_HOST, **TORCHRUN}).rank == 5
    by_hand = without(TORCHRUN, "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    launch = detect({**STEP, **by_hand})
    assert (launch.local_rank, launch.ranks_per_host) == (1, 4), "SLURM's variables fill in the missing ones"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            without(TORCHRUN, "WORLD_SIZE", "MASTER_PORT"),
            "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR of torchrun's variables is set, but WORLD_SIZE, MASTER_PORT is missing",
        ),
        (without(STEP, "SLURM_PROCID"), "of srun's variables is set, but SLURM_PROCID is missing; start with srun"),
        (without(STEP, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "SLURM_NTASKS is missing"),
        ({**TORCHRUN, "RANK": "five"}, "RANK must be an integer from 0 to 2147483647, in digits alone, got 'five'"),
        ({**TORCHRUN, "RANK": "8"}, r"RANK must be in \[0, 8\), as given by WORLD_SIZE, got 8"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "LOCAL_RANK must be an integer from 0 to 2147483647, in digits alone, got '-1'"),
        ({**STEP, "SLURM_PROCID": "8"}, r"SLURM_PROCID must be in \[0, 8\)"),
        ({**STEP, "SLURM_NODEID": "2"}, r"SLURM_NODEID must be in \[0, 2\)"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "many"}, r"must look like 4\(x2\),1, with .*, got 'many'; start with srun"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE must be at most 8, as given by WORLD_SIZE, got 9"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4,9"}, "entry in SLURM_STEP_TASKS_PER_NODE must be at most 8, as given by SLURM_STEP_NUM_TASKS, got 9"),
        (
            {**ONE_PER_HOST, **TORCHRUN, "GROUP_WORLD_SIZE": "1"},
            r"srun has started 2 tasks \(SLURM_NTASKS\), but the torchrun of this task has 1 in its group .* --nnodes 2",
        ),
        (
            {**STEP, **without(TORCHRUN, "TORCHELASTIC_RUN_ID"), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            "disagree: RANK=0 but SLURM_PROCID=5 and WORLD_SIZE=1 but SLURM_NTASKS=8; unset RANK",
        ),
        (
            {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
            "runs in the shell of SLURM's job 12, which has 8 tasks, but it is not one of the tasks; start it with srun",
        ),
    ],
)  # fmt: skip
def test_missing_or_contradicting_variables_are_explained(environ, words):
    with pytest.raises(LaunchError, match=words):
        detect(environ)


_NO_NUMBERS = ["-1", "-0", "+3", "٣", "²", "1_0", " 1", "1\n", "1.0", "1e3", "0x1", "five", "4294967296", "9" * 5000]
_NUMBERS = [
    *((TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")),
    *(
        (STEP, name)
        for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "MASTER_PORT")
    ),
    (without(STEP, "SLURM_STEP_NUM_TASKS"), "SLURM_NTASKS"),
    ({**ONE_PER_HOST, **TORCHRUN}, "GROUP_WORLD_SIZE"),
    ({"SLURM_JOB_ID": "12"}, "SLURM_NTASKS"),
]


@pytest.mark.parametrize(("environ", "name"), _NUMBERS, ids=[name for _, name in _NUMBERS])
def test_a_variable_that_is_no_number_in_its_range_is_named(environ, name):
    wrong = ["65536", *_NO_NUMBERS] if name == "MASTER_PORT" else _NO_NUMBERS
    for text in [*wrong, *(["0"] if any(word in name for word in ("PORT", "SIZE", "TASKS")) else [])]:
        shown = repr(text) if len(text) < 80 else repr("9" * 80 + "...")
        with pytest.raises(LaunchError, match=rf"^{name} must be an integer from .* got {re.escape(shown)}$"):
            detect({**environ, name: text})
    with pytest.raises(LaunchError, match=rf"\b{name} (is missing|must be an integer from .*, got '')"):
        detect({**environ, name: ""})


def test_a_single_rank_may_leave_the_port_to_the_kernel():
    alone = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert detect({**alone, "MASTER_PORT": "0"}).master_port == 0
    assert detect({**TORCHRUN, "MASTER_PORT": "65535"}).master_port == 65535


@pytest.mark.parametrize(
    ("name", "texts", "words"),
    [
        (
            "SLURM_STEP_TASKS_PER_NODE",
            [
                "9999999999(x9999999999)", "4(x1048577)", "1(x1048576),1", "٤(x2)", "-4(x2)", "4(x-2)", "4(x0)", "0", "4,", "4 (x2)", "4(x2)\n", "4.0",
                "4294967296", "1" * 5000,
            ],
            r"must look like 4\(x2\),1, with 1 to 2147483647 tasks on each of at most 1048576 hosts, got ",
        ),
        ("SLURM_STEP_NODELIST", [" ", ",n1", "n[1-2", "n1 n2", "n1\n", "[", "a/b", "n" * 5000], r"must be a list of hosts such as gpu\[07-08\],login, got "),
        ("MASTER_ADDR", [" ", " gpu07", "gpu07\n", "a,b", "../a", "n" * 5000], "must be the name or address of a host, without blanks, got "),
        ("SLURM_JOB_ID", ["-1", "../12", "12_3", "1.0", "٣", " ", "9" * 5000], "must be a number, in digits alone, got "),
        ("SLURM_STEP_ID", ["", "-1", "../12", "٣"], "must be a number, in digits alone, got |SLURM_STEP_ID is missing"),
        ("SLURM_RESTART_COUNT", ["-1", "1/2", "one"], "must be a number, in digits alone, got "),
        ("SLURM_CLUSTER_NAME", ["a/b", " ", "a b", "..\n"], "must be letters, digits, '.', '-' and '_', got "),
    ],
)  # fmt: skip
def test_a_text_that_slurm_or_torchrun_would_not_give_is_refused(name, texts, words):
    for text in texts:
        with pytest.raises(LaunchError, match=rf"{name} {words}|{words}") as error:
            detect({**STEP, name: text})
        assert name in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("n1", "n1"), ("n1,m2", "n1"), ("n[1-2,5],m[1-3]", "n1"), ("gpu[007,010-012]", "gpu007"), ("rack[0-1]n[03-16],login", "rack0n03"), ("a-b[2]c", "a-b2c")],
)  # fmt: skip
def test_the_first_host_is_read_from_slurms_list(hosts, first):
    assert first_host(hosts) == first


def test_tasks_on_each_host_are_read_from_slurms_list():
    assert tasks_per_host("4(x2),1") == [4, 4, 1]
    assert tasks_per_host("3") == [3]


# --- meeting of ranks -------------------------------------------------------------------------------------


def as_tasks(
    function: Callable[..., Any], size: int, directory: Path, seconds: float = HANG, **environ: str
) -> list[Any]:
    """Returns the result of ``function()``, or the text of its error, in tasks as srun might start them."""
    context = distributed.forks()
    pipes, processes = [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        task = {
            **STEP,
            "GLOO_SOCKET_IFNAME": "lo",
            "SLURM_SUBMIT_DIR": str(directory),
            "SLURM_STEP_NODELIST": "no-such-host.invalid",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_STEP_TASKS_PER_NODE": str(size),
            **environ,
        }
        process = context.Process(target=_task, args=(there, function, task))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        deadline = time.monotonic() + seconds
        return [pipe.recv() if pipe.poll(max(0, deadline - time.monotonic())) else "no answer" for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _task(pipe, function, environ):
    os.environ.update(environ)
    try:
        pipe.send(function())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _meet_twice():
    sums = []
    for _ in range(2):
        launch = salientpp.init_process_group(timeout=timedelta(seconds=NEVER))
        word = torch.tensor([2**launch.rank])
        dist.all_reduce(word)
        sums.append((dist.get_rank(), dist.get_world_size(), int(word)))
        dist.destroy_process_group()
    return sums


def test_tasks_meet_without_a_given_port_and_leave_no_file(tmp_path):
    assert as_tasks(_meet_twice, 3, tmp_path) == [2 * [(rank, 3, 7)] for rank in range(3)]
    assert list(tmp_path.iterdir()) == []


def _meet_with_another_version():
    agent = "TORCHELASTIC_USE_AGENT_STORE" in os.environ
    if os.environ["SLURM_PROCID"] == "1":
        greeting.own_version = lambda: "9.0"
    return (_meet_at_agent if agent else _meet_once)()


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_tasks_with_different_versions_raise_when_they_meet(tmp_path, launcher):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environ = {"WORLD_SIZE": "2", **agent} if launcher == "torchrun" else {}
    first, second = as_tasks(_meet_with_another_version, 2, tmp_path, **environ)
    assert first == second
    assert re.match(
        r"LaunchError: all ranks must run the same version of salientpp, got different ones: rank 0 on host \S+ has version (?!9.0)\S+ .*; "
        r"rank 1 on host \S+ has version 9.0 with",
        first,
    )


@pytest.mark.parametrize("text", ["n1", "n1:", "n1:65536", "n1:-1", "n1:²", '{"host": "n1", "port": 7}'])
def test_what_rank_0_publishes_must_be_an_address(tmp_path, monkeypatch, text):
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(tmp_path))
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_meetings", itertools.count())
    (tmp_path / ".salientpp-big-12-3-0-0").write_text(text + "\n")
    with pytest.raises(
        LaunchError,
        match=rf"rank 5 on .*: .*-0 must hold the address .* got {re.escape(repr(text))}; if rank 0 runs another",
    ):
        salientpp.init_process_group(timeout=timedelta(seconds=NEVER))


def test_tasks_meet_at_a_given_port(tmp_path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SLURM_SUBMIT_DIR": "/nonexistent"}

    assert as_tasks(_meet_once, 2, tmp_path, **told) == [3, 3]


def _meet_once():
    launch = salientpp.init_process_group(timeout=timedelta(seconds=NEVER))
    word = torch.tensor([2**launch.rank])
    dist.all_reduce(word)
    return int(word)


def _listening() -> set[str]:
    """Returns the addresses at which sockets of this process listen, in the kernel's format."""
    mine = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{entry}"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


def _meet_and_look():
    assert _meet_once() == 3
    return _listening()


LOOPBACK = "0100007F"


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="needs /proc")
def test_the_port_for_tasks_of_one_host_is_open_on_loopback_only(tmp_path):
    first, second = as_tasks(_meet_and_look, 2, tmp_path)
    assert first == {LOOPBACK} and second <= {LOOPBACK}


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="needs /proc")
@pytest.mark.parametrize(
    ("interface", "name", "resolved", "expected"),
    [
        ("lo", "host", "10.1.2.3", (LOOPBACK, "127.0.0.1")),
        ("lo,eth7", "host", "10.1.2.3", (LOOPBACK, "127.0.0.1")),
        (None, "host", "127.0.1.1", ("0" * 8, "host")),
        (None, "host", None, ("0" * 8, "host")),
        (None, "host", "192.0.2.1", ("0" * 8, "host")),  # no address of this host
        ("nosuch0", "host", "192.0.2.1", ("0" * 8, "host")),
        # Python's form of a name that is not UTF-8.
        ("lo\udcff", "host", "192.0.2.1", ("0" * 8, "host")),
    ],
)
def test_the_port_for_several_hosts_is_open_at_the_address_they_use(monkeypatch, interface, name, resolved, expected):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setattr(socket, "gethostname", lambda: name)

    def getaddrinfo(host, port, *args, **options):
        if resolved is None:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    before = _listening()
    listener, host = rendezvous._listen(Launch("slurm", world_size=2, ranks_per_host=1))
    with listener:
        (address,) = {listener.getsockname()[0]}
        assert {"127.0.0.1": LOOPBACK, "0.0.0.0": "0" * 8, "::": "0" * 8}[address] == expected[0] and host == expected[
            1
        ]
        assert {row[:8] for row in _listening() - before} <= {expected[0]}


def _wait_for_rank_0():
    if os.environ["SLURM_PROCID"] != "0":
        salientpp.init_process_group(timeout=timedelta(seconds=1))


def test_an_unshared_directory_is_explained(tmp_path):
    ours, other = as_tasks(_wait_for_rank_0, 2, tmp_path)
    assert ours is None
    assert (
        other.startswith("LaunchError: rank 1 on ")
        and "has waited 1 s for" in other
        and "the hosts do not share this directory" in other
    )
    assert "in which rank 0 (on no-such-host.invalid) publishes its address" in other


def test_an_unwritable_directory_is_named(tmp_path):
    first = as_tasks(_meet_once, 1, tmp_path / "missing")
    assert "LaunchError: rank 0 cannot publish its address" in first[0] and "pass a writable directory=" in first[0]


@pytest.mark.parametrize("name", ["{}.writing", "{}"])
def test_nothing_is_written_through_a_link_planted_where_rank_0_publishes(tmp_path, name):
    file, victim = tmp_path / "shared" / ".salientpp-12-0", tmp_path / "thesis.tex"
    victim.write_text("years of work")
    file.parent.mkdir()
    planted = file.with_name(name.format(file.name))
    planted.symlink_to(victim)
    rendezvous._publish(file, "host:1")
    assert victim.read_text() == "years of work"
    assert file.read_text() == "host:1\n" and not file.is_symlink()
    rendezvous._publish(file, f"{rendezvous._FAILED}no memory")
    assert file.read_text() == "failed: no memory\n"
    assert set(file.parent.iterdir()) == {file, planted}, "no other file remains"


def test_a_wrong_network_interface_is_hinted_at(tmp_path):
    for text in as_tasks(_meet_once, 2, tmp_path, GLOO_SOCKET_IFNAME="nosuch0"):
        assert (
            "could not connect to the others" in text and "GLOO_SOCKET_IFNAME is nosuch0" in text and "among lo" in text
        )


def test_a_single_process_gets_no_group(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM") or name in TORCHRUN:
            monkeypatch.delenv(name)
    assert salientpp.NeighborLoader  # importing PyG sets a variable of torch's
    before = dict(os.environ)
    assert salientpp.init_process_group() == Launch("none")
    assert not dist.is_initialized() and dict(os.environ) == before


# --- common stop of ranks ---------------------------------------------------------------------------------


def test_handlers_exist_only_inside_and_a_single_process_stops_at_once():
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    preemption = salientpp.Preemption()
    assert {number: signal.getsignal(number) for number in before} == before, "the constructor installs no handler"
    with preemption:
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
        assert not preemption.should_stop() and preemption.stop_signal is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption.should_stop() and preemption.should_stop()
        assert preemption.stop_signal == signal.SIGUSR1
    assert {number: signal.getsignal(number) for number in before} == before


def _stop_at(rank, signalled, number):
    steps = 0
    with salientpp.Preemption([signal.SIGUSR1, signal.SIGTERM]) as preemption:
        while not preemption.should_stop():
            steps += 1
            assert steps < 100
            time.sleep(0.002 * rank)  # ranks are at different points when the signal arrives
            if steps == signalled.get(rank):
                os.kill(os.getpid(), number)
    return steps, int(preemption.stop_signal)


@pytest.mark.parametrize("signalled", [{0: 7}, {2: 7}, {0: 9, 1: 7, 2: 8}, {1: 1}])
def test_ranks_stop_together_within_two_batches_of_the_first_signal(signalled):
    results = distributed.run(_stop_at, 3, signalled, signal.SIGUSR1)
    assert len(set(results)) == 1
    assert min(signalled.values()) <= results[0][0] <= min(signalled.values()) + 2


def _never_stop(rank):
    with salientpp.Preemption() as preemption:
        return [preemption.should_stop() for _ in range(5)]


def test_no_rank_stops_without_a_signal():
    assert distributed.run(_never_stop, 2) == 2 * [5 * [False]]


def _leave(rank):
    with salientpp.Preemption() as preemption:
        for step in itertools.count():
            if rank == 1 and step == 3:
                os._exit(1)
            preemption.should_stop()


def test_a_rank_that_goes_away_ends_the_others_with_a_hint():
    results = distributed.run(_leave, 2, may_fail=True)
    assert results[0].kind == "RuntimeError"
    assert "rank 0: another rank went away while the ranks agreed on whether to stop" in results[0].text


def _requeue(rank, folder, number):
    os.environ.update(PATH=f"{folder}:{os.environ['PATH']}", SLURM_JOB_ID="12")
    with salientpp.Preemption([signal.SIGUSR1, signal.SIGTERM]) as preemption:
        while not preemption.should_stop():
            os.kill(os.getpid(), number)
        time.sleep(0.3 * rank)
        (folder / f"saved-{rank}").touch()
        return preemption.requeue()


def fake_scontrol(folder: Path, ending: str) -> Path:
    """Makes a command that records its arguments and the ranks that had saved."""
    command = folder / "scontrol"
    command.write_text(f'#!/bin/bash\ncd {folder}\necho "$@" saved-* >> calls\n{ending}\n')
    command.chmod(0o755)
    return folder


def test_one_rank_requeues_the_job_when_all_have_saved(tmp_path):
    assert distributed.run(_requeue, 3, fake_scontrol(tmp_path, "exit 0"), signal.SIGUSR1) == [True, True, True]
    assert (tmp_path / "calls").read_text() == "requeue 12 saved-0 saved-1 saved-2\n"


def test_after_sigterm_nothing_is_requeued(tmp_path):
    assert distributed.run(_requeue, 2, fake_scontrol(tmp_path, "exit 0"), signal.SIGTERM) == [False, False]
    assert not (tmp_path / "calls").exists()


def test_a_refusal_by_slurm_is_reported(tmp_path):
    refused, other = distributed.run(
        _requeue, 2, fake_scontrol(tmp_path, "echo 'not allowed' >&2; exit 1"), signal.SIGUSR1, may_fail=True
    )
    assert "`scontrol requeue 12` failed: not allowed; submit the job again by hand" in refused.text and other is True


def test_nothing_is_requeued_without_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert salientpp.Preemption().requeue() is False


# --- batch scripts ----------------------------------------------------------------------------------------

COMMAND = ["train.py", "my parts", "--title", "it's $5 & more", "--epochs", "3"]
BATCH = Batch(
    COMMAND, parts=8, time="2:00:00", python="/opt/env/bin/python", ranks_per_node=2, gpus_per_node=2, partition="gpu"
)
FIRST = Partitioning("synthetic:num_vertices=100", "my parts", ["--num-neighbors", "5,3"], time="30", partition="cpu")


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize("first", [None, FIRST], ids=["alone", "chain"])
@pytest.mark.parametrize("gpus", [0, 2])
def test_scripts_request_the_given_resources(tmp_path, launcher, first, gpus):
    text = script(
        replace(BATCH, launcher=launcher, first=first, gpus_per_node=gpus, options=["--account=physics"]),
        "salientpp slurm 'a\nb'",
    )
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    tasks, cpus = (2, 4) if launcher == "srun" else (1, 8)
    expected = [
        "--partition=gpu",
        "--time=2:00:00",
        "--nodes=4",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={cpus}",
        "--requeue",
        "--signal=USR1@120",
        "--open-mode=append",
        "--account=physics",
    ]
    assert set(expected) <= set(directives)
    assert ("--gpus-per-node=2" in directives) == (gpus > 0)
    assert text.splitlines()[1 : 1 + len(directives)] == [f"#SBATCH {directive}" for directive in directives], (
        "sbatch reads them before the first command"
    )
    assert f"--ntasks-per-node={tasks} --cpus-per-task={cpus} \\\n        --kill-on-bad-exit=1" in text
    file = tmp_path / "script"
    file.write_text(text)
    subprocess.run(["bash", "-n", file], check=True)
    if shutil.which("shellcheck"):  # the tests of tests/slurm require it
        subprocess.run(["shellcheck", file], check=True)


def run_script(tmp_path: Path, batch: Batch, **environ: str) -> dict[str, list[list[str]]]:
    """Runs a script with commands that only record their arguments. Returns the calls by command."""
    for name, says in (("srun", ""), ("sbatch", "7;big")):
        command = tmp_path / name
        command.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" "" >> {tmp_path}/{name}.calls\necho "{says}"\n')
        command.chmod(0o755)
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\necho 4242\n")
    python.chmod(0o755)
    file = tmp_path / "job.sh"
    file.write_text(script(replace(batch, python=str(python)), "test"))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **environ}
    subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environ, check=True, capture_output=True)
    calls = {}
    for path in tmp_path.glob("*.calls"):
        calls[path.stem] = [
            list(call)
            for is_end, call in itertools.groupby(path.read_text().split("\0"), lambda word: word == "")
            if not is_end
        ]
    return calls


@pytest.mark.parametrize("hosts", [4, 3])  # as requested, and requeued with fewer
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_arguments_of_the_training_script_arrive_unchanged(tmp_path, launcher, hosts):
    calls = run_script(tmp_path, replace(BATCH, launcher=launcher), SLURM_JOB_ID="12", SLURM_NNODES=str(hosts))
    assert list(calls) == ["srun"] and len(calls["srun"]) == 1
    words = calls["srun"][0]
    assert f"--ntasks={2 * hosts if launcher == 'srun' else hosts}" in words
    assert words[-len(COMMAND) :] == COMMAND
    assert ("torch.distributed.run" in words) == (launcher == "torchrun")
    if launcher == "torchrun":
        assert {
            f"--nnodes={hosts}",
            "--nproc-per-node=2",
            f"--rdzv-endpoint={socket.gethostname()}:4242",
            "--rdzv-id=12-0",
        } <= set(words)


def test_a_chain_skips_partitioning_if_the_directory_exists(tmp_path):
    first, training = run_script(tmp_path, replace(BATCH, first=FIRST))["sbatch"]
    assert {"--parsable", "--partition=cpu", "--time=30", "--cpus-per-task=4"} <= set(first)
    assert first[-1].endswith(
        "-m salientpp partition synthetic:num_vertices=100 'my parts' --parts 8 --num-neighbors 5,3"
    )
    assert training == ["--dependency=afterok:7", "--kill-on-invalid-dep=yes", "job.sh"]
    (tmp_path / "sbatch.calls").unlink()
    (tmp_path / "my parts").mkdir()
    (tmp_path / "my parts" / "manifest.json").touch()
    assert run_script(tmp_path, replace(BATCH, first=FIRST)) == {"sbatch": [["job.sh"]]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parts": 0}, "--parts must be an integer from 1 to 2147483647, got 0"),
        ({"parts": 10**30}, "--parts must be an integer from 1 to 2147483647, got 10{30}"),
        ({"gpus_per_node": -1}, "--gpus-per-node must be an integer from 0 to 2147483647, got -1"),
        ({"first": replace(FIRST, cpus=0)}, "--partition-cpus must be an integer from 1 to 2147483647, got 0"),
        ({"first": replace(FIRST, cpus=-4)}, "--partition-cpus must be an integer from 1 .*, got -4"),
        ({"partition": "-x"}, "--partition must be a name without blanks and must not begin with -, got '-x'"),
        ({"python": " "}, "--python must not be empty"),
        ({"first": replace(FIRST, dataset="\t")}, "--dataset must not be empty"),
        ({"ranks_per_node": 3}, r"8 ranks \(8 parts, 1 per part\) do not fill hosts of 3"),
        ({"time": "2 hours"}, "--time must be minutes, H:MM:SS or D-HH:MM:SS"),
        ({"partition": "a b"}, "--partition must be a name without blanks and must not begin with -, got 'a b'"),
        ({"job_name": "a\nb"}, "--job-name must be a name without blanks"),
        ({"launcher": "mpirun"}, "--launcher must be srun or torchrun, got 'mpirun'"),
        (
            {"command": ["python", "train.py"]},
            "expected the training script and its arguments, as in .*, got python train.py",
        ),
        ({"options": ["account"]}, "--sbatch needs an option of sbatch"),
        ({"command": ["--"]}, "expected the training script and its arguments, as in .*, got --"),
        ({"options": ["--account=a\rb"]}, "--sbatch needs an option of sbatch"),
        ({"python": ""}, "--python must not be empty"),
        ({"time": "１２"}, "--time must be minutes"),
        ({"first": replace(FIRST, root="")}, "--root must not be empty"),
        ({"first": replace(FIRST, time="soon")}, "--partition-time must be minutes"),
    ],
)
def test_wrong_options_make_no_script(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(BATCH, **changes)


def test_the_command_prints_or_writes_the_script(tmp_path, capsys):
    words = [
        "slurm",
        "--parts",
        "8",
        "--gpus-per-node",
        "2",
        "--time",
        "2:00:00",
        "--partition",
        "gpu",
        "--python",
        "/opt/env/bin/python",
    ]
    assert cli.main([*words, "--", *COMMAND]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if "Made by" not in line] == [
        line for line in script(BATCH, "").splitlines() if "Made by" not in line
    ], "by default one rank per GPU"
    file = tmp_path / "train.sbatch"
    assert cli.main([*words, "--output", str(file), "--", *COMMAND]) == 0
    assert capsys.readouterr().out == "" and file.read_text().count("train.py") == 2
    assert cli.main([*words, "--output", str(file), "--", *COMMAND]) == 2
    assert "exists and is not replaced, since you may have changed it" in capsys.readouterr().err
    assert cli.main([*words, "--root", "parts", "--", *COMMAND]) == 2
    assert "--dataset and --root require each other" in capsys.readouterr().err


def test_options_that_the_partitioning_job_would_refuse_make_no_script(capsys):
    chain = ["slurm", "--parts", "2", "--time", "5", "--dataset", "synthetic", "--root", "parts"]
    assert cli.main([*chain, "--partition-options", "--num-neighbors 'no end", "--", *COMMAND]) == 2
    assert (
        '--partition-options must be arguments in shell syntax, got "--num-neighbors \'no end" (No closing quotation)'
        in capsys.readouterr().err
    )
    assert cli.main([*chain, "--partition-options", "--num-neighbors 5 --parts 3", "--", *COMMAND]) == 2
    words = "--partition-options must have the same --parts as the training, 2, got 3; leave --parts out there"
    assert words in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main([*chain, "--partition-options", "--num-neighbors x", "--", *COMMAND])
    assert end.value.code == 2 and "salientpp partition: error: argument --num-neighbors" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--sbatch", "--parts", "--output"])
def test_a_separator_is_no_value(capsys, option):
    with pytest.raises(SystemExit) as end:
        cli.main(["slurm", f"{option}=--", "--", "t.py", "--x=--"])
    assert end.value.code == 2 and f"argument {option}: expected a value, got '--'" in capsys.readouterr().err


def test_a_file_may_have_a_name_that_ends_in_dashes(capsys):
    assert cli.main(["info", "a=--"]) == 2
    assert "a=-- is not a dataset directory" in capsys.readouterr().err


# --- a store with keys of earlier starts -------------------------------------------------------------------


def _together(ranks: dict[int, float], world_size: int, port: int, seconds: float = NEVER) -> dict[int, str]:
    """Returns the prefix of the start, or the error, for ranks that come after the given seconds."""
    found = {}

    def come(rank: int, delay: float) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        time.sleep(delay)
        try:
            mine = meet(store, rank, world_size, timedelta(seconds=seconds))
            mine.set(f"here/{rank}", "")
            found[rank] = ("", mine)
        except TimeoutError as error:
            found[rank] = (str(error), None)

    threads = [threading.Thread(target=come, args=item) for item in ranks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()
    keys = [f"here/{rank}" for rank in range(world_size)]
    return {rank: text or str(store.check(keys)) for rank, (text, store) in found.items()}


def test_ranks_meet_only_ranks_of_their_own_start():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for world_size, late in [(3, None), (3, 0), (3, 1), (2, 1), (2, 0), (4, 3), (1, None)]:
        delays = {rank: 0.4 if rank == late else 0.0 for rank in range(world_size)}
        # Keys of earlier starts are still there, but no rank reads them.
        assert _together(delays, world_size, server.port) == dict.fromkeys(range(world_size), "True")


def test_an_unfinished_meeting_is_not_mistaken_for_the_next():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended = _together({0: 0.0, 2: 0.0}, 3, server.port, seconds=0.5)
    assert ended == {0: "rank 1 did not come", 2: "rank 0 or another rank did not come"}
    assert _together({1: 0.0}, 3, server.port, seconds=0.5) == {1: "rank 0 or another rank did not come"}
    assert _together({0: 0.3, 1: 0.0, 2: 0.5}, 3, server.port) == dict.fromkeys(range(3), "True")


def test_a_second_meeting_under_torchrun_reads_no_old_addresses(monkeypatch, tmp_path):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for world_size in (3, 2):
        found = as_tasks(_meet_at_agent, world_size, tmp_path, **agent, WORLD_SIZE=str(world_size))
        assert found == [2**world_size - 1] * world_size


def _meet_at_agent():
    environ = dict(os.environ, RANK=os.environ["SLURM_PROCID"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update({name: value for name, value in environ.items() if not name.startswith("SLURM")})
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        del os.environ[name]
    return _meet_once()


def test_an_error_of_an_agents_store_names_the_missing_rank(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = dict(
        RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=server.port
    )
    for name, value in {**words, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(LaunchError, match=r"rank 0 of 2 on .* could not connect to the others .*: rank 1 did not come"):
        salientpp.init_process_group(timeout=timedelta(seconds=0.3))


def _meet_after_an_error() -> Any:
    """Meets the others. Every task but 0 and 2 finds that the shared file system has lost the file of rank 0; task 0 may fail before it has one."""
    rank = os.environ["SLURM_PROCID"]
    if rank == os.environ["FAILING"]:
        if rank == "0":
            rendezvous._listen = _raise_out_of_files
        else:
            Path.read_text = _raise_stale  # type: ignore[method-assign]
    return _meet_once()


def _raise_stale(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ESTALE, "Stale file handle")


def _raise_out_of_files(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(("failing", "words"), [("0", "Too many open files"), ("1", "Stale file handle")])
def test_every_task_hears_of_an_error_of_one_before_they_meet(tmp_path, failing, words):
    said = as_tasks(_meet_after_an_error, 3, tmp_path, FAILING=failing)
    assert all(words in each for each in said), said
    assert all(each.startswith("LaunchError: ") for rank, each in enumerate(said) if str(rank) != failing), said
