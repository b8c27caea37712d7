"""Functions for memory: huge pages for a tensor, a tensor's bytes, and the return of freed memory to the system."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from salientpp.ops.library import operators


def use_huge_pages(tensor: Tensor) -> None:
    """Asks the system to move a large CPU tensor into huge pages, in place. Reading rows at random is then faster.

    It does nothing for small or strided tensors, memory-mapped files, and systems without huge pages or without
    ``MADV_COLLAPSE`` (Linux 6.1). It takes about as long as copying the tensor. Other threads may read the tensor meanwhile.
    """
    operators.use_huge_pages(tensor)


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the memory of a tensor, or of a contiguous copy, as uint8 [bytes].

    torch calls a tensor of at most one entry contiguous whatever its strides are, and then refuses to view it as bytes.
    """
    tensor = tensor.detach().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def return_freed_memory() -> None:
    """Returns memory that this process has freed, and that the GNU C library keeps, to the system. Without that library it does nothing.

    Without this call, the library keeps the pages of a freed block that lies below a block in use. After a large block
    was freed, this holds for blocks of up to 32 MiB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
