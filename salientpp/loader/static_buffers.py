"""Tensors that hold one padded batch after another, at the same addresses (``pad={"static": True}``).

A CUDA graph reads its inputs at the addresses that they had when it was captured (torch, "CUDA semantics", section "CUDA Graphs"). So the tensors of every
batch are copied into tensors that stay. The copy runs in the caller's thread, on its current stream, after the work on the batch before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

#: Type, name, shape, dtype and device of an attribute.
_Key = tuple[Any, str, tuple[int, ...], torch.dtype, torch.device]


class StaticBuffers:
    """Holds the tensors that all batches of one loader use in turn: one tensor for each attribute and shape."""

    def __init__(self) -> None:
        self._tensors: dict[_Key, Tensor] = {}

    def tensor(self, type_: Any, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the tensor that holds an attribute, for the caller to overwrite.

        Args:
            type_: the vertex or edge type, None in a graph without types.
        """
        key = (type_, name, tuple(shape), dtype, device)
        if key not in self._tensors:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
                self._tensors[key] = torch.empty(key[2], dtype=dtype, device=device)
            if "torch._dynamo" in sys.modules:  # compiled code then reads the tensor where it is, instead of a copy
                torch._dynamo.mark_static_address(self._tensors[key])
        return self._tensors[key]

    def check(self, name: str, value: Tensor) -> None:
        """Raises ValueError if the tensor of an attribute needs a gradient, which copies into one buffer would break."""
        if value.requires_grad:
            raise ValueError(
                f"static buffers cannot hold {name}, because it needs a gradient; call {name}.detach_(), or leave static out of pad"
            )

    def hold(self, batch: Data | HeteroData, data: Any) -> None:
        """Replaces the dense tensors of a batch by static ones with the same values. Sparse tensors, and tensors of the user's ``data``, stay as they are.

        Raises:
            ValueError: a tensor needs a gradient.
        """
        for store in batch.stores:
            for name, value in list(store.items()):
                if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested:
                    continue
                if isinstance(data, (Data, HeteroData)) and value is _storage(data, store._key).get(name):
                    continue
                self.check(name, value)
                tensor = self.tensor(store._key, name, value.shape, value.dtype, value.device)
                if tensor is not value:
                    store[name] = tensor.copy_(value)


def _storage(data: Data | HeteroData, type_: Any) -> Any:
    return data._store if type_ is None else data[type_]
