"""Laws of threads: operators keep no visible state, so any number of threads gives the same results as one.

Under ThreadSanitizer (make sanitize), these tests also show that no two threads access the same memory without synchronisation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import distributed
import torch
from graphs import random_data
from operator_cases import CASES
from torch import Tensor

import salientpp
from salientpp import Graph, NeighborLoader, ops

THREADS = 4
DATA = random_data(3000, 60_000, seed=5, directed=True)
GRAPH = Graph.from_data(DATA)
OUT = GRAPH.transpose()
LISTS = (OUT.indptr, OUT.indices)  # made here, so that no two threads make it at the same time
ROWS = torch.rand(3000, 400, generator=torch.Generator().manual_seed(1))
SEEDS = torch.arange(0, 3000, 7)
BOOK = torch.tensor([0, 900, 1000, 3000])
HOT, CACHED = ops.pack_id_set(torch.arange(0, 100, 3), 100), ops.pack_id_set(torch.arange(0, 3000, 5), 3000)


def gather(key: int) -> Tensor:
    """Gathers 2,000 rows of 1,600 bytes: more than a thread's share, so the kernel starts threads of its own."""
    index = ops.permutation(3000, key)[:2000]
    out = torch.empty(3000, 400)
    ops.gather_rows(ROWS, index, out, index)
    return out[index]


#: Name -> task of a thread; a task returns tensors that depend only on the key.
TASKS = {
    "sample": lambda key: ops.sample_neighbors(GRAPH.indptr, GRAPH.indices, GRAPH.edge_id, SEEDS, [5, 3], key),
    "sample by hash map": lambda key: ops.sample_neighbors(
        GRAPH.indptr, GRAPH.indices, None, SEEDS, [4, -1], key, bool(key % 2), map_budget_bytes=0
    ),
    "sample a hub": lambda key: ops.sample_neighbors(
        GRAPH.indptr, GRAPH.indices, None, torch.tensor([key % 7]), [60, 60], key
    ),
    "draw for a hop": lambda key: ops.draw_from_lists(
        GRAPH.indptr, GRAPH.indices, None, None, SEEDS, SEEDS, None, None, 60, key, 0, 0, 0, shared=bool(key % 2)
    ),
    "join a hop": lambda key: sum(
        ops.join_drawn(
            [SEEDS],
            [],
            [0],
            [torch.full_like(SEEDS, 2)],
            [ops.permutation(3000, key)[: 2 * len(SEEDS)]],
            [0],
            [0],
            [3000],
        ),
        [],
    ),
    "merge": lambda key: ops.merge_lists(
        3000, [ops.permutation(3000, key)], [torch.full((3000,), 2)], [ops.permutation(6000, key)]
    ),
    "divide": lambda key: [
        tensor
        for of in ops.divide_batch(
            SEEDS,
            *(ops.permutation(len(SEEDS), key + i) for i in range(2)),
            None,
            ops.permutation(len(SEEDS), key + 2) % 3,
            [len(SEEDS)],
            [len(SEEDS)],
            3,
        )
        for tensor in of
    ],
    "induce": lambda key: ops.edges_between(
        GRAPH.indptr, GRAPH.indices, None, SEEDS, None, None, ops.permutation(3000, key)[:500], None, 3000
    ),
    "push": lambda key: ops.ppr_push(GRAPH.indptr, GRAPH.indices, SEEDS, 0.2, 1e-3, 5 + key % 3),
    "permute": lambda key: [ops.permutation(5000, key)],
    "look up": lambda key: ops.look_up(ops.permutation(3000, key), BOOK, 1, [HOT], [CACHED]),
    "pack": lambda key: [ops.pack_id_set(ops.permutation(3000, key)[:700].sort().values, 3000)],
    "gather": lambda key: [gather(key)],
    "inclusion": lambda key: [
        ops.inclusion_probability(
            GRAPH.indptr,
            *LISTS,
            ops.permutation(3000, key)[:600],
            torch.tensor([0, 100, 300, 600]),
            [5, 3],
            8,
            frontier=bool(key % 2),
            include_seeds=True,
            replace=False,
        )
    ],
    "sort edges": lambda key: ops.csc_from_coo(ops.permutation(3000, key), ops.permutation(3000, key + 1), 3000),
    "transpose": lambda key: ops.transpose_csc(GRAPH.indptr, GRAPH.indices),
    "rebalance": lambda key: [
        ops.rebalance_parts(
            GRAPH.indptr,
            GRAPH.indices,
            ops.permutation(3000, key) % 3,
            torch.ones(3000, 1, dtype=torch.int64),
            torch.tensor([900]),
            4,
            2,
        )
    ],
}


