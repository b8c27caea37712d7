"""A PyG ``BaseSampler`` that draws from this package's topologies.

PyG's own code does the work around a draw: the seeds of an edge, their labels, and bidirectional subgraphs.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    NumNeighbors,
)
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.sampler.neighbor_sampler import node_sample

from salientpp import ops
from salientpp.arguments import wording
from salientpp.graph.csc import Graph
from salientpp.graph.typed import TypedGraph
from salientpp.sampling.part_topology import Drawing, PartTopology
from salientpp.sampling.pyg_samples import sample_of_edges
from salientpp.sampling.stored import GraphTopology, topology_of
from salientpp.sampling.time_window import read_window
from salientpp.sampling.topology import ByType, DrawOptions, Mfg, Topology, ids_by_type
from salientpp.suggestions import suggest_arguments
from salientpp.vip.inclusion import check_fanouts

#: What ``num_neighbors`` must be on a graph with several edge types.
_EXPECTED = "num_neighbors must have a list of integers, one per hop, for each edge type of the graph"

#: 'batch': the vertices of a batch share random numbers. None: every vertex draws independently.
SharedDraws = Literal["batch"] | None


class NeighborSampler(BaseSampler):
    """Neighbour sampler for any loader that takes a ``BaseSampler``.

    Such loaders are PyG's ``NodeLoader`` and ``LinkLoader``, Lightning's data modules, and this package's loaders (``neighbor_sampler=``).

    Args:
        data: a ``Data``, a ``HeteroData``, or a pair of PyG's ``FeatureStore`` and ``GraphStore``; or the edges alone: a :class:`~salientpp.Graph`,
            a typed graph, or a :class:`~salientpp.sampling.topology.Topology`.
        num_neighbors: fanouts, nearest the seeds first, -1 for all. For a ``HeteroData`` also a mapping from edge types, or PyG's
            ``NumNeighbors``.
        subgraph_type: 'directional': the edges drawn; 'bidirectional': the edges drawn and their reverses; 'induced': all edges between
            sampled vertices.
        replace: draw with replacement.
        disjoint: every seed grows a tree of its own; ``batch`` numbers the trees.
        temporal_strategy: with ``time_attr``, 'uniform' draws from all neighbours that are not in the future of the seed, and 'last' draws from the
            latest of these neighbours.
        time_attr: name of the attribute with the times of vertices or edges; implies ``disjoint``.
        weight_attr: name of the attribute with edge weights; a neighbour is drawn with probability proportional to its edge's weight.
        is_sorted: ``edge_index`` is sorted by target, and inside a target's list by time.
        share_memory: accepted and ignored: worker threads share memory anyway, and so do forked processes.
        directed: deprecated; False means ``subgraph_type='induced'``.
        sample_direction: 'forward' draws sources of edges into a vertex, 'backward' targets of edges out of it.
        shared_draws: None: every vertex draws independently. 'batch': every neighbour has one number in a batch, and each vertex takes the neighbours with
            the smallest numbers, so that a batch has fewer vertices; see :class:`~salientpp.NeighborLoader`.
        time_window: with times, a number >= 0 in their units: a seed of time t draws neighbours whose time is in [t - time_window, t], both ends included.
            The window is the same in every hop. None and infinity: all times up to t.

    Every call makes new draws from torch's global generator, unless ``key`` is given.

    Raises:
        ValueError: an argument is wrong.
        TypeError: ``data`` is of another type.
    """

    @suggest_arguments
    def __init__(
        self,
        data: Data | HeteroData | Graph | TypedGraph | Topology,
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
        time_window: float | None = None,
    ) -> None:
        if not directed:
            warnings.warn(
                "directed=False is deprecated; pass subgraph_type='induced'", DeprecationWarning, stacklevel=3
            )
            subgraph_type = SubgraphType.induced
        if sample_direction not in ("forward", "backward"):
            raise ValueError(f"sample_direction must be 'forward' or 'backward', got {sample_direction!r}")
        if temporal_strategy not in ("uniform", "last"):
            raise ValueError(f"temporal_strategy must be 'uniform' or 'last', got {temporal_strategy!r}")
        self.sample_direction = sample_direction
        self.subgraph_type = _type_of(subgraph_type)
        self.topology = topology_of(
            data,
            time_attr=time_attr,
            weight_attr=weight_attr,
            is_sorted=is_sorted,
            backward=sample_direction == "backward",
            # Induced subgraphs read whole lists, but the ids of only a few of their edges.
            linked=self.subgraph_type != SubgraphType.induced,
        )
        if temporal_strategy != "uniform" and not self.is_temporal:
            raise ValueError(f"temporal_strategy={temporal_strategy!r} needs times; pass time_attr too")
        self.num_neighbors = num_neighbors
        if isinstance(data, Data) and isinstance(self.topology, GraphTopology) and self.fanouts[0]:
            _warn_without_edges(data)
        self.replace = bool(replace)
        self.disjoint = bool(disjoint)
        self.temporal_strategy = temporal_strategy
        self.shared_draws = shared_draws
        self._check_shared_draws()
        self.time_window = time_window
        self.keep_orig_edges = False

    def _check_shared_draws(self) -> None:
        if self.shared_draws is None:
            return
        if self.shared_draws != "batch":
            raise ValueError(f"shared_draws must be 'batch' or None, got {self.shared_draws!r}")
        if self.replace:
            raise ValueError(
                "shared_draws='batch' excludes replace=True, because all draws of a batch share one random number per neighbour; leave one of them out"
            )
        if self.topology.has_weights:
            raise ValueError(
                "shared_draws='batch' excludes weight_attr, because shared draws are uniform; leave one of them out"
            )

    # --- attributes that PyG's samplers have ------------------------------------------------------------------------

    @property
    def num_neighbors(self) -> NumNeighbors:
        return self._num_neighbors

    @num_neighbors.setter
    def num_neighbors(self, num_neighbors: Any) -> None:
        if isinstance(num_neighbors, NumNeighbors) or (self.is_hetero and isinstance(num_neighbors, Mapping)):
            # A NumNeighbors object caches values for one list of edge types, so make a new one.
            with wording(_EXPECTED, num_neighbors):
                given = num_neighbors if isinstance(num_neighbors, NumNeighbors) else NumNeighbors(dict(num_neighbors))
                of = given.values
                # Its keys are joined names, which cannot be split again if a name contains "__".
                of = {key.to_tuple(): of[key] for key in of} if isinstance(of, Mapping) else of
                values = NumNeighbors(of, given.default)
        else:
            values = NumNeighbors(check_fanouts(num_neighbors, may_be_empty=True))
        self._num_neighbors = values
        #: Per edge type, neighbours per vertex and hop.
        self.fanouts = _fanouts_of(values, self.topology.edge_types)

    @property
    def is_hetero(self) -> bool:
        return self.topology.is_hetero

    @property
    def is_plain(self) -> bool:
        """True for one vertex type without weighted draws. Inclusion probabilities are then computed by the faster, untyped function."""
        return not self.is_hetero and not self.topology.has_weights

    @property
    def is_temporal(self) -> bool:
        return self.topology.clock is not None

    @property
    def time_window(self) -> int | float | None:
        return self._time_window

    @time_window.setter
    def time_window(self, time_window: Any) -> None:
        #: ``window`` is the same length in units of the topology's clock.
        self._time_window, self.window = read_window(time_window, self.topology.clock)

    @property
    def disjoint(self) -> bool:
        return self._disjoint or self.is_temporal

    @disjoint.setter
    def disjoint(self, disjoint: bool) -> None:
        self._disjoint = disjoint

    @property
    def num_nodes(self) -> int | dict[Any, int]:
        sizes = self.topology.num_vertices
        return dict(sizes) if self.is_hetero else sizes[None]

    @property
    def node_time(self) -> Tensor | dict[Any, Tensor] | None:
        """Times of the vertices, converted to int64 by the graph's clock; None without times."""
        times = self.topology.node_time
        return (dict(times) or None) if self.is_hetero else times.get(None)

    @property
    def nbytes(self) -> int:
        """Bytes of the topology, see :attr:`Topology.nbytes`."""
        return self.topology.nbytes

    def settings(self) -> dict[str, Any]:
        """Returns the sampling options as plain values, for the saved state of a loader."""
        return {
            "num_neighbors": self.fanouts if self.is_hetero else self.fanouts[0],
            "replace": self.replace,
            "subgraph_type": self.subgraph_type.value,
            "disjoint": self.disjoint,
            "temporal_strategy": self.temporal_strategy,
            # Saved states of loaders without shared draws or a time window do not have these entries.
            **({} if self.shared_draws is None else {"shared_draws": self.shared_draws}),
            **({} if self.window is None else {"time_window": self.window}),
        }

    # --- sampling -----------------------------------------------------------------------------------------

    def sample_from_nodes(
        self,
        inputs: NodeSamplerInput,
        key: int | None = None,
        draw_key: int | None = None,
        *,
        only_vertices: bool = False,
    ) -> Mfg:
        """Samples the message-flow graph (MFG) of some vertices.

        Args:
            inputs: the seeds, with times and node type if any.
            key: 64-bit; fixes all draws. None draws a key from torch's global generator.
            draw_key: 64-bit; fixes the draws of neighbours instead of ``key``.
            only_vertices: return only ``node``, which is faster.
        """
        key = key_of_draws(key if draw_key is None else draw_key)
        return self.finished(
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
    ) -> Mfg:
        """Samples the MFG of the end points of some edges and of negative examples.

        Args:
            inputs: the edges, with labels, times and edge type if any.
            neg_sampling: number and kind of negative examples.
            key: as in :meth:`sample_from_nodes`; fixes the negative examples too.
            draw_key: as in :meth:`sample_from_nodes`; ``key`` then fixes only the negative examples.
            only_vertices: as in :meth:`sample_from_nodes`.
        """
        key = key_of_draws(key)
        draw_key = key if draw_key is None else draw_key

        def sample(seed: Any, time: Any) -> Mfg:
            return self._sample(seed, time, draw_key, True, only_vertices)

        out = sample_of_edges(self.topology, self.disjoint, inputs, neg_sampling, key, sample, self.window is not None)
        return self.finished(out, only_vertices)

    def finished(self, out: Mfg, only_vertices: bool) -> Mfg:
        """Adds reversed edges to a sample if ``subgraph_type`` is bidirectional and edges are wanted."""
        if self.subgraph_type != SubgraphType.bidirectional or only_vertices:
            return out
        if isinstance(out, HeteroSamplerOutput):
            return out.to_bidirectional(keep_orig_edges=self.keep_orig_edges)
        # The result of out.to_bidirectional, by a faster operator.
        edge_index, edge = ops.to_bidirectional(out.row, out.col, out.row, out.col, out.edge, out.edge)
        new = copy.copy(out)
        if self.keep_orig_edges:
            new.orig_row, new.orig_col = out.row, out.col
        else:
            new.num_sampled_nodes = new.num_sampled_edges = None
        new.row, new.col, new.edge = edge_index[0], edge_index[1], edge
        return new

    def _sample(
        self,
        seed: Tensor | ByType,
        seed_time: Any = None,
        key: int | None = None,
        on_clock: bool = False,
        only_vertices: bool = False,
    ) -> Mfg:
        """Samples an MFG. PyG's bidirectional sampler calls it by this name. ``on_clock``: ``seed_time`` is already int64 of the graph's clock."""
        seeds, key, options, times = self.arguments(seed, seed_time, key_of_draws(key), on_clock, only_vertices)
        out = self.topology.sample(seeds, key, options, times, only_vertices=only_vertices)
        if self.sample_direction == "backward":
            out.row, out.col = out.col, out.row
        return out

    def drawing(self, seed: Tensor | ByType, seed_time: Any, key: int, on_clock: bool, only_vertices: bool) -> Drawing:
        """Samples an MFG over a topology in parts. Yields requests to other ranks, and is sent their answers."""
        assert isinstance(self.topology, PartTopology)  # only such a topology is drawn in rounds
        arguments = self.arguments(seed, seed_time, key, on_clock, only_vertices)
        return (yield from self.topology.drawing(*arguments, only_vertices=only_vertices))

    def arguments(
        self, seed: Tensor | ByType, seed_time: Any, key: int, on_clock: bool, only_vertices: bool
    ) -> tuple[ByType, int, DrawOptions, ByType | None]:
        """Converts seeds and times, as PyG passes them, to the arguments of :meth:`Topology.sample` up to ``seed_time``."""
        if self.shared_draws is not None:
            self._check_shared_draws()  # `replace` may have changed since construction
        seeds = {name: ids.to(torch.int64) for name, ids in ids_by_type(seed).items()}
        clock, times = self.topology.clock, seed_time
        if times is not None:
            times = times if isinstance(times, dict) else {None: times}
            if clock is not None and not on_clock:
                given = times
                times = {name: clock.read(time, "input_time") for name, time in given.items()}
                if self.window is not None:
                    for time in given.values():
                        clock.check_ends(time, "input_time")
        options = DrawOptions(
            self.fanouts,
            self.replace,
            self._disjoint or clock is not None,
            self.temporal_strategy == "last",
            # Edges between the vertices of a batch are searched once all its vertices are known.
            self.subgraph_type == SubgraphType.induced and not only_vertices,
            self.shared_draws is not None,
            self.window,
        )
        return seeds, key, options, times

    def __repr__(self) -> str:
        graph = self.topology.graph or self.topology
        return f"{type(self).__name__}(num_neighbors={self._num_neighbors.values}, {_changed(self)}graph={graph})"


