"""Prepares pages for the site: a hook of mkdocs and an extension of griffe, which mkdocs.yml names.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages too. Links in the Markdown lead through the source tree. On the site, a link to
another page leads to that page, and a link to any other file becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LANDING = "---\nhide: [navigation, toc]\n---\n"


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie outside docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=LANDING * (page == "index.md") + text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Returns the page with links as the site needs them."""
    outside = {site: source for source, site in PAGES.items()}
    here = outside.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def mended(link: re.Match[str]) -> str:
        bang, text, target = link.groups()
        path, hash_, anchor = target.partition("#")
        if re.match(r"\w+:", target) or not path:
            return link[0]
        inside_tree = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        site = PAGES.get(inside_tree, inside_tree.removeprefix("docs/"))
        if files.get_file_from_path(site) is None or not (inside_tree in PAGES or inside_tree.startswith("docs/")):
            return text
        relative = posixpath.relpath(site, posixpath.dirname(page.file.src_uri) or ".")
        return f"{bang}[{text}]({relative}{hash_}{anchor})"

    return re.sub(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)", mended, markdown)


class PlainRoles(griffe.Extension):
    """Replaces roles in docstrings, ``:func:`~package.name```, by code spans. Markdown has no roles."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r":\w+:`~?([^`]+)`", lambda role: f"`{role[1]}`", obj.docstring.value)
