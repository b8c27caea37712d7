"""PyG's and torch's arguments of the loaders: how batches are drawn, and checks of numbers and of the order of seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch_geometric.sampler import BaseSampler
from torch_geometric.sampler.base import SubgraphType

from salientpp.arguments import as_integer
from salientpp.engine.seeds import sampler_of_part
from salientpp.sampling.neighbor_sampler import NeighborSampler, SharedDraws
from salientpp.store.directory.opened import PartitionedGraph


class TorchArguments(TypedDict, total=False):
    """Arguments of torch's ``DataLoader`` that a loader takes."""

    batch_size: int | None
    shuffle: bool | None
    sampler: Any
    batch_sampler: Any
    num_workers: int
    pin_memory: bool
    drop_last: bool
    worker_init_fn: Any
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
    dataset: Any
    collate_fn: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class SamplingOptions:
    """How batches are drawn: the arguments that PyG's loaders of vertices and of edges share, and the sampler that they make."""

    num_neighbors: Sequence[int] | Mapping[tuple[str, str, str], Sequence[int]]
    replace: bool
    subgraph_type: SubgraphType | str
    disjoint: bool
    temporal_strategy: str
    time_attr: str | None
    weight_attr: str | None
    is_sorted: bool
    directed: bool
    neighbor_sampler: BaseSampler | None
    shared_draws: SharedDraws = None

    def sampler_of_part(self, part: PartitionedGraph) -> NeighborSampler:
        """The given sampler, or one over the topology of a partitioned graph, which every rank has whole."""
        own = self.neighbor_sampler
        if own is not None and not isinstance(own, NeighborSampler):
            raise ValueError(
                "neighbor_sampler= is for data in one process: on a partitioned graph the cache and the order of rows follow from how this "
                "package's sampler draws; leave it out, and say how to draw with the loader's own arguments, or pass a salientpp.NeighborSampler"
            )
        if own is not None:
            sizes = {type_: book.num_vertices for type_, book in part.books.items()}
            if own.topology.num_vertices != sizes:
                raise ValueError(
                    f"the topology of neighbor_sampler has {own.topology.num_vertices} vertices, and {part.root} has {sizes}; pass one of the same graph"
                )
            return own
        draws = {name: getattr(self, name) for name in ("replace", "disjoint", "temporal_strategy", "shared_draws")}
        draws["subgraph_type"] = self.subgraph_type if self.directed else SubgraphType.induced
        return sampler_of_part(part, self.num_neighbors, self.time_attr, self.weight_attr, **draws)

    def sampler(self, data: Any, method: str) -> BaseSampler:
        """The user's own sampler, which must have ``method``, or one over ``data``."""
        own: Any = self.neighbor_sampler
        if own is not None and not callable(getattr(own, method, None)):
            raise TypeError(
                f"neighbor_sampler must be a torch_geometric.sampler.BaseSampler with {method}, got {type(own).__name__}"
            )
        if own is not None:
            return own
        return NeighborSampler(data, **{name: of for name, of in vars(self).items() if name != "neighbor_sampler"})


def normalise_numbers(kwargs: dict[str, Any]) -> None:
    """Numbers for torch's ``DataLoader`` become Python's, in place."""
    for name in ("batch_size", "num_workers", "prefetch_factor"):
        number = as_integer(kwargs.get(name))
        if number is not None:
            kwargs[name] = number
        elif kwargs.get(name) is not None and name != "batch_size":
            raise ValueError(f"{name} must be an integer, got {kwargs[name]!r}")


def check_order(kwargs: Mapping[str, Any], partitioned: bool) -> bool:
    """Whether the loader orders its seeds itself, and no ``sampler`` or ``batch_sampler`` of the user's does.

    Raises:
        ValueError: there is one, on a partitioned graph or without a length.
    """
    name = next((name for name in ("sampler", "batch_sampler") if kwargs.get(name) is not None), None)
    if name is None:
        return True
    if partitioned:
        raise ValueError(
            f"{name}= is for a Data or HeteroData object: the ranks of a partitioned graph agree on the order of their seeds. Lightning puts "
            "one into loaders on ranks unless told Trainer(use_distributed_sampler=False), and into those of trainer.predict in any case: use "
            "salientpp.lightning.LightningNodeData"
        )
    if not hasattr(kwargs[name], "__len__"):
        raise ValueError(
            f"{name} must have a length (how much it gives in an epoch), got {type(kwargs[name]).__name__} without __len__"
        )
    return False
