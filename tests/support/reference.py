"""Slow and simple references, in plain Python and numpy, for what the kernels compute.

Nothing here imports salientpp, so a mistake of the package cannot repeat itself here. The second half holds the
chi-square tests of random choices. Each returns a p-value, and callers reject p-values below ``FALSE_ALARM``.
"""

from __future__ import annotations

import bisect
import itertools
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import stats

#: A correct sampler fails a test for one seed in a million; seeds are fixed, so a test that passes keeps passing.
FALSE_ALARM = 1e-6

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


# --- rows in fewer bytes ----------------------------------------------------------------------------------


def narrow_row(row: np.ndarray, format: str) -> bytes:
    """Encodes a float32 row [D]: scale and offset of every block, codes, then zeros up to a multiple of 4 bytes."""
    f = np.float32
    kind, _, block = format.partition("/")
    if kind == "fp16":
        data = row.astype(np.float16).tobytes()
    elif kind == "bf16":
        bits = [int(bits) for bits in row.view(np.uint32)]
        # Rounds to the nearest value of the upper 16 bits, ties to even.
        data = b"".join(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to_bytes(2, "little") for bits in bits)
    else:
        levels, size = (255 if kind == "int8" else 15), int(block or 0) or max(1, len(row))
        header, codes = b"", []
        for first in range(0, max(1, len(row)), size):
            values = row[first : first + size]
            low, high = (min(values), max(values)) if len(values) else (f(0), f(0))
            width = high - low
            scale, times = (width / f(levels), f(levels) / width) if width >= f(1e-30) else (f(0), f(0))
            header += scale.tobytes() + (low + f(0)).tobytes()
            codes += [int((value - low) * times + f(0.5)) for value in values]
        if kind == "int4":
            codes += [0] * (len(codes) % 2)
            codes = [low | high << 4 for low, high in zip(codes[::2], codes[1::2])]
        data = header + bytes(codes)
    return data + bytes(-len(data) % 4)


