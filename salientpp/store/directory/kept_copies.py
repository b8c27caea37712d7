"""Copies on this host of dataset directories at addresses. Each lies in a folder that is named after its manifest, and stays for later jobs.

The copies of a user are in one folder below that of temporary files (``TMPDIR``), which no other user may write. A directory that was written again gets a
new copy, so that a job that reads the old one is not disturbed.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from salientpp.progress import Progress
from salientpp.ranks.members import group_rank
from salientpp.store.directory.copy_source import RemoteDirectory
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.local_copy import copy_parts, wanted_parts
from salientpp.store.directory.manifest import check_part_id, manifest_checksum


def copy_of_address(
    address: str, part_id: int | None, verify: str, process_group: dist.ProcessGroup | None, storage_ranks: int
) -> Path:
    """Returns the path of this host's copy of the directory at an address. Files that it lacks are copied first; see :func:`~salientpp.copy_to_disk`.

    The copy has the files that this rank reads. A process that is not a rank and names no part gets all parts.
    """
    source = RemoteDirectory(address)
    manifest, text = source.manifest()
    num_parts = manifest["num_parts"]
    parts: Sequence[int] | None = None
    if part_id is not None:
        check_part_id(part_id, num_parts)
        parts = [part_id]
    elif not storage_ranks and group_rank(process_group)[1] == 1:
        parts = range(num_parts)
    wanted = wanted_parts(source.name, parts, num_parts, process_group, storage_ranks)
    # The manifest is not read again, because the folder is named after this one.
    folder = _own_folder() / manifest_checksum(manifest)[:16]
    return copy_parts(source, manifest, text, folder, wanted, verify, Progress(), is_kept=True)


def _own_folder() -> Path:
    """Returns this user's folder for copies, which is created if necessary. DatasetError if another user may write it."""
    folder = Path(tempfile.gettempdir()) / f"salientpp-{os.geteuid()}"
    try:
        folder.mkdir(0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise OSError(
            error.errno, f"{folder} cannot be created ({error.strerror}); set TMPDIR to a folder of a disk with room"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise DatasetError(
            f"{folder} must be a folder that only this user may write, because copies of graphs are kept there; remove it, or set TMPDIR to another folder"
        )
    return folder
