"""Checks of a loader's options with a :class:`~salientpp.PPRSampler`."""

from __future__ import annotations

from torch_geometric.sampler import EdgeSamplerInput

from salientpp.engine.source import BatchSource
from salientpp.loader.values import Options, is_given
from salientpp.sampling.ppr import PPRSampler

#: Options that plan by the number of neighbours per hop, which a PPRSampler does not have, or that join batches.
_EXCLUDED = {
    "pad": "sizes of batches are computed from neighbours per hop",
    "topology_cache": "the lists to copy are chosen by neighbours per hop",
    "partial_aggregation": "sums need the edges of single hops",
    "memory": "a plan prices draws by neighbours per hop",
    "device_memory": "a plan prices draws by neighbours per hop",
    "join_logical_ranks": "the positions in ppr_index count inside one batch",
}


def check_ppr(source: BatchSource, options: Options) -> None:
    """Raises ValueError if the options of a loader with a PPRSampler exclude it."""
    sampler = source.sampler
    if not isinstance(sampler, PPRSampler):
        return
    for name, why in _EXCLUDED.items():
        if is_given(getattr(options, name)):
            raise ValueError(f"{name}={getattr(options, name)!r} excludes a PPRSampler: {why}; leave {name} out")
    if options.policy != "vip":
        raise ValueError(
            f"policy must be 'vip' with a PPRSampler, which knows the exact probability of each vertex, got {options.policy!r}; leave policy out"
        )
    if options.draw_block != 1:
        raise ValueError(
            f"draw_block={options.draw_block} has no meaning for a PPRSampler, which draws no random numbers; leave draw_block out"
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
