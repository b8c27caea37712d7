"""Tables of PyTorch Frame with every semantic type, whose cells follow from the number of the row, and their exact comparison."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

torch_frame = pytest.importorskip("torch_frame", reason="PyTorch Frame is not installed")

from torch_frame import TensorFrame, stype  # noqa: E402
from torch_frame.data import MultiEmbeddingTensor, MultiNestedTensor  # noqa: E402


def nested(num_rows: int, num_cols: int, dtype: torch.dtype, longest: int = 4) -> MultiNestedTensor:
    """Cell (i, j) has ``(i * 7 + j * 3) % (longest + 1)`` values that identify the cell; some cells are empty."""
    length = torch.tensor(
        [(i * 7 + j * 3) % (longest + 1) for i in range(num_rows) for j in range(num_cols)], dtype=torch.int64
    )
    offset = torch.cat([torch.zeros(1, dtype=torch.int64), length.cumsum(0)])
    values = torch.arange(int(offset[-1])).to(dtype)
    if dtype.is_floating_point:
        values[::11] = float("nan")
    else:
        values[::11] = -1
    return MultiNestedTensor(num_rows, num_cols, values, offset)


def embedding(num_rows: int, *widths: int) -> MultiEmbeddingTensor:
    columns = [torch.arange(num_rows * width).view(num_rows, width).float() + 0.1 for width in widths]
    return MultiEmbeddingTensor.from_tensor_list(columns)


def table(num_rows: int, with_y: bool = True) -> TensorFrame:
    """Every semantic type, also those that PyTorch Frame turns into 'embedding' when it reads a data frame."""
    rows = torch.arange(num_rows)
    numerical = torch.stack([rows.float(), rows.float().sqrt()], 1)
    numerical[::5, 1] = float("nan")
    times = torch.stack([1990 + rows % 40, rows % 12, rows % 28, rows % 7, rows % 24, rows % 60, rows % 60], 1)
    features = {
        stype.timestamp: times[:, None, :].repeat(1, 2, 1),
        stype.numerical: numerical,
        stype.categorical: torch.stack([rows % 3 - 1, rows % 300, rows * 100_000], 1),
        stype.multicategorical: nested(num_rows, 2, torch.int64),
        stype.sequence_numerical: nested(num_rows, 1, torch.float32),
        stype.text_tokenized: {
            "input_ids": nested(num_rows, 2, torch.int64, 6),
            "attention_mask": nested(num_rows, 2, torch.int64, 6),
        },
        stype.embedding: embedding(num_rows, 3, 2),
        stype.text_embedded: embedding(num_rows, 4),
        stype.image_embedded: embedding(num_rows, 2),
    }
    names = {}
    for each, value in features.items():
        first = next(iter(value.values())) if isinstance(value, dict) else value
        names[each] = [f"{each} {number}" for number in range(first.size(1))]
    return TensorFrame(features, names, rows.float() * 2 if with_y else None)


def parts(value: Any) -> list[Tensor]:
    """Returns all tensors of a table or of a part of it."""
    if isinstance(value, TensorFrame):
        return [tensor for each in [*value.feat_dict.values(), value.y] for tensor in parts(each)]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in parts(each)]
    if isinstance(value, Tensor):
        return [value]
    return [] if value is None else [value.values, value.offset]


def kinds(value: Any) -> list[Any]:
    """Returns everything about a table but its numbers."""
    features = {
        str(each): {key: type(part) for key, part in of.items()} if isinstance(of, dict) else type(of)
        for each, of in value.feat_dict.items()
    }
    return [list(features.items()), list(value.col_names_dict.items()), len(value), value.y is None]


def same(a: TensorFrame, b: TensorFrame) -> bool:
    """True if two tables have the same columns, dtypes, shapes and bits; NaN equals NaN."""
    if kinds(a) != kinds(b):
        return False
    for ours, theirs in zip(parts(a), parts(b), strict=True):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape) or not torch.equal(ours.isnan(), theirs.isnan()):
            return False
        if not torch.equal(ours.nan_to_num(), theirs.nan_to_num()):
            return False
    return True
