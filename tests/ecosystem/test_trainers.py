"""What rebuilds or wraps a loader for several processes: ignite's ``auto_dataloader``, Ray Train's ``prepare_data_loader``, a plain ``DataLoader``.

Such a tool makes a ``DataLoader`` of its own from ``dataset`` and ``collate_fn``, with a ``DistributedSampler``. Ours must then give batches, each
process its share of a ``Data``; the ranks of a partitioned graph have shared it already, so their loader is left alone or refuses.
"""

from __future__ import annotations

import distributed
import pytest
import torch
import torch.distributed as dist
from graphs import random_data

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader

SEEDS = 42


def graph():
    data = random_data(100, 700)
    data.x = torch.arange(100.0)[:, None]
    return data


def node_loader(**options):
    return NeighborLoader(graph(), [3, 2], torch.arange(SEEDS), batch_size=8, shuffle=True, **options)


def seeds_of(batches):
    found = []
    for batch in batches:
        assert torch.equal(batch.x[:, 0], batch.n_id.float())
        found += batch.input_id.tolist()
    return found


def rebuilt(loader, **options):
    """What such tools make of a loader."""
    return torch.utils.data.DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **options,
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataloader_of_our_parts_gives_batches(num_workers):
    assert sorted(seeds_of(rebuilt(node_loader(), shuffle=True, num_workers=num_workers))) == list(range(SEEDS))
    data = graph()
    links = LinkNeighborLoader(data, [3], data.edge_index[:, :20], batch_size=5, neg_sampling="binary")
    assert [batch.edge_label.numel() for batch in rebuilt(links, num_workers=num_workers)] == [10] * 4


# --- ignite -----------------------------------------------------------------------------------------------


def ignite_on_rank(rank, directory):
    idist = pytest.importorskip("ignite.distributed")
    ours = node_loader()
    theirs = idist.auto_dataloader(ours.dataset, collate_fn=ours.collate_fn, batch_size=8, shuffle=True)
    assert idist.get_world_size() == 2 and isinstance(theirs.sampler, torch.utils.data.DistributedSampler)
    part = NeighborLoader(salientpp.load(directory), [3], "all", batch_size=8)
    with pytest.raises(RuntimeError, match="cannot make a single batch on several ranks"):
        next(iter(idist.auto_dataloader(part.dataset, collate_fn=part.collate_fn, batch_size=8)))
    list(part)
    return seeds_of(theirs)


def test_ignite_shares_a_data_and_is_refused_by_parts(tmp_path):
    idist = pytest.importorskip("ignite.distributed", reason="needs pytorch-ignite")
    ours = node_loader()
    alone = idist.auto_dataloader(ours.dataset, collate_fn=ours.collate_fn, batch_size=8, shuffle=True, num_workers=1)
    assert sorted(seeds_of(alone)) == list(range(SEEDS))
    salientpp.partition(graph(), 2, tmp_path / "parts", [3], 8)
    found = distributed.run(ignite_on_rank, 2, tmp_path / "parts", seconds=180)
    assert [len(seeds) for seeds in found] == [SEEDS // 2] * 2
    assert sorted(sum(found, [])) == list(range(SEEDS))


# --- Ray Train --------------------------------------------------------------------------------------------


class Session:
    """Of a worker of Ray's, which only a cluster of Ray's would have."""

    @staticmethod
    def get_world_size():
        return dist.get_world_size() if dist.is_initialized() else 1

    @staticmethod
    def get_world_rank():
        return dist.get_rank() if dist.is_initialized() else 0


def prepared_by_ray(loader):
    import ray.train.torch

    ray.train.get_context = Session
    ray.train.torch.get_device = lambda: torch.device("cpu")
    return ray.train.torch.prepare_data_loader(loader)


def ray_on_rank(rank, directory):
    shared = seeds_of(prepared_by_ray(node_loader()))
    part = salientpp.load(directory)
    loader = NeighborLoader(part, [3], "all", batch_size=8, seed=3)
    given = [batch.n_id.tolist() for batch in prepared_by_ray(loader)]
    loader.set_epoch(0)
    return shared, given == [batch.n_id.tolist() for batch in loader]


def test_ray_shares_a_data_and_leaves_parts_as_they_are(tmp_path):
    pytest.importorskip("ray.train.torch", reason="needs Ray Train")
    assert sorted(seeds_of(prepared_by_ray(node_loader()))) == list(range(SEEDS))
    salientpp.partition(graph(), 2, tmp_path / "parts", [3], 8)
    found = distributed.run(ray_on_rank, 2, tmp_path / "parts", seconds=180)
    assert [len(shared) for shared, _ in found] == [SEEDS // 2] * 2
    assert sorted(sum((shared for shared, _ in found), [])) == list(range(SEEDS))
    assert [same for _, same in found] == [True, True]
