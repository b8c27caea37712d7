"""Columns of a model's outputs in a table: a number for each vertex, or a list of fixed length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import pyarrow as pa

#: Name of the column of outputs, unless the user names the columns.
OUTPUT = "output"


def named_outputs(outputs: Tensor | Mapping[str, Tensor], taken: Sequence[str]) -> dict[str, Tensor]:
    """Returns outputs by the names of their columns, on the CPU.

    A single tensor is named ``output``, with ``_`` appended if a key column has that name.

    Args:
        outputs: rows [n, ...], or rows by name, all with the same n.
        taken: names of the key columns.

    Raises:
        TypeError: something is not a tensor.
        ValueError: numbers of rows differ, or a key column has the name of an output.
    """
    if isinstance(outputs, Tensor):
        outputs = {free_name(OUTPUT, taken): outputs}
    if not isinstance(outputs, Mapping) or not outputs:
        raise TypeError(
            f"outputs must be a tensor with a row for each vertex, or a dict from names of columns to tensors, got {type(outputs).__name__}"
        )
    found = {}
    for name, rows in outputs.items():
        if not isinstance(name, str) or not isinstance(rows, Tensor) or rows.dim() == 0:
            raise TypeError(f"outputs[{name!r}] must be a tensor with a row for each vertex, got {type(rows).__name__}")
        if name in taken:
            raise ValueError(f"a key column is called {name!r} already; choose another name for this output")
        found[name] = rows.detach().cpu()
    return found


def free_name(name: str, taken: Sequence[str]) -> str:
    """Returns ``name``, with underscores appended until it is not among the names ``taken``."""
    while name in taken:
        name += "_"
    return name


def check_column(rows: Tensor, name: str = OUTPUT) -> None:
    """Raises ValueError if rows [n, ...] cannot be a column: their dtype has no Arrow type, or a row has no numbers."""
    try:
        is_number = torch.empty(0, dtype=rows.dtype, device="cpu").numpy().dtype.kind in "biuf"
    except TypeError:
        is_number = False
    if not is_number:
        raise ValueError(
            f"rows of {rows.dtype} cannot be a column of a table ({name}); convert them to another dtype, for a list of layers by a function at its end"
        )
    if math.prod(rows.shape[1:]) == 0:
        raise ValueError(f"rows of {name} must have at least one number each, got the shape {list(rows.shape)}")


def column(rows: Tensor) -> pa.Array:
    """Returns rows [n, ...] on the CPU as an Arrow array with n entries.

    Rows [n] and [n, 1] give numbers. Other rows give lists of fixed length, which are nested if a row has several dimensions.
    """
    import pyarrow as pa

    widths = list(rows.shape[1:])
    array = pa.array(rows.reshape(-1).numpy())
    for width in [] if widths == [1] else reversed(widths):
        array = pa.FixedSizeListArray.from_arrays(array, width)
    return array
