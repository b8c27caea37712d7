"""Generates a graph for tests and measurements. It has hubs, communities and classes, as real graphs do."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from salientpp.datasets.arrays import SPLITS
from salientpp.partitioning.undirected import sorted_unique, split_keys, symmetric_closure

# Numbers of edges drawn and of rows written at a time: large enough for NumPy, small enough to bound the temporaries.
_CHUNK, _ROWS = 1 << 20, 1 << 16
# Largest N: pairs are coded as `source * N + target` in int64.
_MOST_VERTICES = math.isqrt(2**63 - 1)
# Missing edges are drawn again until none is missing. A graph with room for its edges needs 3 or 4 draws. After this number of draws, the graph is taken to
# have no room for its edges.
MAX_ROUNDS = 50


def synthetic(
    *,
    num_vertices: int = 100_000,
    average_degree: float | None = None,
    num_classes: int | None = None,
    num_features: int = 64,
    community_size: int = 1000,
    homophily: float = 0.8,
    locality: float = 0.7,
    exponent: float = 2.5,
    degree_cap: float | None = None,
    signal: float = 1.0,
    label_noise: float = 0.1,
    train_fraction: float = 0.08,
    val_fraction: float = 0.04,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Data:
    """Generates an undirected graph with hubs, communities and labels that a GNN can learn.

    The model is a degree-corrected stochastic block model (Karrer and Newman, Phys. Rev. E 83, 016107, 2011) with two nested levels: vertices form
    communities, and communities form classes. Each vertex v has an expected degree w(v) from a power law. The first end of an edge is drawn in proportion
    to w among all vertices. The second end is drawn in proportion to w among the first end's community, its class, or all vertices, by fixed shares.
    So the expected degree of v is w(v). Repeated pairs and self-loops are drawn again.

    The label is the class, with noise. The features of a vertex are a point of its class plus Gaussian noise. The noise hides the class of a single
    vertex, and averaging over neighbours removes it. Ids are shuffled, so they say nothing about community or class.

    Args:
        num_vertices: N. With 2_400_000, average_degree=44 and num_features=100, the graph is about as large as ogbn-products.
        average_degree: directed edges per vertex, that is E / N with both directions counted. None: 20, but at most half of the other vertices.
        num_classes: number of classes; each has at least one community. None: 12, but at most one for each vertex.
        num_features: F.
        community_size: average number of vertices in a community (sizes vary, log-normally).
        homophily: share of edges drawn within a class. The other edges go anywhere, by chance also within the class.
        locality: share of the edges within a class that is drawn within the community. A partition can keep these edges local.
        exponent: exponent of the power law of degrees, P(w) ~ w^-exponent. It is above 2, so that the mean exists.
        degree_cap: largest expected degree. With the default, sqrt(N * average_degree), few pairs repeat (Chung and Lu, PNAS 99, 15879, 2002).
        signal: distance of a class's point from the origin, in standard deviations of the noise.
        label_noise: share of vertices with a label drawn at random.
        train_fraction, val_fraction, test_fraction: shares of the vertices in the splits.
        seed: the same seed gives the same arrays with the same NumPy. Graph, features, labels and splits use separate random streams.

    Returns:
        `Data` with edge_index int64 [2, N * average_degree] (symmetric, sorted, no duplicates, no
        self-loops), x float32 [N, F], y int64 [N], the three masks and num_nodes.

    Raises:
        ValueError: an argument is out of range, the graph has no room for its distinct edges, or this machine has too little memory.
    """
    average_degree, num_classes = _fitting(num_vertices, average_degree, num_classes)
    check_parameters(**locals())
    if degree_cap is None:
        degree_cap = math.sqrt(num_vertices * average_degree)
    num_vertices = int(num_vertices)
    # A lower bound: the returned arrays and the keys that edges are made from.
    check_memory(
        f"{num_vertices} vertices of average degree {average_degree} with {num_features} features and {num_classes} classes",
        4 * num_features * (num_vertices + num_classes) + 32 * int(num_vertices * average_degree),
    )
    graph_rng, feature_rng, label_rng, split_rng = random_streams(seed, 4)
    groups = Groups.draw(graph_rng, num_vertices, num_classes, community_size, homophily, locality)
    weights = power_law_weights(graph_rng, num_vertices, average_degree, exponent, degree_cap)
    id_of_position = graph_rng.permutation(num_vertices)
    num_pairs = round(num_vertices * average_degree / 2)
    ends = draw_distinct_pairs(graph_rng, num_pairs, weights, groups, id_of_position)
    edge_index = symmetric_closure(ends[0], ends[1], num_vertices)
    del ends
    classes = groups.class_of_ids(id_of_position)
    x = features_of_classes(feature_rng, classes, num_classes, num_features, signal, np.float32)
    random_labels = label_rng.integers(num_classes, size=num_vertices)
    y = np.where(label_rng.random(num_vertices) < label_noise, random_labels, classes)
    arrays = {"x": x, "edge_index": edge_index, "y": y}
    order = split_rng.permutation(num_vertices)
    arrays |= _masks(order, (train_fraction, val_fraction, test_fraction))
    return Data(num_nodes=num_vertices, **{name: torch.from_numpy(array) for name, array in arrays.items()})


def _masks(order: np.ndarray, fractions: Sequence[float]) -> dict[str, np.ndarray]:
    """Returns the masks of train, val and test. Each takes its fraction of the vertices in ``order``, after those of the split before."""
    # Cumulative sums are rounded, so fractions that add up to one use every vertex.
    bounds = [0, *(round(len(order) * share) for share in accumulate(fractions))]
    masks = {f"{split}_mask": np.zeros(len(order), dtype=bool) for split in SPLITS}
    for mask, start, end in zip(masks.values(), bounds, bounds[1:]):
        mask[order[start:end]] = True
    return masks


def _fitting(num_vertices: Any, average_degree: float | None, num_classes: int | None) -> tuple[float, int]:
    """Returns the average degree and the number of classes, with defaults for None that suit a small graph too. ``num_vertices`` may still be wrong."""
    few = min(num_vertices, 1000) if is_whole(num_vertices) and num_vertices >= 2 else 1000
    degree = min(20.0, max(1.0, (few - 1) / 2)) if average_degree is None else average_degree
    return degree, min(12, few) if num_classes is None else num_classes


#: Smallest and largest values of integer parameters.
_INTEGERS = {
    "num_vertices": (2, _MOST_VERTICES),
    "num_papers": (2, _MOST_VERTICES),
    "num_classes": (1, _MOST_VERTICES),
    "num_features": (1, 2**31 - 1),
    "community_size": (1, 2**63 - 1),
    "papers_per_institution": (1, 2**63 - 1),
    "seed": (0, math.inf),
}
_SHARES = ("homophily", "locality", "label_noise", "labelled_fraction", *(f"{split}_fraction" for split in SPLITS))


def is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_kinds(parameters: Mapping[str, Any]) -> None:
    """Raises ValueError unless each parameter is a number of the kind that its name requires: an integer, a number in [0, 1], or any number."""
    for name, value in parameters.items():
        if name in _INTEGERS:
            least, most = _INTEGERS[name]
            if not is_whole(value) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
            if value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}")
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{name} must be a number below 2^63, got {value}")
        if name in _SHARES and not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}")


def check_parameters(**given: Any) -> None:
    """Raises ValueError if a parameter of `synthetic` is out of range."""
    check_kinds({name: value for name, value in given.items() if name != "degree_cap" or value is not None})
    num_vertices, num_classes, average_degree = (
        given[name] for name in ("num_vertices", "num_classes", "average_degree")
    )
    exponent, signal, degree_cap = given["exponent"], given["signal"], given.get("degree_cap")
    total = sum(given[f"{split}_fraction"] for split in SPLITS)
    if total > 1 + 1e-9:
        raise ValueError(f"train_fraction + val_fraction + test_fraction must be <= 1, got {total:g}")
    if num_classes > num_vertices:
        raise ValueError(f"num_classes must be <= num_vertices = {num_vertices}, got {num_classes}")
    if not 2 < exponent < math.inf:
        raise ValueError(f"exponent must be > 2{' and finite' if exponent == math.inf else ''}, got {exponent}")
    if not 0 < average_degree <= num_vertices - 1:
        raise ValueError(f"average_degree must be in (0, num_vertices - 1 = {num_vertices - 1}], got {average_degree}")
    if not 0 <= signal < math.inf:
        raise ValueError(f"signal must be finite and >= 0, got {signal}")
    if signal > 1e30:
        raise ValueError(f"signal must be at most 1e30, since features are float32, got {signal}")
    if degree_cap is not None and not degree_cap > average_degree:
        raise ValueError(f"degree_cap must be > average_degree = {average_degree}, got {degree_cap}")


def check_memory(what: str, needed: int) -> None:
    """Raises ValueError if the machine has less than ``needed`` bytes of memory. ``what`` describes the graph in the error."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(
            f"{what} need at least {needed / 1e9:,.0f} GB of memory, and this machine has {memory / 1e9:,.0f} GB; ask for a smaller graph"
        )


