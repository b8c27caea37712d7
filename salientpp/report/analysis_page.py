"""Makes the page of an analysis: its answer, the rows that each cache leaves, and the tables that the command prints."""

from __future__ import annotations

from typing import Any

from salientpp.analysis.report import shown
from salientpp.analysis.result import Analysis
from salientpp.analysis.verdict import verdict
from salientpp.display import Table
from salientpp.report.page import (
    Chart,
    choice,
    colour_by,
    colours_of,
    page,
    section,
    shown_blocks,
    stacked_bars,
    tips,
)

#: What the first chart can show: words of the choice -> field.
MEASURES = {"share of the rows without a cache": "share", "rows an epoch": "rows", "MB an epoch": "MB"}


def analysis_page(analysis: Analysis) -> bytes:
    """Returns the page. It shows the numbers of ``analysis.to_dict()``."""
    found = analysis.to_dict()
    volumes = [_point(each) for each in found["results"]]
    answer = verdict(analysis)
    title = f"Rows that {found['parts']} parts of {found['dataset']} fetch"
    sections = [section("Rows that a cache leaves to fetch", _over_caches(volumes))]
    if any(each["by_rank"] for each in volumes):
        sections.append(section("Rows of each rank", _by_rank(volumes)))
    if found["device_rows"]:
        sections.append(section("Rows that a batch copies to the device", _to_device(found["device_rows"])))
    # The answer stands first already.
    tables = [block for block in shown(analysis, details=True) if block not in answer]
    return page(title, answer, [*sections, section("Tables", *shown_blocks(tables))])


def _point(volume: dict[str, Any]) -> dict[str, Any]:
    """Returns one result as a point of the charts. ``rows`` are the counted rows, or the expected ones if none were counted."""
    counted, without = volume["remote_rows_per_epoch"], volume["rows_without_cache"]
    rows = volume["predicted_rows_per_epoch"] if counted is None else counted
    policy = volume["policy"] if volume["way"] == "cache" else f"{volume['policy']}, {volume['way']}"
    return {
        "num_neighbors": ", ".join(map(str, volume["num_neighbors"])),
        "policy": policy,
        "alpha": volume["replication_factor"],
        "type": volume["vertex_type"] or "all",
        "rows": rows,
        "share": rows / without if without and rows is not None else None,
        "MB": rows * volume["row_bytes"] / 1e6 if rows is not None else None,
        "cache": volume["cache_bytes"] / 1e6,
        "by_rank": volume["remote_rows_per_rank"] or (),
    }


def _names(volumes: list[dict[str, Any]], field: str) -> list[Any]:
    return list(dict.fromkeys(each[field] for each in volumes))


