"""Bucket of a server of S3 on this machine, whose connections a test may break."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from broken_server import BrokenServer
from table_packages import package


@dataclass
class Store:
    """The bucket ``shop`` of a server of S3 behind a :class:`BrokenServer`. ``query`` has the options of addresses."""

    proxy: BrokenServer
    client: Any

    @property
    def query(self) -> str:
        return f"?endpoint_override={self.proxy.address}&scheme=http&region=us-east-1"

    def at(self, path: str) -> str:
        """Returns the address of ``BUCKET/KEY``."""
        return f"s3://{path}{self.query}"

    def put(self, key: str, path: Path) -> None:
        self.client.put_object(Bucket="shop", Key=key, Body=path.read_bytes())

    def put_folder(self, key: str, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{key}/{path.relative_to(folder)}", path)

    def keys(self) -> list[str]:
        return [entry["Key"] for entry in self.client.list_objects_v2(Bucket="shop").get("Contents", [])]


@contextmanager
def served() -> Iterator[tuple[str, int]]:
    """Runs a server of S3 without buckets, and yields its host and port."""
    server = package("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@contextmanager
def made(host: str, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Makes an empty bucket, with credentials in the environment, and removes it at the end."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    client = package("boto3").client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    client.create_bucket(Bucket="shop")
    proxy = BrokenServer(host, port)
    store = Store(proxy, client)
    yield store
    for key in store.keys():
        client.delete_object(Bucket="shop", Key=key)
    client.delete_bucket(Bucket="shop")
    proxy.close()
