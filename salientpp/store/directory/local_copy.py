"""Copies a dataset directory to the local disk of a host, without the folders of parts that the host does not serve.

One process per host copies at a time; the next one adds the files that the copy lacks. The manifest is written last, so an interrupted copy is never
taken for a complete one. The next call goes on with it: it keeps the files that match the manifest in every byte, and the first bytes of the file that was
interrupted. Other users may write to a host's disk and guess the names of files. So nothing is written through a symbolic link with
such a name, and the lock file is never truncated.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed as dist

from salientpp.addresses import is_remote, local_path, without_password
from salientpp.files import where_to_write
from salientpp.progress import Progress
from salientpp.ranks.members import group_rank
from salientpp.ranks.placement import Placement, parts_of
from salientpp.store.directory.copy_source import CopySource, copy_source_of
from salientpp.store.directory.description import part_folder
from salientpp.store.directory.files import DatasetError, verify_file
from salientpp.store.directory.kinds import MANIFEST
from salientpp.store.directory.manifest import PARTS_FILE, fingerprint, parts_there, read_manifest
from salientpp.store.directory.owned import hidden_name, others_in
from salientpp.store.directory.roles import checked_storage_ranks
from salientpp.suggestions import suggest_arguments

_TEMPORARY = ".copying"


@suggest_arguments
def copy_to_disk(
    root: str | Path,
    to: str | Path,
    *,
    parts: Iterable[int] | None = None,
    verify: str = "quick",
    progress: Progress | None = None,
    process_group: dist.ProcessGroup | None = None,
    storage_ranks: int = 0,
) -> Path:
    """Copies the files that this rank needs from a dataset directory to a local disk, and verifies the copy. Several ranks of a host may call it at once.

    Files that the copy has already are checked, and copied again if they are damaged.

    Args:
        root: a directory that :func:`salientpp.partition` wrote, or its address, such as ``s3://bucket/graph``.
        to: a directory of this host, such as the value of ``TMPDIR``. It is created if necessary.
        parts: the parts to copy. None: the parts that this rank of the initialised process group serves; without a group, part 0 if it is the only one.
        verify: how to check files that the copy has already: 'quick' compares sizes and sampled checksums, 'full' reads every byte.
        progress: a :class:`~salientpp.Progress`, which receives the name of every file before the file is copied.
        process_group: the ranks that serve the parts, as given to the loaders. None: the default group.
        storage_ranks: as given to :func:`load`. A storage rank copies the parts that it stores. A rank that trains copies those from which it takes seeds.

    Returns:
        The path of the copy, ``to/<name of root>``, for :func:`salientpp.load`.

    Raises:
        DatasetError: ``root`` is incomplete, something else exists at the path of the copy, or the disk has too little room. Files that no copy wrote are
            never replaced or removed.
        ValueError: a part does not exist, the parts to copy are not known, or ``verify`` is unknown.
        OSError: the disk is full, or cannot be written; or an address cannot be read. The next call goes on.
        ImportError: a package that reads the address is missing.
    """
    if verify not in ("quick", "full"):
        raise ValueError(f"verify must be 'quick' or 'full', got {verify!r}")
    if is_remote(to):
        raise ValueError(
            f"to must be a directory of this host, got {without_password(str(to))}; salientpp.upload copies a directory to an address"
        )
    source, to = copy_source_of(root), local_path(to)
    manifest, text = source.manifest()
    wanted = wanted_parts(source.name, parts, manifest["num_parts"], process_group, storage_ranks)
    if not is_remote(root) and (to / source.last).resolve() == local_path(root).resolve():
        raise ValueError(f"{source.name} cannot be copied onto itself; choose another directory than {to}")
    return copy_parts(source, manifest, text, to, wanted, verify, progress or Progress())


def copy_parts(
    source: CopySource,
    manifest: dict[str, Any],
    text: str,
    to: Path,
    parts: set[int],
    verify: str,
    progress: Progress,
    is_kept: bool = False,
) -> Path:
    """Copies the files of these parts, as :func:`copy_to_disk` does.

    Args:
        manifest: what :meth:`CopySource.manifest` returned, with its ``text``.
        is_kept: only :mod:`salientpp.store.directory.kept_copies` writes into ``to``. So all files there belong to the copy, also if a cleaner of
            temporary files removed those by which another copy is known.
    """
    copy = to / source.last
    try:
        to.mkdir(parents=True, exist_ok=True)
        with _lock(to / hidden_name(copy.name, "lock")):
            is_complete = _prepare(copy, manifest, is_kept)
            have = parts_there(copy)
            full = verify == "full" or not is_complete
            _copy_files(source, copy, manifest, parts, full, progress)
            if have is not None and not parts <= have:
                _write(copy / PARTS_FILE, json.dumps({"parts": sorted(have | parts)}) + "\n")
            if _manifest_of(copy) != manifest:  # also if only the tables differ from which the graph was made
                _write(copy / MANIFEST, text)
    except OSError as error:
        if error.errno is None:  # of the file system of an address, which it names
            raise
        raise type(error)(
            error.errno,
            f"{source.name} cannot be copied to {to} ({error.strerror or error}); {where_to_write(error, 'choose another directory')}",
        ) from None
    return copy


def wanted_parts(
    root: str,
    parts: Iterable[int] | None,
    num_parts: int,
    process_group: dist.ProcessGroup | None,
    storage_ranks: int = 0,
) -> set[int]:
    """Returns the parts to copy; see :func:`copy_to_disk`."""
    if parts is None and (number := checked_storage_ranks(storage_ranks, None, process_group)):
        placement = Placement(*group_rank(), num_parts, num_storage_ranks=number)
        parts = placement.own_parts or placement.row_parts[placement.part_id]
    elif parts is None:
        rank, world_size = group_rank(process_group)
        in_group = dist.is_available() and dist.is_initialized()
        if not in_group and num_parts > 1:
            raise ValueError(
                f"{root} has {num_parts} parts and this process serves none of them; initialise torch.distributed before copying, or name "
                "the parts with parts="
            )
        parts = parts_of(rank, world_size, num_parts)
    wanted = set(parts)
    wrong = [part for part in wanted if not 0 <= part < num_parts]
    if wrong or not wanted:
        raise ValueError(f"parts must be in [0, {num_parts}), got {wrong[0] if wrong else 'none'}")
    return wanted


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Locks this host's copy during the ``with`` block, so that one process copies at a time. If it is killed, the kernel releases the lock."""
    import fcntl  # not on every system

    try:
        # Opened for writing, because some network file systems require it for a lock.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        descriptor = None
    try:
        if descriptor is None or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DatasetError(
                f"{path} must be a regular file, because it is the lock of this copy; remove it, or copy elsewhere"
            )
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _prepare(copy: Path, manifest: dict[str, Any], is_kept: bool) -> bool:
    """Prepares the directory ``copy`` for new files. Returns True for a complete copy of the same contents, and False for a new or an interrupted one."""
    if (copy / MANIFEST).exists() and (there := _manifest_of(copy)) is not None:
        if fingerprint(there) != fingerprint(manifest):
            raise DatasetError(
                f"{copy} is a copy of other contents, perhaps from before the graph was partitioned again; delete it, or copy elsewhere"
            )
        if is_kept and not (copy / PARTS_FILE).exists():
            _write(copy / PARTS_FILE, json.dumps({"parts": []}) + "\n")
        return True
    if copy.exists():
        found = set(os.listdir(copy))
        if not is_kept and not _is_parts_file(copy / PARTS_FILE) and not found <= {f"{PARTS_FILE}{_TEMPORARY}"}:
            raise DatasetError(
                f"{copy} exists and is not a copy of a dataset directory, so nothing is written there; copy elsewhere"
            )
        # An interrupted copy, or one with a damaged manifest. The directory itself may be a link to a disk with more room, so it stays.
        known = {PARTS_FILE, MANIFEST, *manifest["files"]}
        known |= {f"{name}{_TEMPORARY}" for name in known}
        if others := others_in(copy, known):
            raise DatasetError(
                f"{copy} is an incomplete copy, and also holds {others[0]}, which does not belong to it, so nothing is removed; delete the directory "
                "yourself, or copy elsewhere"
            )
        (copy / MANIFEST).unlink(missing_ok=True)
    copy.mkdir(exist_ok=True)
    _write(copy / PARTS_FILE, json.dumps({"parts": []}) + "\n")
    return False


