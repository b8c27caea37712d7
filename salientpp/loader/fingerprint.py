"""Fingerprints: the values that a saved state and the loader that loads it must have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch.utils.data

from salientpp.engine.shares import SeedsByPart
from salientpp.engine.source import BatchSource, sources_in
from salientpp.engine.state import data_digest, inputs_digest
from salientpp.loader.values import Options
from salientpp.sampling.bidirectional_sampler import BidirectionalNeighborSampler
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.store.directory.opened import PartitionedGraph

#: Torch's samplers whose order can be reproduced. Lightning puts them into a loader, and then asks the loader for its state.
_KNOWN_ORDERS = (torch.utils.data.SequentialSampler, torch.utils.data.DistributedSampler)


def order_is_known(loader: torch.utils.data.DataLoader) -> bool:
    """Returns True if torch's ``sampler`` of the loader gives the same order again after a restart."""
    return type(loader.batch_sampler) is torch.utils.data.BatchSampler and type(loader.sampler) in _KNOWN_ORDERS


def settings_of(sampler: Any) -> list[Any]:
    """Returns the values, apart from the epoch, that determine the order of a torch sampler."""
    # The rank is left out because Lightning keeps rank 0's state for all ranks.
    fields = ("num_replicas", "shuffle", "seed", "drop_last")
    values = [getattr(sampler, name) for name in fields if hasattr(sampler, name)]
    return [type(sampler).__name__, len(sampler), *values]


def fingerprint_of(
    data: Any, source: BatchSource, seeds: SeedsByPart, options: Options, settings: dict[str, Any]
) -> dict[str, Any]:
    """Returns the plain values on which batches depend. A state is loaded only if its values are equal. ``seeds`` are the seeds of all ranks."""
    sampler = source.sampler
    ours = isinstance(sampler, NeighborSampler)
    partitioned, own = isinstance(data, PartitionedGraph), sources_in(options.columns)
    attributes = {name: settings.pop(name) for name in ("time_attr", "weight_attr")}
    return {
        "dataset": data.fingerprint if partitioned else data_digest(data, sampler.topology.arrays() if ours else []),
        "input_nodes": _seeds_digest(source, seeds) if partitioned else inputs_digest(source.seeds.inputs),
        **({} if ours else {"neighbor_sampler": type(sampler).__name__}),
        **(sampler.settings() if ours or isinstance(sampler, BidirectionalNeighborSampler) else {}),
        **settings,
        **options.fingerprint(),
        **({"columns": _describe(source, own, 1 if partitioned else 0)} if own else {}),
        # The digest of an object in memory covers times and weights. A directory may have several such attributes, so their names count.
        **{name: value for name, value in attributes.items() if partitioned and value},
    }


def _seeds_digest(source: BatchSource, seeds: SeedsByPart) -> str:
    """Returns a digest of the seeds of all ranks together. It is the same on every rank and for every number of ranks."""
    type_ = source.seeds.inputs.input_type
    whole = hashlib.sha256(json.dumps(sorted(seeds.items())).encode()).hexdigest()[:16]
    return whole if type_ is None else f"{type_}: {whole}"


def _describe(source: BatchSource, names: Iterable[Any], first: int) -> list[Any]:
    """Returns [name, dtype, shape] of each attribute. The shape leaves out the first ``first`` dimensions, such as the number of rows."""
    rows = {name: source.delivered(name if isinstance(name, tuple) else (None, name)) for name in names}
    return [[str(name), str(of_name.dtype), list(of_name.shape[first:])] for name, of_name in rows.items()]
