"""Laws of a loader that looks ahead: batches are the same, bit for bit, and the analysis counts the rows that are fetched.

However an epoch ends, no batch gets the row of another vertex.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data, random_hetero
from one_process import check_batches, whole
from rare import rare, some_of
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader, NeighborSampler
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.graph.mapped import mapped_from
from salientpp.store.fetch import Packed
from salientpp.ways.lookahead.way import Lookahead

FANOUTS, BATCH = [4, 3], 8


def ahead_of(loader: NeighborLoader) -> Lookahead | None:
    """Returns the way that decides which fetched rows a loader keeps; None if its cache is static."""
    way = loader.engine.way(Lookahead)
    return way if way is not None and way.planners else None


@pytest.fixture(scope="module", params=["whole", "parts"])
def root(request, tmp_path_factory) -> str:
    """Makes two parts, with each form of the topology. The row of a vertex is its old id, wide enough that rows take more bytes than ids."""
    data = random_data(600, 3600)
    data.x = torch.arange(600, dtype=torch.float32).unsqueeze(1) * torch.ones(64)
    data.train_mask = torch.arange(600) % 3 != 0
    root = tmp_path_factory.mktemp("ahead") / "two"
    for num_parts, name in ((2, "two"), (3, "three")):
        salientpp.partition(data, num_parts, root.with_name(name), FANOUTS, BATCH, topology=request.param)
    return str(root)


#: Tests for which one form of the topology is enough; with the other one they are rare.
IN_PARTS = pytest.mark.parametrize("root", ["parts", *rare("whole")], indirect=True)
IN_WHOLE = pytest.mark.parametrize("root", ["whole", *rare("parts")], indirect=True)


def _loader(part: Any, **options: Any) -> NeighborLoader:
    options = {
        "input_nodes": "train", "shuffle": True, "seed": 3, "batch_size": BATCH, "replication_factor": 0.3, "lookahead": 5, **options
    }  # fmt: skip
    return NeighborLoader(part, **{"num_neighbors": FANOUTS, **options})


def _check(loader: Any) -> None:
    """Checks that an epoch's batches equal those that one process draws, with the rows of their vertices."""
    data = whole(salientpp.load(loader.data.root))
    check_batches(loader, NeighborSampler(data, FANOUTS), data, "sample_from_nodes")


def _right(batch: Any, part: Any) -> bool:
    return torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))


# --- batches, and what is fetched ---------------------------------------------------------------------------


def _epochs(rank: int, root: str, options: dict[str, Any], epochs: int) -> tuple[int, int, int]:
    """Returns the rows that came from other ranks and from the cache, and those that come in one epoch without lookahead."""
    part = salientpp.load(root)
    loader, static = _loader(part, **options), _loader(part, **{**options, "lookahead": 0})
    for _ in range(epochs):
        _check(loader)
    _check(static)
    stats = loader.stats()
    return stats.rows_remote, stats.rows_cache, static.stats().rows_remote


#: (form of the topology, options).
SOME = [
    ("parts", {"depth": 1}), ("parts", {"depth": 10, "num_workers": 2}), ("parts", {"lookahead": "auto"}), ("whole", {"lookahead": 1}),
    ("whole", {"lookahead": 40, "replication_factor": 0.8}), ("whole", {"device_rows": 0.3}), ("whole", {"replication_factor": 0.05, "lookahead": 2}),
]  # fmt: skip
OTHERS = [({"parts": "whole", "whole": "parts"}[form], options) for form, options in SOME]


