"""Law 4: a dry run draws the batches of the epoch and tells which rows they fetch, while no rows move."""

from __future__ import annotations

from typing import Any

import distributed
import pytest
from graphs import random_data

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cache": {"replication_factor": 0.3},
    "trees": {"disjoint": True, "replace": True},
    "blocks": {"shared_draws": {"vertices": "batch", "block": 3}},
    "joined": {"logical_ranks": {"number": 4, "join": True}},
    "ends": {"uneven": "exact", "drop_last": True},
    "threads": {"num_workers": 2, "replication_factor": 0.1},
}


def _compare(rank: int, root: str) -> dict[str, tuple]:
    """Returns, for each kind of loader, the vertices of each batch and the remote rows.

    The vertices are recorded four times: by a dry run, by one without edges, by one over every second batch, and by the epoch itself. The remote rows are
    counted by the first dry run and by the epoch.
    """
    found = {}
    for name, options in [*OPTIONS.items(), ("edges", {"neg_sampling": "binary"})]:
        kind, seeds = (LinkNeighborLoader, "all") if name == "edges" else (NeighborLoader, "train")
        size = 100 if name == "edges" else 8
        loader = kind(salientpp.load(root), [4, 3], seeds, batch_size=size, shuffle=True, seed=5, **options)
        for epoch in range(2):
            dry = list(loader.engine.dry(epoch, lambda drawn: drawn))
            bare = list(loader.engine.dry(epoch, lambda drawn: drawn.mfg.node.tolist(), only_vertices=True))
            turns = loader.engine.basis.epochs.order.of_epoch(epoch)[1::2]
            few = list(loader.engine.dry(epoch, lambda drawn: drawn.mfg.node.tolist(), turns))
            loader.reset_stats()
            live = [batch.n_id.tolist() for batch in loader]
            rows = sum(drawn.places[None].remote_id.numel() for drawn in dry)
            drawn_in_all = [drawn.mfg.node.tolist() for drawn in dry]
            found[f"{name} {epoch}"] = drawn_in_all, bare, few, live, rows, loader.stats().rows_remote
    return found


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory) -> list[dict[str, tuple]]:
    root = tmp_path_factory.mktemp("dry") / "parts"
    salientpp.partition(random_data(), 2, root, [4, 3], 8)
    return distributed.run(_compare, 2, str(root))


@pytest.mark.parametrize("name", [*OPTIONS, "edges"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_dry_run_gives_the_batches_and_fetched_rows_of_the_epoch(of_ranks, name, epoch):
    for of_rank in of_ranks:
        dry, bare, few, live, counted, fetched = of_rank[f"{name} {epoch}"]
        assert dry == bare == live and few == live[1::2] and len(live) > 1
        assert counted == fetched
