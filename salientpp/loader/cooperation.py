"""Checks of a loader whose batches the ranks of a host compute together (``cooperate``), and the sizes of these batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.utils.data

from salientpp.engine.source import BatchSource
from salientpp.loader.values import Options
from salientpp.ranks.placement import Placement


def check_cooperation(
    source: BatchSource, options: Options, ranks_by_host: Sequence[int], loader: torch.utils.data.DataLoader
) -> None:
    """Raises ValueError if the batches of this loader cannot be divided among the ranks of a host.

    Args:
        ranks_by_host: as in :class:`~salientpp.engine.basis.Basis`.
        loader: has the arguments of torch's ``DataLoader``.
    """
    if options.cooperate is None:
        return
    why = source.drawing.why_whole()
    if "sums" in options.memory_allow:
        why = "memory['allow']=('sums',) permits a plan to send sums instead of rows; leave 'sums' out"
    if why is not None:
        raise ValueError(
            f"cooperate={options.cooperate!r} divides the vertices and edges of each batch among the ranks of a host, but {why}"
        )
    for name, default in (("batch_size", 1), ("drop_last", False)):
        if options.cooperate_batches is not None and getattr(loader, name) != default:
            raise ValueError(
                f"cooperate['batches']={options.cooperate_batches} divides the seeds of a host into equal batches, so it excludes "
                f"{name}={getattr(loader, name)}; leave one of them out"
            )


def seeds_per_batch(
    loader: torch.utils.data.DataLoader,
    options: Options,
    num_seeds: int,
    placement: Placement,
    ranks_by_host: Sequence[int],
) -> int:
    """Returns the mean number of seeds of a batch, rounded up.

    Args:
        num_seeds: number of seeds that this rank's logical ranks draw from.
        loader, ranks_by_host: see :func:`check_cooperation`.
    """
    batch_size = loader.batch_size
    if batch_size is None:
        try:
            number = len(loader.batch_sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):  # Python's ways to say that a length is unknown
            number = num_seeds
        batch_size = max(1, -(-num_seeds // max(1, number)))
    if options.cooperate is None:
        return batch_size
    if options.cooperate_batches is None:
        return batch_size * (ranks_by_host[0] if ranks_by_host else 1)
    # Logical ranks of other hosts may draw from the seeds of this host's part too.
    sharing = max(len(placement.logical_ranks), placement.logical_ranks_per_unit)
    return max(1, -(-num_seeds // (options.cooperate_batches * sharing)))


def settings_of_batches(settings: Mapping[str, Any], options: Options, seeds: int) -> dict[str, Any]:
    """Returns the settings that a saved state records.

    With ``cooperate``, ``batch_size`` becomes ``seeds``, the seeds of a host's batch. A host with another number of ranks can then load the state, if its
    batches have as many seeds.
    """
    found = dict(settings)
    if options.cooperate is not None and options.cooperate_batches is None:
        found["batch_size"] = seeds
    return found
