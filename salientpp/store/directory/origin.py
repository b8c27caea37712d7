"""Says from which tables a graph was made, and how their columns were encoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from salientpp.store.directory.files import DatasetError, cannot_be_read
from salientpp.store.directory.kinds import CONVERTED, MANIFEST
from salientpp.store.directory.manifest import manifest_checksum


def table_origin(root: Path) -> dict[str, Any] | None:
    """Returns the origin of a graph that was made of tables with keys, as JSON, or None if the graph was made of something else.

    The origin has these entries. Titles are those of the description, such as ``nodes.customer`` or ``edges.customer,ordered,product``.

    * ``description``: the contents of the description.
    * ``time_unit``: unit of all times, ``second`` or ``microsecond``, or None.
    * ``tables``: title -> ``from``, the facts that identify each file; ``columns``, column -> kind and encoding; ``x``, if the type has it: name, mean
      and standard deviation of each column; ``left_out``, column -> reason.

    Args:
        root: a converted graph.

    Raises:
        DatasetError: the manifest is missing or was altered.
    """
    path = root / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except OSError as error:
        raise cannot_be_read(path, error, "convert again") from None
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is not valid JSON ({error}); copy it again, or convert again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != CONVERTED:
        return None
    if manifest.pop("checksum", None) != manifest_checksum(manifest):
        raise DatasetError(
            f"{path} was altered: its checksum does not match its contents; copy it again, or convert again"
        )
    return manifest.get("tables")
