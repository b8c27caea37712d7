"""Laws of the storage server's answers: files, descriptions, mistakes of clients, tokens and versions."""

from __future__ import annotations

import io
import json
import shutil
import socket
import time

import pytest
from storage_server import TOKEN, running

import salientpp
from salientpp.serving.directory import Mistake, check_hosts, open_directory, parts_of_host
from salientpp.serving.server import listen
from salientpp.sessions.protocol import Address, StorageError, greeting, line_of, parse_address, values_of
from salientpp.sessions.token import proof
from salientpp.store.directory.manifest import read_manifest


def largest_file(root) -> str:
    files = read_manifest(root)["files"]
    return max(files, key=lambda name: files[name]["bytes"])


def test_a_client_gets_the_manifest_and_every_file(server, root):
    with server.connect() as connection:
        described = connection.request(do="describe")
        assert described["manifest"] == json.loads((root / "manifest.json").read_text())
        assert described["hosts"] == [str(server.address)] and described["index"] == 0 and described["parts"] is None
        for name in described["manifest"]["files"]:
            file = io.BytesIO()
            assert connection.fetch(name, file) == len(file.getvalue())
            assert file.getvalue() == (root / name).read_bytes(), name


@pytest.mark.parametrize(
    "name", ["../graph/manifest.json", "manifest.json", "/etc/passwd", "", ".", 5, None, "a\0b", ["a"]]
)
def test_only_files_of_the_manifest_are_sent(server, name):
    with server.connect() as connection:
        with pytest.raises(StorageError, match="refused 'file': name must be a file of the manifest, got"):
            connection.request(do="file", name=name)
        assert connection.request(do="status")["sessions"] == []  # the connection goes on


@pytest.mark.parametrize(
    "request_, text",
    [
        ({"do": "delete"}, r"do must be one of describe, file, open, attend, status, beat, lost and bye, got 'delete'"),
        ({}, "do must be one of .*, got None"),
        ({"do": ["describe"]}, "do must be one of"),
        ({"do": "attend", "session": "0123", "rank": 0}, "no session 0123 here"),
        ({"do": "attend", "session": "../x", "rank": 0}, "session must be 1 to 64 hexadecimal digits, got '../x'"),
        ({"do": "open", "session": "ab", "trainers": 0}, r"trainers must be an integer in \[1, 1048576\], got 0"),
        ({"do": "open", "session": "ab", "trainers": True}, "trainers must be an integer"),
        ({"do": "open", "session": "ab", "trainers": 1, "store": ["h"]}, r"store must be null or \[host, port\]"),
        ({"do": "open", "session": "ab", "trainers": 1, "store": ["h", 0]}, "port of store must be an integer"),
        (
            {"do": "open", "session": "ab", "trainers": 1, "timeout": float("nan")},
            "timeout must be a number of seconds",
        ),
        ({"do": "open", "session": "ab", "trainers": 1, "timeout": "1"}, "timeout must be a number of seconds"),
    ],
)
def test_a_wrong_request_is_refused_and_the_connection_goes_on(server, request_, text):
    with server.connect() as connection:
        with pytest.raises(StorageError, match=text):
            connection.request(**request_)
        assert connection.request(do="status")["directory"] == str(server.root)


def test_a_wrong_token_is_refused_on_both_sides(server):
    with pytest.raises(
        StorageError, match=r"refused this client: the client's token differs .*SALIENTPP_TOKEN.*--token-file"
    ):
        server.connect("another token of the tests")
    raw = server.raw()
    file = raw.makefile("rwb")
    nonce = values_of(file.readline())["nonce"]
    # The server's own proof, or the proof of another connection, does not pass.
    for wrong in (proof(TOKEN, "server", nonce, "cd"), proof(TOKEN, "client", "ab", "cd")):
        file.write(line_of({**greeting("cd"), "proof": wrong}))
        file.flush()
        assert "token differs" in values_of(file.readline())["error"]
        assert file.readline() == b""
        file = server.raw().makefile("rwb")
        nonce = values_of(file.readline())["nonce"]


def test_a_client_of_another_version_is_named_with_both_versions(server):
    file = server.raw().makefile("rwb")
    file.readline()
    file.write(line_of({"salientpp": "9.8.7", "wire": 999, "nonce": "ab", "proof": "cd"}))
    file.flush()
    assert (
        "and 9.8.7 with wire format 999 on the client; install the same version" in values_of(file.readline())["error"]
    )
    assert file.readline() == b""


