"""Laws of torch's sanitizer as `make gpu-check` uses it: it ignores empty tensors, and no other tensors."""

from __future__ import annotations

import torch
from cuda_sanitizer import ignore_empty_tensors
from torch.cuda import _sanitizer


class OnDevice(torch.Tensor):
    """A tensor that the sanitizer takes for one on a GPU."""

    is_cuda = True


def pointers(*values: torch.Tensor) -> set[int]:
    """Addresses that the sanitizer notes for an operator that writes these tensors."""
    handler = _sanitizer.ArgumentHandler()
    schema = torch.ops.aten.clone.default._schema
    for value in values:
        handler.parse_outputs(schema, value.as_subclass(OnDevice), is_factory=False)
    return handler.dataptrs_written


def test_only_empty_tensors_are_ignored(monkeypatch):
    empty, row = torch.empty(0, 3), torch.ones(1, 3)
    monkeypatch.setattr(_sanitizer.ArgumentHandler, "_handle_argument", _sanitizer.ArgumentHandler._handle_argument)
    assert len(pointers(empty, row)) == 2  # without the change, an empty tensor has its number in Python as address
    ignore_empty_tensors()
    ignore_empty_tensors()
    assert pointers(empty, row) == {row.data_ptr()}
    assert pointers(empty) == set()
