"""Laws of the connections by which the ranks of a job with storage ranks notice that a process is gone."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from salientpp.ranks import lifelines
from salientpp.ranks.lifelines import Lifelines

HANG = 60.0
STORAGE = range(2, 4)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def stored(store: dist.Store) -> Iterator[Lifelines]:
    with Lifelines(store, 2, STORAGE) as made:
        yield made


def place_of(store: dist.Store, rank: int = 2) -> dict[str, Any]:
    return json.loads(store.get(f"salientpp/lifeline/{rank}"))


def until(holds: Callable[[], Any]) -> Any:
    end = time.monotonic() + HANG
    while not (found := holds()):
        assert time.monotonic() < end, "it does not come true"
    return found


def are_open(ends: Lifelines, *ranks: int) -> bool:
    assert ends.wait(0.01) == []
    return sorted(ends.ranks) == [*ranks]


@contextlib.contextmanager
def process(store: dist.Store, rank: int, storage: range, forks: bool = False) -> Iterator[int]:
    """A process that holds the connections of a rank. With ``forks``, it has a child that outlives it."""
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        ends = Lifelines(dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False), rank, storage)
        while ends._missing:
            ends.wait(0.01)
        child = os.fork() if forks else 0
        if child or not forks:
            os.write(told, b"%d\n" % (child or os.getpid()))
            while True:
                ends.wait(HANG)
        signal.pause()
    last = int(os.read(ready, 20))
    os.close(ready), os.close(told)
    try:
        yield pid
    finally:
        for each in {pid, last}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_process_is_noticed(store: dist.Store, stored: Lifelines, forks: bool) -> None:
    """Also if it has forked a process that still lives."""
    only = range(2, 3)
    with process(store, 0, only) as _, process(store, 1, only, forks) as pid:
        until(lambda: are_open(stored, 0, 1))
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: stored.wait(0.01)) == [1]
        assert are_open(stored, 0)


def test_a_process_that_ends_before_the_first_look_is_noticed(store: dist.Store, stored: Lifelines) -> None:
    with process(store, 1, range(2, 3)) as pid:
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: stored.wait(0.01)) == [1]


def test_a_killed_storage_rank_is_noticed_by_all_others(store: dist.Store, stored: Lifelines) -> None:
    with process(store, 3, STORAGE) as pid, Lifelines(store, 0, STORAGE) as trains:
        until(lambda: all([are_open(stored, 0, 3), are_open(trains, 2, 3)]))
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: trains.wait(0.01)) == [3]
        assert until(lambda: stored.wait(0.01)) == [3]


def test_a_stopped_process_is_not_gone(store: dist.Store, stored: Lifelines) -> None:
    with process(store, 0, range(2, 3)) as pid:
        until(lambda: are_open(stored, 0))
        os.kill(pid, signal.SIGSTOP)
        assert stored.wait(0.2) == []


def test_a_storage_rank_that_listens_later_is_connected_later(store: dist.Store) -> None:
    with Lifelines(store, 0, STORAGE) as trains:
        assert trains.wait(0.01) == [] and not trains.are_all
        with Lifelines(store, 2, STORAGE) as first:
            until(lambda: all([are_open(first, 0), are_open(trains, 2)]))
            assert not trains.are_all
            with Lifelines(store, 3, STORAGE) as second:
                until(lambda: all([are_open(first, 0, 3), are_open(second, 0, 2), are_open(trains, 2, 3)]))
                assert trains.are_all


def test_a_storage_rank_that_cannot_be_reached_is_tried_again(store: dist.Store) -> None:
    with Lifelines(store, 2, range(2, 3)):
        place = place_of(store)
    with Lifelines(store, 0, range(2, 3)) as trains:
        assert trains.wait(0.01) == [] and not trains.are_all, "nothing listens there any more"
        with Lifelines(store, 2, range(2, 3)) as again:
            assert place_of(store) != place
            until(lambda: all([are_open(again, 0), are_open(trains, 2)]))
            assert trains.are_all


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, b"0" * 42, b"\xff" * 1000])
def test_a_stranger_is_no_rank(store: dist.Store, stored: Lifelines, sent: bytes) -> None:
    stranger = socket.create_connection((place_of(store)["host"], place_of(store)["port"]))
    until(lambda: stored.wait(0.01) == [] and stored._unknown)
    stranger.sendall(sent)
    assert are_open(stored)
    stranger.close()
    until(lambda: are_open(stored) and not stored._unknown)


def test_a_greeting_may_arrive_in_pieces(store: dist.Store, stored: Lifelines) -> None:
    place = place_of(store)
    with socket.create_connection((place["host"], place["port"])) as slow:
        greeting = f"{place['secret']}{7:010d}".encode()
        for at in range(len(greeting)):
            assert are_open(stored)
            slow.sendall(greeting[at : at + 1])
        until(lambda: are_open(stored, 7))
    assert until(lambda: stored.wait(0.01)) == [7]


def test_strangers_do_not_keep_a_rank_out(store: dist.Store, stored: Lifelines, monkeypatch: Any) -> None:
    monkeypatch.setattr(lifelines, "_MOST_UNKNOWN", 5)
    place = place_of(store)
    strangers = [socket.create_connection((place["host"], place["port"])) for _ in range(20)]
    with Lifelines(store, 0, range(2, 3)) as trains:
        trains.wait(0.01)
        until(lambda: are_open(stored, 0))
        assert len(stored._unknown) <= 5
    for each in strangers:
        each.close()


def test_a_stranger_that_is_closed_in_the_same_moment_as_it_sends_ends_nothing(
    store: dist.Store, stored: Lifelines, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lifelines, "_MOST_UNKNOWN", 1)
    place = place_of(store)
    first = socket.create_connection((place["host"], place["port"]))
    until(lambda: stored.wait(0.01) == [] and stored._unknown)
    with socket.create_connection((place["host"], place["port"])):
        first.sendall(b"x")
        until(lambda: are_open(stored) and first not in stored._unknown and len(stored._unknown) == 1)
    first.close()


def test_a_rank_whose_connection_was_closed_for_strangers_connects_again(
    store: dist.Store, stored: Lifelines, monkeypatch: Any
) -> None:
    """It is not told that the storage rank went away."""
    with Lifelines(store, 0, range(2, 3)) as trains:
        trains.wait(0.01)
        monkeypatch.setattr(lifelines, "_MOST_UNKNOWN", 0)
        until(lambda: all([are_open(stored), are_open(trains)]) and trains._missing)
        monkeypatch.undo()
        until(lambda: all([are_open(stored, 0), are_open(trains, 2)]))


def test_a_storage_rank_that_is_gone_before_it_answers_is_noticed(store: dist.Store) -> None:
    with Lifelines(store, 0, range(2, 3)) as trains:
        with Lifelines(store, 2, range(2, 3)):
            assert trains.wait(0.01) == [] and not trains.are_all
        assert until(lambda: trains.wait(0.01)) == [2]
        assert trains.wait(0.01) == [], "it is told once"


def test_another_program_on_the_port_is_no_storage_rank(store: dist.Store) -> None:
    """A store in a file may be on a host where a storage rank of another host cannot be reached."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = {"host": "127.0.0.1", "port": other.getsockname()[1], "secret": "0" * 32}
        store.set("salientpp/lifeline/2", json.dumps(place))
        with Lifelines(store, 0, range(2, 3)) as trains:
            assert trains.wait(0.01) == [] and not trains.are_all
            other.accept()[0].close()
            assert trains.wait(HANG) == [] and not trains.are_all


