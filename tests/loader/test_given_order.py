"""Laws of a user's sampler: batches are read when they are requested, as in torch, so a sampler may follow the loop and may have no end."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from graphs import random_data
from torch_geometric.loader import LinkNeighborLoader as PyGsLinks
from torch_geometric.loader import NeighborLoader as PyGs

from salientpp import LinkNeighborLoader, NeighborLoader

DATA = random_data(100, 500)


class Sampler:
    """Gives batches of the seed ``now``, which the loop changes.

    Attributes:
        read: number of batches that were read.
    """

    def __init__(self, length: int | None = 5, number: int | None = 5, fails: bool = False) -> None:
        self._length, self._number, self._fails = length, number, fails
        self.now = self.read = 0

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the length is unknown")
        return self._length

    def __iter__(self):
        for _ in itertools.count() if self._number is None else range(self._number):
            self.read += 1
            yield [self.now]
        if self._fails:
            raise LookupError("no more seeds")


CASES = {
    "follows the loop": (5, 5),
    "has no end": (5, None),
    "gives fewer than its length": (5, 3),
    "gives more than its length": (5, 7),
    "is empty": (0, 0),
    "has no length": (None, 4),
    "fails": (5, 2, True),
}


def seen(loader, sampler: Sampler, give=iter) -> list:
    """Returns the seeds of the first nine batches, with the number of batches read when each arrives, and the error that ended the loop."""
    found = []
    try:
        for batch in itertools.islice(give(loader), 9):
            found.append((int((batch[0] if isinstance(batch, list) else batch).input_id[0]), sampler.read))
            sampler.now += 5
    except LookupError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kinds", [(NeighborLoader, PyGs), (LinkNeighborLoader, PyGsLinks)], ids=["vertices", "edges"])
def test_a_loop_sees_the_same_seeds_as_with_pyg(kinds, case):
    found = []
    for kind in kinds:
        sampler = Sampler(*CASES[case])
        loader = kind(DATA, [2], batch_sampler=sampler)
        found.append([seen(loader, sampler) for _ in range(2)])
    assert found[0] == found[1]


@pytest.mark.parametrize("kinds", [(NeighborLoader, PyGs), (LinkNeighborLoader, PyGsLinks)], ids=["vertices", "edges"])
@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_a_sampler_needs_no_length(kinds, name):
    class Seeds:
        def __iter__(self):
            return iter([3, 1] if name == "sampler" else [[3, 4], [1]])

    ours, theirs = (kind(DATA, [2], **{name: Seeds()}) for kind in kinds)
    for _ in range(2):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.input_id, other.input_id)
    for loader in (ours, theirs):
        with pytest.raises(TypeError, match="has no len"):
            len(loader)


@pytest.mark.parametrize("case", CASES)
def test_rounds_are_read_one_by_one_too(case):
    first, second = (Sampler(*CASES[case]) for _ in range(2))
    rounds = seen(NeighborLoader(DATA, [2], batch_sampler=first), first, lambda loader: loader.rounds())
    assert rounds == seen(NeighborLoader(DATA, [2], batch_sampler=second), second)


@pytest.mark.parametrize(("options", "ahead"), [({"num_workers": 2, "prefetch_factor": 3}, 6), ({}, 0)], ids=str)
def test_sampling_threads_read_as_far_ahead_as_torch(options, ahead):
    sampler = Sampler(number=None)
    found = seen(NeighborLoader(DATA, [2], batch_sampler=sampler, **options), sampler)
    assert [read for _, read in found] == [1 + ahead + number for number in range(9)]


def test_batches_in_flight_are_read_ahead_and_a_plan_reads_none(tmp_path):
    """Rows of files pass through stages. Estimates come from batches in the order that the loader would have by itself."""
    np.save(tmp_path / "x.npy", np.ones((100, 8), dtype=np.float32))
    data = DATA.clone()
    data.x = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))
    sampler = Sampler(number=None)
    loader = NeighborLoader(data, [2], batch_sampler=sampler, read_ahead=10**6, depth=4)
    assert sampler.read == 0
    found = seen(loader, sampler)
    assert len(found) == 9
    assert all(
        read <= number + 2 + loader.depth + loader.engine.producer.most_ahead for number, (_, read) in enumerate(found)
    )


def test_a_closed_epoch_reads_no_more():
    sampler = Sampler(number=None)
    epoch = iter(NeighborLoader(DATA, [2], batch_sampler=sampler))
    next(epoch)
    epoch.close()
    assert next(epoch, None) is None and sampler.read == 1


def test_a_saved_state_counts_the_batches_of_a_sampler_with_a_known_order():
    def make() -> NeighborLoader:
        return NeighborLoader(DATA, [2], batch_size=30, sampler=torch.utils.data.SequentialSampler(range(100)), seed=1)

    loader = make()
    epoch = iter(loader)
    next(epoch)
    state, again = loader.state_dict(), make()
    again.load_state_dict(state)
    for ours, theirs in zip(again, epoch, strict=True):
        assert torch.equal(ours.n_id, theirs.n_id)
    assert again.state_dict()["epoch"] == 1
