"""Laws of joining: edges equal those that a dictionary of keys gives, whatever the order of rows, the memory and the hashes."""

from __future__ import annotations

from pathlib import Path

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

from salientpp.datasets.tabular import joining  # noqa: E402
from salientpp.datasets.tabular.joining import JoinedEdges, SortedEdges, join_edges, missing_keys  # noqa: E402
from salientpp.datasets.tabular.numbering import NumberedVertices  # noqa: E402
from salientpp.datasets.tabular.resolving import Indexes  # noqa: E402


def joined(table: pa.Table, ends: tuple, vertices: tuple, folder: Path, working: int = 2**30, **options) -> JoinedEdges:
    work = folder / f"joined-{len(list(folder.iterdir()))}"
    work.mkdir()
    given_ = {"columns": [], "reverse": True, **options}
    columns = given_.pop("columns")
    (source, target), (sources, targets) = ends, vertices
    return join_edges(
        MemoryTable(table, 11), source, target, columns, sources, targets, work, working, what="edges.e", **given_
    )


def edges_of(edges: SortedEdges, columns: int) -> list[tuple]:
    """(target, source, columns) of each edge."""
    others = rows_of(edges.columns) if columns else [()] * edges.ends.num_rows
    assert len(others) == edges.ends.num_rows == edges.columns.num_rows
    return [(target, source, *row) for (source, target), row in zip(rows_of(edges.ends), others)]


def contents(edges: JoinedEdges, columns: int) -> tuple:
    directions = [edges.forward] if edges.backward is None else [edges.forward, edges.backward]
    bytes_ = [direction.ends.path.read_bytes() for direction in directions]
    rows = repr([edges_of(direction, columns) for direction in directions])
    dropped = edges.null_keys, edges.dangling_sources, edges.dangling_targets
    return edges.num_edges, bytes_, rows, [of.count for of in dropped]


@given(data=st.data())
def test_edges_equal_what_a_dictionary_of_keys_gives(data, tmp_path):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    bits = data.draw(st.sampled_from([0, 2, 64]))
    with weak_hashes(bits):
        check_edges(data, folder)


def check_edges(data, folder):
    names = (["s", "s2"], ["t", "t2"])
    ends = []
    for side in range(2):
        kinds = data.draw(key_columns())
        own = names[side][: len(kinds)]
        keys = list(set(drawn_keys(data.draw, kinds, 20)))
        table = pa.table(key_table(data.draw, kinds, own, keys))
        ends.append((kinds, own, numbered(table, own, folder)))
    (kinds, source, sources), (target_kinds, target, targets) = ends
    pairs = data.draw(st.integers(0, 60))
    some = [drawn_keys(data.draw, of, 60, nulls=True) for of in (kinds, target_kinds)]
    some = [(of * 60)[:pairs] if all(some) else [] for of in some]
    chosen = data.draw(st.lists(st.sampled_from(sorted(COLUMNS)), unique=True, max_size=2))
    rows = [tuple(data.draw(st.none() | COLUMNS[name][1]) for name in chosen) for _ in some[0]]
    table = pa.table(
        {
            **key_table(data.draw, kinds, source, some[0]),
            **key_table(data.draw, target_kinds, target, some[1]),
            **{name: pa.array([row[at] for row in rows], COLUMNS[name][0]) for at, name in enumerate(chosen)},
        }
    )
    given_ = {"columns": chosen, "dangling": "drop", "null_keys": "drop"}
    first = joined(table, (source, target), (sources, targets), folder, **given_)
    shuffled = table.take(pa.array(data.draw(st.permutations(range(len(rows)))), pa.int64()))
    working = data.draw(st.sampled_from(BUDGETS[:2]))
    again = joined(shuffled, (source, target), (sources, targets), folder, working, **given_)
    assert contents(again, len(chosen)) == contents(first, len(chosen))

    ids = [{repr(key): at for at, key in enumerate(plain_keys(rows_of(of.keys)))} for of in (sources, targets)]
    expected, nulls, dangling = [], 0, [0, 0]
    for from_, to, row in zip(*map(plain_keys, some), rows):
        found = [of.get(repr(key)) for of, key in zip(ids, (from_, to))]
        if None in (*from_, *to):
            nulls += 1
        elif None in found:
            dangling[found[0] is not None] += 1
        else:
            expected.append((found[1], found[0], *row))
    order = lambda edge: (*edge[:2], [*map(order_of, edge[2:], chosen)])  # noqa: E731
    assert repr(edges_of(first.forward, len(chosen))) == repr(sorted(expected, key=order))
    backward = sorted(((source, target, *row) for target, source, *row in expected), key=order)
    assert repr(edges_of(first.backward, len(chosen))) == repr(backward)
    assert first.null_keys.count == nulls
    assert [first.dangling_sources.count, first.dangling_targets.count] == dangling


