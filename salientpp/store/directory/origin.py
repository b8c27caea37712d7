"""Says from which tables a graph was made, and how their columns were encoded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from salientpp.store.directory.description import ORIGIN
from salientpp.store.directory.files import DatasetError, cannot_be_read, verify_file
from salientpp.store.directory.kinds import MANIFEST, is_converted
from salientpp.store.directory.manifest import manifest_checksum, read_manifest
from salientpp.store.key_table import KeyTable


def table_origin(root: Path) -> dict[str, Any] | None:
    """Returns the origin of a graph that was made of tables with keys, as JSON, or None if the graph was made of something else.

    The origin has these entries. A title names an entry of the description, such as ``nodes.customer`` or ``edges.customer,ordered,product``.

    * ``description``: the contents of the description, without passwords of addresses.
    * ``folder``: the folder at which relative addresses begin, or None if there are none.
    * ``time_unit``: unit of all times, ``second`` or ``microsecond``, or None.
    * ``tables``: title -> ``from``, the facts that identify each file; ``columns``, column -> kind and encoding; ``left_out``, column -> reason. If the
      type has ``x``, also ``x``: name, mean and standard deviation of each column.
    * ``options``: the options of the conversion that change its result.
    * ``partition``, of a dataset directory only: the arguments of :func:`salientpp.partition`.

    Args:
        root: a dataset directory, or a converted graph.

    Raises:
        DatasetError: ``root`` is neither, or a file is missing or was altered.
    """
    if is_converted(root):
        return _of_converted(root / MANIFEST)
    entry = read_manifest(root)["files"].get(ORIGIN)
    if entry is None:
        return None
    verify_file(root, ORIGIN, entry, full=True)
    return json.loads((root / ORIGIN).read_text())


def _of_converted(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads(path.read_text())
    except OSError as error:
        raise cannot_be_read(path, error, "convert again") from None
    if manifest.pop("checksum", None) != manifest_checksum(manifest):
        raise DatasetError(
            f"{path} was altered: its checksum does not match its contents; copy it again, or convert again"
        )
    return manifest.get("tables")


def origin_of(keys: Iterable[KeyTable]) -> dict[str, Any] | None:
    """Returns the origin of the converted graph that these keys belong to. None if they lie elsewhere, or were not made of tables."""
    roots = [*{table.path.parent for table in keys}]
    return table_origin(roots[0]) if len(roots) == 1 and is_converted(roots[0]) else None
