"""The loaders' arguments from PyG and torch: how batches are drawn, and checks of numbers and of the seeds' order."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
import torch.utils.data
from torch_geometric.sampler import BaseSampler
from torch_geometric.sampler.base import SubgraphType

from salientpp.arguments import as_integer
from salientpp.engine.option import Option, entry_meant
from salientpp.engine.seeds import draws_of, sampler_of_part
from salientpp.sampling.neighbor_sampler import NeighborSampler, SharedDraws
from salientpp.sampling.part_topology import PartTopology
from salientpp.sampling.ppr import PPRSampler
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.suggestions import did_you_mean


class TorchArguments(TypedDict, total=False):
    """Types of the arguments that a loader shares with torch's ``DataLoader``, for editors and type checkers."""

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
    """PyG's arguments that say how batches are drawn. They make the sampler."""

    num_neighbors: Sequence[int] | Mapping[tuple[str, str, str], Sequence[int]]
    replace: bool
    subgraph_type: SubgraphType | str
    disjoint: bool
    temporal_strategy: str
    time_attr: str | None
    weight_attr: str | None
    is_sorted: bool
    directed: bool
    neighbor_sampler: BaseSampler | Literal["device"] | None
    shared_draws: SharedDraws = None
    time_window: float | None = None

    @property
    def draws_on_device(self) -> bool:
        """True if the loader's own sampler draws on the device."""
        return isinstance(self.neighbor_sampler, str) and self.neighbor_sampler == "device"

    def sampler_of_part(self, part: PartitionedGraph) -> NeighborSampler:
        """Returns the user's sampler, or one over a partitioned graph. ``part`` is the view that this host holds."""
        own = None if self.draws_on_device else self.neighbor_sampler
        if own is not None and not isinstance(own, NeighborSampler):
            raise ValueError(
                "a neighbor_sampler= other than salientpp.NeighborSampler is for data in one process; on a partitioned graph the cache and the "
                "order of rows depend on this package's draws; leave it out and use the loader's own arguments, or pass NeighborSampler or PPRSampler"
            )
        if own is not None:
            sizes = {type_: book.num_vertices for type_, book in part.books.items()}
            if own.topology.num_vertices != sizes:
                raise ValueError(
                    f"the topology of neighbor_sampler has {own.topology.num_vertices} vertices, but {part.root} has {sizes}; pass a sampler of the same graph"
                )
            if isinstance(own, PPRSampler):
                return own.over(part)
            if isinstance(own.topology, PartTopology) and not own.topology.is_of(part.books, part.part_id):
                raise ValueError(
                    "neighbor_sampler has the neighbour lists of other parts than this rank's host holds in this loader; pass the same ranks_per_host and "
                    "logical_ranks as to the sampler's loader, or leave neighbor_sampler out"
                )
            return _for_loader(own)
        self._check_names()
        subgraph_type = self.subgraph_type if self.directed else SubgraphType.induced
        return sampler_of_part(
            part, self.num_neighbors, self.time_attr, self.weight_attr, subgraph_type=subgraph_type, **draws_of(self)
        )

    def sampler(self, data: Any, method: str) -> BaseSampler:
        """Returns the user's sampler, after a check that it has ``method``, or a new one over ``data``."""
        own: Any = None if self.draws_on_device else self.neighbor_sampler
        if own is not None and not callable(getattr(own, method, None)):
            raise TypeError(
                f"neighbor_sampler must be a torch_geometric.sampler.BaseSampler with {method}, 'device' or None, got {type(own).__name__}"
            )
        if own is not None:
            return own
        self._check_names()
        return NeighborSampler(data, **{name: of for name, of in vars(self).items() if name != "neighbor_sampler"})

    def _check_names(self) -> None:
        for name in ("time_attr", "weight_attr"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be the name of an attribute or None, got {value!r}")


def _for_loader(sampler: NeighborSampler) -> NeighborSampler:
    """Returns the sampler, or a copy that draws the same if the loader needs another view of the topology. The user's sampler is not changed."""
    topology = sampler.topology.for_loader()
    if topology is sampler.topology:
        return sampler
    found = copy.copy(sampler)
    found.topology = topology
    return found


def check_names(loader: type, kwargs: Mapping[str, Any], declared: Mapping[str, Option]) -> None:
    """Raises TypeError for an argument that neither the loader nor torch's ``DataLoader`` has. ``declared``: the package's options."""
    known = {*inspect.signature(loader).parameters, *TorchArguments.__annotations__}
    known |= {*inspect.signature(torch.utils.data.DataLoader).parameters}
    for name in kwargs:
        if name not in known:
            meant = entry_meant(name, declared) or did_you_mean(name, sorted(known))
            raise TypeError(f"{loader.__name__} has no argument {name!r}{meant}")


def normalise(kwargs: dict[str, Any]) -> None:
    """Converts the numbers in ``kwargs`` for torch's ``DataLoader`` to Python's, in place, and refuses values that torch notices only in an epoch."""
    if kwargs.get("worker_init_fn") is not None and not callable(kwargs["worker_init_fn"]):
        raise TypeError(f"worker_init_fn must be a function or None, got {kwargs['worker_init_fn']!r}")
    for name in ("batch_size", "num_workers", "prefetch_factor"):
        number = as_integer(kwargs.get(name))
        if number is not None:
            kwargs[name] = number
        elif name in kwargs and name != "batch_size" and (name, kwargs[name]) != ("prefetch_factor", None):
            raise ValueError(f"{name} must be an integer, got {kwargs[name]!r}")


def check_order(kwargs: Mapping[str, Any], partitioned: bool) -> bool:
    """Returns True if the loader orders its seeds itself, False if a user's ``sampler`` or ``batch_sampler`` does.

    Raises:
        ValueError: the user gave a sampler, but the data is a partitioned graph, or the sampler ends after one epoch.
    """
    name = next((name for name in ("sampler", "batch_sampler") if kwargs.get(name) is not None), None)
    if name is None:
        return True
    if partitioned:
        raise ValueError(
            f"{name}= is for a Data or HeteroData object; the ranks of a partitioned graph agree on the order of their seeds. Lightning puts a sampler into "
            "every loader, unless Trainer(use_distributed_sampler=False) is set; trainer.predict does so even then. With Lightning, use "
            "salientpp.lightning.LightningNodeData"
        )
    given = kwargs[name]
    if isinstance(given, Iterator) and not isinstance(given, Sized):  # Lightning's wrappers are both, and begin again
        raise ValueError(
            f"{name} must give its items in every epoch, got a {type(given).__name__}, which gives them only once; pass a list or a sampler"
        )
    return False
