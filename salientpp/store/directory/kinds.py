"""Tells which kind of directory a path is. It does not import torch, so that a command answers a mistake at once."""

from __future__ import annotations

import json
from pathlib import Path

MANIFEST = "manifest.json"

#: Format that the manifest of a converted graph names.
CONVERTED = "salientpp-converted-graph"


def has_manifest(root: str | Path) -> bool:
    """True if a path has a manifest, as dataset directories and converted graphs do. The manifest is not read."""
    return (Path(root) / MANIFEST).is_file()


def is_converted(root: str | Path) -> bool:
    """True if the manifest of a directory says that it is a converted graph."""
    try:
        manifest = json.loads((Path(root) / MANIFEST).read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == CONVERTED
