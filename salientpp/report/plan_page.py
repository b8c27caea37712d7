"""Makes the page of a plan: the recommendation, the epoch of each combination, and the tables that the command prints."""

from __future__ import annotations

from typing import Any

from salientpp.analysis.plan_report import CAUSES, shown
from salientpp.analysis.plan_result import Planned
from salientpp.display import Table, exact_bytes, format_bytes, short
from salientpp.report.page import (
    Chart,
    choice,
    colour_by,
    memory_chart,
    page,
    section,
    shown_blocks,
    stacked_bars,
    tips,
)

BEST = "the best of each memory"


def plan_page(planned: Planned) -> bytes:
    """Returns the page. It shows the numbers of ``planned.to_dict()``."""
    found = planned.to_dict()
    predictions = [_point(each) for each in found["predictions"]]
    best = found["recommended"]
    blocks = shown(planned)
    texts = [block for block in blocks if isinstance(block, str)]
    told = [text for text in texts if text.startswith(("Recommended: ", "Cheapest: "))]
    notes = [text for text in texts if text.startswith("Note: ")]
    answer = [*told, _savings(planned), *notes]
    sections = [
        section("Expected epoch", _epochs(predictions, best)),
        section("Memory of a host", _memory(predictions, best)),
        section("Tables", *shown_blocks([block for block in blocks if block not in told + notes])),
    ]
    return page(f"Plan for {found['dataset']}", answer, sections)


def _savings(planned: Planned) -> str:
    """Says how much memory the recommended combination needs, and what it saves against the smallest memory."""
    best = planned.recommended
    needed = f"A host needs {format_bytes(best.host_bytes)} of memory for it."
    least = min(
        (each for each in planned.chosen if (each.hosts, each.storage_hosts) == (best.hosts, best.storage_hosts)),
        key=lambda each: (each.budget + each.device_budget, each.seconds),
    )
    if least is best:
        return f"{needed} Of the given memories, it is the smallest."
    memory = f"With {exact_bytes(least.budget)} for copies" if least.budget else "Without memory for copies"
    memory += f" and {exact_bytes(least.device_budget)} of each device" if least.device_budget else ""
    saved = 1 - best.seconds / least.seconds if least.seconds else 0.0
    return (
        f"{needed} {memory}, the smallest of the given memories, a host needs {format_bytes(least.host_bytes)}, "
        f"and an epoch takes about {short(least.seconds)} s: the recommended memory saves {saved:.0%} of it."
    )


def _point(prediction: dict[str, Any]) -> dict[str, Any]:
    """Returns a prediction as a bar of the charts. ``copies`` is the text of its memory, which names the bar."""
    device = prediction["device_budget"]
    memory = exact_bytes(prediction["budget"]) + (f", device {exact_bytes(device)}" if device else "")
    storage = prediction["storage_hosts"]
    hosts = f"{prediction['hosts']} and {storage} that store" if storage else prediction["hosts"]
    return {**prediction, "hosts": hosts, "copies": memory}


def _choices(predictions: list[dict[str, Any]], best: int) -> dict[str, Any]:
    """Returns the settings that both bar charts have: menus for hosts and combination, and the filters that show only the chosen bars."""
    hosts = list(dict.fromkeys(each["hosts"] for each in predictions))
    ways = [BEST, *dict.fromkeys(each["ways"] for each in predictions)]
    params = [choice("the_hosts", "hosts", hosts, predictions[best]["hosts"]), choice("the_ways", "ways", ways)]
    chosen = f"the_ways == '{BEST}' ? datum.chosen : datum.ways == the_ways"
    filters = [{"filter": "datum.hosts == the_hosts"}, {"filter": chosen}]
    return {"params": params, "transform": filters, "title_of_bars": None}


def _epochs(predictions: list[dict[str, Any]], best: int) -> str:
    """Draws the seconds of an epoch by cause, for each memory."""
    names = ("hosts", "copies", "ways", "chosen", "cost")
    values = [
        {name: each[name] for name in names}
        | {
            "cause": cause,
            "order": order,
            "seconds": max(0.0, round(each[cause], 9)),
            "all": each["seconds"],
            "MB": each["network_bytes"] / 1e6,
        }
        for each in predictions
        for order, cause in enumerate(CAUSES)
    ]
    has_price = any(each["cost"] is not None for each in predictions)
    titles = {
        "cause": "cause",
        "seconds": "seconds:,.4~g",
        "all": "epoch, s:,.4~g",
        "ways": "ways",
        "MB": "network, MB:,.4~g",
    }
    titles |= {"hosts": "hosts", "copies": "for copies"} | ({"cost": "cost:,.4~g"} if has_price else {})
    colour = colour_by("cause", CAUSES)
    length = ("seconds", "seconds of an epoch")
    spec = stacked_bars(values, "copies", length, colour, tips(**titles), **_choices(predictions, best))
    heads = ["ways", "hosts", "for copies", "seconds", *CAUSES, "network", *(["cost"] if has_price else [])]
    lines = [
        [
            each["ways"], str(each["hosts"]), each["copies"], *(f"{each[name]:,.4g}" for name in ("seconds", *CAUSES)),
            format_bytes(each["network_bytes"]), *([f"{each['cost']:,.4g}"] if has_price else []),
        ]
        for each in predictions
    ]  # fmt: skip
    caption = (
        "`loading` is the time that loading adds to training, and `waiting` is waiting for the network or the device."
    )
    return Chart(spec, Table(heads, lines), CAUSES, caption).html()


def _memory(predictions: list[dict[str, Any]], best: int) -> str:
    """Draws the memory of the host that needs the most, by kind."""
    names = ("hosts", "copies", "ways", "chosen")
    bars = [({name: each[name] for name in names}, each["memory"]) for each in predictions]
    heads = {"ways": "ways", "hosts": "hosts", "copies": "for copies"}
    return memory_chart(bars, "copies", heads, **_choices(predictions, best))
