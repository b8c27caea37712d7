"""Describes a loader for ``salientpp report``: options, sizes, speed of links, and what caches of several sizes would save.

The description is the first entry of the file in which a rank records its spans (:mod:`salientpp.engine.spans`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from salientpp.engine.basis import Basis
from salientpp.loader.values import Options
from salientpp.ranks.comm import Comm
from salientpp.versions import own_version
from salientpp.ways.cache import Cache, scores_of
from salientpp.ways.read_ahead import files_of

#: Bytes of a message that measures a link, number of timed messages, and the largest number of ranks of which every pair is measured. The first message is
#: not timed, because some links let a burst pass.
_LINK_BYTES, _MESSAGES, _MOST_RANKS = 2**18, 3, 8

#: Number of cache sizes in a forecast.
_SIZES = 16


def description_of(loader: Any, options: Options) -> dict[str, Any]:
    """Describes the loader of this rank as JSON values, without communication."""
    engine = loader.engine
    source = engine.basis.source
    declared = options.declared
    given = {
        name: value for name, value in options.by_name.items() if name in declared and value != declared[name].default
    }
    cache = engine.way(Cache)
    return {
        "version": own_version(),
        "class": type(loader).__name__,
        "ranks": engine.basis.comm.size,
        "options": {name: value if isinstance(value, (bool, int, float, str)) else repr(value) for name, value in given.items()},
        "batch_size": loader.batch_size,
        "num_neighbors": getattr(getattr(source.sampler, "num_neighbors", None), "values", None),
        "num_workers": loader.num_workers,
        "depth": engine.basis.depth,
        "device": str(engine.basis.device),
        "batches_by_rank": list(loader.batches_by_rank) if loader._orders_itself else [],
        "row_bytes": {type_ or "": number for type_, number in source.row_bytes.items()},
        "parts": source.exchange.placement.num_parts,
        "own_rows": sum(tiers.home.num_rows for tiers in engine.producer.fetch.tiers.values()),
        "cached_rows": 0 if cache is None else len(cache.cache),
        "memory": loader.memory_used(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "reads_files": any(files_of(engine.basis, type_, tiers) for type_, tiers in engine.producer.fetch.tiers.items()),
    }  # fmt: skip


def measured_links(comm: Comm) -> list[list[float]]:
    """Measures how fast messages travel from one rank to another: entries [from, to, bytes per second]. Collective.

    One message travels at a time. Among more than 8 ranks, each rank sends to the next one, all at the same time.
    """
    size = comm.size
    turns = [[(a, b)] for a in range(size) for b in range(size) if a != b]
    if size > _MOST_RANKS:
        turns = [[(a, (a + 1) % size) for a in range(size)]]
    send, found = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device="cpu"), []
    for pairs in turns:
        sent = [_LINK_BYTES * ((comm.rank, rank) in pairs) for rank in range(size)]
        received = [_LINK_BYTES * ((rank, comm.rank) in pairs) for rank in range(size)]
        seconds = []
        for _ in range(1 + _MESSAGES):
            comm.gather_numbers([0])
            began = time.perf_counter()
            comm.all_to_all(send[: sum(sent)], sent, received).wait()
            seconds.append(time.perf_counter() - began)
        rate = _LINK_BYTES / max(median(seconds[1:]), 1e-9)
        found += [[sender, receiver, rate] for sender, receiver in pairs if receiver == comm.rank]
    everyone = comm.gather_facts({"links": found}, "measure its links")
    return [link for each in everyone for link in each["links"]]


def forecast_of_caches(basis: Basis) -> list[list[float]]:
    """Returns how many rows of other ranks an epoch needs with caches of several sizes: entries [rows cached, rows expected].

    The rows with the highest inclusion probabilities are cached. From two hops on, the probabilities are too high, and so is the number of rows. Collective
    if other ranks hold some neighbour lists. Empty if the graph has several types of vertices.
    """
    source, batches = basis.source, basis.epochs.order.num_batches
    if list(source.travelling) != [None]:
        return []
    probability = scores_of(basis, "vip")[None].to(torch.float64).clone()
    begin, end = source.books[None].range_of(source.exchange.part_id)
    probability[begin:end] = 0
    highest = probability.sort(descending=True).values
    left = (highest.sum() - highest.cumsum(0)).clamp(min=0) * batches
    most = int(highest.count_nonzero())
    sizes = sorted({0, *(int(most ** (i / _SIZES)) for i in range(1, _SIZES + 1))})
    return [[size, float(highest.sum() * batches if size == 0 else left[size - 1])] for size in sizes if size <= most]


def measured_together(basis: Basis, everyone_traces: bool) -> Mapping[str, Any]:
    """Returns the part of the description that ranks measure together. It is empty unless every rank records its spans. Collective."""
    if not everyone_traces or basis.comm.size == 1 or not basis.source.travelling:
        return {"links": [], "cache_forecast": []}
    return {"links": measured_links(basis.comm), "cache_forecast": forecast_of_caches(basis)}