def test_a_rank_that_can_open_no_files_does_not_spin(store: dist.Store, stored: Lifelines, monkeypatch: Any) -> None:
    """The kernel reports the connection that waits until it is accepted."""
    pauses: list[float] = []
    monkeypatch.setattr(lifelines.time, "sleep", pauses.append)
    with socket.create_connection((place_of(store)["host"], place_of(store)["port"])):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            assert stored.wait(HANG) == [] and pauses
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        until(lambda: are_open(stored) and stored._unknown)


def test_a_forked_child_does_not_listen(store: dist.Store) -> None:
    """Otherwise ranks would connect to it after its parent was killed."""
    with Lifelines(store, 2, STORAGE):
        ready, told = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(told, b"1")
            signal.pause()
        os.read(ready, 1)
        os.close(ready), os.close(told)
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((place_of(store)["host"], place_of(store)["port"]))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_it_listens_on_the_interface_of_the_store(store: dist.Store, stored: Lifelines) -> None:
    assert stored._listening is not None
    assert place_of(store)["host"] == stored._listening.getsockname()[0] == "127.0.0.1"


def test_a_store_on_this_host_is_reached_by_the_others_name(store: dist.Store, monkeypatch: Any) -> None:
    """The name of this host may lead to a loopback address here, and to another one elsewhere."""
    monkeypatch.setattr(lifelines, "_host_of", lambda _: socket.gethostname())
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *rest, **how: real("127.0.0.1", *rest, **how))
    with Lifelines(store, 2, STORAGE) as stored, Lifelines(store, 0, range(2, 3)) as trains:
        assert place_of(store)["host"] == "", "all interfaces"
        trains.wait(0.01)
        until(lambda: are_open(stored, 0))
        if socket.has_dualstack_ipv6():
            with socket.socket(socket.AF_INET6) as other:
                other.connect(("::1", place_of(store)["port"]))


def test_a_store_in_a_file_has_no_host(tmp_path: Any) -> None:
    store = dist.PrefixStore("job", dist.FileStore(str(tmp_path / "store"), 2))
    with Lifelines(store, 2, STORAGE) as stored, Lifelines(store, 0, range(2, 3)) as trains:
        trains.wait(0.01)
        until(lambda: are_open(stored, 0))
