"""Laws of padded batches: the same batches behind masks, the same results at the seeds, and few shapes."""

from __future__ import annotations

import copy
import pickle

import distributed
import pytest
import torch
import torch_geometric.nn as nn
from padded import (
    DATA,
    MODELS,
    OPTIONS,
    N,
    assert_equal,
    assert_same_but_for_padding,
    assert_same_training,
    shape,
    typed,
)
from torch_geometric.data import Data

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.loader.batch_sizes import Classes, rounded_up


def both(data, input_nodes=None, **options):
    """Makes loaders of the same batches, without padding and with it."""
    return [NeighborLoader(data, input_nodes=input_nodes, pad=pad, **(OPTIONS | options)) for pad in (None, "bucket")]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_behind_the_masks_equal_those_without_padding(workers):
    bare, full = both(DATA, num_workers=workers)
    for _ in range(2):
        for ours, theirs in zip(bare, full, strict=True):
            assert_same_but_for_padding(ours, theirs)
            assert theirs.num_sampled_nodes == ours.num_sampled_nodes
            assert theirs.batch_size == ours.batch_size and theirs.name == "whole" and theirs.scale.shape == (5,)
            assert theirs.num_nodes == theirs.x.size(0) == theirs.node_mask.numel() > ours.num_nodes
            assert theirs.validate()


@pytest.mark.parametrize("seed", range(3))
def test_an_epoch_has_few_shapes_also_with_a_smaller_last_batch(seed):
    bare, full = both(DATA, seed=seed, batch_size=100, input_nodes=torch.arange(2950))
    sizes = [{shape(batch) for batch in loader} for loader in (bare, full)]
    assert len(sizes[0]) == 30
    assert len(sizes[1]) <= 4
    largest = max(batch.num_edges for batch in bare)
    assert max(batch.num_edges for batch in full) <= 1.3 * largest


def test_every_type_is_padded_also_one_without_vertices():
    bare, full = both(typed(), input_nodes="paper", batch_size=32)
    shapes = set()
    for ours, theirs in zip(bare, full, strict=True):
        assert_same_but_for_padding(ours, theirs)
        assert theirs["lonely"].node_mask.numel() > 0 and not theirs["lonely"].node_mask.any()
        assert theirs["paper"].batch_size == ours["paper"].batch_size
        shapes.add(shape(theirs))
    assert len(shapes) <= 4


@pytest.mark.parametrize("name", MODELS)
def test_outputs_at_the_seeds_and_gradients_equal_those_without_padding(name):
    bare, full = both(DATA)
    assert_same_training(MODELS[name], bare, full, 3)


def compilations(loader: NeighborLoader, plain: bool = False) -> int:
    """Counts the compilations of a GraphSAGE over an epoch. ``plain``: without the marks that a loader without padding sets on its tensors."""
    torch.compiler.reset()
    model = nn.GraphSAGE(DATA.num_features, 8, 2, 4)
    count = 0

    def backend(module, inputs):
        nonlocal count
        count += 1
        return module.forward

    with torch._dynamo.config.patch(recompile_limit=64):
        compiled = torch.compile(model, dynamic=False, backend=backend)
        for batch in loader:
            compiled(*(value.clone() if plain else value for value in (batch.x, batch.edge_index)))
    torch.compiler.reset()
    return count


def test_a_compiled_model_is_compiled_once_for_each_class():
    bare, full = both(DATA, batch_size=300)
    assert compilations(full) == len({shape(batch) for batch in full}) <= 4
    assert compilations(bare, plain=True) > 4  # shows that compilations are counted


def test_resumed_and_copied_loaders_give_the_same_padded_batches():
    loader = both(DATA)[1]
    epoch = iter(loader)
    for _ in range(5):
        next(epoch)
    state, copies = loader.state_dict(), [pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)]
    rest = list(epoch)
    resumed = both(DATA)[1]
    resumed.load_state_dict(state)
    for batch, again in zip(rest, resumed, strict=True):
        assert_equal(batch, again)
    following = list(loader)
    for other in copies:
        for batch, again in zip(following, other, strict=True):
            assert_equal(batch, again)


