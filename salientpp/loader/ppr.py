"""Checks that the options of a loader suit a :class:`~salientpp.PPRSampler`, whose batches are not random."""

from __future__ import annotations

from torch_geometric.sampler import EdgeSamplerInput

from salientpp.engine.source import BatchSource
from salientpp.loader.values import Options, is_given, named
from salientpp.sampling.ppr import PPRSampler

#: Options that plan by the number of neighbours per hop, which a PPRSampler does not have, or that join batches.
_EXCLUDED = {
    "pad": "sizes of batches are computed from neighbours per hop",
    "partial_aggregation": "sums need the edges of single hops",
    "memory": "a plan prices draws by neighbours per hop",
    "memory_device": "a plan prices draws by neighbours per hop",
    "logical_ranks_join": "the positions in ppr_index count inside one batch",
}


def check_ppr(source: BatchSource, options: Options) -> None:
    """Raises ValueError if an option cannot be combined with the loader's PPRSampler."""
    sampler = source.sampler
    if not isinstance(sampler, PPRSampler):
        return
    for name, why in _EXCLUDED.items():
        if is_given(getattr(options, name)):
            given = f"{named(name).rstrip('=')}={getattr(options, name)!r}"
            raise ValueError(f"{given} excludes a PPRSampler: {why}; leave it out")
    if options.policy != "vip":
        raise ValueError(
            f"policy must be 'vip' with a PPRSampler, which knows the exact probability of each vertex, got {options.policy!r}; leave policy out"
        )
    if options.shared_draws_block != 1:
        raise ValueError(
            f"shared_draws['block']={options.shared_draws_block} has no meaning for a PPRSampler, which draws no random numbers; leave 'block' out"
        )
    if not isinstance(source.seeds.inputs, EdgeSamplerInput):
        return
    if source.rounds_topology is not None:
        raise ValueError(
            "a PPRSampler over a topology in parts finds the scores of its seeds beforehand, so they must be vertices, got edges; use a NeighborLoader, or a "
            "directory with topology='whole'"
        )
    for name in ("replication_factor", "device_rows"):
        if getattr(options, name):
            raise ValueError(
                f"{name}={getattr(options, name)} with a PPRSampler needs seeds that are vertices, got edges; leave {name} out"
            )
