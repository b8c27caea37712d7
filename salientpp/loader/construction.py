"""Steps from the arguments of a loader to its engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch_geometric.sampler import EdgeSamplerInput

from salientpp.engine.agreement import Facts, check_facts
from salientpp.engine.basis import Basis
from salientpp.engine.engine import Engine
from salientpp.engine.source import BatchSource
from salientpp.engine.spans import VARIABLE
from salientpp.engine.way import Way
from salientpp.loader.announcement import Announced, following
from salientpp.loader.values import Options
from salientpp.ops import return_freed_memory
from salientpp.ranks.comm import DEFAULT_TIMEOUT, Comm
from salientpp.ranks.roll import go_astray
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.stored import is_remote
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.ways.cache import Cache, GivenCache
from salientpp.ways.device import DeviceRows
from salientpp.ways.lookahead.way import Lookahead
from salientpp.ways.read_ahead import ReadAhead
from salientpp.ways.sums.way import SumsOfRows

Out = TypeVar("Out")


def connect(
    data: Any, kinds: tuple[type, ...], kinds_in_words: str, options: Options, announced: Announced | None = None
) -> tuple[Comm, torch.device]:
    """Returns the communicator of the ranks that construct a loader together, and the device of its batches.

    An object in memory needs no other rank, so its group is this process alone.

    Args:
        kinds: types that ``data`` may have, besides a pair of stores.
        kinds_in_words: the same types, as the error names them.
        announced: what the storage ranks were told of the loader. Its mistake is raised here, after all ranks were told.

    Raises:
        ValueError, TypeError: the data has another type, or the device or time-out is wrong.
    """
    error: Exception | None = None
    try:
        device, timeout = options.checked_device(), options.checked_timeout()
    except Exception as raised:
        device, timeout, error = torch.device("cpu"), DEFAULT_TIMEOUT, raised
    try:
        if not isinstance(data, kinds) and not is_remote(data):
            error = TypeError(f"data must be {kinds_in_words}, got {type(data).__name__}")
            go_astray(error)  # the data names the ranks of a loader, so without it they are unknown
        elif isinstance(data, PartitionedGraph):
            # Storage ranks need no accelerator, so rows travel between host memories.
            over_host = data.num_storage_ranks > 0
            mistake = None if announced is None else announced.mistake
            group = options.process_group if mistake is None else None
            comm = Comm.create(group, timeout, device, error or mistake, over_host, data.job)
            if announced is not None:
                announced.follow(comm)
            if following.get() is not None:
                # Ranks that train may compute for an hour. If one is gone, its connections close; if one is stopped, the others say it.
                comm.be_patient()
            return comm, device
        if error is not None:
            raise error
        return Comm(None, timeout), device
    finally:
        error = None  # otherwise this frame and the traceback would reference each other


def prepare_together(comm: Comm, prepare: Callable[[], Any], action: str) -> tuple[Any, list[Facts]]:
    """Calls ``prepare``, as every rank does. Returns this rank's result, and the attribute ``facts`` of the results of all ranks.

    Collective: a mistake on one rank raises an error on every rank.

    Args:
        action: what the rank is about to do, for error messages.
    """
    with comm.together(action) as told:
        prepared = prepare()
        told.mine = vars(prepared.facts)
    everyone = [Facts(**theirs) for theirs in told.everyone]
    check_facts(everyone, comm.of)
    return prepared, everyone


def engine_together(basis: Basis, ways: Sequence[Way], action: str) -> Engine:
    """Makes the engine that produces a loader's batches. Collective; an error on this rank is reported to the others."""
    return reported(basis.comm, lambda: Engine(basis, ways), action)


def reported(comm: Comm, function: Callable[[], Out], action: str) -> Out:
    """Calls ``function`` on every rank and returns its result. If it fails on one rank, the others get an error too and do not wait for that rank."""
    with comm.reporting(action):
        return function()


def free_working_memory(data: Any) -> None:
    """Frees memory that only the construction of a loader needs, such as the transposed topology. Call it after a loader of ``data`` was made."""
    if isinstance(data, PartitionedGraph):
        if data.topology == "whole" and not data.is_hetero:
            data.graph.forget_transpose()  # as large as the topology
        data.stored_vip.release_pages()
        return_freed_memory()


def ways_of(options: Options, everyone: Sequence[Facts]) -> list[Way]:
    """Returns the methods that save bytes, such as a cache, that these options turn on. They stand in the order in which the engine applies them."""
    ways: list[Way] = []
    if options.read_ahead:  # first, because the other ways read rows too
        ways.append(ReadAhead(options.read_ahead))
    if options.device_rows:
        ways.append(DeviceRows(options.device_rows))
    if options.cache is not None:
        ways.append(GivenCache(options.cache))
    # One rank is enough, because fetching is collective.
    if options.replication_factor or any(facts.fills_cache for facts in everyone):
        how = options.replication_factor, options.policy, options.device_rows_cache
        ways.append(Lookahead(options.lookahead, *how) if options.lookahead else Cache(*how))
    if options.partial_aggregation is not None:
        ways.append(SumsOfRows(options.partial_aggregation, options.partial_aggregation_weight))
    return [*ways, *options.own_ways]


def facts_of(
    source: BatchSource,
    seeds: list[list[Any]],
    options: Options,
    settings: Mapping[str, Any],
    ranks_by_host: Sequence[int],
    generator: torch.Generator | None = None,
) -> Facts:
    """Returns the facts about this rank's loader that all ranks compare before they make it.

    Args:
        seeds: from :func:`salientpp.engine.shares.seeds_of_parts`.
        settings: values besides ``options`` that must be equal on all ranks.
        generator: draws the seed if the user gave none.
    """
    delivered = {column: source.delivered(column) for column in source.exchanged}
    seed = options.seed
    draws = source.sampler.settings() if isinstance(source.sampler, NeighborSampler) else {}
    return Facts(
        seed=int(torch.randint(2**62, (), generator=generator, device="cpu")) if seed is None else seed,
        seed_is_given=seed is not None,
        seeds=seeds,
        fills_cache=options.replication_factor > 0,
        traces=bool(os.environ.get(VARIABLE)),
        same={
            "logical_ranks": None,  # compared before the dataset, whose joined parts follow from it
            "dataset": source.fingerprint,
            "kind of seeds": "edges" if isinstance(source.seeds.inputs, EdgeSamplerInput) else "vertices",
            "input_nodes": source.seeds.split or "ids or a mask",
            # A neighbor_sampler of the user may hold all lists.
            "topology": "parts" if source.drawing.is_collective else "whole",
            **settings,
            "shared_draws": None,
            "time_window": None,
            "ppr": None,
            **{name: bool(value) if name == "replace" else value for name, value in draws.items()},
            **dict.fromkeys(options.facts(of_host=True)),  # the same names on all ranks
            **options.facts(of_host=bool(ranks_by_host) or source.drawing.is_collective or options.is_planned),
            # The ranks plan together, so options that each rank may choose otherwise are compared.
            "device_rows and its cache": [options.device_rows, options.device_rows_cache]
            if options.is_planned
            else None,
            # The ranks compute together which rows are needed most, if other ranks hold some of the lists.
            "device_rows": bool(options.device_rows) if source.drawing.is_collective else None,
            "columns": [
                [
                    *(word for word in column if word is not None),
                    str(rows.dtype),
                    list(rows.shape[1:]),
                    *([source.narrow[column].format] if column in source.narrow else []),
                ]
                for column, rows in delivered.items()
            ],
        },
    )
