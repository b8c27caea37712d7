"""Laws of `salientpp.ranks.mail`: letters arrive as separate all-to-alls bring them, in fewer messages, and batches stay the same."""

from __future__ import annotations

import gc
import os
import random
import signal
import weakref
from datetime import timedelta

import distributed
import pytest
import torch
from distributed import NEVER
from graphs import random_data

import salientpp
from salientpp import NeighborLoader
from salientpp.ranks.comm import Comm
from salientpp.ranks.mail import Letter, Mail

DTYPES = [torch.uint8, torch.bool, torch.float16, torch.int32, torch.int64, torch.float64]


def _letters(rank: int, size: int, rng: random.Random) -> list[tuple[torch.Tensor, list[int], list[int]]]:
    """Returns the arguments of 0 to 5 letters. All ranks draw the same sizes, and many pieces are empty."""
    found = []
    for number in range(rng.randrange(6)):
        dtype, row_shape = rng.choice(DTYPES), rng.choice([(), (1,), (3,), (2, 2), (0,)])
        counts = [[rng.choice([0, 0, 1, 2, 7]) for _ in range(size)] for _ in range(size)]
        shape = (sum(counts[rank]), *row_shape)
        values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(1000 * rank + number))
        found.append((values.to(dtype), counts[rank], [of_rank[rank] for of_rank in counts]))
    return found


def _exchange(rank: int, seed: int, merges: bool) -> None:
    comm, rng = Comm.create(), random.Random(seed)
    mail, messages = Mail(comm, merges=merges), 0
    for _ in range(60):
        mine = _letters(rank, comm.size, rng)
        posted = [mail.post(*letter) for letter in mine]
        is_late = rng.random() < 0.5
        if not is_late:
            mail.flush()
        rows = comm.all_to_all(torch.full((comm.size,), rank), [1] * comm.size, [1] * comm.size)
        order = rng.sample(range(len(mine)), len(mine))
        arrived = {place: posted[place].wait() for place in order}
        assert rows.wait().tolist() == list(range(comm.size))
        for place, letter in enumerate(mine):
            expected = comm.all_to_all(*letter).wait()
            assert torch.equal(arrived[place], expected) and arrived[place].dtype == expected.dtype
            assert arrived[place].shape == expected.shape and posted[place].nbytes_received == expected.nbytes
        mail.flush()  # nothing is left
        assert comm.groups is None or not comm.groups.under_way
        messages += (bool(mine) if merges else len(mine)) if comm.size > 1 else 0
        assert mail.messages == messages


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_letters_arrive_as_separate_all_to_alls_bring_them(world_size, merges):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    distributed.run(_exchange, world_size, seed, merges)


def _check_lives(rank: int) -> None:
    """Arrived letters do not keep each other's bytes alive, without help of the garbage collector."""
    mail = Mail(Comm.create())
    gc.disable()
    letters = [mail.post(torch.arange(2), [1, 1], [1, 1]) for _ in range(2)]
    mail.flush()
    delivery = weakref.ref(letters[0]._delivery)
    rows = [letter.wait().tolist() for letter in letters]
    letters.clear()
    gc.enable()
    assert rows == [[rank, rank]] * 2 and delivery() is None


def test_letters_that_have_arrived_are_freed():
    distributed.run(_check_lives, 2)


def test_a_letter_with_wrong_counts_is_refused():
    mail = Mail(Comm.create())
    with pytest.raises(ValueError, match="needs a count for each of 1 ranks, .* got 2 and 1 counts, and 3 rows for 3"):
        mail.post(torch.arange(3), [1, 2], [3])
    with pytest.raises(ValueError, match="got 1 and 1 counts, and 3 rows for 2"):
        mail.post(torch.arange(3), [2], [3])
    with pytest.raises(ValueError, match="sends tensors on the CPU, got one on meta"):
        mail.post(torch.empty(3, device="meta"), [3], [3])


def _die(rank: int, dies: str) -> None:
    comm = Comm.create(timeout=timedelta(seconds=NEVER))
    mail = Mail(comm)

    def post() -> list[Letter]:
        return [mail.post(torch.arange(2), [1, 1], [1, 1]) for _ in range(2)]

    for letter in post():
        letter.wait()
    letters = post()
    if rank == 1 and dies == "before the flush":
        os.kill(os.getpid(), signal.SIGKILL)
    mail.flush()
    for letter in letters:
        letter.wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    post()[1].wait()


