"""Laws of Parquet tables of vertices: their columns equal the same columns in arrays, in any order of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from salientpp.datasets import load_dataset
from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.convert import Options, write_converted
from salientpp.datasets.converted.sources import open_source

pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
N = 500
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, 4)).astype(np.float32)
LABELS, TRAIN = RNG.integers(-1, 3, N), RNG.random(N) < 0.3


def write(folder: Path, order: np.ndarray | None = None, **columns: Any) -> str:
    np.save(folder / "e.npy", RNG.integers(0, N, (2, 2000)))
    given = {"y": LABELS, "train": TRAIN, **columns}
    if order is not None:
        given = {"node_id": np.arange(N), **given}
        given = {name: column[order] if len(column) == N else column for name, column in given.items()}
    for number, rows in enumerate(np.array_split(np.arange(N), 3)):
        table = {name: list(column[rows]) if np.ndim(column) > 1 else column[rows] for name, column in given.items()}
        parquet.write_table(pyarrow.table(table), folder / f"nodes-{number}.parquet", row_group_size=64)
    return f"edges:{folder}/e.npy,nodes={folder}/nodes-*.parquet"


def converted(source: str, root: Path, working: int = 2**21, **options: Any):
    given = Options(**{"deduplicate": False, "dtype": {}, "finite": False, **options})
    write_converted(open_source(source, Path(), None), root, Budget(0, working), given)
    return load_dataset(f"converted:{root}")


ORDERS = {
    "without ids": None,
    "ascending": np.arange(N),
    "descending": np.arange(N)[::-1],
    "random": RNG.permutation(N),
}


@pytest.mark.parametrize("working", [2**20, 10**8])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", ["lists", "numbered columns"])
@pytest.mark.filterwarnings("ignore:.*unlabelled:UserWarning")
def test_columns_of_a_table_are_attributes_by_id(tmp_path, form, order, working):
    x = {"x": X} if form == "lists" else {f"x_{at}": X[:, at] for at in (2, 0, 3, 1)}
    got = converted(write(tmp_path, ORDERS[order], age=np.arange(N), **x), tmp_path / "c", working, dtype={"x": "fp16"})
    assert set(got.keys()) == {"x", "y", "age", "train_mask", "num_nodes", "adj_t"}
    assert torch.equal(got.x, torch.from_numpy(X).half())
    assert got.age.tolist() == list(range(N)) and np.array_equal(got.y.numpy(), LABELS)
    assert np.array_equal(got.train_mask.numpy(), TRAIN & (LABELS >= 0))


def test_files_of_splits_may_stand_beside_a_table(tmp_path):
    source = write(tmp_path, y=np.arange(N) % 3)
    np.save(tmp_path / "val.npy", np.array([3, 8]))
    got = converted(f"{source},val={tmp_path}/val.npy", tmp_path / "c")
    assert got.val_mask.nonzero().flatten().tolist() == [3, 8] and int(got.train_mask.sum()) == int(TRAIN.sum())


def test_a_single_column_with_a_number_keeps_its_name(tmp_path):
    got = converted(write(tmp_path, field_0=np.arange(N), top_1=np.arange(N), top_2=np.arange(N)), tmp_path / "c")
    assert {"field_0", "top_1", "top_2"} < set(got.keys())


_REPEATED, _LARGE = np.arange(N), np.arange(N)
_REPEATED[200], _LARGE[400] = 7, N
MISTAKES = {
    "an id twice": (
        {"id": _REPEATED},
        r"nodes-1\.parquet, row 33: the id 7 comes twice; each vertex must have one row",
    ),
    "an id out of range": (
        {"id": _LARGE},
        r"nodes-2\.parquet, row 66: the id must be a vertex id in \[0, 500\), got 500",
    ),
    "a real id": ({"id": np.arange(N) / 2}, r"the id must be an integer, got float64"),
    "a split that is no mask": ({"val": np.arange(N)}, r"the split 'val' must be a bool per vertex, got int64"),
    "an attribute in two forms": ({"x": X, "x_0": X[:, 0], "x_1": X[:, 1]}, r"columns x and x_0 stand for the same"),
    "a split twice": ({"train_mask": TRAIN}, r"has two columns for 'train_mask'"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("working", [2**20, 10**8])
def test_mistakes_in_a_table_are_named_with_file_and_row(tmp_path, name, working):
    columns, words = MISTAKES[name]
    with pytest.raises(ValueError, match=words):
        converted(write(tmp_path, **columns), tmp_path / "c", working)


def test_an_attribute_from_a_table_and_a_file_is_refused(tmp_path):
    source = write(tmp_path)
    np.save(tmp_path / "y.npy", LABELS)
    with pytest.raises(ValueError, match="y is given twice, by y= and by a column of nodes="):
        converted(f"{source},y={tmp_path}/y.npy", tmp_path / "c")
