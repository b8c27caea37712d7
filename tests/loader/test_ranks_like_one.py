"""Law: partitioning changes only where rows are. On 1, 2 and 4 ranks, batches equal the batches that one process draws with the same key, bit for bit.

The batches have times, weights, trees, types or links as seeds.
"""

from __future__ import annotations

import re
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data
from large_graph import generate
from one_process import BATCH, FANOUTS, TYPED_FANOUTS, check_batches, homogeneous, typed_data, whole
from peers import peer
from rare import rare
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader as PygLinkNeighborLoader

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader, NeighborSampler
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.datasets import load_dataset
from salientpp.ranks.partition_book import PartitionBook
from salientpp.vip.policies import cache_bytes, plan_cache, plan_caches

# --- one type of vertices ----------------------------------------------------------------------------------


NODE_OPTIONS = [
    {"time_attr": "time"},
    {"time_attr": "time", "temporal_strategy": "last"},
    {"time_attr": "edge_time", "of_edges": True},
    {"weight_attr": "weight"},
    {"weight_attr": "weight", "replace": True},
    {"weight_attr": "weight", "time_attr": "time"},
    {"disjoint": True},
    {"subgraph_type": "bidirectional"},
    {"subgraph_type": "induced"},
    {"replace": True},
]


def check_one_type(rank: int, root: str, alphas: list[float]) -> None:
    part = salientpp.load(root)
    data = whole(part)
    for options in NODE_OPTIONS:
        options = dict(options)
        given: dict[str, Any] = {}
        if options.pop("of_edges", False):
            given["input_time"] = torch.arange(part.split("train").numel()) % 20
        one = NeighborSampler(data, FANOUTS, **options)
        for alpha in alphas:
            loader = NeighborLoader(
                part, FANOUTS, "train", batch_size=BATCH, shuffle=True, seed=3, replication_factor=alpha, num_workers=1,
                **options, **given,
            )  # fmt: skip
            remote = check_batches(loader, one, data, "sample_from_nodes")
            stats = loader.stats()
            assert stats.rows_remote + stats.rows_cache >= remote if options.get("disjoint") else True
            if alpha == 0:
                assert stats.rows_remote == remote, options
            else:
                assert stats.rows_remote <= remote


#: Parts on disk, ranks, and the form of the topology. With fewer ranks than parts, a rank serves several parts as one.
FORMS = [
    (2, 2, "whole"),
    (4, 3, "whole"),
    # tests/sampling/test_topologies.py compares parts with whole topologies.
    *rare((1, 1, "whole"), (4, 4, "whole"), (5, 2, "whole"), (2, 2, "parts"), (4, 3, "parts")),
]


@pytest.mark.parametrize(("num_parts", "world", "topology"), FORMS)
def test_batches_with_times_weights_trees_and_subgraphs_equal_one_process(tmp_path, num_parts, world, topology):
    root = tmp_path / "parts"
    salientpp.partition(homogeneous(), num_parts, root, FANOUTS, BATCH, topology=topology)
    distributed.run(check_one_type, world, str(root), [0.0, 0.3])


def source_under_ids_of(part: salientpp.PartitionedGraph, source: Data) -> Data:
    """Renumbers ``source``, the graph before partitioning, as its directory does. The directory provides only the original ids."""
    old = torch.cat([part.original_id(ids) for ids in torch.arange(part.num_vertices).split(2**20)])
    new = torch.empty_like(old)
    new[old] = torch.arange(old.numel())
    indptr, sources = source.adj_t.crow_indices(), source.adj_t.col_indices()
    degree = indptr.diff()[old]
    lists = []
    for first in range(0, old.numel(), 2**17):
        targets, lengths = old[first : first + 2**17], degree[first : first + 2**17]
        begin = torch.repeat_interleave(indptr[targets] - (lengths.cumsum(0) - lengths), lengths)
        lists.append(new[sources[begin + torch.arange(begin.numel())].long()].to(torch.int32))
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    indices = torch.cat(lists)
    size = (old.numel(), old.numel())
    adj_t = torch.sparse_csr_tensor(ends, indices, torch.ones(1).expand(indices.numel()), size, check_invariants=False)
    return Data(x=source.x[old], y=source.y[old], adj_t=adj_t)


