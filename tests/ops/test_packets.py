"""Laws of the operators for packets: lists from several holders are put in one order, and integers are packed in narrow dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from draws import as_lists
from operator_cases import NONE, ints, long
from torch import Tensor

from salientpp import ops
from salientpp.sampling.packets import unpack, unpack_narrow

WIDTHS = (torch.uint8, torch.uint16, torch.int32, torch.int64)


def numbers(of: Any) -> Any:
    """Tensors as lists of numbers."""
    return of.tolist() if isinstance(of, Tensor) else of


# --- the merge --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bases", ["no base", "one base", "bases"])
@pytest.mark.parametrize("num_groups", [1, 2, 5])
def test_merged_lists_equal_the_slow_reference(num_groups, bases):
    generator = torch.Generator().manual_seed(num_groups)
    for size in (0, 1, 7, 300):
        group_of = torch.randint(
            num_groups + 1, (size,), generator=generator
        )  # the lists of the last group are missing
        position = [(group_of == group).nonzero().flatten() for group in range(num_groups)]
        position = [place[torch.randperm(place.numel(), generator=generator)] for place in position]
        count = [torch.randint(12, place.shape, generator=generator) for place in position]
        value = [
            torch.randint(200, (int(of.sum()),), generator=generator).to(WIDTHS[group % 4])
            for group, of in enumerate(count)
        ]
        base = [torch.randint(-(2**40), 2**40, place.shape, generator=generator) for place in position]
        base = {
            "no base": [],
            "one base": [torch.tensor([group - 2**40]) for group in range(num_groups)],
            "bases": base,
        }[bases]
        got = ops.merge_lists(size, position, count, value, base)
        of = [[numbers(each) for each in column] for column in (position, count, value, base)]
        assert as_lists(got) == list(reference.merge_lists(size, *of))
        assert all(each.dtype == torch.int64 for each in got)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("base", [[], [long(5)], [long(3, -1, 7)]], ids=len)
def test_a_group_without_positions_keeps_its_order(base, dtype):
    value = torch.tensor([9, 8, 200, 6], dtype=dtype)
    want = reference.merge_lists(4, [None], [[1, 0, 3]], [value.tolist()], [each.tolist() for each in base])
    assert as_lists(ops.merge_lists(4, [None], [long(1, 0, 3)], [value], base)) == list(want)


MERGE = dict(
    size=3, position=[long(2, 0), None], count=[long(1, 2), NONE], value=[long(5, 6, 7), NONE], base=[long(1), long(1)]
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(size=-1), r"size must be in \[0, 2\^59\), got -1"),
        (dict(size=2), r"position\[0\] must be in \[0, 2\), got 2 for list 0"),
        (dict(position=[long(0, -1), None]), r"position\[0\] must be in \[0, 3\), got -1 for list 1"),
        (dict(position=[long(1, 1), None]), r"position\[0\] must have places that no other list has, got 1 again for list 1"),
        (dict(count=[long(1, 2), long(0)]), r"position\[1\] must have places that no other list has, got 0 again for list 0"),
        (dict(position=[long(1), None]), r"position\[0\] must have one entry per list, expected 2, got 1"),
        (dict(position=[ints(1, 0), None]), "position must have dtype Long, got Int"),
        (dict(position=[None]), "must have one entry per group, 2"),
        (dict(value=[NONE]), "must have one entry per group, 2"),
        (dict(base=[NONE]), "must have one entry per group, 2"),
        (dict(base=[long(1, 2, 3), long(1)]), r"base\[0\] must have 1 entry or one per list, expected 2, got 3"),
        (dict(base=[ints(1), long(1)]), "base must have dtype Long, got Int"),
        (dict(count=[long(1, 3), NONE]), r"count\[0\] must be >= 0 and have the sum 3, the number of entries, got 3 at list 1"),
        (dict(count=[long(-1, 3), NONE]), r"count\[0\] must be >= 0 and have the sum 3, the number of entries, got -1 at list 0"),
        (dict(count=[long(1, 1), NONE]), r"count\[0\] must have the sum 3, the number of entries, got 2"),
        (dict(count=[ints(1, 2), NONE]), "count must have dtype Long, got Int"),
        (dict(value=[torch.ones(3), NONE]), "value must have dtype uint8, uint16, int32 or int64, got Float"),
        (dict(value=[long(5, 0, 6, 0, 7, 0)[::2], NONE]), "value must be contiguous"),
    ],
)  # fmt: skip
def test_merge_lists_refuses_bad_arguments(change, text):
    want = as_lists(ops.merge_lists(**MERGE))
    with pytest.raises(RuntimeError, match=text):
        ops.merge_lists(**MERGE | change)
    assert as_lists(ops.merge_lists(**MERGE)) == want


# --- packets ----------------------------------------------------------------------------------------------

LIMITS = [0, 2**8 - 1, 2**8, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**63 - 1, -1, -(2**31), -(2**31) - 1, -(2**63)]


@pytest.mark.parametrize("lists", [False, True], ids=["", "lists"])
def test_packets_equal_the_slow_reference_and_are_read_again(lists):
    sections = [NONE, *(torch.tensor([0, limit, 1]) for limit in LIMITS), torch.tensor([3, 255], dtype=torch.uint8)]
    integers = [section.dtype == torch.int64 for section in sections]
    count = [torch.tensor([0, section.numel(), 0]) if lists and of else None for section, of in zip(sections, integers)]
    base = [long(9, 0, -9) if lists and of else None for of in integers]
    packet = ops.pack_integers(sections, count, base)
    plain = [section.tolist() if of else bytes(section.tolist()) for section, of in zip(sections, integers)]
    want = reference.pack_integers(plain, *[[numbers(each) for each in column] for column in (count, base)])
    assert packet.dtype == torch.uint8 and bytes(packet.tolist()) == want
    for read in (unpack(packet), unpack_narrow(packet)):
        assert as_lists(read) == as_lists(sections)
    assert [section.dtype for section in unpack(packet)] == [section.dtype for section in sections]


def test_lists_travel_as_differences_from_their_base():
    values, count, base = long(2**40 + 7, 2**40, 5, -3), long(2, 0, 1, 1), long(2**40, 1, -1, -3)
    (section,) = unpack_narrow(ops.pack_integers([values], [count], [base]))
    assert section.dtype == torch.uint8 and section.tolist() == [7, 0, 6, 0]
    assert torch.equal(ops.merge_lists(4, [None], [count], [section], [base])[1], values)


PACK = dict(
    section=[long(5, 6), torch.tensor([1], dtype=torch.uint8)], count=[long(2, 0), None], base=[long(5, 0), None]
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(section=[long(5, 6)]), "count and base must have one entry per section, 1"),
        (dict(section=[long(5, 6), ints(1)]), "section must have dtype uint8 or int64, got Int"),
        (dict(section=[long(5, 0, 6, 0)[::2], NONE]), "section must be contiguous"),
        (dict(section=[torch.ones(2).byte(), NONE]), "a section with lists must have dtype int64, got Byte"),
        (dict(base=[None, None]), "count and base must be given both or not at all, for section 0"),
        (dict(base=[long(5), None]), r"base\[0\] must have one entry per list, expected 2, got 1"),
        (dict(base=[ints(5, 0), None]), "base must have dtype Long, got Int"),
        (dict(count=[ints(2, 0), None]), "count must have dtype Long, got Int"),
        (dict(count=[long(2, 1), None]), r"count\[0\] must be >= 0 and have the sum 2, the number of entries, got 1 at list 1"),
        (dict(count=[long(3, -1), None]), r"count\[0\] must be >= 0 and have the sum 2, the number of entries, got 3 at list 0"),
        (dict(count=[long(1, 0), None]), r"count\[0\] must have the sum 2, the number of entries, got 1"),
    ],
)  # fmt: skip
def test_pack_integers_refuses_bad_arguments(change, text):
    want = ops.pack_integers(**PACK).tolist()
    with pytest.raises(RuntimeError, match=text):
        ops.pack_integers(**PACK | change)
    assert ops.pack_integers(**PACK).tolist() == want
