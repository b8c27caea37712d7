"""Uses of a graph whose rows lie elsewhere: on storage ranks of their job, or on storage hosts of a session."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from salientpp.ranks.groups import Circle
from salientpp.testing.topology import CASES, make

PARTS = 8

#: Cases that are left out: storage ranks refuse sums, and static batches cannot be listed.
OTHERS = {"mean", "weighted sum", "one size"}

#: Cases whose seeds depend on the number of a rank's part. A single rank has no such number without storage ranks.
BY_PART = {"few seeds", "pairs", "edge times", "last edges", "window"}


def contents(value: Any) -> Any:
    """Returns the contents of a batch as plain values that can be compared."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            list(value.shape),
            value.float().tolist() if value.dtype == torch.bfloat16 else value.tolist(),
        )
    if isinstance(value, dict):
        return {name: contents(of) for name, of in value.items()}
    return value if isinstance(value, (int, float, str, type(None))) else str(value)


def epoch_of(loader: Any) -> list[list[Any]]:
    return [[contents(batch.to_dict()) for batch in batches] for batches in loader.rounds()]


#: Number of storage hosts of a session.
NUM_HOSTS = 2

#: Where the rows are: the number of storage ranks, or addresses of storage hosts by the name of the graph.
Where = int | Mapping[str, str]


def how(storage: Where) -> dict[str, Any]:
    return {"storage_ranks": storage} if isinstance(storage, int) else {"hosts": storage}


def number_of(storage: Where) -> int:
    return storage if isinstance(storage, int) else NUM_HOSTS


def together(per_rank: list[Any]) -> list[Any]:
    """Returns the rounds of all ranks, with the batches of each round in the order of the ranks."""
    return [[batch for of_rank in rounds for batch in of_rank] for rounds in zip(*per_rank)]


def epochs_of(rank: int, root: Path, form: str, storage: Where, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        loader = make(root, CASES[name], form, **how(storage))
        found[name] = epoch_of(loader)
        for type_, rows in loader.stats().by_type.items():
            is_own = not storage or type_ in loader.data.replicated
            assert is_own or rows["host"] == rows["device"] == 0, f"{name}: this rank holds no rows of its own"
    return found


def planned(rank: int, root: Path, form: str, storage: Where) -> list[Any]:
    found = []
    for options in (
        {"memory": "4kB"},
        {"memory": "4kB", "policy": "degree"},
        {"replication_factor": "4kB", "lookahead": 4},
        {"memory": "4kB", "ranks_per_host": 2 + number_of(storage)},
    ):
        loader = make(root, CASES["three hops"], form, **how(storage), **options)
        groups = loader.engine.basis.comm.groups
        assert groups is None or not groups.under_way, "every message of the plan is waited for, and its memory freed"
        epochs = [epoch_of(loader) for _ in range(2)]
        assert loader.memory_used()["cache"] <= 4000
        if storage:
            assert loader.stats().rows_cache > 0, options
        if storage and "memory" in options:
            rows, tables = len(loader.cache), 4 * loader.data.num_vertices
            assert loader.memory_used()["cache"] + 8 * rows + min(tables, 2000) <= 4000, options
        found.append(epochs)
    return found


def uses(rank: int, root: Path, form: str, storage: Where) -> list[Any]:
    """Loops that end early, two loaders at once, a dropped one, and a resumed one."""

    def made(**options: Any) -> Any:
        return make(
            root,
            CASES["logical ranks"],
            form,
            **how(storage),
            **{"logical_ranks": PARTS, "batch_size": 4, **options},
        )

    found: list[Any] = []
    loader, other = made(num_workers=1), made(input_nodes="val", shuffle=False, num_neighbors=[2])
    for stop in (0, 2, 1 + rank, 100):
        found.append([contents(batch.to_dict()) for batch in itertools.islice(iter(loader), stop)])
    for one, two in zip(loader.rounds(), other.rounds()):
        found.append([contents(batch.to_dict()) for batch in [*one, *two]])
    for _ in range(6):
        del other
        gc.collect()
        other = made(input_nodes="val")
        found.append(epoch_of(other))
    again = made()
    for _ in itertools.islice(again.rounds(), 1):
        pass
    state = again.state_dict()
    following = made()
    following.load_state_dict(state)
    found.append([epoch_of(following) for _ in range(2)])
    if dist.get_world_size() > 1:
        job = loader.data.job
        assert len(Circle.of(job, job.ranks).groups) <= 8, "storage ranks drop loaders too"
        slowest = loader.metrics(all_ranks=True)["ranks.slowest"]
        assert 0 <= slowest < job.size - number_of(storage)
    return [found, state]


def resumed(rank: int, root: Path, form: str, storage: Where, state: dict[str, Any]) -> list[Any]:
    loader = make(root, CASES["logical ranks"], form, **how(storage), logical_ranks=PARTS, batch_size=4)
    loader.load_state_dict(state)
    return epoch_of(loader)
