"""Operators that draw vertices and edges, and the keys that fix their draws."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from salientpp.ops.library import operators

#: Bytes that one sampling thread may spend on its dense vertex map, which takes 4 bytes per vertex of the graph. If the map
#: would take more, the thread uses a hash map of the batch instead. Samples do not depend on the choice.
MAP_BUDGET_BYTES = 512 * 2**20


def permutation(size: int, key: int) -> Tensor:
    """Returns a uniformly random order of 0, ..., size - 1, int64 [size]; a pure function of the 64-bit ``key``."""
    return operators.permutation(size, key)


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
    """Samples the neighbourhood of ``seeds``, hop by hop; see :mod:`salientpp.sampling.topology`.

    Args:
        indptr, indices: the graph in CSC form, validated by :class:`salientpp.Graph`.
        edge_id: int64 [E], the ids to report for the edges; None: positions in ``indices``.
        seeds: int64 [B], global ids; a repeated seed is expanded each time.
        fanouts: neighbours per vertex and hop, nearest the seeds first; -1 takes all.
        batch_key: signed 64-bit key; with (hop, vertex) it fixes a vertex's draws.
        replace: draw with replacement.
        links: links that :func:`csc_from_coo` returned, read instead of ``indices`` and ``edge_id`` (which is None then); or None.
        shared: give every neighbour one random number for the batch; a vertex takes the neighbours with the smallest numbers. Not with ``replace``. A
            vertex with more than 1,000 neighbours draws without sharing.
        graph_number: for shared draws, a number that only this graph has in its present state. A thread then remembers up to 16 MiB of its draws
            and does not read a list again for the same key. 0: nothing is remembered. Results are the same.

    Returns:
        ``n_id`` int64 [n], seeds first, then in order of discovery; ``edge_index`` int64 [2, e], positions in
        ``n_id`` (source, target); ``e_id`` int64 [e]; ``num_sampled_nodes`` int64 [hops + 1];
        ``num_sampled_edges`` int64 [hops].
    """
    return operators.sample_neighbors(
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
    """Samples only the ``n_id`` of :func:`sample_neighbors`, int64 [n]. It is faster, because it keeps no edges."""
    return operators.sample_vertices(
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
    seed_since: Sequence[Tensor | None],
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
    """Samples over R relations between T types of vertices; see csrc/sampling/sample_typed_neighbors.cpp.

    Args:
        indptr, indices: per relation, int64 [N_target + 1] and int32 or int64 [E], ids of the source type.
        edge_id: per relation, int32 or int64 [E] in list order, or None.
        edge_weight: per relation, float32 or float64 [E] in list order, finite and >= 0, or None.
        edge_time: per relation, int32 or int64 [E] in list order, or None. Lists with times ascend by time. The times belong to the edges, or to the
            vertices in ``indices``.
        links: per relation, as in :func:`sample_neighbors`, or None.
        source_type, target_type: per relation, positions in ``num_vertices``.
        node_time: per type, int64 [N], or None; not needed if ``edge_time`` has the same times.
        seeds, seed_time: per type, int64 [B], and int64 [B] or None. Either all seeds have times or none.
        seed_since: as ``seed_time``: the first time that the seed's tree sees. Empty: a tree sees all times up to ``seed_time``.
        first_tree: per type, the number of the first seed's tree. Every seed has its own tree. The trees of all types are 0, 1, ... without gaps.
        fanouts: ``num_hops`` numbers for each relation, one relation after the other; -1 takes all.
        replace, disjoint: as in :class:`salientpp.NeighborLoader`; times need ``disjoint``.
        last: draw only from the latest ``fanout`` neighbours.
        induced: return all edges between the sampled vertices.
        map_budget_bytes: as in :func:`sample_neighbors`, for all types together; disjoint trees have hash maps of their own.
        shared: as in :func:`sample_neighbors`; a neighbour has the same number in all trees and relations. Not with ``edge_weight``.

    Returns:
        Per type ``n_id`` int64 [n], and with ``disjoint`` the tree of each vertex. Per relation ``edge_index`` int64 [2, e] and
        ``e_id`` int64 [e]. Then ``num_sampled_nodes`` int64 [T, hops + 1] and ``num_sampled_edges`` int64 [R, hops].
    """
    return operators.sample_typed_neighbors(
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
        seed_since,
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


def draw_from_lists(
    indptr: Tensor,
    indices: Tensor,
    edge_weight: Tensor | None,
    edge_time: Tensor | None,
    place: Tensor,
    vertex: Tensor,
    tree: Tensor | None,
    now: Tensor | None,
    fanout: int,
    batch_key: int,
    hop: int,
    relation: int,
    source_type: int,
    *,
    replace: bool = False,
    last: bool = False,
    shared: bool = False,
    since: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws neighbours from m of the neighbour lists that a part holds. :func:`sample_typed_neighbors` draws the same on the whole graph.

    Args:
        indptr: int64 [n + 1], bounds of the part's n lists in ``indices``.
        indices: int32 or int64 [E], global ids of sources.
        edge_weight: float32 or float64 [E], finite and >= 0, or None.
        edge_time: int32 or int64 [E], ascending in each list, or None. The times of the edges, or of the vertices in ``indices``.
        place: int64 [m], rows of the lists in ``indptr``.
        vertex: int64 [m], global ids of the vertices that the lists belong to.
        tree: int64 [m], the tree that each list is drawn for, or None without trees.
        now: int64 [m], the time of the tree's seed, or None if seeds have no times. With ``edge_time``, only the entries of a list whose time is at
            most this one can be drawn; without it, all.
        fanout: number of neighbours for each list; -1 takes all.
        batch_key, hop, relation, source_type: with the vertex and the tree, they fix the draws. ``hop`` and ``relation`` count from 0, and
            ``source_type`` is the position of the type.
        replace, last, shared: as in :func:`sample_typed_neighbors`. ``last`` has an effect only with ``now``, also on
            lists without times.
        since: int64 [m], or None. With ``edge_time``, the entries of a list whose time is less than this one cannot be drawn. It needs ``now``.

    Returns:
        ``count`` int64 [m], the number of draws from each list. ``source`` int64 [e] and ``position`` int64 [e], list by list: the drawn sources, and
        their positions in ``indices``. Sources are not checked.
    """
    return operators.draw_from_lists(
        indptr,
        indices,
        edge_weight,
        edge_time,
        place,
        vertex,
        tree,
        now,
        fanout,
        batch_key,
        hop,
        relation,
        source_type,
        replace,
        last,
        shared,
        since,
    )


