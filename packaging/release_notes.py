"""Prints the section of CHANGELOG.md on one version, as notes of a release: ``python packaging/release_notes.py VERSION``.

Links to files of the tree become links to the tag ``vVERSION`` of the public repository.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def release_notes(changelog: str, version: str, repository: str) -> str:
    """Returns the text below the heading ``## VERSION`` or ``## [VERSION] - DATE`` of ``changelog``.

    ``repository`` is the address of the public repository.

    Raises:
        ValueError: the changelog has no such heading, or nothing stands below it.
    """
    found = {}
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        found[heading.split()[0].strip("[]")] = text.strip()
    if version not in found:
        known = ", ".join(name for name in found if name != "Unreleased")
        raise ValueError(
            f"expected a version of CHANGELOG.md ({known}), got {version!r}; for a new version, put the heading '## VERSION - DATE' below '## [Unreleased]'"
        )
    if not found[version]:
        raise ValueError(f"CHANGELOG.md says nothing on version {version}; write what changed below its heading")
    return re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", rf"]({repository}/blob/v{version}/\1)", found[version]) + "\n"


def main() -> None:
    if len(sys.argv) != 2 or not sys.argv[1]:
        sys.exit("expected one argument, the version: make release-notes VERSION=0.1.0")
    repository = re.search(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert repository
    try:
        print(release_notes((ROOT / "CHANGELOG.md").read_text(), sys.argv[1], repository[1]), end="")
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
