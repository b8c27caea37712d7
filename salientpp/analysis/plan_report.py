"""Shows the plan of a job: tables, a recommendation, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from salientpp.analysis.plan_result import ALIKE, Planned, Prediction
from salientpp.analysis.result import words_of_rows
from salientpp.display import exact_bytes, format_bytes, short
from salientpp.tables import simple_table
from salientpp.ways.planner.choices import Choice
from salientpp.ways.planner.result import CAUSES, COPIES, OTHERS, table_of_ways


def shown(planned: Planned) -> list[RenderableType]:
    """Returns everything that is printed of a plan."""
    lines: list[RenderableType] = [
        f"{sum(planned.num_vertices.values()):,} vertices, {planned.num_edges:,} edges, {words_of_rows(planned.row_bytes)}; "
        f"num_neighbors {list(planned.num_neighbors)}, batch size {planned.batch_size:,}, seeds {planned.seeds}"
    ]
    best = planned.recommended
    lines.append(_table_of_hosts(planned))
    others = [
        each
        for each in planned.predictions
        if (each.hosts, each.storage_hosts, each.budget, each.device_budget)
        == (best.hosts, best.storage_hosts, best.budget, best.device_budget)
    ]
    lines.append(_table_of_ways(sorted(others, key=attrgetter("seconds")), best))
    lines.append(f"Recommended: {_words(best, planned)}")
    if (shortest := min(each.seconds for each in planned.chosen)) < best.seconds:
        lines.append(
            f"The shortest epoch takes {short(shortest)} s. Of all within {ALIKE * 100:g} % of it, the recommended one needs the fewest hosts, then "
            f"{'the fewest storage hosts, then ' if _has_storage(planned) else ''}the least memory."
        )
    if planned.cheapest is not None:
        is_same = planned.cheapest is best
        lines.append("Cheapest: the same." if is_same else f"Cheapest: {_words(planned.cheapest, planned)}")
    return [*lines, *(f"Note: {note}" for note in planned.notes)]


def _table_of_hosts(planned: Planned) -> Table:
    """Returns a table with the best combination for each number of hosts and each amount of memory. The recommended line is bold."""
    columns: list[tuple[str, Any]] = [
        ("hosts", lambda each: str(each.hosts)),
        ("storage", lambda each: str(each.storage_hosts)),
        ("copies", lambda each: exact_bytes(each.budget)),
        ("device", lambda each: exact_bytes(each.device_budget)),
        ("best ways", attrgetter("ways")),
        ("seconds", lambda each: short(each.seconds)),
        ("network", lambda each: format_bytes(each.network_bytes)),
        ("per host", lambda each: format_bytes(each.host_bytes)),
        ("stored", lambda each: format_bytes(each.storage_bytes)),
        ("cost", lambda each: short(each.cost)),
    ]
    if not any(each.device_budget for each in planned.predictions):
        columns = [column for column in columns if column[0] != "device"]
    if not _has_storage(planned):
        columns = [column for column in columns if column[0] not in ("storage", "stored")]
    if planned.cheapest is None:
        columns.pop()
    headings = [heading for heading, _ in columns]
    table = simple_table(
        "Expected epoch for each number of hosts and each memory for copies of rows per host. network: bytes that all ranks receive. per host: all memory"
        + (
            ". storage: hosts that hold all rows and train nothing. stored: memory of each"
            if _has_storage(planned)
            else ""
        )
        + ("" if planned.cheapest is None else f". cost: {_epochs(planned)}"),
        headings,
        ["best ways"],
        headings.index("best ways"),
    )
    for each in planned.chosen:
        style = "bold" if each is planned.recommended else ""
        table.add_row(*(cell(each) for _, cell in columns), style=style)
    return table


def _table_of_ways(lines: Sequence[Prediction], best: Prediction) -> Table:
    """Returns a table with all combinations for the hosts and the memory of ``best``."""
    device = f" and {exact_bytes(best.device_budget)} of the device" if best.device_budget else ""
    return table_of_ways(
        f"{_hosts(best)}, {exact_bytes(best.budget)} for copies{device}: each combination. loading: time that loading adds to training. waiting: "
        "for the network or the device",
        [(each.ways, each, each.network_bytes, sum(each.memory.get(name, 0) for name in COPIES)) for each in lines],
        lines.index(best),
    )


def _words(each: Prediction, planned: Planned) -> str:
    """Describes a recommended prediction: hosts and methods, time and cost, loader options, then memory by purpose."""
    memory = ", ".join(
        f"{words} {format_bytes(each.memory[name])}"
        for name, words in {**OTHERS, **COPIES}.items()
        if name in each.memory
    )
    device = f", and {format_bytes(each.device_bytes)} of each device" if each.device_bytes else ""
    cost = "" if each.cost is None else f", and {_epochs(planned)} costs {short(each.cost)}"
    budget: dict[str, Any] = {"host": exact_bytes(each.budget)}
    budget |= {"device": exact_bytes(each.device_budget)} if each.device_budget else {}
    budget |= {"allow": ["sums"]} if "partial_aggregation" in each.options else {}
    given = budget if len(budget) > 1 else budget["host"]
    options = [f"memory={given!r}".replace("'", '"')]
    chosen = Choice.OPTIONS.values()
    options += [f"{name}={value!r}" for name, value in each.options.items() if name not in chosen]
    storage = ""
    if each.storage_hosts:
        storage = (
            f" A storage host is busy for {short(each.storage_seconds)} s of an epoch, and needs {format_bytes(each.storage_bytes)} of memory. Ranks call "
            f"salientpp.load(..., storage_ranks={each.storage_hosts})."
        )
    return (
        f"{_hosts(each)}, {each.ways}. An epoch takes about {short(each.seconds)} s{cost}. Options of the loader: {', '.join(options)}. "
        f"Memory of a host: {memory}{device}.{storage}"
    )


def _epochs(planned: Planned) -> str:
    return "an epoch" if planned.epochs == 1 else f"a run of {planned.epochs:,} epochs"


def _hosts(each: Prediction) -> str:
    hosts = "1 host" if each.hosts == 1 else f"{each.hosts} hosts"
    storage = "1 storage host" if each.storage_hosts == 1 else f"{each.storage_hosts} storage hosts"
    return f"{hosts} and {storage}" if each.storage_hosts else hosts


def _has_storage(planned: Planned) -> bool:
    return any(each.storage_hosts for each in planned.predictions)


def draw(planned: Planned, figure: Any) -> None:
    """Draws the epoch's seconds over hosts and memory, stacked by cause, in a figure of matplotlib."""
    chosen = planned.chosen
    figure.set_size_inches(max(5.0, 1.5 + 0.7 * len(chosen)), 4.6)
    axes: Any = figure.subplots()
    places, place, before = [], 0.0, (chosen[0].hosts, chosen[0].storage_hosts)
    for each in chosen:
        hosts = each.hosts, each.storage_hosts
        place += 1.0 if hosts == before else 1.6  # a gap between numbers of hosts
        places.append(place)
        before = hosts
    bottom = [0.0] * len(chosen)
    for cause, colour in CAUSES.items():
        heights = [getattr(each, cause) for each in chosen]
        axes.bar(places, heights, 0.8, bottom=bottom, label=cause, color=colour)
        bottom = [low + height for low, height in zip(bottom, heights)]
    hosts_of = [f"{each.hosts}+{each.storage_hosts}" if each.storage_hosts else str(each.hosts) for each in chosen]
    labels = [f"{hosts} × {exact_bytes(each.budget)}" for hosts, each in zip(hosts_of, chosen)]
    if any(each.device_budget for each in chosen):
        labels = [f"{label}, {exact_bytes(each.device_budget)}" for label, each in zip(labels, chosen)]
    axes.set_xticks(places, labels, rotation=45, ha="right")
    best = chosen.index(planned.recommended)
    axes.annotate(
        "recommended", (places[best], bottom[best]), (0, 4), textcoords="offset points", ha="center", fontsize="small"
    )
    axes.set(xlabel="hosts × memory for copies per host", ylabel="seconds of an epoch")
    axes.legend(fontsize="small")
    name = planned.dataset.encode(errors="replace").decode()  # a file name need not be valid text
    axes.margins(y=0.1)
    figure.suptitle(f"{name}\nbatch size {planned.batch_size}", parse_math=False, fontsize="small")
