"""Laws of the dataset directory: nothing is lost, an incomplete directory is never taken for a complete one, and an altered one is refused.

Graphs here are hostile on purpose: directed, with self-loops, repeated edges, isolated vertices and empty parts. Edge attributes hold the user's
edge numbers, so every edge on disk tells which edge it was.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import distributed
import numpy as np
import pytest
import torch
from directories import (
    BATCH_SIZE,
    FANOUTS,
    SPLITS,
    all_original_ids,
    assert_nothing_is_lost,
    contents,
    edit_manifest,
    forge_checksums,
    ids_of,
    in_user_order,
    mask_splits,
    names_in,
)
from forked_python import python
from graphs import identity_features, random_data, random_hetero
from rare import rare
from steps import Told
from torch import Tensor
from torch_geometric.data import Data, Dataset
from torch_geometric.transforms import RandomLinkSplit

import salientpp
from salientpp import LinkNeighborLoader
from salientpp.partitioning import numbering, options
from salientpp.store.directory import files, step_writer
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.manifest import check_manifest


def write(data: Data, num_parts: int, root: Path, **options) -> salientpp.PartitionedGraph:
    return salientpp.partition(data, num_parts, root, FANOUTS, BATCH_SIZE, **options)


def generator_of(seed: int) -> torch.Generator:
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def hostile_data(seed: int = 0, num_vertices: int = 60, num_edges: int = 300) -> Data:
    """Returns a directed graph. Edges 0-9 are self-loops, 10-29 repeat 30-49, and the last five vertices are isolated."""
    generator = generator_of(seed)
    edge_index = torch.randint(num_vertices - 5, (2, num_edges), generator=generator)
    edge_index[1, :10] = edge_index[0, :10]
    edge_index[:, 10:30] = edge_index[:, 30:50]
    draw = torch.rand(num_vertices, generator=generator)
    return Data(
        edge_index=edge_index,
        num_nodes=num_vertices,
        x=identity_features(num_vertices),
        y=torch.randint(5, (num_vertices,), generator=generator),
        train_mask=draw < 0.4,
        val_mask=(draw >= 0.4) & (draw < 0.6),
        test_mask=draw >= 0.7,
        edge_attr=torch.arange(num_edges).view(-1, 1),
    )


def bits(rows: Tensor) -> Tensor:
    """Views rows as uint8 [n, bytes per row], so that NaNs and dtypes without comparison can be compared."""
    if rows.numel() == 0:
        return torch.empty(rows.size(0), 0, dtype=torch.uint8)
    return rows.contiguous().view(-1).view(torch.uint8).view(rows.size(0), -1)


# --- round trip ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_parts", "method"), [(K, method) for K in (1, 3, 7) for method in ("metis", "random")])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_vertex_and_edge_survives_a_round_trip(tmp_path, num_parts, method, seed):
    data = hostile_data(seed)
    before = data.clone()
    part = write(data, num_parts, tmp_path / "d", method=method)
    assert_nothing_is_lost(data, part, mask_splits(data))
    assert_nothing_is_lost(data, salientpp.load(tmp_path / "d", verify="full"), mask_splits(data))
    assert data.keys() == before.keys() and all(
        torch.equal(data[k], before[k]) for k in before.keys() if k != "num_nodes"
    )


@pytest.mark.parametrize("empty", [(0,), (6,), (0, 3, 6), (1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 4, 5)])
def test_empty_parts_of_a_given_assignment_are_kept(tmp_path, empty):
    data = hostile_data(2)
    allowed = torch.tensor([p for p in range(7) if p not in empty])
    given = allowed[torch.randint(allowed.numel(), (data.num_nodes,), generator=generator_of(3))]
    part = write(data, 7, tmp_path / "d", method=given.to(torch.int32))
    assert_nothing_is_lost(data, part, mask_splits(data))
    assert torch.equal(part.book.owner(torch.arange(60)), given[all_original_ids(part)]), "the assignment is kept"
    for p in empty:
        assert part.book.size_of(p) == 0
        assert part.node_rows(p)["x"].shape == (0, 3)
        assert part.split("train", p).numel() == 0 and part.split("all", p).numel() == 0
        assert not part.vip(p).any()


def test_a_given_assignment_can_have_more_parts_than_vertices(tmp_path):
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), x=identity_features(2))
    part = write(data, 5, tmp_path / "d", method=torch.tensor([4, 1]))
    assert_nothing_is_lost(data, part, {})
    assert all_original_ids(part).tolist() == [1, 0]


def test_a_graph_without_edges_survives_a_round_trip(tmp_path):
    data = Data(edge_index=torch.empty(2, 0, dtype=torch.int64), x=identity_features(9), train_mask=torch.arange(9) < 4)
    part = write(data, 3, tmp_path / "d", method="random")
    assert_nothing_is_lost(data, part, {"train": torch.arange(4)})


@pytest.mark.parametrize("num_parts", [1, 3])
def test_the_directory_has_no_attributes_that_the_data_lacks(tmp_path, num_parts):
    full = hostile_data(4)
    for i, missing in enumerate(
        [("x",), ("y",), ("x", "y"), ("edge_attr",), ("train_mask",), tuple(f"{s}_mask" for s in SPLITS)]
    ):
        data = full.clone()
        for name in missing:
            del data[name]
        splits = {name: ids_of(data[f"{name}_mask"]) for name in SPLITS if f"{name}_mask" in data}
        part = write(data, num_parts, tmp_path / f"d{i}")
        assert_nothing_is_lost(data, part, splits)
        assert part.num_features == (0 if "x" in missing else 3)
        assert part.num_classes == (0 if "y" in missing else int(full.y.max()) + 1)
        assert part.manifest["workload"]["seeds"] == ("train" if "train" in splits else "all")


def test_attributes_of_the_whole_graph_are_not_stored(tmp_path):
    data = hostile_data(5)
    data.name, data.scale, data.table = "cora", torch.tensor(3.0), torch.zeros(4, 2)
    part = write(data, 2, tmp_path / "d")
    assert sorted(part.manifest["node_attributes"]) == ["x", "y"]
    assert sorted(part.manifest["edge_attributes"]) == ["edge_attr"]


def test_numpy_strided_and_differentiable_attributes_are_stored_by_value(tmp_path):
    data = hostile_data(6)
    data.transposed = torch.arange(120).view(2, 60).t()
    data.array = np.arange(180).reshape(3, 60).T
    data.every_other = torch.arange(240).view(60, 4)[:, ::2]
    data.weight = torch.rand(60, 2, requires_grad=True)
    part = write(data, 3, tmp_path / "d")
    for name, expected in {
        "transposed": data.transposed,
        "array": torch.from_numpy(data.array.copy()),
        "every_other": data.every_other,
        "weight": data.weight.detach(),
    }.items():
        assert torch.equal(in_user_order(part, name), expected), name


DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.bool,
]


def read_in_pieces(monkeypatch):
    """Makes the writer read rows in small pieces, as it reads large mapped files."""
    monkeypatch.setattr(step_writer, "_COPY_BYTES", 100)
    monkeypatch.setattr(step_writer, "_SPAN_BYTES", 30)
    monkeypatch.setattr(step_writer, "releaser", lambda rows: lambda: None)


@pytest.mark.parametrize("in_pieces", [True, *rare(False)])
def test_every_dtype_and_shape_keeps_its_bits(tmp_path, monkeypatch, in_pieces):
    """Draws random bits, which include NaN payloads, negative zeros and subnormals."""
    if in_pieces:
        read_in_pieces(monkeypatch)
    data = hostile_data(7)
    generator = generator_of(8)

    def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
        if dtype == torch.bool:
            return torch.randint(2, shape, generator=generator).bool()
        size = torch.empty(0, dtype=dtype).element_size()
        return torch.randint(256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator).view(dtype)

    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        data[f"flat_{name}"] = random_bits(dtype, 60)
        data[f"cube_{name}"] = random_bits(dtype, 60, 2, 3)
        data[f"narrow_{name}"] = torch.empty(60, 0, dtype=dtype)
        data[f"edge_{name}"] = random_bits(dtype, 300, 2)
    part = write(data, 3, tmp_path / "d")
    number = part.edge_rows()["edge_attr"].view(-1)
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for shape, row_shape in (("flat", []), ("cube", [2, 3]), ("narrow", [0])):
            pieces = [part.node_rows(p)[f"{shape}_{name}"] for p in range(3)]
            assert all(piece.dtype == dtype and list(piece.shape[1:]) == row_shape for piece in pieces)
            expected = bits(data[f"{shape}_{name}"])[all_original_ids(part)]
            assert torch.equal(torch.cat([bits(piece) for piece in pieces]), expected), (shape, dtype)
            assert part.manifest["node_attributes"][f"{shape}_{name}"] == {"dtype": name, "row_shape": row_shape}
        assert torch.equal(bits(part.edge_rows()[f"edge_{name}"]), bits(data[f"edge_{name}"])[number]), dtype


def test_writing_in_many_small_pieces_gives_the_same_files(tmp_path, monkeypatch):
    data = hostile_data(9)
    write(data, 3, tmp_path / "whole")
    read_in_pieces(monkeypatch)
    monkeypatch.setattr(numbering, "_EDGES_AT_ONCE", 7)
    write(data, 3, tmp_path / "pieces")
    assert contents(tmp_path / "pieces") == contents(tmp_path / "whole")


def test_a_warning_names_the_line_that_called_partition(tmp_path):
    data = random_data(60, 300)
    data.y, data.train_mask = torch.arange(60) % 4 - 1, torch.ones(60, dtype=torch.bool)
    with pytest.warns(UserWarning, match="the split 'train' of data: 15 of 60 vertices are left out") as warned:
        salientpp.partition(data, 2, tmp_path / "d", [3, 2], 8)
    assert {warning.filename for warning in warned} == {__file__}


@pytest.mark.parametrize("several_types", [False, True])
def test_the_order_changes_only_ids_inside_a_part(tmp_path, several_types):
    data = random_hetero() if several_types else random_data(seed=3)
    vip, original = (
        salientpp.partition(data, 3, tmp_path / order, [3, 2], 8, order=order) for order in ("vip", "original")
    )
    assert original.description.partitioning["order"] == "original"
    assert vip.description.quality == original.description.quality
    for of_vip, of_original in zip(vip.description.node_types, original.description.node_types):
        assert of_vip.offsets == of_original.offsets
        ids = [torch.from_numpy(np.load(part.root / of_vip.original_id_file)) for part in (vip, original)]
        for begin, end in pairwise(of_original.offsets):
            assert torch.equal(ids[1][begin:end], ids[0][begin:end].sort().values)
        for p in range(3):
            probability = [torch.from_numpy(np.load(part.root / of_vip.vip_file(p))) for part in (vip, original)]
            assert torch.equal(probability[0][ids[0].argsort()], probability[1][ids[1].argsort()])


def test_a_manifest_records_the_partitioning_options(tmp_path):
    part = salientpp.partition(random_data(), 2, tmp_path / "d", [3, 2], 8)
    for change in ({"refine": 1}, {"method": None}, {"edge_weights": 3}):
        manifest = {**part.manifest, "partitioning": {**part.manifest["partitioning"], **change}}
        with pytest.raises(
            ValueError, match="partitioning must be method and order, strings; .* refine, true or false, got "
        ):
            check_manifest(manifest)
    older = {name: value for name, value in part.manifest.items() if name != "partitioning"}
    check_manifest(older)


@pytest.mark.parametrize("method", ["metis", "random"])
def test_the_same_input_gives_byte_identical_files(tmp_path, method):
    data = random_data(seed=3, edge_attributes=True)
    a = write(data, 4, tmp_path / "a", method=method, seed=5)
    b = write(data.clone(), 4, tmp_path / "b", method=method, seed=5)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert a.fingerprint == b.fingerprint
    data.x[17, 0] += 1
    c = write(data, 4, tmp_path / "c", method=method, seed=5)
    assert c.fingerprint != a.fingerprint, "a fingerprint distinguishes contents"


@pytest.mark.parametrize(
    ("most_edges", "has_kaminpar", "named", "several_types"),
    [
        *((10**6, True, "metis", True), (10, False, "metis", False), (10, True, "kaminpar", True)),
        *rare((10**6, True, "metis", False), (10, False, "metis", True), (10, True, "kaminpar", False)),
    ],
)
def test_method_auto_uses_kaminpar_for_large_graphs_if_it_is_installed(
    tmp_path, monkeypatch, several_types, most_edges, has_kaminpar, named
):
    if named == "kaminpar":
        pytest.importorskip("kaminpar")
    monkeypatch.setattr(options, "MOST_EDGES_OF_METIS", most_edges)
    monkeypatch.setattr(options, "has_kaminpar", lambda: has_kaminpar)
    data = random_hetero() if several_types else random_data(seed=3)
    steps, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # with several threads, KaMinPar's parts vary
    try:
        for name, chosen in {"a": {}, "b": {"method": "auto"}, "c": {"method": named}}.items():
            salientpp.partition(data, 2, tmp_path / name, [3, 2], 8, progress=Told(steps.append), **chosen)
    finally:
        torch.set_num_threads(threads)
    assert sum(f" to 2 parts by {named}," in step for step in steps) == 3
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


@pytest.mark.filterwarnings("ignore:Sparse")
def test_adj_t_and_edge_index_give_the_same_directory(tmp_path):
    data = random_data(60, 200, directed=True)
    data.edge_index = data.edge_index.unique(dim=1)
    order = (data.edge_index[1] * 60 + data.edge_index[0]).argsort()
    data.edge_index = data.edge_index[:, order]
    write(data, 2, tmp_path / "coo")
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(data.edge_index[1], minlength=60).cumsum(0)])
    ones = torch.ones(order.numel())
    data.adj_t = torch.sparse_csr_tensor(indptr, data.edge_index[0].clone(), ones, (60, 60))
    del data.edge_index
    write(data, 2, tmp_path / "csr")
    assert contents(tmp_path / "csr") == contents(tmp_path / "coo")
    data.adj_t = torch.sparse_csr_tensor(indptr, data.adj_t.col_indices(), ones * 2, (60, 60))
    with pytest.raises(ValueError, match="data.adj_t has values other than 1.*edge_index"):
        write(data, 2, tmp_path / "weighted")


# --- splits ----------------------------------------------------------------------------------------------


def test_a_split_of_ids_or_masks_replaces_the_masks_of_the_data(tmp_path):
    data = hostile_data(10)
    odd = torch.arange(60) % 2 == 1
    part = write(
        data,
        3,
        tmp_path / "d",
        split={
            "train": torch.tensor([5, 3, 3, 59, 0]),
            "odd": odd,
            "none": [],
            "few": [7, 8],
            "int32": torch.tensor([1], dtype=torch.int32),
        },
    )
    expected = {
        "train": torch.tensor([0, 3, 5, 59]),
        "odd": ids_of(odd),
        "none": torch.empty(0, dtype=torch.int64),
        "few": torch.tensor([7, 8]),
        "int32": torch.tensor([1]),
    }
    assert_nothing_is_lost(data, part, expected)


@pytest.mark.parametrize("form", ["int64 [N]", "int8 [N]", "int64 [N, 1]", "numpy [N]"])
def test_unlabelled_vertices_are_left_out_of_splits_with_a_warning(tmp_path, form):
    data = hostile_data(11)
    unlabelled = torch.arange(60) % 3 == 0
    labels = torch.where(unlabelled, -1, data.y)
    data.y = {
        "int64 [N]": labels,
        "int8 [N]": labels.to(torch.int8),
        "int64 [N, 1]": labels.view(-1, 1),
        "numpy [N]": labels.numpy(),
    }[form]
    expected = {name: ids_of(data[f"{name}_mask"] & ~unlabelled) for name in SPLITS}
    with pytest.warns(UserWarning) as warned:
        part = write(data, 3, tmp_path / "masks")
    assert_nothing_is_lost(data, part, expected)
    for name in SPLITS:
        total = int(data[f"{name}_mask"].sum())
        words = f"the split {name!r} of data: {total - len(expected[name])} of {total} vertices are left out"
        assert any(words in str(warning.message) for warning in warned), words


@pytest.mark.parametrize("given", ["ids", "mask"])
def test_a_given_split_keeps_unlabelled_vertices(tmp_path, given):
    data = hostile_data(11)
    data.y[::3] = -1
    ids = torch.arange(0, 60, 2)
    mask = torch.zeros(60, dtype=torch.bool)
    mask[ids] = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part = write(data, 3, tmp_path / "d", split={"train": ids if given == "ids" else mask})
    assert_nothing_is_lost(data, part, {"train": ids})


LABELS_THAT_ARE_VALUES = {
    "-1 and 1": torch.arange(60) % 2 * 2 - 1,
    "temperatures": torch.arange(60) - 30,
    "several labels of -1 and 1": (torch.arange(180).view(60, 3) % 2) * 2 - 1,
    "all -1": torch.full((60,), -1),
    "real numbers": torch.arange(60).double() - 30,
    "not a number": torch.full((60,), torch.nan),
    "unsigned": torch.arange(60, dtype=torch.uint8),
}


@pytest.mark.parametrize("kind", LABELS_THAT_ARE_VALUES)
def test_labels_that_are_not_classes_leave_no_vertex_out(tmp_path, kind):
    data = hostile_data(13)
    data.y = LABELS_THAT_ARE_VALUES[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part = write(data, 2, tmp_path / "d")
    assert {name: sum(counts) for name, counts in part.manifest["splits"].items()} == {
        name: ids.numel() for name, ids in mask_splits(data).items()
    }
    assert part.node_rows(0)["y"].dtype == data.y.dtype


def test_a_vertex_with_one_of_several_labels_stays_in_its_split(tmp_path):
    data = hostile_data(11)
    data.y = torch.full((60, 4), -1)
    data.y[::2, 3] = 0
    part = write(data, 2, tmp_path / "d")
    assert_nothing_is_lost(
        data, part, {name: ids_of(data[f"{name}_mask"] & (torch.arange(60) % 2 == 0)) for name in SPLITS}
    )


#: Labels of 60 vertices, and the number of classes that PyG's datasets count.
CLASSES = {
    "integers": (torch.arange(60) % 5, 5),
    "a column": ((torch.arange(60) % 5).view(-1, 1), 5),
    "a column of bytes": ((torch.arange(60) % 5).view(-1, 1).to(torch.uint8), 5),
    "several labels": (torch.rand(60, 7) < 0.5, 7),
    "several reals": (torch.rand(60, 7), 7),
    "a table": (torch.zeros(60, 4, 3), 3),
    "reals": ((torch.arange(60) % 5) / 2, 5),
    "a column of reals": ((torch.arange(60) % 2).float().view(-1, 1), 2),
    "none labelled": (torch.full((60,), -1), 0),
    "bools": (torch.arange(60) % 2 == 0, 2),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_classes_are_counted_as_in_pygs_datasets(tmp_path, kind):
    data = hostile_data(12)
    data.y, expected = CLASSES[kind]
    part = write(data, 2, tmp_path / "d")
    with warnings.catch_warnings(record=True) as ours:
        warnings.simplefilter("always")
        assert part.num_classes == expected
    with warnings.catch_warnings(record=True) as theirs:
        warnings.simplefilter("always")
        assert Dataset._infer_num_classes(None, data.y) == expected
    assert len(ours) == len(theirs)
    assert all("so num_classes is the number of distinct values, 5, as in PyG" in str(w.message) for w in ours)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_directory_id_reverses_original_id(tmp_path, num_parts):
    part = write(hostile_data(12), num_parts, tmp_path / "d")
    everyone = torch.arange(60)
    assert torch.equal(part.original_id(part.directory_id(everyone)), everyone)
    assert torch.equal(part.directory_id(part.original_id(everyone)), everyone)
    pairs = torch.tensor([[3, 5], [7, 59]], dtype=torch.int32)
    assert torch.equal(part.original_id(part.directory_id(pairs)), pairs.long()), "ids may have any shape"
    assert part.directory_id([3, 5]).tolist() == part.directory_id(pairs[0]).tolist()
    assert part.directory_id(torch.empty(0)).tolist() == []
    for ids, text in (
        (
            torch.tensor([0, 60]),
            r"ids must be integer ids of the data that was partitioned, in \[0, 60\), got 60 at position 1",
        ),
        (torch.tensor([-1]), r"in \[0, 60\), got -1 at position 0"),
        (torch.tensor([0.5]), "ids must be integer ids of the data that was partitioned, got torch.float32"),
        (torch.ones(60, dtype=torch.bool), "ids must be integer ids of the data that was partitioned, got torch.bool"),
        ("abc", "ids must be integer ids of the data that was partitioned, got str"),
    ):
        with pytest.raises(ValueError, match=text):
            part.directory_id(ids)


def test_directory_id_reverses_original_id_per_type(tmp_path):
    data = random_hetero()
    part = salientpp.partition(data, 2, tmp_path / "d", FANOUTS, BATCH_SIZE)
    ids = {type_: torch.arange(data[type_].num_nodes) for type_ in data.node_types}
    found = part.directory_id(ids)
    for type_, of_type in ids.items():
        assert torch.equal(part.original_id(found[type_], type_), of_type)
        assert torch.equal(part.take("x", found[type_], type_), data[type_].x)
    with pytest.raises(
        ValueError, match=r"ids must be integer ids of the data that was partitioned of 'venue', in \[0, 6\), got 6"
    ):
        part.directory_id(torch.tensor([6]), "venue")
    with pytest.raises(ValueError, match="type_ must be a node type of .*, got 'book'"):
        part.directory_id(torch.tensor([0]), "book")


def test_an_unknown_split_of_seeds_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"seeds must be 'all' or a split of the data \(.*'train'.*\), got 'trian'"):
        write(random_data(seed=21), 1, tmp_path / "d", seeds="trian")
    assert not (tmp_path / "d").exists()


def test_seeds_of_a_random_link_split_are_refused_with_advice(tmp_path):
    data = hostile_data(12)
    train, _, _ = RandomLinkSplit(add_negative_train_samples=False)(data)
    with pytest.raises(
        ValueError,
        match=r"data.edge_label_index holds seeds of a LinkNeighborLoader, .*; take it out first: pairs = data.edge_label_index; del data.",
    ):
        write(train, 2, tmp_path / "d")
    pairs, labels = train.edge_label_index, train.edge_label
    del train.edge_label_index
    part = write(train, 1, tmp_path / "d")
    by_itself = LinkNeighborLoader(part, [1], edge_label="edge_label", batch_size=1000)
    by_pairs = LinkNeighborLoader(part, [1], part.directory_id(pairs), labels, batch_size=1000)
    ends = []
    for loader in (by_itself, by_pairs):
        (batch,) = loader
        ends.append(sorted(part.original_id(batch.n_id[batch.edge_label_index]).T.tolist()))
        assert batch.edge_label.tolist() == [1.0] * pairs.size(1)
    assert ends[0] == ends[1] == sorted(pairs.T.tolist())


#: NumPy dtypes that torch lacks.
ODD = ["O", "M8[s]", "U3", "S2", "g", [("a", int)]]


@pytest.mark.parametrize("dtype", ODD, ids=str)
@pytest.mark.parametrize("name", ["y", "colour", "edge_attr", "train_mask"])
def test_numpy_arrays_that_torch_cannot_hold_are_refused_by_name(tmp_path, name, dtype):
    data = hostile_data(12)
    data[name] = np.zeros(300 if name == "edge_attr" else 60, dtype)
    words = "a bool mask or integer ids" if name == "train_mask" else "a tensor to be stored"
    got = re.escape(f"got a NumPy array of {np.dtype(dtype)}")
    with pytest.raises(ValueError, match=rf"data\.{name} must be {words}, {got}"):
        write(data, 2, tmp_path / "d")
    assert names_in(tmp_path) == []


def test_numpy_arrays_of_another_byte_order_or_stride_are_stored_by_value(tmp_path):
    data = hostile_data(12)
    expected = data.clone()
    data.x, expected.x = np.arange(120.0).astype(">f4").reshape(60, 2)[::-1], torch.arange(120.0).view(60, 2).flip(0)
    data.train_mask = expected.train_mask.numpy()[::-1][::-1]
    data.note = np.array(["of the whole graph"], dtype=object)
    part = write(data, 2, tmp_path / "d")
    rows = torch.cat([part.node_rows(part_id)["x"] for part_id in range(2)])
    assert rows.dtype == torch.float32 and torch.equal(rows, expected.x[part.original_id(torch.arange(60))])


def test_nan_labels_are_not_a_class(tmp_path):
    data = hostile_data(12)
    data.y = torch.where(torch.arange(60) < 30, float("nan"), (torch.arange(60) % 2).float()).view(-1, 1)
    assert write(data, 2, tmp_path / "d").num_classes == 2


def test_float_labels_and_labels_of_the_whole_graph_leave_no_vertex_out(tmp_path):
    data = hostile_data(12)
    data.y = -torch.ones(60)
    assert_nothing_is_lost(data, write(data, 2, tmp_path / "float"), mask_splits(data))
    data.y = torch.tensor([-1])
    part = write(data, 2, tmp_path / "graph")
    assert "y" not in part.node_rows(0) and part.num_classes == 0
    assert sum(part.manifest["splits"]["train"]) == int(data.train_mask.sum())


@pytest.mark.parametrize(
    ("split", "text"),
    [
        ({"train": torch.tensor([0, 60])}, r"split 'train' must hold ids in \[0, 60\), got 60"),
        ({"train": torch.tensor([-1, 2])}, r"split 'train' must hold ids in \[0, 60\), got -1"),
        ({"train": torch.ones(59, dtype=torch.bool)}, r"split 'train' as a mask must have shape \[60\], got \[59\]"),
        (
            {"train": torch.ones(60, 2, dtype=torch.bool)},
            r"split 'train' as a mask must have shape \[60\], got \[60, 2\]",
        ),
        ({"train": torch.ones(60)}, "split 'train' must be a bool mask or integer ids, got torch.float32"),
        ({"all": torch.tensor([0])}, "a split's name must be an identifier other than 'all', got 'all'"),
        ({"../x": torch.tensor([0])}, "a split's name must be an identifier other than 'all', got '../x'"),
        ({"train": "abc"}, "split 'train' must be a bool mask or integer ids, got str"),
        ({"train": torch.zeros(2, device="meta")}, "split 'train' must be a bool mask or integer ids, got Tensor"),
        ([torch.tensor([0])], "split must be a mapping of names to vertex ids or masks, got list"),
    ],
)
def test_a_wrong_split_is_refused_by_name(tmp_path, split, text):
    with pytest.raises((ValueError, TypeError), match=text):
        write(hostile_data(), 2, tmp_path / "d", split=split)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_a_mask_that_is_not_bool_is_refused(tmp_path, dtype):
    data = hostile_data()
    data.val_mask = data.val_mask.to(dtype)
    with pytest.raises(ValueError, match=rf"data.val_mask must be bool, got {dtype}; use .bool\(\)"):
        write(data, 2, tmp_path / "d")


@pytest.mark.parametrize("kind", ["idx", "index"])
@pytest.mark.parametrize("as_given", [torch.Tensor.long, torch.Tensor.int, torch.Tensor.numpy, torch.Tensor.tolist])
def test_splits_of_the_data_can_be_ids(tmp_path, kind, as_given, recwarn):
    data = hostile_data()
    splits = mask_splits(data)
    for name, ids in splits.items():
        del data[f"{name}_mask"]
        data[f"{name}_{kind}"] = as_given(ids.flip(0))
    assert_nothing_is_lost(_without_ids(data), write(data, 2, tmp_path / "d"), splits)
    assert not [warning for warning in recwarn if "left out" in str(warning.message)]


@pytest.mark.parametrize("size", [60, 300])
def test_ids_of_a_split_are_never_stored_as_an_attribute(tmp_path, size):
    data = hostile_data()
    del data.train_mask
    data.train_idx = torch.arange(size) % 60
    part = write(data, 2, tmp_path / "d")
    assert sum(part.manifest["splits"]["train"]) == 60
    assert not {"train_idx"} & {*part.manifest["node_attributes"], *part.manifest["edge_attributes"]}


def _without_ids(data):
    data = data.clone()
    for name in SPLITS:
        for kind in ("idx", "index"):
            if f"{name}_{kind}" in data:
                del data[f"{name}_{kind}"]
    return data


def test_a_mask_overrides_ids_of_the_same_split_with_a_warning(tmp_path):
    data = hostile_data()
    data.val_idx = torch.arange(3)
    with pytest.warns(UserWarning, match="the split 'val' comes from data.val_mask; data.val_idx left out"):
        part = write(data, 2, tmp_path / "d")
    assert_nothing_is_lost(_without_ids(data), part, mask_splits(data))


def test_a_warning_names_attributes_that_are_left_out(tmp_path):
    data = hostile_data()
    data.anchors, data.name, data.weight = torch.arange(7), "a graph", torch.tensor(2.0)
    with pytest.warns(
        UserWarning, match=r"data.anchors \(int64 \[7\]\) left out: only attributes with one row per vertex \(60\)"
    ):
        part = write(data, 2, tmp_path / "d")
    assert "anchors" not in part.manifest["node_attributes"]


# --- order -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("seeds", ["train", "val", "all"])
def test_inside_a_part_ids_descend_by_vip_with_seeds(tmp_path, num_parts, seeds):
    data = random_data(seed=21, directed=True)
    part = write(data, num_parts, tmp_path / "d", seeds=seeds)
    assert part.manifest["workload"] == {"num_neighbors": FANOUTS, "batch_size": BATCH_SIZE, "seeds": seeds}
    for p in range(num_parts):
        begin, end = part.book.range_of(p)
        vip = salientpp.inclusion_probability(
            part.graph, part.split(seeds, p), FANOUTS, BATCH_SIZE, include_seeds=True
        )[begin:end]
        # The two sweeps run over differently numbered graphs, so they round differently.
        assert bool((vip.diff() <= 1e-6 * vip[:-1]).all()), f"part {p}"
        assert float(vip[0]) > float(vip[-1]), "the VIP must not be constant, or the test would show nothing"


@pytest.mark.parametrize("num_parts", [1, 4])
def test_the_stored_vip_matches_the_renumbered_graph(tmp_path, num_parts):
    data = random_data(seed=22, directed=True)
    part = write(data, num_parts, tmp_path / "d")
    seed_sets = [part.split("train", p) for p in range(num_parts)]
    expected = salientpp.inclusion_probability(part.graph, seed_sets, FANOUTS, BATCH_SIZE)
    for p in range(num_parts):
        assert part.vip(p).dtype == torch.float32
        torch.testing.assert_close(part.vip(p), expected[p], rtol=1e-5, atol=1e-12)


def test_the_files_are_plain_arrays_of_the_stated_dtypes(tmp_path):
    part = write(hostile_data(), 2, tmp_path / "d")
    dtypes = {name: np.load(tmp_path / "d" / name, allow_pickle=False).dtype for name in part.manifest["files"]}
    assert dtypes["indptr.npy"] == np.int64 and dtypes["original_id.npy"] == np.int64
    assert dtypes["indices.npy"] == np.int32, "int32 halves the memory that sampling reads"
    assert dtypes["part-00001/vip.npy"] == np.float32 and dtypes["part-00001/split_train.npy"] == np.int64
    assert set(contents(tmp_path / "d")) == {*part.manifest["files"], "manifest.json"}


def test_repr_describes_the_directory(tmp_path):
    part = write(hostile_data(), 3, tmp_path / "d")
    size = sum(entry["bytes"] for entry in part.manifest["files"].values())
    assert repr(part) == (
        f"PartitionedGraph('{tmp_path}/d', num_parts=3, part_id=None, num_vertices=60, num_edges=300,\n"
        f"  x=[60, 3], y=[60], splits test 15, train 28, val 10,\n  edge_attr=[300, 1],\n  {size / 1000:.3g} kB on disk)"
    )
    assert "<td>x=[60, 3], y=[60]</td><td>test 15, train 28, val 10</td>" in part._repr_html_()
    assert (part.num_parts, part.num_vertices, part.num_features, part.num_classes) == (3, 60, 3, 5)
    data = hostile_data()
    data.x = data.x[:, 0]
    assert write(data, 1, tmp_path / "one-column").num_features == 1


# --- writing: arguments and failures ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_parts": 0}, "num_parts must be an integer >= 1, got 0"),
        ({"num_parts": "2"}, "num_parts must be an integer >= 1, got '2'"),
        ({"num_parts": 2.5}, "num_parts must be an integer >= 1, got 2.5"),
        ({"num_parts": 61}, "num_parts must be at most the number of vertices, 60, got 61"),
        ({"num_neighbors": [3, -2]}, r"num_neighbors\[1\] must be an integer >= 0, or -1 for all neighbours, got -2"),
        ({"num_neighbors": []}, "num_neighbors must have one entry per hop, got an empty list"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"tolerance": -0.1}, "tolerance must be a number >= 0, got -0.1"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"method": "kahip"}, "method must be .* or an assignment, got 'kahip'"),
        ({"method": torch.zeros(59, dtype=torch.int64)}, r"assignment must have shape \[60\]"),
        ({"method": torch.full((60,), 2)}, r"assignment\[0\] must be in \[0, 2\), got 2"),
        ({"method": torch.zeros(60)}, "assignment must have an integer dtype, got torch.float32"),
    ],
)
def test_a_wrong_argument_is_refused_and_leaves_nothing_behind(tmp_path, options, text):
    arguments = {"num_parts": 2, "num_neighbors": FANOUTS, "batch_size": BATCH_SIZE, **options}
    with pytest.raises(ValueError, match=text):
        salientpp.partition(hostile_data(), root=tmp_path / "d", **arguments)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("words", ["a"] * 60, "data.words must be a tensor to be stored, got list; convert or delete it"),
        (
            "x",
            torch.eye(60).to_sparse(),
            r"data.x must be dense to be stored, got layout torch.sparse_coo; call .to_dense\(\)",
        ),
        ("x", torch.zeros(60, 2, device="meta"), "data.x is on the meta device, without values"),
        (
            "other_index",
            torch.zeros(2, 60),
            "data.other_index must have one row per vertex in dimension 0, expected 60, got 2",
        ),
        (
            "../../evil",
            torch.zeros(60),
            r"data\['../../evil'\] cannot be stored, because its name must be a valid file name; rename it",
        ),
    ],
)
def test_an_attribute_that_cannot_be_stored_is_refused_rather_than_lost(tmp_path, name, value, text):
    data = hostile_data()
    data[name] = value
    with pytest.raises(ValueError, match=text):
        write(data, 2, tmp_path / "d")
    assert names_in(tmp_path) == []


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_dtype_that_npy_cannot_hold_is_refused_before_any_work(tmp_path):
    data = hostile_data()
    data.half = torch.zeros(60, dtype=torch.complex32)
    steps = []
    with pytest.raises(
        ValueError, match="data.half has dtype torch.complex32, which .npy files cannot hold; convert or delete it"
    ):
        write(data, 2, tmp_path / "d", progress=Told(steps.append))
    assert steps == ["reading the topology"]


def test_an_existing_directory_is_replaced_only_when_asked(tmp_path):
    old = write(hostile_data(0), 2, tmp_path / "d")
    before = contents(tmp_path / "d")
    with pytest.raises(ValueError, match="d exists; pass overwrite=True to replace it, or choose another root"):
        write(hostile_data(1), 3, tmp_path / "d")
    assert contents(tmp_path / "d") == before
    new = write(hostile_data(1), 3, tmp_path / "d", overwrite=True)
    assert new.num_parts == 3 and new.fingerprint != old.fingerprint
    assert_nothing_is_lost(hostile_data(1), salientpp.load(tmp_path / "d", verify="full"), mask_splits(hostile_data(1)))
    assert names_in(tmp_path) == ["d"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_flag_per_vertex_is_not_taken_for_ids(tmp_path, dtype):
    flags = (torch.arange(60) % 3 == 0).to(dtype)
    with pytest.raises(
        ValueError, match=r"split 'train' has a 0 or 1 for each vertex, which are not ids; pass a bool mask"
    ):
        write(hostile_data(), 2, tmp_path / "d", split={"train": flags})


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file"])
def test_a_path_that_is_not_a_dataset_directory_is_never_replaced(tmp_path, kind):
    root = tmp_path / "d"
    if kind == "file":
        root.write_text("precious")
    else:
        root.mkdir()
        if kind == "folder":
            (root / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="d exists and is not a dataset directory, so it is not replaced"):
        write(hostile_data(), 2, root, overwrite=True)
    assert (
        root.read_text() == "precious"
        if kind == "file"
        else names_in(root) == (["thesis.tex"] if kind == "folder" else [])
    )
    assert names_in(tmp_path) == ["d"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_path_that_appears_during_writing_is_not_replaced(tmp_path, overwrite):
    root = tmp_path / "d"

    def on_step(step: str) -> None:
        if step == "writing":
            root.mkdir()
            (root / "thesis.tex").write_text("precious")

    with pytest.raises(ValueError, match="d exists"):
        write(hostile_data(), 2, root, progress=Told(on_step), overwrite=overwrite)
    assert contents(root) == {"thesis.tex": b"precious"}
    assert names_in(tmp_path) == [".d.writing", "d"]
    root.rename(tmp_path / "moved")
    steps = []
    write(hostile_data(), 2, root, progress=Told(steps.append), overwrite=overwrite)
    assert steps == [STEPS[0], STEPS[-1]], "the finished steps are not lost"
    assert names_in(tmp_path) == ["d", "moved"]


def test_overwriting_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "disk").mkdir()
    write(hostile_data(0), 2, tmp_path / "disk" / "d")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "d")
    write(hostile_data(1), 3, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert salientpp.load(tmp_path / "disk" / "d").num_parts == 3
    assert names_in(tmp_path) == ["disk", "link"] and names_in(tmp_path / "disk") == ["d"]


STEPS = ["reading the topology", "assigning", "computing inclusion probabilities", "writing"]


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        *((step, (RuntimeError, KeyboardInterrupt)[number % 2]) for number, step in enumerate(STEPS)),
        *rare(*((step, (KeyboardInterrupt, RuntimeError)[number % 2]) for number, step in enumerate(STEPS))),
    ],
)
def test_a_failure_leaves_the_old_directory_and_the_finished_steps(tmp_path, failing, error):
    write(hostile_data(0), 2, tmp_path / "d")
    before = contents(tmp_path / "d")
    steps = []

    def on_step(step: str) -> None:
        steps.append(step)
        if step.startswith(failing):
            raise error("injected")

    for root in (tmp_path / "d", tmp_path / "new"):
        with pytest.raises(error, match="injected"):
            write(hostile_data(1), 3, root, overwrite=True, progress=Told(on_step))
    assert len(steps) == 2 * (1 + STEPS.index(failing))
    assert contents(tmp_path / "d") == before
    num_done = max(0, STEPS.index(failing) - 1)
    assert names_in(tmp_path) == ([".d.writing", ".new.writing", "d"] if num_done else ["d"])
    for root in (tmp_path / "d", tmp_path / "new"):
        steps.clear()
        write(hostile_data(1), 3, root, overwrite=True, progress=Told(steps.append))
        assert [step.split(" ")[0] for step in steps] == [
            step.split(" ")[0] for i, step in enumerate(STEPS) if not 1 <= i <= num_done
        ]
    assert (
        contents(tmp_path / "d")
        == contents(tmp_path / "new")
        == contents(write(hostile_data(1), 3, tmp_path / "whole").root)
    )
    assert names_in(tmp_path) == ["d", "new", "whole"]


@pytest.mark.parametrize("failing", [1, 2, 3, 4, 5, 8, 13, "last"])
def test_a_full_disk_leaves_the_old_directory_and_the_finished_steps(tmp_path, monkeypatch, failing):
    write(hostile_data(0), 2, tmp_path / "d")
    before, fsync, calls, fail_at = contents(tmp_path / "d"), os.fsync, [0], [0]

    def counted(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == fail_at[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    whole = contents(write(hostile_data(1), 2, tmp_path / "whole").root)
    fail_at[0] = calls[0] if failing == "last" else failing
    calls[0] = 0
    with pytest.raises(OSError, match="No space left on device"):
        write(hostile_data(1), 2, tmp_path / "d", overwrite=True)
    assert calls[0] == fail_at[0]
    assert contents(tmp_path / "d") == before
    assert set(names_in(tmp_path)) <= {".d.writing", "d", "whole"}
    salientpp.load(tmp_path / "d", verify="full")
    write(hostile_data(1), 2, tmp_path / "d", overwrite=True)
    assert contents(tmp_path / "d") == whole
    assert names_in(tmp_path) == ["d", "whole"]


def test_a_failing_rename_puts_the_old_directory_back(tmp_path, monkeypatch):
    write(hostile_data(0), 2, tmp_path / "d")
    before = contents(tmp_path / "d")
    rename = Path.rename

    def failing_rename(path: Path, target: Path) -> Path:
        if path.name.endswith(".writing"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(OSError, match="Input/output error"):
        write(hostile_data(1), 2, tmp_path / "d", overwrite=True)
    monkeypatch.undo()
    assert contents(tmp_path / "d") == before
    steps = []
    write(hostile_data(1), 2, tmp_path / "d", overwrite=True, progress=Told(steps.append))
    assert steps == [STEPS[0], STEPS[-1]]
    assert names_in(tmp_path) == ["d"]


def test_an_unwritable_root_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError,
        match=r"file/d cannot be written \(Not a directory\); choose a root in a directory that you may write to",
    ):
        write(hostile_data(), 2, tmp_path / "file" / "d")
    assert names_in(tmp_path) == ["file"]


@pytest.fixture
def closed() -> Iterator[Path]:
    """Yields a folder with ``read-only/`` and ``locked/d``, a dataset directory, neither of which the user may write or enter. Root becomes the user nobody."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders may not be entered by the user nobody
        folder = Path(name)
        folder.chmod(0o755)
        write(hostile_data(), 2, folder / "locked" / "d")
        (folder / "read-only").mkdir(mode=0o555)
        (folder / "locked").chmod(0o000)
        try:
            if os.geteuid() == 0:
                os.seteuid(65534)
            yield folder
        finally:
            os.seteuid(os.getuid())
            (folder / "locked").chmod(0o700)


