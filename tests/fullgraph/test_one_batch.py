"""Laws of ranks that train together: they compute one batch, or all raise the same error at once. An exception in one rank's backward ends the others."""

from __future__ import annotations

import itertools
import time
from typing import Any

import distributed
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from graphs import random_data
from host_batches import batch_of, loader_of, share_batch
from rare import rare, some_of
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp import NeighborLoader
from salientpp.fullgraph import Preload, distribute, local, loss_mean
from salientpp.nn import trim
from salientpp.ranks.waiting import SLICE_SECONDS

NUMBER, WIDTH, CLASSES = 120, 6, 5


def data_of() -> Data:
    data = random_data(NUMBER, 4 * NUMBER, train_fraction=0.8)
    draw = torch.Generator().manual_seed(1)
    data.x = torch.randn(NUMBER, WIDTH, generator=draw).double()
    data.y = torch.arange(NUMBER) % CLASSES
    return data


class Net(torch.nn.Module):
    """Two layers. ``between`` and ``after`` change rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = pyg.SAGEConv(WIDTH, 8), pyg.SAGEConv(8, CLASSES)
        self.between = self.after = lambda rows: rows
        self.double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.after(self.second(self.between(self.first(x, edge_index).relu()), edge_index))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("one") / "2"
    salientpp.partition(data_of(), 2, folder, [3, 3], 16)
    return str(folder)


# --- one batch ----------------------------------------------------------------------------------------------


def loaders_of(root: str) -> dict[str, Any]:
    part = salientpp.load(root)
    options: dict[str, Any] = {"ranks_per_host": 2, "cooperate": "host", "seed": 2, "timeout": distributed.NEVER}
    return {
        "train": NeighborLoader(part, [3, 3], "train", batch_size=8, **options),
        "wide": NeighborLoader(part, [4, 4], "train", batch_size=8, **options),
        "val": NeighborLoader(part, [3, 3], "val", batch_size=8, **options),
        "unlike": NeighborLoader(part, [3, 3], "train", batch_size=8, replace=True, **options),
    }


#: Name -> the batches, (loader, epoch, number), on which ranks 0 and 1 call the model, and words of the errors.
PAIRS: dict[str, tuple[tuple[str, int, int], tuple[str, int, int], list[str]]] = {
    "a batch that one skipped": (("train", 0, 1), ("train", 0, 0), ["batch 1 of epoch 0", "batch 0 of epoch 0"]),
    "two batches earlier": (("train", 0, 1), ("train", 0, 3), ["batch 1 of epoch 0", "batch 3 of epoch 0"]),
    "another epoch": (("train", 0, 0), ("train", 1, 0), ["batch 0 of epoch 0", "batch 0 of epoch 1"]),
    "other seeds": (("train", 0, 0), ("val", 0, 0), ["batch 0 of epoch 0"]),
    "other fanouts": (("train", 0, 0), ("wide", 0, 0), ["batch 0 of epoch 0"]),
    "other draws": (("train", 0, 0), ("unlike", 0, 0), ["batch 0 of epoch 0"]),
}


def pairs(rank: int, root: str) -> dict[str, list[str]]:
    loaders = loaders_of(root)
    batches = {(name, epoch, i): b for name, one in loaders.items() for epoch in (0, 1) for i, b in enumerate(one)}
    found: dict[str, list[str]] = {}
    for trims in (False, True):
        module = trim(Net()) if trims else Net()
        for name, (*mine, _) in PAIRS.items():
            # The ranks can continue after the error, with the same model.
            model = distribute(module, loaders["train"])
            batch = batches[mine[rank]]
            with pytest.raises(ValueError) as raised:
                model(batch.x, batch.edge_index)
            if not found:
                time.sleep(3 * SLICE_SECONDS * rank)  # also if the ranks wait for each other afterwards
            found.setdefault(name, []).append(str(raised.value))
            batch = batches["val", 1, 0]
            model(batch.x, batch.edge_index).sum().backward()
    return found


def test_ranks_of_a_host_on_different_batches_name_them(root):
    first, second = distributed.run(pairs, 2, root)
    assert first == second
    for name, said in first.items():
        for text in said:
            assert "the batch is " in text and " on rank 0 and " in text and "seeds: " in text, (name, text)
            assert all(words in text for words in PAIRS[name][2]), (name, text)


def without_a_loader(rank: int) -> str:
    data, loader = data_of(), loader_of(2)
    mine = []
    for key in (0, 1):
        mfg = batch_of(data, torch.arange(9) + key, [3, 2], key)
        mine.append(share_batch(data, mfg, mfg.node % 2, 2, rank % 2))
    model = distribute(Net(), loader)
    # Ranks 0 and 1 are a host, and each host may have a batch of its own.
    batch = mine[rank // 2]
    model(batch.x, batch.edge_index).sum().backward()
    batch = mine[rank == 2]
    with pytest.raises(RuntimeError if rank < 2 else ValueError) as raised:
        model(batch.x, batch.edge_index).sum().backward()
    return str(raised.value)


def test_hosts_have_their_own_batches_and_hear_of_a_host_whose_ranks_differ():
    said = distributed.run(without_a_loader, 4)
    assert len(set(said)) == 1, said
    assert "the batch is a batch (9 seeds: 1, 2, 3, ...; checksum" in said[0]


# --- exceptions ---------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise LookupError("no gradient here")


def parts_of(form: str, root: str) -> Any:
    """The argument of ``distribute``, and that of its model, over two ranks."""
    part = salientpp.load(root)
    if form == "batches":
        return loaders_of(root)["train"]
    options: dict[str, Any] = {"preload": Preload(hops=1), "ranks_per_host": 2} if form == "preloaded" else {}
    return local(part, timeout=distributed.NEVER, **options)


def a_failing_backward(rank: int, root: str, form: str, where: str) -> str:
    of = parts_of(form, root)
    module = Net()
    model = distribute(module, of)
    batches = iter(of) if form == "batches" else iter([of] * 3)
    for step in range(3):
        batch = next(batches)
        if rank == 1 and step == 1 and where in ("between", "after"):
            setattr(module, where, Fails.apply)
        out = model(batch.x, batch.edge_index)
        losses = F.cross_entropy(out[: batch.y.numel()], batch.y, reduction="none")
        if rank == 1 and step == 1 and where == "loss":
            losses = Fails.apply(losses)
        loss = losses.sum() if where == "after" else loss_mean(losses, model)
        try:
            loss.backward()
        except Exception as error:
            # The failed rank catches its error, and stays until the other one has heard of it.
            torch.distributed.barrier()
            return f"{type(error).__name__}: {error}"
    return "no error"


SOME = [("batches", "between"), ("whole", "after"), ("preloaded", "loss")]
EVERY = [*itertools.product(("batches", "whole", "preloaded"), ("between", "after", "loss"))]


@pytest.mark.parametrize(("form", "where"), some_of(SOME, EVERY))
def test_an_exception_in_one_ranks_backward_ends_the_others_at_once(root, form, where):
    first, second = distributed.run(a_failing_backward, 2, root, form, where)
    assert second == "LookupError: no gradient here"
    assert first == "RankFailure: rank 1 failed in the backward of its model; look at the error of that rank"


def steps_after_a_difference(rank: int, root: str) -> list[float]:
    part = local(salientpp.load(root), timeout=distributed.NEVER)
    model = distribute(Net(), part)
    losses = []
    for step in range(3):
        try:
            loss = loss_mean(F.cross_entropy(model(part.x, part.edge_index), part.y, reduction="none"), part)
            if rank == 1 and step == 1:
                model(part.x, part.edge_index)
            loss.backward()  # of step 1, on rank 0: raises
            losses.append(float(loss.detach()))
        except ValueError:
            losses.append(-1.0)
    return losses


def test_ranks_that_differ_in_a_backward_can_continue(root):
    first, second = distributed.run(steps_after_a_difference, 2, root)
    assert first == second and first[1] == -1 and first[2] == first[0] > 0, (first, second)


def calls_after_a_failure(rank: int, root: str, form: str) -> list[str]:
    of = parts_of(form, root)
    module = Net()
    model = distribute(module, of)
    batches = iter(of) if form == "batches" else iter([of] * 2)
    found = []
    for step in range(2):
        batch = next(batches)
        module.between = Fails.apply if rank == step == 1 else lambda rows: rows
        try:
            model(batch.x, batch.edge_index).sum().backward()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    module.between = lambda rows: rows
    torch.distributed.barrier()  # rank 0 has given the collective up in which it waited for rank 1
    for _ in range(3):
        try:
            model(batch.x, batch.edge_index).sum().backward()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    model = distribute(module, parts_of(form, root))
    model(batch.x, batch.edge_index).sum().backward()
    return found


@pytest.mark.parametrize("form", ["batches", "whole", *rare("preloaded")])
def test_calls_after_a_failure_raise_it_again_and_new_connections_work(root, form):
    first, second = distributed.run(calls_after_a_failure, 2, root, form)
    text = "RankFailure: rank 1 failed in the backward of its model; look at the error of that rank"
    assert first == [text] * 4
    assert second == ["LookupError: no gradient here", *[text] * 3]
