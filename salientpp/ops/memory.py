"""Functions of the memory in which a tensor lies."""

from __future__ import annotations

import torch
from torch import Tensor

from salientpp.ops.library import operators


def use_huge_pages(tensor: Tensor) -> None:
    """Ask the system to move a large CPU tensor into huge pages, where it lies; rows are then read at random in less time.

    Nothing happens where that is not possible: small or strided tensors, memory-mapped files, systems without huge pages or
    without ``MADV_COLLAPSE`` (Linux 6.1). Takes about as long as copying the tensor; others may read it meanwhile.
    """
    operators.use_huge_pages(tensor)


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [bytes], the memory of a tensor, or of a contiguous copy.

    torch calls a tensor of one entry or none contiguous whatever its strides are, and then refuses to view it as bytes.
    """
    tensor = tensor.detach().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