def check_converted(rank: int, root: str, graph: str, fanouts: list[int], batch_size: int, alphas: list[float]) -> dict:
    part = salientpp.load(root)
    data = source_under_ids_of(part, load_dataset(f"converted:{graph}"))
    one = NeighborSampler(data, fanouts)
    counts = {}
    for alpha in alphas:
        loader = NeighborLoader(
            part,
            fanouts,
            "train",
            batch_size=batch_size,
            shuffle=True,
            seed=3,
            replication_factor=alpha,
            device_rows=0,
        )
        remote = check_batches(loader, one, data, "sample_from_nodes")
        stats = loader.stats()
        assert stats.rows_remote == remote if alpha == 0 else stats.rows_remote < remote
        counts[alpha] = (len(loader), remote, stats.rows_remote)
    return counts


@pytest.mark.parametrize("method", ["metis", "kaminpar"])
def test_a_converted_graph_on_ranks_gives_the_batches_of_one_process(tmp_path, method):
    """The expected batches come from the files of the converted graph. The directory provides only original ids."""
    if method == "kaminpar":
        pytest.importorskip("kaminpar")
    graph = generate(tmp_path / "graph", num_vertices=3000, average_degree=8, num_features=6, train_fraction=0.1)
    salientpp.partition(load_dataset(f"converted:{graph}"), 2, tmp_path / "parts", FANOUTS, BATCH, method=method)
    for counts in distributed.run(check_converted, 2, str(tmp_path / "parts"), str(graph), FANOUTS, BATCH, [0.0, 0.3]):
        assert all(num_batches > 10 and remote > 0 for num_batches, remote, _ in counts.values())


LINK_OPTIONS = [
    {},
    {"neg_sampling": "binary"},
    {"neg_sampling": "triplet", "disjoint": True},
    {"time_attr": "time", "edge_label_time": "edge_time", "neg_sampling": "binary"},
    {"weight_attr": "weight", "edge_label": "edge_label_of", "neg_sampling": "binary"},
]


def check_links_of_one_type(rank: int, root: str) -> None:
    part = salientpp.load(root)
    data = whole(part)
    for options in LINK_OPTIONS:
        sampling = {name: options[name] for name in ("time_attr", "weight_attr", "disjoint") if name in options}
        one = NeighborSampler(data, FANOUTS, **sampling)
        for alpha in (0.0, 0.3):
            loader = LinkNeighborLoader(
                part, FANOUTS, batch_size=BATCH, shuffle=True, seed=3, replication_factor=alpha, **options
            )
            assert loader.engine.basis.source.seeds.number == int(
                (
                    (data.edge_index[1] >= part.book.range_of(rank)[0])
                    & (data.edge_index[1] < part.book.range_of(rank)[1])
                ).sum()
            )
            remote = check_batches(loader, one, data, "sample_from_edges", neg_sampling=loader.neg_sampling)
            assert loader.stats().rows_remote == remote if alpha == 0 else loader.stats().rows_remote <= remote


@pytest.mark.parametrize(("num_parts", "world", "topology"), FORMS)
def test_batches_of_links_equal_one_process(tmp_path, num_parts, world, topology):
    data = random_data(120, 400)
    generator = torch.Generator().manual_seed(1)
    data.time = torch.randint(20, (data.num_nodes,), generator=generator)
    data.edge_time = torch.randint(20, (data.num_edges,), generator=generator)
    data.weight = torch.rand(data.num_edges, generator=generator) + 0.1
    data.edge_label_of = torch.randint(3, (data.num_edges,), generator=generator)
    root = tmp_path / "parts"
    salientpp.partition(data, num_parts, root, FANOUTS, BATCH, topology=topology)
    distributed.run(check_links_of_one_type, world, str(root))


#: Labels of four edges inside parts 0, 0, 1, 1 and of one from part 0 to part 1, and their labels in PyG's batches with binary negatives.
SHIFTS = {
    "one rank has the only 0": ([0, 1, 1, 1, 1], [1, 2, 2, 2, 2]),
    "the other rank has it": ([2, 1, 0, 1, 1], [3, 2, 1, 2, 2]),
    "a negative label on one rank": ([0, 1, -1, 1, 1], [0, 1, -1, 1, 1]),
    "no 0": ([1, 2, 3, 1, 1], [1, 2, 3, 1, 1]),
    "fractions": ([0.5, 0.25, 0.75, 0.5, 1.0], [0.5, 0.25, 0.75, 0.5, 1.0]),
    "NaN": ([0.0, 1.0, float("nan"), 1.0, 1.0], [0.0, 1.0, float("nan"), 1.0, 1.0]),
}