def test_a_folder_without_permission_is_refused(closed):
    with pytest.raises(PermissionError, match=r"read-only/d cannot be written \(Permission denied\); choose a root"):
        write(hostile_data(), 2, closed / "read-only" / "d")
    with pytest.raises(PermissionError, match="Permission denied: '.*locked/new'"):
        write(hostile_data(), 2, closed / "locked" / "new")
    with pytest.raises(
        DatasetError, match=r"locked/d/manifest.json cannot be read \(Permission denied\); this user lacks permission"
    ):
        salientpp.load(closed / "locked" / "d")


LACKS = {
    errno.EMFILE: "this process may open no more files: raise the limit",
    errno.ENFILE: "this machine may open no more files",
    errno.EACCES: "this user lacks permission",
    errno.EPERM: "this user lacks permission",
    errno.ENOMEM: "this machine lacks memory",
}


@pytest.mark.parametrize("code", LACKS)
def test_an_error_of_the_machine_does_not_advise_to_copy_again(tmp_path, monkeypatch, code):
    write(hostile_data(3), 2, tmp_path / "d")

    def fail(*arguments, **named):
        raise OSError(code, os.strerror(code))

    for patched in ("salientpp.store.directory.files.quick_checksum", "numpy.lib.format.open_memmap"):
        with monkeypatch.context() as patch, pytest.raises(DatasetError, match=re.escape(LACKS[code])) as raised:
            patch.setattr(patched, fail)
            salientpp.load(tmp_path / "d", part_id=0).node_rows()
        assert "again" not in str(raised.value) and os.strerror(code) in str(raised.value)


