"""Small random graphs whose features identify their vertices."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import to_undirected


def identity_features(num_vertices: int, width: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns features [N, width] with ``x[v] = v`` in every column, so that a row tells which vertex it belongs to."""
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
    """Makes a graph with skewed degrees, identity features, ``y[v] = v mod 7`` and random splits."""
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
    """Makes a graph of three types with skewed degrees, repeated edges in random order, loops and isolated vertices.

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


def typed_data(seed: int = 0) -> HeteroData:
    """Makes a graph whose three types differ: authors have wide rows, venues have no rows, papers have labels, and every type has seeds."""
    data = random_hetero(seed=seed)
    data["author"].x = torch.cat([data["author"].x, data["author"].x, data["author"].x], 1)
    del data["venue"].x
    data["paper"].y = torch.arange(data["paper"].num_nodes) % 5
    data["venue"].num_nodes = data["venue"].time.numel()
    generator = torch.Generator().manual_seed(seed)
    for type_ in ("paper", "author", "venue"):
        data[type_].train_mask = torch.rand(data[type_].num_nodes, generator=generator) < 0.5
    return data


TYPED_FANOUTS = {
    ("paper", "by", "author"): [4, 3],
    ("author", "writes", "paper"): [3, 2],
    ("paper", "cites", "paper"): [5, 0],
    ("venue", "prints", "paper"): [2, -1],
}


#: Dtype and shape of a row, as :func:`random_rows` takes them.
ROW_WORDS = (
    "float32 3", "float32 3", "float32 3", "float32 16", "float64 2", "float16 5", "bfloat16 4", "int64 2", "uint8 3", "bool 2", "complex64 2", "int32 1",
    "float32 -", "int16 -", "float32 0", "float32 2,3",
)  # fmt: skip


def random_rows(r: np.random.Generator, size: int, words: str, more: bool = False) -> Tensor:
    """Returns rows [size, ...] of the dtype and shape in ``words``. ``more``: they are wider, as in types of different widths."""
    dtype, width = words.split()
    shape = [] if width == "-" else [int(each) for each in width.split(",")]
    if more and len(shape) == 1 and shape[0]:
        shape[0] += 2  # types with other widths
    bits = torch.from_numpy(r.integers(-100, 100, (size, *shape)))
    kind = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        found = (bits.double() + torch.from_numpy(r.random((size, *shape)))).to(kind)
        return torch.complex(found.real, found.real * 2) if kind.is_complex else found
    return bits % 2 == 0 if kind == torch.bool else (bits % 100 if kind == torch.uint8 else bits).to(kind)