def random_streams(seed: int, number: int) -> list[np.random.Generator]:
    """Returns ``number`` independent random generators, so that a change in one kind of draw leaves the other kinds as they are."""
    return [np.random.Generator(np.random.PCG64(child)) for child in np.random.SeedSequence(seed).spawn(number)]


@dataclass(frozen=True, eq=False)
class Groups:
    """Communities nested in classes. Each is a range of positions, which are the numbers of the vertices before their ids are shuffled."""

    start: np.ndarray  # int64 [C + 1], the bounds of the communities
    class_of_community: np.ndarray  # int64 [C], ascending
    shares: tuple[
        float, float
    ]  # of edges whose ends are drawn from one community, and from one class; the ends of other edges are drawn from all vertices

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        num_vertices: int,
        num_classes: int,
        community_size: int,
        homophily: float,
        locality: float,
    ) -> Groups:
        num_communities = max(num_classes, round(num_vertices / community_size))
        # Each community gets one vertex. The other vertices are divided in proportion to the drawn sizes. So no community and no class is empty.
        sizes = rng.lognormal(sigma=0.5, size=num_communities)
        ends = np.rint(np.cumsum(sizes) / sizes.sum() * (num_vertices - num_communities)).astype(np.int64)
        start = np.concatenate([[0], ends + np.arange(1, num_communities + 1)])
        others = rng.integers(num_classes, size=num_communities - num_classes)
        classes = np.sort(np.concatenate([np.arange(num_classes), others]))
        return cls(start, classes, (homophily * locality, homophily * (1 - locality)))

    def class_of_ids(self, id_of_position: np.ndarray) -> np.ndarray:
        """Returns the class of every vertex by id, int64 [N]."""
        classes = np.empty(id_of_position.size, dtype=np.int64)
        classes[id_of_position] = np.repeat(self.class_of_community, np.diff(self.start))
        return classes