def test_an_error_names_memory_that_a_map_lacks(tmp_path, monkeypatch):
    part = write(hostile_data(3), 2, tmp_path / "d")

    def fail(*arguments, **named):
        raise MemoryError("no more")

    monkeypatch.setattr("numpy.lib.format.open_memmap", fail)
    with pytest.raises(DatasetError, match=r"\(no more\); this machine lacks memory"):
        salientpp.load(part.root, part_id=0).node_rows()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOSPC, errno.EDQUOT])
def test_a_write_error_names_the_resource_that_the_machine_lacks(tmp_path, monkeypatch, code):
    def fail(*arguments, **named):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("numpy.lib.format.write_array_header_1_0", fail)
    words = "this process may open no more files" if code == errno.EMFILE else "make room"
    with pytest.raises(OSError, match=f"{words}.* repeat the same command") as raised:
        write(hostile_data(3), 2, tmp_path / "d")
    assert raised.value.errno == code and (code != errno.EMFILE or "make room" not in str(raised.value))


def test_missing_parents_of_the_root_are_created(tmp_path):
    assert write(hostile_data(), 2, tmp_path / "a" / "b" / "d").num_parts == 2


@pytest.mark.parametrize("failing", STEPS)
def test_a_run_without_finished_steps_removes_only_the_parents_that_it_created(tmp_path, failing):
    (tmp_path / "mine").mkdir()

    def on_step(step: str) -> None:
        if step.startswith(failing):
            assert (tmp_path / "mine" / "a" / "b").is_dir(), "the run has created parents"
            (tmp_path / "mine" / "a" / "others").mkdir(exist_ok=True)
            raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        write(hostile_data(), 2, tmp_path / "mine" / "a" / "b" / "d", progress=Told(on_step))
    kept = ["b"] if STEPS.index(failing) > 1 else []
    assert names_in(tmp_path / "mine" / "a") == [*kept, "others"], "a folder with other files is not removed"
    (tmp_path / "mine" / "a" / "others").rmdir()
    write(hostile_data(), 2, tmp_path / "mine" / "a" / "b" / "d")
    shutil.rmtree(tmp_path / "mine" / "a")
    with pytest.raises(ValueError, match="num_parts"):
        write(hostile_data(), 0, tmp_path / "mine" / "a" / "b" / "d")
    assert names_in(tmp_path) == ["mine"] and names_in(tmp_path / "mine") == []


