"""Laws of sorting on disk: rows have the same order as after a sort in memory, and no distribution of values needs more memory."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from salientpp.datasets.tabular.order import CONTINUES, order_columns, sorted_positions, word_at  # noqa: E402
from salientpp.datasets.tabular.rows import ROWS_OF_A_BATCH, RowFile, RowWriter  # noqa: E402
from salientpp.datasets.tabular.sorting import Sorting  # noqa: E402

TEXTS = ["", "a", "a\0", "aaaaaaa", "aaaaaaa\0", "aaaaaaab", "a" * 25, "a" * 26, "é", "b"]
#: Values of each type in ascending order.
ORDERED = {
    pa.int8(): [-128, -1, 0, 1, 127],
    pa.uint64(): [0, 1, 2**63, 2**64 - 1],
    pa.float32(): [-math.inf, -1.5, -0.0, 0.0, 1e-40, 2.0, math.inf, math.nan],
    pa.float16(): [np.float16(value) for value in (-2.5, -0.0, 0.0, 3.0)],
    pa.bool_(): [False, True],
    pa.large_string(): sorted(TEXTS, key=str.encode),
    pa.binary(2): [b"\0\0", b"\0a", b"a\0"],
    pa.decimal128(30, 2): [-(10**20), -1, 0, 1, 10**25],
    pa.date32(): [-5, 0, 5],
    pa.timestamp("ns"): [-1, 0, 2**60],
    pa.duration("s"): [-1, 1],
    pa.large_list(pa.int16()): [[], [-300], [-1, 3], [0], [0, -1], [0, 256], [0, None], [1], [None], [None, 1]],
    pa.large_list(pa.float32()): [[], [-math.inf], [-1.5, 2.0], [0.0], [0.0, math.nan], [1e-40], [math.nan], [None]],
    pa.large_list(pa.uint64()): [[0], [1, 5], [2**63], [2**64 - 1]],
    pa.large_list(pa.bool_()): [[False], [False, True], [True], [None]],
    pa.list_(pa.int16(), 2): [[-1, 3], [0, -1], [0, None], [None, 1]],
}


def words_of(column: pa.Array) -> list[tuple]:
    """All words of each row."""
    rows: list[tuple] = [()] * len(column)
    for part in order_columns(column):
        for step in range(6):
            rows = [(*row, word) for row, word in zip(rows, word_at(part, step).tolist())]
    return rows


@pytest.mark.parametrize("type_", ORDERED, ids=str)
def test_words_ascend_with_values_and_nulls_are_last(type_):
    values = pa.array([*ORDERED[type_], None], type_)
    assert words_of(values) == sorted(set(words_of(values)))
    positions = np.random.default_rng(0).permutation(len(values))
    shuffled = values.take(pa.array(positions))
    zeros = np.zeros(len(values), dtype=np.int64)
    assert positions[sorted_positions([zeros], [shuffled])].tolist() == list(range(len(values)))
    assert words_of(shuffled.slice(1)) == [words_of(values)[position] for position in positions[1:]]


def test_words_of_texts_say_whether_the_text_continues():
    column = order_columns(pa.array(["1234567", "12345678"], pa.large_string()))[0]
    assert (word_at(column, 1) % 256).tolist() == [7, CONTINUES]


@given(data=st.data())
def test_the_order_is_the_same_for_any_memory(data, tmp_path):
    types = data.draw(st.lists(st.sampled_from(sorted(ORDERED, key=str)), max_size=2))
    most = data.draw(st.sampled_from([1, 3, 10**6]))
    row = st.tuples(*[st.integers(0, most)] * 2, *[st.sampled_from([*ORDERED[type_], None]) for type_ in types])
    some = data.draw(st.lists(row, min_size=1, max_size=20))
    rows = list(itertools.islice(itertools.cycle(some), data.draw(st.integers(1, 400))))
    names = ["target", "source", *(f"c{number}" for number in range(len(types)))]
    schema = pa.schema(list(zip(names, [pa.int64(), pa.int64(), *types])))
    columns = [pa.array(column, field.type) for column, field in zip(zip(*rows), schema)]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    pieces = [batch.slice(begin, 13) for begin in range(0, len(rows), 13)]
    results = []
    for working in (3_000, 10_000, 2**30):
        sorting = Sorting(schema, names[:2], names[2:], tmp_path, working)
        parts = list(sorting.sort(pieces, most))
        results.append([row for part in parts for row in zip(*(words_of(column) for column in part.columns))])
        assert not list(tmp_path.iterdir())
    assert results[0] == results[1] == results[2]
    assert results[2] == sorted(zip(*map(words_of, columns)))


def test_rows_are_read_as_they_were_written(tmp_path):
    count = 2 * ROWS_OF_A_BATCH + 7
    rows = pa.record_batch({"a": np.arange(count), "b": [f"text {number}" for number in range(count)]})
    writer = RowWriter(tmp_path / "rows.arrow", rows.schema)
    for begin in range(0, count, 50_001):
        writer.write(rows.slice(begin, 50_001))
    file = writer.finish()
    assert file == RowFile(tmp_path / "rows.arrow", count)
    assert pa.Table.from_batches(file.batches()) == pa.Table.from_batches([rows])
    read = list(file.batches(["b", "a"], 1000))
    assert max(batch.num_rows for batch in read) == 1000
    assert pa.Table.from_batches(read) == pa.Table.from_batches([rows]).select(["b", "a"])
    # The bytes are the same, however the rows were divided.
    whole = RowWriter(tmp_path / "whole.arrow", rows.schema)
    whole.write(rows)
    assert whole.finish().path.read_bytes() == file.path.read_bytes()


def test_an_error_of_the_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match=r"missing/rows.arrow cannot be written"):
        RowWriter(tmp_path / "missing" / "rows.arrow", pa.schema({"a": pa.int64()}))