@pytest.mark.parametrize("dies", ["before the flush", "after the flush"])
def test_a_killed_rank_is_named(dies):
    waiting, killed = distributed.run(_die, 2, dies, may_fail=True)
    assert killed.kind == "Died"
    assert waiting.kind == "RankFailure" and "rank 1 went away, its connection is closed" in waiting.text


# --- loaders ----------------------------------------------------------------------------------------------


def _loader(root: str, **options) -> NeighborLoader:
    options = {"batch_size": 5, "shuffle": True, "seed": 7, "timeout": NEVER, **options}
    return NeighborLoader(salientpp.load(root), [3, 2], "train", **options)


def _batches(loader: NeighborLoader) -> list:
    return [(batch.n_id.tolist(), batch.edge_index.tolist(), batch.x.tolist()) for batch in loader]


def _count_each(rank: int, root: str, depths: list[int]) -> list[tuple[int, int, int, int, int]]:
    return [_count(root, depth) for depth in depths]


def _count(root: str, depth: int) -> tuple[int, int, int, int, int]:
    """Returns the ticks of an epoch, then the messages for control and rows of an epoch, with and without merging."""
    loader = _loader(root, depth=depth)
    assert (loader.stats().control_messages, loader.stats().row_messages) == (0, 0), "filling a cache is not counted"
    merged = _batches(loader)
    stats = loader.stats()
    loader.reset_stats()
    assert (loader.stats().control_messages, loader.stats().row_messages) == (0, 0)
    exchange = loader.engine.basis.source.exchange
    exchange.mail = Mail(exchange.comm, merges=False)
    loader.set_epoch(0)
    assert _batches(loader) == merged
    apart = loader.stats()
    assert (apart.bytes_sent, apart.bytes_received) == (stats.bytes_sent, stats.bytes_received)
    return len(loader), stats.control_messages, stats.row_messages, apart.control_messages, apart.row_messages


@pytest.mark.parametrize("num_parts", [2, 4])
def test_a_tick_sends_one_message_for_control_and_one_for_rows(tmp_path, num_parts):
    salientpp.partition(random_data(), num_parts, tmp_path / "parts", [3, 2], 5)
    depths = [1, 3, 5, 10]
    for of_rank in distributed.run(_count_each, num_parts, str(tmp_path / "parts"), depths):
        for depth, (ticks, control, rows, control_apart, rows_apart) in zip(depths, of_rank, strict=True):
            assert ticks > 3 and rows == rows_apart == ticks and control_apart == 2 * ticks, depth
            # At depth 10, the ids of a batch leave with the counts of the second batch after it. At small depths, a batch waits for its counts in the
            # tick that sends them.
            assert control == {1: 2 * ticks, 3: 2 * ticks, 5: ticks + 1, 10: ticks + 2}[depth], depth


def test_rounds_of_drawing_add_no_message_to_a_tick(tmp_path):
    salientpp.partition(random_data(), 2, tmp_path / "parts", [3, 2], 5, topology="parts")
    fanouts = [[3], [3, 2], [3, 2, 2]]
    for of_rank in distributed.run(_count_rounds, 2, str(tmp_path / "parts"), fanouts):
        for num_neighbors, (ticks, control, rows) in zip(fanouts, of_rank, strict=True):
            # Each round of drawing begins ten ticks before the stages that follow, and every tick has one message.
            more = 10 * (len(num_neighbors) - 1) + 1 if num_neighbors[1:] else 0
            assert ticks > 10 and rows == ticks and control == ticks + 2 + more, num_neighbors


def _count_rounds(rank: int, root: str, fanouts: list[list[int]]) -> list[tuple[int, int, int]]:
    """Returns the ticks of an epoch, and the messages for control and rows, for each list of fanouts."""
    found = []
    for num_neighbors in fanouts:
        loader = NeighborLoader(
            salientpp.load(root), num_neighbors, "train", batch_size=2, shuffle=True, seed=7, timeout=NEVER
        )
        _batches(loader)
        found.append((len(loader), loader.stats().control_messages, loader.stats().row_messages))
    return found


def test_one_rank_sends_no_message(tmp_path):
    salientpp.partition(random_data(), 1, tmp_path / "parts", [3, 2], 5)
    loader = _loader(str(tmp_path / "parts"))
    assert len(_batches(loader)) > 0 and (loader.stats().control_messages, loader.stats().row_messages) == (0, 0)