def labelled_edges() -> Data:
    return Data(x=torch.arange(4.0).view(-1, 1), edge_index=torch.tensor([[0, 1, 2, 3, 0], [0, 1, 2, 3, 2]]))


def labels_of_batches(rank: int, root: str) -> dict[str, dict[int, float]]:
    """Returns the label of each edge of the directory, by case."""
    part, found = salientpp.load(root), {}
    for number, case in enumerate(SHIFTS):
        loader = LinkNeighborLoader(part, [1], edge_label=f"label{number}", neg_sampling="binary", batch_size=2)
        found[case] = {
            edge: label
            for batch in loader
            for edge, label in zip(batch.input_id.tolist(), batch.edge_label[: batch.input_id.numel()].tolist())
        }
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_labels_with_binary_negatives_are_raised_as_in_one_process(tmp_path, world):
    data = labelled_edges()
    for number, (labels, _) in enumerate(SHIFTS.values()):
        data[f"label{number}"] = torch.tensor(labels)
    salientpp.partition(data, 2, tmp_path / "parts", [1], 2, method=torch.tensor([0, 0, 1, 1]))
    part = salientpp.load(tmp_path / "parts", part_id=0)
    ranks = distributed.run(labels_of_batches, world, str(tmp_path / "parts"))
    for number, (case, (labels, expected)) in enumerate(SHIFTS.items()):
        found = {edge: label for of_rank in ranks for edge, label in of_rank[case].items()}
        assert sorted(found) == list(range(5))
        stored = part.edge_rows()[f"label{number}"]
        moved = dict(zip(labels, expected))
        for edge, label in found.items():
            want = moved.get(float(stored[edge]), float("nan"))
            assert label == want or (label != label and want != want), (case, edge, label, want)


@pytest.mark.parametrize("kind", [LinkNeighborLoader, PygLinkNeighborLoader])
@pytest.mark.parametrize("case", SHIFTS)
def test_labels_with_binary_negatives_are_raised_in_one_process(kind, case):
    if kind is PygLinkNeighborLoader:
        peer("pyg_lib")  # PyG's loader samples with it
    data, (labels, expected) = labelled_edges(), SHIFTS[case]
    loader = kind(data, [1], data.edge_index, torch.tensor(labels), neg_sampling="binary", batch_size=5)
    torch.testing.assert_close(next(iter(loader)).edge_label[:5], torch.tensor(expected), equal_nan=True)


def states_of_labels(rank: int, root: str, states: list[dict] | None) -> dict:
    part = salientpp.load(root)
    loader = LinkNeighborLoader(
        part, [1], edge_label="cls", neg_sampling="binary", batch_size=1, seed=0, logical_ranks=2, uneven="exact"
    )
    if states is not None:
        loader.load_state_dict(states[0])
    next(iter(loader))
    return loader.state_dict()


def test_a_state_with_labels_may_be_loaded_by_another_number_of_ranks(tmp_path):
    data = labelled_edges()
    data.cls = torch.tensor([0, 1, 1, 1, 1])
    salientpp.partition(data, 2, tmp_path / "parts", [1], 2, method=torch.tensor([0, 0, 1, 1]))
    states = distributed.run(states_of_labels, 2, str(tmp_path / "parts"), None)
    distributed.run(states_of_labels, 1, str(tmp_path / "parts"), states)


def other_negatives(rank: int, root: str) -> str:
    try:
        LinkNeighborLoader(salientpp.load(root), [1], neg_sampling=["binary", "triplet"][rank], batch_size=1)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_must_agree_on_the_kind_of_negatives(tmp_path):
    salientpp.partition(labelled_edges(), 2, tmp_path / "parts", [1], 2, method=torch.tensor([0, 0, 1, 1]))
    first, second = distributed.run(other_negatives, 2, str(tmp_path / "parts"))
    assert first == second
    assert first.startswith("all ranks must have the same neg_sampling, got ['binary', 1] on rank 0 and ['triplet', 1]")


# --- several types of vertices -----------------------------------------------------------------------------


