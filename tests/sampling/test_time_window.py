"""Laws of time windows: a seed of time t sees the neighbours whose time is in [t - window, t]."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference
import torch
from graphs import random_hetero
from odd_samples import FANOUTS, random_data, same, some_seeds
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput
from typed_reference import as_lists, typed_reference

from salientpp import LinkNeighborLoader, NeighborLoader, NeighborSampler, ops
from salientpp.ops import join_key

WINDOWS = (0, 2, 5, 100)


def long(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def same_samples(a: Any, b: Any) -> bool:
    return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in vars(a))


def some_times(size: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(10, size=size))


# --- the slow reference -----------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"time_attr": "time"},
    {"time_attr": "time", "replace": True},
    {"time_attr": "time", "temporal_strategy": "last"},
    {"time_attr": "time", "subgraph_type": "induced"},
    {"time_attr": "time", "weight_attr": "weight"},
    {"time_attr": "time", "shared_draws": "batch"},
    {"time_attr": "edge_time"},
    {"time_attr": "edge_time", "replace": True, "weight_attr": "weight"},
    {"time_attr": "edge_time", "temporal_strategy": "last", "weight_attr": "weight"},
    {"time_attr": "edge_time", "temporal_strategy": "last", "replace": True},
    {"time_attr": "edge_time", "temporal_strategy": "last", "shared_draws": "batch"},
    {"time_attr": "edge_time", "sample_direction": "backward"},
]
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))


def by_reference(sampler: NeighborSampler, seeds: dict, key: int, now: dict, window: int) -> tuple:
    options = {
        "replace": sampler.replace,
        "disjoint": True,
        "last": sampler.temporal_strategy == "last",
        "induced": sampler.subgraph_type.value == "induced",
        "shared": sampler.shared_draws is not None,
    }
    return typed_reference(sampler.topology.graph, sampler.fanouts, seeds, key, now, window, **options)


def assert_is_the_references(sampler: NeighborSampler, seeds: dict, key: int, now: dict, window: int) -> int:
    """Compares a sample with the reference's, and returns the number of its edges."""
    only = len(seeds) == 1 and None in seeds
    out = sampler._sample(seeds[None] if only else seeds, now[None] if only else now, key)
    n_id, tree, edge_index, e_id, *_ = by_reference(sampler, seeds, key, now, window)
    listed = lambda value: as_lists(list(value.values()) if isinstance(value, dict) else [value])  # noqa: E731
    ends = (out.col, out.row) if sampler.sample_direction == "backward" else (out.row, out.col)
    assert listed(out.node) == n_id and listed(out.batch) == tree
    assert [list(pair) for pair in zip(*map(listed, ends))] == edge_index
    assert listed(out.edge) == e_id
    return sum(map(len, e_id))


@EVERY_OPTION
def test_a_sample_in_a_window_equals_the_slow_reference(options):
    for seed, fanouts in enumerate(FANOUTS):
        data, seeds = random_data(seed), {None: some_seeds(seed, 60, repeats="induced" not in options.values())}
        now = {None: some_times(seeds[None].numel(), seed)}
        for window in WINDOWS:
            sampler = NeighborSampler(data, fanouts, time_window=window, **options)
            assert_is_the_references(sampler, seeds, join_key(seed, 5), now, window)


@pytest.mark.parametrize(
    "options", [{}, {"temporal_strategy": "last"}, {"subgraph_type": "induced"}, {"weight_attr": "weight"}], ids=str
)
def test_a_window_over_several_types_equals_the_slow_reference(options):
    for seed in range(3):
        data = random_hetero(seed=seed)
        seeds = {"paper": torch.arange(9), "author": long(3, 3, 1)}
        now = {name: some_times(len(ids), seed) for name, ids in seeds.items()}
        for window in WINDOWS:
            sampler = NeighborSampler(data, [4, 3], time_attr="time", time_window=window, **options)
            assert_is_the_references(sampler, seeds, seed, now, window)


def test_a_batch_of_many_blocks_equals_the_slow_reference():
    data = random_data(4, 900, 9000)
    seeds, now = {None: torch.arange(300)}, {None: some_times(300, 1)}
    sampler = NeighborSampler(data, [4, 3], time_attr="edge_time", time_window=3)
    assert assert_is_the_references(sampler, seeds, 3, now, 3) > 500


