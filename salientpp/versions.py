"""Checks that the required libraries are installed and new enough.

pip ensures this, unless pip was told not to (``--no-deps``) or a library was replaced later.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec

UNKNOWN = "unknown"

#: Library -> lowest version that is supported, as in pyproject.toml.
NEEDED = {"torch": (2, 10), "torch_geometric": (2, 7)}


def own_version() -> str:
    """Returns the version of the installed package; "unknown" for a source tree that was not installed."""
    return next((found.version for found in distributions(name="salientpp")), UNKNOWN)


def versions_of_libraries() -> dict[str, str]:
    """Returns the versions of the libraries in ``NEEDED``, without the part after a plus sign; "unknown" if pip has no record of a library."""
    found = {}
    for name in NEEDED:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = UNKNOWN
    return found


def check_versions() -> None:
    """Raises ImportError, with advice, unless the required libraries are installed and new enough."""
    for name, least in NEEDED.items():
        wanted = f"{name} >= {'.'.join(map(str, least))}"
        try:
            found = version(name)
        except PackageNotFoundError:
            if find_spec(name) is None:
                raise ImportError(f"salientpp needs {wanted}, which is not installed: pip install {name}") from None
            continue  # built or copied without a record of its version
        if tuple(map(int, re.findall(r"\d+", found)[:2])) < least:
            raise ImportError(f"salientpp needs {wanted}, got {found}: pip install --upgrade {name}")
