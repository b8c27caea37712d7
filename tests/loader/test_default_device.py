"""Law: torch's default device and dtype change nothing. Every tensor that the package makes for itself names its device."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphConv

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.datasets import convert, load_dataset

PACKAGE = Path(salientpp.__file__).parent
#: Functions that make tensors on the default device unless they are given one.
FACTORIES = {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
    ),
    *(
        "scalar_tensor",
        "sparse_compressed_tensor",
        "sparse_coo_tensor",
        "sparse_csc_tensor",
        "sparse_csr_tensor",
        "tensor",
        "tril_indices",
    ),
    *("triu_indices", "zeros"),
}


def without_device(source: str) -> list[tuple[int, str]]:
    """Returns (line, name) of every call of a torch factory that names no device."""
    return [
        (node.lineno, node.func.attr)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_every_new_tensor_names_its_device():
    found = [
        f"{path.relative_to(PACKAGE)}:{line} torch.{name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.is_relative_to(PACKAGE / "testing")  # graphs for tests, which may follow the default
        for line, name in without_device(path.read_text())
    ]
    assert not found, f"name a device in {', '.join(found)}"


def test_a_tensor_without_a_device_is_found():
    source = "a = torch.empty(3)\nb = torch.empty(3, device='cpu')\nc = torch.tensor([f(torch.arange(2))], **where)"
    assert without_device(source) == [(1, "empty"), (3, "arange")]


def one_type(num_vertices: int = 60) -> Data:
    draw = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(num_vertices, 4, generator=draw),
        y=torch.arange(num_vertices) % 3,
        edge_index=torch.randint(num_vertices, (2, 400), generator=draw),
        edge_attr=torch.randn(400, 2, generator=draw),
        edge_weight=torch.rand(400, generator=draw),
        time=torch.randint(50, (num_vertices,), generator=draw),
        train_mask=torch.rand(num_vertices, generator=draw) < 0.5,
        val_mask=torch.rand(num_vertices, generator=draw) < 0.2,
    )


def several_types() -> HeteroData:
    draw, data = torch.Generator().manual_seed(1), HeteroData()
    data["a"].x, data["b"].x = torch.randn(40, 4, generator=draw), torch.randn(20, 3, generator=draw)
    data["a"].train_mask = torch.rand(40, generator=draw) < 0.5
    data["a", "to", "b"].edge_index = torch.stack([torch.randint(n, (150,), generator=draw) for n in (40, 20)])
    data["b", "back", "a"].edge_index = torch.stack([torch.randint(n, (150,), generator=draw) for n in (20, 40)])
    return data


def tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a batch or of plain containers, by its path."""
    if isinstance(value, (Data, HeteroData)):
        for store in value.stores:
            for key, entry in store.items():
                yield from ((f"{store._key}.{key}{path}", tensor) for path, tensor in tensors_of(entry))
    elif isinstance(value, Tensor):
        yield "", value if value.layout == torch.strided else value.to_dense()
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from ((f"[{key}]{path}", tensor) for path, tensor in tensors_of(entry))
    elif isinstance(value, (list, tuple)):
        for at, entry in enumerate(value):
            yield from ((f"[{at}]{path}", tensor) for path, tensor in tensors_of(entry))