def _manifest_of(copy: Path) -> dict[str, Any] | None:
    """Returns the manifest of a copy, or None if the manifest is damaged."""
    try:
        return read_manifest(copy)
    except DatasetError:
        return None


def _is_parts_file(path: Path) -> bool:
    """True if a file lists the parts of a copy. Every copy has such a file, so the directory is then known to be a copy."""
    try:
        return set(json.loads(path.read_text())) == {"parts"} and parts_there(path.parent) is not None
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _is_whole(copy: Path, name: str, entry: dict[str, Any], full: bool) -> bool:
    try:
        verify_file(copy, name, entry, full=full)
    except DatasetError:
        return False
    return True


def _copy_files(
    source: CopySource, copy: Path, manifest: dict[str, Any], parts: set[int], full: bool, progress: Progress
) -> None:
    """Copies the files of these parts, except those that ``copy`` already has with the right contents."""
    folders = {"", *(part_folder(part) for part in parts)}
    files = {
        name: entry
        for name, entry in manifest["files"].items()
        if name.rpartition("/")[0] in folders and not _is_whole(copy, name, entry, full)
    }
    need = sum(entry["bytes"] - _begun(copy, name) for name, entry in files.items())
    free = shutil.disk_usage(copy).free
    if need > free:
        raise DatasetError(
            f"{copy} needs {need / 1e6:,.1f} MB more, but its disk has only {free / 1e6:,.1f} MB left; copy elsewhere, or {source.advice}"
        )
    for name, entry in files.items():
        progress.begin(f"copying {name}, {entry['bytes'] / 1e6:,.1f} MB")
        folder = (copy / name).parent
        folder.mkdir(exist_ok=True)
        if folder != copy and folder.is_symlink():
            raise DatasetError(
                f"{folder} is a symbolic link, and files are never written through a link; remove it, or copy elsewhere"
            )
        _copy_file(source, copy, name, entry)


