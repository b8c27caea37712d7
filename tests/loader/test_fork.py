"""Laws of forks: a child's batches equal its parent's, no process waits forever, and neither writes into the other's memory.

Tests that take minutes are marked ``faults`` and run with `make test-faults`. Each random case prints its seed.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.utils.data
from forked_python import python
from graphs import random_data, random_hetero
from rare import rare
from torch_geometric.data import Data, HeteroData

from salientpp import Graph, LinkNeighborLoader, NeighborLoader
from salientpp.engine.run import Epoch
from salientpp.processes import Lock, Threads, connecting

#: Seconds after which a child counts as hanging; long enough for a busy machine.
HANGS = 60


@contextlib.contextmanager
def child(function: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Forks a process that calls ``function``. Yields a function that waits for its result, and fails if the process raised or hangs."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            try:
                result = (function(), None)
            except BaseException:
                result = (None, traceback.format_exc())
            with open(write, "wb") as pipe:
                pickle.dump(result, pipe)
        finally:
            os._exit(0)
    os.close(write)
    pipe = open(read, "rb")

    def wait() -> Any:
        timer = threading.Timer(HANGS, os.kill, (pid, signal.SIGKILL))
        timer.start()
        try:
            text = pipe.read()
        finally:
            timer.cancel()
        assert text, "the child hangs, or was killed"
        value, error = pickle.loads(text)
        assert error is None, error
        return value

    try:
        yield wait
    finally:
        pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def in_child(function: Callable[[], Any]) -> Any:
    with child(function) as wait:
        return wait()


@pytest.fixture(autouse=True)
def parallel():
    """Runs parallel regions in the forking thread, which leave OpenMP unusable in the child's main thread."""
    torch.rand(10**6).sum()


def total(batch: Data | HeteroData) -> int:
    """Adds up everything that a batch holds."""
    plain = [
        (
            key,
            (str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes())
            if isinstance(value, torch.Tensor)
            else repr(value),
        )
        for store in batch.stores
        for key, value in sorted(store.items())
    ]
    return hash(tuple(plain))


@cache
def wide_data() -> Data:
    """Makes data whose batches have rows of several megabytes. These lie in pooled buffers and are gathered in parallel."""
    data = random_data(4000, 20_000)
    data.x = torch.arange(4000).float().view(-1, 1).repeat(1, 300)
    return data


def is_right(batch: Data) -> bool:
    # NumPy has no threads. The first parallel operation of torch in a child's main thread would never end.
    return bool((batch.x.numpy() == batch.n_id.numpy()[:, None]).all())


def wide_loader(**options) -> NeighborLoader:
    return NeighborLoader(wide_data(), [8, 4], **{"batch_size": 400, "shuffle": True, "seed": 3, **options})


def ids(batches: Any) -> list[list[int]]:
    found = []
    for batch in batches:
        assert is_right(batch)
        found.append(batch.n_id.tolist())
    return found


@cache
def expected(epoch: int) -> list[list[int]]:
    loader = wide_loader(depth=1)
    loader.set_epoch(epoch)
    return ids(loader)


WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


@WORKERS
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_child_continues_the_epochs_of_its_parent(num_workers, epochs):
    loader = wide_loader(num_workers=num_workers)
    for _ in range(epochs):
        ids(loader)
    with child(lambda: (ids(loader), ids(loader), loader.stats().batches)) as wait:
        assert ids(loader) == expected(epochs)
        first, second, given = wait()
    assert (first, second) == (expected(epochs), expected(epochs + 1))
    assert given == sum(len(expected(epoch)) for epoch in range(epochs + 2))


@WORKERS
@pytest.mark.parametrize("depth", [1, 4, 10])
def test_a_child_continues_in_mid_epoch_or_begins_the_next(num_workers, depth):
    loader = wide_loader(num_workers=num_workers, depth=depth)
    iterator = iter(loader)
    ids(itertools.islice(iterator, 3))
    with child(lambda: (ids(iterator), ids(loader), loader.state_dict()["epoch"])) as wait:
        assert (ids(iterator), ids(loader)) == (expected(0)[3:], expected(1))
        assert wait() == (expected(0)[3:], expected(1), 2)
    iterator = iter(loader)
    next(iterator)
    assert in_child(lambda: ids(loader)) == expected(3)
    assert ids(iterator) == expected(2)[1:]


