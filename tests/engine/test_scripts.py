"""Laws of complete scripts: however a script ends, its process ends, and so do the other ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from distributed import HANG
from forked_python import python
from graphs import random_data
from rare import rare

import salientpp

HEAD = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background with Ctrl-C ignored
import torch.distributed as dist
rank, root, meet = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
from salientpp import NeighborLoader, load
"""
#: The loaders' timeouts are longer than a script may take, so no script ends because of its timeout.
MAKE = 'loader = NeighborLoader(load(root), [5, 3], "train", batch_size=8, shuffle=True, seed=1, timeout=3600)\n'


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scripts") / "parts"
    salientpp.partition(random_data(), 2, folder, [5, 3], 8)
    return folder


def _run_script(
    tmp_path: Path, parts: Path, body: str, executable: str | None = None
) -> list[subprocess.CompletedProcess]:
    """Runs a script on two ranks, each a fork that ends as an interpreter does, or with ``executable``."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(body))
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [executable or python(), str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(parts), str(tmp_path / "meet")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    done = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=HANG)
            done.append(subprocess.CompletedProcess(rank.args, rank.returncode, out, err))
    except subprocess.TimeoutExpired:
        pytest.fail("a script did not end")
    finally:
        for rank in ranks:
            rank.kill()
    return done


#: Output of an interpreter that crashes or fails at exit.
BAD_ENDS = re.compile(
    "Exception ignored|Traceback|terminate called|destroyed|pending|Fatal|FATAL|Segmentation|unraisable"
)


@pytest.mark.parametrize(
    ("which", "destroy", "taken", "depth", "forks"),
    [
        ("True", "", 0, 10, True),
        ("rank == 0", "", 1, 1, True),
        ("rank == 1", "dist.destroy_process_group()", 4, 10, True),
        *rare(
            ("True", "", 0, 10, False),
            ("rank == 1", "", 5, 10, True),
            ("True", "dist.destroy_process_group()", 1, 10, True),
            ("rank == 0", "dist.destroy_process_group()", 0, 3, True),
            ("rank == 1", "dist.destroy_process_group()", 4, 1, True),
        ),
        *(
            pytest.param("True", "", taken, depth, False, marks=pytest.mark.faults)
            for taken in (1, 2, 3, 5, 7)
            for depth in (1, 3, 10)
        ),
        *(
            pytest.param("rank == 0", "", taken, depth, True, marks=pytest.mark.faults)
            for taken in (0, 2, 6)
            for depth in (1, 3, 10)
        ),
    ],
)
def test_a_script_can_end_with_an_iterator_alive(tmp_path, parts, which, destroy, taken, depth, forks):
    body = (
        MAKE.replace("timeout=3600", f"timeout=3600, num_workers=1, depth={depth}")
        + f"""
iterator = iter(loader)
for _ in range({taken}):
    next(iterator)
if not ({which}):
    print(sum(1 for _ in iterator) + {taken}, len(loader))
{destroy}
"""
    )
    for rank, done in enumerate(_run_script(tmp_path, parts, body, None if forks else sys.executable)):
        assert done.returncode == 0, done.stderr
        assert not BAD_ENDS.search(done.stderr), done.stderr
        if done.stdout:
            given, length = done.stdout.split()
            assert given == length, rank


@pytest.mark.parametrize("depth", [*rare(1), 10])
def test_an_uncaught_exception_on_one_rank_ends_the_other_with_its_text(tmp_path, parts, depth):
    body = (
        MAKE.replace("timeout=3600", f"timeout=3600, depth={depth}")
        + """
import torch
for epoch in range(3):
    for index, batch in enumerate(loader):
        if rank == 0 and (epoch, index) == (1, 2):
            raise LookupError("the user's mistake")
"""
    )
    failing, waiting = _run_script(tmp_path, parts, body)
    assert failing.returncode == 1 and "LookupError: the user's mistake" in failing.stderr
    assert waiting.returncode == 1
    assert "rank 0 ended early: LookupError: the user's mistake" in waiting.stderr


def test_an_uncaught_exception_reaches_ranks_that_have_begun_the_next_epoch(tmp_path, parts):
    body = (
        MAKE
        + """
