"""Laws of printed objects: a loader, its cache, sampler, statistics and plan say what they are, at any time, without work and without messages."""

from __future__ import annotations

import dataclasses
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data
from torch_geometric.data import Data

import salientpp
from salientpp import LoaderStats, NeighborLoader
from salientpp.display import Table, html
from salientpp.loader.node_loader import BatchLoader

STATS = LoaderStats(
    batches=2, rows_device=0, rows_host=60, rows_cache=30, rows_remote=10, bytes_sent=1500, bytes_received=250, control_messages=2, row_messages=2,
    seconds_by_stage={"sample": 0.03, "read_counts": 0.0, "assemble": 0.01}, seconds_waiting=0.25, row_bytes={None: 12},
    by_type={None: {"device": 0, "host": 60, "cache": 30, "remote": 10, "bytes_received": 120}},
)  # fmt: skip

TABLES = """\
LoaderStats: 2 batches, 100 rows, 1.5 kB sent, 250 B received, 0.250 s waiting in next()
rows from  rows      %  bytes
host         60  60.0%  720 B
cache        30  30.0%  360 B
remote       10  10.0%  120 B
stage     seconds      %
sample      0.030  75.0%
assemble    0.010  25.0%"""


def test_statistics_are_tables_of_rows_and_stages():
    assert repr(STATS) == str(STATS) == TABLES
    of_paper = dataclasses.replace(
        STATS, by_type={"paper": STATS.by_type[None]}, row_bytes={"paper": 12}, padded_batches=2, padding_overflows=1
    )
    assert "paper remote    10  10.0%  120 B" in repr(of_paper)
    assert repr(of_paper).endswith("2 padded batches, 1 of them larger than planned")
    assert "<tr><td>cache</td><td>30</td><td>30.0%</td><td>360 B</td></tr>" in STATS._repr_html_()
    loader = NeighborLoader(random_data(), [2], batch_size=16)
    assert repr(loader.stats()) == "LoaderStats: 0 batches, 0 rows, 0 B sent, 0 B received, 0.000 s waiting in next()"


def in_notebook(shown: Any) -> str:
    return shown._repr_html_()


def test_html_is_escaped():
    assert html("a < b", Table(["<x>"], [["&"]], title="<t>")) == (
        "<p>a &lt; b</p><table><caption>&lt;t&gt;</caption><tr><th>&lt;x&gt;</th></tr><tr><td>&amp;</td></tr></table>"
    )


def test_a_loader_shows_itself_at_any_time(monkeypatch):
    data, seen = random_data(60, 240), []
    loader = NeighborLoader(data, [3, 2], batch_size=16, sampler=torch.utils.data.SequentialSampler(range(60)))
    assert repr(loader) == "NeighborLoader(batches of a sampler of 16, num_neighbors [3, 2])"
    sampler = salientpp.PPRSampler(data, 3)
    loader = NeighborLoader(data, [3], batch_size=16, neighbor_sampler=sampler)
    assert repr(loader) == "NeighborLoader(4 batches of 16, neighbor_sampler PPRSampler)"
    make = BatchLoader._make_engine
    monkeypatch.setattr(
        BatchLoader, "_make_engine", lambda self, *args: (seen.append(repr(self)), make(self, *args))[1]
    )
    NeighborLoader(data, [3])
    assert seen == ["NeighborLoader()"]


def test_a_sampler_shows_what_differs_from_the_defaults():
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    assert repr(salientpp.NeighborSampler(data, [2], "induced", replace=True)) == (
        "NeighborSampler(num_neighbors=[2], subgraph_type='induced', replace=True, graph=Graph(num_vertices=2, num_edges=2, indices=torch.int32))"
    )


def check_two_ranks(rank: int, root: str) -> None:
    part = salientpp.load(root)
    number = len(part.split("all")) // 4 + (len(part.split("all")) % 4 > 0)
    first = f"{number} batches of 4, part {rank} of 2, num_neighbors [3, 2]"
    loader = NeighborLoader(part, [3, 2], "all", batch_size=4, seed=0, replication_factor=0.5, policy="random")
    # 15 rows of 3 numbers, and two words of 8 bytes that say which rows they are.
    assert repr(loader) == f"NeighborLoader({first}, cache 15 rows (196 B))"
    assert repr(loader.cache) == "FeatureCache(15 rows (196 B), x=[15, 3])"
    sharing = NeighborLoader(part, [3, 2], "all", batch_size=4, seed=0, cache=loader.cache)
    assert repr(sharing) == f"NeighborLoader({first}, given cache 15 rows (196 B))"
    planned = NeighborLoader(part, [3, 2], "all", batch_size=4, seed=0, memory="1MB")
    assert repr(planned).startswith(f"NeighborLoader({first}, ") and repr(planned).endswith(
        f"plan: {planned.plan().chosen.choice.words})"
    )
    words = planned.plan().chosen.choice.words
    for name, value in (
        ("batches", f"{number} of 4"),
        ("part", f"{rank} of 2"),
        ("num_neighbors", "[3, 2]"),
        ("plan", words),
    ):
        assert f"<tr><td>{name}</td><td>{value}</td></tr>" in in_notebook(planned)
    assert "<tr><td>cache</td><td>15 rows (196 B)</td></tr>" in in_notebook(loader)
    assert "<th>ways</th><th>seconds</th>" in in_notebook(planned)
    assert repr(planned.plan()) == str(planned.plan())
    if rank == 0:  # one rank alone may print
        batches = iter(loader)
        next(batches)
        assert "1 batches" in repr(loader.stats()) and first in repr(loader)
    else:
        next(iter(loader))
    loader.reset_stats()


def test_ranks_show_their_part_cache_and_plan(tmp_path):
    salientpp.partition(random_data(60, 240), 2, tmp_path / "d", [3, 2], 4)
    distributed.run(check_two_ranks, 2, str(tmp_path / "d"))


def check_parts(rank: int, root: str, several: dict[int, str]) -> None:
    part = salientpp.load(root)
    loader = NeighborLoader(part, [3, 2], "all", batch_size=100)
    assert f"batches of 100, {several[rank]}, num_neighbors" in repr(loader), repr(loader)
    name, _, value = several[rank].partition(" ")
    if name != "all":
        assert f"<tr><td>{name}</td><td>{value}</td></tr>" in in_notebook(loader)


@pytest.mark.parametrize(
    ("num_parts", "several"),
    [
        (2, {0: "all 2 parts"}),
        (1, {0: "part 0 of 1"}),
        (4, {0: "parts 0 to 1 of 4", 1: "parts 2 to 3 of 4"}),
        (3, {0: "part 0 of 3", 1: "parts 1 to 2 of 3"}),
        (1, {0: "part 0 of 1", 1: "part 0 of 1"}),
    ],
)
def test_a_loader_shows_all_parts_of_its_rank(num_parts, several, tmp_path):
    salientpp.partition(random_data(60, 240), num_parts, tmp_path / "d", [3, 2], 4)
    if len(several) == 1:
        check_parts(0, str(tmp_path / "d"), several)
    else:
        distributed.run(check_parts, len(several), str(tmp_path / "d"), several)


def test_ranks_of_a_host_show_the_parts_whose_seeds_they_visit(tmp_path):
    salientpp.partition(random_data(60, 240), 2, tmp_path / "d", [3, 2], 4)
    distributed.run(check_parts_of_host, 2, str(tmp_path / "d"))


def check_parts_of_host(rank: int, root: str) -> None:
    loader = NeighborLoader(salientpp.load(root), [3, 2], "all", batch_size=100, ranks_per_host=2)
    assert f"part {rank} of 2" in repr(loader)
