"""Laws of batches of one size: few exceed it, results at the seeds stay, memory is known in advance, and tensors may stay at one address."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from pathlib import Path

import distributed
import pytest
import torch
import torch_geometric.nn as nn
from graphs import random_data
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

sys.path.append(str(Path(__file__).parents[2] / "examples"))


def fixed(data=DATA, input_nodes=None, **options) -> NeighborLoader:
    return NeighborLoader(data, input_nodes=input_nodes, **(OPTIONS | {"pad": "fixed"} | options))


def bare(data=DATA, input_nodes=None, **options) -> NeighborLoader:
    return NeighborLoader(data, input_nodes=input_nodes, **(OPTIONS | options))


def tensors(batch) -> dict:
    """Returns the tensors of a batch, except those that belong to the whole graph."""
    return {
        (store._key, name): value
        for store in batch.stores
        for name, value in store.items()
        if isinstance(value, torch.Tensor) and name != "scale"
    }


def addresses(batch) -> dict:
    return {key: value.data_ptr() for key, value in tensors(batch).items()}


# --- one size ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_behind_the_masks_equal_those_without_padding(workers):
    for ours, theirs in zip(bare(num_workers=workers), fixed(num_workers=workers), strict=True):
        assert_same_but_for_padding(ours, theirs)
        assert theirs.batch_size == ours.batch_size and theirs.validate()


@pytest.mark.parametrize("name", MODELS)
def test_outputs_at_the_seeds_and_gradients_equal_those_without_padding(name):
    assert_same_training(MODELS[name], bare(), fixed(), 2)


@pytest.mark.parametrize("sigma", [0.0, 1.0, 3.0])
def test_all_batches_have_one_shape_except_the_overflows_which_are_counted(sigma):
    loader = fixed(pad={"sigma": sigma})
    shapes = [shape(batch) for _ in range(3) for batch in loader]
    stats = loader.stats()
    assert stats.padded_batches == stats.batches == len(shapes)
    smallest = min(shapes)
    assert stats.padding_overflows == sum(each != smallest for each in shapes)
    least, most = {0.0: (0.35, 0.75), 1.0: (0.05, 0.35), 3.0: (0.0, 0.03)}[sigma]
    assert least <= stats.padding_overflows / len(shapes) <= most
    loader.reset_stats()
    assert (loader.stats().padded_batches, loader.stats().padding_overflows) == (0, 0)


def test_more_deviations_give_a_larger_size():
    sizes = [min(batch.num_edges for batch in fixed(pad={"sigma": sigma})) for sigma in (0, 2.0, 6.0)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 3


def test_loaders_with_the_same_arguments_have_the_same_size_also_copies_and_resumed_ones():
    loader = fixed()
    epoch = iter(loader)
    for _ in range(3):
        next(epoch)
    state, copies = loader.state_dict(), [pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader), copy.copy(loader)]
    resumed = fixed(num_workers=2)
    resumed.load_state_dict(state)
    for batch, again in zip(list(epoch), resumed, strict=True):
        assert_equal(batch, again)
    following = list(loader)
    for other in copies:
        assert other.stats().padded_batches == 0
        for batch, again in zip(following, other, strict=True):
            assert_equal(batch, again)
        assert other.stats().padded_batches == len(following)


def test_a_model_is_compiled_once():
    torch.compiler.reset()
    model, count = nn.GraphSAGE(DATA.num_features, 8, 2, 4), 0

    def backend(module, inputs):
        nonlocal count
        count += 1
        return module.forward

    loader = fixed(drop_last=True, pad={"sigma": 5.0})
    compiled = torch.compile(model, dynamic=False, backend=backend)
    for batch in loader:
        compiled(batch.x, batch.edge_index)
    torch.compiler.reset()
    assert count == 1 and loader.stats().padding_overflows == 0


def test_batches_of_a_loader_in_the_order_of_the_seeds_have_one_shape_too():
    loader = fixed(shuffle=False)
    shapes = {shape(batch) for batch in loader}
    assert len(shapes) == 1 + (loader.stats().padding_overflows > 0)


def test_a_sampler_of_the_user_is_allowed():
    order = torch.utils.data.RandomSampler(range(N), generator=torch.Generator().manual_seed(0))
    loader = fixed(shuffle=None, sampler=order)
    assert len({shape(batch) for batch in loader}) <= 2 and loader.stats().padding_overflows <= 2


@pytest.mark.parametrize(
    "options",
    [
        {"replace": True},
        {"shared_draws": "batch"},
        {"shared_draws": {"block": 8}},
        {"weight_attr": "weight"},
        {"subgraph_type": "induced"},
        {"subgraph_type": "bidirectional"},
    ],
    ids=str,
)
def test_sizes_fit_other_ways_to_draw(options):
    data = copy.copy(DATA)
    data.weight = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(3))
    loader, plain = fixed(data, **options), bare(data, **options)
    padded = [batch.num_edges for batch in loader]
    counted = torch.tensor([batch.num_edges for batch in plain]).double()[:-1]
    assert loader.stats().padding_overflows <= 2
    assert min(padded) <= counted.mean() + 4.5 * counted.std() + 8


def test_every_type_is_padded_to_one_size():
    loader = fixed(typed(), input_nodes="paper", batch_size=32)
    shapes = set()
    for ours, theirs in zip(bare(typed(), input_nodes="paper", batch_size=32), loader, strict=True):
        assert_same_but_for_padding(ours, theirs)
        shapes.add(shape(theirs))
    assert len(shapes) == 1 and loader.stats().padding_overflows == 0


@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
@pytest.mark.parametrize("kind", ["one type", "several types"])
def test_batches_of_edges_are_padded_to_one_size(kind, negatives):
    data, edges = (DATA, DATA.edge_index[:, :400]) if kind == "one type" else (typed(), ("author", "wrote", "paper"))
    options = {"num_neighbors": [4, 2], "batch_size": 16, "shuffle": True, "seed": 3, "neg_sampling": negatives}
    plain, loader = (LinkNeighborLoader(data, edge_label_index=edges, pad=pad, **options) for pad in (None, "fixed"))
    shapes = []
    for ours, theirs in zip(plain, loader, strict=True):
        assert_same_but_for_padding(ours, theirs)
        shapes.append(tuple(store.num_nodes for store in theirs.node_stores))
    overflows = loader.stats().padding_overflows
    assert len(set(shapes)) <= 1 + overflows and overflows <= 0.1 * len(shapes)


def padded_epochs(rank: int, root: str) -> list[bool]:
    part, found = salientpp.load(root), []
    for alpha in (0.0, 0.2):
        options = dict(input_nodes="train", batch_size=16, replication_factor=alpha, uneven="exact")
        plain, loader = bare(part, **options), fixed(part, **options)
        known = loader.memory_used()["batches"]
        wanted, padded = list(plain), list(loader)
        for ours, theirs in zip(wanted, padded, strict=True):
            assert_same_but_for_padding(ours, theirs)
        shapes = {shape(batch) for batch in padded}
        found.append(len(shapes) <= 1 + loader.stats().padding_overflows and known > 0)
        assert loader.stats().rows == plain.stats().rows
    return found


def test_each_rank_has_one_size_of_its_own(tmp_path):
    salientpp.partition(DATA, num_parts=2, root=tmp_path / "parts", num_neighbors=[8, 4], batch_size=64)
    assert distributed.run(padded_epochs, 2, str(tmp_path / "parts")) == [[True, True]] * 2


def test_a_loader_without_seeds_or_edges_has_a_size():
    assert list(fixed(Data(x=torch.zeros(5, 1), edge_index=torch.empty(2, 0, dtype=torch.int64)), batch_size=2))
    empty = fixed(input_nodes=torch.empty(0, dtype=torch.int64))
    assert list(empty) == [] and empty.memory_used()["batches"] == 0


# --- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True])
def test_the_memory_of_batches_is_known_before_the_first_batch(static):
    loader = fixed(pad={"static": static})
    known = loader.memory_used()["batches"]
    assert loader.stats().batches == 0
    of_batch = sum(value.nbytes for value in tensors(next(iter(loader))).values()) + DATA.scale.nbytes
    assert known == 2 * of_batch, "the batch as it was sampled, which is at most as large, and the padded batch"


def test_memory_does_not_change_batches():
    loader, other = fixed(), fixed()
    loader.memory_used()
    for batch, again in zip(loader, other, strict=True):
        assert_equal(batch, again)


# --- static buffers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one type", "several types", "edges"])
def test_static_batches_have_the_values_of_others_at_one_address(kind):
    data, options = DATA, {}
    make = NeighborLoader
    if kind == "several types":
        data, options = typed(), {"input_nodes": "paper", "batch_size": 32}
    if kind == "edges":
        make, options = LinkNeighborLoader, {"edge_label_index": DATA.edge_index[:, :400], "neg_sampling": "binary"}
    loaders = [
        make(data, pad={"static": static, "sigma": 5.0}, drop_last=True, **(OPTIONS | options))
        for static in (False, True)
    ]
    first = None
    for _ in range(2):
        for ours, theirs in zip(*loaders, strict=True):
            own, static = tensors(ours), tensors(theirs)
            assert own.keys() == static.keys()
            assert all(torch.equal(own[key], static[key]) for key in own)
            first = first or addresses(theirs)
            assert addresses(theirs) == first
    assert loaders[1].stats().padding_overflows == 0


def test_every_shape_has_static_tensors_of_its_own():
    loader = fixed(pad={"static": True, "sigma": 0.0})
    seen: dict = {}
    for batch in loader:
        for key, value in tensors(batch).items():
            address = seen.setdefault((key, tuple(value.shape)), value.data_ptr())
            assert address == value.data_ptr()
    assert loader.stats().padding_overflows > 0
    assert len(set(seen.values())) == len(seen), "tensors of different shapes do not overlap"


def test_the_next_batch_overwrites_the_tensors_of_the_one_before():
    first, *_, last = list(fixed(pad={"static": True, "sigma": 5.0}, drop_last=True))
    assert first.n_id.data_ptr() == last.n_id.data_ptr()


def test_static_batches_may_be_read_in_inference_mode_and_trained_on_later():
    loader = fixed(pad={"static": True})
    with torch.inference_mode():
        next(iter(loader))
    weight = torch.ones(DATA.num_features, requires_grad=True)
    for batch, _ in zip(loader, range(2)):
        (batch.x @ weight).sum().backward()
    assert weight.grad is not None


def test_the_users_own_tensors_are_not_copied():
    batch = next(iter(fixed(pad={"static": True})))
    assert batch.scale is DATA.scale


def test_copies_have_static_tensors_of_their_own():
    loader = fixed(pad={"static": True})
    batch = next(iter(loader))
    before = batch.x.clone()
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert next(iter(other)).x.data_ptr() != batch.x.data_ptr()
    assert torch.equal(batch.x, before)


def test_a_learnable_attribute_is_refused_in_static_buffers():
    data = Data(x=torch.randn(50, 4, requires_grad=True), edge_index=torch.randint(50, (2, 400)))
    next(iter(fixed(data, num_neighbors=[3], batch_size=10))).x.sum().backward()
    assert data.x.grad is not None
    with pytest.raises(Exception, match="static buffers cannot hold x, because it needs a gradient"):
        next(iter(fixed(data, num_neighbors=[3], batch_size=10, pad={"static": True})))


def test_the_example_compiles_a_model_for_one_shape(monkeypatch, capsys):
    import compiled

    monkeypatch.setattr(sys, "argv", ["compiled.py", "--backend", "eager", "--vertices", "6000", "--epochs", "2"])
    torch.compiler.reset()
    compiled.main()
    torch.compiler.reset()
    lines = capsys.readouterr().out.splitlines()
    losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in lines]
    assert len(lines) == 2 and losses[1] < losses[0]
    assert "1 shapes so far, 0 of " in lines[-1]


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, text",
    [
        (dict(pad={"sigma": -1}), ValueError, r"pad\['sigma'\] must be a number in \[0, 1000\] .*, got -1"),
        (dict(pad={"sigma": "3"}), ValueError, r"pad\['sigma'\] must be a number in \[0, 1000\] .*, got '3'"),
        (dict(pad={"static": 1}), ValueError, r"pad\['static'\] must be True or False, got 1"),
        (
            dict(pad={"statc": True}),
            ValueError,
            "pad may be a mapping with the entries sigma, static; got the entry 'statc'. Did you mean static?",
        ),
        (dict(pad={"static": True}, pin_memory=True), ValueError, "pad={'static': True} excludes pin_memory: a copy"),
        (dict(disjoint=True), NotImplementedError, "pad='fixed' is not available with disjoint or time_attr"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        NeighborLoader(random_data(), **(OPTIONS | dict(pad="fixed") | options))


def test_rounds_are_refused_with_static_buffers():
    assert len(list(fixed().rounds())) == len(fixed())
    with pytest.raises(ValueError, match=re.escape("rounds() gives several batches at once")):
        fixed(pad={"static": True}).rounds()
