"""Laws of the built site, in a browser: every page fits a desktop and a phone, and asks no other host for anything.

``make test-site`` builds the site and runs these tests. Without Chromium they skip, or fail if FAIL_WITHOUT_BROWSER is set.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import opened_tab, profile  # noqa: F401  the fixture is used by name

pytestmark = pytest.mark.browser

SITE = Path(__file__).parents[2] / "site"
SECTIONS = ("", "how-to", "reference", "reference/api", "explanation", "results", "design")  # folders of the site
WIDTHS = (1280, 390)  # a desktop's and a phone's

#: Returns what is wrong with the layout of a page. Code may scroll inside its block, and on a phone a table of figures inside its own.
LAYOUT = r"""(() => {
  const wide = innerWidth > 700, faults = [], page = document.documentElement.scrollWidth;
  if (page > innerWidth) faults.push(`the page is ${page} pixels wide`);
  for (const e of document.querySelectorAll('.md-content *')) {
    if (e.clientWidth == 0 || e.scrollWidth <= e.clientWidth + 1) continue;
    if (!['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX)) continue;
    if (e.closest('pre, code') || e.querySelector('pre')) continue;
    const table = e.matches('table') ? e : e.querySelector('table');
    if (table && !wide && !('sentences' in table.dataset)) continue;
    faults.push(`${table ? 'a table is cut' : 'text is cut'}, ${e.scrollWidth} pixels: ${e.textContent.trim().slice(0, 60)}`);
  }
  for (const head of document.querySelectorAll('.md-content :is(th, h1, h2, h3, h4)')) {
    const texts = document.createTreeWalker(head, NodeFilter.SHOW_TEXT);
    for (let text; (text = texts.nextNode()); )
      for (const word of text.textContent.matchAll(/[\p{L}\p{N}_]+/gu)) {
        const range = document.createRange();
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map((box) => Math.round(box.top / 4))).size > 1)
          faults.push(`a header is broken inside the word ${word[0]}`);
      }
  }
  return faults;
})()"""

#: Returns the number of switches of versions. The theme adds the switch after the page is loaded.
VERSIONS = """(async () => {
  const switches = () => document.querySelectorAll('.md-version').length;
  while (document.querySelector('.md-header') && !switches()) await new Promise((then) => setTimeout(then, 50));
  return switches();
})()"""


@dataclass
class Seen:
    """Faults of a page, and the number of its switches of versions."""

    layout: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    versions: int = 0


class Versioned(SimpleHTTPRequestHandler):
    """Serves a site as mike does, under the name of its version. Only the home page gets the words of the search.

    Every page would build the index of the search again, which takes longer than all else.
    """

    def do_GET(self) -> None:
        self.path = self.path.removeprefix("/dev")
        if self.path == "/versions.json":
            self.send_json([{"version": "dev", "title": "dev", "aliases": []}])
        elif self.path == "/search/search_index.json" and not self.headers["Referer"].endswith("/dev/index.html"):
            index = json.loads((Path(self.directory) / "search/search_index.json").read_text())
            self.send_json({**index, "docs": []})
        else:
            super().do_GET()

    def send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Versioned, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()


def visit(site: Path, pages: list[str], profile: Path) -> dict[str, Seen]:  # noqa: F811
    """Opens pages of a site at each width."""

    async def all_pages(base: str) -> dict[str, Seen]:
        found = {}
        async with opened_tab(profile) as tab:
            for page in pages:
                seen = found[page] = Seen()
                await tab.resize(WIDTHS[0])
                await tab.open(f"{base}dev/{page}")
                for width in WIDTHS:
                    await tab.resize(width)
                    seen.layout += [f"at {width}: {fault}" for fault in await tab.value(LAYOUT)]
                seen.errors = tab.errors()
                seen.foreign = [url for url in tab.requests() if not url.startswith((base, "data:", "blob:"))]
                seen.versions = await tab.value(VERSIONS)
        return found

    with served(site) as base:
        return asyncio.run(all_pages(base))


def sections() -> dict[str, list[str]]:
    """Returns the pages of each folder of the site."""
    found: dict[str, list[str]] = {name: [] for name in SECTIONS}
    for path in sorted(SITE.rglob("*.html")):
        page = str(path.relative_to(SITE))
        found[page.rpartition("/")[0]].append(page)
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_pages_fit_a_desktop_and_a_phone_without_errors_or_other_hosts(section, profile):  # noqa: F811
    assert (SITE / "index.html").is_file(), "run `make docs` first"
    pages = sections()[section]
    assert pages
    seen = visit(SITE, pages, profile)
    assert {page: each.layout for page, each in seen.items() if each.layout} == {}
    assert {page: each.errors for page, each in seen.items() if each.errors} == {}
    assert {page: each.foreign for page, each in seen.items() if each.foreign} == {}
    assert [page for page, each in seen.items() if each.versions != 1] == []


def test_faults_of_a_page_are_found(profile, tmp_path):  # noqa: F811
    text = "long " * 40
    (tmp_path / "index.html").write_text(
        "<body style='margin: 0'><div class='md-content'>"
        "<div style='width: 2000px'>wide</div>"
        f"<p style='white-space: nowrap; overflow: auto; width: 300px'>{text}</p>"
        f"<div style='overflow: auto; width: 300px'><table><tr><td style='white-space: nowrap'>{text}</table></div>"
        f"<pre style='overflow: auto; width: 300px'>{text}</pre>"
        "<h1 style='width: 40px; font-size: 40px; word-break: break-all'>indivisible</h1>"
        "</div><img src='http://other.invalid/picture.png'><script>throw Error('thrown')</script>"
    )
    (page,) = visit(tmp_path, ["index.html"], profile).values()
    faults = "\n".join(page.layout)
    for fault in (
        "at 1280: the page",
        "at 390: the page",
        "at 390: text is cut",
        "at 390: a header is broken inside the word indivisible",
    ):
        assert fault in faults
    assert faults.count("a table is cut") == 1  # on a desktop only
    assert faults.count("is cut") == 3  # code may scroll
    assert page.foreign == ["http://other.invalid/picture.png"]
    assert "thrown" in "".join(page.errors)
    assert page.versions == 0


def test_the_list_of_pages_names_files_of_the_site():
    pages = re.findall(r"\]\(([^)]+)\)", (SITE / "llms.txt").read_text())
    assert len(pages) > 40
    assert [page for page in pages if not (SITE / page).is_file()] == []
