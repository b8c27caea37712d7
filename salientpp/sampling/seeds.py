"""Seeds that users pass: checks them, converts them to PyG's types, and gives the probability that a batch starts from each vertex."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput

from salientpp.graph.from_pyg import full_edge_type, read_edge_index
from salientpp.graph.part import PartLists
from salientpp.ids import as_tensor, first_outside, read_ids
from salientpp.ranks.comm import Comm
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.part_topology import PartTopology
from salientpp.sampling.ppr import PPRSampler
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.directory.part_topology import PartEdgeRows
from salientpp.store.rows import take_rows
from salientpp.vip.divided import DividedListSums
from salientpp.vip.inclusion import link_start
from salientpp.vip.list_sums import ListSums
from salientpp.vip.policies import TypedWorkload, Workload, score, score_types


def part_nodes(
    part: PartitionedGraph, part_id: int, nodes: Any, time: Tensor | None, input_id: Tensor | None
) -> tuple[NodeSamplerInput, str | None]:
    """Returns a part's ``input_nodes`` as PyG's inputs, and the name of their split (None for ids or a mask)."""
    type_ = None
    if part.is_hetero:
        type_, nodes = split_type(nodes, part.node_types)
    book = part.books[type_]
    begin, end = book.range_of(part_id)
    own_id = None
    if nodes is None:
        nodes = "all"
    if isinstance(nodes, str):
        ids = own_id = part.split(nodes, part_id, type_)
    else:
        ids, is_mask = read_seeds(nodes, book.num_vertices, type_)
        if is_mask:
            ids = own_id = ids[(ids >= begin) & (ids < end)]
        else:
            foreign = first_outside(ids, end, begin)
            if foreign is not None:
                seed = ids[foreign]
                raise ValueError(
                    f"seed {int(seed)} is owned by part {int(book.owner(seed))} but this rank serves part {part_id}; "
                    "give each rank its own seeds, or the name of a split"
                )
    check_one_per_seed(ids, input_time=time, input_id=input_id)
    split = nodes if isinstance(nodes, str) else None
    inputs = NodeSamplerInput(own_id if input_id is None else input_id, ids, time, type_)
    return inputs, split if split is None or type_ is None else f"{split!r} of {type_!r}"


def split_type(nodes: Any, types: Collection[Any]) -> tuple[str, Any]:
    """Splits ``input_nodes`` of a graph with several types into node type and seeds. The seeds are None if only a type was given."""
    type_, nodes = nodes if isinstance(nodes, (tuple, list)) and len(nodes) == 2 else (nodes, None)
    if not isinstance(type_, str):
        raise ValueError(
            f"input_nodes of a graph with several types must be a node type or (node type, mask or ids), got {type_!r}"
        )
    if type_ not in types:
        raise ValueError(
            f"input_nodes must be of a node type of the data ({', '.join(map(str, types))}), got {type_!r}"
        )
    return type_, list(nodes) if isinstance(nodes, range) else nodes


def check_one_per_seed(ids: Tensor, **given: Tensor | None) -> None:
    for name, values in given.items():
        if values is not None and (
            not isinstance(values, Tensor) or values.dim() != 1 or values.numel() != ids.numel()
        ):
            got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"{name} must have one entry per seed, expected shape [{ids.numel()}], got {got}")


def read_seeds(nodes: Any, num_vertices: int, type_: str | None = None) -> tuple[Tensor, bool]:
    """Returns ``input_nodes`` as int64 ids in range, and True if they were a mask.

    Args:
        type_: vertex type of the ids, if types have names.
    """
    of = " of a homogeneous graph" if type_ is None else f" of {type_!r}"
    hint = "; the splits of data in memory are masks, such as data.train_mask" if isinstance(nodes, str) else ""
    if isinstance(nodes, (tuple, str)) and not all(isinstance(node, int) for node in nodes):
        raise ValueError(f"input_nodes{of} must be a mask, integer ids or None, got {nodes!r}{hint}")
    nodes = as_tensor(nodes, f"input_nodes{of} must be a mask, integer ids or None")
    if nodes.layout != torch.strided or nodes.device.type == "meta":
        raise ValueError(f"input_nodes must be an ordinary tensor with values, got {nodes.layout} on {nodes.device}")
    if nodes.dim() != 1:
        raise ValueError(f"input_nodes must have 1 dimension, got shape {list(nodes.shape)}")
    return read_ids(nodes, num_vertices, "input_nodes")


def checked_ends(ends: Any, type_: tuple[str, str, str] | None, sizes: Mapping[Any, int]) -> Tensor:
    """Checks that the ids of ``edge_label_index`` are in range, and returns them as int64 [2, M]."""
    ends = read_edge_index(ends, "edge_label_index", "M").to(torch.int64)
    for side, end in enumerate((None, None) if type_ is None else (type_[0], type_[-1])):
        if end not in sizes:
            raise ValueError(
                f"edge_label_index must join node types of the data ({', '.join(map(str, sizes))}), got {end!r}"
            )
        at = first_outside(ends[side], sizes[end])
        if at is not None:
            raise ValueError(f"edge_label_index[{side}, {at}] must be in [0, {sizes[end]}), got {int(ends[side, at])}")
    return ends


@dataclass(frozen=True, eq=False)
class PartEdges:
    """Edges that are the seeds of one rank of a partitioned graph.

    Attributes:
        ends: int64 [2, M], global ids.
        edge_id: int64 [M], the numbers of these edges in the graph; None if the user gave the pairs of ids.
        split: name of the split of edges, or 'all'; None if the user gave the pairs of ids.
        rows: attributes of the edges of this type whose targets the rank's part owns; None if the user gave the pairs of ids.
    """

    type_: Any
    ends: Tensor
    edge_id: Tensor | None
    split: str | None
    rows: PartEdgeRows | None

    def attribute(self, given: Tensor | str | None) -> Tensor | None:
        """Returns one value per edge. A string names an attribute of the stored edges; any other value is returned unchanged."""
        if not isinstance(given, str):
            return given
        if self.edge_id is None or self.rows is None:
            raise ValueError(
                f"{given!r} names an edge attribute, which only the graph's own edges have; pass a tensor with one entry per pair"
            )
        if given not in self.rows.rows:
            raise ValueError(f"the edges have the attributes {', '.join(self.rows.rows) or 'none'}, got {given!r}")
        return take_rows(self.rows.rows[given], self.edge_id - self.rows.first_edge)


def part_edges(part: PartitionedGraph, part_id: int, given: Any) -> PartEdges:
    """Returns the edges that a part's ``edge_label_index`` names on a partitioned graph. Pairs of ids may be of a relation that the graph lacks."""
    type_, which = None, given
    if part.is_hetero:
        words = given if isinstance(given, (tuple, list)) else ()
        alone = len(words) in (2, 3) and all(isinstance(word, str) for word in words)
        type_, which = (given, None) if alone else words if len(words) == 2 else (None, None)
        type_ = full_edge_type(type_, part.edge_types)
        is_named = isinstance(type_, tuple) and len(type_) == 3 and all(isinstance(word, str) for word in type_)
        if type_ not in part.edge_types and not (is_named and _are_pairs(which)):
            raise ValueError(
                f"edge_label_index of a graph with several types must be an edge type ({', '.join(map(str, part.edge_types))}), or a pair (edge type, "
                f"name of a split or ids [2, M]), got {given!r}"
            )
    if _are_pairs(which):
        sizes = {name: book.num_vertices for name, book in part.books.items()}
        return PartEdges(type_, checked_ends(which, type_, sizes), None, None, None)
    rows = part.part_edge_rows(part_id)[type_]
    name = "all" if which is None else which
    edge_id = part.edge_split(name, part_id, type_)
    lists = part.part_graph(part_id=part_id).lists[part.edge_types.index(type_)]
    ends = torch.cat([_ends_of(each, edge_id) for each in lists], 1)
    return PartEdges(type_, ends, edge_id, f"{name!r} of {type_}" if part.is_hetero else name, rows)