def _type_of(given: Any) -> SubgraphType:
    kinds = [kind.value for kind in SubgraphType]
    if getattr(given, "value", given) not in kinds:
        raise ValueError(f"subgraph_type must be one of {kinds}, got {given!r}")
    return SubgraphType(getattr(given, "value", given))


def _changed(sampler: NeighborSampler) -> str:
    """Returns the options that differ from their defaults, as text."""
    values = {
        "subgraph_type": None if sampler.subgraph_type == SubgraphType.directional else sampler.subgraph_type.value,
        "replace": sampler.replace or None,
        "disjoint": sampler._disjoint or None,
        "temporal_strategy": sampler.temporal_strategy if sampler.is_temporal else None,
        "time_window": sampler.time_window,
        "shared_draws": sampler.shared_draws,
    }
    return "".join(f"{name}={value!r}, " for name, value in values.items() if value is not None)


def _warn_without_edges(data: Data) -> None:
    if data.get("edge_index") is None and data.get("adj_t") is None:
        warnings.warn(
            "data has neither edge_index nor adj_t, so batches hold their seeds only", UserWarning, stacklevel=4
        )


def _fanouts_of(num_neighbors: NumNeighbors, edge_types: Sequence[Any]) -> list[list[int]]:
    """Returns the checked fanouts of each edge type."""
    if None in edge_types:
        return [check_fanouts(num_neighbors.get_values(), may_be_empty=True)]
    joined = Counter(map("__".join, edge_types))
    alike = [name for name in edge_types if joined["__".join(name)] > 1]
    if alike and isinstance(num_neighbors.values, Mapping):
        raise ValueError(
            f"num_neighbors by edge type cannot tell {' and '.join(map(str, alike))} apart, because PyG joins both to one name; rename one, or pass a list"
        )
    with wording(_EXPECTED, num_neighbors.values):
        values = num_neighbors.get_values(edge_types)
    fanouts = []
    for name in edge_types:
        try:
            fanouts.append(check_fanouts(values[name], may_be_empty=True))
        except ValueError as error:
            raise ValueError(f"edge type {name}: {error}") from None
    return fanouts


def key_of_draws(key: int | None) -> int:
    """Returns the given key, or one from torch's global generator."""
    return int(torch.randint(-(2**63), 2**63 - 1, (), device="cpu")) if key is None else key
