"""Batches from lists that are cut into parts: the parts draw, and the vertices are joined hop by hop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from part_graphs import cut_lists
from torch import Tensor

from salientpp import ops
from salientpp.graph.part import PartLists
from salientpp.graph.relation import Relation


def merge(owner: Tensor, count: Tensor, of_part: Sequence[Tensor]) -> Tensor:
    """Puts the entries that parts made into the order of the lists. List i has ``count[i]`` entries, from part ``owner[i]``."""
    owner_of_entry = owner.repeat_interleave(count)
    out = torch.empty(owner_of_entry.numel(), dtype=torch.int64)
    for part, entries in enumerate(of_part):
        out[owner_of_entry == part] = entries
    return out


def ask_parts(pieces: Sequence[PartLists], vertex: Tensor, ask: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Calls ``ask(piece, place, where)`` for each part, with the rows of its lists and their places in ``vertex``.

    Returns the count of each list, the first entries and the numbers of the edges.
    """
    firsts = torch.tensor([piece.first_target for piece in pieces])
    ends = firsts + torch.tensor([piece.num_targets for piece in pieces])
    owner = torch.searchsorted(ends, vertex, right=True)
    count, entries, edges = torch.empty_like(vertex), [], []
    for part, piece in enumerate(pieces):
        where = (owner == part).nonzero().flatten()
        count[where], entry, position = ask(piece, vertex[where] - piece.first_target, where)
        entries.append(entry)
        edges.append(position + piece.first_edge)
    return count, merge(owner, count, entries), merge(owner, count, edges)


def sample_parts(
    relations: Sequence[Relation],
    bounds: Sequence[Sequence[int]],
    seeds: Sequence[Tensor],
    seed_time: Sequence[Tensor | None],
    first_tree: Sequence[int],
    fanouts: Sequence[Sequence[int]],
    batch_key: int,
    *,
    disjoint: bool = False,
    induced: bool = False,
    budget: int = ops.MAP_BUDGET_BYTES,
    **draws: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
    """The outputs of ``ops.sample_typed_neighbors``. ``bounds`` has the bounds of the parts per type, ``fanouts`` a list per relation."""
    num_types, num_trees = len(seeds), sum(ids.numel() for ids in seeds)
    parts = [
        [cut_lists(relation, *ends) for ends in itertools.pairwise(bounds[relation.target])] for relation in relations
    ]
    num_vertices = [ends[-1] for ends in bounds]
    n_id = list(seeds)
    tree = [torch.arange(first, first + ids.numel()) for first, ids in zip(first_tree, seeds)] if disjoint else []
    now = torch.zeros(num_trees, dtype=torch.int64)
    timed = any(time is not None for time in seed_time)
    for first, time in zip(first_tree, seed_time):
        if time is not None:
            now[first : first + time.numel()] = time
    first = [0] * num_types
    num_hops = len(fanouts[0]) if fanouts else 0
    num_nodes, num_edges = [[ids.numel()] for ids in n_id], [[] for _ in relations]
    rows, cols, edges = ([[NONE] for _ in relations] for _ in range(3))

    def of(where: Tensor, target: int) -> dict[str, Tensor | None]:
        """Trees and times of some vertices of a type."""
        trees = tree[target][where] if disjoint else None
        return {"tree": trees, "now": now[trees] if timed else None}

    for hop in range(num_hops):
        counts, sources = [], []
        for r, relation in enumerate(relations):
            begin, target = first[relation.target], relation.target

            def draw(piece, place, where, r=r, relation=relation, begin=begin, target=target):
                held = piece.relation
                return ops.draw_from_lists(
                    held.indptr,
                    held.indices,
                    held.edge_weight,
                    held.edge_time if held.source_time is None else held.source_time,
                    place,
                    place + piece.first_target,
                    **of(where + begin, target),
                    fanout=fanouts[r][hop],
                    batch_key=batch_key,
                    hop=hop,
                    relation=r,
                    source_type=relation.source,
                    **draws,
                )

            count, source, edge = ask_parts(parts[r], n_id[target][begin:], draw)
            counts.append(count)
            sources.append(source)
            cols[r].append(torch.arange(begin, n_id[target].numel()).repeat_interleave(count))
            edges[r].append(edge)
            num_edges[r].append(edge.numel())
        before = [ids.numel() for ids in n_id]
        ends = [r.source for r in relations], [r.target for r in relations]
        n_id, tree, joined = ops.join_drawn(n_id, tree, first, counts, sources, *ends, num_vertices, num_trees, budget)
        first = before
        for t in range(num_types):
            num_nodes[t].append(n_id[t].numel() - before[t])
        for r in range(len(relations)):
            rows[r].append(joined[r][0])
    if induced:
        for r, relation in enumerate(relations):
            s, target = relation.source, relation.target

            def between(piece, place, where, s=s, target=target):
                held = piece.relation
                return ops.edges_between(
                    held.indptr,
                    held.indices,
                    held.edge_time if held.source_time is None else held.source_time,
                    place,
                    **of(where, target),
                    member=n_id[s],
                    member_tree=tree[s] if disjoint else None,
                    num_sources=num_vertices[s],
                    num_trees=num_trees,
                    map_budget_bytes=budget,
                )

            count, row, edge = ask_parts(parts[r], n_id[target], between)
            rows[r], edges[r] = [row], [edge]
            cols[r] = [torch.arange(n_id[target].numel()).repeat_interleave(count)]
    e_id = []
    for relation, numbers in zip(relations, edges):
        number = torch.cat(numbers)
        if relation.links is not None:
            number = relation.links[number] >> 32
        elif relation.edge_id is not None:
            number = relation.edge_id[number].long()
        e_id.append(number)
    edge_index = [torch.stack([torch.cat(row), torch.cat(col)]) for row, col in zip(rows, cols)]
    as_table = lambda rows, width: torch.tensor(rows, dtype=torch.int64).view(len(rows), width)  # noqa: E731
    return n_id, tree, edge_index, e_id, as_table(num_nodes, num_hops + 1), as_table(num_edges, num_hops)


NONE = torch.empty(0, dtype=torch.int64)