def people(folder: Path, count: int = 3000) -> NumberedVertices:
    return numbered(pa.table({"id": [f"person {number}" for number in range(count)]}), ["id"], folder)


def test_a_hub_needs_no_more_memory_than_other_vertices(tmp_path):
    vertices = people(tmp_path)
    rng = np.random.default_rng(0)
    some, weight = rng.integers(0, 3000, 10_000), rng.integers(0, 3, 10_000)
    some[:7_000] = 7  # and most of these edges are equal in all columns
    table = pa.table(
        {
            "a": ["person 5"] * 10_000,
            "b": [f"person {number}" for number in some],
            "w": weight,
            "text": ["same " * 9] * 10_000,
        }
    )
    ends, given_ = ((["a"], ["b"]), (vertices, vertices)), {"columns": ["w", "text"]}
    assert contents(joined(table, *ends, tmp_path, 300_000, **given_), 2) == contents(
        joined(table, *ends, tmp_path, **given_), 2
    )


@pytest.mark.parametrize("columns", [[], ["w"]])
def test_memory_stays_within_the_bytes_given(tmp_path, columns):
    import tracemalloc

    rng = np.random.default_rng(0)
    count = 400_000
    names = pa.array([f"customer-{number:012}" for number in range(100_000)])
    people_, other = (names.take(pa.array(rng.integers(0, 100_000, count))) for _ in range(2))
    table = MemoryTable(pa.table({"a": people_, "b": other, "w": rng.random(count)}), 4096)
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    working = 12 * 2**20
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        (tmp_path / "n").mkdir()
        (tmp_path / "e").mkdir()
        nodes = MemoryTable(pa.table({"id": names, "x": np.arange(100_000)}), 4096)
        vertices = number_all(nodes, tmp_path / "n", working)
        join_edges(
            table, ["a"], ["b"], columns, vertices, vertices, tmp_path / "e", working, what="edges.e", reverse=True
        )
        arrays = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    print(f"{pool.max_memory():,} + {arrays:,} bytes of {working:,}")
    # Without columns, the two peaks are in different passes.
    assert 0 < pool.max_memory() + arrays < working * (1 if columns else 1.1)


def test_ids_that_do_not_fit_into_half_a_word_are_sorted_as_rows(tmp_path, monkeypatch):
    vertices, rng = people(tmp_path, 20), np.random.default_rng(0)
    table = pa.table({name: [f"person {number}" for number in rng.integers(0, 20, 300)] for name in "ab"})
    ends = ((["a"], ["b"]), (vertices, vertices))
    expected = contents(joined(table, *ends, tmp_path), 0)
    monkeypatch.setattr(joining, "sorted_pairs", None)
    monkeypatch.setattr(joining, "MOST_VERTICES", 19)
    assert contents(joined(table, *ends, tmp_path, 20_000), 0) == expected


def test_memory_of_loaded_keys_goes_back_to_the_system(tmp_path):
    count = 200_000  # 33 MB of keys
    keys = pa.array([f"{number:0150d}" for number in range(count)])
    vertices = number_all(MemoryTable(pa.table({"id": keys, "x": np.arange(count)})), tmp_path, 2**27)
    del keys
    pa.default_memory_pool().release_unused()
    before = resident_bytes()
    indexes = Indexes([vertices], 2**30)
    indexes.of(vertices, 0, count)
    loaded = resident_bytes()
    assert not list(indexes.while_reading([]))
    freed, size = resident_bytes(), vertices.keys.path.stat().st_size
    print(f"{size:,} bytes of keys: {loaded - before:,} more with an index, {freed - before:,} more after it")
    assert loaded - before < 1.5 * size, "the file's batches are freed once they are joined"
    assert freed - before < 0.5 * size


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def number_all(table: MemoryTable, folder: Path, working: int) -> NumberedVertices:
    from salientpp.datasets.tabular.numbering import number_vertices

    return number_vertices(table, ["id"], ["x"], folder, working, what="nodes.n")


def test_edges_without_a_vertex_are_an_error_or_dropped(tmp_path):
    vertices = people(tmp_path, 3)
    table = pa.table(
        {"a": ["person 1", "nobody", "person 2", "none"], "b": ["person 0", "person 0", "person 9", "none"]}
    )
    ends = (["a"], ["b"]), (vertices, vertices)
    with pytest.raises(
        ValueError, match=r"edges.e, source: 2 rows have a key that no vertex has, for example .*a='nobody' \(row 1\)"
    ):
        joined(table, *ends, tmp_path)
    with pytest.raises(
        ValueError, match=r"edges.e, target: 1 row has a key that no vertex has, for example b='person 9' \(row 0\)"
    ):
        joined(table.slice(2, 1), *ends, tmp_path)
    edges = joined(table, *ends, tmp_path, dangling="drop")
    assert edges.num_edges == 1 and edges.dangling_targets.examples == ("b='person 9'",)
    assert set(edges.dangling_sources.examples) == {"a='nobody'", "a='none'"}


