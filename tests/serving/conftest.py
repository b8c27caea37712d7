"""A small dataset directory, and a server of it that tests share."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_server import Running, running, until

import salientpp
from salientpp.datasets import load_dataset


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Two parts, with rows of 16 MB each, which is more than the buffers of a connection hold."""
    data = load_dataset("synthetic:num_vertices=4000,num_features=2048")
    path = tmp_path_factory.mktemp("served") / "graph"
    return salientpp.partition(data, 2, path, [3], 64, method="random").root


@pytest.fixture(scope="session")
def shared_server(root, tmp_path_factory) -> Iterator[Running]:
    with running(root, tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def server(shared_server) -> Iterator[Running]:
    """The server that tests share. Sessions that a test leaves are ended after it."""
    yield shared_server
    for each in shared_server.open_sockets:
        each.close()
    shared_server.open_sockets.clear()
    if shared_server.process.poll() is None:
        for each in shared_server.sessions():
            with contextlib.suppress(ProcessLookupError):
                os.kill(each["pid"], signal.SIGKILL)
        until(lambda: not shared_server.sessions())
