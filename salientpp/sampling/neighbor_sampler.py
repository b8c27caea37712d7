"""How do PyG's loaders, and ours, ask for a neighbourhood?

:class:`NeighborSampler` is a PyG ``BaseSampler`` with the arguments of PyG's own: a graph and how to draw from it, seeds in, an MFG
out. Seeds are vertices, or the end points of edges with negative examples; what PyG does around a draw (the seeds of an edge,
their labels, bidirectional subgraphs of several types) is PyG's code here too.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    NumNeighbors,
    SamplerOutput,
)
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from salientpp import ops
from salientpp.graph.csc import Graph
from salientpp.graph.from_pyg import NO_EDGES, count_vertices
from salientpp.graph.typed import TypedGraph
from salientpp.sampling.sampler import Sampler, TypedSampler
from salientpp.vip.inclusion import check_fanouts

_STRATEGIES = ("uniform", "last")

#: In what the draws of a batch's vertices agree.
SharedDraws = Literal["batch"] | None

#: Joined with a batch's key for what is drawn beside neighbours: the negative examples.
_NEGATIVES = 0x6E6567


class NeighborSampler(BaseSampler):
    """Neighbour sampling for any loader that takes a ``BaseSampler``: PyG's ``NodeLoader`` and ``LinkLoader``, Lightning's data
    modules, and this package's loaders (``neighbor_sampler=``).

    Args:
        data: a ``Data``, a ``HeteroData``, or a pair of PyG's ``FeatureStore`` and ``GraphStore``.
        num_neighbors: fanouts, nearest the seeds first, -1 for all; of a ``HeteroData`` also a mapping from edge types, or PyG's
            ``NumNeighbors``.
        subgraph_type: 'directional': the edges drawn; 'bidirectional': those and their reverses; 'induced': all edges between
            sampled vertices.
        replace: draw with replacement.
        disjoint: every seed grows a tree of its own; ``batch`` numbers the trees.
        temporal_strategy: 'uniform' or 'last'; with ``time_attr``, draw from all neighbours that are not in the future of the seed,
            or from the latest of them.
        time_attr: the attribute with the times of vertices or of edges; implies ``disjoint``.
        weight_attr: the attribute with edge weights; a neighbour is drawn with probability proportional to its edge's.
        is_sorted: ``edge_index`` is sorted by target, and inside a target's list by time.
        share_memory: accepted; worker threads share memory anyway, and processes that fork do too.
        directed: deprecated; False means ``subgraph_type='induced'``.
        sample_direction: 'forward' draws sources of edges into a vertex, 'backward' targets of edges out of it.
        shared_draws: None: every vertex draws by itself. 'batch': every neighbour has one number in a batch, and each vertex takes those with the
            smallest, so that a batch has fewer vertices; see :class:`~salientpp.NeighborLoader`.

    Every call draws anew from torch's global generator, unless ``key`` is given.

    Raises:
        ValueError: an argument is wrong.
        TypeError: ``data`` is of another type.
    """

    def __init__(
        self,
        data: Data | HeteroData,
        num_neighbors: NumNeighbors | Sequence[int] | Mapping[tuple[str, str, str], Sequence[int]],
        subgraph_type: SubgraphType | str = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        is_sorted: bool = False,
        share_memory: bool = False,
        directed: bool = True,
        sample_direction: str = "forward",
        *,
        shared_draws: SharedDraws = None,
    ) -> None:
        if not directed:
            warnings.warn(
                "directed=False is deprecated; pass subgraph_type='induced'", DeprecationWarning, stacklevel=2
            )
            subgraph_type = SubgraphType.induced
        if sample_direction not in ("forward", "backward"):
            raise ValueError(f"sample_direction must be 'forward' or 'backward', got {sample_direction!r}")
        if not isinstance(data, (Data, HeteroData)) and not is_remote(data):
            raise TypeError(
                f"data must be a torch_geometric.data.Data, a HeteroData or a pair of FeatureStore and GraphStore, got {type(data).__name__}"
            )
        self.sample_direction = sample_direction
        backward = sample_direction == "backward"
        # Induced subgraphs read whole lists, and the ids of few of their edges.
        induced = SubgraphType(getattr(subgraph_type, "value", subgraph_type)) == SubgraphType.induced
        self.graph: Graph | None = None  # for Sampler, where it suffices
        self.typed_graph: TypedGraph | None = None
        if is_remote(data):
            if weight_attr is not None:
                raise NotImplementedError(
                    "weight_attr is for a Data or HeteroData; PyG does not take it for a pair of stores either"
                )
            self.typed_graph = TypedGraph.from_stores(*data, time_attr=time_attr, backward=backward)
        elif isinstance(data, HeteroData) or time_attr is not None or weight_attr is not None or backward:
            self.typed_graph = TypedGraph.from_data(
                data,
                time_attr=time_attr,
                weight_attr=weight_attr,
                is_sorted=is_sorted,
                backward=backward,
                linked=not induced,
            )
        elif data.get("edge_index") is None and data.get("adj_t") is None:
            if len(num_neighbors):
                warnings.warn(
                    "data has neither edge_index nor adj_t, so batches hold their seeds only", UserWarning, stacklevel=2
                )
            self.graph = Graph.from_edge_index(NO_EDGES, count_vertices(data)[None])
        else:
            self.graph = Graph.from_data(data, is_sorted=is_sorted, linked=not induced)
        self._set_options(num_neighbors, subgraph_type, replace, disjoint, temporal_strategy, shared_draws)

    @classmethod
    def of(
        cls,
        graph: Graph | TypedGraph,
        num_neighbors: Sequence[int] | Mapping[tuple[str, str, str], Sequence[int]],
        *,
        subgraph_type: SubgraphType | str = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        shared_draws: SharedDraws = None,
    ) -> NeighborSampler:
        """A sampler of a :class:`~salientpp.Graph`, or of one with types, times or weights; shares its arrays."""
        sampler = cls.__new__(cls)
        sampler.sample_direction = "forward"
        sampler.graph = graph if isinstance(graph, Graph) else None
        sampler.typed_graph = graph if isinstance(graph, TypedGraph) else None
        sampler._set_options(num_neighbors, subgraph_type, replace, disjoint, temporal_strategy, shared_draws)
        return sampler

    def _set_options(
        self,
        num_neighbors: Any,
        subgraph_type: SubgraphType | str,
        replace: bool,
        disjoint: bool,
        temporal_strategy: str,
        shared_draws: SharedDraws,
    ) -> None:
        if temporal_strategy not in _STRATEGIES:
            raise ValueError(f"temporal_strategy must be 'uniform' or 'last', got {temporal_strategy!r}")
        if temporal_strategy != "uniform" and not self.is_temporal:
            raise ValueError(f"temporal_strategy={temporal_strategy!r} needs times; pass time_attr too")
        self.num_neighbors = num_neighbors
        self.subgraph_type = SubgraphType(getattr(subgraph_type, "value", subgraph_type))
        self.replace = bool(replace)
        self.disjoint = bool(disjoint)
        self.temporal_strategy = temporal_strategy
        self.shared_draws = shared_draws
        self._check_shared_draws()
        self.keep_orig_edges = False

    def _check_shared_draws(self) -> None:
        if self.shared_draws not in (None, "batch"):
            raise ValueError(f"shared_draws must be 'batch' or None, got {self.shared_draws!r}")
        if self.shared_draws is None:
            return
        if self.replace:
            raise ValueError(
                f"shared_draws={self.shared_draws!r} excludes replace=True: a neighbour has one number in a batch, so it is drawn once; leave one of them out"
            )
        if self.typed_graph is not None and any(
            relation.edge_weight is not None for relation in self.typed_graph.relations
        ):
            raise ValueError(
                f"shared_draws={self.shared_draws!r} excludes weight_attr: shared draws are uniform; leave one of them out"
            )

    # --- what it is, in PyG's words ------------------------------------------------------------------------

    @property
    def num_neighbors(self) -> NumNeighbors:
        return self._num_neighbors

    @num_neighbors.setter
    def num_neighbors(self, num_neighbors: Any) -> None:
        if isinstance(num_neighbors, NumNeighbors) or (self.is_hetero and isinstance(num_neighbors, Mapping)):
            # PyG's class keeps what it derives, for one list of edge types.
            given = num_neighbors if isinstance(num_neighbors, NumNeighbors) else NumNeighbors(dict(num_neighbors))
            of = given.values
            # Its keys are joined names, which cannot be parted again where a name contains "__".
            values = NumNeighbors(
                {key.to_tuple(): of[key] for key in of} if isinstance(of, Mapping) else of, given.default
            )
        else:
            values = NumNeighbors(check_fanouts(num_neighbors, may_be_empty=True))
        self._num_neighbors = values
        self._fanouts = self._read_fanouts()

    def _read_fanouts(self) -> list[list[int]]:
        """Per relation."""
        if self.typed_graph is None or not self.is_hetero:
            return [check_fanouts(self._num_neighbors.get_values(), may_be_empty=True)]
        edge_types = [name for name in self.typed_graph.edge_types if name is not None]
        joined = Counter(map("__".join, edge_types))
        alike = [name for name in edge_types if joined["__".join(name)] > 1]
        if alike and isinstance(self._num_neighbors.values, Mapping):
            raise ValueError(
                f"num_neighbors by edge type cannot tell {' and '.join(map(str, alike))} apart, which PyG joins to one name; rename one, or pass a list"
            )
        values = self._num_neighbors.get_values(edge_types)
        fanouts = []
        for name in edge_types:
            try:
                fanouts.append(check_fanouts(values[name], may_be_empty=True))
            except ValueError as error:
                raise ValueError(f"edge type {name}: {error}") from None
        return fanouts

    @property
    def fanouts(self) -> list[list[int]]:
        """Per relation, neighbours per vertex and hop."""
        return self._fanouts

    @property
    def is_hetero(self) -> bool:
        return self.typed_graph is not None and not self.typed_graph.is_homogeneous

    @property
    def is_plain(self) -> bool:
        """One type of vertices, and draws by no weights: the inclusion probabilities are those of a :class:`~salientpp.Graph`."""
        if self.typed_graph is None:
            return True
        return not self.is_hetero and all(relation.edge_weight is None for relation in self.typed_graph.relations)

    @property
    def is_temporal(self) -> bool:
        return self.typed_graph is not None and self.typed_graph.clock is not None

    @property
    def disjoint(self) -> bool:
        return self._disjoint or self.is_temporal

    @disjoint.setter
    def disjoint(self, disjoint: bool) -> None:
        self._disjoint = disjoint

    @property
    def num_nodes(self) -> int | dict[str, int]:
        if self.graph is not None:
            return self.graph.num_vertices
        typed = self.as_typed()
        if not self.is_hetero:
            return typed.num_vertices[0]
        return {name: size for name, size in zip(typed.node_types, typed.num_vertices) if name is not None}

    @property
    def node_time(self) -> Tensor | dict[str, Tensor] | None:
        """On the graph's clock."""
        if self.typed_graph is None or not self.is_temporal:
            return None
        times = dict(zip(self.typed_graph.node_types, self.typed_graph.node_time))
        if not self.is_hetero:
            return times.get(None)
        return {name: time for name, time in times.items() if name is not None and time is not None} or None

    @property
    def nbytes(self) -> int:
        """Bytes of the topology with its times and weights."""
        return self.as_typed().nbytes if self.graph is None else self.graph.nbytes

    def arrays(self) -> list[Tensor]:
        """Everything that a sample depends on, beside :meth:`settings` and the key."""
        if self.graph is not None:
            return [self.graph.indptr, self.graph.indices]
        typed = self.as_typed()
        arrays = [array for r in typed.relations for array in (r.indptr, r.indices, r.edge_weight, r.edge_time)]
        return [array for array in (*arrays, *typed.node_time) if array is not None]

    def settings(self) -> dict[str, Any]:
        """How it draws, as plain values."""
        return {
            "num_neighbors": self._fanouts if self.is_hetero else self._fanouts[0],
            "replace": self.replace,
            "subgraph_type": self.subgraph_type.value,
            "disjoint": self.disjoint,
            "temporal_strategy": self.temporal_strategy,
            # States of loaders without it do not name it.
            **({} if self.shared_draws is None else {"shared_draws": self.shared_draws}),
        }

    @property
    def edge_permutation(self) -> None:
        """None: the edge ids of a sample are the user's own."""
        return None

    # --- sampling -----------------------------------------------------------------------------------------

    def sample_from_nodes(
        self,
        inputs: NodeSamplerInput,
        key: int | None = None,
        draw_key: int | None = None,
        *,
        only_vertices: bool = False,
    ) -> SamplerOutput | HeteroSamplerOutput:
        """The MFG of some vertices.

        Args:
            inputs: the seeds, with times and node type where there are any.
            key: 64-bit; fixes all draws. None draws one from torch's global generator.
            draw_key: 64-bit; fixes the neighbours instead.
            only_vertices: nothing but ``node`` is wanted, and that sooner.
        """
        key = _drawn(key if draw_key is None else draw_key)
        return self._finished(
            node_sample(inputs, lambda seed, seed_time: self._sample(seed, seed_time, key, False, only_vertices)),
            only_vertices,
        )

    def sample_from_edges(
        self,
        inputs: EdgeSamplerInput,
        neg_sampling: NegativeSampling | None = None,
        key: int | None = None,
        draw_key: int | None = None,
        *,
        only_vertices: bool = False,
    ) -> SamplerOutput | HeteroSamplerOutput:
        """The MFG of the end points of some edges, and of negative examples.

        Args:
            inputs: the edges, with labels, times and edge type where there are any.
            neg_sampling: how many and which negative examples.
            key: as in :meth:`sample_from_nodes`; fixes the negative examples too.
            draw_key: as there; ``key`` then fixes the negative examples.
            only_vertices: as there.
        """
        key = _drawn(key)
        draw_key = key if draw_key is None else draw_key
        clock = None if self.typed_graph is None else self.typed_graph.clock
        if inputs.time is not None and clock is not None:
            inputs = copy.copy(inputs)
            times, inputs.time = inputs.time, clock.read(inputs.time, "edge_label_time")
        else:
            times = None
        negatives = None if neg_sampling is None else _KeyedNegatives(neg_sampling, ops.join_key(_NEGATIVES, key))
        # PyG makes labels and positions on the default device. Naming one costs a tenth of a small batch, so only where it is needed.
        on_cpu = torch.get_default_device().type == "cpu"
        with contextlib.nullcontext() if on_cpu else torch.device("cpu"):
            out = edge_sample(
                inputs,
                lambda seed, seed_time: self._sample(seed, seed_time, draw_key, True, only_vertices),
                self.num_nodes,
                self.disjoint,
                self.node_time,
                negatives,
            )
        if times is not None:
            out.metadata = (*out.metadata[:-1], _times_of(times, out.metadata[-1].numel()))
        return self._finished(out, only_vertices)

    def _finished(
        self, out: SamplerOutput | HeteroSamplerOutput, only_vertices: bool
    ) -> SamplerOutput | HeteroSamplerOutput:
        if self.subgraph_type != SubgraphType.bidirectional or only_vertices:
            return out
        if isinstance(out, SamplerOutput):
            return _bidirectional(out, self.keep_orig_edges)
        return out.to_bidirectional(keep_orig_edges=self.keep_orig_edges)

    def _sample(
        self,
        seed: Tensor | dict[str, Tensor],
        seed_time: Any = None,
        key: int | None = None,
        on_clock: bool = False,
        only_vertices: bool = False,
    ) -> SamplerOutput | HeteroSamplerOutput:
        """By PyG's name, since PyG's bidirectional sampler calls it. ``on_clock``: the graph's clock has read the times."""
        key = _drawn(key)
        self._check_shared_draws()  # `replace` may have been set since
        shared = self.shared_draws is not None
        # The edges between the vertices of a batch are looked for when it has all of these.
        induced = self.subgraph_type == SubgraphType.induced and not only_vertices
        if self.graph is not None and not self.disjoint and not induced and isinstance(seed, Tensor):
            plain = Sampler(self.graph, self._fanouts[0], self.replace, shared)
            seed = seed.to(torch.int64)
            if only_vertices:
                return SamplerOutput(plain.vertices(seed, key), NO_EDGES[0], NO_EDGES[1], None)
            return plain.sample(seed, key)
        sampler = TypedSampler(
            self.as_typed(),
            self._fanouts,
            self.replace,
            self.disjoint,
            self.temporal_strategy == "last",
            induced,
            shared,
        )
        seeds = seed if isinstance(seed, dict) else {None: seed}
        times = seed_time if isinstance(seed_time, dict) or seed_time is None else {None: seed_time}
        clock = None if self.typed_graph is None else self.typed_graph.clock
        if times is not None and clock is not None and not on_clock:
            times = {name: clock.read(time, "input_time") for name, time in times.items()}
        out = sampler.sample({name: ids.to(torch.int64) for name, ids in seeds.items()}, key, times)
        if self.sample_direction == "backward":
            out.row, out.col = out.col, out.row
        return out

    def as_typed(self) -> TypedGraph:
        """The graph as one with types, whichever it is kept as."""
        if self.typed_graph is not None:
            return self.typed_graph
        assert self.graph is not None  # one of the two is there
        return TypedGraph.of(self.graph)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_neighbors={self._num_neighbors.values}, graph={self.graph or self.typed_graph})"
        )


