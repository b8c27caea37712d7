"""Which arguments does a loader take beside PyG's and torch's, and which values may they have?

:class:`Options` holds the package's own arguments, first as the user gave them. They are checked in two steps: where and how long
(:meth:`Options.checked_device`, :meth:`Options.checked_timeout`) before ranks are connected, which cannot be done without, and everything else
(:meth:`Options.checked`) after, so that a mistake on one rank reaches the others. :class:`SamplingOptions` holds what a sampler is made with.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch_geometric.sampler import BaseSampler
from torch_geometric.sampler.base import SubgraphType

from salientpp.arguments import as_integer, as_real
from salientpp.engine.way import Way
from salientpp.ranks.comm import DEFAULT_TIMEOUT
from salientpp.sampling.neighbor_sampler import NeighborSampler, SharedDraws
from salientpp.sampling.schedule import UNEVEN
from salientpp.store.assembly import has_kernel
from salientpp.store.cache import FeatureCache, TypedFeatureCache
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.vip.policies import PROBABILITIES, Policy, check_policy, check_replication_factor
from salientpp.ways.lookahead.planner import Window, check_lookahead
from salientpp.ways.sums.plan import REDUCTIONS, PartialAggregation

#: What happens where ranks have different numbers of batches, see :mod:`salientpp.sampling.schedule`; None: 'wrap' for seeds in a random order, which are
#: to be trained on, and 'exact' for others, so that an evaluation counts each once.
Uneven = Literal["wrap", "drop", "exact", "error"] | None

#: How batches are filled up to few sizes, see :mod:`salientpp.loader.padding`; None: not at all.
Pad = Literal["bucket"] | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Options:
    """The package's own arguments of a loader, by the names and with the meanings that :class:`~salientpp.NeighborLoader` gives them."""

    transform: Callable[[Any], Any] | None = None
    transform_sampler_output: Callable[[Any], Any] | None = None
    replication_factor: float = 0.0
    gpu_fraction: float = 0.0
    gpu_cache_bytes: int = 0
    zero_copy: bool = False
    dtype: torch.dtype | None = None
    policy: Policy = "vip"
    cache: FeatureCache | TypedFeatureCache | None = None
    rows: Mapping[Any, Any] | None = None
    device: torch.device | str | int | None = None
    depth: int = 10
    seed: int | None = None
    uneven: Uneven = None
    process_group: Any = None
    timeout: float | timedelta = DEFAULT_TIMEOUT
    share: tuple[int, int] | None = None
    pad: Pad = None
    ranks_per_host: int | Sequence[int] | None = None
    slots: int | None = None
    join_slots: bool = False
    draw_block: int = 1
    send_as: Mapping[Any, str] | None = None
    lookahead: Window = 0
    partial_aggregation: PartialAggregation = None
    partial_weight: str | None = None
    ways: Sequence[Way] = ()

    def checked(self, device: torch.device) -> Options:
        """These options with Python's numbers; ``device`` is the checked one.

        Raises:
            ValueError, TypeError: an argument is wrong, whatever the data is.
        """
        gpu_fraction, gpu_cache_bytes, depth = (
            as_real(self.gpu_fraction),
            as_integer(self.gpu_cache_bytes),
            as_integer(self.depth),
        )
        if gpu_fraction is None or not 0 <= gpu_fraction <= 1:
            raise ValueError(
                f"gpu_fraction must be in [0, 1] (the part of a part's rows kept on the device), got {self.gpu_fraction!r}"
            )
        replication_factor = check_replication_factor(self.replication_factor)
        check_policy(self.policy)
        if self.cache is not None and not isinstance(self.cache, (FeatureCache, TypedFeatureCache)):
            raise TypeError(
                f"cache must be the cache of another loader (loader.cache), got {type(self.cache).__name__}"
            )
        if self.cache is not None and replication_factor > 0:
            raise ValueError(
                "pass either cache= or replication_factor=, not both: the size of a given cache is its maker's"
            )
        if gpu_cache_bytes is None or gpu_cache_bytes < 0:
            raise ValueError(
                f"gpu_cache_bytes must be an integer >= 0 (device memory for cached rows), got {self.gpu_cache_bytes!r}"
            )
        if self.cache is not None and gpu_cache_bytes:
            raise ValueError(
                "gpu_cache_bytes is for a cache that the loader makes; a given cache has its device rows from its maker"
            )
        if not isinstance(self.zero_copy, bool):
            raise ValueError(f"zero_copy must be True or False, got {self.zero_copy!r}")
        if self.zero_copy and device.type == "cuda" and not has_kernel():
            raise ValueError(
                "zero_copy needs Triton, which is not installed; `pip install triton`, or leave zero_copy out"
            )
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"dtype must be a torch.dtype (of delivered x) or None, got {self.dtype!r}")
        if depth is None or depth < 1:
            raise ValueError(f"depth must be an integer >= 1 (batches in flight), got {self.depth!r}")
        if self.seed is not None and as_integer(self.seed) is None:
            raise ValueError(f"seed must be an integer or None, got {self.seed!r}")
        if self.uneven is not None and (not isinstance(self.uneven, str) or self.uneven not in UNEVEN):
            raise ValueError(f"uneven must be one of {', '.join(map(repr, UNEVEN))}, got {self.uneven!r}")
        if self.pad not in (None, "bucket"):
            raise ValueError(f"pad must be 'bucket' or None, got {self.pad!r}")
        wrong = next((way for way in self.ways if not isinstance(way, Way)), None)
        if wrong is not None:
            raise TypeError(f"ways must be objects of salientpp.engine.way.Way, got {type(wrong).__name__}")
        slots = as_integer(self.slots)
        if self.slots is not None and (slots is None or slots < 1):
            raise ValueError(
                f"slots must be an integer >= 1 (that share an epoch's batches) or None, got {self.slots!r}"
            )
        if not isinstance(self.join_slots, bool):
            raise ValueError(f"join_slots must be True or False, got {self.join_slots!r}")
        draw_block = as_integer(self.draw_block)
        if draw_block is None or not 1 <= draw_block < 2**63:
            raise ValueError(f"draw_block must be an integer >= 1 (batches that draw alike), got {self.draw_block!r}")
        lookahead = check_lookahead(self.lookahead)
        if lookahead:
            self._check_goes_with_lookahead()
        if self.partial_aggregation is not None:
            self._check_goes_with_partial()
        elif self.partial_weight is not None:
            raise ValueError(
                f"partial_weight={self.partial_weight!r} is for sums of rows; pass partial_aggregation= too, or leave it out"
            )
        return dataclasses.replace(
            self,
            lookahead=lookahead,
            slots=slots,
            draw_block=draw_block,
            replication_factor=replication_factor,
            gpu_fraction=gpu_fraction,
            gpu_cache_bytes=gpu_cache_bytes,
            depth=depth,
            seed=None if self.seed is None else as_integer(self.seed),
        )

    def checked_device(self) -> torch.device:
        """The CPU or a CUDA device that is there, with its number."""
        if self.device is None:
            return torch.device("cpu")
        number = torch.cuda.device_count()
        there = "the CPU" if number == 0 else f"the CPU or one of {number} CUDA device{'s' if number > 1 else ''}"
        try:
            found = torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device must be {there}, got {self.device!r}") from error
        if found.type == "cuda" and found.index is None and number:
            found = torch.device("cuda", torch.cuda.current_device())
        if found.type != "cpu" and not (found.type == "cuda" and found.index is not None and found.index < number):
            why = (
                ""
                if number or found.type != "cuda"
                else "; this torch is built without CUDA, or sees no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES)"
            )
            raise ValueError(f"device must be {there}, got {str(found)!r}{why}")
        return found

    def checked_timeout(self) -> timedelta:
        """The longest wait for another rank."""
        if isinstance(self.timeout, timedelta):
            found = self.timeout
        else:
            seconds, found = as_real(self.timeout), timedelta(0)
            if seconds == 0:
                return DEFAULT_TIMEOUT  # 0 is how torch says that none was given
            if seconds is not None:
                with contextlib.suppress(OverflowError):  # too large a number
                    found = timedelta(seconds=seconds)
        if found <= timedelta(0):
            raise ValueError(
                f"timeout must be > 0 and finite, in seconds or a timedelta (the longest wait for another rank), got {self.timeout!r}"
            )
        return found

    def _check_goes_with_lookahead(self) -> None:
        """Raise ValueError where an argument wants a cache whose rows stay."""
        lookahead = f"lookahead={self.lookahead!r}"
        if self.policy not in PROBABILITIES:
            raise ValueError(
                f"{lookahead} expects rows by their inclusion probabilities, so policy must be {' or '.join(map(repr, PROBABILITIES))}, got {self.policy!r}; "
                "leave one of them out"
            )
        for name in ("cache", "zero_copy", "gpu_cache_bytes"):
            if getattr(self, name):
                raise ValueError(
                    f"{lookahead} excludes {name}=: rows of a cache that looks ahead change from batch to batch, in this loader's own memory on the host; "
                    "leave one of them out"
                )
        if self.transform_sampler_output is not None:
            raise ValueError(
                f"{lookahead} excludes transform_sampler_output=, which may change the vertices that a batch needs after they were foreseen; leave one of "
                "them out"
            )

    def _check_goes_with_partial(self) -> None:
        """Raise ValueError where an argument wants every sampled row, or has vertices or rows that this rank alone does not know."""
        given = self.partial_aggregation
        if given not in ("auto", *REDUCTIONS):
            raise ValueError(f"partial_aggregation must be 'auto', 'sum', 'mean', 'max' or None, got {given!r}")
        for name, why in (
            ("lookahead", "a cache that looks ahead decides after the sums were chosen which rows it has"),
            ("join_slots", "the last hops of joined batches do not stand together"),
            ("pad", "its sums would be as many as before"),
            ("transform_sampler_output", "it may change what was sampled, and sums are of that"),
            ("send_as", "it sums rows as they are"),
        ):
            if getattr(self, name):
                raise ValueError(f"partial_aggregation={given!r} excludes {name}=: {why}; leave one of them out")

    def check_slots(self, partitioned: bool) -> None:
        """Raise ValueError where slots are asked for on an object that one process holds."""
        if not partitioned and (self.slots is not None or self.join_slots):
            name = "join_slots" if self.slots is None else "slots"
            raise ValueError(f"{name}= is for a partitioned graph, whose ranks share an epoch's batches; leave it out")

    def check_send_as(self, partitioned: bool) -> None:
        """Raise ValueError where rows of an object that one process holds are to be sent."""
        if not partitioned and self.send_as is not None:
            raise ValueError(
                "send_as is for a partitioned graph, whose rows travel between ranks; rows of an object in memory do not, so leave it out"
            )

    def checked_share(self, partitioned: bool, orders_itself: bool, draws_seed: bool = False) -> tuple[int, int] | None:
        """Place and number of places of ``share``, or None without one.

        Args:
            partitioned: the data is a partitioned graph.
            orders_itself: the loader says in which order seeds come, and not a sampler of the user's.
            draws_seed: the order follows from a seed that each process draws for itself.
        """
        share: Any = self.share
        if share is None:
            return None
        if partitioned:
            raise ValueError(
                "share= is for a Data or HeteroData object: the ranks of a partitioned graph share its seeds by themselves"
            )
        if not orders_itself:
            raise ValueError(
                "share= excludes sampler= and batch_sampler=: let the sampler give this process its share. Lightning puts a sampler into loaders on ranks "
                "unless told Trainer(use_distributed_sampler=False)"
            )
        whole = (
            isinstance(share, (tuple, list))
            and len(share) == 2
            and all(isinstance(i, int) and not isinstance(i, bool) for i in share)
        )
        if not whole or not 0 <= share[0] < share[1]:
            raise ValueError(f"share must be (rank, number of ranks), with 0 <= rank < number of ranks, got {share!r}")
        if draws_seed and share[1] > 1:
            raise ValueError(
                f"share={share!r} with shuffle=True needs one order of the seeds in all {share[1]} processes, but each would draw a seed of its own; pass the "
                "same seed= (or a generator= in the same state) in all of them"
            )
        return share[0], share[1]


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
        """A sampler over the topology of a partitioned graph, which every rank has whole.

        Raises:
            ValueError: the arguments do not fit the graph, or a sampler is given: the cache is planned by knowing how batches are drawn.
        """
        if self.neighbor_sampler is not None:
            raise ValueError(
                "neighbor_sampler= is for data in one process: on a partitioned graph the cache and the order of rows follow from how this "
                "package's sampler draws; leave it out, and say how to draw with the loader's own arguments"
            )
        needs_types = part.is_hetero or self.time_attr is not None or self.weight_attr is not None
        return NeighborSampler.of(
            part.typed_graph(self.time_attr, self.weight_attr) if needs_types else part.graph,
            self.num_neighbors,
            subgraph_type=self.subgraph_type if self.directed else SubgraphType.induced,
            replace=self.replace,
            disjoint=self.disjoint,
            temporal_strategy=self.temporal_strategy,
            shared_draws=self.shared_draws,
        )

    def sampler(self, data: Any, method: str) -> BaseSampler:
        """The user's own sampler, which must have ``method``, or one over ``data``."""
        own: Any = self.neighbor_sampler
        if own is not None and not callable(getattr(own, method, None)):
            raise TypeError(
                f"neighbor_sampler must be a torch_geometric.sampler.BaseSampler with {method}, got {type(own).__name__}"
            )
        if own is not None:
            return own
        return NeighborSampler(
            data,
            self.num_neighbors,
            replace=self.replace,
            subgraph_type=self.subgraph_type,
            disjoint=self.disjoint,
            temporal_strategy=self.temporal_strategy,
            time_attr=self.time_attr,
            weight_attr=self.weight_attr,
            is_sorted=self.is_sorted,
            directed=self.directed,
            shared_draws=self.shared_draws,
        )


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