# --- what a window holds ----------------------------------------------------------------------------------


def visible_edges(data: Data, of_edges: bool, seed: int, t: float, window: float, hops: int) -> set[int]:
    """Numbers of the edges within some hops of a seed, found by filtering all edges by their times."""
    (source, target), known, found = data.edge_index.tolist(), {seed}, set()
    time = data.edge_time.tolist() if of_edges else [data.time[v].item() for v in source]
    for _ in range(hops):
        new = {e for e, v in enumerate(target) if v in known and t - window <= time[e] <= t}
        found |= new
        known = known | {source[e] for e in new}
    return found


@pytest.mark.parametrize("time_attr", ["time", "edge_time"])
@pytest.mark.parametrize("real", [False, True], ids=["integers", "floats"])
def test_all_neighbours_in_the_window_equal_those_that_a_filter_keeps(time_attr, real):
    data, sizes = random_data(2), set()
    if real:
        for name in ("time", "edge_time"):
            data[name] = (data[name] * 0.75 - 3).float()
    seeds = torch.arange(0, 60, 7)
    now = some_times(seeds.numel(), 3)
    now = now * 0.75 - 3 if real else now
    for window in (0, 1.5, 3, 4.25):
        for hops in (1, 2):
            sampler = NeighborSampler(data, [-1] * hops, time_attr=time_attr, time_window=window)
            out = sampler.sample_from_nodes(NodeSamplerInput(None, seeds, now), key=1)
            for tree, (seed, t) in enumerate(zip(seeds.tolist(), now.tolist())):
                want = visible_edges(data, time_attr == "edge_time", seed, t, window, hops)
                assert set(out.edge[out.batch[out.col] == tree].tolist()) == want, (window, hops, seed, t)
                sizes.add(len(want))
    assert len(sizes) > 3


def test_both_ends_of_a_window_are_inside():
    edges = torch.stack([torch.arange(1, 8), torch.zeros(7, dtype=torch.int64)])
    data = Data(edge_index=edges, num_nodes=8, edge_time=torch.arange(7))

    def of(t: Any, window: Any) -> list[int]:
        sampler = NeighborSampler(data, [-1], time_attr="edge_time", time_window=window)
        return sampler.sample_from_nodes(NodeSamplerInput(None, long(0), long(t))).edge.tolist()

    assert of(5, 2) == [3, 4, 5] and of(5, 0) == [5] and of(9, 3) == [6] and of(9, 2) == [] and of(-1, 5) == []
    assert of(5, 2.9) == [3, 4, 5], "integer times have no fraction"
    assert of(5, np.int32(2)) == of(5, torch.tensor(2)) == of(5, np.float32(2)) == [3, 4, 5]


def test_last_takes_the_latest_of_the_window():
    edges = torch.stack([torch.arange(1, 8), torch.zeros(7, dtype=torch.int64)])
    data = Data(edge_index=edges, num_nodes=8, edge_time=torch.arange(7))
    for window, want in ((9, [3, 4, 5]), (2, [3, 4, 5]), (1, [4, 5]), (0, [5])):
        sampler = NeighborSampler(data, [3], time_attr="edge_time", temporal_strategy="last", time_window=window)
        assert sampler.sample_from_nodes(NodeSamplerInput(None, long(0), long(5))).edge.tolist() == want


@EVERY_OPTION
def test_an_infinite_window_changes_no_bit(options):
    data, seeds = random_data(1), torch.arange(60)
    inputs = NodeSamplerInput(None, seeds, some_times(60, 2))
    plain, *others = (
        NeighborSampler(data, [4, 3], time_window=window, **options).sample_from_nodes(inputs, key=3)
        for window in (None, math.inf, 2**62)
    )
    assert all(same_samples(plain, other) for other in others)


