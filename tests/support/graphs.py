"""Small graphs whose answers can be worked out by hand, and real graphs."""

from __future__ import annotations

import numpy as np
import torch
from peers import real_graph
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import to_undirected

from salientpp.testing.graphs import RELATIONS, identity_features, random_data, random_hetero

__all__ = ["RELATIONS", "identity_features", "random_data", "random_hetero", "real_data", "real_packages", "star"]


def star(num_leaves: int) -> Tensor:
    """Edges from leaves 1, ..., n into vertex 0."""
    leaves = torch.arange(1, num_leaves + 1)
    return torch.stack([leaves, torch.zeros_like(leaves)])


def real_data(name: str) -> Data:
    """A real graph from the folder in ``SALIENTPP_TEST_DATA``, symmetrised, with identity features."""
    with np.load(real_graph(name), allow_pickle=False) as arrays:
        num_vertices = arrays["x"].shape[0]
        data = Data(
            x=identity_features(num_vertices, 1),
            y=torch.from_numpy(arrays["y"]),
            edge_index=to_undirected(torch.from_numpy(arrays["edge_index"]), num_nodes=num_vertices),
        )
        for split in ("train", "val", "test"):
            mask = torch.zeros(num_vertices, dtype=torch.bool)
            mask[torch.from_numpy(arrays[f"{split}_idx"])] = True
            data[f"{split}_mask"] = mask
    return data


def real_packages() -> HeteroData:
    """The archive of Debian from the folder in ``SALIENTPP_TEST_DATA``.

    It has binary packages with sections as classes, source packages, and maintainers, who have no features. Each relation
    comes with its reverse.
    """
    with np.load(real_graph("debian_full"), allow_pickle=False) as arrays:
        type_of, kind_of, x, y, ends = (
            torch.from_numpy(arrays[name]) for name in ("node_type", "edge_type", "x", "y", "edge_index")
        )
        splits = {split: torch.from_numpy(arrays[f"{split}_idx"]) for split in ("train", "val", "test")}
    data, names = HeteroData(), ["binary", "source", "maintainer"]
    place = torch.empty(type_of.numel(), dtype=torch.int64)
    for number, name in enumerate(names):
        own = (type_of == number).nonzero().flatten()
        place[own] = torch.arange(own.numel())
        data[name].num_nodes = own.numel()
        if name != "maintainer":
            data[name].x = x[own].float()
        if name == "binary":
            data[name].y = y[own]
            for split, ids in splits.items():
                mask = torch.zeros(own.numel(), dtype=torch.bool)
                mask[place[ids]] = True
                data[name][f"{split}_mask"] = mask
    for kind in kind_of.unique().tolist():
        of_kind = ends[:, kind_of == kind]
        for a, source in enumerate(names):
            for b, target in enumerate(names):
                some = place[of_kind[:, (type_of[of_kind[0]] == a) & (type_of[of_kind[1]] == b)]]
                if some.numel():
                    data[source, f"kind_{kind}", target].edge_index = some
                    data[target, f"rev_kind_{kind}", source].edge_index = some.flip(0)
    return data