@WORKERS
def test_grandchildren_and_multiprocessing_processes_give_the_same_batches(num_workers):
    loader = wide_loader(num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)

    def grandchild() -> tuple:
        next(iterator)
        return ids(itertools.islice(iterator, 1)), in_child(lambda: ids(iterator)), ids(iterator)

    assert in_child(lambda: (in_child(grandchild), ids(iterator))) == (
        (expected(0)[2:3], expected(0)[3:], expected(0)[3:]),
        expected(0)[1:],
    )
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=lambda: queue.put(ids(loader)))
    process.start()
    assert queue.get() == expected(1)
    process.join(HANGS)
    assert process.exitcode == 0


class _Calls(torch.utils.data.Dataset):
    def __init__(self, loader: NeighborLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> list[int]:
        batch = self.loader(torch.arange(100 * index, 100 * index + 100))
        assert is_right(batch)
        return batch.n_id[:100].tolist()


class _Epochs(torch.utils.data.IterableDataset):
    def __init__(self, loader: NeighborLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return iter(ids(self.loader))


@WORKERS
def test_a_loader_works_in_the_workers_of_a_torch_loader(num_workers):
    loader = wide_loader(num_workers=num_workers)
    next(iter(loader))
    calls = torch.utils.data.DataLoader(
        _Calls(loader), num_workers=2, batch_size=None, multiprocessing_context="fork", timeout=HANGS
    )
    for _ in range(2):
        assert list(calls) == [list(range(100 * i, 100 * i + 100)) for i in range(6)]
    epochs = torch.utils.data.DataLoader(
        _Epochs(loader), num_workers=2, batch_size=None, multiprocessing_context="fork", timeout=HANGS
    )
    assert sorted(epochs) == sorted(2 * expected(1))


def test_workers_in_a_child_are_numbered_from_zero():
    numbers: list[int] = []
    loader = wide_loader(num_workers=2, worker_init_fn=numbers.append, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)

    def greeted() -> list[int]:
        numbers.clear()
        ids(iterator)
        ids(loader)
        return sorted(numbers)

    assert set(in_child(greeted)) <= {0, 1}


def test_an_epoch_run_by_another_thread_at_the_fork_is_refused():
    inside, go_on = threading.Event(), threading.Event()

    def wait(batch: Data) -> Data:
        inside.set()
        assert go_on.wait(HANGS)
        return batch

    loader = wide_loader(transform=wait)
    iterator = iter(loader)
    thread = threading.Thread(target=next, args=(iterator,))
    thread.start()
    assert inside.wait(HANGS)

    def use() -> list[list[int]]:
        go_on.set()
        with pytest.raises(
            RuntimeError, match=r"forked while another thread was inside next\(\) of this epoch.*iter\(loader\)"
        ):
            next(iterator)
        loader.transform = None
        return ids(loader)

    assert in_child(use) == expected(1)
    go_on.set()
    thread.join()
    assert ids(iterator) == expected(0)[1:]


@pytest.mark.parametrize("seed", range(3))
def test_forks_at_random_moments_while_threads_iterate(seed):
    """Locks of the buffer pool, of the threads and of the counters may be held at any of these moments."""
    rng, stop = random.Random(seed), threading.Event()
    loader = wide_loader(num_workers=2)

    def iterate() -> None:
        while not stop.is_set():
            ids(itertools.islice(iter(loader), 3))

    threads = [threading.Thread(target=iterate) for _ in range(3)]
    [thread.start() for thread in threads]
    try:
        for _ in range(5):
            time.sleep(rng.random() * 0.05)
            assert in_child(lambda: (loader.set_epoch(5), ids(loader)))[1] == expected(5)
    finally:
        stop.set()
        [thread.join() for thread in threads]


def test_a_child_gets_other_threads_locks_free_and_its_own_held():
    lock, inside, go_on = Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            inside.set()
            go_on.wait(HANGS)

    def take() -> bool:
        with lock:
            return lock.interrupted

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(HANGS)
    assert in_child(take) is True
    go_on.set()
    thread.join()
    with lock:
        assert in_child(take) is False


def test_threads_in_the_child_run_unfinished_tasks_again():
    threads, go_on, began = Threads(1, "test"), threading.Event(), threading.Event()
    tasks = [
        threads.submit(lambda: (began.set(), go_on.wait(HANGS))),
        *(threads.submit(lambda i=i: (i, os.getpid())) for i in range(3)),
    ]
    began.wait(HANGS)
    parent = os.getpid()
    numbers, pids = zip(*in_child(lambda: [task.result() for task in tasks[1:]]))
    assert numbers == (0, 1, 2) and parent not in pids
    go_on.set()
    assert [task.result() for task in tasks[1:]] == [(i, parent) for i in range(3)]


# --- connections ------------------------------------------------------------------------------------------


def test_threads_that_begin_together_in_a_child_can_use_torchs_threads():
    """The first thread in a child makes torch's thread pool again. The other threads must wait for it: otherwise they find no pool in nine children of ten."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # every thread sets this value again
    values, threads = torch.ones(200_000), Threads(8, "test")

    def use() -> list[float]:
        together = threading.Barrier(8)

        def total() -> float:
            together.wait(HANGS)
            return values.sum().item()

        return [task.result() for task in [threads.submit(total) for _ in range(8)]]

    try:
        for _ in range(5):
            assert in_child(use) == [200_000.0] * 8
    finally:
        torch.set_num_threads(before)


def test_a_child_sorts_edges_that_several_threads_would_sort():
    edge_index = torch.randint(1000, (2, 600_000))

    def number() -> int:
        return Graph.from_edge_index(edge_index, 1000).num_edges

    assert number() == in_child(number) == 600_000


def test_only_sockets_of_the_connecting_library_are_closed_in_a_child():
    import select
    import socket

    mine = socket.create_server(("127.0.0.1", 0))
    mine.set_inheritable(True)
    with connecting():
        poll = select.epoll()
        server = socket.create_server(("127.0.0.1", 0))
        theirs = socket.create_connection(server.getsockname())
        other = socket.create_connection(mine.getsockname())  # a connection of another thread; no epoll watches it
        file = open(os.devnull)
        [poll.register(each) for each in (server, theirs)]
        [each.set_inheritable(True) for each in (server, theirs, other)]
    late = socket.create_connection(mine.getsockname())
    assert [each.get_inheritable() for each in (server, theirs, other, mine)] == [False, False, True, True]
    number = theirs.fileno()

    def is_open(each: Any) -> bool:
        try:
            os.fstat(each.fileno())
            return True
        except OSError:
            return False

    everything = (server, theirs, other, file, late, mine)
    assert in_child(lambda: [is_open(each) for each in everything]) == [False, False, True, True, True, True]
    assert all(map(is_open, everything)), "the parent's connections stay open"
    theirs.close()
    again = [open(os.devnull)]
    while again[-1].fileno() < number:
        again.append(open(os.devnull))
    assert again[-1].fileno() == number
    assert in_child(lambda: is_open(again[-1])), "the number belongs to another file now"


# --- other ways out of the process ------------------------------------------------------------------------


def _send(loader: NeighborLoader, queue: Any, done: Any) -> None:
    for batch in loader:
        queue.put(batch)
    queue.put(None)
    done.wait(HANGS)


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
@pytest.mark.parametrize("method", ["fork", *rare("spawn")])
def test_batches_keep_their_values_when_sent_to_another_process(strategy, method):
    former = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        context = torch.multiprocessing.get_context(method)
        queue, done = context.Queue(), context.Event()
        loader = wide_loader(num_workers=2)
        process = context.Process(target=_send, args=(loader, queue, done))
        process.start()
        assert ids(iter(lambda: queue.get(timeout=HANGS), None)) == expected(0)
        done.set()
        process.join(HANGS)
        assert process.exitcode == 0
        # Sending must keep this process's batches intact too: the pool may reuse their memory only after the receiver has a copy.
        queue = context.SimpleQueue()
        for batch, numbers in zip(loader, expected(0), strict=True):
            queue.put(batch)
            del batch
            assert ids([queue.get()]) == [numbers]
    finally:
        torch.multiprocessing.set_sharing_strategy(former)


def test_a_batch_in_shared_memory_keeps_its_values_in_a_child():
    loader = wide_loader()
    iterator = iter(loader)
    batch = next(iterator).share_memory_()
    assert is_right(batch) and batch.x.is_shared()
    ids(iterator)
    assert is_right(batch)
    in_child(lambda: batch.x.numpy().fill(0))
    assert not batch.x.any()


def test_a_loader_can_be_used_at_exit():
    script = """
    import atexit
    from graphs import random_data
    from salientpp import NeighborLoader
    loader = NeighborLoader(random_data(), [5, 3], batch_size=50, num_workers=2, seed=1)
    next(iter(loader))
    numbers = [batch.n_id.tolist() for batch in loader]
    loader.set_epoch(1)
    atexit.register(lambda: print([batch.n_id.tolist() for batch in loader] == numbers, flush=True))
    """
    done = subprocess.run(
        [python(), "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=HANGS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


# --- random cases -----------------------------------------------------------------------------------------

KINDS: dict[str, Callable[..., Any]] = {
    "wide": lambda **options: wide_loader(**options),
    "small": lambda **options: NeighborLoader(small(), [4, 3], batch_size=24, shuffle=True, seed=3, **options),
    "types": lambda **options: NeighborLoader(
        typed(), [3, 2], input_nodes="paper", batch_size=6, shuffle=True, seed=3, **options
    ),
    "links": lambda **options: LinkNeighborLoader(
        small(), [3, 2], neg_sampling="binary", batch_size=300, shuffle=True, seed=3, **options
    ),
}


@cache
def small() -> Data:
    return random_data(edge_attributes=True)


@cache
def typed() -> HeteroData:
    return random_hetero()


@cache
def summary(kind: str, epoch: int) -> list[int]:
    loader = KINDS[kind](depth=1)
    loader.set_epoch(epoch)
    return [total(batch) for batch in loader]


def _live(
    kind: str, loader: Any, epoch: int, iterator: Epoch | None, given: int, rng: random.Random, generation: int
) -> int:
    """Does a few random things with the loader, some of them in children. Returns the number of forks.

    Args:
        epoch: the loader's next epoch.
        iterator, given: the iterator of epoch ``epoch - 1``, if it has begun, and the number of batches that it has given.
    """
    forks = 0
    held: list[tuple[Any, int]] = []
    for _ in range(rng.randrange(2, 6)):
        what = rng.choice(
            ["begin", "batches", "rest", "leave", "fork", "fork"]
            if generation < 3
            else ["begin", "batches", "rest", "leave"]
        )
        if what == "begin":
            iterator, given, epoch = iter(loader), 0, epoch + 1
        elif what == "leave" and iterator is not None:
            iterator.close() if rng.random() < 0.5 else None
            iterator = None
        elif what in ("batches", "rest") and iterator is not None:
            right = summary(kind, epoch - 1)
            for batch in itertools.islice(iterator, rng.randrange(4) if what == "batches" else None):
                assert total(batch) == right[given]
                held.append((batch, right[given]))
                given += 1
            if what == "rest":
                assert given == len(right)
                iterator = None
        elif what == "fork":
            seed = rng.random()
            with child(
                lambda: _live(kind, loader, epoch, iterator, given, random.Random(seed), generation + 1)
            ) as wait:
                # Both at the same time, or one after the other.
                early = wait() if rng.random() < 0.3 else None
                if iterator is not None:
                    for batch in itertools.islice(iterator, rng.randrange(3)):
                        assert total(batch) == summary(kind, epoch - 1)[given]
                        given += 1
                forks += 1 + (wait() if early is None else early)
        held = held[-3:]
        assert all(total(batch) == value for batch, value in held), "a batch that was kept has changed"
        if rng.random() < 0.2 and held:
            held.pop()[0].apply(lambda tensor: tensor.numpy().fill(0))  # the batch belongs to the user alone
    return forks


def _random_forks(number: int, seed: int) -> int:
    forks = 0
    for case in range(number):
        rng = random.Random(f"{seed} {case}")
        kind, num_workers, depth = (
            rng.choices(list(KINDS), [1, 5, 5, 5])[0],
            rng.randrange(4),
            rng.choice([1, 2, 3, 5, 10]),
        )
        print(f"seed {seed}, case {case}: {kind}, {num_workers} workers, depth {depth}", flush=True)
        for epoch in range(6 if kind == "wide" else 12):
            summary(kind, epoch)  # computed before the fork, so that not every child computes it
        loader = KINDS[kind](num_workers=num_workers, depth=depth)
        forks += (
            in_child(lambda: _live(kind, loader, 0, None, 0, rng, 0)) + 1
            if rng.random() < 0.1
            else _live(kind, loader, 0, None, 0, rng, 0)
        )
    print(f"{number} cases, {forks} forks")
    return forks


def test_forks_at_random_points_change_no_batch():
    assert _random_forks(15, seed=1) > 5


@pytest.mark.faults
def test_very_many_forks_at_random_points_change_no_batch():
    assert _random_forks(1000, seed=random.randrange(2**31)) > 500