def _write_with_limits(rank: int, root: str, most_bytes: int) -> str:
    """Writes a directory while no file may be larger than ``most_bytes``, so that write(2) really fails in the middle of a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    try:
        write(hostile_data(1), 2, Path(root), overwrite=True)
    except OSError as error:
        return errno.errorcode[error.errno]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "written"


@pytest.mark.parametrize("most_bytes", [0, 700, 2000, *rare(200, 1000)])
def test_a_failed_write_leaves_the_old_directory_and_the_next_run_continues(tmp_path, most_bytes):
    """The files have 128 to 2,528 bytes; the journal and the manifest have more."""
    write(hostile_data(0), 2, tmp_path / "d")
    before = contents(tmp_path / "d")
    for root in (tmp_path / "d", tmp_path / "new" / "d"):
        assert distributed.run(_write_with_limits, 1, str(root), most_bytes) == ["EFBIG"]
    assert contents(tmp_path / "d") == before
    salientpp.load(tmp_path / "d", verify="full")
    for root in (tmp_path / "d", tmp_path / "new" / "d"):
        write(hostile_data(1), 2, root, overwrite=True)
    assert contents(tmp_path / "d") == contents(tmp_path / "new" / "d") != before
    assert names_in(tmp_path) == ["d", "new"] and names_in(tmp_path / "new") == ["d"]


def _write_and_die(rank: int, root: str, place: str) -> None:
    """Kills itself with SIGKILL, which no handler sees: at a step, at the n-th file, or between the two renames."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    calls = []
    if place.isdigit():
        fsync = os.fsync
        os.fsync = lambda descriptor: die() if len(calls) == int(place) else (calls.append(0), fsync(descriptor))
    elif place == "between renames":
        rename = Path.rename
        Path.rename = lambda path, target: die() if path.name.endswith(".writing") else rename(path, target)
    write(
        hostile_data(1),
        3,
        Path(root),
        overwrite=True,
        progress=Told(lambda step: die() if step.startswith(place) else None),
    )