def _copy_file(source: CopySource, copy: Path, name: str, entry: dict[str, Any]) -> None:
    """Copies a file. The bytes that an interrupted copy left are kept, if the whole file then matches the manifest."""
    temporary = f"{name}{_TEMPORARY}"
    with _opened(copy / temporary, entry["bytes"]) as file:
        begun = file.tell()
        source.read(name, file, begun)
    if begun and not _is_whole(copy, temporary, entry, full=True):
        with _open_new(copy / temporary) as file:
            source.read(name, file, 0)
    try:
        verify_file(copy, temporary, entry, full=True)
    except DatasetError:
        source.check(name, entry)  # raises if the source itself is damaged
        raise
    (copy / temporary).rename(copy / name)


def _begun(copy: Path, name: str) -> int:
    """Returns the bytes that an interrupted copy left of a file."""
    try:
        return (copy / f"{name}{_TEMPORARY}").lstat().st_size
    except OSError:
        return 0


def _opened(path: Path, most: int) -> BinaryIO:
    """Opens a file at its end, if an interrupted copy of this user left it with at most ``most`` bytes, and else a new one."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return _open_new(path)
    found = os.fstat(descriptor)
    # A second link may lead to another file of the user.
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid() and found.st_size <= most:
        return os.fdopen(descriptor, "ab")
    os.close(descriptor)
    return _open_new(path)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + _TEMPORARY)
    with _open_new(temporary) as file:
        file.write(text.encode())
    os.replace(temporary, path)


def _open_new(path: Path) -> BinaryIO:
    """Opens a new file. A file that an interrupted copy left under this name is removed first, and a link is not followed."""
    path.unlink(missing_ok=True)
    return path.open("xb")
