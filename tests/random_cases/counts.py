"""Law 4 on random jobs: the counted rows, bytes and seeds of whole epochs are those that the expected batches need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import reference
from random_cases.scene import Scene

from salientpp.ways.cache import Cache

#: Options by which a rank fetches other rows than those of its batches, or its loader decides itself how.
_CHANGING = {"partial_aggregation", "memory", "memory_allow", "cooperate"}


def wrong_counts(scene: Scene, loader: Any, num_seeds: int, batches: Sequence[Any]) -> list[str]:
    """Describes the differences between what a loader counts and what ``batches``, the expected ones of whole epochs, need."""
    job, stats = scene.job, loader.stats()
    found = []
    if (stats.batches, stats.seeds) != (len(batches), num_seeds):
        found.append(
            f"stats() counts {stats.batches} batches of {stats.seeds} seeds, expected {len(batches)} of {num_seeds}"
        )
    if _CHANGING & job.unfolded.keys() or not job.graph.is_directory or "own_rows" in job.arguments.get("columns", ""):
        return found
    is_fixed, own = not loader.looks_ahead, loader.engine.way(Cache)
    for type_ in job.graph.types:
        names = _columns(scene, type_)
        if not names:
            continue
        got = stats.by_type[type_]
        given = _ids_in(scene.given_cache, type_)
        chosen = _ids_in(own.cache, type_) if own is not None and is_fixed else set()
        if given & chosen:
            found.append(
                f"rows {sorted(given & chosen)[:5]} of type {type_} are in the given cache and in the loader's own"
            )
        here, cached, remote = _rows(scene, given | chosen, type_, batches)
        kept = got["cache"] + got["device"] + got["host"] - here  # rows of both tiers may be kept on the device
        is_right = (
            got["remote"] == remote and kept == cached if is_fixed else got["remote"] <= remote and kept >= cached
        )
        if not is_right or ("device_rows" not in job.arguments and got["host"] != here):
            found.append(f"rows of type {type_}: counted {got}, expected {here} here, {cached} cached, {remote} remote")
        row = _row_bytes(scene, type_, names)
        if row is not None and got["bytes_received"] != got["remote"] * row:
            found.append(
                f"bytes of type {type_}: counted {got['bytes_received']}, expected {got['remote']} rows of {row}"
            )
    return found


def _columns(scene: Scene, type_: Any) -> list[str]:
    """Names of the attributes of all sampled vertices of a type."""
    given = eval(scene.job.arguments.get("columns", "('x', 'tf')"))  # x alone also selects tf
    store = scene.whole if type_ is None else scene.whole[type_]
    return [name for name in (*given, *(["tf"] if given == ("x",) else ())) if name in store]


def _ids_in(cache: Any, type_: Any) -> set[int]:
    """Returns the ids of the rows of a type that a cache holds."""
    of_type = None if cache is None else cache.by_type.get(type_)
    return set() if of_type is None else {*of_type.members.ids.tolist()}


def _rows(scene: Scene, cached: set[int], type_: Any, batches: Sequence[Any]) -> tuple[int, int, int]:
    """Returns the rows of a type on this rank's host, in its caches, and of other hosts. The last count once in each batch, the others wherever they are."""
    begin, end = scene._range(scene.layout.parts_of_host(scene.rank), type_)
    is_here = scene.job.graph.parts == 1 or type_ in scene.data.replicated
    here = kept = remote = 0
    for batch in batches:
        store = batch if type_ is None else batch[type_]
        ids = store.n_id.tolist() if "n_id" in store else []
        away = [] if is_here else [i for i in ids if not begin <= i < end]
        here += len(ids) - len(away)
        kept += sum(i in cached for i in away)
        remote += len({*away} - cached)
    return here, kept, remote


def _row_bytes(scene: Scene, type_: Any, names: Sequence[str]) -> int | None:
    """Returns the bytes in which these attributes of a vertex travel; None for tables."""
    job, store = scene.job, scene.whole if type_ is None else scene.whole[type_]
    if "tf" in names:
        return None
    formats = {"x": job.graph.store_as} if job.graph.store_as else job.value("send_as", {})
    row = 0
    for name in names:
        like = store[name].new_zeros(1, *store[name].shape[1:])
        wide = np.zeros(like.numel(), np.float32)
        row += len(reference.narrow_row(wide, formats[name])) if name in formats else like.nbytes
    return row