def test_all_operators_give_the_same_in_many_threads_at_once():
    jobs = [(task, key) for key in range(4) for task in TASKS.values()]
    # Also call every operator with the arguments of test_ops; outputs are among the arguments.
    jobs += [(operator_task(name, case()), None) for name, cases in CASES.items() for case in cases]
    alone = [task(key) for task, key in jobs]
    start = Barrier(THREADS)

    def work(thread: int) -> list:
        start.wait()
        order = [(i + thread * len(jobs) // THREADS) % len(jobs) for i in range(len(jobs))]  # each starts elsewhere
        return [(i, jobs[i][0](jobs[i][1])) for i in order]

    with ThreadPoolExecutor(THREADS) as pool:
        for results in pool.map(work, range(THREADS)):
            for i, result in results:
                assert all(same(a, b) for a, b in zip(result, alone[i], strict=True)), jobs[i]


def operator_task(name: str, given: tuple) -> Callable[[object], list]:
    def run(_: object) -> list:
        arguments = copy.deepcopy(given)
        names = ARGUMENTS[name][: len(arguments)]  # trailing arguments may be omitted
        result = getattr(ops, name)(**dict(zip(names, arguments, strict=True)))
        return [*arguments, *(result if isinstance(result, tuple) else [result])]

    return run


ARGUMENTS = {
    name: [argument.name for argument in getattr(torch.ops.salientpp, name).default._schema.arguments] for name in CASES
}


def same(a: object, b: object) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_a_loader_with_many_workers_gives_the_same_batches():
    def batches(num_workers: int, **options) -> list:
        loader = NeighborLoader(
            DATA, [5, 3], SEEDS, batch_size=64, shuffle=True, seed=3, num_workers=num_workers, **options
        )
        return [(batch.n_id, batch.edge_index, batch.e_id, batch.x, batch.y) for _ in range(2) for batch in loader]

    plain = batches(0, depth=1)
    for options in ({}, {"device_rows": 0.3}, {"depth": 3}):
        for batch, expected in zip(batches(4, **options), plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(batch, expected, strict=True)), options


SHARING = 8


def _in_threads(work: Callable[[int], Any]) -> list:
    start = Barrier(SHARING)

    def begin(number: int) -> Any:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(SHARING) as pool:
        return list(pool.map(begin, range(SHARING)))


def _loader(**options) -> NeighborLoader:
    return NeighborLoader(DATA, [5, 3], SEEDS, batch_size=8, shuffle=True, seed=3, **options)


def test_threads_that_share_an_iterator_get_each_batch_once():
    for num_workers in (0, 2):
        expected = sorted(batch.n_id.tolist() for batch in _loader())
        loader = _loader(num_workers=num_workers)
        iterator = iter(loader)
        shares = _in_threads(lambda _: [batch.n_id.tolist() for batch in iterator])
        assert sorted(sum(shares, [])) == expected
        assert (loader.stats().batches, loader.stats().rows) == (len(expected), sum(map(len, expected)))


def test_every_iter_in_a_thread_is_a_whole_epoch_of_its_own():
    alone = _loader()
    expected = sorted([batch.n_id.tolist() for batch in alone] for _ in range(2 * SHARING))
    for num_workers in (0, 2):
        loader = _loader(num_workers=num_workers)
        epochs = _in_threads(lambda _: [[batch.n_id.tolist() for batch in loader] for _ in range(2)])
        assert sorted(sum(epochs, [])) == expected
        stats, right = loader.stats(), alone.stats()
        assert (stats.batches, stats.rows, stats.rows_host) == (right.batches, right.rows, right.rows_host)
        assert loader.state_dict()["epoch"] == 2 * SHARING


def _share_on_ranks(rank: int, root: str) -> tuple:
    loader = NeighborLoader(salientpp.load(root), [5, 3], "train", batch_size=8, shuffle=True, seed=1, timeout=60)
    alone = sorted(batch.n_id.tolist() for batch in loader)
    loader.set_epoch(0)
    iterator = iter(loader)
    shared = sum(_in_threads(lambda _: [batch.n_id.tolist() for batch in iterator]), [])
    iterator = iter(loader)
    next(iterator)
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(lambda: iter(loader)).exception()
    given = 1 + sum(1 for _ in iterator)
    with ThreadPoolExecutor(1) as pool:  # the epoch is over, so any thread may begin the next
        later = pool.submit(lambda: len(list(loader))).result()
    return alone == sorted(shared), type(error).__name__, str(error), given == later == len(loader)


def test_threads_of_a_rank_share_one_epoch_and_cannot_begin_two(tmp_path):
    salientpp.partition(random_data(), 2, tmp_path / "parts", [5, 3], 8)
    for whole, kind, text, complete in distributed.run(_share_on_ranks, 2, str(tmp_path / "parts")):
        assert whole and complete and kind == "RuntimeError"
        assert (
            "thread 'MainThread' is in epoch 1 of this loader" in text
            and "share one iterator between the threads" in text
        )
