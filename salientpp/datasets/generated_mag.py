"""Generates a graph of several types with the schema of MAG240M: papers, their authors, and institutions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from salientpp.datasets.arrays import SPLITS
from salientpp.datasets.generated import (
    MAX_ROUNDS,
    Groups,
    check_kinds,
    check_memory,
    draw_distinct_pairs,
    features_of_classes,
    power_law_weights,
    random_streams,
)
from salientpp.partitioning.undirected import sorted_unique

#: Number of papers of a year divided by the number of the year before, and the range of years. MAG240M splits papers by year.
_GROWTH, _FIRST_YEAR, _LAST_YEAR = 1.09, 1990, 2020


def synthetic_mag(
    *,
    num_papers: int = 50_000,
    citations_per_paper: float = 10.0,
    authors_per_paper: float = 3.0,
    papers_per_author: float = 3.0,
    institutions_per_author: float = 0.4,
    papers_per_institution: int = 500,
    num_classes: int = 12,
    num_features: int = 64,
    community_size: int = 500,
    homophily: float = 0.8,
    locality: float = 0.7,
    exponent: float = 2.5,
    signal: float = 1.0,
    label_noise: float = 0.1,
    labelled_fraction: float = 0.4,
    seed: int = 0,
) -> HeteroData:
    """Generates a graph of papers, authors and institutions with labels that a heterogeneous GNN can learn.

    Papers and citations are drawn as :func:`~salientpp.datasets.synthetic` draws its graph, with communities in classes. The newer paper
    cites the older one. An author has a home community. The author's papers and institutions are drawn within the home community, within the community's
    class, or anywhere, with the same shares as citations. So a paper's class shows in the papers that it cites, that cite it, and that its authors have
    written. The paper's own features are too noisy to tell the class.

    Schema, names and dtypes follow MAG240M (Hu et al., OGB-LSC, arXiv:2103.09430). MAG240M has 122 M papers, 122 M authors and 26 k
    institutions, with 3.2 authors and 10.7 citations per paper and 0.36 institutions per author. 1.1 % of its papers have labels.

    Args:
        num_papers: P.
        citations_per_paper, authors_per_paper, institutions_per_author: average numbers of edges.
        papers_per_author: average number of papers of an author; the graph has ``P * authors_per_paper / papers_per_author`` authors.
        papers_per_institution: the graph has ``P // papers_per_institution`` institutions, at least one.
        num_classes, num_features, community_size, homophily, locality, exponent, signal: as in ``synthetic``, for papers.
        label_noise: share of labelled papers with a label drawn at random.
        labelled_fraction: share of papers that have labels; the others have -1. In MAG240M the papers of arXiv have labels.
        seed: the same seed gives the same arrays with the same NumPy. Topology, features and labels use separate random streams.

    Returns:
        ``HeteroData`` with three types of vertices. 'paper' has x float16 [P, F], y int64 [P], year int64 [P] in 1990 to 2020, and masks.
        The masks hold labelled papers: train up to 2018, val of 2019, test of 2020. 'author' and 'institution' have no features. The relations
        are (author, writes, paper), (author, affiliated_with, institution) and (paper, cites, paper), without duplicates, and the reverse of
        each, ``rev_...``.

    Raises:
        ValueError: an argument is out of range, the graph has no room for its distinct edges, or this machine has too little memory.
    """
    _check_parameters(locals())
    num_authors = max(1, round(num_papers * authors_per_paper / papers_per_author))
    num_institutions = max(1, num_papers // papers_per_institution)
    num_edges = num_papers * (citations_per_paper + authors_per_paper) + num_authors * institutions_per_author
    check_memory(
        f"{num_papers} papers with {num_features} features and {num_edges:.0f} edges",
        6 * num_features * num_papers + 48 * int(num_edges),
    )
    graph_rng, feature_rng, label_rng = random_streams(seed, 3)
    groups = Groups.draw(graph_rng, num_papers, num_classes, community_size, homophily, locality)
    paper_id = graph_rng.permutation(num_papers)
    cites, year = _draw_citations(graph_rng, groups, paper_id, citations_per_paper, exponent)
    author_id, institution_id = graph_rng.permutation(num_authors), graph_rng.permutation(num_institutions)
    cap = max(10.0, np.sqrt(num_papers))
    weights = power_law_weights(graph_rng, num_authors, papers_per_author, exponent, cap)
    writes = _draw_links(graph_rng, round(num_papers * authors_per_paper), weights, num_papers, groups)
    num_links = round(num_authors * institutions_per_author)
    affiliated = _draw_links(graph_rng, num_links, np.ones(num_authors), num_institutions, groups)

    classes = groups.class_of_ids(paper_id)
    x = features_of_classes(feature_rng, classes, num_classes, num_features, signal, np.float16)
    y = np.where(label_rng.random(num_papers) < label_noise, label_rng.integers(num_classes, size=num_papers), classes)
    y[label_rng.random(num_papers) >= labelled_fraction] = -1
    edges = {
        ("author", "writes", "paper"): (author_id[writes[0]], paper_id[writes[1]]),
        ("author", "affiliated_with", "institution"): (author_id[affiliated[0]], institution_id[affiliated[1]]),
        ("paper", "cites", "paper"): (cites[0], cites[1]),
    }
    sizes = {"paper": num_papers, "author": num_authors, "institution": num_institutions}
    return _assemble(sizes, x, y, year, edges)


def _check_parameters(given: Mapping[str, Any]) -> None:
    """Raises ValueError if a parameter of `synthetic_mag` is out of range."""
    check_kinds(given)
    num_papers, num_classes, exponent, signal = (
        given[name] for name in ("num_papers", "num_classes", "exponent", "signal")
    )
    for name in ("citations_per_paper", "authors_per_paper", "papers_per_author", "institutions_per_author"):
        if not 0 < given[name] < num_papers:
            raise ValueError(f"{name} must be in (0, num_papers = {num_papers}), got {given[name]}")
    if num_classes > num_papers:
        raise ValueError(f"num_classes must be <= num_papers = {num_papers}, got {num_classes}")
    if not 2 < exponent < math.inf:
        raise ValueError(f"exponent must be > 2 and finite, got {exponent}")
    if not 0 <= signal <= 1000:
        raise ValueError(f"signal must be in [0, 1000], since features are float16, got {signal}")
    # Compared without a division, whose result could be too large for an integer.
    if num_papers * given["authors_per_paper"] > given["papers_per_author"] * 2**31:
        raise ValueError(
            f"papers_per_author must be large enough for at most 2^31 authors of {num_papers} papers, got {given['papers_per_author']}"
        )


def _draw_citations(
    rng: np.random.Generator, groups: Groups, paper_id: np.ndarray, citations_per_paper: float, exponent: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of citing and cited papers, int64 [2, n], and the year of every paper, int64 [P]. The newer paper cites the older."""
    num_papers = paper_id.size
    cap = np.sqrt(2 * num_papers * citations_per_paper)
    weights = power_law_weights(rng, num_papers, 2 * citations_per_paper, exponent, cap)
    ends = draw_distinct_pairs(rng, round(num_papers * citations_per_paper), weights, groups, paper_id)
    years = np.arange(_FIRST_YEAR, _LAST_YEAR + 1)
    share = _GROWTH ** (years - _FIRST_YEAR)
    year = rng.choice(years, size=num_papers, p=share / share.sum())
    newer = year[ends[0]] > year[ends[1]]  # in the same year, the higher id cites
    return np.where(newer, ends, ends[::-1]), year


