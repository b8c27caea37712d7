"""Prepares pages for the site: a hook of mkdocs and an extension of griffe, which mkdocs.yml names.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages too. Links in the Markdown lead through the source tree. On the site, a link to
another page leads to that page, and a link to any other file becomes plain text.
"""

from __future__ import annotations

import itertools
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

sys.path.append(str(Path(__file__).parent))

import gallery

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
LETTERS_OF_A_SENTENCE = 50  # a table cell of more letters is read as prose
LANDING = "---\nhide: [navigation, toc]\n---\n"


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie outside docs/."""
    for source, page in PAGES.items():
        text = gallery.page() if page == "examples.md" else (ROOT / source).read_text()
        files.append(File.generated(config, page, content=LANDING * (page == "index.md") + text))
    files.append(File.generated(config, "llms.txt", content=_list_of_pages(config)))
    return files


def _list_of_pages(config: Any) -> str:
    """Returns the pages with their titles and first sentences, for readers that are programs (llmstxt.org)."""
    sources = {site: ROOT / source for source, site in PAGES.items()}
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]

    def add(entries: list[Any], section: str) -> None:
        for entry in entries:
            ((title, target),) = entry.items()
            if isinstance(target, list):
                add(target, f"{section}: {title}" if section else title)
                continue
            text = sources.get(target, ROOT / "docs" / target).read_text()
            words = _first_sentence(text)
            where = f"{section}: " if section else ""
            lines.append(f"- [{where}{title}]({target.removesuffix('.md')}.html): {words}")

    add(config.nav, "")
    return "\n".join(lines) + "\n"


def _first_sentence(page: str) -> str:
    """Returns the first sentence of a page's first paragraph, without links and marks."""
    blocks = re.split(r"\n{2,}", re.sub(r"<!--.*?-->|^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL))
    paragraph = next(
        (block for block in map(str.strip, blocks) if block and not re.match(r"#|\||!\[|<|\* |>|:::", block)), ""
    )
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(paragraph.split())).replace("**", "")
    return re.split(r"(?<=[.?])\s", plain)[0]


def on_page_content(html: str, **_: Any) -> str:
    """Marks tables that have sentences, and names the column of each of their cells: site.css stacks the cells on a phone."""
    return re.sub(r"<table>.*?</table>", lambda found: _stackable(found[0]), html, flags=re.DOTALL)


def _stackable(table: str) -> str:
    cells = re.findall(r"<td[^>]*>(.*?)</td>", table, re.DOTALL)
    if max((len(re.sub(r"<[^>]+>", "", cell)) for cell in cells), default=0) < LETTERS_OF_A_SENTENCE:
        return table
    columns = [re.sub(r"<[^>]+>|\"", "", head).strip() for head in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)]
    number = itertools.count()

    def labelled(_: re.Match[str]) -> str:
        column = next(number) % len(columns)
        return f'<td data-label="{columns[column]}"' if column and columns[column] else "<td"

    return re.sub(r"<td", labelled, table).replace("<table>", "<table data-sentences>", 1)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Returns the page with links as the site needs them."""
    if page.file.src_uri.startswith("reference/api/"):
        markdown = gallery.with_examples(markdown)
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
    """Replaces roles in docstrings, ``:func:`~package.name```, by code spans, and gives each argument a line of its own."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            plain = re.sub(r":\w+:`~?([^`]+)`", lambda role: f"`{role[1]}`", obj.docstring.value)
            is_called = isinstance(obj, (griffe.Function, griffe.Class))
            obj.docstring.value = one_argument_a_line(
                plain, {each.name for each in obj.parameters} if is_called else set()
            )


def one_argument_a_line(docstring: str, names: set[str]) -> str:
    """Divides lines that describe several arguments together, which griffe does not find in the signature and calls required.

    Arguments that the signature takes as ``**options`` move to a section of their own, for the same reason.
    """
    found = re.search(r"^Args:\n((?: {4,}.*\n?|\n(?= ))*)", docstring, re.MULTILINE)
    if found is None or not names:
        return docstring
    own, others = [], []
    for entry in re.split(r"^(?= {4}\S)", found[1], flags=re.MULTILINE):
        matched = re.match(r" {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): ", entry)
        if matched is None:
            own.append(entry)
            continue
        first, *more = matched[1].split(", ")
        described = [
            f"    {first}: {entry[matched.end() :].rstrip()}\n",
            *(f"    {name}: see `{first}`.\n" for name in more),
        ]
        for name, text in zip([first, *more], described, strict=True):
            (own if name.lstrip("*") in names or name in names else others).append(text)
    sections = "Args:\n" + "".join(own) + ("\nKeyword Args:\n" + "".join(others) if others else "") + "\n"
    return docstring[: found.start()] + sections + docstring[found.end() :]