def features_of_classes(
    rng: np.random.Generator, classes: np.ndarray, num_classes: int, num_features: int, signal: float, dtype: type
) -> np.ndarray:
    """Returns features [N, F]: for each vertex the point of its class, at the distance `signal` from the origin, plus Gaussian noise."""
    centres = rng.standard_normal((num_classes, num_features), dtype=np.float32)
    centres *= signal / np.linalg.norm(centres, axis=1, keepdims=True)
    x: np.ndarray = np.empty((classes.size, num_features), dtype=dtype)
    for start in range(0, classes.size, _ROWS):
        some = classes[start : start + _ROWS]
        x[start : start + some.size] = rng.standard_normal((some.size, num_features), dtype=np.float32) + centres[some]
    return x


def power_law_weights(
    rng: np.random.Generator, num_vertices: int, mean: float, exponent: float, cap: float
) -> np.ndarray:
    """Returns expected degrees, float64 [N], with density ~ w^-exponent, maximum `cap` and average `mean`."""
    pareto = (1.0 - rng.random(num_vertices)) ** (-1.0 / (exponent - 1.0))
    scale = mean / pareto.mean()
    # The weight that the cap cuts off goes to all other vertices. Few are at the cap, so each step closes most of the gap.
    for _ in range(50):
        weights = np.minimum(pareto * scale, cap)
        scale *= mean / weights.mean()
    return weights


