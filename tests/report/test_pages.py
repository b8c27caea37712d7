"""Laws of report pages in a browser: they fit a desktop and a phone, draw every chart, and show the numbers of their JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, opened_tab, profile  # noqa: F401  the fixture is used by name
from command_line import run, wide_terminal  # noqa: F401  the fixture is used by name
from traces import Times, write

from salientpp.report.parts import PARTS
from salientpp.report.read import read_run
from salientpp.report.run_page import numbers_of, run_page

pytestmark = pytest.mark.browser

WIDTHS = (1280, 390)  # a desktop's and a phone's
MOST_BYTES = 2_000_000

#: Waits until every chart is drawn.
DRAWN = """(async () => {
  while (document.querySelector('.chart:not([data-drawn])')) await new Promise((then) => setTimeout(then, 20));
  await new Promise((then) => setTimeout(then, 100));  // the size follows the width
})()"""
#: Faults of the layout: the page or an element is wider than the window, or a chart is empty or narrower than half of its place.
FAULTS = """(() => {
  const faults = [], wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) faults.push(`the page is ${wide} pixels wide`);
  for (const chart of document.querySelectorAll('.chart')) {
    const svg = chart.querySelector('svg'), marks = chart.querySelectorAll('.mark-rect > path, .mark-symbol > path');
    if (!svg || !marks.length) faults.push('a chart is empty');
    else if (svg.clientWidth > chart.clientWidth + 1) faults.push(`a chart is ${svg.clientWidth} pixels wide`);
    else if (svg.clientWidth < chart.clientWidth / 2) faults.push(`a chart is only ${svg.clientWidth} pixels wide`);
  }
  for (const e of document.querySelectorAll('body *'))
    if (!e.closest('.wide, svg') && e.getBoundingClientRect().right > innerWidth + 1) faults.push(`${e.tagName} is cut`);
  return faults;
})()"""
#: Contrast of the text with the page, as WCAG defines it, and of the axes' text.
CONTRAST = """(() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map((x) => x / 255).map((x) => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const page = light(getComputedStyle(document.body).backgroundColor);
  const texts = [...document.querySelectorAll('p, td, summary, figcaption')].map((e) => getComputedStyle(e).color);
  const axes = [...document.querySelectorAll('.chart text')].map((e) => getComputedStyle(e).fill);
  return Math.min(...[...texts, ...axes].map(light).map((x) => (Math.max(x, page) + .05) / (Math.min(x, page) + .05)));
})()"""
#: What charts show of their marks.
LABELS = "[...document.querySelectorAll('.chart')].map((c) => [...c.querySelectorAll('[aria-label]')].map((e) => e.getAttribute('aria-label')))"
TABLES = """[...document.querySelectorAll('table')].map((t) => ({
  title: (t.closest('.wide, .texts').previousElementSibling || t).textContent, lines: [...t.rows].map((r) => [...r.cells].map((c) => c.textContent))}))"""


def browse(page: Path, profile: Path, steps: Callable[[Tab], Coroutine[Any, Any, Any]]) -> Any:  # noqa: F811
    """Opens a page, runs steps in its tab and returns their result. Fails if the page has an error or asks another host."""

    async def opened() -> Any:
        async with opened_tab(profile) as tab:
            await tab.resize(WIDTHS[0])
            await tab.open(page.resolve().as_uri())
            await tab.value(DRAWN)
            result = await steps(tab)
            assert tab.errors() == []
            assert [url for url in tab.requests() if not url.startswith(("file:", "data:", "blob:"))] == []
            return result

    return asyncio.run(opened())


async def fits(tab: Tab) -> None:
    """Fails if the page does not fit a desktop or a phone, or cannot be read on a light or dark one."""
    for dark in (False, True):
        for width in WIDTHS:
            await tab.resize(width, dark=dark)
            await tab.value("new Promise((then) => setTimeout(then, 300))")
            assert await tab.value(FAULTS) == [], (width, dark)
        assert await tab.value(CONTRAST) > 4.5, dark


async def set_input(tab: Tab, name: str, value: object) -> None:
    """Changes an input of a chart, which its label names, as a reader does."""
    await tab.value(
        f"""(async () => {{
  const bind = [...document.querySelectorAll('.vega-bind')].find((e) => e.textContent.trim().startsWith({json.dumps(name)}));
  const input = bind.querySelector('input, select');
  input.value = {json.dumps(str(value))};
  for (const kind of ['input', 'change']) input.dispatchEvent(new Event(kind, {{bubbles: true}}));
  await new Promise((then) => setTimeout(then, 500));
}})()"""
    )


@pytest.fixture
def report(tmp_path, capsys) -> Callable[..., tuple[Path, dict]]:
    def made(*words: object, ranks: list[Times], **how: Any) -> tuple[Path, dict]:
        write(tmp_path / "trace", ranks, **how)
        page, numbers = tmp_path / "report.html", tmp_path / "report.json"
        code, out, err = run(capsys, "report", tmp_path / "trace", "--out", page, "--json", numbers, *words)
        assert code == 0, err
        found = json.loads(numbers.read_text())
        assert " ".join(found["verdict"]["sentences"]) in " ".join(out.split())
        assert page.stat().st_size < MOST_BYTES
        return page, found

    return made


SLOW = [Times(), Times(transform=0.31), Times()]


def test_a_report_fits_and_shows_its_numbers(report, profile):  # noqa: F811
    page, numbers = report(ranks=SLOW, epochs=3)

    async def steps(tab: Tab) -> tuple[Any, ...]:
        await fits(tab)
        lead = await tab.value("document.querySelector('.lead').textContent")
        top = await tab.value("document.querySelector('.lead').getBoundingClientRect().bottom")
        return lead, top, await tab.value(TABLES), await tab.value(LABELS)

    lead, top, tables, labels = browse(page, profile, steps)
    assert lead == "".join(numbers["verdict"]["sentences"]).replace("`", "") and lead.startswith(
        "Rank 1 is the slowest"
    )
    assert top < 900  # on the first screen, also of a phone
    of = {table["title"]: table["lines"] for table in tables}
    heads, *lines = of["Seconds of the epoch"]
    assert [line[:3] for line in lines] == [[str(r), "40", f"{numbers['ranks'][r]['seconds']:.4g}"] for r in range(3)]
    shown = [name for name in PARTS if any(rank["parts"][name] for rank in numbers["ranks"])]
    assert heads[3:] == [PARTS[name] for name in shown]
    for line, rank in zip(lines, numbers["ranks"]):
        assert [float(cell) for cell in line[3:]] == pytest.approx([rank["parts"][name] for name in shown], rel=1e-3)
    drawn = {}
    for label in labels[0]:
        found = re.search(r"seconds of the epoch: ([\d.]+).*rank: (\d).*part: ([^;]+)", label)
        if found:
            drawn[int(found[2]), found[3]] = float(found[1])
    assert len(drawn) == 3 * (len(heads) - 3)
    assert (
        drawn[1, "transform"]
        == pytest.approx(numbers["ranks"][1]["parts"]["transform"], abs=0.01)
        == pytest.approx(12.4)
    )
    rows = of["Rows by tier"]
    assert len(rows) == 1 + 3 * 3 and rows[1] == [
        "0",
        "0",
        f"{numbers['epochs'][0]['seconds']:.4g}",
        "360,000",
        "40,000",
        "78,125",
    ]


def test_the_reader_chooses_batches_and_ranks_of_the_timeline(report, profile):  # noqa: F811
    page, numbers = report(ranks=SLOW, epochs=1)
    spans = numbers["timeline"]["spans"]

    async def steps(tab: Tab) -> list[Any]:
        async def batches() -> list[str]:
            return [label for label in (await tab.value(LABELS))[1] if "row: " in label]

        found = [await batches()]
        await set_input(tab, "first batch", 7)
        await set_input(tab, "last batch", 8)
        found.append(await batches())
        await set_input(tab, "rank", 1)
        return [*found, await batches()]

    def between(first: int, last: int, rank: str = "") -> int:
        """Number of spans at the time of these batches."""
        chosen = [span for span in spans if span["row"].startswith(rank)]
        inside = [span for span in chosen if first <= span["at"] <= last]
        low, high = min(span["start"] for span in inside), max(span["start"] + span["ms"] for span in inside)
        return sum(span["start"] + span["ms"] >= low and span["start"] <= high for span in chosen)

    first, two, of_rank = browse(page, profile, steps)
    low, high = numbers["timeline"]["shown"]
    assert low <= 20 <= high and len(first) == between(low, high)
    assert len(two) == between(7, 8) and len(of_rank) == between(7, 8, "1 ")
    assert len(first) > len(two) > len(of_rank) > 0


def test_a_mark_tells_its_values_below_the_pointer(report, profile):  # noqa: F811
    page, _ = report(ranks=SLOW, epochs=1)

    async def steps(tab: Tab) -> str:
        box = await tab.value(
            "(() => { const b = [...document.querySelectorAll('.chart')][0].querySelectorAll('.mark-rect > path')[8].getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        await tab.value("new Promise((then) => setTimeout(then, 300))")
        return await tab.value("document.querySelector('#vg-tooltip-element').textContent")

    said = browse(page, profile, steps)
    assert said == "parttransformrank1seconds12.4ms a batch310share74.6%"


def test_a_long_epoch_is_shown_in_part_and_the_page_says_so(report, profile, tmp_path):  # noqa: F811
    page, numbers = report(ranks=[Times(batches=400)] * 4, epochs=1)
    shown = numbers["timeline"]
    assert shown["left_out"] == 0 and shown["batches"][0] > 100 and shown["batches"][1] < 300
    assert (
        "The page holds batches" in shown["caption"]
        and "of 0 to 399. `--batches A:B` chooses others." in shown["caption"]
    )
    browse(page, profile, fits)
    page, numbers = report("--batches", "0:399", ranks=[Times(batches=400)] * 4, epochs=1)
    shown = numbers["timeline"]
    assert shown["batches"] == [0, 399] and shown["left_out"] > 1000
    assert re.search(
        rf"{shown['left_out']:,} of [\d,]+ spans, those up to [\d.]+ ms, are left out; they are [\d.]+% of",
        shown["caption"],
    )


@pytest.mark.parametrize("ranks", [[Times(batches=12)], [Times(batches=12)] * 16, [Times(batches=2)] * 2])
def test_pages_of_few_and_many_ranks_fit(report, profile, ranks):  # noqa: F811
    page, _ = report(ranks=ranks, epochs=1)
    browse(page, profile, fits)


def test_records_without_spans_rows_and_memory_make_a_page(report, profile, tmp_path):  # noqa: F811
    write(tmp_path / "trace", SLOW)
    for path in (tmp_path / "trace").iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [line for line in lines if line["log_type"] == "instant"]
        for line in kept[1:]:
            line["context"] = {k: v for k, v in line["context"].items() if not k.startswith(("rows.", "memory."))}
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    numbers = numbers_of(read_run(tmp_path / "trace"))
    page = tmp_path / "page.html"
    page.write_bytes(run_page(numbers))
    texts = browse(page, profile, lambda tab: tab.value("document.body.innerText"))
    for words in ("have no spans", "No rows were counted", "do not say how much memory"):
        assert words in texts


@pytest.fixture
def command(tmp_path, capsys) -> Callable[..., tuple[Path, dict]]:
    def made(*words: object) -> tuple[Path, dict]:
        page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
        code, _, err = run(capsys, *words, "--html", page, "--json", numbers)
        assert code == 0, err
        assert page.stat().st_size < MOST_BYTES
        return page, json.loads(numbers.read_text())

    return made


def points(labels: list[str]) -> dict[str, dict[float, float]]:
    """Amounts over α by policy, from the labels of marks. The label of a line repeats its first point."""
    found: dict[str, dict[float, float]] = {}
    for label in labels:
        matched = re.search(r"size of the cache, α: ([\d.]+); amount: ([\d.,]+); policy: ([^;]+)", label)
        if matched:
            found.setdefault(matched[3], {})[float(matched[1])] = float(matched[2].replace(",", ""))
    return found


def test_the_page_of_an_analysis_shows_its_numbers(command, profile):  # noqa: F811
    graph = "synthetic:num_vertices=600,num_features=8"
    page, numbers = command(
        "analyze", graph, "--parts", 3, "--num-neighbors=4,3", "--num-neighbors=2", "--epochs", 1, "--lookahead", "auto"
    )
    of_two = [each for each in numbers["results"] if each["num_neighbors"] == [2] and each["way"] == "cache"]

    async def steps(tab: Tab) -> list[Any]:
        await fits(tab)
        found = [await tab.value("document.querySelector('.lead').textContent"), (await tab.value(LABELS))[0]]
        await set_input(tab, "show", "rows an epoch")
        await set_input(tab, "num_neighbors", "2")
        found.append((await tab.value(LABELS))[0])
        await set_input(tab, "policy", "degree")
        return [*found, (await tab.value(LABELS))[0], await tab.value(LABELS)]

    lead, shares, rows, degree, everything = browse(page, profile, steps)
    assert "A VIP cache of" in lead and "3 machines fetch" in lead
    assert points(shares)["vip"][0.0] == 1.0 and "vip, lookahead" in points(shares)
    for policy in ("vip", "degree", "random", "oracle"):
        of_policy = [each for each in of_two if each["policy"] == policy]
        counted = {each["replication_factor"]: each["remote_rows_per_epoch"] for each in of_policy}
        assert points(rows)[policy] == pytest.approx(counted, rel=1e-3) and len(counted) == 7
    assert [*points(degree)] == ["degree"]
    by_rank = [label for label in everything[1] if "rows an epoch" in label and "rank" in label]
    assert len(by_rank) == 3


def test_the_page_of_an_analysis_of_a_typed_directory_fits(command, profile, tmp_path, capsys):  # noqa: F811
    mag = tmp_path / "mag"
    assert run(capsys, "partition", "synthetic-mag:num_papers=300", mag, "--parts", 2, "--method", "random")[0] == 0
    page, _ = command("analyze", mag, "--epochs", 1, "--num-neighbors=3,2")
    browse(page, profile, fits)


def test_the_page_of_a_plan_shows_its_numbers(command, profile):  # noqa: F811
    machines = "--machines", "10GbE", "--set", "step.seconds=0.01", "--price", 2
    page, numbers = command("plan", "synthetic:num_vertices=600", "--hosts", "2,3", *machines)
    chosen = [each for each in numbers["predictions"] if each["chosen"]]

    async def steps(tab: Tab) -> list[Any]:
        await fits(tab)
        found = [await tab.value("document.querySelector('.lead').textContent")]
        for hosts in (2, 3):
            await set_input(tab, "hosts", hosts)
            found.append((await tab.value(LABELS))[0])
        return [*found, await tab.value(TABLES)]

    lead, *drawn, tables = browse(page, profile, steps)
    assert lead.startswith("Recommended: ") and "Cheapest: " in lead
    for hosts, labels in zip((2, 3), drawn):
        seconds = [float(each) for label in labels for each in re.findall(r"seconds of an epoch: ([\d.]+)", label)]
        wanted = [each for each in chosen if each["hosts"] == hosts]
        assert sum(seconds) == pytest.approx(sum(each["seconds"] for each in wanted), rel=0.05)
    heads, *lines = next(table["lines"] for table in tables if {"for copies", "seconds"} < {*table["lines"][0]})
    assert len(lines) == len(numbers["predictions"]) and heads[3] == "seconds"
    assert [float(line[3]) for line in lines] == pytest.approx(
        [each["seconds"] for each in numbers["predictions"]], rel=1e-3
    )