TYPED_OPTIONS = [
    {},
    {"seed_type": "author", "replace": True},
    {"time_attr": "time"},
    {"time_attr": "edge_time", "of_edges": True, "temporal_strategy": "last"},
    {"weight_attr": "weight"},
    {"seed_type": "venue", "disjoint": True},
    {"subgraph_type": "induced"},
    {"subgraph_type": "bidirectional"},
]


def check_types(rank: int, root: str, alphas: list[float]) -> None:
    part = salientpp.load(root)
    data = whole(part)
    for options in TYPED_OPTIONS:
        options = dict(options)
        type_ = options.pop("seed_type", "paper")
        given: dict[str, Any] = {}
        if options.pop("of_edges", False):
            given["input_time"] = torch.arange(part.split("train", type_=type_).numel()) % 10
        one = NeighborSampler(data, TYPED_FANOUTS, **options)
        for alpha in alphas:
            loader = NeighborLoader(
                part, TYPED_FANOUTS, (type_, "train"), batch_size=BATCH, shuffle=True, seed=3, uneven="exact", replication_factor=alpha, **options, **given
            )  # fmt: skip
            remote = check_batches(loader, one, data, "sample_from_nodes")
            stats = loader.stats()
            assert stats.rows_remote == sum(of_type["remote"] for of_type in stats.by_type.values())
            assert stats.rows_remote == remote if alpha == 0 else stats.rows_remote <= remote
            widths = {
                type_: rows["x"].nbytes // max(1, len(rows["x"])) for type_, rows in part.rows().items() if "x" in rows
            }
            for name, of_type in stats.by_type.items():
                assert of_type["bytes_received"] == of_type["remote"] * widths.get(name, 0)
            check_seed_rows(loader, data)


def check_seed_rows(loader: Any, data: Any) -> None:
    """Checks that attributes that are not gathered come with the seeds, and with no other type."""
    type_ = loader.engine.basis.source.seeds.inputs.input_type
    batch = next(iter(loader), None)
    if batch is None:  # a rank without seeds has no batch
        return
    seeds = batch[type_].n_id[: batch[type_].batch_size]
    for name in loader.data.rows()[type_]:
        if name not in ("x", "time"):
            assert torch.equal(batch[type_][name], data[type_][name][seeds])
    for other in loader.data.node_types:
        if other != type_:
            assert "y" not in batch[other]


@pytest.mark.parametrize(
    ("num_parts", "world", "replicate"),
    [
        (2, 2, ("venue", "paper")),
        (2, 4, ("venue",)),
        (4, 3, ()),
        *rare((1, 1, ()), (4, 4, ()), (4, 4, ("venue", "paper")), (5, 2, ("venue",))),
    ],
)
def test_batches_of_several_types_equal_one_process(tmp_path, num_parts, world, replicate):
    root = tmp_path / "parts"
    salientpp.partition(
        typed_data(), num_parts, root, TYPED_FANOUTS, BATCH, seeds=("paper", "train"), replicate=replicate
    )
    distributed.run(check_types, world, str(root), [0.0, 0.3])


def check_tiers_and_states(rank: int, root: str) -> None:
    """Checks that tiers, depth and workers change no batch, that a cache may come from another loader, and that a state continues where it was saved."""
    part = salientpp.load(root)
    data = whole(part)
    one = NeighborSampler(data, TYPED_FANOUTS)
    options = dict(input_nodes=("paper", "train"), batch_size=4, shuffle=True, seed=3)
    cache = None
    for more in [
        {"replication_factor": 0.4, "device_rows": {"part": 0.5, "cache": 200}, "depth": 1},
        {
            "replication_factor": 0.4,
            "policy": "degree",
            "device_rows": {"zero_copy": True},
            "depth": 3,
            "num_workers": 2,
        },
        {"replication_factor": 9.0, "policy": "random"},
        {"cache": True, "columns": ["x"]},
        {"pad": "bucket"},
    ]:
        if "cache" in more:
            more = {**more, "cache": cache}
        loader = NeighborLoader(part, TYPED_FANOUTS, **options, **more)
        if more.get("pad"):
            bare = NeighborLoader(part, TYPED_FANOUTS, **options)
            for padded, batch in zip(loader, bare, strict=True):
                for type_ in part.node_types:
                    assert torch.equal(padded[type_].n_id[padded[type_].node_mask], batch[type_].n_id)
            continue
        check_batches(loader, one, data, "sample_from_nodes")
        stats = loader.stats()
        if "cache" in more.get("device_rows", {}):
            cache = loader.cache
            assert stats.rows_device > 0 and any(len(each.device_members) for each in cache.by_type.values())
            assert sum(len(of_type) for of_type in cache.by_type.values()) == len(cache) > 0
            budget = cache_bytes(
                0.4, {t: b for t, b in part.row_books.items() if t in cache.by_type}, {"paper": 8, "author": 24}
            )
            assert sum(rows.nbytes for c in cache.by_type.values() for rows in c.rows.values()) <= budget
        if more.get("replication_factor") == 9.0:
            assert stats.rows_remote == 0 < stats.rows_cache
    loader = NeighborLoader(part, TYPED_FANOUTS, **options)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch["paper"].n_id.tolist() for batch in batches]
    resumed = NeighborLoader(part, TYPED_FANOUTS, **options)
    resumed.load_state_dict(state)
    assert [batch["paper"].n_id.tolist() for batch in resumed] == rest
    other = NeighborLoader(part, TYPED_FANOUTS, weight_attr="weight", **options)
    with pytest.raises(ValueError, match="weight_attr: expected 'weight', got None"):
        other.load_state_dict(state)


