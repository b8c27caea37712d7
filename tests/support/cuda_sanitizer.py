"""torch's sanitizer of CUDA streams (``TORCH_CUDA_SANITIZER=1``), without its false alarms about empty tensors.

The sanitizer identifies a tensor by its address. An empty tensor has none, and torch takes ``id(tensor)`` instead. Python
uses that number again for a later object. Two empty tensors on two streams then look like one tensor that both write.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.cuda import _sanitizer


def ignore_empty_tensors() -> None:
    """Makes the sanitizer ignore tensors without elements. They hold no data, so no order of streams can be wrong for them."""
    handle = _sanitizer.ArgumentHandler._handle_argument
    if hasattr(handle, "is_patched"):
        return

    def handle_filled(self: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(value, Tensor) or value.numel():
            handle(self, value, *args, **kwargs)

    handle_filled.is_patched = True
    _sanitizer.ArgumentHandler._handle_argument = handle_filled
