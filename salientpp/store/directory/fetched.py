"""Files of a dataset directory that storage hosts send: each is fetched when it is first opened, and kept on this host's disk.

A rank that trains needs few of them: the seeds and the labels of its part, and with topology 'whole' the neighbour lists.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from torch import Tensor

from salientpp.processes import Lock
from salientpp.sessions.opening import Session
from salientpp.store.directory.files import Arrays
from salientpp.store.directory.manifest import MANIFEST


class FetchedArrays(Arrays):
    """Opens arrays of a directory that storage hosts serve.

    A file is removed as soon as it is mapped, so that nothing is left when the process ends. Its disk space is free when its map is gone.

    Attributes:
        root: a temporary directory with the manifest.
    """

    def __init__(self, session: Session) -> None:
        folder = tempfile.TemporaryDirectory(prefix="salientpp-")
        super().__init__(Path(folder.name) / session.hosts[0], session.manifest["files"])
        self._folder, self._files = folder, session.files
        self._opened: dict[tuple[str, str | None], Tensor] = {}
        self._lock = Lock()
        self.root.mkdir()
        (self.root / MANIFEST).write_text(json.dumps(session.manifest))

    def open(self, name: str, dtype: str | None = None) -> Tensor:
        """Returns the array of a file, which is fetched if it was not opened before; see :meth:`Arrays.open`.

        Raises:
            StorageError: no storage host sends the file.
            DatasetError: the file does not match the manifest.
        """
        with self._lock:
            found = self._opened.get((name, dtype))
            if found is None:
                path = self.root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with path.open("wb") as file:
                        self._files.fetch(name, file)
                    found = self._opened[name, dtype] = super().open(name, dtype)
                finally:
                    path.unlink(missing_ok=True)
        return found

    def check_can_be_pickled(self) -> None:
        """Raises TypeError, because a copy in another process has no session."""
        raise TypeError(
            "a graph from storage hosts cannot be pickled, because it belongs to this process's session with them; call salientpp.load in the other process"
        )
