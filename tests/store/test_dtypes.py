"""Law: a row arrives bit for bit, whatever its dtype and shape, on every path that rows take."""

from __future__ import annotations

import warnings
from pathlib import Path

import distributed
import pytest
import torch
from batches import packed
from graphs import random_data
from operator_cases import rows_of, same_bits
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp import NeighborLoader
from salientpp.store.assembly import assemble_rows

N = 120

#: Every dtype that torch can store except complex32, which is not written to .npy files.
STORABLE = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
    torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
SHAPES = {"flat": (), "wide": (3,), "none": (0,), "deep": (2, 2)}


def columns(dtypes: list[torch.dtype]) -> dict[str, Tensor]:
    """Returns one column for every dtype and shape."""
    return {
        f"{str(dtype)[6:]}_{name}": rows_of(dtype, (N, *shape), seed=i)
        for i, dtype in enumerate(dtypes)
        for name, shape in SHAPES.items()
    }


def colourful(dtypes: list[torch.dtype] = STORABLE) -> Data:
    data = random_data(N, 500)
    del data.x, data.y
    for name, rows in columns(dtypes).items():
        data[name] = rows
    for dtype in dtypes:
        data[f"edge_{str(dtype)[6:]}"] = rows_of(dtype, (data.num_edges,), seed=99)
    return data


def assert_rows_are_those_of(batch: Data, ids: Tensor, names: list[str], data: Data) -> None:
    for name in names:
        rows = data[name]
        as_bytes = rows.unsqueeze(-1).view(torch.uint8)
        assert (batch[name].dtype, batch[name].shape[1:]) == (rows.dtype, rows.shape[1:]), name
        assert torch.equal(batch[name].unsqueeze(-1).view(torch.uint8), as_bytes[ids]), name


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("way", ["in place", "packed", "device rows"])
def test_batches_of_a_data_object_keep_every_dtype(way):
    data = colourful([*STORABLE, torch.complex32])
    loader = NeighborLoader(data, [3, 2], batch_size=16, device_rows=0.4 if way == "device rows" else 0.0)
    for batch in packed(loader) if way == "packed" else loader:
        assert_rows_are_those_of(batch, batch.n_id, list(columns(STORABLE)), data)
        assert_rows_are_those_of(batch, batch.e_id, [f"edge_{str(dtype)[6:]}" for dtype in STORABLE], data)


def _check_part(rank: int, root: str, num_parts: int) -> tuple[int, int]:
    warnings.simplefilter("ignore")
    data = colourful()
    names = list(columns(STORABLE))
    part = salientpp.load(root)
    from_cache = from_others = 0
    for alpha, beta, is_packed in [(0.0, 0.0, False), (0.4, 0.3, False), (0.4, 0.3, True)]:
        loader = NeighborLoader(
            part,
            [4, 2],
            "all",
            batch_size=16,
            seed=1,
            columns=names,
            replication_factor=alpha,
            device_rows=beta,
            uneven="exact",
        )
        for batch in packed(loader, serves=True) if is_packed else loader:
            assert_rows_are_those_of(batch, part.original_id(batch.n_id), names, data)
        from_cache += loader.stats().rows_cache
        from_others += loader.stats().rows_remote
    for batch in NeighborLoader(part, [4, 2], "all", batch_size=16, columns=(), uneven="exact"):
        assert_rows_are_those_of(batch, part.original_id(batch.n_id[: batch.batch_size]), names, data)
    return from_cache, from_others


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_of_a_partitioned_graph_keep_every_dtype(tmp_path, world_size):
    root = tmp_path / "d"
    data = colourful()
    salientpp.partition(data, world_size, root, [4, 2], 16, method="random")
    for part_id in range(world_size):
        stored = salientpp.load(root, part_id=part_id, verify="full").node_rows()
        own = salientpp.load(root, part_id=part_id).split("all")
        original = salientpp.load(root, part_id=part_id).original_id(own)
        for name, rows in columns(STORABLE).items():
            want = rows.unsqueeze(-1).view(torch.uint8)[original]
            assert stored[name].dtype == rows.dtype and torch.equal(
                stored[name].unsqueeze(-1).view(torch.uint8), want
            ), name
    results = distributed.run(_check_part, world_size, str(root), world_size, seconds=300)
    assert world_size == 1 or all(from_cache > 0 and from_others > 0 for from_cache, from_others in results)


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_x_of_every_dtype_is_converted_to_float32(dtype):
    data = random_data(N, 500)
    data.x = rows_of(dtype, (N, 3), seed=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that complex numbers keep only their real part
        for batch in NeighborLoader(data, [3], batch_size=32, dtype=torch.float32):
            torch.testing.assert_close(
                batch.x, data.x.to(torch.float32)[batch.n_id], rtol=0, atol=0, equal_nan=True
            )  # NaNs have several bit patterns


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=str)
def test_assembly_without_triton_keeps_every_dtype(dtype, shape):
    sources = [rows_of(dtype, (size, *shape), seed=size) for size in (5, 0, 7)]
    index = torch.tensor([11, 0, 4, 5, 5, 3])
    out = rows_of(dtype, (6, *shape), seed=50)
    assemble_rows(sources, index, out)
    want = torch.cat([rows.unsqueeze(-1).view(torch.uint8) for rows in sources])[index]
    assert torch.equal(out.unsqueeze(-1).view(torch.uint8), want)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64], ids=str
)
def test_labels_of_every_dtype_are_delivered(tmp_path: Path, dtype):
    data = random_data(N, 500)
    data.y = data.y.to(dtype)
    part = salientpp.partition(data, 1, tmp_path / "d", [3], 16)
    assert part.num_classes == {torch.bool: 2, torch.complex64: 0}.get(dtype, 7)
    assert part.split("train").numel() == int(data.train_mask.sum())
    for batch in NeighborLoader(part, [3], "train", batch_size=16):
        assert same_bits(
            batch.y,
            data.y.view(torch.uint8)
            .view(N, -1)[part.original_id(batch.n_id[: batch.batch_size])]
            .view(dtype)
            .flatten(),
        )