def test_a_client_that_reads_slowly_delays_no_other(server, root):
    name = largest_file(root)
    size = (root / name).stat().st_size
    with server.connect() as slow, server.connect() as other:
        slow._send({"do": "file", "name": name})
        time.sleep(0.2)
        begin = time.monotonic()
        for _ in range(20):
            other.request(do="status")
        assert time.monotonic() - begin < 2
        assert other.fetch(name, io.BytesIO()) == size
        # The slow client still gets its file, between two replies.
        assert values_of(slow._line(100, "the size")) == {"bytes": size}
        left = size
        while left:
            block = slow._left or slow._receive("the file")
            slow._left = bytearray()
            left -= len(block)
        assert slow.request(do="status")["sessions"] == []


def test_a_copy_of_some_parts_sends_its_files_only(root, tmp_path):
    copy = salientpp.copy_to_disk(root, tmp_path, parts=parts_of_host(1, 2, 2))
    directory = open_directory(copy)
    assert directory.parts == (1,) and directory.fingerprint == open_directory(root).fingerprint
    there = 0
    for name in directory.files:
        if name.startswith("part-00000/"):
            with pytest.raises(Mistake, match=r"copy without part-00000/.*; its parts are 1; ask the host that holds"):
                directory.open(name)
        else:
            with directory.open(name) as file:
                assert file.read() == (root / name).read_bytes()
            there += 1
    assert 0 < there < len(directory.files)


def test_a_lost_file_is_an_error_of_its_request(root, tmp_path):
    shutil.copytree(root, tmp_path / "graph")
    name = largest_file(root)
    directory = open_directory(tmp_path / "graph")
    (tmp_path / "graph" / name).unlink()
    with pytest.raises(Mistake, match=f"{name} is missing on the storage host"):
        directory.open(name)


# --- addresses --------------------------------------------------------------------------------------------------


def test_hosts_give_the_index_and_must_fit_the_parts():
    hosts = [Address("a", 1), Address("b", 1), Address("c", 2)]
    assert [check_hosts(hosts, each, 5) for each in hosts] == [0, 1, 2]
    with pytest.raises(ValueError, match="must have the address of --listen, d:1, got a:1, b:1, c:2"):
        check_hosts(hosts, Address("d", 1), 5)
    with pytest.raises(ValueError, match="each storage host once, got a:1 2 times"):
        check_hosts([hosts[0], hosts[0]], hosts[0], 5)
    with pytest.raises(ValueError, match="3 storage hosts do not fit 2 parts"):
        check_hosts(hosts, hosts[0], 2)
    assert check_hosts(hosts, hosts[2], 1) == 2  # a multiple


@pytest.mark.parametrize("num_parts, hosts", [(1, 1), (4, 1), (5, 2), (4, 4), (2, 4)])
def test_hosts_together_store_all_parts(num_parts, hosts):
    stored = [parts_of_host(index, hosts, num_parts) for index in range(hosts)]
    assert sorted({part for each in stored for part in each}) == [*range(num_parts)]
    assert all(len(each) > 0 for each in stored)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "0", "[::ffff:0.0.0.0]"])
def test_all_interfaces_at_once_are_refused(host):
    with pytest.raises(ValueError, match="--listen must name one interface"):
        listen(parse_address(f"{host}:0"))


def test_a_port_in_use_and_an_unknown_host_are_errors():
    in_use = pytest.raises(OSError, match=r"cannot be listened on \(Address already in use\)")
    with socket.create_server(("127.0.0.1", 0)) as taken, in_use:
        listen(Address(*taken.getsockname()))
    for host in ("no-such-host.invalid", "203.0.113.7", "a" * 300):
        with pytest.raises(OSError, match="cannot be listened on"):
            listen(Address(host, 0))


def test_only_the_named_interface_listens(server):
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", server.address.port), 5)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_ipv6_address_works(root, tmp_path):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with running(root, tmp_path, address="[::1]:0") as server, server.connect() as connection:
        assert connection.request(do="describe")["hosts"] == [f"[::1]:{server.address.port}"]
        assert server.open(connection, "a1") == ["::1", 4321]
