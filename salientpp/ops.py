"""What can the compiled kernels do, and what do they take and give?

The typed face of ``torch.ops.salientpp``: one function per operator of ``csrc/library.cpp``, with shapes,
dtypes and errors. The kernels run on CPU tensors, keep no state that shows, and release the GIL, so several
Python threads may call them at once. Each has a fake kernel, so that ``torch.compile`` and
``torch.library.opcheck`` know its output shapes.

Suffixes of shapes: N vertices, E edges, K parts, n ids at hand. Kernels raise ``RuntimeError`` that says
expected and got; the public functions above them check users' arguments first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

try:
    from salientpp import _C  # noqa: F401  (loading it registers torch.ops.salientpp)
except ImportError as error:
    raise ImportError(
        "salientpp's compiled extension salientpp._C could not be loaded "
        f"({error}); build it for this Python and torch with "
        "`pip install --no-build-isolation .`, or `make build` in a checkout"
    ) from error

_ops = torch.ops.salientpp

# Each fake kernel below makes torch ask `inspect` for this module, which resolves the file of every loaded module, a thousand of them, to find it:
# half the time of importing the package. This is the entry that the search would make.
inspect.modulesbyfile.setdefault(__file__, __name__)

#: Memory that one sampling thread may spend on its dense vertex map (4 bytes per vertex of the graph);
#: graphs of more vertices use a hash map of the batch instead. Samples do not depend on the choice.
MAP_BUDGET_BYTES = 512 * 2**20


def join_key(*fields: int) -> int:
    """A signed 64-bit key that depends on every field and on their order, for the kernels that draw.

    The mixing of ``csrc/random.h``: splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014).
    """
    key = _with_field(_of_fields(fields[:-1]), fields[-1]) if fields else 0
    return key - 2**64 if key >= 2**63 else key


@functools.lru_cache(maxsize=256)
def _of_fields(fields: tuple[int, ...]) -> int:
    """Unsigned. The batches of an epoch have all but the last field in common."""
    key = 0
    for value in fields:
        key = _with_field(key, value)
    return key


def _with_field(key: int, value: int) -> int:
    return _mix(_mix((key + _GOLDEN) & _MASK) ^ ((value * 0xD1342543DE82EF95 + _GOLDEN) & _MASK))


_MASK, _GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


# --- graph -----------------------------------------------------------------------------------------------


def csc_from_coo(
    source: Tensor,
    target: Tensor,
    num_vertices: int,
    *,
    linked: bool = False,
    is_sorted: bool = False,
    parallel: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort edges by target, keeping the order of edges with the same target.

    Args:
        source, target: int32 or int64 [E], ids in [0, N).
        num_vertices: N.
        linked: give links in place of ``edge_id``: int64 [E], an edge's source in the lower half, its input position in the upper. For
            fewer than 2**31 vertices and edges.
        is_sorted: the edges are in order already, which is checked; ``edge_id`` is empty.
        parallel: torch's threads share large work; False: the thread that calls does it.

    Returns:
        ``indptr`` int64 [N + 1]; ``indices`` [E], the sources (int32 where N < 2**31, else int64); ``edge_id``
        int64 [E], the input position of every edge.
    """
    return _ops.csc_from_coo(source, target, num_vertices, linked, is_sorted, parallel)


