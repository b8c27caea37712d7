"""Laws of keys: equal values are equal keys whatever their type, and look-ups are exact."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from keyed_tables import KINDS, drawn_keys, key_columns, key_table  # noqa: E402

from salientpp.store.key_index import KeyIndex  # noqa: E402
from salientpp.store.keys import adapt_keys, canonical_keys, key_hash  # noqa: E402


def hashes_of(values, type_) -> list[int]:
    return key_hash(canonical_keys([pa.array(values, type_)], "t")).tolist()


def test_hashes_never_change():
    # Datasets store hashes. This function may not give others.
    assert hashes_of([0, 1, -1], pa.int64()) == [13803511490405893968, 10553721105248852309, 4409135176254898318]
    assert hashes_of(["", "a", "customer-0000017"], pa.string()) == [
        13803511490405893968,
        4696580722675412396,
        3157479736968061037,
    ]
    assert key_hash([pa.array([7]), pa.array(["seven"], pa.large_string())]).tolist() == [13220193510663161954]


@pytest.mark.parametrize("name", sorted(KINDS))
def test_equal_keys_of_all_types_have_equal_hashes(name):
    kind = KINDS[name]
    first = canonical_keys([pa.array(list(kind.values), kind.types[0])], "t")
    for type_ in kind.types:
        column, unlike = adapt_keys(
            canonical_keys([pa.array(list(kind.values), type_)], "t"), [of.type for of in first], "t"
        )
        assert unlike is None and column[0].equals(first[0])
        assert key_hash(column).tolist() == key_hash(first).tolist()
    assert len(set(key_hash(first).tolist())) == len(kind.values)


@given(data=st.data())
def test_hash_of_a_row_depends_on_its_key_only(data):
    kinds = data.draw(key_columns())
    keys = drawn_keys(data.draw, kinds, 20)
    columns = canonical_keys(list(key_table(data.draw, kinds, ["a", "b"], keys).values()), "t")
    hashes = key_hash(columns)
    begin = data.draw(st.integers(0, len(keys)))
    assert key_hash([column.slice(begin) for column in columns]).tolist() == hashes[begin:].tolist()
    for row in range(len(keys)):
        alone = [pa.concat_arrays([column.slice(row, 1)]) for column in columns]
        assert key_hash(alone)[0] == hashes[row]


def test_hashes_are_spread_evenly():
    for column in (pa.array(np.arange(2**16)), pa.array([f"c{number}" for number in range(2**16)], pa.large_string())):
        hashes = key_hash([column])
        assert len(np.unique(hashes)) == 2**16
        for shift in (56, 24, 0):
            counts = np.bincount((hashes >> np.uint64(shift)).astype(np.int64) & 255, minlength=256)
            assert counts.min() > 150 and counts.max() < 370  # 256 is expected, with a deviation of 16


def test_integers_and_decimals_are_compared_by_value():
    def adapted(values, from_, to):
        columns, unlike = adapt_keys(canonical_keys([pa.array(values, from_)], "t"), [to], "t")
        return columns[0].to_pylist(), None if unlike is None else unlike.tolist()

    big = 2**64 - 1
    assert adapted([1, big, None], pa.uint64(), pa.int64()) == ([1, None, None], [False, True, False])
    assert adapted([1, -1, None], pa.int64(), pa.uint64()) == ([1, None, None], [False, True, False])
    assert adapted([1, None], pa.int64(), pa.uint64()) == ([1, None], None)
    number = decimal.Decimal
    assert adapted([number("2.00"), number("1.50"), None], pa.decimal128(9, 2), pa.int64()) == (
        [2, None, None],
        [False, True, False],
    )
    assert adapted([number(big), number(-1)], pa.decimal128(38, 0), pa.uint64()) == ([big, None], [False, True])
    assert adapted([number("0.25"), number("0.5")], pa.decimal128(9, 2), pa.decimal128(38, 1)) == (
        [None, number("0.5")],
        [True, False],
    )
    assert adapted([2**62, 3], pa.int64(), pa.decimal128(38, 30)) == ([None, number(3)], [True, False])


def test_zones_are_of_no_account():
    berlin = pa.array([datetime.datetime(2024, 7, 1, 12)], pa.timestamp("s")).cast(pa.timestamp("s", "Europe/Berlin"))
    utc = berlin.cast(pa.timestamp("ms", "UTC"))
    assert canonical_keys([berlin], "t")[0].equals(canonical_keys([utc], "t")[0])


def test_uuids_and_views_are_keys():
    raw = pa.array([b"0123456789abcdef"], pa.binary(16))
    if hasattr(pa, "uuid"):
        assert canonical_keys([pa.ExtensionArray.from_storage(pa.uuid(), raw)], "t")[0].equals(raw)
    if hasattr(pa, "string_view"):
        assert canonical_keys([pa.array(["a"], pa.string_view())], "t")[0].type == pa.large_string()


@pytest.mark.parametrize(
    "column, text",
    [
        (pa.array([1.5]), "nodes.a: a key must hold integers, strings, .* got double"),
        (pa.array([True]), "got bool; cast the column"),
        (pa.array([[1]]), "got list"),
        (pa.array([{"a": 1}]), "got struct"),
        (pa.array([1], pa.timestamp("ns")), r"a key of type timestamp\[ns\] cannot be stored as timestamp\[us\]"),
        (pa.array([2**60], pa.timestamp("s")), "cannot be stored as timestamp"),
    ],
)
def test_columns_that_are_no_keys_are_refused(column, text):
    with pytest.raises(ValueError, match=text):
        canonical_keys([column], "nodes.a")


def test_keys_of_different_kinds_are_refused():
    with pytest.raises(ValueError, match="edges.e: keys that refer to each other .* got large_string here and int64"):
        adapt_keys([pa.array(["1"], pa.large_string())], [pa.int64()], "edges.e")
    with pytest.raises(ValueError, match="edges.e: a key must have 2 columns, got 1"):
        adapt_keys([pa.array([1])], [pa.int64(), pa.int64()], "edges.e")


@given(data=st.data())
def test_look_ups_are_exact(data):
    kinds = data.draw(key_columns())
    stored, wanted = sorted(set(drawn_keys(data.draw, kinds, 30)), key=repr), drawn_keys(data.draw, kinds, 30)
    names = ["a", "b"][: len(kinds)]
    bits = data.draw(st.sampled_from([0, 1, 3, 64]))
    keys = canonical_keys(list(key_table(data.draw, kinds, names, stored).values()), "t")
    hashes = key_hash(keys) & np.uint64(2**bits - 1)
    order = np.argsort(hashes, kind="stable")
    index = KeyIndex(hashes[order], within(column.take(pa.array(order)) for column in keys))
    asked, unlike = adapt_keys(
        canonical_keys(list(key_table(data.draw, kinds, names, wanted).values()), "t"), [of.type for of in keys], "t"
    )
    assert unlike is None
    places = index.find(key_hash(asked) & np.uint64(2**bits - 1), within(asked))
    position = {stored[row]: place for place, row in enumerate(order.tolist())}
    assert places.tolist() == [position.get(key, -1) for key in wanted]


def within(columns):
    """Returns columns that lie inside longer arrays."""
    return [pa.concat_arrays([column, column, column]).slice(len(column), len(column)) for column in columns]