@pytest.mark.parametrize(
    ("root", "options"),
    [*SOME, *rare(*OTHERS, ("whole", {"depth": 2}), ("parts", {"depth": 2}))],
    indirect=["root"],
    ids=str,
)
def test_batches_are_the_same_and_fetched_rows_equal_the_analysis(root, options):
    epochs = 2
    alpha, lookahead = options.get("replication_factor", 0.3), options.get("lookahead", 5)
    found = distributed.run(_epochs, 2, root, options, epochs)
    part = salientpp.load(root)
    analysis = analyze(
        part,
        Batches(epochs=epochs, seed=3, batch_size=BATCH),
        Ways(replication_factors=[alpha], policies=["vip"], lookahead=lookahead),
    )
    for rank, (remote, cached, _) in enumerate(found):
        assert remote == analysis.of(way="lookahead")[0].remote_rows_per_rank[rank] * epochs
        assert analysis.of(way="lookahead")[0].ahead.windows[rank] > 0
        assert cached > 0
    static = [rows for _, _, rows in found]
    assert static == list(
        analyze(part, Batches(epochs=1, seed=3), Ways(replication_factors=[alpha], policies=["vip"]))
        .results[0]
        .remote_rows_per_rank
    )
    if options.get("lookahead") == "auto":
        assert sum(rows[0] for rows in found) < epochs * sum(static)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"replace": True}, {"disjoint": True}, {"subgraph_type": "induced"}, {"subgraph_type": "bidirectional"}, {"weight_attr": "w"},
        {"time_attr": "time"}, {"time_attr": "time", "temporal_strategy": "last"}, {"shared_draws": "batch"}, {"shared_draws": "batch", "disjoint": True},
    ],
    ids=str,
)  # fmt: skip
def test_scouts_see_exactly_the_vertices_of_a_batch(options):
    data = random_data(300, 1800)
    data.w, data.time = torch.rand(data.num_edges), torch.randint(0, 50, (300,))
    sampler = NeighborSampler(data, FANOUTS, **options)
    seeds = torch.arange(0, 300, 7)
    times = torch.full_like(seeds, 40) if "time_attr" in options else None
    nodes = NodeSamplerInput(None, seeds, times)
    edges = EdgeSamplerInput(None, seeds, seeds.flip(0), time=times)
    for key in range(3):
        for draw_key in (None, 77):
            for draw, inputs in ((sampler.sample_from_nodes, nodes), (sampler.sample_from_edges, edges)):
                seen = draw(inputs, key=key, draw_key=draw_key, only_vertices=True)
                assert torch.equal(seen.node, draw(inputs, key=key, draw_key=draw_key).node)


def test_scouts_see_exactly_the_vertices_of_every_type():
    data = random_hetero()
    sampler = NeighborSampler(data, FANOUTS)
    type_ = data.node_types[0]
    inputs = NodeSamplerInput(None, torch.arange(5), None, type_)
    whole, seen = (sampler.sample_from_nodes(inputs, key=4, only_vertices=only).node for only in (False, True))
    assert whole.keys() == seen.keys() and all(torch.equal(ids, seen[name]) for name, ids in whole.items())


@pytest.mark.parametrize(
    ("root", "lookahead"), [("whole", 5), ("parts", "auto"), *rare(("parts", 5), ("whole", "auto"))], indirect=["root"]
)
def test_rows_of_three_ranks_and_of_shared_draws_equal_the_analysis(root, lookahead):
    root = root.replace("two", "three")
    options = {"shared_draws": {"vertices": "batch", "block": 4}, "num_workers": 1, "lookahead": lookahead}
    found = distributed.run(_alike, 3, root, options)
    analysis = analyze(
        salientpp.load(root),
        Batches(epochs=2, seed=3, shared_draws="batch", draw_block=4),
        Ways(replication_factors=[0.3], policies=["vip"], lookahead=lookahead),
    )
    assert [2 * rows for rows in analysis.of(way="lookahead")[0].remote_rows_per_rank] == found


def _alike(rank: int, root: str, options: dict[str, Any]) -> int:
    part = salientpp.load(root)
    loader, plain = _loader(part, **options), _loader(part, **{**options, "lookahead": 0})
    for _ in range(2):
        for ours, theirs in zip(loader, plain, strict=True):
            assert torch.equal(ours.x, theirs.x) and torch.equal(ours.n_id, theirs.n_id) and _right(ours, part)
            assert torch.equal(ours.edge_index, theirs.edge_index)
    return loader.stats().rows_remote


@IN_PARTS
def test_memory_never_exceeds_a_static_cache(root):
    assert all(distributed.run(_memory, 2, root))


def _memory(rank: int, root: str) -> bool:
    part = salientpp.load(root)
    for alpha, lookahead in ((0.3, 1), (0.3, 5), (0.3, "auto"), (0.8, 30)):
        ours = _loader(part, replication_factor=alpha, lookahead=lookahead).memory_used()
        static = _loader(part, replication_factor=alpha, lookahead=0).memory_used()
        assert ours["lookahead"] > 0 and 0.8 * static["cache"] < ours["cache"] + ours["lookahead"] <= static["cache"]
        assert "lookahead" not in static
    return True


