"""What is worth keeping beside a dataset, though it could be computed again?

The folder ``kept`` of a dataset directory holds arrays that follow from the dataset, such as the inclusion probabilities of joined parts. Nobody needs them:
the folder may be deleted, and where it cannot be written everything is computed when it is asked for. A file carries the checksum of its contents in its
name, and what does not match it is computed again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from salientpp.files import replace_file

FOLDER = "kept"

_DIGITS = 16


def kept(
    root: Path, name: str, shapes: Mapping[str, tuple[int, ...]], compute: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """float32 arrays by name, as they were kept, or else computed now and kept if that can be done.

    Args:
        root: the dataset directory.
        name: what they are, and of which dataset; letters, digits and hyphens.
        shapes: of each.
    """
    folder = root / FOLDER
    found = {array: _read(folder, f"{name}.{array}", shape) for array, shape in shapes.items()}
    there = {array: tensor for array, tensor in found.items() if tensor is not None}
    if len(there) == len(shapes):
        return there
    computed = dict(compute())
    for array, tensor in computed.items():
        digits = _digits(tensor.numpy())
        try:
            folder.mkdir(exist_ok=True)
            replace_file(folder / f"{name}.{array}.{digits}.npy", partial(_write, tensor))
        except OSError:
            pass  # a read-only or a full disk: the next run computes it again
    return computed


def _read(folder: Path, stem: str, shape: tuple[int, ...]) -> Tensor | None:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return None
    for name in names:
        match = re.fullmatch(rf"{re.escape(stem)}\.([0-9a-f]{{{_DIGITS}}})\.npy", name)
        if match is None:
            continue
        try:
            array = np.load(folder / name, allow_pickle=False)
        except (OSError, ValueError, EOFError, MemoryError):
            continue
        if array.dtype == np.float32 and array.shape == shape and _digits(array) == match[1]:
            return torch.from_numpy(array)
    return None


def _write(tensor: Tensor, file: BinaryIO) -> None:
    np.save(file, tensor.numpy())


def _digits(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()[:_DIGITS]