@pytest.mark.parametrize("place", [*STEPS[1::2], "0", "4", "between renames", *rare(*STEPS[::2], "1", "9")])
def test_a_killed_run_leaves_the_old_directory_or_none(tmp_path, place):
    write(hostile_data(0), 2, tmp_path / "old")
    before = contents(tmp_path / "old")
    for name in ("old", "new"):
        (died,) = distributed.run(_write_and_die, 1, str(tmp_path / name), place, may_fail=True)
        assert isinstance(died, distributed.Failed) and died.kind == "Died"
    with pytest.raises(DatasetError, match="new is not a dataset directory: it has no manifest.json"):
        salientpp.load(tmp_path / "new")
    if place == "between renames":  # the old directory has another name only at this moment; the error names it
        with pytest.raises(
            DatasetError, match=r"or rename back .*/\.old\.replaced-\S+, which a killed run was replacing"
        ) as raised:
            salientpp.load(tmp_path / "old")
        Path(str(raised.value).partition("rename back ")[2].partition(",")[0]).rename(tmp_path / "old")
    assert contents(tmp_path / "old") == before
    salientpp.load(tmp_path / "old", verify="full")
    for name in ("old", "new"):
        write(hostile_data(1), 3, tmp_path / name, overwrite=True)
        assert_nothing_is_lost(
            hostile_data(1), salientpp.load(tmp_path / name, verify="full"), mask_splits(hostile_data(1))
        )


