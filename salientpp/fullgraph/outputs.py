"""Applies a function to the tensors in a model's output."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from salientpp.containers import found, mapped

#: Types of values without tensors.
_PLAIN = (type(None), str, bytes, numbers.Number, enum.Enum, torch.dtype, torch.device)


def output_tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a model's output, which may be nested containers, mappings or dataclasses."""
    return found(value, Tensor, objects=True)


def mapped_output(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns a copy of an output in which ``function`` has been applied to every tensor.

    Raises:
        TypeError: the output holds an object of an unknown container type.
    """

    def of(each: Any) -> Any:
        if isinstance(each, Tensor):
            return function(each)
        if isinstance(each, _PLAIN):
            return each
        raise TypeError(
            f"the model must return tensors, or tuples, lists, dicts and dataclasses of tensors, got a {type(each).__name__}"
        )

    return mapped(value, of, objects=True)
