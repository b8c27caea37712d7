"""Loads the graph that the user names, and reads how to partition it: a method, or the part of each vertex (assignment)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from salientpp.datasets import load_dataset, load_dgl_assignment
from salientpp.datasets.load import is_partition, load_given
from salientpp.partitioning.options import METHODS


def graph_of(arguments: argparse.Namespace, method: Any) -> list[Any]:
    """Returns the graph, and ``method``; if that is None, the assignment that comes with the dataset instead."""
    if method is None:
        return [*load_given(arguments.dataset, arguments.parts)]
    return [load_dataset(arguments.dataset, root=arguments.data), method]


def method_of(text: str | None, dataset: str) -> str | torch.Tensor | dict[str, torch.Tensor] | None:
    """Reads ``--method``: the name of a method, or an assignment from a file. None stands for the dataset's own assignment."""
    if text is None:
        text = "given" if is_partition(dataset) else "auto"
    if text == "given":
        if not is_partition(dataset):
            raise ValueError(
                f"--method given needs a partitioned dataset (pyg-partition:DIR or glt-partition:DIR), got {dataset}"
            )
        return None
    if text in METHODS:
        return text
    of_dgl, comma, ids = text.partition(",original_id=")
    if comma or text.endswith(".json"):
        try:
            original_id = _integers(ids) if comma else None
        except Exception as error:
            raise ValueError(f"original_id must be an .npy file of ids, got {ids} ({error})") from None
        return load_dgl_assignment(of_dgl, original_id)[0]
    try:
        return _integers(text)
    except Exception as error:  # numpy does not document the errors of damaged files
        raise ValueError(
            f"--method must be {', '.join(METHODS)}, given or an .npy file of part ids, got {text} ({error})"
        ) from None


def _integers(path: str) -> torch.Tensor:
    """Reads the integers of an .npy file."""
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError("not a file")  # reading a pipe would block
    array = np.load(path, allow_pickle=False)
    return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
