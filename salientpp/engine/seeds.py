"""The seeds of a loader (vertices or edges), the function that samples batches of them, and the probability that a batch needs each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NegativeSampling, NodeSamplerInput

from salientpp.batch.loader_attributes import add_link_attributes, add_node_attributes
from salientpp.engine.connected import Connected
from salientpp.graph.csc import Graph
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.part_topology import PartTopology, topology_of_part
from salientpp.sampling.ppr import PPRSampler
from salientpp.sampling.seeds import edge_start, part_edges, part_nodes, scores_of_part
from salientpp.sampling.topology import Mfg
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.vip.inclusion import inclusion_probability, typed_inclusion_probability, uniform_start

#: Probabilities of the vertices, float [N], by vertex type.
Probability = Mapping["str | None", Tensor]

#: Batch size -> a function for each vertex type with seeds. It maps the number N of vertices to float [N], the probability of each to be a seed of a batch.
Start = Callable[[int], Mapping["str | None", Callable[[int], Tensor]]]


@dataclass(frozen=True, eq=False)
class Seeds:
    """All seeds of a loader, and functions that differ between vertices and edges as seeds.

    Attributes:
        inputs: the seeds in PyG's type. ``inputs[positions]`` is a batch of them.
        draw: the sampler's method for such inputs. It makes an MFG from a batch of them.
        add_batch_attributes: sets the attributes that PyG's loader adds to those of the data.
        access_probability: maps the batch size to the probability that a batch needs each row. Called if rows are to be kept on the device. None: rows
            are already sorted by this probability.
        split: name of the stored split that the seeds are, which means the same on every rank. None: the seeds are no split.
        part_of: returns int64 [number], the stored part that owns each seed. None: no part owns the seeds, such as the user's own vertex pairs.
        start: the probability that a batch starts from each vertex, to plan the cache of a partitioned graph.
        negatives: kind and number of negative examples of edges.
    """

    inputs: NodeSamplerInput | EdgeSamplerInput
    number: int
    draw: Callable[..., Mfg]
    add_batch_attributes: Callable[[Data | HeteroData, Mfg], None]
    access_probability: Callable[[int], Probability] | None
    split: str | None = None
    part_of: Callable[[], Tensor] | None = None
    start: Start | None = None
    negatives: NegativeSampling | None = None


def draws_of(options: Any) -> dict[str, Any]:
    """Picks from a loader's ``options`` the keyword arguments that :func:`sampler_of_part` passes to the sampler."""
    names = ("replace", "disjoint", "temporal_strategy", "shared_draws", "time_window")
    return {name: getattr(options, name) for name in names}


def sampler_of_part(
    part: PartitionedGraph, num_neighbors: Any, time_attr: str | None, weight_attr: str | None, **draws: Any
) -> NeighborSampler:
    """Returns a sampler over the topology of a partitioned graph. The arguments are as in :class:`~salientpp.NeighborSampler`.

    If the topology is stored in parts, the sampler reads only the lists of the part that this view serves.
    """
    needs_types = part.is_hetero or time_attr is not None or weight_attr is not None
    if part.topology == "parts" and part.part_id is not None and part.num_parts > 1:
        return NeighborSampler(topology_of_part(part, time_attr, weight_attr), num_neighbors, **draws)
    graph = part.typed_graph(time_attr, weight_attr) if needs_types else part.graph
    return NeighborSampler(graph, num_neighbors, **draws)


def vertex_seeds(sampler: BaseSampler, inputs: NodeSamplerInput) -> Seeds:
    """Makes the :class:`Seeds` of vertices, for data that one process holds."""
    if inputs.time is None and isinstance(sampler, NeighborSampler) and sampler.topology.clock is not None:
        sampler.topology.time_of_seeds(inputs.input_type, inputs.node[:1], None)  # raises if the seeds have no times
    start = partial(_start, inputs)
    return Seeds(
        inputs=inputs,
        number=inputs.node.numel(),
        draw=sampler.sample_from_nodes,
        add_batch_attributes=partial(add_node_attributes, input_type=inputs.input_type),
        access_probability=partial(_access_probability, sampler, start, inputs.node),
        start=start,
    )


def _start(inputs: NodeSamplerInput, batch_size: int) -> dict[str | None, Callable[[int], Tensor]]:
    return {inputs.input_type: uniform_start(inputs.node, batch_size)}


def edge_seeds(sampler: BaseSampler, inputs: EdgeSamplerInput, negatives: NegativeSampling | None) -> Seeds:
    """Makes the :class:`Seeds` of edges, for data that one process holds."""
    start = partial(edge_start, inputs, negatives)
    triplet = negatives is not None and negatives.is_triplet()
    return Seeds(
        inputs=inputs,
        number=inputs.row.numel(),
        draw=partial(sampler.sample_from_edges, neg_sampling=negatives),
        add_batch_attributes=partial(add_link_attributes, input_type=inputs.input_type, triplet=triplet),
        access_probability=partial(_access_probability, sampler, start, None),
        start=start,
        negatives=negatives,
    )


def vertices_of_part(
    connected: Connected,
    sampler: NeighborSampler,
    nodes: Any,
    time: Tensor | None = None,
    input_id: Tensor | None = None,
) -> Seeds:
    """Makes the :class:`Seeds` of vertices in a rank's part, from the user's arguments of a ``NeighborLoader``."""
    if isinstance(sampler.topology, PartTopology) and connected.exchange.placement.num_storage_ranks:
        sampler.topology.seeds_are_held = False  # storage ranks hold the lists
    inputs, split = part_nodes(connected.own, connected.own_part, nodes, time, input_id)
    owner = connected.own.whole.books[inputs.input_type].owner
    seeds, part_of = vertex_seeds(sampler, inputs), partial(owner, inputs.node)
    access = _access(connected, sampler, seeds)
    return dataclasses.replace(seeds, access_probability=access, split=split, part_of=part_of)


