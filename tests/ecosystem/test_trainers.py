"""Tools that rebuild a loader for several processes.

They are ignite's ``auto_dataloader``, Ray Train's ``prepare_data_loader``, and a plain ``DataLoader``. Such a tool makes its
own ``DataLoader`` from ``dataset`` and ``collate_fn``, with a ``DistributedSampler``. The result must give batches, and each
process must get its share of the seeds of a ``Data``. Ranks of a partitioned graph share the seeds already: the tool must
leave their loader alone, or the loader refuses.
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
    """Rebuilds a loader as these tools do."""
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
def test_a_dataloader_made_from_a_loader_gives_batches(num_workers):
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


def test_ignite_shares_the_seeds_of_a_data_and_is_refused_on_partitions(tmp_path):
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
    """Session of a Ray worker, which otherwise exists only in a cluster of Ray."""

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


def test_ray_shares_the_seeds_of_a_data_and_leaves_partitions_alone(tmp_path):
    pytest.importorskip("ray.train.torch", reason="needs Ray Train")
    assert sorted(seeds_of(prepared_by_ray(node_loader()))) == list(range(SEEDS))
    salientpp.partition(graph(), 2, tmp_path / "parts", [3], 8)
    found = distributed.run(ray_on_rank, 2, tmp_path / "parts", seconds=180)
    assert [len(shared) for shared, _ in found] == [SEEDS // 2] * 2
    assert sorted(sum((shared for shared, _ in found), [])) == list(range(SEEDS))
    assert [same for _, same in found] == [True, True]
