"""Laws of hooks: subclasses that override ``collate_fn``, ``filter_fn`` or ``_get_iterator`` are called with the same values as in PyG's loaders."""

from __future__ import annotations

import os

import distributed
import pytest
import torch
from graphs import random_data
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader

SEEDS = torch.arange(40)


def graph() -> Data:
    data = random_data(100, 700)
    data.x, data.y = torch.arange(100.0)[:, None], torch.arange(100) % 3
    return data


def typed() -> HeteroData:
    data, made = HeteroData(), graph()
    data["a"].x, data["b"].x = made.x, made.x + 1000
    data["a", "to", "b"].edge_index = data["b", "to", "a"].edge_index = made.edge_index
    return data


class Filters(NeighborLoader):
    """Changes the sampler's output, and then the batch."""

    def filter_fn(self, out):
        assert isinstance(out, (SamplerOutput, HeteroSamplerOutput))
        self.num_filtered = getattr(self, "num_filtered", 0) + 1
        batch = super().filter_fn(out)
        batch.mark = out.metadata[0]
        return batch


class Collates(NeighborLoader):
    def collate_fn(self, index):
        assert isinstance(index, list)
        batch = super().collate_fn(index)
        batch.mark = torch.tensor(index)
        return batch


class Both(Filters):
    def collate_fn(self, index):
        batch = super().collate_fn(index)
        batch.second = True
        return batch


class LikePyGs(NeighborLoader):
    """Hooks of PyG's loader, written again with its parts."""

    def collate_fn(self, index):
        out = self.node_sampler.sample_from_nodes(self.input_data[index])
        out.metadata = (out.metadata[0], torch.full((len(index),), 7))
        return out if self.filter_per_worker is False else self.filter_fn(out)

    def filter_fn(self, out):
        batch = super().filter_fn(out)
        batch.mark = batch.seed_time
        return batch


def assert_same(one, other, besides=("mark", "second")):
    one, other = one.to_dict(), other.to_dict()
    for name in besides:
        one.pop(name, None)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], name


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("made", [Filters, Collates, Both])
def test_overridden_hooks_are_called_on_the_batches_of_the_same_seed(made, num_workers):
    options = dict(batch_size=7, shuffle=True, seed=3, num_workers=num_workers, transform=_with_z)
    plain, loader = NeighborLoader(graph(), [3, 2], SEEDS, **options), made(graph(), [3, 2], SEEDS, **options)
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == 6
        for batch, expected in zip(batches, plain, strict=True):
            assert torch.equal(batch.mark, batch.input_id), "the hook saw this batch's seeds"
            assert made is not Both or batch.second
            assert_same(batch, expected)
    assert getattr(loader, "num_filtered", 12) == 12, "once for every batch"
    assert (loader.stats().rows, loader.stats().batches) == (plain.stats().rows, plain.stats().batches)


def _with_z(batch):
    batch.z = batch.x * 2
    return batch


@pytest.mark.parametrize("filter_per_worker", [None, True, False])
def test_hooks_that_use_pygs_names_work(filter_per_worker):
    loader = LikePyGs(graph(), [3], SEEDS, batch_size=10, filter_per_worker=filter_per_worker)
    for batch in [*loader, loader([1, 2])]:
        assert batch.mark.eq(7).all() and torch.equal(batch.x[:, 0], batch.n_id.float())
    found = loader.collate_fn([0, 1])
    assert isinstance(found, SamplerOutput if filter_per_worker is False else Data)


def test_samples_go_through_the_users_transform_once():
    def cut(out):
        out.node = out.node + 0
        calls.append(1)
        return out

    calls: list[int] = []
    list(Filters(graph(), [3], SEEDS, batch_size=10, transform_sampler_output=cut))
    assert len(calls) == 4


def test_filter_fn_makes_pygs_batch_of_a_sample():
    loader = NeighborLoader(graph(), [3], SEEDS, batch_size=10)
    out = loader.node_sampler.sample_from_nodes(loader.input_data[torch.tensor([4, 5])])
    batch = loader.filter_fn(out)
    assert (
        batch.batch_size == 2 and torch.equal(batch.x[:, 0], batch.n_id.float()) and batch.n_id[:2].tolist() == [4, 5]
    )
    assert loader.filter_fn(batch) is batch
    out.metadata = None
    with pytest.raises(ValueError, match="must begin with the ids of the seeds"):
        loader.filter_fn(out)