def _choices(values: list[dict[str, Any]], **fields: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns menus of a chart, one for each field that has several values, and the filters that show only the chosen values.

    ``fields``: name -> label.
    """
    several = {field: names for field in fields if len(names := _names(values, field)) > 1}
    params = [choice(f"the_{field}", fields[field], names) for field, names in several.items()]
    return params, [{"filter": f"datum.{field} == the_{field}"} for field in several]


def _over_caches(volumes: list[dict[str, Any]]) -> str:
    """Draws a line for each policy. The reader chooses the policy, what is counted, num_neighbors and the type of vertices."""
    values = [
        {name: value for name, value in each.items() if name != "by_rank"}
        for each in volumes
        if each["rows"] is not None
    ]
    policies = _names(values, "policy")
    colours = colours_of(policies)
    params, filters = _choices(values, num_neighbors="num_neighbors", type="type")
    words = [*MEASURES]
    by_measure = f"measure == '{words[0]}' ? datum.share : measure == '{words[1]}' ? datum.rows : datum.MB"
    spec = {
        "data": {"values": values},
        "params": [choice("measure", "show", words), choice("policies", "policy", ["all", *policies]), *params],
        "transform": [
            *filters,
            {"filter": "policies == 'all' || datum.policy == policies"},
            {"calculate": by_measure, "as": "amount"},
        ],
        "height": 320,
        "mark": {"type": "line", "point": {"size": 60, "filled": True}},
        "encoding": {
            "x": {"field": "alpha", "type": "quantitative", "title": "size of the cache, α", "scale": {"type": "sqrt"}},
            "y": {"field": "amount", "type": "quantitative", "title": None, "axis": {"format": ",.4~g"}},
            "color": colour_by("policy", colours),
            "tooltip": tips(
                policy="policy", alpha="α", rows="rows:,.0f", share="share:.1%", MB="MB:,.4~g", cache="MB of the cache:,.4~g", type="type"
            ),
        },
    }  # fmt: skip
    heads = ["policy", "num_neighbors", "type", "α", "MB of the cache", "rows", "share", "MB"]
    lines = [
        [
            each["policy"], each["num_neighbors"], each["type"], f"{each['alpha']:g}", f"{each['cache']:,.4g}", f"{each['rows']:,.0f}",
            "–" if each["share"] is None else f"{each['share']:.4f}", f"{each['MB']:,.4g}",
        ]
        for each in values
    ]  # fmt: skip
    caption = "A cache of size α holds α N / K rows of other machines. α is drawn on a scale of square roots."
    return Chart(spec, Table(heads, lines), colours, caption).html()


def _by_rank(volumes: list[dict[str, Any]]) -> str:
    """Draws the rows of each rank with one cache, which the reader chooses."""
    values = [
        {"rank": rank, "rows": rows, "order": 0, "which": "rows"}
        | {name: each[name] for name in ("policy", "alpha", "num_neighbors", "type")}
        for each in volumes
        for rank, rows in enumerate(each["by_rank"])
    ]
    params, filters = _choices(values, policy="policy", alpha="α", num_neighbors="num_neighbors", type="type")
    colours = {"rows": "#4c78a8"}
    shown = tips(rank="rank", policy="policy", alpha="α", rows="rows:,.0f")
    spec = stacked_bars(
        values, "rank", ("rows", "rows an epoch"), colour_by("which", colours), shown, params=params, transform=filters
    )
    lines = [
        [
            each["policy"],
            each["num_neighbors"],
            each["type"],
            f"{each['alpha']:g}",
            str(each["rank"]),
            f"{each['rows']:,.0f}",
        ]
        for each in values
    ]
    return Chart(spec, Table(["policy", "num_neighbors", "type", "α", "rank", "rows"], lines), {}).html()


def _to_device(device_rows: list[dict[str, Any]]) -> str:
    """Draws the rows that a batch copies, over the share of the part that the device holds."""
    orders = {"in VIP order": "rows_per_batch_vip_order", "in the original order": "rows_per_batch_original_order"}
    values = [
        {"num_neighbors": ", ".join(map(str, each["num_neighbors"])), "beta": each["device_fraction"], "kept": name}
        | {"rows": each[field], "MB": each["device_bytes"] / 1e6}
        for each in device_rows
        for name, field in orders.items()
    ]
    params, filters = _choices(values, num_neighbors="num_neighbors")
    colours = dict(zip(orders, ("#3aa6a6", "#7a8aa0")))
    spec = {
        "data": {"values": values},
        "params": params,
        "transform": filters,
        "height": 240,
        "mark": {"type": "line", "point": {"size": 60, "filled": True}},
        "encoding": {
            "x": {"field": "beta", "type": "quantitative", "title": "share of its part that a device holds, β"},
            "y": {"field": "rows", "type": "quantitative", "title": "rows a batch", "axis": {"format": "~s"}},
            "color": colour_by("kept", colours),
            "tooltip": tips(kept="rows are kept", beta="β", rows="rows:,.1f", MB="MB of the device:,.4~g"),
        },
    }
    lines = [
        [each["kept"], each["num_neighbors"], f"{each['beta']:g}", f"{each['rows']:,.1f}", f"{each['MB']:,.4g}"]
        for each in values
    ]
    return Chart(spec, Table(["rows are kept", "num_neighbors", "β", "rows a batch", "MB"], lines), colours).html()