def test_conjugate_and_negated_views_are_stored_by_value(tmp_path):
    """torch stores the sign of such a view as a flag beside the data. .npy files have no such flag."""
    data = hostile_data(6)
    data.signal = torch.randn(60, 2, dtype=torch.complex64, generator=generator_of(1)).conj()
    data.phase = data.signal[:, :1].imag
    assert data.signal.is_conj() and data.phase.is_neg()
    part = write(data, 3, tmp_path / "d")
    assert torch.equal(in_user_order(part, "signal"), data.signal.resolve_conj())
    assert torch.equal(in_user_order(part, "phase"), data.phase.resolve_neg())


# --- opening: corruption ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """Returns a directory with two parts of equal size, so that their files have equal sizes."""
    root = tmp_path_factory.mktemp("pristine") / "d"
    write(hostile_data(), 2, root, method=torch.arange(60) % 2)
    return root


@pytest.fixture
def root(pristine, tmp_path) -> Path:
    shutil.copytree(pristine, tmp_path / "d")
    return tmp_path / "d"


def flip_bit(path: Path, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ 1]))


def test_every_file_is_checked_when_opened(root):
    for name in json.loads((root / "manifest.json").read_text())["files"]:
        path = root / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(
            DatasetError, match=f"{name} must have {len(whole)} bytes, got {len(whole) - 1}; copy it again"
        ):
            salientpp.load(root)
        for byte in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole)
            flip_bit(path, byte)
            with pytest.raises(DatasetError, match=f"{name} was altered: its checksum does not match the manifest"):
                salientpp.load(root)
        path.unlink()
        with pytest.raises(
            DatasetError, match=rf"{name} cannot be read \(No such file or directory\); copy it again, or partition"
        ):
            salientpp.load(root)
        path.write_bytes(whole)
        salientpp.load(root, verify="full")


def test_a_file_without_read_permission_is_a_dataset_error(root, monkeypatch):
    def refuse(path: Path) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(files, "quick_checksum", refuse)
    with pytest.raises(DatasetError, match=r"npy cannot be read \(Permission denied\)"):
        salientpp.load(root)


