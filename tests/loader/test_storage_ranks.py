"""Laws of storage ranks: ranks that only store change no batch, and ranks that train hold no rows but their caches."""

from __future__ import annotations

from pathlib import Path

import distributed
import pytest
import torch
from distributed import NEVER
from graphs import random_data

import salientpp
from salientpp import NeighborLoader

FANOUTS, BATCH, PARTS = [4, 3], 8, 8


def directory(root: Path, topology: str) -> str:
    data = random_data(300, 1500, edge_attributes=True)
    assignment = torch.arange(data.num_nodes) % PARTS
    train = torch.cat([(assignment == part).nonzero().flatten()[: 9 + 11 * part % 12] for part in range(PARTS)])
    salientpp.partition(
        data, PARTS, root, FANOUTS, BATCH, method=assignment, split={"train": train}, topology=topology
    )
    return str(root)


def digest(batch) -> tuple:
    return tuple(batch[name].tolist() for name in ("n_id", "edge_index", "e_id", "input_id", "y", "x", "edge_attr"))


def loader_of(part, **options) -> NeighborLoader:
    options = {"batch_size": BATCH, "shuffle": True, "seed": 7, "timeout": NEVER, "logical_ranks": PARTS, **options}
    return NeighborLoader(part, options.pop("num_neighbors", FANOUTS), "train", **options)


def rounds_of(part, epochs: int = 2, **options) -> list[list[list]]:
    loader = loader_of(part, **options)
    return [[list(map(digest, batches)) for batches in loader.rounds()] for _ in range(epochs)]


def _train_or_store(rank: int, root: str, num_storage_ranks: int, cases: list[dict]) -> list | None:
    part = salientpp.load(root, storage_ranks=num_storage_ranks)
    if part.stores:
        salientpp.serve(part)
        return None
    return [rounds_of(part, **options) for options in cases]


def together(per_rank: list[list]) -> list:
    """Returns, for each epoch and round, the batches of all logical ranks in order."""
    return [
        [[batch for of_rank in rounds for batch in of_rank] for rounds in zip(*of_epoch)] for of_epoch in zip(*per_rank)
    ]


CASES = [{}, {"replication_factor": 0.3}]


@pytest.mark.parametrize("topology", ["whole", "parts"])
@pytest.mark.parametrize(("trainers", "storage"), [(1, 1), (2, 3), (4, 1)])
def test_batches_are_those_of_one_process(tmp_path: Path, topology: str, trainers: int, storage: int) -> None:
    root = directory(tmp_path / "data", topology)
    expected = together([rounds_of(salientpp.load(root))])
    per_rank = distributed.run(_train_or_store, trainers + storage, root, storage, CASES)
    for number, options in enumerate(CASES):
        found = together([of_rank[number] for of_rank in per_rank if of_rank is not None])
        assert found == expected, options