@IN_WHOLE
def test_a_static_cache_is_used_if_lookahead_saves_nothing(root):
    assert all(distributed.run(_nothing, 2, root))


def _nothing(rank: int, root: str) -> bool:
    part = salientpp.load(root)
    for alpha in (0.0, 4.0):
        loader = _loader(part, replication_factor=alpha)
        assert ahead_of(loader) is None
        assert len(loader.cache) == _loader(part, replication_factor=alpha, lookahead=0).cache.members.ids.numel()
        _check(loader)
    return True


def test_one_rank_does_not_look_ahead(root):
    alone = _loader(salientpp.load(root))
    assert ahead_of(alone) is None
    for batch in alone:
        assert _right(batch, alone.data)


# --- ways to draw -------------------------------------------------------------------------------------------


def _ways(rank: int, root: str, what: str) -> tuple[int, int]:
    part = salientpp.load(root)
    options: dict[str, Any] = dict(shuffle=True, seed=3, batch_size=BATCH, num_workers=1)
    if what == "links":
        pairs = torch.randint(600, (2, 400), generator=torch.Generator().manual_seed(2))
        options |= {"edge_label_index": pairs, "neg_sampling": "binary", "replication_factor": 0.5}
        loaders = [LinkNeighborLoader(part, FANOUTS, lookahead=ahead, **options) for ahead in (6, 0)]
    elif what == "trees":
        loaders = [_loader(part, disjoint=True, lookahead=ahead, **options) for ahead in (6, 0)]
    elif what == "logical ranks":
        loaders = [
            _loader(part, logical_ranks={"number": 4, "join": True}, lookahead=ahead, **options) for ahead in (6, 0)
        ]
    else:
        loaders = [_loader(part, logical_ranks=4, lookahead=ahead, **options) for ahead in (6, 0)]
    for _ in range(2):
        for ours, theirs in zip(*loaders, strict=True):
            assert torch.equal(ours.x, theirs.x) and torch.equal(ours.n_id, theirs.n_id) and _right(ours, part)
    assert ahead_of(loaders[0]) is not None
    rows = [loader.stats() for loader in loaders]
    assert rows[0].rows == rows[1].rows or what in (
        "trees",
        "logical ranks",
    )  # a row at several places of a batch is fetched and counted once
    return rows[0].rows_remote, rows[1].rows_remote


@pytest.mark.parametrize(
    ("root", "what"),
    [
        *(("parts", "links"), ("whole", "trees"), ("parts", "logical ranks"), ("whole", "more logical ranks")),
        *rare(("whole", "links"), ("parts", "trees"), ("whole", "logical ranks"), ("parts", "more logical ranks")),
    ],
    indirect=["root"],
)
def test_other_ways_to_draw_get_the_same_batches_with_fewer_rows(root, what):
    found = distributed.run(_ways, 2, root, what)
    assert sum(ours for ours, _ in found) < sum(theirs for _, theirs in found)


def _types(rank: int, root: str) -> dict[str, int]:
    part = salientpp.load(root)
    options: dict[str, Any] = dict(
        input_nodes=("paper", "train"), shuffle=True, seed=3, batch_size=4, replication_factor=0.4
    )
    loaders = [NeighborLoader(part, [3, 2], lookahead=ahead, **options) for ahead in (3, 0)]
    for _ in range(3):
        for ours, theirs in zip(*loaders, strict=True):
            for type_ in part.node_types:
                assert torch.equal(ours[type_].n_id, theirs[type_].n_id)
                assert ("x" in ours[type_]) == ("x" in theirs[type_])
                assert "x" not in ours[type_] or torch.equal(ours[type_].x, theirs[type_].x)
    return {str(type_): 1 for type_ in ahead_of(loaders[0]).planners}


def test_every_type_whose_rows_travel_has_a_cache_that_looks_ahead(tmp_path):
    data = random_hetero()
    for type_ in data.node_types:
        data[type_].x = torch.rand(data[type_].num_nodes, 40 if type_ == "paper" else 24)
    data["paper"].train_mask = torch.arange(data["paper"].num_nodes) % 2 == 0
    salientpp.partition(data, 2, tmp_path / "types", [3, 2], 4, replicate=())
    assert any(len(found) > 1 for found in distributed.run(_types, 2, str(tmp_path / "types")))


# --- what may happen to an epoch ----------------------------------------------------------------------------


