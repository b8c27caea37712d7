"""Copies a dataset directory to an address, such as ``s3://bucket/graph``, from which other hosts copy it.

The manifest is written last, so an interrupted copy is never taken for a whole one. Until then, the file ``uploading.json`` says which contents are copied, so
that the next call goes on with these and never mixes them with others.
"""

from __future__ import annotations

import contextlib
import io
import json
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from salientpp.addresses import PIECE, WITHOUT_FOLDERS, in_words, is_remote, local_path, without_password
from salientpp.progress import Progress
from salientpp.store.directory.copy_source import WHAT, RemoteDirectory
from salientpp.store.directory.files import DatasetError, verify_file
from salientpp.store.directory.kinds import MANIFEST
from salientpp.store.directory.manifest import fingerprint, parts_there, read_manifest
from salientpp.suggestions import suggest_arguments

#: File at the address while files are copied there: the fingerprint of the manifest.
_MARK = "uploading.json"


@suggest_arguments
def upload(root: str | Path, to: str, *, verify: str = "quick", progress: Progress | None = None) -> str:
    """Copies a whole dataset directory to an address, for :func:`load` and :func:`copy_to_disk` on other hosts. One process calls it.

    If a call is stopped in any way, the next call goes on. It copies the files that are missing or different at the address.

    Args:
        root: a directory that :func:`salientpp.partition` wrote.
        to: address of a folder, such as ``s3://bucket/graphs``, or of any other file system that pyarrow or a package of fsspec writes. It need not exist.
        verify: how to check files that the address has already: 'quick' compares sizes and sampled checksums, 'full' reads every byte.
        progress: a :class:`~salientpp.Progress`, which receives the name of every file before the file is copied.

    Returns:
        The address of the copy, ``to/<name of root>``. If ``to`` has options after a question mark, they follow.

    Raises:
        DatasetError: ``root`` is damaged or lacks parts, or other contents are at the address of the copy. They are never replaced or removed.
        ValueError: ``to`` is no address, or ``verify`` is unknown.
        OSError: the address cannot be written or read.
        ImportError: a package that writes to the address is missing.
    """
    if verify not in ("quick", "full"):
        raise ValueError(f"verify must be 'quick' or 'full', got {verify!r}")
    if is_remote(root):
        raise ValueError(
            f"root must be a directory of this host, got {without_password(str(root))}; copy it with salientpp.copy_to_disk first"
        )
    if not is_remote(to):
        raise ValueError(
            f"to must be an address such as s3://bucket/folder, got {to}; salientpp.copy_to_disk copies to a directory"
        )
    root = local_path(root)
    manifest = read_manifest(root)
    there = parts_there(root)
    if there is not None and len(there) < manifest["num_parts"]:
        raise DatasetError(
            f"{root} is a copy with {len(there)} of {manifest['num_parts']} parts; copy the whole directory to {to}"
        )
    folder, question, options = to.partition("?")
    address = f"{folder.rstrip('/')}/{root.resolve().name}{question}{options}"
    target = RemoteDirectory(address)
    sizes, full = _begun(target, manifest), verify == "full"
    progress = progress or Progress()
    for name, entry in manifest["files"].items():
        if not target.is_whole(name, entry, sizes.get(name), full):
            progress.begin(f"copying {name}, {entry['bytes'] / 1e6:,.1f} MB")
            verify_file(root, name, entry, full=True)
            with (root / name).open("rb") as source:
                _write(target, name, source)
    if MANIFEST not in sizes:
        mark = target.text(_MARK)
        if mark is None and (other := _manifest_of(target)) is not None:  # another process has finished before
            mark = _mark_of(other)
        if mark != _mark_of(manifest):
            raise DatasetError(
                f"other contents were copied to {target.name} at the same time; remove the directory there, and copy again"
            )
        with (root / MANIFEST).open("rb") as source:
            _write(target, MANIFEST, source)
    with contextlib.suppress(Exception):  # some accounts may write and not delete
        target.system.delete_file(target.path_of(_MARK))
    return address


def _mark_of(manifest: dict[str, Any]) -> str:
    return json.dumps({"fingerprint": fingerprint(manifest)})


def _begun(target: RemoteDirectory, manifest: dict[str, Any]) -> dict[str, int]:
    """Returns the bytes of the files that the address has of these contents. Raises DatasetError if it has other files, and marks a new directory."""
    sizes, ours = target.sizes(), _mark_of(manifest)
    others = {name: size for name, size in sizes.items() if name != MANIFEST}
    there = _manifest_of(target) if MANIFEST in sizes else None
    if there is not None:
        if _mark_of(there) != ours:
            raise DatasetError(
                f"{target.name} has other contents, perhaps from before the graph was partitioned again; remove them, or copy to another address"
            )
        # The workload is no part of the contents, nor is the file that says from which tables the graph was made.
        return sizes if there == manifest else others
    mark = target.text(_MARK)
    if mark is None and sizes:
        raise DatasetError(
            f"{target.name} has {min(sizes)} and is no copy of a dataset directory, so nothing is written there; copy to another address"
        )
    if mark not in (None, ours):
        raise DatasetError(
            f"{target.name} is an incomplete copy of other contents; remove it, or copy to another address"
        )
    _write(target, _MARK, io.BytesIO(ours.encode()))
    return others


def _manifest_of(target: RemoteDirectory) -> dict[str, Any] | None:
    """Returns the manifest at an address, or None if it is incomplete, as an interrupted call may leave it."""
    try:
        return target.manifest()[0]
    except DatasetError:
        return None


def _write(target: RemoteDirectory, name: str, source: BinaryIO) -> None:
    """Writes a file at the address. If that fails, the file is removed there. OSError if it cannot be written."""
    path, shown = target.path_of(name), f"{target.name}/{name}"
    with in_words(WHAT, shown, writes=True):
        if target.system.type_name not in WITHOUT_FOLDERS:
            target.system.create_dir(path.rpartition("/")[0], recursive=True)
        file = target.system.open_output_stream(path)
        try:
            while piece := source.read(PIECE):
                file.write(piece)
            file.close()
        except BaseException:
            # Closing may publish the bytes so far.
            for clean_up in file.close, partial(target.system.delete_file, path):
                with contextlib.suppress(Exception):
                    clean_up()
            raise
