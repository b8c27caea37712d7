"""Laws of `salientpp.ranks.partition_book`: K + 1 numbers determine the owner of every vertex."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from salientpp.ranks.partition_book import PartitionBook


def test_a_book_equals_the_result_by_hand():
    book = PartitionBook(torch.tensor([0, 3, 3, 5]))
    assert (book.num_parts, book.num_vertices) == (3, 5)
    ids = torch.tensor([4, 0, 2, 3])
    assert book.owner(ids).tolist() == [2, 0, 0, 2]  # part 1 is empty
    assert [book.range_of(p) for p in range(3)] == [(0, 3), (3, 3), (3, 5)]
    assert [book.size_of(p) for p in range(3)] == [3, 0, 2]


@pytest.mark.parametrize("seed", range(10))
def test_every_vertex_has_one_owner(seed):
    generator = np.random.default_rng(seed)
    num_vertices, num_parts = int(generator.integers(0, 100)), int(generator.integers(1, 12))
    cuts = np.sort(generator.integers(0, num_vertices + 1, size=num_parts - 1)).tolist()
    book = PartitionBook(torch.tensor([0, *cuts, num_vertices]))
    owners = [p for p in range(num_parts) for _ in range(book.size_of(p))]
    assert book.owner(torch.arange(num_vertices)).tolist() == owners
    assert sum(book.size_of(p) for p in range(num_parts)) == book.num_vertices == num_vertices
    # The ids are in any order, with repeats.
    some = torch.from_numpy(generator.integers(0, max(1, num_vertices), size=30 if num_vertices else 0))
    assert book.owner(some).tolist() == [owners[v] for v in some.tolist()]


def test_one_part_owns_everything():
    book = PartitionBook.trivial(7)
    assert book.offsets.tolist() == [0, 7] and book.num_parts == 1
    assert book.owner(torch.arange(7)).tolist() == [0] * 7
    assert PartitionBook.trivial(0).num_vertices == 0


def test_offsets_given_as_a_list_become_int64():
    book = PartitionBook([0, 2, 5])
    assert book.offsets.dtype == torch.int64 and book.offsets.tolist() == [0, 2, 5]
    assert PartitionBook(torch.tensor([0, 4], dtype=torch.int32)).offsets.dtype == torch.int64


@pytest.mark.parametrize("offsets", [[], [0], [1, 2], [0, 3, 2], [-1, 0], [[0, 1], [1, 2]]], ids=str)
def test_offsets_that_do_not_ascend_from_zero_are_refused(offsets):
    with pytest.raises(ValueError, match=r"offsets must run from 0 to N without decreasing, for K >= 1 parts, got \["):
        PartitionBook(torch.tensor(offsets, dtype=torch.int64))


@pytest.mark.parametrize("part_id", [-1, 2])
def test_a_part_that_does_not_exist_is_refused(part_id):
    book = PartitionBook(torch.tensor([0, 2, 5]))
    for ask in (book.range_of, book.size_of):
        with pytest.raises(ValueError, match=rf"part_id must be in \[0, 2\), got {part_id}"):
            ask(part_id)