import threading
def late(*error):
    for thread in threading.enumerate():
        if thread.name == "salientpp-answer":  # answers rank 1 to the end of the epoch
            thread.join()
    sys.__excepthook__(*error)
sys.excepthook = late
for epoch in range(3):
    for index, batch in enumerate(loader):
        if rank == 0 and (epoch, index) == (1, 2):
            raise LookupError("the user's mistake")
"""
    )
    failing, waiting = _run_script(tmp_path, parts, body)
    assert failing.returncode == 1 and "LookupError: the user's mistake" in failing.stderr
    assert waiting.returncode == 1
    assert "stage open_epoch: rank 0 ended early: LookupError: the user's mistake" in waiting.stderr


def test_an_uncaught_exception_does_not_block_ranks_that_wait_for_the_process(tmp_path, parts):
    body = (
        MAKE
        + """
import torch
for index, batch in enumerate(loader):
    if rank == 0 and index == 2:
        raise LookupError("the user's mistake")
    dist.all_reduce(torch.ones(1))  # as DDP does in every step
"""
    )
    failing, waiting = _run_script(tmp_path, parts, body)
    assert failing.returncode == 1 and "LookupError: the user's mistake" in failing.stderr
    assert waiting.returncode == 1


@pytest.mark.parametrize("end", [*rare(""), "dist.destroy_process_group()"])
def test_a_failed_stage_ends_every_process_at_once(tmp_path, parts, end):
    body = (
        MAKE.replace("timeout=3600", "timeout=3600, transform=fail")
        + f"""
import torch
try:
    for batch in loader:
        pass
finally:
    {end or "pass"}
"""
    )
    fail = "def fail(batch):\n    if rank == 0 and batch.n_id.numel() % 3 == 0:\n        1 / 0\n    return batch\n"
    for done in _run_script(tmp_path, parts, fail + body):
        assert done.returncode == 1
        assert "stage assemble: division by zero" in done.stderr and "rank 0, batch" in done.stderr


def test_wrong_arguments_on_one_rank_raise_on_every_rank(tmp_path, parts):
    body = 'NeighborLoader(load(root), [5, 3], "train", depth=rank, timeout=3600)\n'
    for done in _run_script(tmp_path, parts, body):
        assert done.returncode == 1 and "depth must be an integer >= 1 (batches in flight), got 0" in done.stderr


PROCESSES = """
import sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
from salientpp import NeighborLoader, load

def work(rank, root, meet):
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    loader = NeighborLoader(load(root), [5, 3], "train", batch_size=8, shuffle=True, seed=1, timeout=3600)
    for index, batch in enumerate(loader):
        if rank == 0 and index == 2:
            raise LookupError("the user's mistake")
        dist.all_reduce(torch.ones(1))  # as DDP does in every step

if __name__ == "__main__":
    START
