"""Laws of loaders over a topology in parts: they plan as over a whole topology, and no rank opens another part's lists."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data
from one_process import TYPED_FANOUTS, typed_data
from rare import rare
from torch_geometric.sampler import NegativeSampling

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.vip.policies import Workload

FANOUTS, BATCH = [5, 3], 16
CITES = ("paper", "cites", "paper")


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> Path:
    """Directories of three graphs in both forms of the topology."""
    root = tmp_path_factory.mktemp("forms")
    data = random_data(500, edge_attributes=True)
    data.weight = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(2)).round(decimals=2)
    for topology in ("whole", "parts"):
        for num_parts in (2, 3, 4):
            salientpp.partition(data, num_parts, root / f"{topology}-{num_parts}", FANOUTS, BATCH, topology=topology)
        salientpp.partition(
            typed_data(), 4, root / f"{topology}-typed", TYPED_FANOUTS, BATCH, seeds=("paper", "train"), replicate=("venue",), topology=topology,
        )  # fmt: skip
    return root


def readers(workload: Workload) -> torch.Tensor:
    """A policy of a user, which counts the readers of every vertex, and prefers those of the rank's seeds."""
    value = torch.ones(workload.num_vertices, dtype=torch.float64)
    value[workload.seeds] = 3
    return workload.lists.to_sources([value], lambda place, of_targets: of_targets)[0]


def _plan(rank: int, root: str, link: bool, options: dict[str, Any], seeds: Any) -> tuple:
    """The rows that a rank caches and keeps on its device, the rows that padded batches have, and the files in memory."""
    opened: set[str] = set()
    sys.addaudithook(lambda event, arguments: opened.add(str(arguments[0])) if event == "open" else None)
    options = {"batch_size": 8, "replication_factor": 0.3, **options}
    fanouts = options.pop("num_neighbors", FANOUTS)
    part = salientpp.load(root)
    if callable(seeds):
        seeds = seeds(rank, part)
    if link:
        loader: Any = LinkNeighborLoader(part, fanouts, seeds, **options)
    else:
        loader = NeighborLoader(part, fanouts, seeds, **options)
    cache = next(way.cache for way in loader.engine.ways if way.name in ("cache", "lookahead"))
    cached = {type_: of_type.members.ids.tolist() for type_, of_type in cache.by_type.items()}
    tiers = loader.engine.producer.fetch.tiers
    near = {type_: [tier.members.ids.tolist() for tier in of_type.near] for type_, of_type in tiers.items()}
    padded = loader.memory_used()["batches"] if "pad" in options else None
    lists = {
        Path(name).parent.name
        for name in opened
        if name.startswith(root) and ("indices" in name or "indptr" in name or "edge_" in name)
    }
    return cached, near, padded, lists


def few_on_one_rank(rank: int, part: salientpp.PartitionedGraph) -> Any:
    """Seeds of the stored workload, except on rank 1."""
    return part.split("train")[:9] if rank == 1 else part.split("train")


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "other batch size": (4, "4", {}),
    "stored probabilities": (4, "4", {"batch_size": BATCH}),
    "two parts per rank": (2, "4", {}),
    "two parts per rank, stored workload": (2, "4", {"batch_size": BATCH}),
    "two ranks per part": (4, "2", {}),
    "uneven parts": (2, "3", {"device_rows": 0.4}),
    "hosts": (4, "4", {"ranks_per_host": 2, "device_rows": 0.4}),
    "stored probabilities on all ranks but one": (4, "4", {"batch_size": BATCH, "seeds": few_on_one_rank}),
    "other fanouts with replacement": (3, "3", {"num_neighbors": [4, -1, 2], "replace": True}),
    "weights": (2, "4", {"weight_attr": "weight"}),
    "own policy": (2, "4", {"policy": readers}),
    "fixed padding": (2, "2", {"pad": "fixed"}),
    "types": (4, "typed", {"num_neighbors": TYPED_FANOUTS, "seeds": "paper"}),
    "types and hosts": (
        4,
        "typed",
        {"num_neighbors": TYPED_FANOUTS, "seeds": "paper", "ranks_per_host": 2, "device_rows": 0.5},
    ),
    "edges": (2, "2", {"link": True, "seeds": "all", "neg_sampling": NegativeSampling("binary", 1.5)}),
    "edges of types": (2, "typed", {"link": True, "num_neighbors": TYPED_FANOUTS, "seeds": CITES, "policy": "vip-hop"}),
} | {policy: (2, "2", {"policy": policy}) for policy in ("degree", "halo", "paths", "random", "vip-hop", "wpr")}
#: Others are similar. The scores of all policies are compared in test_over_parts.py.
RARE = [
    *("stored probabilities", "two parts per rank, stored workload", "types", "edges"),
    *("degree", "halo", "random", "wpr"),
]


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in RARE), *rare(*RARE)])
def test_loaders_plan_the_same_over_both_forms_of_the_topology(roots, name):
    world, of, options = CASES[name]
    options = dict(options)
    seeds, link = options.pop("seeds", "train"), options.pop("link", False)
    whole, parts = (
        distributed.run(_plan, world, str(roots / f"{topology}-{of}"), link, options, seeds)
        for topology in ("whole", "parts")
    )
    assert any(any(cached.values()) for cached, *_ in whole)
    assert [result[:3] for result in parts] == [result[:3] for result in whole]
    num_parts = 4 if of == "typed" else int(of)
    hosts = options.get("ranks_per_host", 1)
    for rank, (*_, lists) in enumerate(parts):
        first = rank - rank % hosts
        held = range(first * num_parts // world, max(1, -(-(first + hosts) * num_parts // world)))
        assert lists and lists <= {f"part-{part:05d}" for part in held}


def test_probabilities_of_joined_parts_are_kept(roots):
    root = roots / "parts-3"
    distributed.run(_plan, 2, str(root), False, {"batch_size": BATCH}, "train")
    kept = sorted(path.name for path in (root / "kept").iterdir())
    assert len(kept) == 1 and kept[0].startswith("vip-1-2-")
    part = salientpp.load(root).joined([0, 1, 3], None)
    seeds = part.split("train", 1)
    found = part.workload(1, seeds, FANOUTS, BATCH).vip
    want = salientpp.inclusion_probability(part.graph, seeds, FANOUTS, BATCH)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-7)
