"""Laws of counting for hosts with several ranks: counts equal a slow reference, and with one rank per host they equal `analyze`."""

from __future__ import annotations

import json
import re

import pytest
import torch
from graphs import random_data

import salientpp
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.analysis.job import placed
from salientpp.cli import main
from salientpp.ops import permutation, sample_neighbors
from salientpp.sampling.schedule import batch_key, order_key
from salientpp.vip.inclusion import inclusion_probability
from salientpp.vip.policies import add_scores

FANOUTS, BATCH = [4, 3], 8
ALPHAS = [0.0, 0.2, 0.7]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("hosts") / "parts"
    salientpp.partition(random_data(240, 1500), 4, root, FANOUTS, BATCH)
    return root


def _reference(root, ranks: int, per_host: int, alpha: float, seed: int) -> dict[str, list[int]]:
    """Counts the rows of one epoch by rank, with sets and loops. Parts of a rank and ranks of a host are consecutive."""
    whole = salientpp.load(root)
    graph, size, parts = whole.graph, whole.num_vertices, whole.num_parts
    serves = [
        range(rank * parts // ranks, (rank + 1) * parts // ranks) if ranks <= parts else [rank * parts // ranks]
        for rank in range(ranks)
    ]
    hosts = [range(first, first + per_host) for first in range(0, ranks, per_host)]
    held = [sorted({part for rank in host for part in serves[rank]}) for host in hosts]
    inside = [range(whole.book.range_of(own[0])[0], whole.book.range_of(own[-1])[1]) for own in held]
    seeds = [torch.cat([whole.split("train", part) for part in own]) for own in serves]
    probability = [inclusion_probability(graph, own, FANOUTS, BATCH) for own in seeds]

    def hottest(scores, but, number):
        ids = sorted((v for v in range(size) if v not in but and scores[v] > 0), key=lambda v: (-scores[v], v))
        return set(ids[:number])

    shared = {}
    for h, host in enumerate(hosts):
        pool = torch.zeros(size, dtype=torch.float64)
        for rank in host:
            add_scores("vip", pool, probability[rank])
        shared[h] = hottest(pool.tolist(), set(inside[h]), int(alpha * size / len(set(map(tuple, held))) + 1e-9))
    groups = sorted(set(map(tuple, serves)))
    batches = []
    for rank in range(ranks):
        sharing = [other for other in range(ranks) if tuple(serves[other]) == tuple(serves[rank])]
        order = permutation(seeds[rank].numel(), order_key(seed, 0, groups.index(tuple(serves[rank]))))
        batches.append(order[sharing.index(rank) :: len(sharing)])
    most = max(own.numel() for own in batches)
    batches = [own[torch.arange(most) % own.numel()].split(BATCH) for own in batches]
    counts = {"private": [0] * ranks, "shared": [0] * ranks}
    for index in range(len(batches[0])):
        for h, host in enumerate(hosts):
            for rank in host:
                n_id = set(
                    sample_neighbors(
                        graph.indptr, graph.indices, None, seeds[rank][batches[rank][index]], FANOUTS, batch_key(seed, 0, rank, index)
                    )[0].tolist()
                )  # fmt: skip
                outside = n_id - set(inside[h])
                own = range(whole.book.range_of(serves[rank][0])[0], whole.book.range_of(serves[rank][-1])[1])
                private = hottest(probability[rank].tolist(), set(own), int(alpha * size / len(groups) + 1e-9))
                counts["private"][rank] += len(outside - private)
                counts["shared"][rank] += len(outside - shared[h])
    return counts


@pytest.mark.parametrize(("ranks", "per_host"), [(4, 2), (8, 4), (8, 2), (4, 1), (2, 1), (3, 1), (4, 4)])
def test_counts_equal_a_reference_of_sets_and_loops(root, ranks, per_host):
    analysis = analyze(
        salientpp.load(root), Batches(epochs=1, seed=3), Ways(["vip"], ALPHAS), ranks=ranks, ranks_per_host=per_host
    )
    for alpha in ALPHAS:
        expected = _reference(root, ranks, per_host, alpha, 3)
        (shared,) = analysis.of(way="cache", replication_factor=alpha)
        assert list(shared.remote_rows_per_rank) == expected["shared"]
        assert shared.remote_rows_per_epoch == sum(analysis.by_host(shared)) == sum(expected["shared"])
        for private in analysis.of(way="private cache", replication_factor=alpha):
            assert list(private.remote_rows_per_rank) == expected["private"]
        assert bool(analysis.of(way="private cache")) == (per_host > 1)


def test_every_policy_and_kind_of_draw_is_counted_for_hosts(root):
    batches = Batches(epochs=1, disjoint=True)
    analysis = analyze(salientpp.load(root), batches, Ways(["degree", "oracle"], ALPHAS), ranks_per_host=2)
    for way in ("cache", "private cache"):
        rows = {
            policy: [volume.remote_rows_per_epoch for volume in analysis.of(way=way, policy=policy)]
            for policy in ("vip", "degree", "oracle", "oracle-heldout")
        }
        assert all(best <= own for own_rows in rows.values() for best, own in zip(rows["oracle"], own_rows))
        assert len({own[0] for own in rows.values()}) == 1 and all(own[0] > own[1] > own[2] for own in rows.values())


def test_a_graph_in_memory_has_the_same_counts_as_its_directory(root, tmp_path):
    data = random_data(240, 1500)
    assignment = torch.arange(240) * 7 % 4
    salientpp.partition(data, 4, tmp_path / "d", FANOUTS, BATCH, method=assignment)
    batches, ways = Batches(FANOUTS, BATCH, epochs=1), Ways(["vip"], ALPHAS)
    stored = analyze(salientpp.load(tmp_path / "d"), batches, ways, ranks=2)
    memory = analyze(data, batches, ways, parts=4, method=assignment, ranks=2)
    assert stored.results == memory.results and stored.parts_by_rank == memory.parts_by_rank == (2, 2)


def test_forecasts_are_sums_of_probabilities(root):
    part, ways, hosts = salientpp.load(root), Ways(["vip"], ALPHAS), {"ranks": 4, "ranks_per_host": 2}
    counted = analyze(part, Batches(epochs=6), ways, **hosts)
    forecast = analyze(part, Batches(epochs=6), ways, predict_only=True, **hosts)
    for one, other in zip(counted.results, forecast.results, strict=True):
        assert other.remote_rows_per_epoch is None and other.remote_rows_per_rank is None
        assert other.rows == other.predicted_rows_per_epoch == one.predicted_rows_per_epoch
        # Exact at one hop; from two hops on, the formula assumes independence.
        assert other.rows == pytest.approx(one.rows, rel=0.15)
    for alpha in ALPHAS:
        shared, private = counted.of(replication_factor=alpha)
        assert shared.rows <= private.rows


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ranks": 4, "ranks_per_host": 3}, "ranks_per_host must be >= 1 and divide the 4 ranks, got 3"),
        (
            {"ranks": 4, "ranks_per_host": [1, 2]},
            r"ranks_by_host must be numbers >= 1 that add up to the 4 ranks, got \[1, 2\]",
        ),
        ({"ranks": 5}, "world size 5 does not fit 4 parts"),
    ],
)
def test_wrong_numbers_are_refused(root, options, text):
    with pytest.raises(ValueError, match=text):
        analyze(salientpp.load(root), **options)


