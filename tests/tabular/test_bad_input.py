"""Errors of bad tables name the entry, the column, the file and the row, and come as early as the mistake can be known."""

from __future__ import annotations

import os
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from table_packages import package

from salientpp.datasets import convert, load_dataset
from salientpp.datasets.tabular import staging

pa, feather, parquet = (package(name) for name in ("pyarrow", "pyarrow.feather", "pyarrow.parquet"))


def shop(folder: Path, vertices: dict[str, Any], edges: dict[str, Any], **relation: Any) -> dict[str, Any]:
    """Writes a table of vertices with the key ``id``, and one of edges from ``a`` to ``b``. Returns their description."""
    for name, columns in ("v", vertices), ("e", edges):
        parquet.write_table(pa.table(columns), folder / f"{name}.parquet")
    described = {"table": str(folder / "e.parquet"), "source": "a", "target": "b", **relation}
    return {"nodes": {"v": {"table": str(folder / "v.parquet"), "key": "id"}}, "edges": {"v,to,v": described}}


@pytest.mark.parametrize(
    "vertices, edges, words",
    [
        (
            {"id": [1]},
            {"a": [1], "b": ["1"]},
            r"edges.v,to,v, target 'b': keys that refer to each other must have the same type, got large_string here and int64",
        ),
        ({"id": [1.0]}, {"a": [1], "b": [1]}, r"nodes.v, column 'id': a key must hold integers.*got double; cast"),
        (
            {"id": [1]},
            {"a": [True], "b": [1]},
            r"edges.v,to,v, source, column 'a': a key must hold .*, got bool; cast",
        ),
        (
            {"id": [1]},
            {"a": [1], "c": [1]},
            r"edges.v,to,v: target must name columns of the table \(a, c\), got 'b'",
        ),
    ],
)
def test_mistakes_about_keys_are_found_before_rows_are_read(tmp_path, monkeypatch, vertices, edges, words):
    described = shop(tmp_path, vertices, edges)
    monkeypatch.setattr(staging.PlannedTable, "batches", lambda *_: pytest.fail("rows were read"))
    with pytest.raises(ValueError, match=words):
        convert(described, tmp_path / "graph")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.parquet", "v.parquet"]


@pytest.mark.parametrize("change", ["other content", "other time", "removed", "between two passes"])
def test_a_table_that_changes_is_refused_and_the_next_run_takes_the_new_one(tmp_path, monkeypatch, change):
    described = shop(tmp_path, {"id": [1, 2], "w": [5, 6]}, {"a": [1], "b": [2]})
    path, read = tmp_path / "v.parquet", staging.PlannedTable.batches
    passes: list[str] = []

    def change_file():
        size = path.stat().st_size
        if change == "removed":
            path.unlink()
            return
        if change != "other time":
            parquet.write_table(pa.table({"id": [1, 3], "w": [5, 7]}), path)
        os.utime(path, ns=(0, 10**18))
        assert path.stat().st_size == size

    def changes(self, columns, most_rows):
        passes.append(self.plan.title)
        is_between = change == "between two passes"
        if is_between and passes == ["nodes.v"] * 2:  # the first one looks at some rows
            change_file()
        yield from read(self, columns, most_rows)
        if not is_between and path.exists():
            change_file()

    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"nodes.v: .*v.parquet (changed|was removed)"):
        patch.setattr(staging.PlannedTable, "batches", changes)
        convert(described, tmp_path / "graph")
    assert not (tmp_path / "graph").exists()
    shop(tmp_path, {"id": [1, 2, 9], "w": [5, 6, 7]}, {"a": [1], "b": [2]})
    data: Any = load_dataset(f"converted:{convert(described, tmp_path / 'graph')}")
    assert sorted(data["v"].w.tolist()) == [5, 6, 7]


@pytest.mark.parametrize("row", [0, 1, 499, 998, 999])
@pytest.mark.parametrize(
    "type_, good, bad",
    [(pa.uint64(), 1, 2**63), (pa.timestamp("ms"), 1, 2**62), (pa.list_(pa.uint64()), [1], [2**63])],
)
def test_a_value_that_does_not_fit_is_named_with_its_file_and_row(tmp_path, type_, good, bad, row):
    values = pa.array([bad if i == row or i > max(row, 700) else good for i in range(1000)], type_)
    parquet.write_table(pa.table({"id": range(1000, 1010), "w": pa.array([good] * 10, type_)}), tmp_path / "1.parquet")
    parquet.write_table(pa.table({"id": range(1000), "w": values}), tmp_path / "2.parquet", row_group_size=100)
    described = {"nodes": {"v": {"table": str(tmp_path / "*.parquet"), "key": "id"}}}
    with pytest.raises(
        ValueError, match=rf"2.parquet, row {row}: column 'w' must fit .*, or name it in drop of nodes.v"
    ):
        convert(described, tmp_path / "graph")