def test_edges_without_a_key_are_an_error_or_dropped(tmp_path):
    vertices = people(tmp_path, 3)
    table = pa.table({"a": ["person 1", None], "b": ["person 0", "nobody"]})
    ends = (["a"], ["b"]), (vertices, vertices)
    with pytest.raises(
        ValueError, match="edges.e: 1 row has no value in 'a' or 'b', for example row 1; fill the column"
    ):
        joined(table, *ends, tmp_path)
    edges = joined(table, *ends, tmp_path, null_keys="drop", reverse=False)
    assert edges.num_edges == edges.null_keys.count == 1 and edges.backward is None
    assert edges.dangling_targets.count == 0


def test_missing_keys_become_vertices(tmp_path):
    vertices = people(tmp_path, 3)
    nodes = pa.table({"id": [f"person {number}" for number in range(3)]})
    new = [f"new {number % 50}" for number in range(400)]
    table = pa.table({"a": [*new, None, "person 1"], "b": [*["person 2"] * 400, "lost", "last"]})
    for working in BUDGETS:
        work = tmp_path / f"missing-{working}"
        work.mkdir()
        files = []
        for number, (key, other) in enumerate((("a", "b"), ("b", "a"))):
            (work / str(number)).mkdir()
            files.append(
                missing_keys(
                    MemoryTable(table, 90), [key], [other], vertices, work / str(number), working, what="edges.e"
                )
            )
        assert set(rows_of(files[0])) == {(key,) for key in new}
        assert rows_of(files[1]) == [("last",)]
        more = numbered(nodes, ["id"], tmp_path, added=files)
        assert more.num_added == 51
        edges = joined(table, (["a"], ["b"]), (more, more), tmp_path, null_keys="drop")
        assert edges.num_edges == 401


def test_keys_that_the_vertices_type_cannot_hold_have_no_vertex(tmp_path):
    vertices = numbered(pa.table({"id": [1, 2]}), ["id"], tmp_path)
    table = pa.table({"a": pa.array([1, 2**64 - 1], pa.uint64()), "b": [2, 2]})
    ends = (["a"], ["b"]), (vertices, vertices)
    edges = joined(table, *ends, tmp_path, dangling="drop")
    assert edges.num_edges == 1 and edges.dangling_sources.examples == ("a=18446744073709551615",)
    with pytest.raises(
        ValueError, match=r"1 row has a key that no vertex has, for example a=18446744073709551615 \(row 1\)"
    ):
        joined(table, *ends, tmp_path)
    work = tmp_path / "missing"
    work.mkdir()
    with pytest.raises(
        ValueError,
        match="edges.e, 'a': 1 row has a key that the type of the vertices' keys, int64, cannot hold, for example a=184467",
    ):
        missing_keys(MemoryTable(table), ["a"], ["b"], vertices, work, 2**20, what="edges.e")


def test_keys_of_other_kinds_are_refused(tmp_path):
    vertices = people(tmp_path, 3)
    ends = (["a"], ["b"]), (vertices, vertices)
    with pytest.raises(
        ValueError, match="edges.e, target: keys that refer to each other must have the same type, got int64"
    ):
        joined(pa.table({"a": ["person 1"], "b": [1]}), *ends, tmp_path)
    with pytest.raises(ValueError, match="edges.e, source: a key must have 1 columns, got 2"):
        joined(pa.table({"a": ["person 1"], "b": [1]}), (["a", "b"], ["b"]), (vertices, vertices), tmp_path)


def test_tables_without_rows_give_no_edges(tmp_path):
    nobody = numbered(pa.table({"id": pa.nulls(0)}), ["id"], tmp_path)
    vertices = people(tmp_path, 3)
    for table in (pa.table({"a": pa.nulls(0), "b": pa.nulls(0)}), pa.table({"a": ["x"], "b": ["person 1"]})):
        edges = joined(table, (["a"], ["b"]), (nobody, vertices), tmp_path, dangling="drop")
        assert edges.num_edges == 0 and edges.dangling_sources.count == table.num_rows
    work = tmp_path / "missing"
    work.mkdir()
    table = pa.table({"a": ["x"], "b": ["person 1"]})
    added = missing_keys(MemoryTable(table), ["a"], ["b"], nobody, work, 2**20, what="edges.e")
    assert rows_of(added) == [("x",)]
    more = numbered(pa.table({"id": pa.nulls(0)}), ["id"], tmp_path, added=[added])
    assert joined(table, (["a"], ["b"]), (more, vertices), tmp_path).num_edges == 1