def test_swapped_files_are_refused(root):
    a, b = root / "part-00000" / "node_x.npy", root / "part-00001" / "node_x.npy"
    assert a.stat().st_size == b.stat().st_size, "sizes alone would not show the swap"
    a.rename(root / "aside")
    b.rename(a)
    (root / "aside").rename(b)
    with pytest.raises(DatasetError, match="part-0000[01]/node_x.npy was altered"):
        salientpp.load(root)


def test_a_flipped_bit_in_a_large_file_is_found_by_full_verification(tmp_path):
    """The quick check reads 64 blocks of 64 KiB, so it skips parts of a 6 MiB file. It must find damage in the blocks that it reads."""
    data = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), x=identity_features(12_000, 128))
    root = tmp_path / "d"
    write(data, 1, root)
    path = root / "part-00000" / "node_x.npy"
    size = path.stat().st_size
    assert size > 4 * 2**20
    salientpp.load(root, verify="full")
    in_a_gap = 64 * 1024 + 100
    flip_bit(path, in_a_gap)
    salientpp.load(root)
    with pytest.raises(DatasetError, match="part-00000/node_x.npy was altered: its checksum does not match"):
        salientpp.load(root, verify="full")
    flip_bit(path, in_a_gap)
    for byte in (0, 64 * 1024 - 1, size - 64 * 1024, size - 1):
        flip_bit(path, byte)
        with pytest.raises(DatasetError, match="part-00000/node_x.npy was altered"):
            salientpp.load(root)
        flip_bit(path, byte)
    os.truncate(path, size - 4096)
    with pytest.raises(DatasetError, match=f"node_x.npy must have {size} bytes, got {size - 4096}"):
        salientpp.load(root)


def test_a_folder_without_a_manifest_is_not_a_dataset_directory(root):
    (root / "manifest.json").unlink()
    text = r"d is not a dataset directory: it has no manifest.json; write one with salientpp.partition\(...\)"
    with pytest.raises(DatasetError, match=text):
        salientpp.load(root)
    with pytest.raises(DatasetError, match="nowhere is not a dataset directory"):
        salientpp.load(root / "nowhere")


@pytest.mark.parametrize("text", ["", "{", '{"format": ', "\x00\x01", "[1, 2", b"\xff\xfe\xfa", "[" * 10**6])
def test_a_manifest_that_is_not_json_is_refused(root, text):
    (root / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DatasetError, match=r"manifest.json is not valid JSON \(.*\); partition again"):
        salientpp.load(root)


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '{"format": "other"}', '"salientpp-partitioned-graph"'])
def test_a_manifest_of_another_format_is_refused(root, text):
    (root / "manifest.json").write_text(text)
    with pytest.raises(
        DatasetError,
        match="manifest.json does not describe a dataset directory: expected format 'salientpp-partitioned-graph'",
    ):
        salientpp.load(root)


@pytest.mark.parametrize("version", [0, 7, "1", None, True])
def test_another_format_version_is_refused_and_both_are_named(root, version):
    edit_manifest(root, lambda manifest: manifest.update(version=version), checksum=True)
    with pytest.raises(
        DatasetError,
        match=f"manifest.json has format version {version}, but this salientpp reads versions 1, 2, 3, 4, 5 and 6; upgrade",
    ):
        salientpp.load(root)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(offsets=[0, 10, 60]),
        lambda manifest: manifest["splits"].pop("val"),
        lambda manifest: manifest["files"].pop("part-00000/vip.npy"),
        lambda manifest: manifest["workload"].update(batch_size=9),
        lambda manifest: manifest.pop("checksum"),
    ],
)
def test_an_edited_manifest_is_refused(root, change):
    edit_manifest(root, change, checksum=False)
    with pytest.raises(DatasetError, match="manifest.json was altered: its checksum does not match its contents"):
        salientpp.load(root)


def test_white_space_in_a_manifest_does_not_matter(root):
    edit_manifest(root, lambda manifest: None, checksum=False)
    assert salientpp.load(root).num_parts == 2


class _Payload:
    """Unpickling it creates the file ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_an_object_array_is_refused_and_never_unpickled(root, tmp_path):
    name = "part-00000/node_x.npy"
    array = np.empty(1, dtype=object)
    array[0] = _Payload(tmp_path / "unpickled")
    np.save(root / name, array, allow_pickle=True)
    with pytest.raises(DatasetError, match=f"{name} must have .* bytes"):
        salientpp.load(root)
    forge_checksums(root, name)
    part = salientpp.load(root, verify="full", part_id=0)
    with pytest.raises(
        DatasetError, match=rf"{name} cannot be opened as an array \(.*\); copy it again, or partition again"
    ):
        part.node_rows()
    assert not (tmp_path / "unpickled").exists()
    np.load(root / name, allow_pickle=True)
    assert (tmp_path / "unpickled").exists(), "unpickling the payload does create the file"


@pytest.mark.parametrize(
    ("dtype", "shape", "got"),
    [
        ("<i4", (30, 3), r"<i4 \[30, 3\]"),
        ("<f4", (90,), r"<f4 \[90\]"),
        ("<f4", (3, 30), r"<f4 \[3, 30\]"),
        (">f4", (30, 3), r">f4 \[30, 3\]"),
    ],
)
def test_an_array_of_another_dtype_or_shape_is_refused(root, dtype, shape, got):
    name = "part-00001/node_x.npy"
    size = (root / name).stat().st_size
    np.save(root / name, np.zeros(shape, dtype=dtype))
    assert (root / name).stat().st_size == size
    with pytest.raises(DatasetError, match=f"{name} was altered"):
        salientpp.load(root)
    forge_checksums(root, name)
    part = salientpp.load(root, part_id=1)
    with pytest.raises(DatasetError, match=rf"{name} must hold <f4 \[30, 3\], got {got}; copy it again"):
        part.node_rows()


def test_a_fortran_ordered_array_is_read_correctly(root):
    """Another tool rewrote the file with the same values in another layout. Checksums refuse it; with forged checksums, it is read correctly."""
    name = "part-00000/node_x.npy"
    rows = np.load(root / name)
    np.save(root / name, np.asfortranarray(rows))
    with pytest.raises(DatasetError, match=f"{name} was altered"):
        salientpp.load(root)
    forge_checksums(root, name)
    assert torch.equal(salientpp.load(root, part_id=0).node_rows()["x"], torch.from_numpy(rows))


def test_an_array_that_vanishes_after_opening_is_a_dataset_error(root):
    part = salientpp.load(root, part_id=0)
    (root / "original_id.npy").unlink()
    with pytest.raises(DatasetError, match=r"original_id.npy cannot be read \(No such file or directory\)"):
        part.original_id(torch.tensor([0]))


def test_a_directory_overwritten_after_opening_is_never_mixed_with_the_old_one(root):
    part = salientpp.load(root, part_id=0)
    rows = part.node_rows()["x"].clone()
    opened = part.node_rows()["x"]
    write(hostile_data(), 2, root, method=(torch.arange(60) + 1) % 2, overwrite=True)
    assert torch.equal(opened, rows), "arrays that were opened before stay readable"
    with pytest.raises(DatasetError, match="original_id.npy was altered: its checksum does not match the manifest"):
        part.original_id(torch.tensor([0]))


def test_writing_into_the_arrays_never_reaches_the_files(root):
    before = contents(root)
    part = salientpp.load(root, part_id=1)
    arrays = [
        *part.node_rows().values(),
        *part.edge_rows().values(),
        part.graph.indptr,
        part.graph.indices,
        part.vip(),
        part.split("train"),
        part.original_id(torch.arange(60)),
    ]
    for array in arrays:
        array.fill_(1)
    assert bool((part.graph.indptr == 1).all())
    assert contents(root) == before
    salientpp.load(root, verify="full")


# --- opening: parts and ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize("part_id", [-1, 2, 100])
def test_a_part_out_of_range_is_refused(root, part_id):
    with pytest.raises(ValueError, match=rf"part_id must be in \[0, 2\), got {part_id}"):
        salientpp.load(root, part_id=part_id)
    with pytest.raises(ValueError, match=rf"part_id must be in \[0, 2\), got {part_id}"):
        salientpp.load(root).node_rows(part_id)


def test_without_a_process_group_several_parts_need_a_part_id(root):
    part = salientpp.load(root)
    assert part.part_id is None
    text = (
        r"has 2 parts and this process serves none of them; to read one, name it with part_id=; to train, "
        r"initialise torch.distributed before salientpp.load \(torchrun --nproc-per-node 2\)"
    )
    for ask in (part.node_rows, part.vip, lambda: part.split("train"), lambda: part.split("all")):
        with pytest.raises(ValueError, match=text):
            ask()
    # Data that belongs to no single part can still be read.
    assert part.graph.num_vertices == 60 and part.original_id(torch.tensor([3])).numel() == 1
    assert salientpp.load(root, part_id=1).split("all").tolist() == list(range(30, 60))


def test_one_part_needs_no_part_id(tmp_path):
    assert write(hostile_data(), 1, tmp_path / "d").part_id == 0
    assert salientpp.load(tmp_path / "d").part_id == 0


@pytest.mark.parametrize(("world_size", "served"), [(2, [0, 1]), (6, [0, 0, 0, 1, 1, 1])])
def test_rank_r_serves_part_r_over_ranks_per_part(root, monkeypatch, world_size, served):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    parts = []
    for rank in range(world_size):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        parts.append(salientpp.load(root).part_id)
    assert parts == served
    assert salientpp.load(root, part_id=0).part_id == 0, "an explicit part_id takes precedence"


def _load(rank: int, root: str) -> int | None:
    return salientpp.load(root).part_id


def test_a_world_size_that_does_not_fit_is_refused_on_every_rank(root):
    results = distributed.run(_load, 3, str(root), may_fail=True)
    for result in results:
        assert isinstance(result, distributed.Failed) and result.kind == "ValueError"
        assert (
            f"{root}: world size 3 does not fit 2 parts: with more ranks than parts, every part must be served by the same number of ranks; "
            "start at most 2 ranks or a multiple of 2, or partition into 3 parts" in result.text
        )


def test_an_unknown_verify_or_split_is_refused(root):
    with pytest.raises(ValueError, match="verify must be 'quick' or 'full', got 'no'"):
        salientpp.load(root, verify="no")
    with pytest.raises(ValueError, match="d has the splits 'test', 'train', 'val', 'all', got 'trian'"):
        salientpp.load(root, part_id=0).split("trian")


def test_a_file_cut_short_between_epochs_is_an_error(tmp_path):
    """Runs in a subprocess, because reading beyond the end of a mapped file would kill the process."""
    salientpp.partition(random_data(3000, 9000), 1, tmp_path / "parts", [4, 3], 8)
    program = f"""