def transpose_csc(indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The same edges, listed by source: ``indptr`` int64 [N + 1], ``indices`` [E] (ascending targets)."""
    return _ops.transpose_csc(indptr, indices)


def is_symmetric(indptr: Tensor, indices: Tensor) -> Tensor:
    """Whether :func:`transpose_csc` would give the same arrays, bool [1]: lists ascend, and every edge is there in both directions, equally often.

    By a sum of hashes, which takes no memory and takes one graph in 2**64 for symmetric that is not.
    """
    return _ops.is_symmetric(indptr, indices)


def check_csc(indptr: Tensor, indices: Tensor) -> None:
    """Raise unless ``indptr`` int64 [N + 1] runs from 0 to E without decreasing and ``indices`` is in [0, N)."""
    _ops.check_csc(indptr, indices)


# --- plan ------------------------------------------------------------------------------------------------


def inclusion_probability(
    indptr: Tensor,
    out_indptr: Tensor,
    out_indices: Tensor,
    seeds: Tensor,
    seed_offsets: Tensor,
    fanouts: Sequence[int],
    batch_size: int,
    *,
    frontier: bool,
    include_seeds: bool,
    replace: bool,
) -> Tensor:
    """Vertex inclusion probabilities of K seed sets, float32 [K, N]; see :mod:`salientpp.vip.inclusion`.

    Args:
        indptr: int64 [N + 1], in-lists (their lengths are the degrees that vertices draw from).
        out_indptr, out_indices: the transposed graph.
        seeds: int64, the K seed sets one after the other; ``seed_offsets`` int64 [K + 1] bounds them.
        fanouts: one entry per hop, -1 for all neighbours.
    """
    return _ops.inclusion_probability(
        indptr,
        out_indptr,
        out_indices,
        seeds,
        seed_offsets,
        list(fanouts),
        batch_size,
        frontier,
        include_seeds,
        replace,
    )


def symmetrise(
    indptr: Tensor, indices: Tensor, weight_by_target: Tensor | None = None, weight_of_each: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The undirected graph without loops in which one edge stands for all between two vertices, in the lists of both.

    Args:
        weight_by_target: int64 [N] >= 1, what each edge into a vertex weighs; or
        weight_of_each: int32 or int64 [E] >= 1; 1 each without both.

    Returns:
        ``indptr`` int64 [N + 1]; ``indices`` [E'] of the dtype that was given, ascending in each list; ``weight`` [E'], what the edges that an entry stands
        for weigh together, int32 where all fit. It is empty where no weights are given and all entries stand for as many edges.
    """
    return _ops.symmetrise(indptr, indices, weight_by_target, weight_of_each)


def rebalance_parts(
    indptr: Tensor,
    indices: Tensor,
    assignment: Tensor,
    weights: Tensor,
    limits: Tensor,
    num_parts: int,
    sweeps: int,
    edge_weights: Tensor | None = None,
) -> Tensor:
    """Move vertices between parts until no part exceeds a limit; see :mod:`salientpp.partitioning.assign`."""
    return _ops.rebalance_parts(indptr, indices, assignment, weights, limits, num_parts, sweeps, edge_weights)


def reassign_parts(cost: Tensor, assignment: Tensor, weights: Tensor, limits: Tensor, most_moves: int) -> Tensor:
    """Move vertices to parts where they cost less, alone or two that swap places, those that gain most first; see :mod:`salientpp.partitioning.refine`.

    Args:
        cost: float32 [K, N], finite: of a vertex in a part, whatever other vertices do.
        assignment: int64 [N], parts in [0, K).
        weights: int64 [N, C], >= 0, what a vertex adds to its part.
        limits: int64 [C]. No load rises above its limit, and none that is above it rises; no part becomes empty.
        most_moves: of vertices; a swap may be one more.

    Returns:
        int64 [N].
    """
    return _ops.reassign_parts(cost, assignment, weights, limits, most_moves)


def keep_heaviest_edges(indptr: Tensor, indices: Tensor, most: int, edge_weights: Tensor | None = None) -> Tensor:
    """Which edges of an undirected graph are among the ``most`` heaviest at either end, bool [E].

    Args:
        indptr, indices: each edge in the lists of both its ends, without repeats.
        most: >= 1. A vertex of no more edges keeps them all.
        edge_weights: int32 or int64 [E], the same at both ends; None means 1 each. A hash of the ends decides among equals.
    """
    return _ops.keep_heaviest_edges(indptr, indices, most, edge_weights)


def cluster_vertices(
    indptr: Tensor,
    indices: Tensor,
    vertex_weights: Tensor,
    most_weight: int,
    rounds: int,
    seed: int,
    edge_weights: Tensor | None = None,
) -> Tensor:
    """Clusters of an undirected graph's vertices that hang together, int32 [N], numbered from 0 by their first vertices.

    Args:
        indptr, indices: each edge in the lists of both its ends; loops do not count.
        vertex_weights: int64 [N], >= 1, of sum <= 2**61.
        most_weight: >= 1, of a cluster of more than one vertex.
        rounds: >= 1, how often every vertex may move at most, to the cluster that it has most edge weight to.
        seed: decides among equals.
        edge_weights: int32 or int64 [E] >= 1; None: 1 each.
    """
    return _ops.cluster_vertices(indptr, indices, vertex_weights, most_weight, rounds, seed, edge_weights)


def contract_lists(
    indptr: Tensor,
    indices: Tensor,
    cluster: Tensor,
    num_clusters: int,
    first: int,
    last: int,
    edge_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The neighbour lists of the clusters in [first, last), in the graph whose vertices are the clusters, without loops.

    Args:
        indptr, indices: each edge in the lists of both its ends.
        cluster: int32 [N], of every vertex, in [0, num_clusters).
        edge_weights: int32 [E] >= 1; None: 1 each.

    Returns:
        The lengths of the lists, int64 [last - first]; their entries one after another, int32, ascending in each list; and the weights of all edges between
        the two clusters together, int64. Beside it there are 4 bytes for each entry that was given, 8 with weights.
    """
    return _ops.contract_lists(indptr, indices, cluster, num_clusters, first, last, edge_weights)


def sum_over_lists(indptr: Tensor, indices: Tensor, value: Tensor) -> Tensor:
    """``out[v]`` = the sum of ``value`` over ``indices[indptr[v]:indptr[v + 1]]``; float32 or float64, [N] or up to 8 columns, [N, W], as ``value``."""
    return _ops.sum_over_lists(indptr, indices, value)


def code_ids(ids: Tensor, num_ids: int, but_from: int = 0, but_to: int = 0) -> Tensor:
    """The distinct of the ``ids`` int64 [n], in any order, as a list of 5 to 7 bits an id, uint8; but for those in [but_from, but_to).

    Ids are in [0, num_ids), of fewer than 2**31.
    """
    return _ops.code_ids(ids, num_ids, but_from, but_to)


def ids_of_list(list: Tensor, num_ids: int) -> Tensor:
    """The ids of a list that :func:`code_ids` made, int64 [n], ascending."""
    return _ops.ids_of_list(list, num_ids)


def link_lists(lists: Sequence[Tensor], heads: int, num_ids: int) -> list[Tensor]:
    """For every id of each of the first ``heads`` lists, in ascending order, how many lists later it comes next, int16; 0: in none of these."""
    return _ops.link_lists(lists, heads, num_ids)


def fill_slots(ids: Tensor, prior: Tensor, slot_id: Tensor, slot_key: Tensor, table: Tensor) -> None:
    """Let the first slots hold the distinct ``ids`` int64 and the others nothing, with no batch known.

    Args:
        prior: float32 [N], how probably a batch needs each id.
        slot_id, slot_key: int32 [C] and int16 [C], written.
        table: int16 (for C < 2**16) or int32, more than C entries, written.
    """
    _ops.fill_slots(ids, prior, slot_id, slot_key, table)


def note_uses(list: Tensor, batch: int, num_ids: int, slot_id: Tensor, slot_key: Tensor, table: Tensor) -> None:
    """Let slots whose next use is not known have it at ``batch``, if their ids are in the list. Lists come in the order of their batches."""
    _ops.note_uses(list, batch, num_ids, slot_id, slot_key, table)


def plan_batch(
    remote_id: Tensor,
    links: Tensor,
    batch: int,
    prior: Tensor,
    slot_id: Tensor,
    slot_key: Tensor,
    table: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Which rows of a batch the slots have, and which of the others enter; see :mod:`salientpp.ways.lookahead.planner`.

    Args:
        remote_id: int64 [n], distinct ids of [0, N).
        links: int16 [n], for the same ids in ascending order, as :func:`link_lists` gives them.
        batch: its number; those of known batches are at most 2**15 - 1 larger.
        prior, slot_id, slot_key, table: as in :func:`fill_slots`; the last three are brought up to date.

    Returns:
        Five int64 vectors: ``hit_place`` (ascending, in ``remote_id``) and ``hit_slot``, ``fetched_place`` (ascending), and for what enters
        ``admitted_row`` (which of the fetched) and ``admitted_slot``.
    """
    return _ops.plan_batch(remote_id, links, batch, prior, slot_id, slot_key, table)


def plan_sums(
    row: Tensor,
    col: Tensor,
    owner: Tensor,
    first: int,
    num_parts: int,
    row_bytes: int,
    id_bytes: int,
    source_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Which rows of a batch's deepest hop are fetched, and which are replaced by sums; see :mod:`salientpp.ways.sums.plan`.

    Args:
        row, col: int64 [e], the edges of that hop as positions in the batch; ``col`` in [0, first), and does not decrease.
        owner: int64 [d], for the batch's vertices first, ..., first + d - 1 the part that their rows would be fetched from; -1: from none.
        first: the vertices that were found before.
        num_parts: K, at most 2**20.
        row_bytes: of a row, and of a sum.
        id_bytes: of an id that is sent, and of the size of a group.
        source_bytes: of what is sent for a row in a sum: its id, and its weight if there are such.

    Returns:
        Eight int64 vectors. ``kept_vertex``, ascending in [0, d), and ``kept_edge``, ascending in [0, e): what stays in the batch; ``kept_row``, the
        sources of these edges, renumbered. By owner, and then by target: ``target`` (a position in the batch) and ``size`` of each sum, and, of all
        their sizes together, ``summed_edge`` in [0, e), the edges that they replace. ``groups`` and ``sources`` [K]: how many of these each part has.
    """
    return _ops.plan_sums(row, col, owner, first, num_parts, row_bytes, id_bytes, source_bytes)


# --- store -----------------------------------------------------------------------------------------------


def pack_id_set(ids: Tensor, num_ids: int) -> Tensor:
    """Pack ascending, distinct ``ids`` int64 [n] of [0, num_ids) into a bitmap with ranks.

    Returns int64 words, one per 32 ids (none for the empty set): a quarter of a byte per id of the universe.
    In :func:`look_up` the slot of a member is its position in ``ids``.
    """
    return _ops.pack_id_set(ids, num_ids)


def look_up(
    n_id: Tensor, offsets: Tensor, part_id: int, local_sets: Sequence[Tensor], remote_sets: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Say for every id of a batch where its row is: in the first set that has it, else in the part or at its owner.

    Args:
        n_id: int64 [n], global ids.
        offsets: int64 [K + 1], the partition book: part p owns [offsets[p], offsets[p + 1]).
        part_id: the part that is local.
        local_sets: packed sets of local ids (rows of the part), looked through in this order.
        remote_sets: packed sets of global ids, for ids of other parts.

    Returns:
        ``position`` and ``slot``, two lists of int64 vectors, and ``remote_counts`` int64 [K]. Their entries are one group for each local
        set, the rest of the part (slot: local id), one group for each remote set, and what is left (slot: global id), grouped by owner.
        Positions are places in ``n_id``; together the groups hold each place once. The slot of an id in a set is how many members are smaller.
    """
    return _ops.look_up(n_id, offsets, part_id, local_sets, remote_sets)


def take_hits(
    remote_position: Tensor, remote_id: Tensor, offsets: Tensor, hit_place: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is left to fetch of a batch's remote rows, where some of them are found in a cache.

    Args:
        remote_position, remote_id: int64 [n], places in the batch, and global ids.
        offsets: int64 [K + 1], the partition book.
        hit_place: int64 [h], which of the n are found, ascending.

    Returns:
        ``remote_position[hit_place]``; of the others, in their order, ``remote_position`` and ``remote_id``; and int64 [K], how many of these each part owns.
    """
    return _ops.take_hits(remote_position, remote_id, offsets, hit_place)


def gather_rows(
    source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None = None, parallel: bool = True
) -> None:
    """``out[out_index] = source[source_index]`` along dimension 0, for rows of any dtype and shape.

    Args:
        source: contiguous [S, ...]; may be memory-mapped.
        source_index: int32 or int64 [n], in [0, S).
        out: contiguous [O, ...] of the same dtype and row shape, written in place.
        out_index: int64 [n], in [0, O); None means 0, 1, ..., n - 1.
        parallel: torch's threads share large work; False: the thread that calls does it.

    Raises:
        RuntimeError: an index is out of range or shapes differ; then nothing was written.
    """
    if source.dtype not in _KNOWN_DTYPES and source.dtype == out.dtype:
        source, out = _as_bytes(source), _as_bytes(out)
    _ops.gather_rows(source, source_index, out, out_index, parallel)


def gather_joined_rows(
    sources: Sequence[Tensor],
    source_index: Tensor,
    out: Tensor,
    out_index: Tensor | None = None,
    parallel: bool = True,
) -> None:
    """:func:`gather_rows` of ``torch.cat(sources)``, which is not made: at least one tensor, of one dtype and row shape."""
    if out.dtype not in _KNOWN_DTYPES and all(source.dtype == out.dtype for source in sources):
        sources, out = [_as_bytes(source) for source in sources], _as_bytes(out)
    _ops.gather_joined_rows(list(sources), source_index, out, out_index, parallel)


def reduce_rows(
    source: Tensor,
    source_index: Tensor,
    size: Tensor,
    weight: Tensor | None,
    out: Tensor,
    reduction: int,
    parallel: bool = True,
) -> None:
    """``out[i]`` = the sum, mean or maximum of ``size[i]`` of the rows ``source[source_index]``, which follow one another; zeros of none.

    Args:
        source: contiguous [S, ...], float32, float64, float16 or bfloat16; may be memory-mapped.
        source_index: int32 or int64 [n], in [0, S).
        size: int64 [m], >= 0; adds up to n.
        weight: [n], by which rows are multiplied first; a mean is still over their number. float64 if rows are, else float32. None: not at all.
        out: contiguous [m, ...] of the same dtype and row shape, written in place.
        reduction: 0 the sum, 1 the mean, 2 the maximum, of which a NaN is one. Rows of 16 bits are added up in 32.
        parallel: torch's threads share large work; False: the thread that calls does it.

    Raises:
        RuntimeError: an index is out of range or shapes do not fit; then nothing was written.
    """
    _ops.reduce_rows(source, source_index, size, weight, out, reduction, parallel)


def encode_rows(
    source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None, format: int, block: int
) -> None:
    """``out[out_index] = encode(source[source_index])``, see :mod:`salientpp.store.narrow`.

    Args:
        source: contiguous [S, ...], float32, float64, float16 or bfloat16; may be memory-mapped.
        source_index: int32 or int64 [n], in [0, S).
        out: contiguous uint8 [O, W], written in place.
        out_index: int64 [n], in [0, O); None means 0, 1, ..., n - 1.
        format: the place in :data:`salientpp.store.narrow.FORMATS`.
        block: of integers, how many values share a scale and an offset; 0: all of a row.

    Raises:
        RuntimeError: an index is out of range or shapes do not fit; then nothing was written.
    """
    _ops.encode_rows(source, source_index, out, out_index, format, block)


def decode_rows(
    source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None, format: int, block: int
) -> None:
    """``out[out_index] = decode(source[source_index])``: the reverse of :func:`encode_rows`, from uint8 [S, W] to [O, ...]."""
    _ops.decode_rows(source, source_index, out, out_index, format, block)


def round_rows(
    source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None, format: int, block: int
) -> None:
    """``out[out_index] = decode(encode(source[source_index]))``, of one dtype and row size, in one pass."""
    _ops.round_rows(source, source_index, out, out_index, format, block)


#: What every libtorch of the stable ABI can pass to a kernel; others are passed as bytes.
_KNOWN_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [bytes], the memory of a tensor, or of a contiguous copy.

    torch calls a tensor of one entry or none contiguous whatever its strides are, and then refuses to view it as bytes.
    """
    tensor = tensor.detach().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _as_bytes(rows: Tensor) -> Tensor:
    """The same memory as uint8 [..., bytes of an entry]."""
    return rows.unsqueeze(-1).view(torch.uint8)


# --- minibatch -------------------------------------------------------------------------------------------


def permutation(size: int, key: int) -> Tensor:
    """A uniformly random order of 0, ..., size - 1, int64 [size]; a pure function of the 64-bit ``key``."""
    return _ops.permutation(size, key)


def sample_neighbors(
    indptr: Tensor,
    indices: Tensor,
    edge_id: Tensor | None,
    seeds: Tensor,
    fanouts: Sequence[int],
    batch_key: int,
    replace: bool = False,
    map_budget_bytes: int = MAP_BUDGET_BYTES,
    links: Tensor | None = None,
    shared: bool = False,
    graph_number: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sample the neighbourhood of ``seeds``, hop by hop; see :mod:`salientpp.sampling.sampler`.

    Args:
        indptr, indices: the graph in CSC form, as :class:`salientpp.Graph` has checked it.
        edge_id: int64 [E], the ids to report for the edges, or None for positions in ``indices``.
        seeds: int64 [B], global ids; a repeated seed is expanded each time.
        fanouts: neighbours per vertex and hop, nearest the seeds first; -1 takes all.
        batch_key: signed 64-bit key; with (hop, vertex) it fixes a vertex's draws.
        replace: draw with replacement.
        links: as :func:`csc_from_coo` makes them, read in place of ``indices`` and ``edge_id``, which is None then; or None.
        shared: every neighbour has one number for the batch, and a vertex takes those with the smallest; without ``replace``. A list of more than
            1,000 draws by itself.
        graph_number: where draws are shared, a number that only this graph has, as it is now: a thread then remembers some of what was drawn, up to
            16 MiB, and does not read a list again for the same key. 0: nothing is remembered. Results are the same.

    Returns:
        ``n_id`` int64 [n], seeds first, then in order of discovery; ``edge_index`` int64 [2, e], positions in
        ``n_id`` (source, target); ``e_id`` int64 [e]; ``num_sampled_nodes`` int64 [hops + 1];
        ``num_sampled_edges`` int64 [hops].
    """
    return _ops.sample_neighbors(
        indptr,
        indices,
        edge_id,
        seeds,
        list(fanouts),
        batch_key,
        replace,
        map_budget_bytes,
        links,
        shared,
        graph_number,
    )


def sample_vertices(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanouts: Sequence[int],
    batch_key: int,
    replace: bool = False,
    map_budget_bytes: int = MAP_BUDGET_BYTES,
    shared: bool = False,
    graph_number: int = 0,
) -> Tensor:
    """The ``n_id`` of :func:`sample_neighbors`, int64 [n]; in less time, as no edges are kept."""
    return _ops.sample_vertices(
        indptr, indices, seeds, list(fanouts), batch_key, replace, map_budget_bytes, shared, graph_number
    )


def sample_typed_neighbors(
    indptr: Sequence[Tensor],
    indices: Sequence[Tensor],
    edge_id: Sequence[Tensor | None],
    links: Sequence[Tensor | None],
    edge_weight: Sequence[Tensor | None],
    edge_time: Sequence[Tensor | None],
    source_type: Sequence[int],
    target_type: Sequence[int],
    num_vertices: Sequence[int],
    node_time: Sequence[Tensor | None],
    seeds: Sequence[Tensor],
    seed_time: Sequence[Tensor | None],
    first_tree: Sequence[int],
    fanouts: Sequence[int],
    num_hops: int,
    batch_key: int,
    *,
    replace: bool = False,
    disjoint: bool = False,
    last: bool = False,
    induced: bool = False,
    map_budget_bytes: int = MAP_BUDGET_BYTES,
    shared: bool = False,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
    """Sample over R relations between T types of vertices; see csrc/sampling/sample_typed_neighbors.cpp.

    Args:
        indptr, indices: per relation, int64 [N_target + 1] and int32 or int64 [E], ids of the source type.
        edge_id, edge_weight, edge_time: per relation, int32 or int64, float32 or float64 (finite, >= 0), int32 or int64 [E] in list order, or None.
            With times, a list ascends by them; they may be the edges' or those of the vertices in ``indices``.
        links: per relation, as in :func:`sample_neighbors`, or None.
        source_type, target_type: per relation, positions in ``num_vertices``.
        node_time: per type, int64 [N], or None; not needed where ``edge_time`` says the same.
        seeds, seed_time: per type, int64 [B], and int64 [B] or None; times for all seeds or for none.
        first_tree: per type, the number of its first seed's tree; together the trees are 0, 1, ... without gaps.
        fanouts: ``num_hops`` per relation, one relation after the other; -1 takes all.
        replace, disjoint: as in :class:`salientpp.NeighborLoader`; times need ``disjoint``.
        last: draw from the latest ``fanout`` neighbours only.
        induced: give all edges between the sampled vertices.
        map_budget_bytes: as in :func:`sample_neighbors`, for all types together; disjoint trees have hash maps of their own.
        shared: as in :func:`sample_neighbors`; a neighbour's number is the same for all trees and relations. Without ``edge_weight``.

    Returns:
        Per type ``n_id`` int64 [n], and with ``disjoint`` the tree of each; per relation
        ``edge_index`` int64 [2, e] and ``e_id`` int64 [e]; ``num_sampled_nodes`` int64 [T, hops + 1] and ``num_sampled_edges``
        int64 [R, hops].
    """
    return _ops.sample_typed_neighbors(
        indptr,
        indices,
        edge_id,
        links,
        edge_weight,
        edge_time,
        source_type,
        target_type,
        num_vertices,
        node_time,
        seeds,
        seed_time,
        first_tree,
        fanouts,
        num_hops,
        batch_key,
        replace,
        disjoint,
        last,
        induced,
        map_budget_bytes,
        shared,
    )


def to_bidirectional(
    row: Tensor,
    col: Tensor,
    rev_row: Tensor,
    rev_col: Tensor,
    edge_id: Tensor | None = None,
    rev_edge_id: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Edges and the reverses of others, each pair of ends once: what PyG's ``to_bidirectional`` makes by sorting.

    Args:
        row, col: int64 [e], ids in [0, 2**31 - 1) of sources and targets; fastest where edges with the same target stand together, with
            targets ascending.
        rev_row, rev_col: int64 [f]; edges to turn round.
        edge_id, rev_edge_id: int64 [e] and [f], or None.

    Returns:
        ``edge_index`` int64 [2, g], by target and then by source; ``edge_id`` int64 [g] or None. Of edges with the same ends the last one's
        id counts, where reversed ones come after the others.
    """
    edge_index, ids = _ops.to_bidirectional(row, col, rev_row, rev_col, edge_id, rev_edge_id)
    return edge_index, None if edge_id is None else ids


# --- memory -----------------------------------------------------------------------------------------------


def use_huge_pages(tensor: Tensor) -> None:
    """Ask the system to move a large CPU tensor into huge pages, where it lies; rows are then read at random in less time.

    Nothing happens where that is not possible: small or strided tensors, memory-mapped files, systems without huge pages or
    without ``MADV_COLLAPSE`` (Linux 6.1). Takes about as long as copying the tensor; others may read it meanwhile.
    """
    _ops.use_huge_pages(tensor)


# --- fake kernels ----------------------------------------------------------------------------------------


def _dynamic(like: Tensor) -> Tensor:
    """An int64 vector whose length is known only when the kernel has run."""
    return like.new_empty([torch.library.get_ctx().new_dynamic_size()], dtype=torch.int64)


@torch.library.register_fake("salientpp::use_huge_pages")
def _(tensor: Tensor) -> None:
    return None


@torch.library.register_fake("salientpp::csc_from_coo")
def _(
    source: Tensor,
    target: Tensor,
    num_vertices: int,
    linked: bool = False,
    is_sorted: bool = False,
    parallel: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    narrow = num_vertices < 2**31
    return (
        source.new_empty([num_vertices + 1], dtype=torch.int64),
        source.new_empty([source.shape[0]], dtype=torch.int32 if narrow else torch.int64),
        source.new_empty([0 if is_sorted else source.shape[0]], dtype=torch.int64),
    )


@torch.library.register_fake("salientpp::transpose_csc")
def _(indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(indptr), torch.empty_like(indices)


@torch.library.register_fake("salientpp::is_symmetric")
def _(indptr: Tensor, indices: Tensor) -> Tensor:
    return indptr.new_empty([1], dtype=torch.bool)


@torch.library.register_fake("salientpp::check_csc")
def _(indptr: Tensor, indices: Tensor) -> None:
    return None


@torch.library.register_fake("salientpp::inclusion_probability")
def _(
    indptr: Tensor,
    out_indptr: Tensor,
    out_indices: Tensor,
    seeds: Tensor,
    seed_offsets: Tensor,
    fanouts: list[int],
    batch_size: int,
    frontier: bool,
    include_seeds: bool,
    replace: bool,
) -> Tensor:
    return indptr.new_empty([seed_offsets.shape[0] - 1, indptr.shape[0] - 1], dtype=torch.float32)


@torch.library.register_fake("salientpp::symmetrise")
def _(
    indptr: Tensor, indices: Tensor, weight_by_target: Tensor | None = None, weight_of_each: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    entries = torch.library.get_ctx().new_dynamic_size()
    return torch.empty_like(indptr), indices.new_empty([entries]), indices.new_empty([entries], dtype=torch.int32)


@torch.library.register_fake("salientpp::rebalance_parts")
def _(
    indptr: Tensor,
    indices: Tensor,
    assignment: Tensor,
    weights: Tensor,
    limits: Tensor,
    num_parts: int,
    sweeps: int,
    edge_weights: Tensor | None = None,
) -> Tensor:
    return torch.empty_like(assignment)


@torch.library.register_fake("salientpp::reassign_parts")
def _(cost: Tensor, assignment: Tensor, weights: Tensor, limits: Tensor, most_moves: int) -> Tensor:
    return torch.empty_like(assignment)


@torch.library.register_fake("salientpp::keep_heaviest_edges")
def _(indptr: Tensor, indices: Tensor, most: int, edge_weights: Tensor | None = None) -> Tensor:
    return torch.empty_like(indices, dtype=torch.bool)


@torch.library.register_fake("salientpp::cluster_vertices")
def _(
    indptr: Tensor,
    indices: Tensor,
    vertex_weights: Tensor,
    most_weight: int,
    rounds: int,
    seed: int,
    edge_weights: Tensor | None = None,
) -> Tensor:
    return torch.empty_like(vertex_weights, dtype=torch.int32)


@torch.library.register_fake("salientpp::contract_lists")
def _(
    indptr: Tensor,
    indices: Tensor,
    cluster: Tensor,
    num_clusters: int,
    first: int,
    last: int,
    edge_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    entries = torch.library.get_ctx().new_dynamic_size()
    return indptr.new_empty([last - first]), cluster.new_empty([entries]), indptr.new_empty([entries])


@torch.library.register_fake("salientpp::sum_over_lists")
def _(indptr: Tensor, indices: Tensor, value: Tensor) -> Tensor:
    return value.new_empty([indptr.shape[0] - 1, *value.shape[1:]])


@torch.library.register_fake("salientpp::code_ids")
def _(ids: Tensor, num_ids: int, but_from: int = 0, but_to: int = 0) -> Tensor:
    return ids.new_empty([torch.library.get_ctx().new_dynamic_size()], dtype=torch.uint8)


@torch.library.register_fake("salientpp::ids_of_list")
def _(list: Tensor, num_ids: int) -> Tensor:
    return _dynamic(list)


@torch.library.register_fake("salientpp::link_lists")
def _(lists: Sequence[Tensor], heads: int, num_ids: int) -> Sequence[Tensor]:
    return [_dynamic(lists[0]).to(torch.int16) for _ in range(heads)]


@torch.library.register_fake("salientpp::fill_slots")
def _(ids: Tensor, prior: Tensor, slot_id: Tensor, slot_key: Tensor, table: Tensor) -> None:
    return None


@torch.library.register_fake("salientpp::note_uses")
def _(list: Tensor, batch: int, num_ids: int, slot_id: Tensor, slot_key: Tensor, table: Tensor) -> None:
    return None


@torch.library.register_fake("salientpp::plan_batch")
def _(
    remote_id: Tensor,
    links: Tensor,
    batch: int,
    prior: Tensor,
    slot_id: Tensor,
    slot_key: Tensor,
    table: Tensor,
) -> tuple[Tensor, ...]:
    hit, fetched, admitted = _dynamic(remote_id), _dynamic(remote_id), _dynamic(remote_id)
    return hit, torch.empty_like(hit), fetched, admitted, torch.empty_like(admitted)


@torch.library.register_fake("salientpp::plan_sums")
def _(
    row: Tensor,
    col: Tensor,
    owner: Tensor,
    first: int,
    num_parts: int,
    row_bytes: int,
    id_bytes: int,
    source_bytes: int,
) -> tuple[Tensor, ...]:
    edge, target, groups = _dynamic(row), _dynamic(row), row.new_empty([num_parts])
    return (
        _dynamic(row), edge, torch.empty_like(edge), target, torch.empty_like(target), _dynamic(row), groups, torch.empty_like(groups)
    )  # fmt: skip


@torch.library.register_fake("salientpp::pack_id_set")
def _(ids: Tensor, num_ids: int) -> Tensor:
    return _dynamic(ids)


@torch.library.register_fake("salientpp::look_up")
def _(
    n_id: Tensor, offsets: Tensor, part_id: int, local_sets: list[Tensor], remote_sets: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    position = [_dynamic(n_id) for _ in range(len(local_sets) + len(remote_sets) + 2)]
    return position, [torch.empty_like(group) for group in position], n_id.new_empty([offsets.shape[0] - 1])


@torch.library.register_fake("salientpp::take_hits")
def _(remote_position: Tensor, remote_id: Tensor, offsets: Tensor, hit_place: Tensor) -> tuple[Tensor, ...]:
    left = remote_id.shape[0] - hit_place.shape[0]
    return (
        torch.empty_like(hit_place),
        remote_id.new_empty([left]),
        remote_id.new_empty([left]),
        remote_id.new_empty([offsets.shape[0] - 1]),
    )


@torch.library.register_fake("salientpp::gather_rows")
def _(source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None, parallel: bool = True) -> None:
    return None


@torch.library.register_fake("salientpp::gather_joined_rows")
def _(
    sources: list[Tensor], source_index: Tensor, out: Tensor, out_index: Tensor | None, parallel: bool = True
) -> None:
    return None


@torch.library.register_fake("salientpp::reduce_rows")
def _(
    source: Tensor,
    source_index: Tensor,
    size: Tensor,
    weight: Tensor | None,
    out: Tensor,
    reduction: int,
    parallel: bool = True,
) -> None:
    return None


@torch.library.register_fake("salientpp::encode_rows")
@torch.library.register_fake("salientpp::decode_rows")
@torch.library.register_fake("salientpp::round_rows")
def _(source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor | None, format: int, block: int) -> None:
    return None


@torch.library.register_fake("salientpp::permutation")
def _(size: int, key: int) -> Tensor:
    return torch.empty([size], dtype=torch.int64, device="cpu")


@torch.library.register_fake("salientpp::sample_neighbors")
def _(
    indptr: Tensor,
    indices: Tensor,
    edge_id: Tensor | None,
    seeds: Tensor,
    fanouts: list[int],
    batch_key: int,
    replace: bool,
    map_budget_bytes: int,
    links: Tensor | None = None,
    shared: bool = False,
    graph_number: int = 0,
) -> tuple[Tensor, ...]:
    n_id, e_id = _dynamic(seeds), _dynamic(seeds)
    hops = len(fanouts)
    return n_id, e_id.new_empty([2, e_id.shape[0]]), e_id, seeds.new_empty([hops + 1]), seeds.new_empty([hops])


@torch.library.register_fake("salientpp::sample_vertices")
def _(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanouts: list[int],
    batch_key: int,
    replace: bool,
    map_budget_bytes: int,
    shared: bool = False,
    graph_number: int = 0,
) -> Tensor:
    return _dynamic(seeds)


@torch.library.register_fake("salientpp::sample_typed_neighbors")
def _(
    indptr: list[Tensor],
    indices: list[Tensor],
    edge_id: list[Tensor | None],
    links: list[Tensor | None],
    edge_weight: list[Tensor | None],
    edge_time: list[Tensor | None],
    source_type: list[int],
    target_type: list[int],
    num_vertices: list[int],
    node_time: list[Tensor | None],
    seeds: list[Tensor],
    seed_time: list[Tensor | None],
    first_tree: list[int],
    fanouts: list[int],
    num_hops: int,
    batch_key: int,
    replace: bool,
    disjoint: bool,
    last: bool,
    induced: bool,
    map_budget_bytes: int = MAP_BUDGET_BYTES,
    shared: bool = False,
) -> tuple[list[Tensor] | Tensor, ...]:
    n_id = [_dynamic(type_seeds) for type_seeds in seeds]
    e_id = [_dynamic(relation) for relation in indptr]
    edge_index = [ids.new_empty([2, ids.shape[0]]) for ids in e_id]
    tree = [torch.empty_like(ids) for ids in n_id] if disjoint else []
    counts = seeds[0].new_empty([len(num_vertices), num_hops + 1]), seeds[0].new_empty([len(indptr), num_hops])
    return n_id, tree, edge_index, e_id, *counts


@torch.library.register_fake("salientpp::to_bidirectional")
def _(
    row: Tensor, col: Tensor, rev_row: Tensor, rev_col: Tensor, edge_id: Tensor | None, rev_edge_id: Tensor | None
) -> tuple[Tensor, Tensor]:
    ends = _dynamic(row)
    return row.new_empty([2, ends.shape[0]]), ends if edge_id is not None else row.new_empty([0])