def _are_pairs(which: Any) -> bool:
    """True if ``which`` is meant as pairs of ids, and not as the name of a split or as all edges."""
    return which is not None and not isinstance(which, str)


def _ends_of(lists: PartLists, edge_id: Tensor) -> Tensor:
    """Returns the sources and targets, int64 [2, m], of those edges in ``edge_id`` (ascending, int64) that are in these lists."""
    indptr, indices = lists.relation.indptr, lists.relation.indices
    begin, end = torch.searchsorted(edge_id, torch.tensor([0, indices.numel()], device="cpu") + lists.first_edge)
    position = edge_id[begin:end] - lists.first_edge
    target = torch.searchsorted(indptr, position, right=True) - 1
    return torch.stack([indices[position].to(torch.int64), target + lists.first_target])


def list_sums_of(sampler: NeighborSampler, comm: Comm) -> ListSums:
    """Returns the object with which inclusion probabilities are summed over a topology's edges. Its sums are collective if hosts divide the edges."""
    topology = sampler.topology
    if isinstance(topology, PartTopology):
        return DividedListSums(comm, topology.part)
    return ListSums.of(topology.as_typed() if topology.graph is None else topology.graph)


def workload_of_part(
    part: PartitionedGraph, part_id: int, sampler: NeighborSampler, seeds: Tensor, batch_size: int, comm: Comm
) -> Workload:
    """Returns a description of a part's batches, from which a cache policy scores the vertices; see :meth:`PartitionedGraph.workload`.

    If other hosts hold some of the lists, its ``graph`` is the result of :func:`list_sums_of`.
    """
    arguments = part_id, seeds, sampler.fanouts[0], batch_size, sampler.replace
    if not isinstance(sampler.topology, PartTopology):
        return part.workload(*arguments)
    return part.workload(*arguments, list_sums_of(sampler, comm))