def test_hooks_of_links_and_of_several_types_are_called():
    class Links(LinkNeighborLoader):
        def filter_fn(self, out):
            batch = super().filter_fn(out)
            batch.mark = 1
            return batch

    data = graph()
    found = list(Links(data, [3], data.edge_index[:, :20], batch_size=5, neg_sampling="binary"))
    assert len(found) == 4 and all(batch.mark == 1 and batch.edge_label.numel() == 10 for batch in found)
    for batch in Filters(typed(), [3], "a", batch_size=20):
        assert batch.mark.numel() == 20 and torch.equal(batch["b"].x[:, 0], batch["b"].n_id + 1000.0)


def test_an_assigned_collate_fn_is_called():
    loader = NeighborLoader(graph(), [3], SEEDS, batch_size=10, seed=0)
    before = [batch.n_id for batch in loader]
    loader.collate_fn = lambda index: (index, type(loader).collate_fn(loader, index))
    loader.set_epoch(0)
    found = list(loader)
    assert sum((index for index, _ in found), []) == SEEDS.tolist()
    assert all(torch.equal(batch.n_id, n_id) for (_, batch), n_id in zip(found, before, strict=True))


def test_an_overridden_get_iterator_is_called():
    class Twice(NeighborLoader):
        def _get_iterator(self):
            yield from super()._get_iterator()
            yield from super()._get_iterator()

    assert sum(batch.batch_size for batch in Twice(graph(), [3], SEEDS, batch_size=10)) == 80


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataloader_built_from_the_loaders_parts_calls_the_hooks(num_workers):
    ours = Both(graph(), [3], SEEDS, batch_size=10)
    made = torch.utils.data.DataLoader(ours.dataset, batch_size=8, collate_fn=ours.collate_fn, num_workers=num_workers)
    batches = list(made)
    assert [batch.mark.tolist() for batch in batches] == [list(range(i, i + 8)) for i in range(0, 40, 8)]
    assert all(torch.equal(batch.x[:, 0], batch.n_id.float()) and batch.second for batch in batches)


def test_a_run_with_hooks_resumes_where_it_stopped():
    make = lambda: Collates(graph(), [3], SEEDS, batch_size=5, shuffle=True, seed=1)  # noqa: E731
    whole, stopped, resumed = list(make()), make(), make()
    iterator = iter(stopped)
    for _ in range(3):
        next(iterator)
    resumed.load_state_dict(stopped.state_dict())
    for batch, expected in zip(resumed, whole[3:], strict=True):
        assert_same(batch, expected, besides=())


def test_hooks_are_called_in_a_forked_child():
    loader = Both(graph(), [3], SEEDS, batch_size=10, seed=2)
    expected = torch.cat([batch.n_id for batch in loader]).tolist()
    loader.set_epoch(0)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        found = torch.cat([batch.n_id for batch in loader if batch.second]).tolist()
        os.write(write, b"same" if found == expected else b"else")
        os._exit(0)
    os.close(write)
    assert os.read(read, 4) == b"same"
    os.waitpid(child, 0)


def on_rank(rank, root):
    with pytest.raises(ValueError) as error:
        Filters(salientpp.load(root), [3], "all", batch_size=8)
    text = str(error.value)
    list(NeighborLoader(salientpp.load(root), [3], "all", batch_size=8))
    return text


def test_hooks_on_several_ranks_raise_a_clear_error(tmp_path):
    salientpp.partition(graph(), 2, tmp_path / "parts", [3], 8)
    for text in distributed.run(on_rank, 2, tmp_path / "parts"):
        assert (
            "Filters overrides filter_fn, but several ranks make batches in stages" in text
            and "pass transform=" in text
        )


def test_one_part_on_one_process_calls_hooks(tmp_path):
    salientpp.partition(graph(), 1, tmp_path / "parts", [3], 8)
    part = salientpp.load(tmp_path / "parts")
    for batch in Filters(part, [3], "all", batch_size=8):
        assert torch.equal(batch.x[:, 0], part.original_id(batch.n_id).float())
        assert torch.equal(batch.mark, batch.input_id) and batch.y.numel() == batch.batch_size
