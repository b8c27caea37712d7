"""Divides the arguments of a data module among its sampler and its loaders."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


def divided(kwargs: Mapping[str, Any], names: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits ``kwargs`` into those with one of these names, and the others."""
    return {k: v for k, v in kwargs.items() if k in names}, {k: v for k, v in kwargs.items() if k not in names}


def split_draws(kwargs: dict[str, Any], names: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits ``kwargs`` between a sampler, which takes those in ``names``, and a loader.

    Both take ``shared_draws``: its entry 'vertices' goes to the sampler, the others, such as blocks, to the loader.
    """
    of_sampler, others = divided(kwargs, names)
    if "shared_draws" in of_sampler:
        draws = of_sampler.pop("shared_draws")
        draws = dict(draws) if isinstance(draws, Mapping) else {"vertices": draws}
        if "vertices" in draws:
            of_sampler["shared_draws"] = draws.pop("vertices")
        others["shared_draws"] = draws or None  # otherwise an evaluation without blocks would have those of training
    return of_sampler, others


def for_full_batches(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns ``kwargs`` for a loader whose only batch is the whole graph. A warning names each argument that has no effect then."""
    alone = {"batch_size": 1, "num_workers": 0, "pin_memory": False, "sampler": None, "batch_sampler": None}
    for option, value in alone.items():
        if kwargs.get(option, value) != value:
            warnings.warn(
                f"{option}={kwargs[option]} has no effect in '{name}' for loader='full', where the graph is one batch",
                UserWarning,
                stacklevel=4,
            )
    return {**divided(kwargs, set(alone))[1], "batch_size": 1, "num_workers": 0, "pin_memory": False}
