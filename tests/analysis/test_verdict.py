"""Laws of the verdict of an analysis: it has the figures of the tables, and it names a size that the loaders take."""

from __future__ import annotations

import math
import re
import warnings

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import ToUndirected

from salientpp import partition
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.analysis.report import shown
from salientpp.analysis.verdict import verdict
from salientpp.datasets import synthetic
from salientpp.display import format_bytes
from salientpp.engine.option import num_bytes

DATA = synthetic(num_vertices=1000, num_features=8, community_size=40)


def analyzed(data=DATA, alphas=(0, 0.1, 0.6, 0.8, 1.2), **options):
    """The analysis of the policies that a verdict names."""
    ways = Ways(["vip", "degree", "random"], alphas)
    return analyze(data, Batches([4, 3], 16, epochs=2), ways, parts=4, **options)


def test_the_verdict_names_the_smallest_cache_that_saves_half():
    analysis = analyzed()
    first, second, third = verdict(analysis)
    saved = {
        each.replication_factor: each for each in analysis.of(way="cache", policy="vip") if each.replication_factor
    }
    chosen = next(each for each in saved.values() if each.reduction >= 0.5)
    assert 0.1 < chosen.replication_factor < 1.2, "otherwise this test shows little"
    size = 1000 * chosen.replication_factor / 4 * 32
    others = {
        policy: analysis.of(way="cache", policy=policy, replication_factor=chosen.replication_factor)[0].reduction
        for policy in ("degree", "random")
    }
    share = 100 * chosen.replication_factor / 4
    # The index has 8 bytes for 32 vertices, and one for each of the 4 parts.
    advised = math.ceil((size + 8 * 32 + 4) / 100) / 10
    assert first == (
        f"A VIP cache of {size / 1000:.3g} kB per machine ({share:.3g}% of the features) saves {chosen.reduction:.0%} of the traffic; "
        f'degree saves {others["degree"]:.0%}, random saves {others["random"]:.0%}. Try memory="{advised}kB".'
    )
    rows = chosen.rows_without_cache
    words = f"Without a cache, 4 machines fetch {rows:,.0f} rows per epoch: {rows * 32 / 1000:.3g} kB"
    assert second.startswith(words) and third.startswith("1,000 vertices, 20,000 edges, edge cut ")


def test_the_advised_memory_holds_the_cache():
    for data in (DATA, synthetic(num_vertices=333, num_features=7, community_size=37)):
        for alphas in ((0, 0.013), (0.37,), (1.7,)):
            analysis = analyzed(data, alphas)
            advised = re.search('memory="(.*)"', verdict(analysis)[0])
            cached = analysis.of(way="cache", policy="vip")[-1].cache_bytes
            if advised:
                # A budget holds the index too: 8 bytes for 32 vertices, and one for each part.
                needed = cached + 8 * math.ceil(data.num_nodes / 32) + 4
                assert needed <= num_bytes("memory", advised[1]) <= 1.1 * needed


def test_the_verdict_counts_the_bytes_of_all_types_once(tmp_path):
    """The table gives the bytes of a cache for all types together."""
    data, draw = HeteroData(), torch.Generator().manual_seed(0)
    for type_, number in (("a", 300), ("b", 200)):
        data[type_].x = torch.randn(number, 4, generator=draw)
    for ends in (("a", "b"), ("b", "a")):
        sizes = [data[end].num_nodes for end in ends]
        edges = [torch.randint(size, (3000,), generator=draw) for size in sizes]
        data[ends[0], "to", ends[1]].edge_index = torch.stack(edges)
    data["a"].train_mask = torch.ones(300, dtype=torch.bool)
    part = partition(data, 2, tmp_path / "p", [4, 3], 16, seeds=("a", "train"), method="random", replicate=[])
    analysis = analyze(part, Batches([4, 3], 16, ("a", "train"), epochs=1), Ways(None, (0, 1)))
    cached = {each.cache_bytes for each in analysis.of(way="cache", policy="vip", replication_factor=1)}
    (size,) = cached
    assert f"A VIP cache of {format_bytes(size)} per " in verdict(analysis)[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"predict_only": True}, "is expected to save"),
        ({"alphas": (0, 0.001)}, "A cache hardly helps: a VIP cache of "),
        ({"data": Data(edge_index=DATA.edge_index, num_nodes=1000, train_mask=DATA.train_mask)}, "A VIP cache with α = "),
        ({"ranks": 4, "ranks_per_host": 2}, " per host ("),
        ({"alphas": (0,)}, "Without a cache, 4 machines fetch "),
        ({"ranks": 1}, "No cache is needed: no host fetches rows from another."),
    ],
)  # fmt: skip
def test_the_first_line_says_what_to_do(options, text):
    assert text in verdict(analyzed(**options))[0]


def test_details_are_shown_when_asked_for():
    analysis = analyzed()
    names = [
        [table.title for table in shown(analysis, details) if not isinstance(table, str)] for details in (False, True)
    ]
    assert [len(each) for each in names] == [1, 3] and names[0] == names[1][:1]
    assert shown(analysis, hint="More: --all")[-2] == "More: --all"
    assert "More" not in str([*shown(analysis), *shown(analysis, True, "More: --all")])


def test_seeds_without_neighbours_are_reported():
    """A star whose edges lead from the centre: the centre is a seed too, and has no in-neighbours."""
    leaves = torch.arange(1, 60)
    towards = Data(edge_index=torch.stack([leaves, torch.zeros_like(leaves)]), x=torch.ones(60, 4))
    towards.train_mask = torch.ones(60, dtype=torch.bool)
    with pytest.warns(UserWarning, match=r"59 of 60 seeds have no in-neighbours.* Did you mean an undirected graph\?"):
        analyzed(towards, (0, 0.1), method="random")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        analyzed(ToUndirected()(towards), (0, 0.1), method="random")
