"""Files of a dataset directory that storage hosts send: each is fetched when it is first opened, and kept on this host's disk.

A rank that trains needs few of them: the seeds and the labels of its part, and with topology 'whole' the neighbour lists.
"""

from __future__ import annotations

import json
import multiprocessing.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from torch import Tensor

from salientpp.processes import Lock, outside_inference
from salientpp.sessions.opening import Session
from salientpp.sessions.protocol import StorageError
from salientpp.store.directory.files import Arrays, DatasetError, quick_checksum
from salientpp.store.directory.manifest import MANIFEST

#: Folder in which the system shows the open files of this process, also those that have no name any more.
_OPEN_FILES = Path("/proc/self/fd")


class FetchedArrays(Arrays):
    """Opens arrays of a directory that storage hosts serve.

    A fetched file stays open and has no name. So its disk space is free when the process ends, even if the process is killed. Every call maps the file again,
    as for a directory on this host: a write into one result changes no other.

    Attributes:
        root: a temporary directory with the manifest.
    """

    def __init__(self, session: Session) -> None:
        folder = tempfile.mkdtemp(prefix="salientpp-")
        # Unlike `tempfile.TemporaryDirectory`, it leaves the folder to the parent when a forked child ends.
        multiprocessing.util.Finalize(self, shutil.rmtree, (folder, True), exitpriority=-1)
        super().__init__(Path(folder) / session.hosts[0], session.manifest["files"])
        self._files = session.files
        self._fetched: dict[str, IO[bytes]] = {}
        self._lock = Lock()
        self.root.mkdir()
        (self.root / MANIFEST).write_text(json.dumps(session.manifest))

    @outside_inference
    def open(self, name: str, dtype: str | None = None) -> Tensor:
        """Returns the array of a file, which is fetched if it was not opened before; see :meth:`Arrays.open`.

        Raises:
            StorageError: no storage host sends the file.
            DatasetError: the file does not match the manifest.
            OSError: the file cannot be kept on this host's disk.
        """
        return self._map(self.path_of(name), name, dtype)

    def path_of(self, name: str) -> Path:
        """Returns a path of a file, which is fetched if it was not before. Raises the errors of :meth:`open`."""
        with self._lock:
            if name not in self._fetched:
                self._fetched[name] = self._fetch(name)
        return _OPEN_FILES / str(self._fetched[name].fileno())

    def _fetch(self, name: str) -> IO[bytes]:
        try:
            file: IO[bytes] = tempfile.TemporaryFile(prefix="salientpp-")  # noqa: SIM115  # stays open
            try:
                self._files.fetch(name, file)
                file.flush()
            except BaseException:
                file.close()
                raise
        except StorageError:
            raise
        except OSError as error:
            size = self.files[name]["bytes"]
            raise OSError(
                f"{name} ({size:,} bytes) from storage hosts cannot be kept in {tempfile.gettempdir()} ({error.strerror or error}); free space there, or set "
                "TMPDIR to a folder with more space"
            ) from error
        entry, path = self.files[name], _OPEN_FILES / str(file.fileno())
        if (os.fstat(file.fileno()).st_size, quick_checksum(path)) != (entry["bytes"], entry["quick"]):
            file.close()
            raise DatasetError(
                f"{name} from the storage hosts does not match the manifest that they sent before; if their directory was replaced, start `salientpp serve` "
                "again"
            )
        return file

    def check_can_be_pickled(self) -> None:
        """Raises TypeError, because a copy in another process has no session."""
        raise TypeError(
            "a graph from storage hosts cannot be pickled, because it belongs to this process's session with them; call salientpp.load in the other process"
        )