def wide_row(data: bytes, num_columns: int, format: str) -> np.ndarray:
    """Decodes a row to float32 [D]."""
    f = np.float32
    kind, _, block = format.partition("/")
    if kind == "fp16":
        return np.frombuffer(data, np.float16)[:num_columns].astype(f)
    if kind == "bf16":
        return (np.frombuffer(data, np.uint16)[:num_columns].astype(np.uint32) << 16).view(f)
    size = int(block or 0) or max(1, num_columns)
    num_blocks = max(1, -(-num_columns // size))
    steps, codes = np.frombuffer(data[: 8 * num_blocks], f).reshape(-1, 2), list(data[8 * num_blocks :])
    if kind == "int4":
        codes = [code for both in codes for code in (both & 15, both >> 4)]
    return np.array([f(codes[i]) * steps[i // size, 0] + steps[i // size, 1] for i in range(num_columns)], f)


# --- random numbers: the recipe in the head of csrc/random.h ----------------------------------------------


def mix64(z: int) -> int:
    """splitmix64's finaliser on an unsigned 64-bit integer."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def join_key(key: int, field: int) -> int:
    """Joins one more field to a key; both are unsigned 64-bit integers."""
    return mix64(mix64((key + _GOLDEN) & _MASK) ^ ((field * 0xD1342543DE82EF95 + _GOLDEN) & _MASK))


class Stream:
    """splitmix64, with Lemire's bounded integers, whose rejection makes them exactly uniform."""

    def __init__(self, key: int) -> None:
        self.state = key & _MASK

    def next(self) -> int:
        self.state = (self.state + _GOLDEN) & _MASK
        return mix64(self.state)

    def below(self, bound: int) -> int:
        while True:
            product = self.next() * bound
            # 2**64 is no multiple of bound: rejecting 2**64 mod bound values (counted by low halves) keeps this uniform.
            if (product & _MASK) >= 2**64 % bound:
                return product >> 64


def permutation(size: int, key: int) -> list[int]:
    """Random permutation by Fisher and Yates, from the end."""
    order = list(range(size))
    stream = Stream(mix64(key & _MASK))
    for i in reversed(range(1, size)):
        j = stream.below(i + 1)
        order[i], order[j] = order[j], order[i]
    return order


# --- graph ------------------------------------------------------------------------------------------------


def csc_from_coo(edge_index: np.ndarray, num_vertices: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``indptr``, ``indices`` and the input position of every edge; edges of one target keep their order."""
    source, target = edge_index
    edge_id = np.argsort(target, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=num_vertices))])
    return indptr, source[edge_id], edge_id


def edges_of(indptr: Sequence[int], indices: Sequence[int]) -> list[tuple[int, int]]:
    """(source, target) of every edge, in the order of ``indices``."""
    return [(int(indices[e]), v) for v in range(len(indptr) - 1) for e in range(indptr[v], indptr[v + 1])]


# --- sampling ---------------------------------------------------------------------------------------------


def draw_positions(stream: Stream, degree: int, fanout: int, replace: bool) -> list[int]:
    """Places of a neighbour list that a vertex draws, by Floyd's algorithm: draw j is uniform in [0, j], inclusive."""
    if degree == 0:
        return []
    if fanout < 0:
        return list(range(degree))
    if replace:
        return [stream.below(degree) for _ in range(fanout)]
    if fanout >= degree:
        return list(range(degree))
    drawn: list[int] = []
    for last in range(degree - fanout, degree):
        candidate = stream.below(last + 1)
        drawn.append(last if candidate in drawn else candidate)
    return drawn


def shared_key(batch_key: int, source_type: int = 0) -> int:
    key = join_key(batch_key & _MASK, 0x736861726564)
    return join_key(key, source_type) if source_type else key


def draw_shared(key: int, ids: Sequence[int], fanout: int) -> list[int] | None:
    """Places of the neighbours with the smallest numbers; parallel edges have different numbers.

    None if the vertex draws by itself.
    """
    if not 0 < fanout < len(ids) <= 1000:
        return None
    numbers, seen = [], Counter()
    for u in ids:
        number = mix64((key + u * _GOLDEN) & _MASK)
        numbers.append(join_key(number, seen[u]) if seen[u] else number)
        seen[u] += 1
    return sorted(sorted(range(len(ids)), key=lambda place: (numbers[place], place))[:fanout])


def sample_neighbors(
    indptr: Sequence[int],
    indices: Sequence[int],
    edge_id: Sequence[int] | None,
    seeds: Sequence[int],
    fanouts: Sequence[int],
    batch_key: int,
    replace: bool = False,
    shared: bool = False,
) -> tuple[list[int], list[list[int]], list[int], list[int], list[int]]:
    """The outputs of ``ops.sample_neighbors`` as lists."""
    n_id = list(seeds)
    local: dict[int, int] = {}
    for i, v in enumerate(n_id):
        local.setdefault(v, i)  # a repeated seed keeps its first place
    row, col, e_id, num_edges = [], [], [], []
    num_nodes = [len(n_id)]
    found_before = range(len(n_id))
    for hop, fanout in enumerate(fanouts):
        hop_key = join_key(batch_key & _MASK, hop)
        size_before, edges_before = len(n_id), len(row)
        for i in found_before:
            v = n_id[i]
            stream = Stream(mix64(hop_key ^ ((v * _GOLDEN) & _MASK)))
            drawn = draw_shared(shared_key(batch_key), indices[indptr[v] : indptr[v + 1]], fanout) if shared else None
            if drawn is None:
                drawn = draw_positions(stream, indptr[v + 1] - indptr[v], fanout, replace)
            for place in drawn:
                e = indptr[v] + place
                u = indices[e]
                if u not in local:
                    local[u] = len(n_id)
                    n_id.append(u)
                row.append(local[u])
                col.append(i)
                e_id.append(e if edge_id is None else edge_id[e])
        num_nodes.append(len(n_id) - size_before)
        num_edges.append(len(row) - edges_before)
        found_before = range(size_before, len(n_id))
    return n_id, [row, col], e_id, num_nodes, num_edges


# --- sampling over several types ---------------------------------------------------------------------------


def uniform(stream: Stream) -> float:
    """Midpoint of one of 2**52 equal parts of (0, 1)."""
    return ((stream.next() >> 12) + 0.5) * 2.0**-52


def draw_weighted(stream: Stream, weights: Sequence[float], count: int, replace: bool) -> list[int]:
    """Places in a list: successive sampling by exponential arrival times, or independent draws by the running sum."""
    degree = len(weights)
    if replace:
        sums = list(itertools.accumulate(weights))
        if sums[-1] == 0.0:
            return [stream.below(degree) for _ in range(count)]
        last = bisect.bisect_left(sums, sums[-1])
        return [min(bisect.bisect_right(sums, uniform(stream) * sums[-1]), last) for _ in range(count)]
    if count == degree:
        return list(range(degree))
    # Edges with weight 0 arrive after all others; among themselves they have equal chances.
    arrivals = (
        [(w == 0.0, -math.log(uniform(stream)) / (w or 1.0), place) for place, w in enumerate(weights)] if count else []
    )
    return sorted(place for *_, place in sorted(arrivals)[:count])


@dataclass
class Relation:
    """Edges from one type to another: for each target vertex, the ids of its sources."""

    source: int
    target: int
    indptr: Sequence[int]
    indices: Sequence[int]
    edge_id: Sequence[int] | None = None
    weight: Sequence[float] | None = None
    time: Sequence[int] | None = None


def visible(
    relation: Relation, v: int, node_time: Sequence[int] | None, now: int | None, since: float | None = None
) -> list[int]:
    """Positions in v's list that a tree of time ``now`` and a window from ``since`` on may see, checked one by one."""
    places = range(relation.indptr[v], relation.indptr[v + 1])
    if now is None:
        return list(places)
    first = -math.inf if since is None else since
    return [
        e
        for e in places
        if (relation.time is None or first <= relation.time[e] <= now)
        and (node_time is None or first <= node_time[relation.indices[e]] <= now)
    ]


def draw_visible(
    relation: Relation,
    places: Sequence[int],
    fanout: int,
    stream: Stream,
    *,
    replace: bool = False,
    last: bool = False,
    shared_by: int | None = None,
) -> list[int]:
    """Positions that a vertex draws from the ``places`` that it sees; ``shared_by`` is the key of shared draws."""
    if last and fanout >= 0:
        places = places[max(0, len(places) - fanout) :]
    drawn = None
    if shared_by is not None:
        drawn = draw_shared(shared_by, [relation.indices[e] for e in places], fanout)
    if drawn is None and (relation.weight is None or not places):
        drawn = draw_positions(stream, len(places), fanout, replace)
    elif drawn is None:
        count = len(places) if fanout < 0 else fanout if replace else min(fanout, len(places))
        drawn = draw_weighted(stream, [relation.weight[e] for e in places], count, replace and fanout >= 0)
    return [places[k] for k in drawn]


def stream_of(batch_key: int, hop: int, relation: int, tree: int | None, vertex: int) -> Stream:
    key = join_key(batch_key & _MASK, hop)
    key = join_key(key, relation) if relation else key
    key = key if tree is None else join_key(key, tree)
    return Stream(mix64(key ^ ((vertex * _GOLDEN) & _MASK)))


def sample_typed_neighbors(
    relations: Sequence[Relation],
    seeds: Sequence[Sequence[int]],
    fanouts: Sequence[Sequence[int]],
    batch_key: int,
    *,
    node_time: Sequence[Sequence[int] | None],
    seed_time: Sequence[Sequence[int] | None],
    first_tree: Sequence[int],
    replace: bool = False,
    disjoint: bool = False,
    last: bool = False,
    induced: bool = False,
    shared: bool = False,
    seed_since: Sequence[Sequence[int] | None] = (),
) -> tuple[list, list, list, list, list, list]:
    """The outputs of ``ops.sample_typed_neighbors`` as lists; ``fanouts`` per relation."""
    num_types = len(seeds)
    now: dict[int, int] = {}  # time of each tree
    since: dict[int, int] = {}  # begin of each tree's window
    n_id = [list(ids) for ids in seeds]
    tree = [[first_tree[t] + i if disjoint else 0 for i in range(len(ids))] for t, ids in enumerate(seeds)]
    local: list[dict[tuple[int, int], int]] = [{} for _ in range(num_types)]
    for t in range(num_types):
        for i, place in enumerate(zip(tree[t], n_id[t])):
            local[t].setdefault(place, i)
        for i, time in enumerate(seed_time[t] or []):
            now[first_tree[t] + i] = time
        for i, time in enumerate((seed_since[t] or []) if seed_since else []):
            since[first_tree[t] + i] = time
    rows, cols, edges = ([[] for _ in relations] for _ in range(3))
    num_nodes, num_edges = [[len(ids)] for ids in n_id], [[] for _ in relations]
    frontier = [range(len(ids)) for ids in n_id]
    for hop in range(len(fanouts[0]) if fanouts else 0):
        before = [len(ids) for ids in n_id]
        for r, relation in enumerate(relations):
            fanout, edges_before = fanouts[r][hop], len(edges[r])
            s, t = relation.source, relation.target
            for i in frontier[t]:
                drawn = draw_visible(
                    relation,
                    visible(relation, n_id[t][i], node_time[s], now.get(tree[t][i]), since.get(tree[t][i])),
                    fanout,
                    stream_of(batch_key, hop, r, tree[t][i] if disjoint else None, n_id[t][i]),
                    replace=replace,
                    last=last and bool(now),
                    shared_by=shared_key(batch_key, s) if shared else None,
                )
                for e in drawn:
                    place = tree[t][i], relation.indices[e]
                    if place not in local[s]:
                        local[s][place] = len(n_id[s])
                        n_id[s].append(place[1])
                        tree[s].append(place[0])
                    rows[r].append(local[s][place])
                    cols[r].append(i)
                    edges[r].append(e)
            num_edges[r].append(len(edges[r]) - edges_before)
        frontier = [range(size, len(ids)) for size, ids in zip(before, n_id)]
        for t in range(num_types):
            num_nodes[t].append(len(frontier[t]))
    if induced:
        for r, relation in enumerate(relations):
            s, t = relation.source, relation.target
            found = [
                (local[s][tree[t][i], relation.indices[e]], i, e)
                for i, v in enumerate(n_id[t])
                for e in visible(relation, v, node_time[s], now.get(tree[t][i]), since.get(tree[t][i]))
                if (tree[t][i], relation.indices[e]) in local[s]
            ]
            rows[r], cols[r], edges[r] = ([f[k] for f in found] for k in range(3))
    e_id = [
        list(es) if relation.edge_id is None else [relation.edge_id[e] for e in es]
        for relation, es in zip(relations, edges)
    ]
    return n_id, tree if disjoint else [], [[a, b] for a, b in zip(rows, cols)], e_id, num_nodes, num_edges


def draw_from_lists(
    lists: Relation,
    place: Sequence[int],
    vertex: Sequence[int],
    tree: Sequence[int] | None,
    now: Sequence[int] | None,
    fanout: int,
    batch_key: int,
    hop: int,
    relation: int,
    *,
    replace: bool = False,
    last: bool = False,
    shared: bool = False,
    since: Sequence[int] | None = None,
) -> tuple[list[int], list[int], list[int]]:
    """The outputs of ``ops.draw_from_lists`` as lists. ``lists`` has the rows of a part."""
    drawn = [
        draw_visible(
            lists,
            visible(lists, place[i], None, None if now is None else now[i], None if since is None else since[i]),
            fanout,
            stream_of(batch_key, hop, relation, None if tree is None else tree[i], vertex[i]),
            replace=replace,
            last=last and now is not None,
            shared_by=shared_key(batch_key, lists.source) if shared else None,
        )
        for i in range(len(place))
    ]
    position = [e for of_list in drawn for e in of_list]
    return [len(of_list) for of_list in drawn], [lists.indices[e] for e in position], position


def join_drawn(
    n_id: Sequence[Sequence[int]],
    tree: Sequence[Sequence[int]],
    first: Sequence[int],
    count: Sequence[Sequence[int]],
    source: Sequence[Sequence[int]],
    source_type: Sequence[int],
    target_type: Sequence[int],
    edge_index: Sequence[tuple[list[int], list[int]]] = (),
) -> tuple[list[list[int]], list[list[int]], list[list[list[int]]]]:
    """The outputs of ``ops.join_drawn`` as lists."""
    found = [[(tree[t][i] if tree else 0, v) for i, v in enumerate(ids)] for t, ids in enumerate(n_id)]
    edges = []
    before = edge_index or [([], [])] * len(count)
    for per_target, sources, s, t, (row, col) in zip(count, source, source_type, target_type, before):
        trees = [
            tree[t][first[t] + i] if tree else 0 for i, number in enumerate(per_target) for _ in range(int(number))
        ]
        for vertex in zip(trees, sources):
            if vertex not in found[s]:
                found[s].append(vertex)
        targets = [first[t] + i for i, number in enumerate(per_target) for _ in range(int(number))]
        edges.append([[*row, *(found[s].index(vertex) for vertex in zip(trees, sources))], [*col, *targets]])
    return [[v for _, v in of] for of in found], [[k for k, _ in of] for of in found] if tree else [], edges


def merge_lists(
    size: int,
    position: Sequence[Sequence[int] | None],
    count: Sequence[Sequence[int]],
    value: Sequence[Sequence[int]],
    base: Sequence[Sequence[int]] = (),
) -> tuple[list[int], list[int]]:
    """The outputs of ``ops.merge_lists`` as lists."""
    lists: list[list[int]] = [[] for _ in range(size)]
    for group, (counts, values) in enumerate(zip(count, value)):
        remaining = iter(values)
        for number, length in enumerate(counts):
            place = number if position[group] is None else position[group][number]
            added = base[group][number % len(base[group])] if base else 0
            lists[place] = [next(remaining) + added for _ in range(length)]
    return [len(entries) for entries in lists], [entry for entries in lists for entry in entries]


def divide_batch(
    node: Sequence[int],
    row: Sequence[int],
    col: Sequence[int],
    edge: Sequence[int] | None,
    owner: Sequence[int],
    nodes_within: Sequence[int],
    edges_within: Sequence[int],
    ranks: int,
    place: int = -1,
) -> list[Any]:
    """The outputs of ``ops.divide_batch`` as lists, by the definition of a share."""
    own = [[v for v, rank in enumerate(owner) if rank == place] for place in range(ranks)]
    into = [[e for e, v in enumerate(col) if owner[v] == place] for place in range(ranks)]
    sources = [{row[e] for e in edges} for edges in into]
    sent = [[[v for v in own[a] if v in sources[b] and a != b] for b in range(ranks)] for a in range(ranks)]
    shares = []
    for place_of_share in range(ranks) if place < 0 else [place]:
        halo = [v for a in range(ranks) for v in sent[a][place_of_share]]
        number = {v: at for at, v in enumerate(own[place_of_share] + halo)}
        edges = into[place_of_share]
        shares.append(
            (
                [node[v] for v in own[place_of_share]],
                [number[row[e]] for e in edges],
                [number[col[e]] for e in edges],
                [] if edge is None else [edge[e] for e in edges],
                [number[v] for of_receiver in sent[place_of_share] for v in of_receiver],
            )
        )

    def within(entries: Sequence[int], limits: Sequence[int]) -> list[int]:
        return [sum(entry < limit for entry in entries) for limit in limits]

    return [
        *map(list, zip(*shares)),
        [within(of, nodes_within) for of in own],
        [within(of, edges_within) for of in into],
        [[within(of, nodes_within) for of in of_rank] for of_rank in sent],
    ]


def pack_integers(
    section: Sequence[Sequence[int] | bytes],
    count: Sequence[Sequence[int] | None],
    base: Sequence[Sequence[int] | None],
) -> bytes:
    """The output of ``ops.pack_integers``."""
    header, body = [len(section)], b""
    for values, lengths, less in zip(section, count, base):
        code = 4
        data = values
        if not isinstance(values, bytes):
            if lengths is not None:
                repeated = [number for number, length in zip(less, lengths) for _ in range(length)]
                values = [value - number for value, number in zip(values, repeated)]
            bounds = [(0, 2**8), (0, 2**16), (-(2**31), 2**31), (-(2**63), 2**63)]
            code = next(c for c, (least, end) in enumerate(bounds) if all(least <= value < end for value in values))
            data = struct.pack(f"<{len(values)}{'BHiq'[code]}", *values)
        header.append(len(values) * 5 + code)
        body += data + bytes(-len(data) % 8)
    return struct.pack(f"<{len(header)}q", *header) + body


def edges_between(
    lists: Relation,
    place: Sequence[int],
    tree: Sequence[int] | None,
    now: Sequence[int] | None,
    member: Sequence[int],
    member_tree: Sequence[int] | None,
    since: Sequence[int] | None = None,
) -> tuple[list[int], list[int], list[int]]:
    """The outputs of ``ops.edges_between`` as lists."""
    members = list(zip([0] * len(member) if member_tree is None else member_tree, member))
    count, row, position = [], [], []
    for i, target in enumerate(place):
        found = [
            (members.index((0 if tree is None else tree[i], lists.indices[e])), e)
            for e in visible(lists, target, None, None if now is None else now[i], None if since is None else since[i])
            if (0 if tree is None else tree[i], lists.indices[e]) in members
        ]
        count.append(len(found))
        row += [k for k, _ in found]
        position += [e for _, e in found]
    return count, row, position


def ppr_push(
    indptr: Sequence[int], indices: Sequence[int], seed: int, alpha: float, epsilon: float, k: int
) -> list[tuple[int, float]]:
    """The k vertices with the largest scores of one seed, as ``ops.ppr_push`` finds them. Sums have the same order, so results are equal bit for bit."""
    score: dict[int, float] = {}
    residual = {seed: 1.0}
    queue = [seed]
    while queue:
        v = queue.pop(0)
        sources = [int(u) for u in indices[indptr[v] : indptr[v + 1]]]
        settled = residual[v] if not sources else alpha * residual[v]
        score[v] = score.get(v, 0.0) + settled
        share = (1.0 - alpha) * residual[v] / len(sources) if sources else 0.0
        residual[v] = 0.0
        for u in sources:
            residual[u] = residual.get(u, 0.0) + share
            if u not in queue and residual[u] > epsilon * float(indptr[u + 1] - indptr[u]):
                queue.append(u)
    return sorted(score.items(), key=lambda of: (-of[1], of[0]))[:k]


def exact_ppr(indptr: Sequence[int], indices: Sequence[int], alpha: float) -> np.ndarray:
    """Personalised PageRank by a dense solution: entry [s, v] is the probability that a walk from s ends at v."""
    size = len(indptr) - 1
    step, ends = np.zeros((size, size)), np.full(size, alpha)
    for v in range(size):
        sources = indices[indptr[v] : indptr[v + 1]]
        for u in sources:
            step[v, int(u)] += 1 / len(sources)
        if not len(sources):
            ends[v] = 1.0
    return np.linalg.solve(np.eye(size) - (1 - alpha) * step, np.diag(ends))


def successive_sampling(weights: Sequence[float], count: int) -> dict[tuple[int, ...], float]:
    """Probability of every subset of ``count`` places, drawn one after the other with chances proportional to weights.

    Places of weight 0 are drawn after all others, each with the same chance.
    """
    chances: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(range(len(weights)), count):
        left, chance = list(weights), 1.0
        taken: set[int] = set()
        for place in order:
            total = sum(left)
            chance *= left[place] / total if total > 0 else 1.0 / (len(weights) - len(taken))
            left[place] = 0.0
            taken.add(place)
        subset = tuple(sorted(order))
        chances[subset] = chances.get(subset, 0.0) + chance
    return chances


# --- vertex inclusion probability -------------------------------------------------------------------------


def inclusion_probability(
    indptr: Sequence[int],
    indices: Sequence[int],
    seeds: Sequence[int],
    fanouts: Sequence[int],
    batch_size: int,
    *,
    expand: str = "frontier",
    include_seeds: bool = False,
    replace: bool = False,
    number: type = float,
) -> list:
    """The recurrence of the VIP analysis, term by term; ``number=Fraction`` computes without rounding."""
    one, zero = number(1), number(0)
    num_vertices = len(indptr) - 1
    degree = [int(indptr[v + 1] - indptr[v]) for v in range(num_vertices)]
    listed_by: list[list[int]] = [[] for _ in range(num_vertices)]  # one entry per edge: the v that have u as a source
    for u, v in edges_of(indptr, indices):
        listed_by[u].append(v)

    def draw_probability(fanout: int, d: int):
        if d == 0:
            return zero
        if fanout == -1:
            return one
        if replace:
            return one - (one - one / number(d)) ** fanout
        return min(one, number(fanout) / number(d))

    q = [zero] * num_vertices
    for v in seeds:
        q[v] = min(one, number(batch_size) / number(len(seeds)))
    p_all, q_all = [q], [q]
    for hop in range(len(fanouts)):
        x = q_all[-1] if expand == "frontier" else p_all[-1]
        t = [draw_probability(fanouts[hop], d) for d in degree]
        p = []
        for u in range(num_vertices):
            none = one
            for v in listed_by[u]:
                none *= one - t[v] * x[v]
            p.append(one - none)
        q_all.append([p[u] * (one - sum((q[u] for q in q_all), zero)) for u in range(num_vertices)])
        p_all.append(p)

    terms = slice(0 if include_seeds else 1, None)
    if expand == "frontier":
        return [sum((q[u] for q in q_all[terms]), zero) for u in range(num_vertices)]
    out = []
    for u in range(num_vertices):
        none = one
        for p in p_all[terms]:
            none *= one - p[u]
        out.append(one - none)
    return out


def typed_inclusion_probability(
    relations: Sequence[Relation],
    start: Sequence[Sequence[float]],
    fanouts: Sequence[Sequence[int]],
    *,
    expand: str = "frontier",
    include_seeds: bool = False,
    replace: bool = False,
) -> list[list[float]]:
    """The same for several types, with uniform draws or weighted draws with replacement; ``start`` is p_0 per type."""

    def chance(relation: Relation, e: int, places: range, fanout: int) -> float:
        if fanout in (0, -1):
            return float(-fanout)
        if relation.weight is None:
            return 1 - (1 - 1 / len(places)) ** fanout if replace else min(1.0, fanout / len(places))
        assert replace
        total = sum(relation.weight[k] for k in places)
        return 1 - (1 - (relation.weight[e] / total if total else 1 / len(places))) ** fanout

    q_all, p_all = [start], [start]
    for hop in range(len(fanouts[0])):
        none = [[1.0] * len(p) for p in start]
        for relation, per_hop in zip(relations, fanouts):
            x = (q_all if expand == "frontier" else p_all)[-1][relation.target]
            for v in range(len(relation.indptr) - 1):
                places = range(relation.indptr[v], relation.indptr[v + 1])
                for e in places:
                    none[relation.source][relation.indices[e]] *= 1 - chance(relation, e, places, per_hop[hop]) * x[v]
        p = [[1 - n for n in of_type] for of_type in none]
        q_all.append([[p[t][u] * (1 - sum(q[t][u] for q in q_all)) for u in range(len(p[t]))] for t in range(len(p))])
        p_all.append(p)
    terms = slice(0 if include_seeds else 1, None)
    if expand == "frontier":
        return [[sum(q[t][u] for q in q_all[terms]) for u in range(len(start[t]))] for t in range(len(start))]
    return [[1 - math.prod(1 - p[t][u] for p in p_all[terms]) for u in range(len(start[t]))] for t in range(len(start))]


def exact_inclusion_probability(*args, **options) -> list[Fraction]:
    """The same as exact fractions; feasible for a dozen vertices and two or three hops."""
    return inclusion_probability(*args, **options, number=Fraction)


# --- tiers ------------------------------------------------------------------------------------------------


def look_up(
    n_id: Sequence[int], offsets: Sequence[int], part_id: int, device_ids: Sequence[int], cache_ids: Sequence[int]
) -> dict[str, list]:
    """(position, slot) pairs of each tier in order of position; ``remote`` as one such list per owner."""
    begin, end = offsets[part_id], offsets[part_id + 1]
    gpu, cache = list(device_ids), list(cache_ids)
    places: dict[str, list] = {"device": [], "host": [], "cache": [], "remote": [[] for _ in offsets[1:]]}
    for position, v in enumerate(n_id):
        if begin <= v < end:
            if v - begin in gpu:
                places["device"].append((position, gpu.index(v - begin)))
            else:
                places["host"].append((position, v - begin))
        elif v in cache:
            places["cache"].append((position, cache.index(v)))
        else:
            owner = next(p for p in range(len(offsets) - 1) if offsets[p] <= v < offsets[p + 1])
            places["remote"][owner].append((position, v))
    return places


def plan_cache(scores: Sequence[float], begin: int, end: int, capacity: int) -> list[int]:
    """The ``capacity`` highest positive scores outside [begin, end), ties to lower ids; ascending ids."""
    remote = [v for v in range(len(scores)) if not begin <= v < end and scores[v] > 0]
    remote.sort(key=lambda v: (-scores[v], v))
    return sorted(remote[:capacity])


# --- minimum cuts -----------------------------------------------------------------------------------------


def minimum_cut(arcs: Sequence[tuple[int, int, float]], num_nodes: int, source: int, sink: int) -> list[bool]:
    """Tries every set of nodes. Returns the cheapest side of the source, and of equal ones that with fewest nodes."""
    best, least = 0, (math.inf, 0)
    for side in range(1 << num_nodes):
        if side >> source & 1 and not side >> sink & 1:
            cost = sum(size for tail, head, size in arcs if side >> tail & 1 and not side >> head & 1)
            if (cost, side.bit_count()) < least:
                best, least = side, (cost, side.bit_count())
    return [bool(best >> node & 1) for node in range(num_nodes)]


# --- tests of uniformity ----------------------------------------------------------------------------------


def p_of_equal_counts(outcomes: Iterable, num_cells: int) -> float:
    """Pearson's chi-square for ``num_cells`` equally likely outcomes, some of which may never have come."""
    counts = sorted(Counter(outcomes).values(), reverse=True)
    assert len(counts) <= num_cells, f"{len(counts)} different outcomes, at most {num_cells} are possible"
    counts += [0] * (num_cells - len(counts))
    assert sum(counts) >= 5 * num_cells, "too few draws for a chi-square test"
    if num_cells == 1:
        return 1.0
    return float(stats.chisquare(counts).pvalue)


def p_of_chances(outcomes: Iterable, chances: Mapping) -> float:
    """Pearson's chi-square for outcomes with these chances.

    Outcomes of chance 0 must not come, and rare ones share a cell.
    """
    counts = Counter(outcomes)
    total = sum(counts.values())
    assert abs(sum(chances.values()) - 1.0) < 1e-9
    impossible = [outcome for outcome in counts if chances.get(outcome, 0.0) == 0.0]
    assert not impossible, f"outcomes of chance 0 came: {impossible[:3]}"
    # Rarest first: a cell that is too rare is joined with the next one.
    observed, expected = [0], [0.0]
    for outcome in sorted(chances, key=chances.__getitem__):
        if expected[-1] >= 10:
            observed.append(0)
            expected.append(0.0)
        observed[-1] += counts[outcome]
        expected[-1] += chances[outcome] * total
    assert len(observed) > 1, "a single cell has nothing to test"
    return float(stats.chisquare(observed, expected).pvalue)


def p_of_equal_inclusion(counts: np.ndarray, num_draws: int, fanout: int) -> float:
    """Tests that each of ``len(counts)`` neighbours is equally likely among the ``fanout`` distinct ones of a draw.

    Inclusions of one draw exclude each other, which shrinks Pearson's sum by (d - f) / (d - 1).
    """
    degree = len(counts)
    assert counts.sum() == num_draws * fanout
    expected = num_draws * fanout / degree
    statistic = ((counts - expected) ** 2).sum() / expected * (degree - 1) / (degree - fanout)
    return float(stats.chi2.sf(statistic, degree - 1))


def p_of_hypergeometric(hits: np.ndarray, degree: int, fanout: int, marked: int) -> float:
    """Tests that ``hits`` is hypergeometric, as for uniform subsets.

    ``marked`` neighbours are given. ``hits`` has the number of them in each draw.
    """
    support = np.arange(fanout + 1)
    expected = stats.hypergeom.pmf(support, degree, marked, fanout) * len(hits)
    counts = np.bincount(hits, minlength=fanout + 1).astype(float)
    # A rare value shares a cell with its neighbour towards the middle.
    keep = np.flatnonzero(expected >= 10)
    low, high = keep[0], keep[-1]
    merge = lambda a: np.concatenate([[a[: low + 1].sum()], a[low + 1 : high], [a[high:].sum()]])  # noqa: E731
    return float(stats.chisquare(merge(counts), merge(expected)).pvalue)


class LookaheadReference:
    """Cache that knows the next batches, with lists and loops; see :mod:`salientpp.ways.lookahead.planner`."""

    def __init__(self, window: int, slots: int, prior: Any, members: Any) -> None:
        self.window, self.prior = window, prior.tolist()
        self.ids = [*members.tolist(), *[-1] * (slots - members.numel())]

    def _level(self, v: int) -> int:
        """Level of a vertex's expectation: 16 levels per factor of two, linear between powers of two.

        The last level is for vertices that are never expected.
        """
        p = self.prior[v]
        if p <= 0:
            return 1023
        mantissa, exponent = math.frexp(p)  # p = mantissa * 2**exponent, mantissa in [1/2, 1)
        return max(0, min(1022, math.floor(16 * (-(2 * mantissa - 1) - (exponent - 1)))))

    def plan(self, ids: list[int], known: list[set[int]]) -> tuple[list[tuple[int, int]], list[int], dict[int, int]]:
        """Hits as (place, slot), fetched places, and the slot that each admitted row enters."""

        def rank(v: int) -> tuple[int, int]:
            if v < 0:
                return 2, 0
            return next(((0, j) for j, batch in enumerate(known) if v in batch), (1, self._level(v)))

        at = {v: slot for slot, v in enumerate(self.ids) if v >= 0}
        hits = [(place, at[v]) for place, v in enumerate(ids) if v in at]
        fetched = [place for place, v in enumerate(ids) if v not in at]
        # Order in which rows stay in the cache: by rank; among equals, held rows before new ones, higher slots first, then lower ids.
        there = [(rank(v), 0, -slot, slot) for slot, v in enumerate(self.ids)]
        arrived = [(rank(ids[place]), 1, ids[place], row) for row, place in enumerate(fetched)]
        stay = sorted(there + arrived)[: len(self.ids)]
        entering = sorted((of for of in stay if of[1] == 1), key=lambda of: of[2])
        leaving = sorted(set(range(len(self.ids))) - {of[3] for of in stay if of[1] == 0})
        admitted = {}
        for slot, (_, _, v, row) in zip(leaving, entering, strict=True):
            self.ids[slot], admitted[slot] = v, row
        return hits, fetched, admitted


def fewest_bytes(
    row: Sequence[int],
    col: Sequence[int],
    owner: Sequence[int],
    first: int,
    row_bytes: int,
    id_bytes: int,
    source_bytes: int,
) -> int:
    """Bytes of the cheapest choice of rows and sums, found by trying all sets of rows; see :mod:`salientpp.ways.sums.plan`."""
    edges = [(s - first, (c, owner[s - first])) for s, c in zip(row, col) if s >= first and owner[s - first] >= 0]
    sources = sorted({s for s, _ in edges})
    return min(
        bytes_of_choice(edges, set(sent), row_bytes, id_bytes, source_bytes)
        for number in range(len(sources) + 1)
        for sent in itertools.combinations(sources, number)
    )


def bytes_of_choice(
    edges: Sequence[tuple[int, Any]], sent: set[int], row_bytes: int, id_bytes: int, source_bytes: int
) -> int:
    """Bytes if the rows of ``sent`` are sent, and sums per (source, group) for all other edges."""
    summed = [(s, group) for s, group in edges if s not in sent]
    answers = len(sent) + len({group for _, group in summed})
    return (row_bytes + id_bytes) * answers + source_bytes * len(summed)