@pytest.mark.parametrize("num_parts", [*rare(2), 3])
def test_tiers_caches_and_states_over_types(tmp_path, num_parts):
    root = tmp_path / "parts"
    salientpp.partition(typed_data(), num_parts, root, TYPED_FANOUTS, BATCH, seeds=("paper", "train"), replicate=())
    distributed.run(check_tiers_and_states, 2, str(root))


def check_links_of_types(rank: int, root: str) -> None:
    part = salientpp.load(root)
    data = whole(part)
    writes = ("author", "writes", "paper")
    for options in [
        {"neg_sampling": "binary"},
        {"neg_sampling": "triplet", "time_attr": "time", "edge_label_time": "edge_time"},
        {"disjoint": True},
    ]:
        sampling = {name: options[name] for name in ("time_attr", "disjoint") if name in options}
        one = NeighborSampler(data, TYPED_FANOUTS, **sampling)
        pairs = torch.randint(6, (2, 20))
        for seeds in (writes, (writes, "train"), (writes, pairs), (("author", "likes", "paper"), pairs)):
            if isinstance(seeds[1], Tensor) and "edge_label_time" in options:
                continue  # only the graph's own edges have attributes
            loader = LinkNeighborLoader(
                part, TYPED_FANOUTS, seeds, batch_size=BATCH, shuffle=True, seed=3, replication_factor=0.2, uneven="exact", **options
            )  # fmt: skip
            check_batches(loader, one, data, "sample_from_edges", neg_sampling=loader.neg_sampling)


@pytest.mark.parametrize(("num_parts", "world"), [*rare((1, 1), (2, 2)), (3, 2)])
def test_batches_of_links_between_types_equal_one_process(tmp_path, num_parts, world):
    data, root = typed_data(), tmp_path / "parts"
    writes = ("author", "writes", "paper")
    split = {writes: {"train": torch.arange(0, data[writes].num_edges, 3)}}
    salientpp.partition(
        data, num_parts, root, TYPED_FANOUTS, BATCH, seeds=("paper", "train"), edge_split=split, replicate=()
    )
    distributed.run(check_links_of_types, world, str(root))


def count_collectives(rank: int, root: str, gather: list[str], type_: str) -> float:
    loader = NeighborLoader(
        salientpp.load(root), TYPED_FANOUTS, (type_, "train"), batch_size=4, seed=0, columns=gather, uneven="wrap"
    )
    comm, calls = loader.engine.basis.comm, []
    original = comm.all_to_all
    comm.all_to_all = lambda *args: (calls.append(1), original(*args))[1]
    batches = sum(1 for _ in loader)
    loader.reset_stats()
    return len(calls) / batches


def test_types_and_attributes_add_no_collectives(tmp_path):
    root = tmp_path / "parts"
    salientpp.partition(typed_data(), 2, root, TYPED_FANOUTS, BATCH, seeds=("paper", "train"), replicate=())
    few = distributed.run(count_collectives, 2, str(root), [("author", "x")], "paper")
    many = distributed.run(count_collectives, 2, str(root), ["x", "time", "y"], "paper")
    assert few == many