def test_the_ends_of_int64_and_of_floats_are_no_special_case():
    least, most = -(2**63), 2**63 - 1
    edges = torch.stack([torch.arange(1, 4), torch.zeros(3, dtype=torch.int64)])
    data = Data(edge_index=edges, num_nodes=4, edge_time=long(least, 0, most))

    def of(t: Any, window: Any) -> list[int]:
        sampler = NeighborSampler(data, [-1], time_attr="edge_time", time_window=window)
        return sampler.sample_from_nodes(NodeSamplerInput(None, long(0), t)).edge.tolist()

    assert of(long(-9), most) == [0], "the begin would be less than every int64"
    assert of(long(0), most) == [1] and of(long(most), most) == [1, 2] and of(long(-1), most) == [0]
    data.edge_time = torch.tensor([-math.inf, 0.0, math.inf], dtype=torch.float64)
    assert of(torch.tensor([-0.0]), 5) == [1] and of(torch.tensor([5.0]), 5) == [1] and of(torch.tensor([5.5]), 5) == []
    assert of(torch.tensor([math.inf]), 5) == [2] and of(torch.tensor([-math.inf]), 5) == [0]


def test_seeds_without_times_of_their_own_end_at_their_vertices_times():
    data = random_data(3)
    seeds = torch.arange(60)
    sampler = NeighborSampler(data, [-1], time_attr="time", time_window=2)
    own, given = (sampler.sample_from_nodes(NodeSamplerInput(None, seeds, time), key=1) for time in (None, data.time))
    own.metadata = given.metadata
    assert own.edge.numel() and same_samples(own, given)


# --- operators --------------------------------------------------------------------------------------------


def test_lists_of_a_part_hide_what_is_earlier_than_since():
    degrees, generator = [0, 5, 60, 200, 1], torch.Generator().manual_seed(2)
    indptr = torch.tensor([0, *np.cumsum(degrees)])
    indices = torch.randint(40, (sum(degrees),), generator=generator)
    time = torch.cat([torch.randint(10, (size,), generator=generator).sort().values for size in degrees])
    place = torch.randint(5, (90,), generator=generator)
    now = torch.randint(-1, 11, (90,), generator=generator)
    since = now - torch.randint(-1, 8, (90,), generator=generator)  # some windows are empty
    lists = reference.Relation(0, 0, *as_lists([indptr, indices]), time=time.tolist())
    member = torch.arange(0, 40, 3)
    for narrow in (time, time.int()):
        for fanout, last in ((3, False), (3, True), (-1, False)):
            got = ops.draw_from_lists(
                indptr, indices, None, narrow, place, place, None, now, fanout, 7, 1, 0, 0, last=last, since=since
            )
            want = reference.draw_from_lists(
                lists, *as_lists([place, place]), None, now.tolist(), fanout, 7, 1, 0, last=last, since=since.tolist()
            )
            assert as_lists(got) == list(map(list, want))
        got = ops.edges_between(indptr, indices, narrow, place, None, now, member, None, 40, since=since)
        want = reference.edges_between(lists, place.tolist(), None, now.tolist(), member.tolist(), None, since.tolist())
        assert as_lists(got) == list(want)


def test_operators_refuse_a_since_that_fits_nothing():
    lists = long(0, 1, 2), long(1, 0), None, long(0, 1)
    draw = lambda now, since: ops.draw_from_lists(  # noqa: E731
        lists[0], lists[1], None, None, lists[3], lists[3], None, now, 2, 0, 0, 0, 0, since=since
    )
    with pytest.raises(RuntimeError, match="since needs now"):
        draw(None, long(1, 1))
    with pytest.raises(RuntimeError, match="since must have one entry per list, expected 2, got 1"):
        draw(long(1, 1), long(1))
    sample = lambda since: ops.sample_typed_neighbors(  # noqa: E731
        [lists[0]], [lists[1]], [None], [None], [None], [None], [0], [0], [2], [long(0, 0)], [long(0, 1)], [long(0, 0)], since, [0], [2], 1, 0,
        disjoint=True,
    )  # fmt: skip
    for since, text in (
        ([None, None], "seed_since must be empty or have one entry per vertex type, 1, got 2"),
        ([long(0)], r"seed_since\[0\] must have 2 entries, got 1"),
        ([long(0, 0).int()], "seed_since must have dtype Long, got Int"),
    ):
        with pytest.raises(RuntimeError, match=text):
            sample(since)
    assert as_lists(sample([None])) == as_lists(sample([]))


# --- loaders ----------------------------------------------------------------------------------------------


def timed_hetero() -> HeteroData:
    data = random_hetero(seed=5)
    for store in data.node_stores:
        store.x = torch.rand(store.num_nodes, 2)
    return data


