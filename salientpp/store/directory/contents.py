"""What of a PyG ``Data`` goes to disk: which attributes, and which vertices are in which split?"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp.graph.csc import Graph
from salientpp.graph.from_pyg import positions_in
from salientpp.ids import read_ids
from salientpp.store.directory.files import numpy_dtype

#: What a batch calls its own: node and edge attributes cannot have these names beside them.
OWN_NAMES = frozenset(
    [
        "n_id",
        "e_id",
        "batch",
        "ptr",
        "batch_size",
        "input_id",
        "seed_time",
        "num_sampled_nodes",
        "num_sampled_edges",
        "num_nodes",
        "edge_index",
        "adj_t",
    ]
)

#: By these names PyG knows what has an entry per vertex, and per edge.
_OF_VERTICES, _OF_EDGES = ("x", "pos"), ("edge_attr", "edge_weight", "edge_type")

#: The splits of a ``Data``, and its attributes that say which vertices are in one; of several the first counts.
_SPLITS = {split: [f"{split}_{kind}" for kind in ("mask", "idx", "index")] for split in ("train", "val", "test")}


@dataclass(frozen=True)
class Attributes:
    """The attributes of a ``Data`` that go to disk."""

    node: dict[str, Tensor]
    edge: dict[str, Tensor]


def collect_attributes(data: Data, graph: Graph) -> Attributes:
    """Node and edge attributes of a ``Data``; what cannot be stored is refused rather than lost."""
    node: dict[str, Tensor] = {}
    edge: dict[str, Tensor] = {}
    if data.get("edge_index") is not None and data.get("adj_t") is not None:
        positions_in(data.adj_t, data.edge_index, "the edges")  # only one of them is stored
    if data.get("adj_t") is not None and _has_weights(data.adj_t):
        raise ValueError(
            "data.adj_t has values other than 1, and only its topology is stored; give the graph as edge_index alone, and the "
            "values as edge_attr or edge_weight"
        )
    left_out = []
    for name, value in data.to_dict().items():
        if name in ("edge_index", "adj_t", "num_nodes") or any(name in names for names in _SPLITS.values()):
            continue
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        is_node, is_edge = data.is_node_attr(name), data.is_edge_attr(name)
        if not (is_node or is_edge):
            if name in _OF_VERTICES + _OF_EDGES:
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                of, size = ("vertex", graph.num_vertices) if name in _OF_VERTICES else ("edge", graph.num_edges)
                raise ValueError(f"data.{name} must be a tensor with one row per {of}, expected {size} rows, got {got}")
            if isinstance(value, Tensor) and value.numel() > 1:
                left_out.append(f"data.{name} ({str(value.dtype).removeprefix('torch.')} {list(value.shape)})")
            continue  # a value of the whole graph belongs to no vertex and no batch
        if name in OWN_NAMES:
            raise ValueError(
                f"data.{name} cannot be stored under its name, by which a batch has something of its own; rename it: "
                f"data.my_{name} = data.{name}; del data.{name}"
            )
        if not isinstance(value, Tensor):
            raise ValueError(
                f"data.{name} must be a tensor to be stored, got {type(value).__name__}; convert or delete it"
            )
        if value.size(0) != (graph.num_vertices if is_node else graph.num_edges):
            raise ValueError(
                f"data.{name} must have one row per {'vertex' if is_node else 'edge'} in dimension 0, expected "
                f"{graph.num_vertices if is_node else graph.num_edges}, got {value.size(0)}"
            )
        if value.is_meta:
            raise ValueError(f"data.{name} is on the device meta, without values; give it some, or delete it")
        if value.layout != torch.strided:
            raise ValueError(f"data.{name} must be dense to be stored, got layout {value.layout}; call .to_dense()")
        if "/" in name:
            raise ValueError(f"data[{name!r}] cannot be stored under its name, which has to be a file name; rename it")
        try:
            numpy_dtype(value.dtype)
        except TypeError:
            raise ValueError(
                f"data.{name} has dtype {value.dtype}, which .npy files cannot hold; convert or delete it"
            ) from None
        (node if is_node else edge)[name] = value.detach().cpu().resolve_conj().resolve_neg()
    if left_out:
        warnings.warn(
            f"{', '.join(left_out)} left out: only what has a row per vertex ({graph.num_vertices}) or per edge ({graph.num_edges}) is stored, and splits "
            "(train_mask, train_idx or train_index and so on, or split=)",
            UserWarning,
            stacklevel=3,
        )
    return Attributes(node, edge)


def _has_weights(adj_t: Any) -> bool:
    values = adj_t.values() if isinstance(adj_t, Tensor) else adj_t.storage.value()
    return values is not None and bool((values != 1).any())


def collect_splits(
    data: Data, split: Mapping[str, Tensor] | None, labels: Tensor | None, num_vertices: int
) -> dict[str, Tensor]:
    """Split name -> ascending vertex ids, without the vertices whose label (or every one of several) is negative."""
    if split is None:
        split = {}
        for name, attributes in _SPLITS.items():
            present = [attribute for attribute in attributes if data.get(attribute) is not None]
            if not present:
                continue
            split[name] = data[present[0]]
            dtype = torch.as_tensor(split[name]).dtype
            if present[0].endswith("_mask") and dtype != torch.bool:
                raise ValueError(
                    f"data.{name}_mask must be bool, got {dtype}; use .bool(), or pass split={{{name!r}: ids}}"
                )
            if len(present) > 1:
                warnings.warn(
                    f"the split {name!r} is that of data.{present[0]}; {', '.join(f'data.{other}' for other in present[1:])} left out",
                    UserWarning,
                    stacklevel=3,
                )
    if not isinstance(split, Mapping):
        raise TypeError(f"split must be a mapping of names to vertex ids or masks, got {type(split).__name__}")
    splits = {}
    for name, chosen in split.items():
        if name == "all" or not str(name).isidentifier():
            raise ValueError(f"a split's name must be an identifier other than 'all', got {name!r}")
        try:
            chosen = torch.as_tensor(chosen).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"split {name!r} must be a bool mask or integer ids, got {type(chosen).__name__} ({error})"
            ) from None
        ids, is_mask = read_ids(chosen, num_vertices, f"split {name!r}", "a bool mask or integer ids", "must hold ids")
        ids = ids if is_mask else ids.unique()
        if (
            labels is not None
            and labels.dtype.is_signed
            and not (labels.dtype.is_floating_point or labels.dtype.is_complex)
        ):
            known = labels[ids] >= 0
            ids = ids[known if known.dim() == 1 else known.flatten(1).any(dim=1)]
        splits[str(name)] = ids
    return splits


def num_classes_of(labels: Tensor | None) -> int:
    if (
        labels is None
        or labels.dim() != 1
        or labels.dtype.is_floating_point
        or labels.dtype.is_complex
        or labels.numel() == 0
    ):
        return 0
    return max(0, int(labels.to(torch.int64).max()) + 1)  # not all integer types have a largest entry


def describe(rows: Tensor) -> dict[str, Any]:
    return {"dtype": str(rows.dtype).removeprefix("torch."), "row_shape": list(rows.shape[1:])}