def test_the_transform_sees_the_padding_also_of_a_single_batch():
    seen = []
    loader = NeighborLoader(
        DATA, pad="bucket", transform=lambda batch: seen.append(batch.node_mask) or batch, **OPTIONS
    )
    next(iter(loader)), loader([1, 2, 3])
    assert len(seen) == 2 and not any(mask.all() for mask in seen)


def test_padded_batches_share_no_memory():
    batches = list(both(DATA, batch_size=600)[1])
    n_id = [batch.n_id.clone() for batch in batches]
    assert all(torch.equal(batch.x[batch.node_mask], DATA.x[ids[ids >= 0]]) for batch, ids in zip(batches, n_id))


def test_a_learnable_attribute_keeps_its_gradient():
    data = Data(x=torch.randn(50, 4, requires_grad=True), edge_index=torch.randint(50, (2, 400)))
    for batch in NeighborLoader(data, [3], batch_size=10, pad="bucket"):
        batch.x.sum().backward()
    assert data.x.grad is not None and bool((data.x.grad >= 1).all())


def test_batches_of_a_partitioned_graph_are_padded_too(tmp_path):
    salientpp.partition(DATA, num_parts=1, root=tmp_path / "part", num_neighbors=[8, 4], batch_size=64)
    part = salientpp.load(tmp_path / "part")
    bare, full = both(part, input_nodes="train", batch_size=16)
    shapes = set()
    for ours, theirs in zip(bare, full, strict=True):
        assert_same_but_for_padding(ours, theirs)
        assert theirs.y.shape == ours.y.shape, "only seeds have labels"
        shapes.add(shape(theirs))
    assert len(shapes) <= 4


def test_sizes_are_rounded_up_only_slightly():
    for size in [*range(2000), 10**6 + 1, 2**31 + 1]:
        assert size <= rounded_up(size) <= max(32, size * 33 / 32 + 1)
        assert rounded_up(rounded_up(size)) == rounded_up(size)


def test_larger_batches_get_further_classes():
    classes = Classes.of([{"a": 100, "e": 0}, {"a": 120, "e": 0}, {"a": 130, "e": 0}], ["a", "e"])
    assert classes.fitting({"a": 90, "e": 0}) == {"a": 120, "e": 32}
    assert classes.fitting({"a": 125, "e": 3}) == {"a": 132, "e": 32}
    assert classes.fitting({"a": 133, "e": 0})["a"] == rounded_up(int(132 * 1.25))
    assert classes.fitting({"a": 1, "e": 10**6})["e"] < 1.3 * 10**6
    assert Classes.of([], ["a"]).fitting({"a": 5}) == {"a": 32}


def time_of(data: Data) -> Data:
    data = copy.copy(data)
    data.time = torch.arange(N)
    return data


def with_attribute(name: str) -> Data:
    data = copy.copy(DATA)
    data[name] = torch.zeros(N)
    return data


@pytest.mark.parametrize(
    "data, options, error, text",
    [
        (DATA, dict(pad="pow2"), ValueError, "pad must be 'bucket', 'fixed', a mapping with .*, got 'pow2'"),
        (DATA, dict(disjoint=True), NotImplementedError, "disjoint or time_attr"),
        (time_of(DATA), dict(time_attr="time"), NotImplementedError, "disjoint or time_attr"),
        (with_attribute("node_mask"), {}, ValueError, "sets node_mask, but data has an attribute of this name"),
        (DATA, dict(neighbor_sampler="own"), NotImplementedError, "neighbor_sampler="),
        ("adj_t", {}, NotImplementedError, "data has adj_t"),
    ],
)
def test_batches_that_cannot_be_padded_raise_a_clear_error(data, options, error, text):
    if isinstance(data, str):
        data = Data(x=torch.zeros(3, 1), adj_t=torch.eye(3).to_sparse_csr())
    if "neighbor_sampler" in options:

        class Own(torch_geometric_sampler()):
            pass

        options = dict(neighbor_sampler=Own(data, [2]))
    with pytest.raises(error, match=text):
        NeighborLoader(data, **(OPTIONS | dict(pad="bucket") | options))


def torch_geometric_sampler() -> type:
    class Sampler:
        def __init__(self, data, num_neighbors):
            self._inner = salientpp.NeighborSampler(data, num_neighbors)
            self.edge_permutation = None

        def sample_from_nodes(self, inputs):
            return self._inner.sample_from_nodes(inputs)

    return Sampler