def join_drawn(
    n_id: Sequence[Tensor],
    tree: Sequence[Tensor],
    first: Sequence[int],
    count: Sequence[Tensor],
    source: Sequence[Tensor],
    source_type: Sequence[int],
    target_type: Sequence[int],
    num_vertices: Sequence[int],
    num_trees: int = 0,
    map_budget_bytes: int = MAP_BUDGET_BYTES,
    edge_index: Sequence[Tensor] = (),
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Adds the sources that one hop drew to the vertices and edges of a batch, relation by relation, as :func:`sample_typed_neighbors` does.

    Args:
        n_id: per type, int64 [n], the vertices so far.
        tree: per type, int64 [n], the tree of each vertex, in [0, ``num_trees``); an empty list without trees.
        first: per type, where the frontier begins in ``n_id``. It ends with ``n_id``.
        count: per relation, int64 [f], the number of drawn edges of each vertex in the frontier of the target type.
        source: per relation, int64 [e], the drawn sources in the order of the frontier.
        source_type, target_type: per relation, positions in ``n_id``.
        num_vertices: per type, the number of vertices of the graph.
        map_budget_bytes: as in :func:`sample_typed_neighbors`.
        edge_index: per relation, int64 [2, e0], the edges of earlier hops. Empty: there are none.

    Returns:
        Per type ``n_id``, which begins with the given one and ends with the new vertices in order of discovery, and with trees ``tree``. Per relation
        ``edge_index`` int64 [2, e0 + e], the earlier edges, and then the positions in ``n_id`` of each drawn source and of its target. A source that is
        there several times has its first position.
    """
    return operators.join_drawn(
        n_id,
        tree,
        first,
        count,
        source,
        source_type,
        target_type,
        num_vertices,
        num_trees,
        map_budget_bytes,
        edge_index,
    )


def edges_between(
    indptr: Tensor,
    indices: Tensor,
    edge_time: Tensor | None,
    place: Tensor,
    tree: Tensor | None,
    now: Tensor | None,
    member: Tensor,
    member_tree: Tensor | None,
    num_sources: int,
    num_trees: int = 0,
    map_budget_bytes: int = MAP_BUDGET_BYTES,
    since: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the edges of an induced subgraph: those in m lists whose sources are in ``member``.

    Args:
        indptr, indices, edge_time, place, tree, now: as in :func:`draw_from_lists`. Trees are in [0, ``num_trees``).
        member: int64 [k], vertices of the source type, in [0, ``num_sources``).
        member_tree: int64 [k], the tree of each member. An edge then needs a member of its list's tree. Given if and only if ``tree`` is given.
        map_budget_bytes: as in :func:`sample_typed_neighbors`.
        since: as in :func:`draw_from_lists`.

    Returns:
        ``count`` int64 [m], the number of found edges of each list. ``row`` int64 [e] and ``position`` int64 [e], list by list: the first position
        of the source in ``member``, and the position of the edge in ``indices``.
    """
    return operators.edges_between(
        indptr,
        indices,
        edge_time,
        place,
        tree,
        now,
        member,
        member_tree,
        num_sources,
        num_trees,
        map_budget_bytes,
        since,
    )


def merge_lists(
    size: int,
    position: Sequence[Tensor | None],
    count: Sequence[Tensor],
    value: Sequence[Tensor],
    base: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Merges lists that arrived in one or more groups, such as one from each rank, into one order. All sequences have one entry per group.

    Args:
        size: number of lists in the result.
        position: int64 [m], the places of the group's lists in the result. No two lists have the same place. None: 0, 1, ..., m - 1.
        count: int64 [m], the number of entries of each list.
        value: uint8, uint16, int32 or int64 [e], the entries, list by list.
        base: int64 [m] or [1], a number that is added to each entry of a list. Empty: nothing is added.

    Returns:
        ``count`` int64 [size], and the entries int64, list by list. A list that no group has is empty.
    """
    return operators.merge_lists(size, position, count, value, base)


def pack_integers(section: Sequence[Tensor], count: Sequence[Tensor | None], base: Sequence[Tensor | None]) -> Tensor:
    """Packs tensors, called sections, into one tensor of bytes to be sent. Integers get the narrowest dtype that holds all of their section.

    Args:
        section: int64 [n], integers, or uint8 [n], other bytes. At least one.
        count, base: int64 [m] for each section, or None. With them, the section holds m lists of these lengths, and the packet gets the integers minus
            the base of their list.

    Returns:
        uint8 [bytes]. It begins with int64 words: the number of sections, and for each section ``5 * n + code``. Codes 0 to 3 mean uint8, uint16, int32
        and int64, and code 4 means bytes. The sections follow; each begins at a multiple of 8 bytes.
    """
    return operators.pack_integers(section, count, base)


class DividedBatch(NamedTuple):
    """Result of :func:`divide_batch`. Python lists have an entry for each share, the part of the batch that one rank computes.

    L is the number of hops, and R the number of ranks.

    Attributes:
        node, edge: ids of a share's vertices int64 [n], and of its edges int64 [e], or [0] if the batch has no ids of edges.
        row, col: ends of a share's edges in the numbering of the share, int64 [e].
        send: int64, numbers of the share's vertices whose rows other ranks need, grouped by receiver, ascending within a group.
        own, edges: int64 [R, L + 1], numbers of a rank's vertices, and of edges into them, within 0, 1, ..., L hops.
        sent: int64 [R, R, L + 1], numbers of the rows that the first rank sends to the second, within 0, 1, ..., L hops.
    """

    node: list[Tensor]
    row: list[Tensor]
    col: list[Tensor]
    edge: list[Tensor]
    send: list[Tensor]
    own: Tensor
    edges: Tensor
    sent: Tensor


def divide_batch(
    node: Tensor,
    row: Tensor,
    col: Tensor,
    edge: Tensor | None,
    owner: Tensor,
    nodes_within: Sequence[int],
    edges_within: Sequence[int],
    ranks: int,
    place: int = -1,
) -> DividedBatch:
    """Divides a batch into shares, so that each rank of a host computes one of them; see :mod:`salientpp.sampling.host_share`.

    Args:
        node: int64 [n], ids of the vertices.
        row, col: int64 [e], positions in ``node`` of the ends of the edges.
        edge: int64 [e], ids of the edges, or None.
        owner: int64 [n], the rank that each vertex belongs to, in [0, ``ranks``).
        nodes_within, edges_within: numbers of vertices, and of edges into them, within 0, 1, ..., L hops of the seeds.
        place: the rank whose share is made; -1 makes all.
    """
    return DividedBatch(
        *operators.divide_batch(node, row, col, edge, owner, list(nodes_within), list(edges_within), ranks, place)
    )


def ppr_push(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    alpha: float,
    epsilon: float,
    k: int,
    ids: Tensor | None = None,
    degree: Tensor | None = None,
    parallel: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finds the vertices with the largest approximate personalised PageRank of each seed, by forward push; see :mod:`salientpp.sampling.ppr`.

    Args:
        indptr, indices: lists of all N vertices, or of ``ids``. ``indices`` are int32 or int64 [E], vertices.
        seeds: int64 [B].
        alpha: probability in (0, 1) that a walk ends at a vertex.
        epsilon: > 0; residuals of at most ``epsilon`` times the length of a list are not pushed.
        k: >= 1, the most vertices of a seed.
        ids: int64 ascending, the vertices whose lists are given; or None.
        degree: int32 or int64 [N], the lengths of all lists. Given if and only if ``ids`` is given.

    Returns:
        ``id`` int64 [B, k] and ``score`` float64 [B, k]: vertices by descending score, equal scores by ascending id. Seed b has ``count[b]`` of them, and
        -1 and 0.0 fill the rest. If a list is missing that a seed needs, its ``count`` is -1. ``missing`` int64 [m] are the vertices of these lists,
        ascending.
    """
    return operators.ppr_push(indptr, indices, seeds, alpha, epsilon, k, ids, degree, parallel)


def to_bidirectional(
    row: Tensor,
    col: Tensor,
    rev_row: Tensor,
    rev_col: Tensor,
    edge_id: Tensor | None = None,
    rev_edge_id: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Joins edges with the reverses of other edges, and keeps one edge per pair of ends. PyG's ``to_bidirectional`` does this by sorting.

    Args:
        row, col: int64 [e], ids in [0, 2**31 - 1) of sources and targets. It is fastest if edges with the same target stand together and
            targets ascend.
        rev_row, rev_col: int64 [f]; edges to reverse.
        edge_id, rev_edge_id: int64 [e] and [f], or None.

    Returns:
        ``edge_index`` int64 [2, g], sorted by target and then by source; and ``edge_id`` int64 [g] or None. Of several edges with the same
        ends, the id of the last one counts; reversed edges come after the others.
    """
    edge_index, ids = operators.to_bidirectional(row, col, rev_row, rev_col, edge_id, rev_edge_id)
    return edge_index, None if edge_id is None else ids


def join_key(*fields: int) -> int:
    """Mixes the fields into a signed 64-bit key for the kernels that draw. The key depends on every field and on their order.

    The function is the one in ``csrc/random.h``: splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014).
    """
    key = _with_field(_of_fields(fields[:-1]), fields[-1]) if fields else 0
    return key - 2**64 if key >= 2**63 else key


@functools.lru_cache(maxsize=256)
def _of_fields(fields: tuple[int, ...]) -> int:
    """Returns the unsigned key of the leading fields. The key is cached, because the batches of an epoch share all but the last field."""
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