def scores_of_part(
    policy: Any,
    *,
    part: PartitionedGraph,
    part_id: int,
    sampler: NeighborSampler,
    inputs: NodeSamplerInput | EdgeSamplerInput,
    start: Mapping[str | None, Callable[[int], Tensor]],
    batch_size: int,
    comm: Comm,
) -> Mapping[str | None, Tensor]:
    """Returns the scores by which a cache policy ranks the vertices for a part's cache, per vertex type float [N].

    The loader and the analysis both plan by these scores, so that they cache the same rows.

    If other hosts hold some of the lists, the call is collective. The ranks then compute their scores together, unless
    each of them finds stored scores of the policy 'vip'.

    Args:
        inputs: the seeds of the part.
        start: by vertex type, the probability that a batch starts from each vertex.
    """
    if isinstance(sampler, PPRSampler):
        assert isinstance(inputs, NodeSamplerInput)  # the loader refuses caches of other seeds
        return {None: sampler.inclusion(inputs.node, batch_size)}
    workload: Workload | TypedWorkload
    draws = sampler.fanouts, batch_size, sampler.replace
    of_vertices = isinstance(inputs, NodeSamplerInput) and not sampler.topology.has_weights
    stored = (part_id, inputs.input_type, inputs.node, *draws) if of_vertices else ()
    if sampler.is_plain and of_vertices:
        # Neighbours that a tree may not see, because of their time or because they belong to another tree, are counted.
        workload = workload_of_part(part, part_id, sampler, inputs.node, batch_size, comm)
    else:
        vip = part.vip_of(*stored) if stored else None
        workload = TypedWorkload(list_sums_of(sampler, comm), part_id, start, sampler.fanouts, sampler.replace, vip)
    if not isinstance(sampler.topology, PartTopology):
        return _scores(policy, workload)
    known = policy == "vip" and workload.vip is not None
    if all(flag for (flag,) in comm.gather_numbers([int(known)])):
        return _scores(policy, workload)
    found = _scores(policy, replace(workload, vip=None))
    if known:
        return _scores(policy, workload)
    if policy == "vip" and stored:
        part.keep_vip(part_id, found, *stored[1:])
    return found


def _scores(policy: Any, workload: Workload | TypedWorkload) -> Mapping[str | None, Tensor]:
    if isinstance(workload, Workload):
        return {None: score(policy, workload)}
    return score_types(policy, workload)


def edge_start(
    inputs: EdgeSamplerInput, negatives: NegativeSampling | None, batch_size: int
) -> Mapping[str | None, Callable[[int], Tensor]]:
    """Returns, by vertex type, a function that takes the number N of vertices and returns, float [N], the probability that a batch starts from each."""
    count = 0 if negatives is None else math.ceil(batch_size * negatives.amount)
    of_sources = 0 if negatives is not None and negatives.is_triplet() else count
    source = link_start(inputs.row, batch_size, of_sources, None if negatives is None else negatives.src_weight)
    target = link_start(inputs.col, batch_size, count, None if negatives is None else negatives.dst_weight)
    ends = (None, None) if inputs.input_type is None else (inputs.input_type[0], inputs.input_type[-1])
    start = {ends[0]: source, ends[1]: target}
    if ends[0] == ends[1]:
        start = {ends[0]: lambda size: 1.0 - (1.0 - source(size)) * (1.0 - target(size))}
    return start
