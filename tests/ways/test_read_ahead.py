"""Laws of reading ahead: buffers change bytes and never batches, errors name the file, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import os
import pickle
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import distributed
import numpy as np
import pytest
import torch
from batches import differences
from graphs import random_data, random_hetero
from torch_geometric.data import Data

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.engine.pipeline import StageError
from salientpp.ways.read_ahead import ReadAhead

FANOUTS, SAME = [5, 4], {"batch_size": 16, "shuffle": True, "seed": 3}
#: Bytes that hold about three batches, and bytes that hold all rows.
FEW, ALL = 600_000, 20_000_000
NUM_VERTICES, WIDTH = 6000, 64


def graph() -> Data:
    data = random_data(NUM_VERTICES, 36_000, seed=2)
    data.x = torch.rand(NUM_VERTICES, WIDTH, generator=torch.Generator().manual_seed(1))
    data.train_mask = torch.arange(NUM_VERTICES) < 320
    return data


def parts(folder, number: int = 1, **options) -> salientpp.PartitionedGraph:
    salientpp.partition(graph(), number, folder, FANOUTS, 16, refine=False, **options)
    return salientpp.load(folder)


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    return parts(tmp_path_factory.mktemp("files") / "parts")


def mapped_graph(folder) -> Data:
    """The graph with its rows in x.npy."""
    data = graph()
    np.save(folder / "x.npy", data.x.numpy())
    data.x = torch.from_numpy(np.load(folder / "x.npy", mmap_mode="c"))
    return data


def assert_same(loader, plain, epochs: int = 1) -> None:
    for _ in range(epochs):
        for ours, want in zip(loader, plain, strict=True):
            assert differences(ours, want) == []


def way_of(loader) -> ReadAhead:
    return loader.engine.way(ReadAhead)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_bytes", [FEW, ALL])
@pytest.mark.parametrize("depth", [1, 10])
def test_batches_are_the_same(part, num_workers, num_bytes, depth):
    options = {**SAME, "num_workers": num_workers, "depth": depth}
    plain = NeighborLoader(part, FANOUTS, "train", **options)
    loader = NeighborLoader(part, FANOUTS, "train", read_ahead=num_bytes, **options)
    assert_same(loader, plain, 3)
    assert loader.stats().bytes_from_files > 0 == plain.stats().bytes_from_files
    assert all(buffer.num_held == 0 for buffer in way_of(loader).buffers.values())


def test_rows_that_all_fit_are_read_once(part):
    loader = NeighborLoader(part, FANOUTS, "train", read_ahead=ALL, **SAME)
    for _ in range(30):
        for _ in loader:
            pass
    read = loader.stats().bytes_from_files
    loader.reset_stats()
    assert loader.stats().bytes_from_files == 0
    list(loader)
    assert read > 0 and loader.stats().bytes_from_files <= 40 * 4096  # rows that no earlier epoch needed


def test_a_longer_window_reads_fewer_bytes(part):
    """A buffer reads a page once for several batches; a page cache of no pages reads it once for each."""
    loader = NeighborLoader(part, FANOUTS, "train", read_ahead=2 * FEW, num_workers=2, **SAME)
    pages = 0
    for batch in loader:
        pages += torch.unique(batch.n_id * WIDTH * 4 // 4096).numel()
    assert loader.stats().bytes_from_files < 0.8 * pages * 4096


def test_memory_stays_within_the_bytes(part):
    for num_bytes in (FEW, ALL):
        loader = NeighborLoader(part, FANOUTS, "train", read_ahead=num_bytes, **SAME)
        assert 0 < loader.memory_used()["read_ahead"] <= num_bytes
        assert loader.memory_used()["host"] >= NUM_VERTICES * WIDTH * 4


def test_memory_stays_within_the_bytes_without_batches(part):
    """The buffer has a slot on each rank. A slot has a row and 29 bytes of tables; the table of all rows has 4 bytes for each."""
    nodes, table, slot = torch.zeros(0, dtype=torch.int64), 4 * NUM_VERTICES, 4 * WIDTH + 29
    loader = NeighborLoader(part, FANOUTS, nodes, read_ahead=table + slot, **SAME)
    assert loader.memory_used()["read_ahead"] == table + slot
    with pytest.raises(ValueError, match="read_ahead must hold the rows of several batches"):
        NeighborLoader(part, FANOUTS, nodes, read_ahead=table + slot - 1, **SAME)


def test_an_epoch_that_ends_early_and_one_that_is_resumed(part):
    options = {**SAME, "num_workers": 2}
    plain = NeighborLoader(part, FANOUTS, "train", **options)
    loader = NeighborLoader(part, FANOUTS, "train", read_ahead=FEW, **options)
    for number, _ in enumerate(loader):
        if number == 5:
            break
    state = loader.state_dict()
    loader.set_epoch(0)
    assert_same(loader, plain)
    again = NeighborLoader(part, FANOUTS, "train", read_ahead=FEW, **options)
    again.load_state_dict(state)
    plain.load_state_dict(state)
    assert_same(again, plain)


def test_a_copy_of_a_loader_reads_for_itself(tmp_path):
    data = mapped_graph(tmp_path)
    loader = NeighborLoader(data, FANOUTS, data.train_mask, read_ahead=FEW, **SAME)
    next(iter(loader))
    loader.reset_stats()
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        other.set_epoch(0)
        plain = NeighborLoader(data, FANOUTS, data.train_mask, **SAME)
        assert_same(other, plain)
        assert other.stats().bytes_from_files > 0
    assert_same(loader, plain)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_forked_child_goes_on_with_the_epoch(tmp_path, num_workers):
    data = mapped_graph(tmp_path)
    want = list(NeighborLoader(data, FANOUTS, data.train_mask, **SAME))
    loader = NeighborLoader(data, FANOUTS, data.train_mask, read_ahead=FEW, num_workers=num_workers, **SAME)
    epoch = iter(loader)
    first = [next(epoch) for _ in range(4)]

    def go_on() -> None:
        for ours, expected in zip([*first, *epoch], want, strict=True):
            assert differences(ours, expected) == []

    child = multiprocessing.get_context("fork").Process(target=go_on)
    child.start()
    go_on()
    child.join()
    assert child.exitcode == 0


def test_links_and_typed_graphs(tmp_path):
    data = random_hetero(seed=1)
    for number, store in enumerate(data.node_stores):
        store.x = torch.rand(store.num_nodes, 40 + number)
    type_ = data.node_types[0]
    fanouts = {relation: [3, 2] for relation in data.edge_types}
    seeds = (type_, torch.arange(0, data[type_].num_nodes, 2))
    columns = {}
    for store in data.node_stores:
        np.save(tmp_path / f"{store._key}.npy", store.x.numpy())
        columns[store._key, "x"] = torch.from_numpy(np.load(tmp_path / f"{store._key}.npy", mmap_mode="r"))
    options = {**SAME, "columns": columns, "num_workers": 1}
    plain = NeighborLoader(data, fanouts, seeds, **options)
    loader = NeighborLoader(data, fanouts, seeds, read_ahead=ALL, **options)
    assert_same(loader, plain, 2)
    assert loader.stats().bytes_from_files > 0 and len(way_of(loader).buffers) > 1
    relation = data.edge_types[0]
    links = [LinkNeighborLoader(data, fanouts, (relation, None), read_ahead=n, **options) for n in (ALL, 0)]
    assert_same(*links)


@pytest.mark.parametrize("options", [{"store_as": {"x": "int8"}}, {"send_as": {"x": "fp16"}}], ids=str)
def test_narrow_rows(tmp_path, options):
    stored = {name: options.pop(name) for name in ("store_as",) if name in options}
    part = parts(tmp_path / "parts", 1, **stored)
    plain = NeighborLoader(part, FANOUTS, "train", **SAME, **options)
    loader = NeighborLoader(part, FANOUTS, "train", read_ahead=FEW, **SAME, **options)
    assert_same(loader, plain)
    assert loader.stats().bytes_from_files > 0


def test_disjoint_trees_hold_a_row_several_times(part):
    options = {**SAME, "disjoint": True}
    plain = NeighborLoader(part, FANOUTS, "train", **options)
    assert_same(NeighborLoader(part, FANOUTS, "train", read_ahead=FEW, **options), plain)


def typed_parts(folder, part_of_author: torch.Tensor, **options) -> salientpp.PartitionedGraph:
    """Four parts of a typed graph. Authors have rows of another width and dtype than papers, and an attribute without columns."""
    data = random_hetero(seed=1)
    papers, authors = data["paper"].num_nodes, data["author"].num_nodes
    data["author"].x = torch.rand(authors, 24, generator=torch.Generator().manual_seed(2)).double()
    data["author"].none = torch.zeros(authors, 0)
    data["paper"].train_mask = torch.ones(papers, dtype=torch.bool)
    assignment = {"paper": torch.arange(papers) % 4, "author": part_of_author, "venue": torch.arange(6) % 4}
    salientpp.partition(data, 4, folder, TYPED, 16, method=assignment, **options)
    return salientpp.load(folder)


TYPED = {relation: [5, 5] for relation in random_hetero().edge_types}
COLUMNS = [("author", "x"), ("author", "none"), ("paper", "x")]


@pytest.mark.parametrize("options", [{}, {"store_as": {("author", "x"): "fp16"}}], ids=["plain", "narrow"])
@pytest.mark.parametrize("with_authors", [(1, 2, 3), (0, 1, 2), (0, 3), (2,), (0, 1, 2, 3)], ids=str)
def test_parts_without_rows_do_not_decide_for_others(tmp_path, with_authors, options):
    """One process serves all parts. In some of them, first, last or several, no vertex has the type."""
    part_of_author = torch.tensor(with_authors)[torch.arange(35) % len(with_authors)]
    part = typed_parts(tmp_path / "parts", part_of_author, **options)
    given = {**SAME, "columns": COLUMNS}
    plain = NeighborLoader(part, TYPED, ("paper", "train"), **given)
    loader = NeighborLoader(part, TYPED, ("paper", "train"), read_ahead=ALL, **given)
    assert "author" in way_of(loader).buffers
    want = list(plain)  # kept, so that no memory with the right rows is used again
    assert_same(loader, want)


def _in_two_parts(rank: int, root: str, typed: bool) -> tuple[int, list]:
    fanouts, seeds = (TYPED, ("paper", "train")) if typed else (FANOUTS, "train")
    plain, loader = (
        NeighborLoader(salientpp.load(root), fanouts, seeds, read_ahead=bytes_, batch_size=8, uneven="exact", seed=3)
        for bytes_ in (0, ALL)
    )
    want = list(plain)
    batches = list(zip(loader, want, strict=True))
    return len(batches), [names for ours, want in batches if (names := differences(ours, want))]


@pytest.mark.parametrize("topology", ["whole", "parts"])
def test_a_rank_without_rows_reads_nothing_ahead(tmp_path, topology):
    """A part without vertices, and a typed one where the first part of a rank has none of a type."""
    data = random_data(100, 300)
    method = torch.zeros(100, dtype=torch.long)
    salientpp.partition(data, 2, tmp_path / "parts", FANOUTS, 8, method=method, topology=topology)
    typed_parts(tmp_path / "typed", torch.arange(35) % 3 + 1, topology=topology)
    for name in ("parts", "typed"):
        found = distributed.run(_in_two_parts, 2, str(tmp_path / name), name == "typed")
        assert [wrong for _, wrong in found] == [[], []] and found[0][0] > 0


# --- refusals and failures --------------------------------------------------------------------------------


def test_rows_in_memory_are_refused_by_name():
    with pytest.raises(
        ValueError, match=r"^read_ahead=1000 reads rows of memory-mapped files, but the rows of 'x'.* in no such file; "
    ):
        NeighborLoader(graph(), FANOUTS, read_ahead=1000, **SAME)


def test_bytes_that_hold_less_than_a_few_batches_are_refused(part):
    with pytest.raises(ValueError, match=r"^read_ahead must hold the rows of several batches, .*, got 1000; "):
        NeighborLoader(part, FANOUTS, "train", read_ahead=1000, **SAME)


def test_the_bytes_that_the_refusal_names_suffice_and_so_do_more(tmp_path):
    """Waiting batches of many edges leave the buffer the rows of a batch, however narrow these are."""
    data = graph()
    data.x = torch.arange(data.num_nodes, dtype=torch.int32).view(-1, 1)
    root = tmp_path / "narrow"
    narrow = salientpp.partition(data, 1, root, [3], 4, method=torch.zeros(data.num_nodes, dtype=torch.int64))
    options = {"batch_size": 4, "disjoint": True}
    with pytest.raises(ValueError, match="read_ahead must hold") as refusal:
        NeighborLoader(narrow, [-1, -1], torch.arange(200), read_ahead=100, **options)
    least = int(str(refusal.value).split("expected about ")[1].split()[0])
    plain = NeighborLoader(narrow, [-1, -1], torch.arange(200), **options)
    for num_bytes in (least + 1, least * 5 // 4, least * 3 // 2, least * 2, least * 8):
        assert_same(NeighborLoader(narrow, [-1, -1], torch.arange(200), read_ahead=num_bytes, **options), plain)
        plain.set_epoch(0)


def test_rows_that_are_replaced_are_delivered(tmp_path):
    data = mapped_graph(tmp_path)
    loader = NeighborLoader(data, FANOUTS, data.train_mask, read_ahead=FEW, **SAME)
    for batch in loader:
        assert torch.equal(batch.x, data.x[batch.n_id])
    data.x = torch.zeros(NUM_VERTICES, 2)
    for batch in loader:
        assert torch.equal(batch.x, data.x[batch.n_id])


def test_a_batch_that_is_larger_than_the_buffer_reads_its_own_rows(part):
    plain = NeighborLoader(part, FANOUTS, "train", **SAME)
    loader = NeighborLoader(part, FANOUTS, "train", read_ahead=FEW, **SAME)
    for buffer in way_of(loader).buffers.values():
        buffer.__init__(buffer.columns, 100)
    assert_same(loader, plain, 2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_that_is_cut_short_fails_the_batch(tmp_path, num_workers):
    data = mapped_graph(tmp_path)
    loader = NeighborLoader(data, FANOUTS, data.train_mask, read_ahead=FEW, num_workers=num_workers, **SAME)
    os.truncate(tmp_path / "x.npy", 500_000)
    size = NUM_VERTICES * WIDTH * 4 + 128
    words = rf"^rank 0, batch 0, stage copy_to_device: .*x\.npy was cut short .* at least {size} bytes, got 500000 \(byte \d+ is missing\)"
    for _ in range(2):  # a new epoch tries again
        with pytest.raises(StageError, match=words):
            list(loader)


def test_the_thread_ends_with_the_loader(part):
    for is_left in (False, True):
        before = set(threading.enumerate())
        loader = NeighborLoader(part, FANOUTS, "train", read_ahead=FEW, num_workers=2, **SAME)
        for _ in loader:
            if is_left:
                break
        mine = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("salientpp-read")]
        assert len(mine) == 1
        del loader
        while mine[0].is_alive():  # the thread first ends what it is reading
            gc.collect()
            mine[0].join(0.1)


# --- ranks ------------------------------------------------------------------------------------------------


def _run(rank: int, root: str) -> list:
    found = []
    for options in ({}, {"replication_factor": 0.2}, {"num_workers": 1, "replication_factor": 0.2, "lookahead": 4}):
        plain = NeighborLoader(salientpp.load(root), FANOUTS, "train", **SAME, **options)
        loader = NeighborLoader(salientpp.load(root), FANOUTS, "train", read_ahead=FEW, **SAME, **options)
        wrong = [
            names
            for _ in range(2)
            for ours, want in zip(loader, plain, strict=True)
            if (names := differences(ours, want))
        ]
        for number, _ in enumerate(loader):
            if number == 3:
                break
        loader.set_epoch(1)
        wrong += [] if len(list(loader)) == len(loader) else ["batches"]
        found.append((wrong, loader.stats().bytes_from_files > 0))
    return found


@pytest.mark.parametrize("topology", ["whole", "parts"])
def test_ranks_read_ahead_for_themselves_and_answer_others(tmp_path, topology):
    parts(tmp_path / "parts", 2, topology=topology)
    for of_rank in distributed.run(_run, 2, str(tmp_path / "parts")):
        assert of_rank == [([], True)] * 3


def _in_turns(loader):
    """Yields the batches of two epochs at once, of which one is begun within the other."""
    first = iter(loader)
    yield from (next(first) for _ in range(3))
    second = iter(loader)
    for _ in range(5):
        yield next(second)
        yield next(first)
    yield from first
    yield from second


def _of_one_number(loader):
    """Yields the batches of an epoch that is iterated twice at once."""
    loader.set_epoch(0)
    first = iter(loader)
    loader.set_epoch(0)
    second = iter(loader)
    for iterator in (first, second, first):
        yield from (next(iterator) for _ in range(4))
    yield from second
    yield from first


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "batches_of", [lambda loader: itertools.chain(*zip(loader, loader)), _in_turns, _of_one_number]
)
def test_two_epochs_at_once_leave_nothing_in_the_buffer(part, batches_of, num_workers):
    options = {**SAME, "num_workers": num_workers}
    plain = NeighborLoader(part, FANOUTS, "train", **options)
    loader = NeighborLoader(part, FANOUTS, "train", read_ahead=FEW, **options)
    assert_same(batches_of(loader), batches_of(plain))
    assert all(buffer.num_held == 0 for buffer in way_of(loader).buffers.values())


def test_a_batch_that_waits_for_its_rows_does_not_wait_for_an_epoch_that_has_ended(part):
    way = way_of(NeighborLoader(part, FANOUTS, "train", read_ahead=FEW, **SAME))
    way._threads = SimpleNamespace(submit=lambda function: None)  # the thread that reads comes too late
    way.on_requested(None, 0, Future())
    taking = threading.Thread(target=way.take, args=(SimpleNamespace(index=0), lambda: None), daemon=True)
    taking.start()
    while not way._num_starving:
        time.sleep(0.001)
    way.begin_epoch()
    taking.join(60)
    assert not taking.is_alive()