def _left_early(rank: int, root: str, depth: int, uneven: str) -> int:
    """Ranks leave epochs at different batches, orders jump, and states are loaded. Rows are always right."""
    part = salientpp.load(root)
    loader = _loader(part, depth=depth, uneven=uneven, num_workers=depth % 3, replication_factor=0.2)
    number = 0
    for epoch, last in enumerate([2 + rank, 9, 1, 5 + 3 * rank, 100, 3]):
        if epoch == 3:
            loader.set_epoch(17)
        for index, batch in enumerate(loader):
            assert _right(batch, part), (epoch, index)
            number += 1
            if index == last:
                break
    state = loader.state_dict()
    other = _loader(part, depth=depth, uneven=uneven, replication_factor=0.2)
    for _, batch in zip(range(4), other):
        assert _right(batch, part)
    other.load_state_dict(state)
    for batch in other:
        assert _right(batch, part)
    _check(other)
    return number


ENDS = [("parts", 1, "wrap"), ("parts", 2, "drop"), ("whole", 10, "exact")]
EVERY_END = [*itertools.product(("parts", "whole"), (1, 2, 10), ("wrap", "drop", "exact"))]


@pytest.mark.parametrize(("root", "depth", "uneven"), some_of(ENDS, EVERY_END), indirect=["root"])
def test_epochs_may_end_anywhere(root, depth, uneven):
    distributed.run(_left_early, 2, root, depth, uneven)


def _resumed(rank: int, root: str) -> bool:
    part = salientpp.load(root)
    first = _loader(part)
    batches = [batch.x for batch in first]
    for index, _ in enumerate(first):
        if index == 6:
            break
    second = _loader(part, seed=None)
    second.load_state_dict(first.state_dict())
    plain = _loader(part, lookahead=0)
    plain.load_state_dict(first.state_dict())
    assert all(torch.equal(ours.x, theirs.x) for ours, theirs in zip(second, plain, strict=True))
    return len(batches) > 7


@IN_PARTS
def test_a_resumed_epoch_continues_with_and_without_lookahead(root):
    assert all(distributed.run(_resumed, 2, root))


def _lost(rank: int, root: str) -> bool:
    """Batches that had entered are lost with their pipeline. The next epoch must not use rows that never came."""
    part = salientpp.load(root)
    loader = _loader(part)
    for batch in loader:
        assert _right(batch, part)
    for planner in loader.engine.way(Lookahead).planners.values():  # plans a batch that is never put together
        ids = torch.arange(600)[torch.tensor([part.book.owner(torch.tensor(v)) != rank for v in range(600)])]
        planner.forget_window()
        planner.plan(ids, lambda: None)
    ahead_of(loader).under_way += 1
    for batch in loader:
        assert _right(batch, part)
    return True


@IN_WHOLE
def test_rows_that_never_came_are_forgotten(root):
    assert all(distributed.run(_lost, 2, root))


def _fails(rank: int, root: str) -> list[str]:
    part = salientpp.load(root)

    def transform(batch):
        if rank == 1 and batch.input_id.numel() and int(batch.input_id[0]) >= 0 and loader.stats().batches == 4:
            raise RuntimeError("no more")
        return batch

    loader = _loader(part, transform=transform)
    said = []
    for _ in range(2):
        try:
            for batch in loader:
                assert _right(batch, part)
        except Exception as error:
            said.append(str(error))
    return said


@IN_PARTS
def test_every_epoch_after_a_failure_raises_an_error(root):
    for said in distributed.run(_fails, 2, root):
        assert len(said) == 2 and all("no more" in text for text in said)


# --- what it excludes ---------------------------------------------------------------------------------------


#: Options, and the error that names them.
EXCLUDED = [
    ({"lookahead": -2}, "lookahead must be an integer in"),
    ({"policy": "degree"}, "policy must be 'vip' or 'vip-hop', got 'degree'"),
    ({"transform_sampler_output": id}, "lookahead=5 excludes transform_sampler_output="),
    ({"lookahead": 200, "replication_factor": 0.05}, "lookahead=200 needs .* bytes for ids, more than half"),
]


def test_excluded_options_raise_on_every_rank(root):
    for said in distributed.run(_refused, 2, root):
        for failed, (options, text) in zip(said, EXCLUDED, strict=True):
            assert failed is not None and re.search(text, failed), (options, failed)


