"""The graph that a user names, and the method or the assignment that partitions it."""

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
    """The graph, and the method or the assignment."""
    if method is None:
        return [*load_given(arguments.dataset, arguments.parts)]
    return [load_dataset(arguments.dataset, root=arguments.data), method]


def method_of(text: str | None, dataset: str) -> str | torch.Tensor | dict[str, torch.Tensor] | None:
    """--method: a method's name, or the assignment in a file; None: that of the dataset itself."""
    if text is None:
        text = "given" if is_partition(dataset) else "auto"
    if text == "given":
        if not is_partition(dataset):
            raise ValueError(
                f"--method given is for datasets that are partitioned, pyg-partition:DIR and glt-partition:DIR, got {dataset}"
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
    except Exception as error:  # what a damaged file makes numpy raise is not documented
        raise ValueError(
            f"--method must be {', '.join(METHODS)}, given or an .npy file of part ids, got {text} ({error})"
        ) from None


def _integers(path: str) -> torch.Tensor:
    """Of an .npy file."""
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError("not a file")  # a pipe would be waited for
    array = np.load(path, allow_pickle=False)
    return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
