"""Laws of counting with storage hosts: counts equal those of a live job with storage ranks, and hosts that store change no batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import distributed
import pytest
from graphs import random_data, random_hetero

import salientpp
from salientpp import NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.cli import main
from salientpp.ranks.placement import Placement

FANOUTS, BATCH, ALPHAS = [5, 3, 2], 16, [0.0, 0.1, 0.3, 0.9]
PARTS = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stored") / "parts"
    salientpp.partition(random_data(), PARTS, root, FANOUTS, BATCH)
    return root


def _live(rank: int, root: Path, storage: int, loaders: list[dict[str, Any]]) -> list[dict[Any, int]] | None:
    """Returns the rows that this rank fetches in two epochs by vertex type, for each of ``loaders``. None on a storage rank."""
    part = salientpp.load(root, storage_ranks=storage)
    if part.only_stores:
        salientpp.serve(part)
        return None
    found = []
    for options in loaders:
        loader = NeighborLoader(part, shuffle=True, seed=5, **options)
        for _ in range(2):
            for _ in loader:
                pass
        found.append({type_: rows["remote"] for type_, rows in loader.stats().by_type.items()})
    return found


def live(root: Path, trainers: int, storage: int, loaders: list[dict[str, Any]]) -> list[list[dict[Any, int]]]:
    found = distributed.run(_live, trainers + storage, root, storage, loaders)
    assert found[trainers:] == [None] * storage
    return found[:trainers]


def rows_of(volume: Any) -> list[int]:
    return [2 * rows for rows in volume.remote_rows_per_rank]


@pytest.mark.parametrize(
    ("trainers", "storage", "policy"), [(2, 1, "vip"), (4, 2, "degree"), (1, 2, "vip"), (2, 4, "halo")]
)
def test_the_count_equals_a_live_job_with_storage_ranks(root: Path, trainers: int, storage: int, policy: str) -> None:
    plain = {"num_neighbors": FANOUTS, "batch_size": BATCH, "input_nodes": "train", "policy": policy}
    loaders = [plain | {"replication_factor": alpha} for alpha in ALPHAS]
    found = live(root, trainers, storage, loaders)
    batches, ways = Batches(FANOUTS, BATCH, epochs=2, seed=5), Ways([policy], ALPHAS)
    analysis = analyze(salientpp.load(root), batches, ways, ranks=trainers, storage_hosts=storage)
    for place, volume in enumerate(analysis.of(way="cache", policy=policy)):
        assert rows_of(volume) == [of_rank[place][None] for of_rank in found], (place, volume)
    assert analysis.storage_hosts == storage and analysis.ranks_by_host == (1,) * trainers


def test_the_count_of_lookahead_equals_a_live_job(root: Path) -> None:
    plain = {"num_neighbors": FANOUTS, "batch_size": BATCH, "input_nodes": "train", "lookahead": 2}
    factors = [0.9, 1.5]
    found = live(root, 2, 1, [plain | {"replication_factor": alpha} for alpha in factors])
    batches, ways = Batches(FANOUTS, BATCH, epochs=2, seed=5), Ways(["vip"], factors, lookahead=2)
    analysis = analyze(salientpp.load(root), batches, ways, ranks=2, storage_hosts=1)
    for place, volume in enumerate(analysis.of(way="lookahead")):
        assert rows_of(volume) == [of_rank[place][None] for of_rank in found], (place, volume)


def test_the_count_of_each_type_equals_a_live_job(tmp_path: Path) -> None:
    salientpp.partition(random_hetero(), 2, tmp_path / "typed", [4, 3], BATCH, seeds=("paper", "all"))
    plain = {"num_neighbors": [4, 3], "batch_size": BATCH, "input_nodes": "paper", "policy": "vip"}
    found = live(tmp_path / "typed", 2, 1, [plain | {"replication_factor": 0.2}])
    batches = Batches(
        {type_: [4, 3] for type_ in salientpp.load(tmp_path / "typed").edge_types}, BATCH, epochs=2, seed=5
    )
    analysis = analyze(salientpp.load(tmp_path / "typed"), batches, Ways(["vip"], [0.2]), storage_hosts=1)
    for volume in analysis.of(way="cache", policy="vip"):
        assert rows_of(volume) == [of_rank[0][volume.vertex_type] for of_rank in found], volume


def test_a_rank_without_rows_and_without_a_cache_fetches_its_batches(root: Path) -> None:
    """Every row of a batch is then a remote row, and the number of storage hosts does not matter."""
    part, batches, ways = salientpp.load(root), Batches(epochs=1), Ways(["vip"], [0.0, 0.5])
    one, two = (analyze(part, batches, ways, storage_hosts=number) for number in (1, 2))
    assert one.results == two.results
    together = analyze(part, batches, ways)
    inside = analyze(part, batches, ways, ranks=1, storage_hosts=1)
    assert together.results[0].rows_without_cache < one.results[0].rows_without_cache
    for stored in (one, inside):
        bare, cached = stored.of(way="cache")
        assert bare.rows == bare.rows_without_cache > cached.rows > 0
    # A cache holds α N / T rows.
    assert [each.cached_rows for each in one.of(way="cache")] == [0, PARTS * (part.num_vertices // (2 * PARTS))]
    assert [each.cached_rows for each in inside.of(way="cache")] == [0, part.num_vertices // 2]


def test_ranks_of_a_host_share_a_cache_of_its_size(root: Path) -> None:
    part, batches, ways = salientpp.load(root), Batches(epochs=1), Ways(["vip"], [0.0, 0.4])
    analysis = analyze(part, batches, ways, ranks_per_host=2, storage_hosts=2)
    bare, shared = analysis.of(way="cache")
    _, private = analysis.of(way="private cache")
    size = part.num_vertices
    assert shared.cached_rows == 2 * int(0.4 * size / 2) and private.cached_rows == PARTS * int(0.4 * size / PARTS)
    assert bare.rows > private.rows > shared.rows


def test_a_graph_in_memory_has_the_same_counts_as_its_directory(root: Path) -> None:
    batches, ways = Batches(FANOUTS, BATCH, epochs=1), Ways(["vip", "degree"], ALPHAS)
    stored = analyze(salientpp.load(root), batches, ways, storage_hosts=2)
    memory = analyze(random_data(), batches, ways, parts=PARTS, storage_hosts=2)
    assert stored.results == memory.results


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--storage-hosts", "3", "--parts-per-rank", "4"], ""),
        (["--storage-hosts", "5"], "storage_ranks=5 does not fit 4 parts"),
        (["--storage-hosts", "-1"], "storage_hosts must be an integer from 0 to 1,024, got -1"),
        (["--storage-hosts", "1", "--partial-aggregation"], "partial_aggregation does not work with storage hosts"),
    ],
)
def test_the_command_refuses_impossible_storage(
    root: Path, capsys: pytest.CaptureFixture[str], given: list[str], text: str
) -> None:
    code = main(["analyze", str(root), "--epochs", "1", "--policies", "vip", "--replication-factors", "0", *given])
    assert (code == 0) == (not text)
    assert text in " ".join(capsys.readouterr().err.split())


def test_the_command_says_who_fetches_and_who_sends(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--storage-hosts", "2", "--replication-factors", "0,.3", "--epochs", "2", "--json", str(tmp_path / "a")]
    assert main(["analyze", str(root), *given]) == 0
    shown, figures = " ".join(capsys.readouterr().out.split()), json.loads((tmp_path / "a").read_text())
    assert figures["storage_hosts"] == 2 and figures["ranks_by_host"] == [1] * PARTS and figures["device_rows"] == []
    bare = figures["results"][0]["rows_without_cache"]
    batch = bare / PARTS / figures["steps_per_epoch"]
    assert f"The 4 ranks that train hold no rows. A batch fetches {batch:,.0f} rows" in shown
    assert "4 ranks (1 a host, 4 training hosts) on 4 parts" in shown
    assert "cache of α N / training hosts rows per training host" in shown
    assert "--storage-hosts 2" in shown.partition("salientpp plan")[2]


def test_a_replication_factor_counts_per_host_that_trains() -> None:
    assert Placement(0, 4, 2).num_caches == 2
    assert Placement(0, 4, 4, ranks_by_host=(2, 2)).num_caches == 2
    assert Placement(0, 6, 2, num_storage_ranks=2).num_caches == 4
    assert Placement(0, 6, 2, ranks_by_host=(2, 2, 1, 1), num_storage_ranks=2).num_caches == 2