def draw_distinct_pairs(
    rng: np.random.Generator, num_pairs: int, weights: np.ndarray, groups: Groups, id_of_position: np.ndarray
) -> np.ndarray:
    """Draws exactly `num_pairs` distinct pairs of two different vertices.

    ``weights`` are float64 [N] by position, ``id_of_position`` is int64 [N]. Returns int64 [2, num_pairs], the smaller and the larger id of each pair.
    Pairs ascend.
    """
    community_start, class_of_community, shares = groups.start, groups.class_of_community, groups.shares
    num_vertices = weights.size
    cumulative = np.concatenate([[0.0], np.cumsum(weights)])
    # For each community, its interval of the cumulative weight and the interval of its class.
    community_ends = cumulative[community_start]
    class_range = np.searchsorted(class_of_community, np.arange(class_of_community[-1] + 2))
    class_ends = community_ends[class_range]
    low = np.stack([community_ends[:-1], class_ends[class_of_community]])
    width = np.stack([np.diff(community_ends), np.diff(class_ends)[class_of_community]])
    total = cumulative[-1]
    community_of_position = np.repeat(np.arange(class_of_community.size), np.diff(community_start))

    def position_at(weight: np.ndarray) -> np.ndarray:
        # Rounding can put a number at the very end of the last interval.
        return np.minimum(np.searchsorted(cumulative, weight, side="right") - 1, num_vertices - 1)

    def draw(start: int, end: int, num_draws: int) -> np.ndarray:
        # First ends are stratified, one in each of num_draws equal intervals of weight. So they ascend,
        # and the search reads the table in order.
        count = end - start
        first = position_at((np.arange(start, end) + rng.random(count)) * (total / num_draws))
        community = community_of_position[first]
        level = rng.random(count)
        at = rng.random(count)
        near = level < shares[0]
        within_class = ~near & (level < shares[0] + shares[1])
        in_community, in_class = low[:, community] + at * width[:, community]
        at = np.where(near, in_community, np.where(within_class, in_class, at * total))
        a, b = id_of_position[first], id_of_position[position_at(at)]
        return (np.minimum(a, b) * num_vertices + np.maximum(a, b))[a != b]

    keys = np.empty(0, dtype=np.int64)
    yield_of_a_draw = 1.0
    for _ in range(MAX_ROUNDS):
        missing = num_pairs - keys.size
        if missing <= 0:
            break
        num_draws = int(1.05 * missing / max(yield_of_a_draw, 0.05)) + 16
        drawn = [draw(start, min(start + _CHUNK, num_draws), num_draws) for start in range(0, num_draws, _CHUNK)]
        before = keys.size
        keys = sorted_unique(np.concatenate([keys, *drawn]))
        yield_of_a_draw = (keys.size - before) / num_draws
    else:
        raise ValueError(
            f"could place only {keys.size} of {num_pairs} distinct edges among {num_vertices} vertices: lower "
            f"average_degree, or raise community_size or degree_cap"
        )
    surplus = keys.size - num_pairs
    if surplus:
        keep = np.ones(keys.size, dtype=bool)
        keep[rng.choice(keys.size, surplus, replace=False, shuffle=False)] = False
        keys = keys[keep]
    ends = np.empty((2, keys.size), dtype=np.int64)
    split_keys(keys, num_vertices, ends[0], ends[1])
    return ends
