"""Laws of owner maps: places get about equal rows and edges of drawn batches, few edges are cut, and the map is a function of its arguments."""

from __future__ import annotations

import itertools

import distributed
import pytest
import torch
from graphs import random_data, real_data
from rare import some_of
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

from salientpp import Graph, NeighborSampler
from salientpp.engine.drawing.owners import (
    TOLERANCE,
    Expected,
    make_owners,
    owners_by_rows,
    owners_by_vip,
    served_places,
    shared_owners,
)
from salientpp.partitioning.assign import assign_parts
from salientpp.ranks.comm import Comm
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ranks.placement import Placement
from salientpp.sampling.divided_batch import shares_of

FANOUTS, BATCH_SIZE = [10, 5], 128


class Job:
    """A graph in parts, numbered part by part, and host 0 of those that train on it."""

    def __init__(self, data: Data, num_hosts: int, places: int) -> None:
        plain, parts = Graph.from_data(data), num_hosts * places
        part = assign_parts(plain, parts).assignment
        number = part.argsort(stable=True).argsort()
        self.graph = Graph.from_edge_index(number[data.edge_index], plain.num_vertices)
        self.book = PartitionBook(torch.cat([torch.zeros(1).long(), part.bincount(minlength=parts).cumsum(0)]))
        self.placement = Placement(0, parts, parts, 0, (places,) * num_hosts)
        self.places = places
        end = self.book.range_of(places - 1)[1]
        self.seeds = torch.arange(0, end, 3)
        self.expected = Expected.of(self.graph, self.seeds, FANOUTS, BATCH_SIZE)

    def owners(self, split_by: str, seed: int = 0) -> Tensor:
        return make_owners(split_by, self.graph, self.book, self.placement, self.expected, seed)

    def drawn(self, owners: Tensor, batches: int = 12) -> tuple[Tensor, Tensor, float]:
        """Rows and edges of each place over some batches, and rows of the halo per row of the batch."""
        sampler, generator = NeighborSampler(self.graph, FANOUTS), torch.Generator().manual_seed(0)
        rows, edges, halo = torch.zeros(self.places), torch.zeros(self.places), 0
        for key in range(batches):
            seeds = self.seeds[torch.randperm(self.seeds.numel(), generator=generator)[:BATCH_SIZE]]
            mfg = sampler.sample_from_nodes(NodeSamplerInput(None, seeds), key=key)
            for place, share in enumerate(shares_of(mfg, owners[mfg.node], self.places)):
                rows[place] += share.share.num_own
                edges[place] += share.row.numel()
                halo += sum(share.share.recv_counts)
        return rows, edges, halo / float(rows.sum())


def small_data() -> Data:
    return random_data(4000, 16_000, seed=5)


SOME = [("facebook_pages", 1, 2), ("facebook_pages", 2, 4), ("tolokers", 2, 2)]
EVERY = [*itertools.product(("facebook_pages", "tolokers"), (1, 2), (2, 4))]


@pytest.mark.parametrize(("name", "num_hosts", "places"), some_of(SOME, EVERY))
def test_places_share_rows_and_edges_of_drawn_batches_and_few_edges_are_cut(name, num_hosts, places):
    job = Job(real_data(name), num_hosts, places)
    shuffled = torch.randint(places, (job.graph.num_vertices,), generator=torch.Generator().manual_seed(1))
    _, _, most = job.drawn(shuffled)
    for split_by, most_excess in (("vip", 0.15), ("rows", 0.3)):
        rows, edges, halo = job.drawn(job.owners(split_by).long())
        for drawn in (rows, edges):
            assert float(drawn.max() / drawn.mean()) < 1.0 + most_excess, (split_by, rows, edges)
        assert halo < 0.5 * most, (split_by, halo, most)


def test_owners_by_vip_cut_less_than_a_partition_that_balances_in_degrees_first():
    job = Job(real_data("facebook_pages"), 2, 2)
    _, _, halo = job.drawn(job.owners("vip").long())
    loads = {"rows": job.expected.rows, "edges": job.expected.edges}
    plain = assign_parts(job.graph, 2, loads={name: (2**20 * load).long() for name, load in loads.items()}).assignment
    assert halo < job.drawn(plain)[2]


@pytest.mark.parametrize("places", [2, 3, 4])
def test_expected_rows_and_edges_keep_their_limits(places):
    job = Job(small_data(), 2, places)
    owners = owners_by_vip(job.graph, places, job.expected)
    for load in (job.expected.rows, job.expected.edges):
        of_places = torch.zeros(places, dtype=torch.float64).index_add_(0, owners, load)
        assert float(of_places.max() / of_places.mean()) < 1.0 + TOLERANCE + 1e-6
    served = served_places(job.book, job.placement)
    owners = owners_by_rows(job.graph, served, places, job.expected)
    load = job.expected.load
    of_places = torch.zeros(places, dtype=torch.float64).index_add_(0, owners, load)
    fixed = torch.zeros(places, dtype=torch.float64).index_add_(0, owners[served >= 0], load[served >= 0])
    limit = torch.maximum(fixed, (1.0 + TOLERANCE) * load.sum() / places + 1e-9)
    assert bool((of_places <= limit).all()), (of_places, limit)


