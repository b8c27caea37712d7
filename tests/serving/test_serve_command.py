"""Laws of ``salientpp serve``: its mistakes, its copy, its status, and its exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from command_line import mistake, run, wide_terminal  # noqa: F401  the fixture is used by name
from storage_server import ROOT, TOKEN

from salientpp.sessions.connection import Connection


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("SALIENTPP_TOKEN", TOKEN)


@contextlib.contextmanager
def served(*words: object) -> Iterator[tuple[subprocess.Popen, str, str]]:
    """Runs the command in a process. Gives the process, the address and the line on stdout."""
    process = subprocess.Popen(
        [sys.executable, "-m", "salientpp", "serve", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, line.split()[-1], line
    finally:
        process.kill()
        process.communicate()


def test_a_server_tells_its_status_and_ends_after_sigterm(root, tmp_path, capsys):
    with served(root, "--listen", "127.0.0.1:0") as (process, address, line):
        assert line == f"salientpp serves {root} on {address}\n"
        code, out, err = run(capsys, "serve", "--status", address, "--json", tmp_path / "status.json")
        assert (code, err) == (0, "") and out == f"{address} has served {root} for 0.0 h; 0 sessions\n"
        status = json.loads((tmp_path / "status.json").read_text())
        assert status["directory"] == str(root) and status["sessions"] == []
        os.environ["SALIENTPP_TOKEN"] = "another token of the tests"
        assert "refused this client: the client's token differs" in mistake(capsys, "serve", "--status", address)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        said = process.stderr.read()
        assert "stopped by SIGTERM" in said and TOKEN not in said
        assert "cannot be reached (Connection refused)" in mistake(capsys, "serve", "--status", address)


def test_a_host_copies_its_parts_and_serves_the_copy_until_interrupted(root, tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    os.environ.pop("SALIENTPP_TOKEN")
    with socket_address() as own:
        hosts = ["--hosts", "node1:29500", own]
    words = [root, "--listen", own, *hosts, "--copy-to", tmp_path / "disk", "--token-file", file]
    with served(*words) as (process, address, line):
        assert (address, line) == (own, f"salientpp serves {tmp_path / 'disk' / 'graph'} on {own}\n")
        with Connection(f"salientpp://{address}", TOKEN) as connection:
            described = connection.request(do="describe")
        assert (described["index"], described["hosts"]) == (1, ["node1:29500", own])
        assert described["parts"] == [1], "the parts of the second of two hosts"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read().endswith("salientpp serve: interrupted; the storage server was stopped\n")


@contextlib.contextmanager
def socket_address() -> Iterator[str]:
    """An address whose port is free at the end of the block."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_mistakes_are_one_line(root, tmp_path, capsys, monkeypatch):
    some = "127.0.0.1:0"
    for words, text in (
        ([root, "--status", some], "--status asks another server and serves nothing, but root was given too"),
        (["--status", some, "--hosts", "a:1"], "but --hosts was given too"),
        ([root, "--listen", some, "--json", tmp_path / "x"], "--json writes what --status shows"),
        ([root, "--listen", "0.0.0.0:1"], "--listen must name one interface"),
        ([root, "--listen", "127.0.0.1:1", "--hosts", "a:1", "b:1"], "must have the address of --listen"),
        ([tmp_path, "--listen", some], "is not a dataset directory"),
        ([root, "--listen", some, "--token-file", tmp_path / "none"], "cannot be used (No such file or directory)"),
    ):
        assert text in mistake(capsys, "serve", *words)
    monkeypatch.delenv("SALIENTPP_TOKEN")
    assert "make one with: python -c" in mistake(capsys, "serve", root, "--listen", some)
    for words, text in (
        ([root], "the following arguments are required: --listen. Example: salientpp serve DIR --listen"),
        (["--listen", some], "the following arguments are required: root"),
        ([root, "--listen", "nowhere"], "argument --listen: an address of a storage server must be HOST:PORT"),
    ):
        with pytest.raises(SystemExit) as end:
            run(capsys, "serve", *words)
        assert end.value.code == 2 and text in capsys.readouterr().err


def test_the_table_of_sessions_has_a_line_for_each(capsys, server):
    with server.connect() as first, server.connect() as second:
        server.open(first, "ab" * 16, trainers=2)
        server.open(second, "a1")
        second.request(do="status")
        code, out, _ = run(capsys, "serve", "--status", server.address)
    assert code == 0 and "2 sessions" in out
    assert "abababababab" in out and "1 of 2" in out and "1 of 1" in out and "MB/s" in out
