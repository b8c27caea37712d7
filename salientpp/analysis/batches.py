"""The batches that an analysis counts: their seeds, their draws, and the number of epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch_geometric.sampler import NegativeSampling

from salientpp.store.directory.opened import PartitionedGraph
from salientpp.vip.inclusion import check_batch_size, check_fanouts

#: Upper bound on counted epochs.
MOST_EPOCHS = 1_000_000


@dataclass(frozen=True)
class Batches:
    """The batches of a job, described by loader arguments of the same names.

    Attributes:
        num_neighbors, batch_size, seeds: None stands for the values that the dataset directory was ordered for. For a graph in memory, it stands for the
            fanouts 15, 10, 5, for the batch size 1024, and for 'train', or for 'all' without a training split. ``seeds`` is the name of a split or 'all'. With
            several vertex types it is the value of ``input_nodes``, and with ``link`` the value of ``edge_label_index``.
        epochs: number of epochs to count, from the first one on.
        seed: seed of the batches, and of the partition of a graph in memory.
        link: True if seeds are edges.
        shared_draws, draw_block, replace, disjoint, time_attr, temporal_strategy, time_window, weight_attr, neg_sampling, edge_label_time: options of the
            draws.
    """

    num_neighbors: Any = None
    batch_size: int | None = None
    seeds: Any = None
    epochs: int = 10
    seed: int = 0
    link: bool = False
    shared_draws: str | None = None
    draw_block: int = 1
    replace: bool = False
    disjoint: bool = False
    time_attr: str | None = None
    temporal_strategy: str = "uniform"
    time_window: float | None = None
    weight_attr: str | None = None
    neg_sampling: NegativeSampling | str | None = None
    edge_label_time: str | None = None

    @property
    def is_plain(self) -> bool:
        """True if seeds are vertices and neighbours are drawn uniformly. Only then do the forecasts from inclusion probabilities hold."""
        changed = (self.link, self.replace, self.disjoint, self.time_attr, self.weight_attr, self.neg_sampling)
        return not any(changed) and self.temporal_strategy == "uniform"

    @property
    def numbers(self) -> tuple[Any, ...]:
        """``num_neighbors`` as a tuple, or as a tuple of tuples if edge types have different numbers."""
        if not isinstance(self.num_neighbors, Mapping):
            return tuple(self.num_neighbors)
        each = list(dict.fromkeys(map(tuple, self.num_neighbors.values())))
        return each[0] if len(each) == 1 else tuple(each)

    def filled(self, data: Any) -> Batches:
        """Returns the same batches with defaults for missing values. Raises ValueError if a value is wrong."""
        self.check()
        num_neighbors: Any = [15, 10, 5]
        seeds: Any = "train" if "train_mask" in data else "all"
        batch_size = 1024
        if isinstance(data, PartitionedGraph):
            stored = data.description
            num_neighbors, batch_size, seeds = stored.num_neighbors[0], stored.batch_size, stored.seeds[1]
            if data.is_hetero:
                num_neighbors, seeds = dict(zip(data.edge_types, stored.num_neighbors)), stored.seeds
        num_neighbors = num_neighbors if self.num_neighbors is None else self.num_neighbors
        return replace(
            self,
            num_neighbors=num_neighbors if isinstance(num_neighbors, Mapping) else check_fanouts(num_neighbors),
            batch_size=batch_size if self.batch_size is None else self.batch_size,
            seeds=("all" if self.link else seeds) if self.seeds is None else self.seeds,
        )

    def check(self) -> None:
        """Raises ValueError for values that are wrong for every graph."""
        if self.num_neighbors is not None and not isinstance(self.num_neighbors, Mapping):
            check_fanouts(self.num_neighbors)
        if self.batch_size is not None:
            check_batch_size(self.batch_size)
        if self.epochs < 1:
            raise ValueError(f"epochs must be >= 1, got {self.epochs}")
        if self.epochs > MOST_EPOCHS:
            raise ValueError(
                f"epochs must be at most {MOST_EPOCHS:,}, got {self.epochs}; counts are kept for each epoch, and ten are enough for most graphs"
            )
        if self.shared_draws not in (None, "batch"):
            raise ValueError(f"shared_draws must be 'batch' or None, got {self.shared_draws!r}")
        if isinstance(self.draw_block, bool) or not isinstance(self.draw_block, int) or self.draw_block < 1:
            raise ValueError(
                f"draw_block must be an integer >= 1 (consecutive batches that share draws), got {self.draw_block!r}"
            )

    def draws(self) -> dict[str, Any]:
        """Returns the options that say how neighbours and negative examples are drawn, as JSON values for the result."""
        which = "num_neighbors", "batch_size", "seeds", "epochs", "seed", "link"
        negatives = None if self.neg_sampling is None else NegativeSampling.cast(self.neg_sampling)
        text = None if negatives is None else f"{negatives.mode.value} {negatives.amount:g}"
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in which}
        return {**values, "neg_sampling": text}

    def words_of_seeds(self) -> str:
        words = f"{'edges' if self.link else 'vertices'} {self.seeds!r}"
        return self.seeds if isinstance(self.seeds, str) and not self.link else words


def is_without_split(batches: Batches, data: Any) -> bool:
    """Returns True if all vertices are seeds and the graph has no training split. ``batches`` has its defaults filled in."""
    # A wrong type or split is refused later.
    is_typed = isinstance(batches.seeds, tuple) and len(batches.seeds) == 2
    type_, split = batches.seeds if is_typed else (None, batches.seeds)
    if batches.link or not isinstance(split, str) or split != "all":
        return False
    if isinstance(data, PartitionedGraph):
        return any(each.name == type_ and "train" not in each.splits for each in data.description.node_types)
    return "train_mask" not in data


def one_or_several(batches: Batches | Sequence[Batches], data: Any) -> list[Batches]:
    """Returns the batches to count, with defaults filled in. Raises ValueError if none are given, or if they differ in more than ``num_neighbors``."""
    several = [each.filled(data) for each in ([batches] if isinstance(batches, Batches) else batches)]
    if not several:
        raise ValueError("batches must hold at least one entry")
    for each in several:
        names = [field.name for field in fields(each) if getattr(each, field.name) != getattr(several[0], field.name)]
        if set(names) - {"num_neighbors"}:
            raise ValueError(f"batches may differ only in num_neighbors, but differ in {', '.join(names)}")
    return several