"""
TORCH_SPAWN = "mp.start_processes(work, sys.argv[1:], nprocs=2, start_method='METHOD')"
PROCESS = """context = mp.get_context("METHOD")
    ranks = [context.Process(target=work, args=(rank, *sys.argv[1:])) for rank in range(2)]
    [rank.start() for rank in ranks]
    [rank.join() for rank in ranks]
    print([rank.exitcode for rank in ranks])
    sys.exit(1)"""


@pytest.mark.parametrize(
    ("start", "method"),
    [
        (TORCH_SPAWN, "fork"),
        (PROCESS, "fork"),
        *rare((TORCH_SPAWN, "spawn")),
        pytest.param(PROCESS, "spawn", marks=pytest.mark.faults),
    ],
)
def test_a_failing_process_of_multiprocessing_does_not_block_the_others(tmp_path, parts, start, method):
    script = tmp_path / "script.py"
    script.write_text(PROCESSES.replace("START", start.replace("METHOD", method)))
    done = subprocess.run(
        [
            sys.executable if method == "spawn" else python(),
            str(script),
            str(parts),
            str(tmp_path / "meet"),
        ],
        capture_output=True,
        text=True,
        timeout=HANG,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1 and "LookupError: the user's mistake" in done.stderr
    if start == PROCESS:
        assert done.stdout == "[1, 1]\n"


def test_a_failing_process_of_multiprocessing_tells_the_others_why(tmp_path, parts):
    script = tmp_path / "script.py"
    script.write_text(
        PROCESSES.replace("START", PROCESS.replace("METHOD", "fork")).replace(
            "dist.all_reduce(torch.ones(1))", "time.sleep(rank / 2)"
        )
    )
    done = subprocess.run(
        [python(), str(script), str(parts), str(tmp_path / "meet")],
        capture_output=True,
        text=True,
        timeout=HANG,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert "rank 0 ended early: its process ended with exit code 1" in done.stderr


def test_ctrl_c_on_a_finished_script_that_still_answers_ends_all_ranks(tmp_path, parts):
    """Rank 0's script has ended, and waits for the slow rank 1, which has half a minute of batches left. Ctrl-C ends that wait."""
    body = (
        MAKE.replace("batch_size=8", "batch_size=1")
        + """
import threading
def interrupt():
    threading.main_thread().join()  # the interpreter waits for threads
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)
for batch in loader:
    if rank == 0:
        threading.Thread(target=interrupt).start()
        break
    time.sleep(0.5)
"""
    )
    over, slow = _run_script(tmp_path, parts, body)
    assert slow.returncode == 1 and "rank 0 ended early: KeyboardInterrupt" in slow.stderr
    assert not re.search("terminate called|Fatal|FATAL|Segmentation", over.stderr), over.stderr


FORK = """
import subprocess
iterator = iter(loader)
next(iterator)
def fork(function):
    pid = os.fork()
    if pid:
        return pid
    function()
    os._exit(0)
"""


def test_a_forked_child_of_a_rank_raises_and_the_rank_continues(tmp_path, parts):
    body = (
        MAKE
        + FORK
        + """
def use():
    for what in (lambda: next(iterator), lambda: iter(loader), lambda: NeighborLoader(load(root), [5, 3], "train", batch_size=8)):
        try:
            what()
        except RuntimeError as error:
            print("forked from rank" in str(error), flush=True)
    iterator.close()
    data = __import__("graphs").random_data()
    print(len(list(NeighborLoader(data, [3], batch_size=100))), flush=True)
pid = fork(use)
os.waitpid(pid, 0)
print(1 + sum(1 for _ in iterator) == len(list(loader)) == len(loader))
"""
    )
    for done in _run_script(tmp_path, parts, body):
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["True", "True", "True", "4", "True"], done.stderr


def test_a_forked_child_of_a_rank_can_end_independently(tmp_path, parts):
    body = (
        MAKE
        + FORK
        + """
def fail():
    raise LookupError
for end in (sys.exit, fail) if rank == 0 else ():
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        end()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(status, time.monotonic() - started < 120)
print(1 + sum(1 for _ in iterator) == len(list(loader)) == len(loader))
"""
    )
    first, second = _run_script(tmp_path, parts, body)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout.split() == ["0", "True", "1", "True", "True"], first.stderr
    assert second.stdout.split() == ["True"]


@pytest.mark.parametrize(
    "start",
    ["fork(lambda: time.sleep(100))", *rare('os.posix_spawn("/bin/sleep", ["sleep", "100"], os.environ)')],
)
def test_a_killed_rank_is_noticed_at_once_even_if_its_child_lives(tmp_path, parts, start):
    body = (
        MAKE
        + FORK
        + f"""
import signal
if rank == 0:
    sys.stdout.close(), sys.stderr.close()
    os.closerange(1, 3)
    {start}
    os.kill(os.getpid(), signal.SIGKILL)
started = time.monotonic()
try:
    for _ in range(1000):
        list(loader)
except RuntimeError as error:
    print(time.monotonic() - started < 90, "rank 0 went away" in str(error))
"""
    )
    killed, other = _run_script(tmp_path, parts, body)
    assert killed.returncode == -9
    assert other.stdout.split() == ["True", "True"], (other.stdout, other.stderr)