@pytest.mark.parametrize(("table", "encoded"), [("v", False), ("e", False), ("e", True)])
@pytest.mark.parametrize("row", [0, 300, 499])
@pytest.mark.parametrize(
    "type_, good, bad, cause",
    [
        (pa.timestamp("ns"), 1000, 1001, "lose data: 1001"),
        (pa.timestamp("s"), 1, 2**62, "out of bounds"),
        (pa.decimal256(50, 0), Decimal(1), Decimal(10**49), "precision"),
    ],
)
def test_a_key_that_cannot_be_stored_is_named_with_its_file_and_row(
    tmp_path, type_, good, bad, cause, row, table, encoded
):
    keys, one = pa.array([good] * row + [bad] * (500 - row), type_), pa.array([good], type_)
    if encoded:
        keys, one = keys.dictionary_encode(), one.dictionary_encode()
    for name, columns in ("v", {"id": keys}), ("e", {"a": keys}):
        feather.write_feather(
            pa.table(columns if name == table else dict.fromkeys(columns, one)), tmp_path / f"{name}.arrow"
        )
    described = {
        "nodes": {"v": {"table": str(tmp_path / "v.arrow"), "key": "id"}},
        "edges": {"v,to,v": {"table": str(tmp_path / "e.arrow"), "source": "a", "target": "a", "dangling": "drop"}},
    }
    words = "nodes.v, column 'id'" if table == "v" else "edges.v,to,v, source, column 'a'"
    with pytest.raises(
        ValueError,
        match=rf"{words}, .*{table}.arrow, row {row}: a key of type .*{cause}.*; cast the column to a string",
    ):
        convert(described, tmp_path / "graph")


@pytest.mark.parametrize(
    "type_, value, shown",
    [
        (pa.timestamp("us"), 2**62, f"<value out of range: {2**62}>"),
        (pa.timestamp("us", "UTC"), 2**62, "17036-"),
        (pa.date32(), 2**31 - 1, f"<value out of range: {2**31 - 1}>"),
        (pa.string(), "x" * 1000, "'x{76}\\.\\.\\. "),
    ],
)
def test_keys_that_python_cannot_show_are_named(tmp_path, type_, value, shown):
    keys, twice = pa.array([value], type_), pa.array([value] * 2, type_)
    with pytest.raises(ValueError, match=f"nodes.v: 1 row has the key of another row, for example id={shown}"):
        convert({"nodes": {"v": {"table": pa.table({"id": twice}), "key": "id"}}}, tmp_path / "graph")
    table = pa.table({"id": keys, "w": pa.array([None], pa.int64())})
    with pytest.raises(ValueError, match=rf"nodes.v: column 'w' of int64 has no value .*\(v id={shown.rstrip()}"):
        convert({"nodes": {"v": {"table": table, "key": "id"}}}, tmp_path / "graph")


@pytest.mark.parametrize("damage", ["removed", "empty", "cut"])
def test_a_finished_step_whose_files_were_damaged_is_repeated(tmp_path, monkeypatch, damage):
    described = shop(tmp_path, {"id": [1, 2], "w": [5, 6]}, {"a": [1], "b": [2], "u": [1.5]})

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(staging, "describe_source", stopped)
        convert(described, tmp_path / "graph")
    staged, kept = tmp_path / ".graph.staged", tmp_path / "kept"
    shutil.copytree(staged, kept)
    expected = None
    names = [path.relative_to(kept) for path in kept.rglob("*") if path.is_file() and path.name != "staged.json"]
    assert len(names) > 8
    for name in [None, *names]:
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(kept, staged)
        if name is not None:
            whole = (staged / name).read_bytes()
            (staged / name).unlink() if damage == "removed" else (staged / name).write_bytes(
                whole[: len(whole) // 2] if damage == "cut" else b""
            )
        graph = convert(described, tmp_path / "graph")
        found = {path.name: path.read_bytes() for path in graph.iterdir()}
        expected = expected or found
        assert found == expected, name
        shutil.rmtree(graph)


def test_a_directory_whose_name_is_not_utf_8_is_refused(tmp_path):
    described = {"nodes": {"v": {"table": pa.table({"id": [1]}), "key": "id"}}}
    with pytest.raises(ValueError, match="must be a name in UTF-8, because pyarrow takes no other; choose another"):
        convert(described, tmp_path / os.fsdecode(b"a\xff"))
    assert not any(tmp_path.iterdir())
