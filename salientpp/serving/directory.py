"""Directory that a storage server serves: its manifest and files, ready to send."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from salientpp.ranks.placement import Placement
from salientpp.sessions.protocol import Address
from salientpp.store.directory.kinds import MANIFEST
from salientpp.store.directory.manifest import fingerprint, parts_there, read_manifest


class Mistake(ValueError):
    """A request that the server refuses. The client gets the text, and the connection goes on."""


@dataclass(frozen=True)
class ServedDirectory:
    """A dataset directory, or a host's copy of some of its parts.

    Attributes:
        root: the directory.
        manifest: its ``manifest.json`` as it is on the disk.
        num_parts: K, the number of parts of the graph.
        files: names of the files of the manifest, relative to ``root``.
        parts: parts that the directory holds; None: all.
        fingerprint: checksum of the contents.
    """

    root: Path
    manifest: dict[str, Any]
    num_parts: int
    files: frozenset[str]
    parts: tuple[int, ...] | None
    fingerprint: str

    def open(self, name: object) -> BinaryIO:
        """Opens a file of the manifest for reading.

        Raises:
            Mistake: the manifest has no such file, this host's copy does not hold it, or it cannot be read.
        """
        if not isinstance(name, str) or name not in self.files:
            raise Mistake(f"name must be a file of the manifest, got {name!r:.100}")
        try:
            return (self.root / name).open("rb")
        except FileNotFoundError:
            if self.parts is None:
                raise Mistake(f"{name} is missing on the storage host; partition or copy the directory again") from None
            raise Mistake(
                f"this storage host has a copy without {name}; its parts are {', '.join(map(str, self.parts))}; ask the host that holds the part"
            ) from None
        except OSError as error:
            raise Mistake(f"{name} cannot be read on the storage host ({error.strerror or error})") from None


def open_directory(root: Path) -> ServedDirectory:
    """Reads the manifest of a dataset directory. Raises DatasetError if ``root`` is none, or is damaged."""
    manifest = read_manifest(root)
    there = parts_there(root)
    return ServedDirectory(
        root.resolve(),
        json.loads((root / MANIFEST).read_text()),
        manifest["num_parts"],
        frozenset(manifest["files"]),
        None if there is None else tuple(sorted(there)),
        fingerprint(manifest),
    )


def check_hosts(hosts: Sequence[Address], own: Address, num_parts: int) -> int:
    """Checks the addresses of all storage hosts. Returns the index of this one.

    Raises:
        ValueError: an address is given twice, this host is not among them, or their number does not fit the parts.
    """
    if len(set(hosts)) < len(hosts):
        twice = next(host for host in hosts if hosts.count(host) > 1)
        raise ValueError(f"--hosts must name each storage host once, got {twice} {hosts.count(twice)} times")
    if own not in hosts:
        raise ValueError(
            f"--hosts must have the address of --listen, {own}, got {', '.join(map(str, hosts))}; write the same host and port in both"
        )
    if len(hosts) > num_parts and len(hosts) % num_parts:
        raise ValueError(
            f"{len(hosts)} storage hosts do not fit {num_parts} parts: with more hosts than parts, every part must be stored by the same number of hosts; "
            f"use at most {num_parts} hosts or a multiple of {num_parts}"
        )
    return hosts.index(own)


def parts_of_host(index: int, hosts: int, num_parts: int) -> range:
    """Returns the parts that one of the storage hosts stores: those of storage rank ``index``."""
    placement = Placement(1 + index, 1 + hosts, num_parts, num_storage_ranks=hosts)
    return placement.row_parts[placement.part_id]
