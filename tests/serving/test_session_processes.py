"""Laws of sessions: who owns one, how it ends when a process or the server ends, and its numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from storage_server import ROOT, TOKEN, is_alive, running, until

from salientpp.sessions.protocol import StorageError

#: A client that opens or attends a session, prints a line and stays: ADDRESS, TOKEN, "open" or "attend", session, timeout.
CLIENT = """
import sys, time
from salientpp.sessions.connection import Connection
address, token, do, session, timeout = sys.argv[1:]
connection = Connection(address, token, float(timeout))
more = {"trainers": 2, "store": None, "timeout": float(timeout)} if do == "open" else {"rank": 1}
connection.request(do=do, session=session, **more)
connection.keep_beating(lambda text: None)
print("ready", flush=True)
time.sleep(60)
"""


def client(server, do: str, session: str, timeout: float = 30) -> subprocess.Popen:
    arguments = [str(server.address), TOKEN, do, session, str(timeout)]
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


def pid_of(server, session: str) -> int:
    (found,) = [each["pid"] for each in server.sessions() if each["session"] == session]
    return found


def test_a_session_begins_reports_and_ends_by_itself(server):
    with server.connect() as connection:
        assert server.open(connection, "e1", trainers=3) == ["127.0.0.1", 4321]
        until(lambda: (server.sessions() or [{"rows": 30}])[0]["rows"] == 30)
        (found,) = server.sessions() or [None]
        assert (found["session"], found["trainers"], found["attending"]) == ("e1", 3, [0])
        assert (found["rows"], found["bytes"]) == (30, 3000) and 0 <= found["since"] < 20
        assert found["bytes_per_second"] > 100 and found["pid"] > 0 and found["peer"].startswith("127.0.0.1:")
        until(lambda: not server.sessions())
    until(lambda: server.said(f"session e1 of {found['peer']} ended"))
    assert server.told("e1") == ""


def test_a_session_starts_within_a_moment(root, tmp_path):
    with running(root, tmp_path, is_new=True) as server, server.connect() as first, server.connect() as second:
        server.open(first, "a2")  # the fork server has imported everything after its first process
        begin = time.monotonic()
        server.open(second, "a3")
        took = time.monotonic() - begin
        print(f"a session starts in {took * 1e3:.1f} ms")
        assert took < 2


@pytest.mark.parametrize("which", ["open", "attend"])
@pytest.mark.parametrize("signal_", ["SIGKILL", "SIGSTOP"])
def test_a_killed_or_stopped_rank_ends_its_session_and_no_other(server, which, signal_):
    session = f"a4{'01'[which == 'open']}{'01'[signal_ == 'SIGKILL']}"
    timeout = 30 if signal_ == "SIGKILL" else 3
    other = client(server, "open", f"{session}f")
    owner = client(server, "open", session, timeout)
    attending = client(server, "attend", session, timeout)
    pid, others = pid_of(server, session), pid_of(server, f"{session}f")
    killed, rank = (owner, 0) if which == "open" else (attending, 1)
    killed.send_signal(getattr(signal, signal_))
    until(lambda: server.told(session))
    why = "went away" if signal_ == "SIGKILL" else "did not answer for 3 s; it may be stopped"
    assert server.told(session) == f"rank {rank} of the job {why}"
    until(lambda: not is_alive(pid))
    until(lambda: server.said(f"was lost: rank {rank} of the job {why}"))
    assert is_alive(others) and server.told(f"{session}f") == ""
    for each in (owner, attending, other):
        end(each)


def test_bye_leaves_the_session_to_itself(server):
    owner, attending = server.connect(), server.connect()
    server.open(owner, "a5", trainers=2)
    attending.request(do="attend", session="a5", rank=1)
    attending.close()
    pid = pid_of(server, "a5")
    assert server.sessions()[0]["attending"] == [0]
    owner.close()
    time.sleep(0.3)
    assert server.told("a5") == "" and is_alive(pid), "a process has a minute to end by itself"
    assert server.sessions()[0]["attending"] == []
    os.kill(pid, signal.SIGKILL)
    until(lambda: not server.sessions())
    assert server.said("a5 of") and server.said("was killed by signal 9; memory may have run out")


def test_a_process_that_stays_after_a_loss_is_killed(server):
    owner = server.connect()
    server.open(owner, "b6")
    pid = pid_of(server, "b6")
    owner.close(bye=False)
    until(lambda: server.told("b6"))
    assert 0.1 < until(lambda: not is_alive(pid)) < 30
    until(lambda: not server.sessions())


def test_a_stopped_process_is_lost_after_the_timeout(server):
    """Its server misses its reports, tells the ranks, and ends it."""
    owner, told = server.connect(timeout=6), []
    server.open(owner, "a6", timeout=6)
    owner.keep_beating(told.append)
    pid = pid_of(server, "a6")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: told)
    assert "its process on storage host" in told[0] and "did not report for 6 s; it may be stopped" in told[0]
    until(lambda: not server.sessions() and not is_alive(pid))
    owner.close()


@pytest.mark.parametrize(
    "session, text",
    [
        ("f7", "the session failed: the part is missing"),
        ("d7", "the session was killed by signal 9"),
        ("c7", "rank 1 of the session, its process on storage host .*, did not report for 0.25 s; it may be stopped"),
    ],
)
def test_a_process_that_fails_at_its_start_is_an_error_of_open(server, session, text):
    with server.connect() as connection:
        with pytest.raises(StorageError, match=f"refused 'open': {text}"):
            server.open(connection, session, timeout=0.5 if session == "c7" else 30)
        until(lambda: not server.sessions())
        assert server.open(connection, "e7")  # the same connection may try again


def test_the_same_id_and_the_same_rank_come_once(server):
    with server.connect() as owner, server.connect() as second, server.connect() as third:
        server.open(owner, "a8", trainers=2)
        with pytest.raises(StorageError, match="session a8 is open already"):
            server.open(second, "a8")
        with pytest.raises(StorageError, match="belongs to session a8 already"):
            server.open(owner, "a9")
        with pytest.raises(StorageError, match=r"rank must be an integer in \[0, 1\], got 2"):
            second.request(do="attend", session="a8", rank=2)
        with pytest.raises(StorageError, match="rank 0 attends session a8 already"):
            second.request(do="attend", session="a8", rank=0)
        second.request(do="attend", session="a8", rank=1)
        with pytest.raises(StorageError, match="rank 1 attends session a8 already"):
            third.request(do="attend", session="a8", rank=1)


def test_a_session_that_ends_ends_the_connections_of_its_ranks(server):
    owner = server.connect()
    server.open(owner, "e9")
    owner.keep_beating(lambda text: None)
    until(lambda: not server.sessions())
    with pytest.raises(StorageError, match="closed the connection|has ended|has not sent|has closed"):
        owner.request(do="status")


@pytest.mark.parametrize("is_rank", [True, False])
def test_clients_hear_what_their_session_has_lost(server, is_rank):
    """A rank, or the session's process. Nothing that the client does itself is a loss."""
    heard, closed = [], []
    owner, second, third = (server.connect() for _ in range(3))
    server.open(owner, "b7", trainers=3)
    for rank, connection in enumerate((second, third), 1):
        connection.request(do="attend", session="b7", rank=rank)
    owner.keep_beating(heard.append)
    third.keep_beating(closed.append)
    third.close()
    if is_rank:
        second.close(bye=False)
    else:
        os.kill(pid_of(server, "b7"), signal.SIGKILL)
    until(lambda: heard)
    until(lambda: not server.sessions())
    process = f"rank 3 of the session, its process on storage host {owner.address}, was killed by signal 9; memory may have run out"
    assert (heard, closed) == (["rank 1 of the job went away" if is_rank else process], [])