TYPED_EDGES = ("a", "to", "b")
WORK: dict[str, Callable[[Path, Any], Any]] = {
    "partition, load": lambda folder, made: (made["partition"](folder), salientpp.load(folder / "d", part_id=1).node_rows())[1],
    "parts of a type": lambda folder, made: list(NeighborLoader(made["part"], [3, 2], "train", batch_size=8, shuffle=True, seed=1)),
    "a graph in memory": lambda folder, made: list(
        NeighborLoader(made["data"], [3, 2], made["data"].train_mask, batch_size=8, shuffle=True, seed=1)
    ),
    "ids in a list": lambda folder, made: list(NeighborLoader(made["part"], [3, 2], [1, 2, 5], batch_size=2, seed=1)),
    "replacement, trees": lambda folder, made: list(
        NeighborLoader(made["part"], [3, 2], "train", batch_size=8, replace=True, disjoint=True, seed=2)
    ),
    "weights": lambda folder, made: list(
        NeighborLoader(made["part"], [3, 2], "train", batch_size=8, weight_attr="edge_weight", seed=2)
    ),
    "times": lambda folder, made: list(
        NeighborLoader(made["part"], [3, 2], "train", batch_size=8, time_attr="time", seed=2)
    ),
    "induced subgraphs": lambda folder, made: list(
        NeighborLoader(made["part"], [3, 2], "train", batch_size=8, subgraph_type="bidirectional", seed=2)
    ),
    "lookahead, a cache": lambda folder, made: list(
        NeighborLoader(made["part"], [3, 2], "train", batch_size=8, replication_factor=0.2, lookahead=2, seed=2)
    ),
    "edges, negatives": lambda folder, made: list(
        LinkNeighborLoader(made["part"], [3], neg_sampling="binary", batch_size=64, shuffle=True, seed=3)
    ),
    "edges, triplets": lambda folder, made: list(
        LinkNeighborLoader(made["part"], [3], neg_sampling="triplet", batch_size=64, shuffle=True, seed=3)
    ),
    "parts of several types": lambda folder, made: list(
        NeighborLoader(made["typed"], [3, 2], ("a", "train"), batch_size=8, shuffle=True, seed=4)
    ),
    "edges of several types": lambda folder, made: list(
        LinkNeighborLoader(
            made["typed"], [3], edge_label_index=TYPED_EDGES, neg_sampling="binary", batch_size=64, seed=5
        )
    ),
    "inference": lambda folder, made: salientpp.inference([made["model"].convs[0], torch.relu, made["model"].convs[1]], made["part"]),
    "inclusion probabilities": lambda folder, made: salientpp.inclusion_probability(
        salientpp.Graph.from_data(made["data"]), made["data"].train_mask.nonzero().flatten(), [3, 2], 8
    ),
    "analysis": lambda folder, made: [
        torch.tensor([volume.remote_rows_per_epoch for volume in volumes], dtype=torch.float64, device="cpu")
        for volumes in [
            analyze(
                made["data"], Batches([3, 2], 8, "train", epochs=1), Ways(["vip", "degree", "random", "oracle"], [0.0, 0.3]), parts=2, method="random"
            ).of(way="cache")
        ]
    ],
    "converted": lambda folder, made: (
        convert(made["file"], folder / "c", overwrite=True),
        list(NeighborLoader(load_dataset(f"converted:{folder / 'c'}"), [3], torch.from_numpy(made["ids"]), batch_size=8, seed=1)),
    )[1],
}  # fmt: skip


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([GraphConv(4, 8), GraphConv(8, 3)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    data = one_type()
    torch.save(data, folder / "g.pt")
    return {
        "data": data,
        "partition": lambda into: salientpp.partition(data, 2, into / "d", [3, 2], 8, overwrite=True),
        "part": salientpp.partition(data, 1, folder / "one", [3, 2], 8, time_attr=None),
        "typed": salientpp.partition(several_types(), 1, folder / "several", [3, 2], 8),
        "model": Model().eval(),
        "file": f"pyg:{folder / 'g.pt'}",
        "ids": data.train_mask.nonzero().flatten().numpy(),
    }


@pytest.mark.parametrize(
    ("default", "name"),
    # Labels of edges and values of matrices have the default dtype, because PyG makes them so.
    [
        *(("device", name) for name in WORK),
        *(("dtype", name) for name in WORK if "edges" not in name and name != "converted"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_default_device_or_dtype_changes_no_result(tmp_path, made, name, default):
    # Tensors on the device meta hold no values, so one made there by mistake cannot be used.
    expected = list(tensors_of(WORK[name](tmp_path, made)))
    try:
        if default == "device":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.float64)
        got = list(tensors_of(WORK[name](tmp_path, made)))
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert [path for path, _ in got] == [path for path, _ in expected] and expected
    for (path, one), (_, other) in zip(got, expected, strict=True):
        assert (one.device, one.dtype) == (other.device, other.dtype), path
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), path
