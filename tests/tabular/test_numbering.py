"""Laws of numbering: numbers follow from the set of keys, whatever the order of rows, the memory and the hashes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from keyed_tables import (  # noqa: E402
    BUDGETS,
    COLUMNS,
    MemoryTable,
    drawn_keys,
    key_columns,
    key_table,
    numbered,
    order_of,
    plain_keys,
    rows_of,
    weak_hashes,
)

from salientpp.datasets.tabular.numbering import KEY_ROWS, NumberedVertices, number_vertices  # noqa: E402
from salientpp.datasets.tabular.rows import RowWriter  # noqa: E402


def contents(vertices: NumberedVertices) -> tuple:
    """Everything but the paths; NaN as a text."""
    columns = repr(rows_of(vertices.columns))
    counts = vertices.num_vertices, vertices.num_added, vertices.duplicates.count, vertices.null_keys.count
    return vertices.keys.path.read_bytes(), vertices.hashes.read_bytes(), columns, counts


@given(data=st.data())
def test_numbers_follow_from_the_set_of_keys(data, tmp_path):
    kinds = data.draw(key_columns())
    names = ["k", "l"][: len(kinds)]
    keys = drawn_keys(data.draw, kinds, 40, nulls=True)
    chosen = data.draw(st.lists(st.sampled_from(sorted(COLUMNS)), unique=True, max_size=3))
    rows = [tuple(data.draw(st.none() | COLUMNS[name][1]) for name in chosen) for _ in keys]
    table = pa.table(
        {
            **key_table(data.draw, kinds, names, keys),
            **{name: pa.array([row[at] for row in rows], COLUMNS[name][0]) for at, name in enumerate(chosen)},
        }
    )
    shuffled = table.take(pa.array(data.draw(st.permutations(range(len(keys)))), pa.int64()))
    bits = data.draw(st.sampled_from([0, 2, 64]))
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    with weak_hashes(bits):
        given_ = {"duplicates": "drop", "null_keys": "drop"}
        first = numbered(table, names, folder, **given_)
        for working in BUDGETS[:2]:
            assert contents(numbered(shuffled, names, folder, working, **given_)) == contents(first)

    smallest: dict[tuple, tuple] = {}
    for key, row in zip(keys, rows):
        if None not in key:
            smallest[key] = min(row, smallest.get(key, row), key=lambda row: [*map(order_of, row, chosen)])
    assert first.num_vertices == len(smallest)
    assert first.null_keys.count == sum(None in key for key in keys)
    assert first.duplicates.count == len(keys) - first.null_keys.count - len(smallest)
    assert len(first.duplicates.examples) <= 5
    found = dict(zip(map(repr, plain_keys(rows_of(first.keys))), rows_of(first.columns) if chosen else [()] * 99))
    assert {key: repr(row) for key, row in found.items()} == {
        repr(key): repr(row) for key, row in zip(plain_keys(smallest), smallest.values())
    }
    hashes = np.load(first.hashes).tolist()
    assert hashes == sorted(hashes)
    in_order = list(zip(hashes, map(order_of_key, rows_of(first.keys))))
    assert in_order == sorted(in_order)


def order_of_key(key: tuple) -> tuple:
    return tuple(value.encode() if isinstance(value, str) else value for value in key)


def test_each_batch_of_keys_has_the_same_number_of_rows(tmp_path):
    num_rows = 2 * KEY_ROWS + 5
    table = pa.table({"id": [f"c{number}" for number in range(num_rows)], "x": np.arange(num_rows)})
    vertices = numbered(table, ["id"], tmp_path, 2**20)
    assert [batch.num_rows for batch in vertices.keys.batches()] == [KEY_ROWS, KEY_ROWS, 5]
    assert [f"c{x}" for (x,) in rows_of(vertices.columns)] == [key for (key,) in rows_of(vertices.keys)]
    some = vertices.keys.slice(KEY_ROWS - 2, KEY_ROWS + 3, KEY_ROWS)
    assert [(key,) for key in some.column(0).to_pylist()] == rows_of(vertices.keys)[KEY_ROWS - 2 : KEY_ROWS + 3]


def test_a_key_column_may_also_be_an_attribute(tmp_path):
    vertices = numbered(pa.table({"id": pa.array([3, 1, 2], pa.int32())}), ["id"], tmp_path, columns=["id"])
    assert rows_of(vertices.columns) == rows_of(vertices.keys)
    assert vertices.keys.schema == pa.schema({"id": pa.int64()})
    assert vertices.columns.schema == pa.schema({"id": pa.int32()})


def test_rows_without_a_key_are_an_error_or_dropped(tmp_path):
    table = pa.table({"a": [1, None, 3], "b": ["x", "y", None]})
    with pytest.raises(ValueError, match="nodes.n: 2 rows have no value in 'a' or 'b', for example row 1; row 2; fill"):
        numbered(table, ["a", "b"], tmp_path)
    dropped = numbered(table, ["a", "b"], tmp_path, null_keys="drop")
    assert rows_of(dropped.keys) == [(1, "x")]
    assert dropped.null_keys.count == 2 and dropped.null_keys.examples == ("row 1", "row 2")


def test_rows_with_the_key_of_another_row_are_an_error_or_dropped(tmp_path):
    table = pa.table({"id": ["a", "b", "a", "c", "a"], "x": [5, 6, 4, 7, 9]})
    with pytest.raises(
        ValueError, match=r"nodes.n: 2 rows have the key of another row, for example id='a' \(row 0, row 2"
    ):
        numbered(table, ["id"], tmp_path)
    vertices = numbered(table, ["id"], tmp_path, duplicates="drop")
    assert vertices.duplicates.examples == ("id='a'",)
    assert dict(zip(rows_of(vertices.keys), rows_of(vertices.columns))) == {("a",): (4,), ("b",): (6,), ("c",): (7,)}


def test_many_rows_of_one_key_need_no_more_memory(tmp_path):
    same = pa.table({"id": ["hub"] * 6_000, "x": np.arange(6_000)[::-1] // 2, "text": ["equal text " * 4] * 6_000})
    vertices = numbered(same, ["id"], tmp_path, 100_000, duplicates="drop")
    assert rows_of(vertices.columns) == [(0, "equal text " * 4)]
    assert vertices.duplicates.count == 5_999


def test_added_keys_become_vertices_without_columns(tmp_path):
    writer = RowWriter(tmp_path / "added.arrow", pa.schema({"id": pa.large_string()}))
    writer.write(pa.record_batch({"id": pa.array(["b", "z", "z", "y"], pa.large_string())}))
    added = writer.finish()
    folder = tmp_path / "work"
    folder.mkdir()
    table = pa.table({"id": ["a", "b"], "x": [1, 2]})
    vertices = numbered(table, ["id"], folder, added=[added, added])
    assert dict(zip(rows_of(vertices.keys), rows_of(vertices.columns))) == {
        ("a",): (1,),
        ("b",): (2,),
        ("z",): (None,),
        ("y",): (None,),
    }
    assert vertices.num_added == 2 and vertices.duplicates.count == 0
    # A table without rows may lack types.
    empty = pa.table({"id": pa.nulls(0), "x": pa.nulls(0)})
    assert numbered(empty, ["id"], folder, added=[added]).num_vertices == 3
    assert numbered(empty, ["id"], folder).num_vertices == 0


def test_columns_that_are_no_keys_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nodes.n, column 'x': a key must hold"):
        numbered(pa.table({"x": [0.5]}), ["x"], tmp_path)
    with pytest.raises(ValueError, match="nodes.n: a key must have at least one column"):
        numbered(pa.table({"x": [0.5]}), [], tmp_path)


def test_a_run_goes_on_where_a_killed_run_left_files(tmp_path):
    work = tmp_path / "work"
    (work / "scratch").mkdir(parents=True)
    (work / "scratch" / "0.runs").write_bytes(b"half")
    table = MemoryTable(pa.table({"id": np.arange(5000)}))
    assert number_vertices(table, ["id"], [], work, 6_000, what="nodes.n").num_vertices == 5000
    assert not (work / "scratch").exists()