def test_beats_keep_a_session_with_a_short_timeout(server):
    with server.connect(timeout=2) as owner:
        server.open(owner, "ab1", timeout=2)
        owner.keep_beating(lambda text: None)
        time.sleep(4)
        assert server.told("ab1") == "" and not owner.has_ended


def test_a_server_that_was_stopped_loses_no_session(server):
    """It reads the beats and reports that arrived meanwhile."""
    with server.connect() as owner:
        server.open(owner, "ab2", timeout=2)
        owner.keep_beating(lambda text: None)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            time.sleep(7)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        time.sleep(3)
        assert server.told("ab2") == "" and not owner.has_ended


def test_a_rank_that_comes_after_a_loss_is_told_of_it(server):
    owner, late = server.connect(), server.connect()
    server.open(owner, "b8", trainers=2)
    owner.close(bye=False)
    until(lambda: server.told("b8"))
    # Its process is killed a moment later, and then the server has forgotten it.
    with pytest.raises(StorageError, match="session b8 was lost: rank 0 of the job went away|no session b8 here"):
        late.request(do="attend", session="b8", rank=1)
    late.close()


def test_requests_of_a_session_count_as_answers(server):
    with server.connect() as owner:
        server.open(owner, "aa", timeout=2)
        for _ in range(10):
            time.sleep(0.3)
            owner.request(do="status")
        assert server.told("aa") == ""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stopped_server_tells_its_sessions_and_ends(root, tmp_path, name):
    with running(root, tmp_path) as server:
        first, second = server.connect(), server.connect()
        server.open(first, "ac1")
        server.open(second, "bc1")  # must be killed
        pids = [pid_of(server, "ac1"), pid_of(server, "bc1")]
        server.process.send_signal(getattr(signal, name))
        assert server.process.wait(60) == 100 + getattr(signal, name)
        assert not any(map(is_alive, pids))
        for session in ("ac1", "bc1"):
            assert server.told(session) == f"the storage host {server.address} was stopped"
            os.remove(f"{server.root}.{session}")
        with pytest.raises(StorageError):
            server.connect(timeout=5)


def test_a_killed_server_leaves_no_process(root, tmp_path):
    with running(root, tmp_path) as server:
        connections = [server.connect() for _ in range(3)]
        for number, connection in enumerate(connections):
            server.open(connection, f"ad{number}")
        pids = [each["pid"] for each in server.sessions()]
        parents = {int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]) for pid in pids}
        assert len(pids) == 3 and server.pid not in parents  # the fork server is their parent
        server.process.kill()
        server.process.wait()
        until(lambda: not any(map(is_alive, [*pids, *parents])))


def test_processes_hold_no_connection_of_the_server(server):
    with server.connect() as first, server.connect() as second:
        server.open(first, "ae1")
        server.open(second, "ae2")
        for each in server.sessions():
            folder = f"/proc/{each['pid']}/fd"
            links = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
            # The pipe to the server is the only socket.
            assert sum(link.startswith("socket:") for link in links) <= 1, links


def test_many_sessions_at_once(server):
    connections = [server.connect() for _ in range(8)]
    for number, connection in enumerate(connections):
        server.open(connection, f"af{number}")
    assert len(server.sessions()) == 8
    for connection in connections:
        connection.close(bye=False)
    until(lambda: not server.sessions())
    assert all(server.told(f"af{number}") == "rank 0 of the job went away" for number in range(8))
    for number in range(8):
        assert server.said(f"session af{number} of") and not server.said("exit code 255")