def _refused(rank: int, root: str) -> list[str | None]:
    said: list[str | None] = []
    for options, _ in EXCLUDED:
        try:
            _loader(salientpp.load(root), **options)
            said.append(None)
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_lookahead_cache_cannot_be_shared(root):
    assert all(distributed.run(_own, 2, root))


def _own(rank: int, root: str) -> bool:
    loader = _loader(salientpp.load(root))
    with pytest.raises(RuntimeError, match="a cache that looks ahead cannot be shared"):
        loader.cache  # noqa: B018
    return True


# --- on a device --------------------------------------------------------------------------------------------


ON_A_DEVICE: list[Any] = [
    0.2,
    {"part": 0.2, "cache": 0.4},
    {"part": 0.2, "zero_copy": True},
    {"part": 0.2, "cache": 0.4, "zero_copy": True},
]


@IN_PARTS
def test_kept_rows_are_put_in_order_on_a_device(root):
    assert all(distributed.run(_packed, 2, root))


def _packed(rank: int, root: str) -> bool:
    """Puts batches together as for a device, with the CPU instead of it."""
    part = salientpp.load(root)
    for device_rows in ON_A_DEVICE:
        loader = _loader(part, device_rows=device_rows)
        loader.engine.producer.fetch.own = loader.engine.producer.fetch.served = Packed(torch.device("cpu"))
        for _ in range(2):
            for batch in loader:
                assert _right(batch, part), device_rows
        assert loader.stats().rows_cache > 0 and ahead_of(loader) is not None, device_rows
    return True


# --- with other copies ---------------------------------------------------------------------------------------


def _beside(rank: int, root: str) -> dict[str, int]:
    part, remote = salientpp.load(root), {}
    given = _loader(part, replication_factor=0.1, lookahead=0).cache
    for name, options in {"none": {}, "device": {"device_rows": {"cache": 0.4}}, "given": {"cache": given}}.items():
        loader = _loader(part, **options)
        for _ in range(2):
            for batch in loader:
                assert _right(batch, part)
        assert ahead_of(loader) is not None
        remote[name] = loader.stats().rows_remote
    return remote


@IN_WHOLE
def test_rows_that_a_rank_has_already_take_no_slots(root):
    for remote in distributed.run(_beside, 2, root):
        assert 0 < remote["device"] < remote["none"] and 0 < remote["given"] < remote["none"]


def _mapped(rank: int, root: str, options: dict[str, Any]) -> bool:
    ahead = ahead_of(_loader(salientpp.load(root), **options))
    return ahead is not None and mapped_from(ahead.planners[None].prior) is not None


@IN_PARTS
def test_probabilities_of_the_directorys_own_workload_are_memory_mapped(root):
    assert all(distributed.run(_mapped, 2, root, {}))
    assert not any(distributed.run(_mapped, 2, root, {"num_neighbors": [2, 2]}))


def _on_hosts(rank: int, root: str, window: Any, alpha: float) -> tuple[Any, ...]:
    options = {"ranks_per_host": 2, "replication_factor": alpha}
    loader = _loader(salientpp.load(root), lookahead=window, **options)
    static = _loader(salientpp.load(root), lookahead=0, **options)
    for _ in range(2):
        for batch, want in zip(loader, static, strict=True):
            assert torch.equal(batch.x, want.x) and torch.equal(batch.n_id, want.n_id)
    ahead, whole = ahead_of(loader), len(static.cache) * static.cache.row_bytes
    memory = sum(loader.memory_used().get(name, 0) for name in ("cache", "lookahead"))
    return ahead is not None, memory, whole, loader.stats().rows_remote, static.stats().rows_remote


@IN_WHOLE
def test_the_ranks_of_a_host_share_its_memory_equally(root):
    for moves, memory, of_host, _, _ in distributed.run(_on_hosts, 4, root, 2, 0.3):
        assert moves and 0 < memory <= of_host // 2 + 8 * -(-600 // 32)


@pytest.mark.parametrize(
    ("root", "alpha"), [("whole", 0.1), ("parts", 0.1), *rare(("whole", 0.6), ("parts", 0.6))], indirect=["root"]
)
def test_a_host_keeps_one_cache_if_that_fetches_less(root, alpha):
    # Over parts, the batches that wait would take more memory than the smaller cache.
    pays = alpha == 0.1 and salientpp.load(root).topology == "whole"
    for moves, _, _, ahead, static in distributed.run(_on_hosts, 4, root, "auto", alpha):
        assert (moves, ahead < static) == (pays, pays)
