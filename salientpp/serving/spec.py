"""Description of a session's process on one storage host: :class:`SessionSpec`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SessionSpec:
    """Values that the server gives to a session's process on one storage host when the process starts.

    Attributes:
        root: dataset directory on this host.
        fingerprint: checksum of the contents that the server has told its clients.
        host: numeric address of the interface that the server listens on; the process listens on the same one.
        session: hexadecimal id that the client chose. It is the same on all storage hosts of the session.
        trainers: T, the number of ranks that train.
        index: index of this host among the storage hosts, in [0, number of hosts).
        hosts: addresses of all storage hosts, in order.
        store: host and port of the job's key-value store. None: this process hosts the store.
        timeout: seconds that a rank of the session may be silent.
    """

    root: str
    fingerprint: str
    host: str
    session: str
    trainers: int
    index: int
    hosts: tuple[str, ...]
    store: tuple[str, int] | None
    timeout: float
