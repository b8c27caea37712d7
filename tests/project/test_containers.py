"""Laws of the walker over containers: it visits every leaf once, in order, and a copy has the same types and the same places."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from salientpp.containers import found, leaves, mapped, tensors_of

Pair = namedtuple("Pair", "first second")


@dataclass
class Out:
    value: Any
    more: Any = None


@dataclass(frozen=True)
class Frozen:
    value: Any


CONTAINERS = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "named tuple": Pair,
    "dict": lambda a, b: {"a": a, "b": b},
    "ordered dict": lambda a, b: OrderedDict(a=a, b=b),
    "dataclass": Out,
    "frozen": lambda a, b: [Frozen(a), Frozen(b)],
    "nested": lambda a, b: {"x": [(a,), Pair(Out([b]), None)]},
    "slice": lambda a, b: slice(a, b),
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_leaves_come_in_order_and_a_copy_has_them_in_their_places(make):
    assert [each for each in leaves(make(1, 2)) if each is not None] == [1, 2]
    value = make(1, 2)
    doubled = mapped(value, lambda each: each if each is None else 2 * each)
    assert repr(doubled) == repr(make(2, 4)) and repr(value) == repr(make(1, 2))


def test_types_are_found_also_as_subclasses():
    weight = torch.nn.Parameter(torch.ones(2))
    value = [weight, {"a": torch.zeros(1), "b": "x"}, {True}, None, range(3)]
    assert [each.numel() for each in tensors_of(value)] == [2, 1]
    assert list(found(value, bool)) == [True] and list(found(value, range)) == [range(3)]
    assert next(tensors_of(torch.zeros(3))).numel() == 3


def test_an_unknown_object_is_a_leaf():
    thing = object()
    assert list(leaves([thing, Out])) == [thing, Out]
    assert mapped(thing, lambda each: (each,)) == (thing,)


def test_sizes_become_tuples_if_asked():
    assert mapped([torch.Size([2, 3])], lambda each: None, (torch.Size,)) == [(None, None)]
    assert type(mapped(torch.Size([2, 3]), lambda each: each + 1)) is torch.Size