def _bidirectional(out: SamplerOutput, keep_orig_edges: bool) -> SamplerOutput:
    """What ``out.to_bidirectional`` gives."""
    edge_index, edge = ops.to_bidirectional(out.row, out.col, out.row, out.col, out.edge, out.edge)
    new = copy.copy(out)
    if keep_orig_edges:
        new.orig_row, new.orig_col = out.row, out.col
    else:
        new.num_sampled_nodes = new.num_sampled_edges = None
    new.row, new.col, new.edge = edge_index[0], edge_index[1], edge
    return new


def is_remote(data: Any) -> bool:
    """Whether this is a pair of PyG's interfaces to data that is kept elsewhere."""
    return (
        isinstance(data, (tuple, list))
        and len(data) == 2
        and isinstance(data[0], FeatureStore)
        and isinstance(data[1], GraphStore)
    )


def _drawn(key: int | None) -> int:
    return int(torch.randint(-(2**63), 2**63 - 1, (), device="cpu")) if key is None else key


def _times_of(times: Tensor, size: int) -> Tensor:
    """The user's times of the positive edges, repeated for the negative ones as PyG does."""
    return times.repeat(-(-size // max(1, times.numel())))[:size]


class _KeyedNegatives:
    """PyG's negative sampling, with draws that are a pure function of a key."""

    def __init__(self, negatives: NegativeSampling, key: int) -> None:
        self._negatives = negatives
        self._generator = torch.Generator().manual_seed(key)
        self.amount = negatives.amount

    def is_binary(self) -> bool:
        return self._negatives.is_binary()

    def is_triplet(self) -> bool:
        return self._negatives.is_triplet()

    def sample(self, num_samples: int, endpoint: str, num_nodes: int) -> Tensor:
        weight = self._negatives.src_weight if endpoint == "src" else self._negatives.dst_weight
        if weight is None:
            return torch.randint(num_nodes, (num_samples,), generator=self._generator, device="cpu")
        if weight.numel() != num_nodes:
            raise ValueError(
                f"{endpoint}_weight of neg_sampling must have {num_nodes} entries, one per vertex, got {weight.numel()}"
            )
        if num_nodes > _MOST_MULTINOMIAL:
            return _drawn_by_weight(weight, num_samples, endpoint, self._generator)
        try:
            chances = weight.cpu() if weight.is_floating_point() else weight.cpu().double()
            return torch.multinomial(chances, num_samples, replacement=True, generator=self._generator)
        except RuntimeError as error:
            raise _bad_weights(weight, endpoint) from error


def _bad_weights(weight: Tensor, endpoint: str) -> ValueError:
    least, most = (weight.min().item(), weight.max().item()) if weight.numel() else ("nothing", "nothing")
    return ValueError(
        f"{endpoint}_weight of neg_sampling must hold numbers >= 0, finite and not all 0, got {least} to {most}"
    )


#: torch.multinomial takes no more weights.
_MOST_MULTINOMIAL = 2**24

#: Weight -> (how often it had been written to, its cumulative sums), for more weights than that.
_SUMS = WeakTensorKeyDictionary()


def _drawn_by_weight(weight: Tensor, num_samples: int, endpoint: str, generator: torch.Generator) -> Tensor:
    """int64 [num_samples] positions, each drawn in proportion to its weight, for any number of weights.

    Raises:
        ValueError: a weight is negative or not finite, or all are 0.
    """
    version, sums = _SUMS.get(weight, (None, None))
    if sums is None or version != weight._version:
        on_cpu = weight.detach().cpu().to(torch.float64)
        if not bool((on_cpu >= 0).all()) or not 0 < float(on_cpu.sum()) < float("inf"):
            raise _bad_weights(on_cpu, endpoint)
        sums = on_cpu.cumsum(0)
        _SUMS[weight] = weight._version, sums
    total = sums[-1]
    drawn = torch.rand(num_samples, dtype=torch.float64, generator=generator, device="cpu") * total
    drawn.clamp_(max=torch.nextafter(total, torch.zeros_like(total)))  # a product may be rounded up
    return torch.searchsorted(sums, drawn, right=True)
