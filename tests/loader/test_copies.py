"""Laws of copies: a copied or pickled object continues as the original would, and an object that cannot be copied says so."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data, random_hetero
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import salientpp
from salientpp import Graph, LinkNeighborLoader, NeighborLoader, NeighborSampler
from salientpp.ranks.partition_book import PartitionBook


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
ALL_COPIES = pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])


def stores() -> tuple[MyFeatureStore, MyGraphStore]:
    data = random_data()
    features, graph = MyFeatureStore(), MyGraphStore()
    features.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    graph.put_edge_index(edge_index=data.edge_index, edge_type=None, layout="coo", size=(400, 400))
    return features, graph


def same(ours: Any, others: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return ours.dtype == others.dtype and torch.equal(ours, others)
    if isinstance(ours, dict):
        return ours.keys() == others.keys() and all(same(ours[key], others[key]) for key in ours)
    return ours == others


def same_batch(a: Data | HeteroData, b: Data | HeteroData) -> bool:
    return same(a.to_dict(), b.to_dict())


LOADERS: dict[str, Callable[..., Any]] = {
    "data": lambda **options: NeighborLoader(random_data(), [4, 2], batch_size=40, shuffle=True, **options),
    "device rows": lambda **options: NeighborLoader(
        random_data(), [4, 2], batch_size=40, shuffle=True, device_rows=0.3, **options
    ),
    "types": lambda **options: NeighborLoader(
        random_hetero(), [3, 2], input_nodes="paper", batch_size=9, shuffle=True, **options
    ),
    "stores": lambda **options: NeighborLoader(
        stores(), [4, 2], input_nodes=torch.arange(100), batch_size=40, shuffle=True, **options
    ),
    "links": lambda **options: LinkNeighborLoader(
        random_data(), [3], batch_size=900, neg_sampling="triplet", shuffle=True, **options
    ),
    "generator": lambda **options: NeighborLoader(
        random_data(),
        [4],
        batch_size=40,
        shuffle=True,
        generator=torch.Generator().manual_seed(4),
        worker_init_fn=print,
        **options,
    ),
}


@ALL_COPIES
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_copy_of_a_loader_continues_as_the_original(kind, num_workers, copied):
    loader = LOADERS[kind](num_workers=num_workers)
    before = copied(loader)
    iterator = iter(loader)
    given = [next(iterator)]
    during = copied(loader)
    assert during.state_dict() == loader.state_dict(), "also in the middle of an epoch"
    given += iterator
    assert all(map(same_batch, given, before)) and len(given) == len(before) == len(loader)
    second = list(loader)
    for other in (before, during):
        batches = list(other)
        assert len(batches) == len(second) and all(map(same_batch, batches, second))
    assert (before.stats().batches, during.stats().batches) == (2 * len(loader), 1 + len(loader))
    assert before.engine.producer.stages.submit.__self__ is not loader.engine.producer.stages.submit.__self__
    called = [each([1, 2, 3]) for each in (loader, before, during)]
    assert same_batch(called[0], called[1]) and same_batch(called[0], called[2])


@ALL_COPIES
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", ["data", "device rows"])
def test_a_copy_gives_what_the_user_wrote_to_the_data_before(kind, in_place, copied):
    loader = LOADERS[kind]()
    old = loader.data.x.clone()
    next(iter(loader))
    if in_place:
        loader.data.x.add_(1)
    else:
        loader.data.x = loader.data.x + 1
    for other in (copied(loader), loader):
        for batch in other:
            assert torch.equal(batch.x, old[batch.n_id] + 1)


@ALL_COPIES
def test_a_copy_forgets_an_attribute_that_was_written_to_before_and_deleted_after(copied):
    loader = LOADERS["data"]()
    loader.data.x = loader.data.x + 1  # the loader has taken rows from the tensor before
    other = copied(loader)
    del other.data.x
    assert all("x" not in batch for batch in other)


@ALL_COPIES
@pytest.mark.parametrize("options", [{}, {"pad": "bucket"}], ids=str)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_copy_and_its_original_do_not_change_each_other(kind, options, copied):
    if options and kind == "stores":
        pytest.skip("stores cannot be padded")
    loader = LOADERS[kind](num_workers=2, seed=1, **options)
    want = [list(loader) for _ in range(3)]
    loader.reset_stats()
    other = copied(loader)
    for one, two in ((loader, other), (other, loader)):
        one.set_epoch(1), two.set_epoch(0)
        assert (one.state_dict()["epoch"], two.state_dict()["epoch"]) == (1, 0)
        one.sampler.set_epoch(2)
        assert (one.state_dict()["epoch"], two.state_dict()["epoch"]) == (2, 0)
        assert one.sampler is not two.sampler and one.batch_sampler.sampler is one.sampler
        pairs = itertools.zip_longest(one, two)  # both epochs at once
        for (ours, others), second, first in zip(pairs, want[2], want[0], strict=True):
            assert same_batch(ours, second) and same_batch(others, first)
    number = 2 * len(loader)
    assert (loader.stats().batches, other.stats().batches) == (number, number)
    other.reset_stats()
    assert loader.stats().batches == number
    del one, two, pairs, other
    gc.collect()
    loader.sampler.set_epoch(1)
    assert all(map(same_batch, loader, want[1]))


def test_a_shallow_copy_shares_tensors_and_the_objects_of_the_user():
    data, sampler = random_data(), NeighborSampler(random_data(), [2])
    loader = NeighborLoader(data, [2], transform=lambda batch: batch, neighbor_sampler=sampler)
    other = copy.copy(loader)
    assert other.data is data and other.transform is loader.transform and other.node_sampler is sampler
    ours, theirs = (each.engine.producer.fetch.tiers[None].home.rows["x"] for each in (loader, other))
    assert ours.tensor is theirs.tensor
    data.x = data.x + 1
    assert torch.equal(next(iter(other)).x, next(iter(loader)).x)


def test_a_copied_sampler_without_its_loader_says_so():
    loader = LOADERS["data"]()
    for copied in (copy.copy, copy.deepcopy, pickled):
        with pytest.raises(ReferenceError, match="has been deleted, or this is a copy of a sampler without its loader"):
            copied(loader.sampler).set_epoch(1)
    loader.sampler.set_epoch(1)


@COPIES
def test_a_copy_continues_from_a_loaded_state(copied):
    loader = LOADERS["data"](seed=5)
    iterator = iter(loader)
    next(iterator)
    other = LOADERS["data"](seed=5)
    other.load_state_dict(loader.state_dict())
    rest = list(iterator)
    assert all(map(same_batch, copied(other), rest)) and len(rest) == len(loader) - 1


def _iterate(loader: Any, queue: Any) -> None:
    queue.put([batch.n_id.tolist() for batch in loader])


def test_a_loader_can_be_given_to_a_spawned_process():
    context = distributed.forks()  # it pickles the loader as "spawn" does, but the process has imported torch
    queue = context.Queue()
    loader = LOADERS["data"](num_workers=2)
    process = context.Process(target=_iterate, args=(loader, queue))
    process.start()
    assert queue.get(timeout=120) == [batch.n_id.tolist() for batch in loader]
    process.join(120)
    assert process.exitcode == 0


@COPIES
def test_copying_an_epoch_raises_a_clear_error(copied):
    with pytest.raises(TypeError, match="an epoch in progress cannot be copied or pickled; copy the loader"):
        copied(iter(LOADERS["data"]()))


@COPIES
def test_parts_of_a_loader_can_be_copied(tmp_path, copied):
    data = random_data()
    graph = Graph.from_data(data)
    graph.transpose()
    assert all(map(torch.equal, (copied(graph).indptr, copied(graph).indices), (graph.indptr, graph.indices)))
    for source, kind in ((data, None), (random_hetero(), "paper")):
        sampler = NeighborSampler(source, [3, 2])
        inputs = NodeSamplerInput(None, torch.arange(20), None, kind)
        assert str(copied(sampler).sample_from_nodes(inputs, key=7)) == str(sampler.sample_from_nodes(inputs, key=7))
    assert torch.equal(copied(PartitionBook.trivial(9)).offsets, torch.tensor([0, 9]))
    cache = LOADERS["data"]().cache
    assert len(copied(cache)) == len(cache)
    part = salientpp.partition(data, 2, tmp_path / "parts", [4, 3], 8)
    part = salientpp.load(tmp_path / "parts", part_id=1)
    part.graph.num_edges, part.node_rows()  # opens files, which must not be copied along
    assert len(pickle.dumps(part)) < 20_000 < part.graph.nbytes
    other = copied(part)
    assert (other.root, other.part_id, other.fingerprint) == (part.root, 1, part.fingerprint)
    assert torch.equal(other.node_rows()["x"], part.node_rows()["x"]) and torch.equal(
        other.graph.indices, part.graph.indices
    )


@COPIES
def test_copying_a_loader_of_a_partitioned_graph_raises_a_clear_error(tmp_path, copied):
    salientpp.partition(random_data(), 1, tmp_path / "parts", [4, 3], 8)
    loader = NeighborLoader(salientpp.load(tmp_path / "parts"), [4, 3], "train", batch_size=8)
    with pytest.raises(
        TypeError,
        match=r"a loader of a partitioned graph cannot be copied or pickled.*salientpp.load\(root\).*state_dict\(\)",
    ):
        copied(loader)


def _copy_on_a_rank(rank: int, root: str) -> str:
    loader = NeighborLoader(salientpp.load(root), [4, 3], "train", batch_size=8)
    with pytest.raises(TypeError, match="cannot be copied or pickled") as caught:
        copy.deepcopy(loader)
    list(loader)
    return str(caught.value)


def test_copying_a_loader_on_a_rank_raises_a_clear_error(tmp_path):
    salientpp.partition(random_data(), 2, tmp_path / "parts", [4, 3], 8)
    assert len(set(distributed.run(_copy_on_a_rank, 2, str(tmp_path / "parts")))) == 1


def random_copies(number: int, seed: int) -> None:
    """Makes copies of copies at random points of an epoch. Each continues as the one that it was made from."""
    for case in range(number):
        rng = random.Random(f"{seed} {case}")
        kind = rng.choice([*LOADERS])
        loader = LOADERS[kind](num_workers=rng.randrange(3), depth=rng.choice([1, 3, 10]), seed=rng.randrange(100))
        for _ in range(rng.randrange(1, 4)):
            what = f"seed {seed}, case {case}: {kind}"
            epoch = itertools.islice(iter(loader), rng.randrange(4)) if rng.random() < 0.7 else []
            given = sum(1 for _ in epoch)
            other = rng.choice([copy.deepcopy, pickled])(loader)
            assert other.state_dict() == loader.state_dict(), what
            if rng.random() < 0.3:  # a state holds the position in the epoch
                other.load_state_dict(loader.state_dict())
                loader.load_state_dict(loader.state_dict())
            assert all(same_batch(a, b) for a, b in zip(other, loader, strict=True)), (what, given)
            loader = other


def test_copies_of_copies_at_random_points_continue_as_the_original():
    random_copies(10, seed=2)
