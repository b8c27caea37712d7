"""A bucket of a server of S3 on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from object_store import Store, made, served


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, int]]:
    with served() as address:
        yield address


@pytest.fixture
def bucket(s3_server, monkeypatch) -> Iterator[Store]:
    """An empty bucket ``shop``."""
    with made(*s3_server, monkeypatch) as store:
        yield store