import os
import salientpp
part = salientpp.load({str(tmp_path / "parts")!r})
loader = salientpp.NeighborLoader(part, [4, 3], "train", batch_size=64, shuffle=True)
list(loader)
path = part.root / "part-00000" / "node_x.npy"
os.link(path, part.root / "whole")
path.unlink()
list(loader)  # deleted, but whole
os.truncate(part.root / "whole", 4096)
try:
    list(loader)
except salientpp.store.directory.files.DatasetError as error:
    print(error)
"""
    done = subprocess.run(
        [python(), "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(salientpp.__file__).parents[1],
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert re.search(
        r"part-00000/node_x.npy was cut short .*: it must have \d+ bytes, got 4096; copy it again", done.stdout
    ), done.stdout


# --- reading in one process -------------------------------------------------------------------------------


def test_one_process_reads_rows_of_any_vertices(tmp_path):
    data = hostile_data()
    data.z = torch.arange(60)
    write(data, 3, tmp_path / "d")
    part = salientpp.load(tmp_path / "d")
    assert part.part_id is None
    n_id = torch.randint(60, (200,), generator=generator_of(5))
    for name in ("x", "y", "z"):
        assert torch.equal(part.take(name, n_id), data[name][part.original_id(n_id)])
    assert part.take("x", n_id[:0]).shape == (0, data.x.size(1))
    with pytest.raises(ValueError, match="has the node attributes x, y, z, got 'w'"):
        part.take("w", n_id)
    with pytest.raises(ValueError, match="global ids must be"):
        part.take("x", torch.tensor([60]))


def test_an_error_for_pygs_attribute_names_says_what_to_use_instead(tmp_path):
    part = write(hostile_data(), 2, tmp_path / "d")
    for name, text in {
        "x": r"its rows are divided into parts. part.num_features is their width; part.node_rows\(part_id\)\['x'\]",
        "to": "its rows stay on disk; pass device= to a NeighborLoader",
        "is_undirected": "it would read every edge; ask the Data",
        "stores": r"part\[type\] describes a type",
        "train_mask": r"it became the split 'train'; use part.split\('train', part_id\)",
        "edge_index": "part.graph has the edges",
        "no_such_name": "has no 'no_such_name'$",
    }.items():
        assert not hasattr(part, name)
        with pytest.raises(AttributeError, match=text):
            getattr(part, name)
    copied = copy.deepcopy(part)
    assert copied.fingerprint == part.fingerprint


def test_a_homogeneous_graph_has_the_names_of_a_data_that_need_no_rows(tmp_path):
    data = hostile_data()
    data.edge_attr = torch.rand(data.num_edges, 4)
    names = [
        "num_nodes",
        "num_edges",
        "num_features",
        "num_node_features",
        "num_edge_features",
        "num_node_types",
        "num_edge_types",
    ]
    part = write(data, 2, tmp_path / "d")
    assert [getattr(part, name) for name in names] == [getattr(data, name) for name in names]
    assert sorted(part.keys()) == ["edge_attr", "edge_index", "x", "y"] and "x" in part and "train_mask" not in part
    assert (part.node_attrs(), part.edge_attrs()) == (["x", "y"], ["edge_index", "edge_attr"])
    with pytest.raises(KeyError, match=r"has no type 'train_mask': it became the split 'train'"):
        part["train_mask"]
    with pytest.raises(TypeError, match="not iterable"):
        iter(part)
    data.x, data.node_type = torch.rand(60, 2, 7), torch.arange(60) % 3
    part = write(data, 2, tmp_path / "types")
    assert part.num_features == data.num_features == 7
    with pytest.raises(AttributeError, match="it is the largest node_type or edge_type plus 1"):
        part.num_node_types  # noqa: B018


def test_setting_an_attribute_on_a_partitioned_graph_is_refused(tmp_path):
    write(hostile_data(), 1, tmp_path / "d")
    loader = salientpp.NeighborLoader(salientpp.load(tmp_path / "d"), [3], "train", batch_size=8)
    for name in ("n_id", "x", "train_mask"):
        with pytest.raises(
            AttributeError, match=f"{name!r} cannot be set on a PartitionedGraph: batches carry the attributes on disk"
        ):
            setattr(loader.data, name, torch.arange(60))
    assert all(len(batch.n_id) == len(batch.x) for batch in loader)


def test_the_id_of_padding_vertices_stays_and_other_unknown_ids_are_refused(tmp_path):
    data = random_hetero()
    data["empty"].x = torch.zeros(0, 3)
    data["empty", "to", "paper"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    fanouts = {relation: [2] for relation in data.edge_types}
    data["paper"].train_mask = torch.ones(60, dtype=torch.bool)
    salientpp.partition(data, 2, tmp_path / "typed", fanouts, 16)
    typed = salientpp.load(tmp_path / "typed")
    ids = torch.tensor([[3, -1], [-1, 0]])
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        found = typed.original_id(ids.to(dtype), "paper")
        assert found.dtype == torch.int64 and torch.equal(found == -1, ids == -1)
        assert torch.equal(found[ids >= 0], typed.original_id(ids[ids >= 0], "paper"))
    nothing = typed.original_id({"empty": torch.full((4,), -1), "paper": torch.tensor([], dtype=torch.int64)})
    assert nothing["empty"].tolist() == [-1] * 4 and nothing["paper"].tolist() == []
    for type_, wrong, words in [
        ("paper", [0, -2], r"n_id must be in \[0, 60\) .*paper.*, or -1 for padding, got -2 at position 1"),
        ("paper", [60], r"n_id must be in \[0, 60\) .*, got 60 at position 0"),
        ("empty", [-1, 0], r"n_id must be in \[0, 0\) .*, got 0 at position 1"),
        ("paper", [0.0], r"n_id must be integer ids of this graph, got torch.float32"),
        ("paper", [True], r"n_id must be integer ids of this graph, got torch.bool"),
    ]:
        with pytest.raises(ValueError, match=words):
            typed.original_id(torch.tensor(wrong), type_)
    with pytest.raises(ValueError, match=r"global ids must be in \[0, 60\), got -1"):
        typed.take("x", torch.tensor([0, -1]), "paper")


def test_padded_batches_have_the_ids_of_their_vertices(tmp_path):
    salientpp.partition(random_data(), 1, tmp_path / "parts", [3], 16)
    part = salientpp.load(tmp_path / "parts")
    for batch in salientpp.NeighborLoader(part, [3], "train", batch_size=16, pad="bucket"):
        ids = part.original_id(batch.n_id)
        assert torch.equal(ids[batch.node_mask], batch.x[batch.node_mask, 0].long())
        assert bool((ids[~batch.node_mask] == -1).all()) and not bool(batch.node_mask.all())
