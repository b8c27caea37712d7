"""How do README and docstrings become pages of the site? Used by mkdocs (as a hook) and by griffe (as an extension); see mkdocs.yml.

README.md is the first page. Links of the Markdown are made for who reads it in the source tree; here those that leave docs/ become
plain text, since the site has no source tree beside it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Add README.md as ``index.md``."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/([\w./-]+\.(?:md|svg|png)(?:#[^)]*)?)\)", r"](\1)", text)
    text = text.replace("](docs)", "](concepts.md)")
    text = re.sub(r'(src|srcset)="docs/', r'\1="', text)
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to README go to the first page; of links to other files outside docs/ the text remains."""
    markdown = markdown.replace("](../README.md", "](index.md")

    def kept(link: re.Match[str]) -> str:
        target = link[2].partition("#")[0]
        is_elsewhere = re.match(r"\w+:", link[2]) or not target
        return link[0] if is_elsewhere or files.get_file_from_path(target) is not None else f"`{link[1]}`"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", kept, markdown)


class PlainRoles(griffe.Extension):
    """Docstrings name things by roles, ``:func:`~package.name```, which Markdown does not know."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r":\w+:`~?([^`]+)`", lambda role: f"`{role[1]}`", obj.docstring.value)
