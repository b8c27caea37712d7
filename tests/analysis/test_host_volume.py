"""Laws of counting for hosts with several ranks: it is what sets and loops count, and with one rank per host what `analyze` counts."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import torch
from graphs import random_data

import salientpp
from salientpp.analysis.host_volume import analyze_hosts, placed
from salientpp.analysis.volume import analyze
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
    """Rows of one epoch by rank, with sets and loops. Parts of a rank and ranks of a host follow one another."""
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
    counts = {"private": [0] * ranks, "shared": [0] * ranks, "once": [0] * ranks}
    for index in range(len(batches[0])):
        for h, host in enumerate(hosts):
            wanted = set()
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
                wanted |= outside - shared[h]
            asked = Counter(v % len(host) for v in wanted)
            for place, rank in enumerate(host):
                counts["once"][rank] += asked[place]
    return counts


@pytest.mark.parametrize(("ranks", "per_host"), [(4, 2), (8, 4), (8, 2), (4, 1), (2, 1), (3, 1), (4, 4)])
def test_what_is_counted_is_what_sets_and_loops_count(root, ranks, per_host):
    analysis = analyze_hosts(
        salientpp.load(root), ranks=ranks, ranks_per_host=per_host, replication_factors=ALPHAS, epochs=1, seed=3
    )
    for result in analysis.results:
        expected = _reference(root, ranks, per_host, result.replication_factor, 3)
        assert result.private_rows == sum(expected["private"])
        assert list(result.shared_by_rank) == expected["shared"] and result.shared_rows == sum(expected["shared"])
        assert list(result.fetched_once_by_rank) == expected["once"]
        assert result.fetched_once_rows == sum(result.by_host(analysis.ranks_by_host)) == sum(expected["once"])


@pytest.mark.parametrize("per_part", [1, 2])
def test_hosts_with_one_rank_are_counted_as_machines_are(root, per_part):
    part = salientpp.load(root)
    if per_part == 1:
        machines = analyze(part, replication_factors=ALPHAS, policies=["vip"], epochs=2, seed=1)
        hosts = analyze_hosts(part, replication_factors=ALPHAS, epochs=2, seed=1)
        for one, other in zip(machines.results, hosts.results, strict=True):
            assert one.remote_rows_per_epoch == other.private_rows == other.shared_rows == other.fetched_once_rows
            assert one.remote_rows_per_part == other.shared_by_rank == other.fetched_once_by_rank
            assert one.cache_bytes == other.cache_bytes
    else:
        hosts = analyze_hosts(part, ranks=8, replication_factors=ALPHAS, epochs=1, seed=1)
        assert all(result.shared_by_rank == result.fetched_once_by_rank for result in hosts.results)


def test_an_object_in_memory_is_counted_as_its_directory(root, tmp_path):
    data = random_data(240, 1500)
    assignment = torch.arange(240) * 7 % 4
    salientpp.partition(data, 4, tmp_path / "d", FANOUTS, BATCH, method=assignment)
    options = dict(ranks=2, ranks_per_host=1, replication_factors=ALPHAS, epochs=1)
    stored = analyze_hosts(salientpp.load(tmp_path / "d"), **options)
    memory = analyze_hosts(data, 4, method=assignment, fanouts=FANOUTS, batch_size=BATCH, **options)
    assert stored.results == memory.results and stored.parts_by_rank == memory.parts_by_rank == (2, 2)


def test_forecasts_are_those_of_the_probabilities(root):
    part = salientpp.load(root)
    counted = analyze_hosts(part, ranks=4, ranks_per_host=2, replication_factors=ALPHAS, epochs=6)
    forecast = analyze_hosts(part, ranks=4, ranks_per_host=2, replication_factors=ALPHAS, predict_only=True)
    for one, other in zip(counted.results, forecast.results, strict=True):
        assert other.private_rows is None and other.shared_by_rank is None
        assert other.rows == (one.predicted_private_rows, one.predicted_shared_rows, one.predicted_fetched_once_rows)
        # Exact at one hop; from two on the formula assumes independence.
        assert other.predicted_fetched_once_rows == pytest.approx(one.fetched_once_rows, rel=0.15)
        assert other.predicted_shared_rows == pytest.approx(one.shared_rows, rel=0.15)
        assert one.fetched_once_rows <= one.shared_rows <= one.private_rows


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ranks": 4, "ranks_per_host": 3}, "ranks_per_host must be >= 1 and divide the 4 ranks, got 3"),
        (
            {"ranks": 4, "ranks_per_host": [1, 2]},
            r"ranks_by_host must be numbers >= 1 that add up to the 4 ranks, got \[1, 2\]",
        ),
        ({"ranks": 5}, "world size 5 does not fit 4 parts"),
        ({"epochs": 0}, "epochs must be >= 1, got 0"),
    ],
)
def test_wrong_numbers_are_refused_in_words(root, options, text):
    with pytest.raises(ValueError, match=text):
        analyze_hosts(salientpp.load(root), **options)


def test_every_ranks_placement_is_given():
    assert [(each.host, list(each.slots)) for each in placed(4, 2, [2, 2])] == [(0, [0]), (0, [1]), (1, [2]), (1, [3])]


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_counts_hosts(root, tmp_path, capsys):
    files = [tmp_path / "a.json", tmp_path / "a.csv"]
    given = ["--ranks-per-host", "2", "--replication-factors", "0,.2", "--epochs", "2"]
    assert main(["analyze", str(root), *given, "--json", str(files[0]), "--csv", str(files[1])]) == 0
    shown = capsys.readouterr().out
    figures = json.loads(files[0].read_text())
    assert figures["ranks_by_host"] == [2, 2] and figures["parts"] == 4 and figures["schema"] == 1
    expected = analyze_hosts(salientpp.load(root), ranks_per_host=2, replication_factors=[0, 0.2], epochs=2)
    for result, stored in zip(expected.results, figures["results"], strict=True):
        assert stored["fetched_once_rows"] == result.fetched_once_rows
        assert stored["fetched_once_by_host"] == result.by_host([2, 2])
    assert files[1].read_text().count("\n") == 3
    for words in ("private caches", "one per host", "fetched once", "host 1", "cache per host"):
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
        (["--ranks-per-part", "2", "--parts-per-rank", "2"], "either several ranks share a part or a rank has several"),
        (["--ranks-per-host", "2", "--disjoint"], "--ranks-per-host: counted for plain draws .*leave out --disjoint"),
        (["--ranks-per-host", "2", "--policies", "degree"], "counted for --policies vip alone, got degree"),
        (["--ranks-per-host", "2", "--plot", "a.png"], "there is no --plot of this"),
        (["--ranks-per-host", "2", "--fanouts", "2", "--fanouts", "3"], "--fanouts must be given once, got 2 lists"),
        (["--ranks-per-host", "3"], "ranks_per_host must be >= 1 and divide the 4 ranks, got 3"),
    ],
)
def test_the_command_refuses_what_it_cannot_count(root, capsys, monkeypatch, tmp_path, given, text):
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", str(root), *given]) != 0
    assert re.search(text, " ".join(capsys.readouterr().err.split()))


@pytest.mark.parametrize("ranks", [1025, 2**63, 10**100])
def test_more_ranks_than_can_be_counted_are_refused(ranks):
    with pytest.raises(ValueError, match="at most 1,024 ranks, got"):
        placed(ranks, 1, 1)
