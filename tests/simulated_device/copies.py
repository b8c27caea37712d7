"""Copies between the host and the device.

A copy to the device reads pinned memory when it is executed, and other memory at once. A copy to pinned memory, if the host does not wait, writes when it is
executed. Until then the host reads poison.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.simulated_device import tensors
from tests.simulated_device.memory import is_pinned, pinned_block_of, pinned_empty
from tests.simulated_device.streams import NAME, current_stream

aten = torch.ops.aten


def copy_(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies between tensors of which at least one is on the device."""
    if not isinstance(source, tensors.SimulatedTensor):
        _to_device(to, source, non_blocking)
    elif not isinstance(to, tensors.SimulatedTensor):
        _to_host(to, source, non_blocking)
    else:
        there, here = to.host, source.host
        tensors.enqueue(lambda: there.copy_(here))  # type: ignore[arg-type, return-value]
    return to


def _to_device(to: Tensor, source: Tensor, non_blocking: bool) -> None:
    is_plain = source.dtype == to.dtype and source.stride() == to.stride() and source.size() == to.size()
    there, here = to.host, _pinned_view(source) if is_plain and is_pinned(source) else _clone(source)
    tensors.enqueue(lambda: there.copy_(here))
    if not non_blocking:
        tensors.synchronize()


def _to_host(to: Tensor, source: Tensor, non_blocking: bool) -> None:
    here = source.host
    is_plain = source.dtype == to.dtype and source.stride() == to.stride() and source.size() == to.size()
    if non_blocking and is_plain and is_pinned(to):
        _fill_with_poison(to)
        there = _pinned_view(to)
        tensors.enqueue(lambda: there.copy_(here))  # type: ignore[arg-type, return-value]
        return
    tensors.synchronize()
    to.copy_(here)


def _pinned_view(tensor: Tensor) -> Tensor:
    """Returns the pinned memory of a tensor, which is kept until the current stream has executed the copy."""
    block = pinned_block_of(tensor)
    assert block is not None
    block.used_on.add(current_stream().queue)
    with torch.inference_mode(False), torch.no_grad():
        return block.view_of(tensor)


def _clone(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_like(tensor).copy_(tensor)


def _fill_with_poison(tensor: Tensor) -> None:
    tensor.copy_(pinned_empty(tensor.shape, tensor.dtype))


def _to_copy(
    source: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> Tensor:  # fmt: skip
    """Copies a tensor of the device, as ``Tensor.to`` does."""
    meta = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta")
    form = aten._to_copy.default(meta, dtype=dtype, memory_format=memory_format)
    if device is None or torch.device(device).type == NAME:
        out, here = tensors.allocate_like(form), source.host
        there = out.host
        tensors.enqueue(lambda: there.copy_(here))  # type: ignore[arg-type, return-value]
        return out
    # As CUDA does, the dtype changes on the device.
    same = source if form.dtype == source.dtype else _to_copy(source, dtype=dtype)
    if non_blocking and form.is_contiguous():
        to = pinned_empty(form.shape, form.dtype)
    else:
        to = torch.empty_strided(form.size(), form.stride(), dtype=form.dtype, device="cpu")
    _to_host(to, same, non_blocking)
    return to


def _item(source: Tensor) -> Any:
    tensors.synchronize()
    return source.host.item()


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    return copy_(to, source, non_blocking)


OPERATIONS = {
    aten.copy_.default: copy_,
    aten._copy_from.default: _copy_from,
    aten._to_copy.default: _to_copy,
    aten._local_scalar_dense.default: _item,
}