def check_gathered(rank: int, root: str) -> None:
    part = salientpp.load(root)
    data = whole(part)
    loader = NeighborLoader(
        part,
        TYPED_FANOUTS,
        ("paper", "train"),
        batch_size=4,
        seed=0,
        columns=["x", "time", ("paper", "y")],
        replication_factor=0.2,
    )
    for batch in loader:
        for type_ in part.node_types:
            for name in ("x", "time", "y"):
                if name in batch[type_]:
                    assert torch.equal(batch[type_][name], data[type_][name][batch[type_].n_id])
        assert "time" in batch["venue"] and len(batch["paper"].y) == batch["paper"].num_nodes


def test_attributes_of_every_type_may_be_gathered(tmp_path):
    root = tmp_path / "parts"
    salientpp.partition(typed_data(), 2, root, TYPED_FANOUTS, BATCH, seeds=("paper", "train"), replicate=())
    distributed.run(check_gathered, 2, str(root))


# --- counted rows equal travelling rows --------------------------------------------------------------------


def live_rows_of_each(rank: int, root: str, cases: list[tuple[bool, int, float, dict[str, Any]]]) -> list[dict]:
    return [live_rows(rank, root, *case) for case in cases]


def live_rows(rank: int, root: str, links: bool, epochs: int, alpha: float, given: dict[str, Any]) -> dict[Any, int]:
    kind = LinkNeighborLoader if links else NeighborLoader
    loader = kind(
        salientpp.load(root), FANOUTS, batch_size=BATCH, shuffle=True, seed=5, replication_factor=alpha, **given
    )
    loader.reset_stats()
    for _ in range(epochs):
        for _ in loader:
            pass
    return {type_: of_type["remote"] for type_, of_type in loader.stats().by_type.items()}


@pytest.mark.parametrize(
    "links, seeds, sampling",
    [
        (False, "train", {"disjoint": True}),
        (False, "train", {"weight_attr": "weight"}),
        (False, "train", {"time_attr": "time", "temporal_strategy": "last"}),
        (True, "all", {"neg_sampling": "triplet"}),
        (True, "all", {"time_attr": "time", "edge_label_time": "edge_time", "neg_sampling": "binary"}),
    ],
)
def test_the_analysis_counts_the_rows_that_a_run_fetches(tmp_path, links, seeds, sampling):
    root = tmp_path / "parts"
    salientpp.partition(homogeneous(), 2, root, FANOUTS, BATCH)
    analysis = analyze(
        salientpp.load(root),
        Batches(num_neighbors=FANOUTS, batch_size=BATCH, epochs=2, seeds=seeds, link=links, seed=5, **sampling),
        Ways(replication_factors=[0, 0.25], policies=["vip"]),
    )
    given = {"edge_label_index" if links else "input_nodes": seeds, **sampling}
    volumes = list(analysis.of(way="cache"))
    cases = [(links, 2, volume.replication_factor, given) for volume in volumes]
    live = distributed.run(live_rows_of_each, 2, str(root), cases)
    for volume, of_ranks in zip(volumes, zip(*live), strict=True):
        assert [of_rank[None] for of_rank in of_ranks] == [2 * rows for rows in volume.remote_rows_per_rank]
        assert volume.remote_rows_per_epoch > 0


def live_typed_rows_of_each(
    rank: int, root: str, alphas: list[float], links: bool, seeds: Any, given: dict[str, Any]
) -> list[dict[str, int]]:
    return [live_typed_rows(rank, root, alpha, links, seeds, given) for alpha in alphas]


def live_typed_rows(
    rank: int, root: str, alpha: float, links: bool, seeds: Any, given: dict[str, Any]
) -> dict[str, int]:
    kind = LinkNeighborLoader if links else NeighborLoader
    loader = kind(
        salientpp.load(root),
        TYPED_FANOUTS,
        seeds,
        batch_size=BATCH,
        shuffle=True,
        seed=5,
        replication_factor=alpha,
        **given,
    )
    for _ in loader:
        pass
    loader.engine.close()
    return {type_: of_type["remote"] for type_, of_type in loader.stats().by_type.items()}