@pytest.mark.parametrize("negatives", ["binary", "triplet"])
@pytest.mark.parametrize("kind", ["one type", "several types"])
def test_batches_of_edges_are_padded_too(kind, negatives):
    data, edges = (DATA, DATA.edge_index[:, :200]) if kind == "one type" else (typed(), ("author", "wrote", "paper"))
    options = {"num_neighbors": [4, 2], "batch_size": 16, "shuffle": True, "seed": 3, "neg_sampling": negatives}
    bare, full = (LinkNeighborLoader(data, edge_label_index=edges, pad=pad, **options) for pad in (None, "bucket"))
    shapes = set()
    for ours, theirs in zip(bare, full, strict=True):
        assert_same_but_for_padding(ours, theirs)
        shapes.add(tuple(store.num_nodes for store in theirs.node_stores))
    assert len(shapes) <= 3


def padded_epochs(rank: int, root: str) -> list[bool]:
    part, found = salientpp.load(root), []
    for alpha in (0.0, 0.2):
        bare, full = both(part, input_nodes="train", batch_size=16, replication_factor=alpha, uneven="exact")
        # One after the other, because a loader runs one epoch at a time.
        wanted, padded = list(bare), list(full)
        for ours, theirs in zip(wanted, padded, strict=True):
            assert_same_but_for_padding(ours, theirs)
        found.append(len({shape(batch) for batch in padded}) <= 4 < len({shape(batch) for batch in wanted}))
        assert full.stats().rows == bare.stats().rows
    return found


def test_each_rank_pads_its_own_batches(tmp_path):
    salientpp.partition(DATA, num_parts=2, root=tmp_path / "parts", num_neighbors=[8, 4], batch_size=64)
    assert distributed.run(padded_epochs, 2, str(tmp_path / "parts")) == [[True, True]] * 2


# --- states of another seed ------------------------------------------------------------------------------


def _seeded(seed: int, data=DATA, **options) -> NeighborLoader:
    """A loader that draws its seed itself. With these numbers of seeds, the sizes depend on the seed."""
    torch.manual_seed(seed)
    batch_size = 16 if options["pad"] == "bucket" else 512
    return NeighborLoader(data, **(OPTIONS | {"seed": None, "batch_size": batch_size} | options))


@pytest.mark.parametrize("warm_up", [0, 1, 3])
@pytest.mark.parametrize("pad", ["bucket", "fixed"])
def test_a_loaded_seed_decides_the_sizes(pad, warm_up):
    first, other = _seeded(1, pad=pad), _seeded(2, pad=pad)
    epoch = iter(first)
    next(epoch)
    state, rest = first.state_dict(), list(epoch)
    for _ in zip(range(warm_up), other):
        pass
    if pad == "fixed":
        before = other.memory_used()["batches"]
    own = shape(next(iter(_seeded(2, pad=pad))))
    assert own != shape(rest[0]), "the seeds have the same sizes, so this test would show nothing"
    other.load_state_dict(state)
    for batch, again in zip(rest, other, strict=True):
        assert_equal(batch, again)
    assert other.stats().padded_batches == warm_up + len(rest)
    if pad == "fixed":
        assert other.memory_used()["batches"] != before


def _over_parts(rank: int, root: str, pad: str) -> list[bool]:
    part = salientpp.load(root)
    options = {"input_nodes": "all", "batch_size": 24 if pad == "bucket" else 128, "pad": pad}
    first, other = (_seeded(seed, part, **options) for seed in (1, 3))
    epoch = iter(first)
    next(epoch)
    state, rest = first.state_dict(), list(epoch)
    other.load_state_dict(state)
    found = list(other)
    return [shape(a) == shape(b) for a, b in zip(rest, found, strict=True)]


@pytest.mark.parametrize("pad", ["bucket", "fixed"])
def test_a_loaded_seed_decides_the_sizes_of_every_rank(tmp_path, pad):
    salientpp.partition(DATA, 2, tmp_path / "parts", [8, 4], 64, topology="parts")
    for same in distributed.run(_over_parts, 2, str(tmp_path / "parts"), pad):
        assert same and all(same)