def _assemble(
    sizes: dict[str, int],
    x: np.ndarray,
    y: np.ndarray,
    year: np.ndarray,
    edges: dict[tuple[str, str, str], tuple[np.ndarray, np.ndarray]],
) -> HeteroData:
    data = HeteroData()
    columns = {"x": x, "y": y, "year": year}
    of_split = (year < _LAST_YEAR - 1, year == _LAST_YEAR - 1, year == _LAST_YEAR)
    columns |= {f"{split}_mask": mask & (y >= 0) for split, mask in zip(SPLITS, of_split)}
    for name, column in columns.items():
        data["paper"][name] = torch.from_numpy(column)
    for name, size in sizes.items():
        data[name].num_nodes = size
    for (source, relation, target), ends in edges.items():
        edge_index = _sorted_edges(ends[0], ends[1], sizes[target])
        data[source, relation, target].edge_index = edge_index
        reverse = _sorted_edges(edge_index[1].numpy(), edge_index[0].numpy(), sizes[source])
        data[target, f"rev_{relation}", source].edge_index = reverse
    return data


def _draw_links(
    rng: np.random.Generator,
    num_links: int,
    weights: np.ndarray,
    num_targets: int,
    groups: Groups,
) -> np.ndarray:
    """Draws exactly ``num_links`` distinct links, such as from authors to papers. Sources are drawn in proportion to their weights, float64 [S].

    The target is drawn from the source's community, from its class, or from all, with the probabilities in ``groups``. ``groups`` has papers; any other vertex
    belongs where the paper at the same relative position does. Returns positions of sources and targets, int64 [2, n].
    """
    num_sources = weights.size
    if num_links > num_sources * num_targets:
        raise ValueError(f"could not place {num_links} distinct edges between {num_sources} and {num_targets} vertices")
    cumulative = np.cumsum(weights)
    homes, shares = groups.start, groups.shares
    num_classes = int(groups.class_of_community[-1]) + 1
    class_start = homes[np.searchsorted(groups.class_of_community, np.arange(num_classes + 1))]
    # Ranges of papers, scaled to the number of targets.
    communities, classes = (
        np.floor(bounds * (num_targets / bounds[-1])).astype(np.int64) for bounds in (homes, class_start)
    )
    class_of_community = np.searchsorted(classes, communities[:-1], side="right") - 1
    keys = np.empty(0, dtype=np.int64)
    for _ in range(MAX_ROUNDS):
        missing = num_links - keys.size
        if missing <= 0:
            break
        count = int(1.2 * missing) + 16
        at = (np.arange(count) + rng.random(count)) * (cumulative[-1] / count)
        source = np.minimum(np.searchsorted(cumulative, at, side="right"), num_sources - 1)
        home = np.searchsorted(homes, (source + 0.5) * (homes[-1] / num_sources), side="right") - 1
        level, place = rng.random(count), rng.random(count)
        low, high = np.zeros(count), np.full(count, float(num_targets))
        for within, bounds, group in (
            (level < shares[0] + shares[1], classes, class_of_community[home]),
            (level < shares[0], communities, home),
        ):
            low, high = np.where(within, bounds[group], low), np.where(within, bounds[group + 1], high)
        # If targets are few, a community may have no target of its own. It then takes the nearest target.
        target = np.minimum(low + place * np.maximum(high - low, 1), num_targets - 1).astype(np.int64)
        keys = sorted_unique(np.concatenate([keys, source * num_targets + target]))
    else:
        raise ValueError(
            f"could place only {keys.size} of {num_links} distinct edges between {num_sources} and {num_targets} vertices: ask for fewer, or "
            "raise community_size"
        )
    keys = rng.permutation(keys)[:num_links]
    return np.stack([keys // num_targets, keys % num_targets])


def _sorted_edges(sources: np.ndarray, targets: np.ndarray, num_targets: int) -> Tensor:
    """Returns edges int64 [2, E], sorted by source, then by target."""
    key = sources * num_targets + targets
    key.sort()
    return torch.from_numpy(np.stack([key // num_targets, key % num_targets]))
