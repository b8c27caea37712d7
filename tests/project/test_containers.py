"""Laws of the walker over containers: it visits every leaf once, in order, and a copy has the same types and the same places."""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from salientpp.containers import found, leaves, mapped, tensors_of
from salientpp.fullgraph.outputs import mapped_output

Pair = namedtuple("Pair", "first second")


@dataclass
class Out:
    value: Any
    more: Any = None


@dataclass(frozen=True)
class Frozen:
    value: Any


PLAIN = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "named tuple": Pair,
    "dict": lambda a, b: {"a": a, "b": b},
    "nested": lambda a, b: {"x": [(a,), Pair([b], None)]},
}
OBJECTS = {
    "ordered dict": lambda a, b: OrderedDict(a=a, b=b),
    "user dict": lambda a, b: UserDict(a=a, b=b),
    "dataclass": Out,
    "frozen": lambda a, b: [Frozen(a), Frozen(b)],
    "nested": lambda a, b: {"x": [(a,), Pair(Out([b]), None)]},
}


def is_copied(make: Any, objects: bool) -> None:
    assert [each for each in leaves(make(1, 2), objects) if each is not None] == [1, 2]
    value = make(1, 2)
    doubled = mapped(value, lambda each: each if each is None else 2 * each, objects=objects)
    assert repr(doubled) == repr(make(2, 4)) and repr(value) == repr(make(1, 2))


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_leaves_come_in_order_and_a_copy_has_them_in_their_places(make, objects):
    is_copied(make, objects)


def test_slices_are_containers_in_arguments_and_unknown_in_outputs_of_models():
    is_copied(lambda a, b: [slice(a, b)], False)
    assert list(leaves([slice(1, 2)], True)) == [slice(1, 2)]
    with pytest.raises(TypeError, match="the model must return tensors, .* got a slice"):
        mapped_output([torch.zeros(1), slice(1, 2)], torch.neg)


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_objects_are_containers_if_asked(make):
    is_copied(make, True)
    assert list(leaves(Out(1))) == [Out(1)] and mapped(UserDict(a=1), type) is UserDict


def test_a_field_without_a_value_is_left_out():
    value = Out(1)
    del value.value
    assert list(leaves(value, True)) == [None] and not hasattr(mapped(value, repr, objects=True), "value")


def test_members_of_enumerations_are_leaves():
    class Corner(tuple, enum.Enum):
        ORIGIN = (0, 0)

    assert mapped([Corner.ORIGIN], lambda each: each) == [Corner.ORIGIN]


def test_types_are_found_also_as_subclasses():
    weight = torch.nn.Parameter(torch.ones(2))
    value = [weight, {"a": torch.zeros(1), "b": "x"}, (True,), None, range(3)]
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