@pytest.mark.parametrize(
    "links, seeds, given",
    [
        (False, ("paper", "train"), {}),
        (False, ("author", "train"), {"weight_attr": "weight"}),
        (False, ("paper", "train"), {"time_attr": "time"}),
        (True, ("author", "writes", "paper"), {"neg_sampling": "binary"}),
    ],
)
def test_the_analysis_counts_the_rows_of_every_type_that_a_run_fetches(tmp_path, links, seeds, given):
    root = tmp_path / "parts"
    salientpp.partition(typed_data(), 2, root, TYPED_FANOUTS, BATCH, seeds=("paper", "train"), replicate=("venue",))
    analysis = analyze(
        salientpp.load(root),
        Batches(num_neighbors=TYPED_FANOUTS, batch_size=BATCH, epochs=1, seeds=seeds, link=links, seed=5, **given),
        Ways(replication_factors=[0, 0.25], policies=["vip", "degree"]),
    )
    num_bytes, alphas = [], [0, 0.25]
    of_ranks = distributed.run(live_typed_rows_of_each, 2, str(root), alphas, links, seeds, given)
    for alpha, live in zip(alphas, zip(*of_ranks), strict=True):
        vip = analysis.of(policy="vip", replication_factor=alpha)
        for volume in vip:
            assert tuple(of_rank[volume.vertex_type] for of_rank in live) == volume.remote_rows_per_rank
        assert [volume.vertex_type for volume in vip] == ["paper", "author"]
        num_bytes.append(sum(volume.remote_bytes_per_epoch for volume in vip))
    assert 0 < num_bytes[1] < num_bytes[0]


WRITES = ("author", "writes", "paper")