def test_every_rank_has_a_placement():
    assert [(each.host, list(each.logical_ranks)) for each in placed(4, 2, [2, 2])] == [
        (0, [0]),
        (0, [1]),
        (1, [2]),
        (1, [3]),
    ]


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_counts_hosts(root, tmp_path, capsys):
    files = [tmp_path / "a.json", tmp_path / "a.csv"]
    given = ["--ranks-per-host", "2", "--replication-factors", "0,.2", "--epochs", "2"]
    assert main(["analyze", str(root), *given, "--json", str(files[0]), "--csv", str(files[1])]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    figures = json.loads(files[0].read_text())
    assert figures["ranks_by_host"] == [2, 2] and figures["parts"] == 4 and figures["schema"] == 3
    batches, ways = Batches(epochs=2), Ways(replication_factors=[0, 0.2])
    expected = analyze(salientpp.load(root), batches, ways, ranks_per_host=2)
    assert figures["results"] == json.loads(json.dumps(expected.to_dict()["results"]))
    assert files[1].read_text().count("\n") == 1 + len(expected.results)
    for words in ("4 ranks (2 a host, 2 hosts) on 4 parts", "vip, private caches", "host 1", "cache per host"):
        assert words in shown


def test_the_command_places_parts_on_ranks(root, capsys):
    for given, ranks in [
        (["--parts-per-rank", "3"], 2),
        (["--ranks-per-part", "2"], 8),
        (["--parts-per-rank", "4"], 1),
    ]:
        assert main(["analyze", str(root), *given, "--replication-factors", "0", "--predict-only"]) == 0
        assert f"by {ranks} ranks" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--ranks-per-host", "0"], "--ranks-per-host must be >= 1, got 0"),
        (
            ["--ranks-per-part", "2", "--parts-per-rank", "2"],
            "--ranks-per-part and --parts-per-rank exclude each other",
        ),
        (["--ranks-per-host", "3"], "ranks_per_host must be >= 1 and divide the 4 ranks, got 3"),
    ],
)
def test_the_command_refuses_impossible_counts(root, capsys, monkeypatch, tmp_path, given, text):
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", str(root), *given]) != 0
    assert re.search(text, " ".join(capsys.readouterr().err.split()))


@pytest.mark.parametrize("ranks", [1025, 2**63, 10**100])
def test_more_ranks_than_can_be_counted_are_refused(ranks):
    with pytest.raises(ValueError, match="at most 1,024 ranks, got"):
        placed(ranks, 1, 1)