def test_batches_of_node_loaders_hold_only_the_window():
    data = timed_hetero()
    make = lambda window: NeighborLoader(  # noqa: E731
        data, [-1, -1], "paper", time_attr="time", time_window=window, batch_size=16, num_workers=1
    )
    outside = 0
    for narrow, wide in zip(make(2), make(None), strict=True):
        for batch, is_narrow in ((narrow, True), (wide, False)):
            t = batch["paper"].time[:16]
            for name, store in batch.edge_items():
                source, tree = store.edge_index[0], batch[name[0]].batch
                time, now = batch[name[0]].time[source], t[tree[source]]
                assert bool((time <= now).all())
                outside += 0 if is_narrow else int((time < now - 2).sum())
                assert not is_narrow or bool((time >= now - 2).all())
    assert outside > 100


def test_batches_of_link_loaders_hold_only_the_window():
    data = random_data(6)
    data.x = torch.rand(data.num_nodes, 2)
    loader = LinkNeighborLoader(
        data, [-1, 4], edge_label_index=data.edge_index, edge_label_time=data.edge_time, time_attr="edge_time", time_window=3,
        neg_sampling="binary", batch_size=32,
    )  # fmt: skip
    edges = 0
    for batch in loader:
        now = batch.edge_label_time[batch.batch[batch.edge_index[1]] % batch.edge_label_time.numel()]
        assert bool((batch.edge_time <= now).all()) and bool((batch.edge_time >= now - 3).all())
        edges += now.numel()
    assert edges > 100


def test_a_state_belongs_to_its_window():
    data = timed_hetero()
    make = lambda **window: NeighborLoader(data, [3], "paper", time_attr="time", batch_size=16, seed=1, **window)  # noqa: E731
    state = make(time_window=2).state_dict()
    make(time_window=2.0).load_state_dict(state)
    with pytest.raises(ValueError, match="time_window: expected None, got 2"):
        make().load_state_dict(state)
    make(time_window=math.inf).load_state_dict(make().state_dict())


# --- wrong arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [-1, -0.5, math.nan, -math.inf, True, "2", long(1, 2), 1j, np.array([2])], ids=str)
def test_a_window_that_is_no_length_is_refused(window):
    text = "time_window must be a number >= 0 in the units of the times, or None, got "
    with pytest.raises(ValueError, match=text):
        NeighborSampler(random_data(1), [2], time_attr="time", time_window=window)
    with pytest.raises(ValueError, match=text):
        NeighborLoader(random_data(1), [2], time_attr="time", time_window=window)


def test_a_window_needs_times():
    for make in (NeighborSampler, NeighborLoader, LinkNeighborLoader):
        with pytest.raises(ValueError, match="time_window=3 needs times; pass time_attr too"):
            make(random_data(1), [2], time_window=3)
    sampler = NeighborSampler(random_data(1), [2])
    with pytest.raises(ValueError, match="time_window=3 needs times"):
        sampler.time_window = 3
    sampler.time_window = None


def test_integer_times_take_whole_ends_and_windows_of_int64():
    data = random_data(1)
    with pytest.raises(
        ValueError, match=r"time_window must be < 2\^63 for integer times, or inf, got 9223372036854775808"
    ):
        NeighborSampler(data, [2], time_attr="time", time_window=2**63)
    sampler = NeighborSampler(data, [2], time_attr="time", time_window=3)
    halves = torch.tensor([3.0, 2.5])
    whole = "must hold whole numbers with time_window, because the graph's times are integers, got 2.5 at position 1"
    with pytest.raises(ValueError, match=f"input_time {whole}"):
        sampler.sample_from_nodes(NodeSamplerInput(None, long(0, 1), halves))
    with pytest.raises(ValueError, match=f"edge_label_time {whole}"):
        sampler.sample_from_edges(EdgeSamplerInput(None, long(0, 1), long(1, 2), time=halves))
    sampler.time_window = None
    sampler.sample_from_nodes(NodeSamplerInput(None, long(0, 1), halves))


def test_a_window_over_integer_and_floating_point_times_is_refused():
    data = random_hetero(seed=1)
    data["author"].time = data["author"].time.double()
    with pytest.raises(
        ValueError, match="time_window=3 needs times of one kind, but the graph has integer and floating"
    ):
        NeighborSampler(data, [2], time_attr="time", time_window=3)
    NeighborSampler(data, [2], time_attr="time", time_window=math.inf)
