"""Laws of addresses, lines and tokens, and of the client's errors when something else answers than a storage server."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest
from storage_server import TOKEN

from salientpp.ranks.greeting import DifferentVersions
from salientpp.sessions.connection import Connection
from salientpp.sessions.protocol import (
    Address,
    StorageError,
    describe_difference,
    greeting,
    line_of,
    parse_address,
    values_of,
)
from salientpp.sessions.token import find_token, is_proof, proof


@pytest.mark.parametrize(
    "text, host, port",
    [
        ("node7:29500", "node7", 29500),
        ("salientpp://node7:29500", "node7", 29500),
        ("salientpp://node7.cluster:1/", "node7.cluster", 1),
        ("[::1]:0", "::1", 0),
        ("salientpp://[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
    ],
)
def test_an_address_is_read_and_written_alike(text, host, port):
    assert parse_address(text) == (host, port)
    assert parse_address(str(parse_address(text))) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        *("", "node7", "node7:", ":29500", "::1:29500", "[]:1", "[::1:5", "a b:1", "u@a:1", "a/b:1", "http://a:1"),
        *("a:65536", "a:-1", "a:1.5", "a:²", "a:" + "9" * 10_000),
    ],
)
def test_a_wrong_address_is_an_error_with_an_example(text):
    with pytest.raises(ValueError, match=r"must be HOST:PORT or salientpp://HOST:PORT .*such as node7:29500"):
        parse_address(text)


@pytest.mark.parametrize("line", [b"", b"[]", b"1", b"{", b"\xff\xfe", b"[" * 60_000, b'{"a":' + b"9" * 5000 + b"}"])
def test_a_line_without_an_object_is_a_value_error(line):
    with pytest.raises(ValueError, match="expected a line with a JSON object, got '"):
        values_of(line)


def test_texts_from_outside_are_short_and_printable():
    for value in ("\x1b[31m\n" * 100, "\ud800", {"a": "\0" * 100}, None, "9" * 10_000):
        text = describe_difference({"salientpp": value, "wire": 1}, {"salientpp": "1", "wire": value})
        assert text.isprintable() and text.isascii() and len(text) < 600


def test_a_token_comes_from_the_environment_or_a_private_file(tmp_path, monkeypatch):
    monkeypatch.delenv("SALIENTPP_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"SALIENTPP_TOKEN is not set; .* make one with: python -c .*token_hex"):
        find_token()
    monkeypatch.setenv("SALIENTPP_TOKEN", "short")
    with pytest.raises(ValueError, match="at least 16 printable characters, got 5"):
        find_token()
    monkeypatch.setenv("SALIENTPP_TOKEN", TOKEN)
    file = tmp_path / "token"
    file.write_text("another token of the tests\n")
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(ValueError, match=f"by its owner only, got mode {mode:04o}; run: chmod 600"):
            find_token(file)
    file.chmod(0o600)
    assert (find_token(file), find_token()) == ("another token of the tests", TOKEN)
    with pytest.raises(FileNotFoundError):
        find_token(tmp_path / "none")


def test_a_proof_holds_for_its_side_token_and_numbers_only():
    good = proof(TOKEN, "client", "1", "2")
    assert is_proof(good, good)
    others = [("x" * 16, "client", "1", "2"), (TOKEN, "server", "1", "2"), (TOKEN, "client", "2", "1")]
    others += [(TOKEN, "client", "1\n2", ""), (TOKEN, "client", "", "1\n2"), (TOKEN, "client", "12", "")]
    assert not any(is_proof(proof(*each), good) for each in others)
    assert not any(is_proof(each, good) for each in (None, 1, "", "é\ud800", good[:-1]))


# --- what else may answer ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(*parts: bytes, pause: float = 0.0, stays: bool = False):
    """A service that sends these bytes to its first client and ends, or stays silent."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        done = threading.Event()

        def answer() -> None:
            with contextlib.suppress(OSError), listening.accept()[0] as accepted:
                for part in parts:
                    accepted.sendall(part)
                    time.sleep(pause)
                if stays:
                    done.wait(20)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield Address(*listening.getsockname())
        finally:
            done.set()
            listening.close()
            thread.join()


def test_an_address_without_a_server_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = Address(*listening.getsockname())
    with pytest.raises(StorageError, match=rf"{address} cannot be reached \(Connection refused\).*salientpp serve"):
        Connection(address, TOKEN, 5)


@pytest.mark.parametrize(
    "parts, text",
    [
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], r"is not a salientpp storage: expected a greeting, got 'SSH-2.0-OpenSSH"),
        ([b'{"no": "nonce"}\n'], "expected a greeting, got '"),
        ([b"x" * 100_000], "got more than 4,096 bytes without a newline"),
        ([b'{"sal'], "closed the connection before it sent a greeting"),
        ([line_of(greeting("ab")), b'{"error": "no place"}\n'], "refused this client: no place$"),
        ([line_of(greeting("ab")), line_of({"error": "a\x1b[31m\n"})], r"refused this client: a\\x1b\[31m\\n$"),
        ([line_of(greeting("ab")), b'{"proof": "00"}\n'], "does not know the token of this client"),
        ([line_of(greeting("ab")), b"[1]\n"], "sent a wrong line: expected a line with a JSON object, got"),
    ],
)
def test_another_service_is_an_error_that_says_what_it_sent(parts, text):
    with answering(*parts, stays=parts[0] != b'{"sal') as address, pytest.raises(StorageError, match=text):
        Connection(address, TOKEN, 5)


def test_a_server_of_another_version_is_named_with_both_versions():
    theirs = {"salientpp": "9.8.7", "wire": 999, "nonce": "ab"}
    named = pytest.raises(DifferentVersions, match=r"got 9\.8\.7 with wire format 999 on the server and .* client")
    with answering(line_of(theirs), stays=True) as address, named:
        Connection(address, TOKEN, 5)


def test_the_whole_greeting_has_one_timeout():
    begin = time.monotonic()
    with answering(*[b" "] * 50, pause=0.1) as address:
        with pytest.raises(StorageError, match="did not send a greeting for 0.5 s"):
            Connection(address, TOKEN, 0.5)
        assert time.monotonic() - begin < 3


# --- the connection ---------------------------------------------------------------------------------------------


def test_a_forked_child_keeps_no_copy_of_a_connection(server):
    connection = server.connect()
    pid = os.fork()
    if not pid:
        time.sleep(20)
        os._exit(0)
    try:
        # Without its own close, the child's copy would keep the connection open after this end has closed it.
        server.open(connection, "a0")
        connection.close(bye=False)
        deadline = time.monotonic() + 10
        while not server.told("a0") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.told("a0") == "rank 0 of the job went away"
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_closed_connection_says_so(server):
    connection = server.connect()
    connection.close()
    connection.close()
    with pytest.raises(StorageError, match="has ended; make another one"):
        connection.request(do="status")
    with pytest.raises(StorageError, match="has ended"):
        connection.beat()


def test_a_full_disk_ends_the_connection_and_not_the_server(server):
    class Full:
        def write(self, content):
            raise OSError(28, "No space left on device")

    connection = server.connect()
    name = next(iter(connection.request(do="describe")["manifest"]["files"]))
    with pytest.raises(OSError, match="No space left"):
        connection.fetch(name, Full())
    with pytest.raises(StorageError, match="has ended"):
        connection.request(do="status")
    assert server.sessions() is not None