# --- mistakes ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def typed_part(tmp_path_factory) -> salientpp.PartitionedGraph:
    data = typed_data()
    data["empty"].x = torch.empty(0, 3)
    data["empty", "prints", "paper"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    data["paper", "cites", "paper"].bad = -torch.ones(data["paper", "cites", "paper"].num_edges)
    data["paper", "by", "author"].bad = torch.full((data["paper", "by", "author"].num_edges,), torch.nan)
    root = tmp_path_factory.mktemp("typed") / "parts"
    return salientpp.partition(data, 1, root, [3, 2], BATCH, seeds=("paper", "train"), replicate=())


@pytest.mark.parametrize(
    ("kind", "given", "error", "text"),
    [
        (NeighborLoader, {"input_nodes": "train"}, ValueError, "must be of a node type of the data (paper, author, venue, empty), got 'train'"),
        (NeighborLoader, {"input_nodes": ("paper", "no")}, ValueError, "has the splits 'train', 'all' of 'paper', got 'no'"),
        (NeighborLoader, {"input_nodes": ("paper", [999])}, ValueError, "must be in [0, 60), got 999"),
        (NeighborLoader, {"columns": [("venue", "x")]}, ValueError, "columns must name node attributes of"),
        (NeighborLoader, {"columns": ["nothing"]}, ValueError, "('paper', 'y')"),
        (NeighborLoader, {"weight_attr": "bad"}, ValueError, "must be finite and >= 0, got"),
        (NeighborLoader, {"weight_attr": "no"}, ValueError, "no edges have an attribute 'no'"),
        (NeighborLoader, {"time_attr": "no"}, ValueError, "The time attribute 'no' is neither"),
        (NeighborLoader, {"input_time": torch.arange(3)}, ValueError, "'input_time' is set while 'time_attr' is not set"),
        (NeighborLoader, {"time_attr": "time", "input_time": torch.arange(3)}, ValueError, "one entry per seed, expected shape"),
        (NeighborLoader, {"temporal_strategy": "last"}, ValueError, "needs times; pass time_attr too"),
        (NeighborLoader, {"policy": "halo", "replication_factor": 0.1}, None, ""),
        (NeighborLoader, {"neighbor_sampler": object()}, ValueError, "neighbor_sampler= other than salientpp.NeighborSampler is for data in one process"),
        (NeighborLoader, {"custom_cls": Data}, ValueError, "custom_cls is for a pair of FeatureStore and GraphStore"),
        (NeighborLoader, {"num_neighbors": {("paper", "cites", "paper"): [-2, 1]}}, ValueError, "edge type"),
        (LinkNeighborLoader, {}, ValueError, "edge_label_index of a graph with several types must be an edge type"),
        (LinkNeighborLoader, {"edge_label_index": ("a", "b", "c")}, ValueError, "got ('a', 'b', 'c')"),
        (LinkNeighborLoader, {"edge_label_index": (("author", "likes", "paper"), "all")}, ValueError, "must be an edge type"),
        (LinkNeighborLoader, {"edge_label_index": (("a", "likes", "paper"), torch.tensor([[0], [0]]))}, ValueError, "must join node types of the data"),
        (LinkNeighborLoader, {"edge_label_index": (WRITES, "no")}, ValueError, "has the splits 'all'"),
        (LinkNeighborLoader, {"edge_label_index": WRITES, "edge_label": "no"}, ValueError, "the edges have the attributes"),
        (LinkNeighborLoader, {"edge_label_index": (WRITES, torch.tensor([[99], [0]]))}, ValueError, "edge_label_index[0, 0] must be in [0, 35), got 99"),
        (LinkNeighborLoader, {"edge_label_index": (WRITES, torch.tensor([[9], [0]])), "edge_label": "weight"}, ValueError, "only the graph's own"),
        (LinkNeighborLoader, {"edge_label_index": WRITES, "time_attr": "time"}, ValueError, "'edge_label_time' is not set while 'time_attr' is set"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_type_and_relation(typed_part, kind, given, error, text):
    given = {"num_neighbors": [3, 2], **given}
    if kind is NeighborLoader:
        given = {"input_nodes": ("paper", "train"), **given}
    if error is None:
        kind(typed_part, **given)
        return
    with pytest.raises(error, match=re.escape(text)):
        kind(typed_part, **given)


def test_types_without_vertices_and_relations_without_edges_are_in_every_batch(typed_part):
    loader = NeighborLoader(typed_part, [3, 2], ("paper", "train"), batch_size=4)
    for batch in loader:
        assert batch["empty"].x.shape == (0, 3) and batch["empty"].num_nodes == 0
        assert batch["empty", "prints", "paper"].edge_index.shape == (2, 0)


def policy_of_types(rank: int, root: str) -> str:
    part = salientpp.load(root)
    try:
        NeighborLoader(part, TYPED_FANOUTS, ("paper", "train"), replication_factor=0.1, policy="halo")
    except ValueError as error:
        return str(error)
    return ""


def test_an_unsupported_policy_over_types_is_refused_on_every_rank(tmp_path):
    root = tmp_path / "parts"
    salientpp.partition(typed_data(), 2, root, TYPED_FANOUTS, BATCH, seeds=("paper", "train"), replicate=())
    for text in distributed.run(policy_of_types, 2, str(root)):
        assert "policy must be one of degree, random, vip, vip-hop for several vertex types" in text


def test_wide_rows_are_cached_only_if_needed_more_often_than_narrow_rows():
    books = {"wide": PartitionBook(torch.tensor([0, 2, 6])), "narrow": PartitionBook(torch.tensor([0, 2, 6]))}
    scores = {"wide": torch.tensor([9.0, 9, 4, 3, 0, 2]), "narrow": torch.tensor([9.0, 9, 1, 0.5, 0.2, 0])}
    widths = {"wide": 40, "narrow": 8}
    for alpha, wide, narrow in [
        (0.0, [], []),
        (0.1, [], [2]),
        (0.4, [2], [2, 3]),  # wide row 3 is needed more, but does not fit
        (0.5, [2], [2, 3, 4]),
        (0.7, [2, 3], [2, 3]),
        (9, [2, 3, 5], [2, 3, 4]),
    ]:
        chosen = plan_caches(scores, books, widths, 0, alpha)
        assert chosen["wide"].tolist() == wide and chosen["narrow"].tolist() == narrow, alpha
    with pytest.raises(ValueError, match="got nan at 'narrow' vertex 1"):
        plan_caches(
            {**scores, "narrow": torch.full((6,), torch.nan).index_fill_(0, torch.tensor([0]), 1)}, books, widths, 0, 1
        )


def test_one_type_is_planned_like_an_untyped_graph():
    generator = torch.Generator().manual_seed(0)
    scores, book = torch.rand(50, generator=generator), PartitionBook(torch.tensor([0, 20, 50]))
    for alpha in (0, 0.1, 0.29, 1, 5):
        assert torch.equal(
            plan_caches({None: scores}, {None: book}, {None: 12}, 1, alpha)[None], plan_cache(scores, book, 1, alpha)
        )
