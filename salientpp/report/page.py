"""Makes a page: one HTML file with its charts, their script and their numbers, which needs no other file.

Charts are Vega-Lite specifications. The script that draws them comes from the package ``vl-convert-python`` and is a part of the page. Texts and
axes take their colours from the page's style, which has a light and a dark variant; the colours of data suit both.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from salientpp.display import Table, format_bytes
from salientpp.display import html as html_of

#: Colours that differ for readers who confuse red and green, on white and on black.
COLOURS = ("#4c78a8", "#e08214", "#3aa6a6", "#8e6bbf", "#c7a500", "#d1495b", "#7a8aa0", "#b9c3d0", "#8c6d5a")

_STYLE = """
:root{color-scheme:light dark;--page:#fff;--text:#1c2330;--dim:#5b6575;--line:#d9dee6;--box:#f4f6f9;--lead:#e8eefc;--mark:#2f5bd0}
@media screen and (prefers-color-scheme:dark){
:root{--page:#14171c;--text:#e6e9ee;--dim:#a2abb8;--line:#343b46;--box:#1c2027;--lead:#1d2840;--mark:#8fb0ff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:16px;background:var(--page);color:var(--text);font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.35rem;margin:.2em 0 .5em}h2{font-size:1.15rem;margin:2em 0 .4em}h3{font-size:1rem;margin:1.4em 0 .3em}
p{margin:.5em 0}.dim,.title,figcaption{color:var(--dim);font-size:.9rem}.title{margin:1em 0 0}
.lead{background:var(--lead);border-left:4px solid var(--mark);padding:10px 16px;font-size:1.15rem;border-radius:4px}
code{font:.92em ui-monospace,monospace;background:var(--box);padding:1px 4px;border-radius:3px}.lead code{background:var(--page)}
details{margin:.5em 0}summary{cursor:pointer;color:var(--mark);font-size:.92rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem;margin:.5em 0;font-variant-numeric:tabular-nums}
.wide :is(th,td){white-space:nowrap}th,td{padding:3px 10px 3px 0;text-align:right;border-bottom:1px solid var(--line);overflow-wrap:normal}
th:first-child,td:first-child,.texts td,.texts th{text-align:left;vertical-align:top}th{font-weight:600;vertical-align:bottom}
figure{margin:.6em 0}.chart,.chart.vega-embed{display:flex;flex-direction:column;width:100%}.chart svg text{fill:var(--text)!important}
.chart svg :is(.role-axis-grid,.role-axis-domain,.role-axis-tick) line{stroke:var(--line)!important}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.88rem;padding:0;margin:.3em 0;list-style:none}
.legend i{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.35em}
.vega-bindings{order:-1;display:flex;flex-wrap:wrap;gap:6px 16px;margin:.3em 0}.vega-bind{font-size:.9rem;max-width:100%}
.vega-bind-name{margin-right:.4em;color:var(--dim)}.vega-bind :is(input,select){font:inherit;color:inherit;background:var(--box);
border:1px solid var(--line);border-radius:4px;padding:2px 6px;max-width:100%}
#vg-tooltip-element{background:var(--box)!important;color:var(--text)!important;border:1px solid var(--line)!important;font:13px/1.4 system-ui!important}
@media(max-width:600px){#vg-tooltip-element{left:8px!important;max-width:calc(100vw - 16px);box-sizing:border-box}}
#vg-tooltip-element td{border:0;padding:1px 6px}#vg-tooltip-element td.key{color:var(--dim)!important}
@media print{*{print-color-adjust:exact}body{max-width:none;padding:0}.lead{border:1px solid var(--mark)}figure,tr{break-inside:avoid}h2,h3{break-after:avoid}
.vega-bindings{display:none}}
"""

_DRAW = """
for (const place of document.querySelectorAll(".chart")) {
  const spec = JSON.parse(place.previousElementSibling.textContent);
  vegaEmbed(place, spec, {actions: false, renderer: "svg", mode: "vega-lite", tooltip: {theme: "page"}})
    .then(({view}) => {
      place.view = view;
      new ResizeObserver(() => view.resize().runAsync()).observe(place);
      place.dataset.drawn = "yes";
    });
}
"""
#: Settings of every chart. ``container`` follows the width of the page.
_SHARED = {
    "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
    "width": "container",
    "background": None,
    "autosize": {"type": "fit-x", "contains": "padding"},
    "config": {
        "axisXQuantitative": {"tickCount": {"expr": "ceil(width / 90)"}},
        "font": "system-ui,sans-serif",
        "view": {"stroke": None},
        "axis": {
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "gridColor": "#8884",
            "labelSeparation": 8,
        },
        "bar": {"discreteBandSize": {"band": 0.72}},
    },
}


def check_charts() -> None:
    """Raises ImportError with instructions unless charts can be drawn."""
    try:
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"a page needs vl-convert-python, which could not be imported ({error}): pip install 'salientpp[report]'"
        ) from None


@dataclass(frozen=True)
class Chart:
    """A chart, its numbers, and what its colours mean.

    Attributes:
        spec: Vega-Lite without the settings that all charts share.
        table: all numbers of the chart.
        colours: colour by meaning; empty if the chart needs no legend.
        caption: a sentence below the chart.
    """

    spec: Mapping[str, Any]
    table: Table
    colours: Mapping[str, str]
    caption: str = ""

    def html(self) -> str:
        entries = "".join(f'<li><i style="background:{c}"></i>{escape(name)}</li>' for name, c in self.colours.items())
        legend = f'<ul class="legend">{entries}</ul>' if entries else ""
        spec = json.dumps({**_SHARED, **self.spec}, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        caption = f"<figcaption>{marked(self.caption)}</figcaption>" if self.caption else ""
        numbers = details("Numbers of this chart", table(self.table))
        return (
            f'<figure>{legend}<script type="application/json">{spec}</script><div class="chart"></div>{caption}'
            f"{numbers}</figure>"
        )


def _with_code(html: str) -> str:
    """Returns HTML in which text between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html)


def marked(text: str) -> str:
    """Returns a text as HTML, with code between backticks."""
    return _with_code(escape(text, quote=False))


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{marked(text)}</p>' if kind else f"<p>{marked(text)}</p>"


def table(what: Any, texts: bool = False) -> str:
    """Returns a table below its title. A narrow page scrolls it.

    Args:
        texts: the cells are sentences, in which backticks mark code. They wrap instead.
    """
    made = html_of(what)
    title = re.search(r"<caption>(.*?)</caption>", made)
    above = f'<p class="title">{title[1]}</p>' if title else ""
    made = made.replace(title[0], "") if title else made
    return f'{above}<div class="texts">{_with_code(made)}</div>' if texts else f'{above}<div class="wide">{made}</div>'


def shown_blocks(blocks: Iterable[Any]) -> list[str]:
    """Returns as HTML what a command prints on a terminal: texts, tables and commands (texts of ``rich``)."""
    found = []
    for block in blocks:
        if isinstance(block, str):
            found.append(paragraph(block))
        elif hasattr(block, "columns"):
            found.append(table(block))
        else:
            found.append(f"<p><code>{escape(str(block).strip())}</code></p>")
    return found


def details(title: str, inner: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def section(title: str, *blocks: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(blocks)}</section>"


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Returns a colour for each name: the first name gets the first colour, so equal lists of names look alike in all charts."""
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}


def colour_by(field: str, colours: Mapping[str, str]) -> dict[str, Any]:
    """Returns the Vega-Lite encoding of ``field`` by these colours. It has no legend; the page draws one, which also fits a phone."""
    scale = {"domain": [*colours], "range": [*colours.values()]}
    return {"field": field, "type": "nominal", "scale": scale, "legend": None}


def tips(**fields: str) -> list[dict[str, str]]:
    """Returns the fields that a chart shows of the bar or point below the pointer.

    ``fields``: name -> title, or ``title:format`` for numbers.
    """
    split = {name: title.partition(":") for name, title in fields.items()}
    return [
        {"field": name, "title": title} | ({"format": form} if form else {}) for name, (title, _, form) in split.items()
    ]


def stacked_bars(
    values: Sequence[Mapping[str, Any]], over: str, amount: tuple[str, str], colour: Mapping[str, Any],
    shown: Sequence[Mapping[str, str]], across: bool = True, title_of_bars: str | None = "", **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Returns the specification of stacked bars, one for each value of the field ``over``.

    Args:
        amount: field of the length, and its title.
        shown: from :func:`tips`.
        across: bars lie on their side, which leaves room for many.
        title_of_bars: None for no title; empty: ``over``.
    """
    bar: dict[str, Any] = {
        "field": over,
        "type": "ordinal",
        "title": over if title_of_bars == "" else title_of_bars,
        "sort": None,
    }
    length: dict[str, Any] = {"field": amount[0], "type": "quantitative", "title": amount[1]}
    if amount[0] == "rows":
        length["axis"] = {"format": "~s"}
    number = len({each[over] for each in values})
    if not across:
        bar["axis"] = {"labelAngle": 0}
    height: Any = {"step": max(14, min(34, 640 // max(1, number)))} if across else 220
    ends = ("y", "x") if across else ("x", "y")
    encoding = dict(zip(ends, (bar, length))) | {"color": colour, "order": {"field": "order"}, "tooltip": [*shown]}
    return {"data": {"values": values}, "height": height, "mark": "bar", "encoding": encoding, **more}


def memory_chart(
    bars: Sequence[tuple[Mapping[str, Any], Mapping[str, int]]], over: str, heads: Mapping[str, str], title: str = "", **more: Any
) -> str:  # fmt: skip
    """Draws memory by kind, stacked.

    Args:
        bars: fields of each bar, and its bytes by kind.
        over: as for :func:`stacked_bars`, like ``more``.
        heads: fields that name a bar in the table and below the pointer -> their titles.
    """
    kinds = list(dict.fromkeys(kind for _, held in bars for kind, size in held.items() if size))
    colours = colours_of(kinds)
    values = [
        {**fields, "kind": kind, "MB": held.get(kind, 0) / 1e6, "order": order}
        for fields, held in bars
        for order, kind in enumerate(kinds)
    ]
    shown = tips(kind="kind", MB="MB:,.4~g", **heads)
    spec = stacked_bars(values, over, ("MB", "MB"), colour_by("kind", colours), shown, **more)
    lines = [
        [*(str(fields[name]) for name in heads), *(format_bytes(held.get(kind, 0)) for kind in kinds)]
        for fields, held in bars
    ]
    return Chart(spec, Table([*heads.values(), *kinds], lines, title), colours).html()


def choice(name: str, label: str, values: Sequence[Any], first: Any = None) -> dict[str, Any]:
    """Returns a Vega-Lite parameter that the reader sets by a menu. If it has only one value besides 'all', the page shows no menu."""
    chosen = {"name": name, "value": values[0] if first is None else first}
    if len({*values} - {"all"}) < 2:
        return chosen
    return {**chosen, "bind": {"input": "select", "options": [*values], "name": label}}


def page(title: str, lead: Sequence[str], sections: Sequence[str]) -> bytes:
    """Returns the HTML file of a page. ``lead`` has the sentences of the answer, which stand first."""
    answer = "".join(paragraph(sentence) for sentence in lead)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f'<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><div class="lead">{answer}</div>{"".join(sections)}'
        f"<script>{_bundle()}</script><script>{_DRAW}</script></body></html>\n"
    ).encode(errors="replace")


@functools.cache
def _bundle() -> str:
    """Returns Vega, Vega-Lite and Vega-Embed (BSD-3-Clause), as one script."""
    check_charts()
    import vl_convert

    # These would end the element that holds the script, or begin a comment there.
    return (
        vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
        .replace("</script", "<\\/script")
        .replace("<!--", "<\\!--")
    )