def test_expected_rows_and_edges_follow_drawn_batches():
    job = Job(small_data(), 1, 2)
    rows, edges, _ = job.drawn(torch.zeros(job.graph.num_vertices).long(), 20)
    assert float(job.expected.rows.sum()) == pytest.approx(float(rows.sum()) / 20, rel=0.1)
    assert float(job.expected.edges.sum()) == pytest.approx(float(edges.sum()) / 20, rel=0.1)


@pytest.mark.parametrize("split_by", ["vip", "rows"])
def test_owner_maps_are_repeatable_by_seed(split_by):
    first, again = (Job(small_data(), 2, 3).owners(split_by, seed=7) for _ in range(2))
    assert first.dtype == torch.int8 and torch.equal(first, again)
    assert set(first.tolist()) == {0, 1, 2}


def test_a_vertex_belongs_to_the_only_rank_of_the_host_that_serves_it():
    job = Job(small_data(), 2, 2)
    owners = job.owners("rows").long()
    end = job.book.range_of(1)[1]
    assert torch.equal(owners[:end], job.book.owner(torch.arange(end)))
    assert set(owners[end:].tolist()) == {0, 1}
    second = Placement(2, 4, 4, 0, (2, 2))
    assert torch.equal(served_places(job.book, second)[end:], job.book.owner(torch.arange(end, 4000)) - 2)
    assert bool((served_places(job.book, second)[:end] == -1).all())


def test_vertices_of_other_hosts_go_where_their_edges_lead():
    """Parts 0 and 1 are of this host. Of part 2, vertices 4 to 6 hang on vertex 0, and vertices 7 to 9 on vertex 3."""
    source, target = torch.tensor([1, 2, 4, 5, 6, 7, 8, 9]), torch.tensor([0, 3, 0, 0, 0, 3, 3, 3])
    graph = Graph.from_edge_index(torch.stack([source, target]), 10)
    expected = Expected.of(graph, torch.tensor([0, 3]), [-1], 2)
    served = torch.tensor([0, 0, 1, 1, *[-1] * 6])
    assert owners_by_rows(graph, served, 2, expected).tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]


def test_a_host_without_outside_vertices_owns_the_vertices_by_rows():
    job = Job(small_data(), 1, 4)
    assert torch.equal(job.owners("rows").long(), job.book.owner(torch.arange(4000)))


def test_ranks_that_share_a_part_divide_its_vertices_by_vip():
    job = Job(small_data(), 1, 2)
    book, shared = PartitionBook.trivial(4000), Placement(0, 2, 1, 0, (2,))
    assert bool((served_places(book, shared) == -1).all())
    by_rows, by_vip = (make_owners(split_by, job.graph, book, shared, job.expected) for split_by in ("rows", "vip"))
    assert torch.equal(by_rows, by_vip) and set(by_rows.tolist()) == {0, 1}


@pytest.mark.parametrize("split_by", ["vip", "rows"])
def test_one_rank_of_a_host_owns_everything(split_by):
    assert not bool(Job(small_data(), 2, 1).owners(split_by).any())


def test_there_may_be_more_ranks_than_vertices_and_batches_without_edges():
    graph = Graph.from_edge_index(torch.empty(2, 0).long(), 3)
    expected = Expected.of(graph, torch.tensor([0]), [2], 1)
    assert owners_by_vip(graph, 5, expected).tolist() == [0, 1, 2]
    assert sorted(owners_by_vip(graph, 2, expected).unique().tolist()) == [0, 1]
    assert owners_by_rows(graph, torch.tensor([0, -1, -1]), 2, expected)[0] == 0
    many = make_owners("vip", graph, PartitionBook.trivial(3), Placement(0, 200, 1, 0, (200,)), expected)
    assert many.dtype == torch.int16
    nothing = Expected.of(graph, torch.empty(0).long(), [2], 1)
    assert set(owners_by_vip(graph, 2, nothing).tolist()) <= {0, 1}


def _share_owners(rank: int, fails: bool) -> list[int]:
    def make() -> Tensor:
        assert rank == 0, "only the first rank makes the map"
        if fails:
            raise MemoryError("no memory for METIS")
        return torch.tensor([1, 0, 1], dtype=torch.int8)

    return shared_owners(Comm.create(), 3, make).tolist()


def test_the_first_rank_makes_the_map_for_all():
    assert distributed.run(_share_owners, 3, False) == [[1, 0, 1]] * 3


def test_a_map_that_cannot_be_made_is_an_error_on_all_ranks():
    first, second = distributed.run(_share_owners, 2, True, may_fail=True)
    assert first.kind == "MemoryError"
    assert second.kind == "ValueError"
    assert (
        "rank 0 could not divide the vertices among the ranks of its host: MemoryError: no memory for METIS"
        in second.text
    )