def edges_of_part(
    connected: Connected,
    sampler: NeighborSampler,
    edges: Any,
    label: Tensor | str | None = None,
    time: Tensor | str | None = None,
    input_id: Tensor | None = None,
    negatives: NegativeSampling | None = None,
) -> Seeds:
    """Makes the :class:`Seeds` of edges in a rank's part, from the user's arguments of a ``LinkNeighborLoader``."""
    if isinstance(sampler.topology, PartTopology):
        sampler.topology.seeds_are_held = False
    stored = part_edges(connected.own, connected.own_part, edges)
    label, time = stored.attribute(label), stored.attribute(time)
    input_id = stored.edge_id if input_id is None else input_id
    inputs = edge_inputs(stored.type_, stored.ends, label, time, input_id, negatives)
    # A stored edge belongs to the part that owns its target.
    book = connected.own.whole.books[None if stored.type_ is None else stored.type_[-1]]
    part_of = None if stored.edge_id is None else partial(book.owner, inputs.col)
    seeds = edge_seeds(sampler, inputs, negatives)
    access = _access(connected, sampler, seeds)
    return dataclasses.replace(seeds, access_probability=access, split=stored.split, part_of=part_of)


def edge_inputs(
    type_: tuple[str, str, str] | None,
    ends: Tensor,
    label: Any,
    time: Any,
    input_id: Tensor | None,
    negatives: NegativeSampling | None,
) -> EdgeSamplerInput:
    """Checks edges int64 [2, M] and their attributes, and returns them as PyG's inputs. Labels stay as they were given."""
    for name, values in (("edge_label", label), ("edge_label_time", time), ("input_id", input_id)):
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        if values is not None and got[:1] != [ends.size(1)]:
            raise ValueError(
                f"{name} must have one entry per edge of edge_label_index, expected {ends.size(1)}, got {got}"
            )
    if label is not None and negatives is not None and negatives.is_triplet():
        raise ValueError(
            "edge_label needs to be undefined for 'triplet'-based negative sampling: src_index, dst_pos_index and dst_neg_index of the "
            "batch tell positive and negative targets apart"
        )
    return EdgeSamplerInput(input_id, ends[0], ends[1], label, time, type_)


# --- the probability that a batch needs each row --------------------------------------------------------------


def _access_probability(sampler: BaseSampler, start: Start, nodes: Tensor | None, batch_size: int) -> Probability:
    """Returns the probability that a batch needs each row.

    Args:
        nodes: the seeds, if a batch starts from ``batch_size`` of them and from no other vertices; else None.
    """
    if not isinstance(sampler, NeighborSampler):
        raise ValueError(
            f"device_rows needs to know how batches are sampled, which a {type(sampler).__name__} does not tell; "
            "pass a salientpp.NeighborSampler, or device_rows=0"
        )
    if isinstance(sampler, PPRSampler):
        if nodes is None:
            raise ValueError(
                "device_rows with a PPRSampler needs seeds that are vertices, got edges; pass device_rows=0"
            )
        return {None: sampler.inclusion(nodes, batch_size)}
    graph, fanouts = sampler.topology.graph, sampler.fanouts
    draws: dict[str, Any] = {"include_seeds": True, "replace": sampler.replace}
    if isinstance(graph, Graph) and nodes is not None and fanouts[0]:
        return {None: inclusion_probability(graph, nodes, fanouts[0], batch_size, **draws)}
    return typed_inclusion_probability(sampler.topology.as_typed(), start(batch_size), fanouts, **draws)


def _access(connected: Connected, sampler: NeighborSampler, seeds: Seeds) -> Callable[[int], Probability] | None:
    """Returns the value of :attr:`Seeds.access_probability`. If ranks compute the probabilities together, all get a function or all get None."""
    together = isinstance(sampler.topology, PartTopology)
    is_in_order = connected.are_in_order if together else connected.is_in_order
    return None if is_in_order else partial(_access_of_part, connected, sampler, seeds)


def _access_of_part(connected: Connected, sampler: NeighborSampler, seeds: Seeds, batch_size: int) -> Probability:
    """Returns the probability that a batch of this rank needs each row of its host: float [rows of the host] per vertex type."""
    assert seeds.start is not None  # the seeds of a partitioned graph always have `start`
    starts = seeds.start(batch_size)
    drawn = scores_of_part(
        "vip",
        part=connected.own,
        part_id=connected.own_part,
        sampler=sampler,
        inputs=seeds.inputs,
        start=starts,
        batch_size=batch_size,
        comm=connected.exchange.comm,
    )
    found = {}
    for type_, chance in drawn.items():
        begin, end = connected.held.row_books[type_].range_of(connected.exchange.part_of(type_))
        if (
            connected.is_in_order
        ):  # the probabilities were computed for other ranks, and the order of these rows is stored
            found[type_] = torch.arange(end - begin, 0, -1, device="cpu")
            continue
        if type_ in starts:
            chance = (chance.double() + starts[type_](chance.numel())).clamp(max=1.0)
        found[type_] = chance[begin:end]
    return found
