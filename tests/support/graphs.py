"""Small graphs whose answers can be worked out by hand, and features that identify their vertices."""

from __future__ import annotations

import numpy as np
import torch
from peers import real_graph
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import to_undirected


def identity_features(num_vertices: int, width: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    """``x[v] = v`` in every column."""
    return torch.arange(num_vertices).view(-1, 1).repeat(1, width).to(dtype)


def random_data(
    num_vertices: int = 400,
    num_edges: int = 2400,
    *,
    seed: int = 0,
    directed: bool = False,
    train_fraction: float = 0.3,
    dtype: torch.dtype = torch.float32,
    edge_attributes: bool = False,
) -> Data:
    """Graph with skewed degrees, identity features, ``y[v] = v mod 7`` and random splits."""
    generator = torch.Generator().manual_seed(seed)
    # Squaring makes low ids popular, so degrees are skewed.
    source = (torch.rand(num_edges, generator=generator).square() * num_vertices).long()
    target = torch.randint(num_vertices, (num_edges,), generator=generator)
    edge_index = torch.stack([source, target])
    if not directed:
        edge_index = to_undirected(edge_index, num_nodes=num_vertices)
    draw = torch.rand(num_vertices, generator=generator)
    data = Data(
        x=identity_features(num_vertices, dtype=dtype),
        y=torch.arange(num_vertices) % 7,
        edge_index=edge_index,
        train_mask=draw < train_fraction,
        val_mask=(draw >= train_fraction) & (draw < train_fraction + 0.1),
        test_mask=draw >= train_fraction + 0.1,
    )
    if edge_attributes:
        data.edge_attr = torch.arange(data.num_edges).view(-1, 1).float()
    return data


#: Four relations: both directions between two types, one inside a type, and one from a type that is never a target.
RELATIONS = [
    ("paper", "by", "author"),
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("venue", "prints", "paper"),
]


def random_hetero(num_edges: int = 300, *, seed: int = 0, **sizes: int) -> HeteroData:
    """Graph of three types with skewed degrees, repeated edges, self-loops, isolated vertices, and edges in random order.

    Features identify vertices and edges: ``x[v] = (type, v)`` and ``edge_attr[e] = (relation, e)``. Times are integers
    with many ties. Weights are skewed, and some are zero.
    """
    generator = np.random.default_rng(seed)
    sizes = {"paper": 60, "author": 35, "venue": 6, **sizes}
    data = HeteroData()
    for number, (name, size) in enumerate(sizes.items()):
        ids = torch.arange(size)
        data[name].x = torch.stack([torch.full_like(ids, number), ids], 1).float()
        data[name].time = torch.from_numpy(generator.integers(10, size=size))
    for number, (source, relation, target) in enumerate(RELATIONS):
        ends = [
            generator.permutation(sizes[end])[(generator.random(num_edges) ** 2 * sizes[end]).astype(np.int64)]
            for end in (source, target)
        ]
        store = data[source, relation, target]
        store.edge_index = torch.from_numpy(np.stack(ends))
        store.edge_attr = torch.stack([torch.full((num_edges,), number), torch.arange(num_edges)], 1).float()
        store.edge_time = torch.from_numpy(generator.integers(10, size=num_edges))
        chosen, weight = generator.random((2, num_edges))
        # Products are the same on every processor; numpy's powers are not.
        store.weight = torch.from_numpy(np.where(chosen < 0.1, 0.0, weight * weight * weight))
    return data


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
