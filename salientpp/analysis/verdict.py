"""The answer of an analysis in a few lines: what a cache would save, and how much there is to save."""

from __future__ import annotations

from typing import Any

from salientpp.analysis.caches import CACHE
from salientpp.analysis.result import Analysis, Volume, words_of_rows
from salientpp.display import exact_bytes, format_bytes, round_up
from salientpp.ways.planner.choices import index_bytes_of

#: Fraction of the traffic that the recommended cache should save. A cache that saves less than the second fraction hardly helps.
_ENOUGH, _HARDLY = 0.5, 0.05


#: Results of caches: (way, policy) -> α -> the results of each vertex type.
StaticCaches = dict[tuple[str, str], dict[float, list[Volume]]]


def static_caches(analysis: Analysis, numbers: tuple[Any, ...]) -> StaticCaches:
    """Returns the results of static caches: by (way, policy) and replication factor, a result for each vertex type."""
    found: StaticCaches = {}
    for volume in analysis.of(num_neighbors=numbers):
        if volume.ahead is None and volume.summed is None:
            found.setdefault((volume.way, volume.policy), {}).setdefault(volume.replication_factor, []).append(volume)
    return found


def verdict(analysis: Analysis) -> list[str]:
    """Returns the answer as lines of text: what a cache saves, the traffic without it, the size of the graph, and what the graph lacks.

    The cache is the smallest that saves half of the traffic, or else the largest.
    """
    lines = []
    for numbers in analysis.num_neighbors:
        label = f"num_neighbors {list(numbers)}: " if len(analysis.num_neighbors) > 1 else ""
        caches = static_caches(analysis, numbers)
        texts = _savings(analysis, caches), _traffic(analysis, caches), _from_storage(analysis, caches)
        lines += [f"{label}{line}" for line in texts if line]
    words = words_of_rows(analysis.row_bytes) or "no features"
    sent = f" sent as {', '.join(analysis.send_as.values())}" if analysis.send_as else ""
    graph = f"{sum(analysis.num_vertices.values()):,} vertices, {analysis.num_edges:,} edges"
    lines.append(f"{graph}, edge cut {analysis.edge_cut_fraction:.1%}, {words}{sent}")
    return [*lines, *_missing(analysis)]


def _missing(analysis: Analysis) -> list[str]:
    """Returns a line that says that the graph lacks a training split or features, and how to add them. The list is empty if it has both."""
    is_converted = analysis.dataset.startswith("converted:")
    facts, names = [], []
    if not analysis.has_split:
        facts.append("no training split, so all vertices are seeds")
        names.append("train=" if is_converted else "train_mask")
    if not analysis.has_features:
        facts.append("no features, so no bytes are counted and no memory= is advised")
        names.append("x=" if is_converted else "x")
    where = "give {} to `salientpp convert`" if is_converted else "add {} to the graph"
    return [f"Note: {'; '.join(facts)}. To change this, {where.format(' and '.join(names))}."] if facts else []


def advised_memory(analysis: Analysis, caches: StaticCaches) -> str:
    """Returns the amount to try as ``memory``: enough for the recommended cache. Empty if no cache is recommended."""
    found = _recommended(analysis, caches)
    if found is None or not analysis.has_features:
        return ""
    alpha, saved = found
    travelling = [number for type_, number in analysis.num_vertices.items() if type_ not in analysis.replicated]
    size = caches[CACHE, "vip"][alpha][0].cache_bytes  # of all types
    size += sum(index_bytes_of(each, analysis.parts) for each in travelling)
    return "" if saved < _HARDLY else exact_bytes(round_up(size))


def _recommended(analysis: Analysis, caches: StaticCaches) -> tuple[float, float] | None:
    """Returns α of the smallest cache that saves half of the traffic, or else of the largest, and its savings. None: there is nothing to save."""
    own = {alpha: of_types for alpha, of_types in caches[CACHE, "vip"].items() if alpha > 0}
    if not own or not any(each.rows_without_cache for of_types in own.values() for each in of_types):
        return None
    saved = {alpha: 1 - analysis.share(of_types) for alpha, of_types in own.items()}
    alpha = next((alpha for alpha, share in saved.items() if share >= _ENOUGH), max(saved))
    return alpha, saved[alpha]


def _savings(analysis: Analysis, caches: StaticCaches) -> str:
    found = _recommended(analysis, caches)
    if found is None:
        return ""
    alpha, saved = found
    size = caches[CACHE, "vip"][alpha][0].cache_bytes  # of all types
    whole = sum(number * analysis.row_bytes[type_] for type_, number in analysis.num_vertices.items())
    cache = f"cache with α = {alpha:g}"
    if whole:
        cache = f"cache of {format_bytes(size)} per {analysis.machine} ({100 * size / whole:.3g}% of the features)"
    if saved < _HARDLY:
        return f"A cache hardly helps: a VIP {cache} saves {saved:.0%} of the traffic."
    verb = "saves" if analysis.epochs else "is expected to save"
    others = [
        f"{policy} saves {1 - analysis.share(caches[CACHE, policy][alpha]):.0%}"
        for policy in ("degree", "random")
        if (CACHE, policy) in caches
    ]
    memory = advised_memory(analysis, caches)
    advice = f' Try memory="{memory}".' if memory else ""
    return f"A VIP {cache} {verb} {saved:.0%} of the traffic{'; ' * bool(others)}{', '.join(others)}.{advice}"


def _traffic(analysis: Analysis, caches: StaticCaches) -> str:
    """Says how many rows and bytes the hosts fetch per epoch without a cache."""
    volumes = next(iter(caches[CACHE, "vip"].values()))
    rows = sum(volume.rows_without_cache for volume in volumes)
    num_bytes = sum(volume.rows_without_cache * volume.row_bytes for volume in volumes)
    if not rows:
        return f"No cache is needed: no {analysis.machine} fetches rows from another."
    machines = f"{len(analysis.ranks_by_host)} {analysis.machine}s"
    step = num_bytes / max(1, analysis.steps_per_epoch)
    size = f": {format_bytes(num_bytes)}, {format_bytes(step)} a step" if num_bytes else ""
    will = "fetch" if analysis.epochs else "are expected to fetch"
    return f"Without a cache, {machines} {will} {rows:,.0f} rows per epoch{size}."


def _from_storage(analysis: Analysis, caches: StaticCaches) -> str:
    """Says what a batch of a rank fetches, and what a storage host sends, with the recommended cache and without it. Empty without storage hosts."""
    if not analysis.storage_hosts:
        return ""
    own, found = caches[CACHE, "vip"], _recommended(analysis, caches)
    steps, ranks = max(1, analysis.steps_per_epoch), sum(analysis.ranks_by_host)

    def words(rows: float, num_bytes: float) -> str:
        size = f" ({format_bytes(num_bytes / ranks / steps)})" if num_bytes else ""
        sends = (
            f"{format_bytes(num_bytes / analysis.storage_hosts)}"
            if num_bytes
            else f"{rows / analysis.storage_hosts:,.0f} rows"
        )
        return f"{rows / ranks / steps:,.0f} rows{size} and a storage host sends {sends} an epoch"

    first = next(iter(own.values()))
    bare = [each.rows_without_cache for each in first]
    text = f"The {ranks} ranks that train hold no rows. A batch fetches {words(sum(bare), sum(rows * each.row_bytes for rows, each in zip(bare, first)))}"
    if found is not None:
        left = own[found[0]]
        rows = [each.rows or 0.0 for each in left]
        text += f"; with the cache {words(sum(rows), sum(number * each.row_bytes for number, each in zip(rows, left)))}"
    return f"{text}, on average."
