"""Laws of doors: a table of any format, split into any files, gives the same rows with the same types. Errors name the table and the file."""

from __future__ import annotations

import bz2
import datetime
import gzip
import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from table_packages import package

from salientpp.datasets.tabular.addresses import find_table_files
from salientpp.datasets.tabular.doors import Table, facts_of, open_table

pa, parquet = package("pyarrow"), package("pyarrow.parquet")
csv, feather, fs, orc = (package(f"pyarrow.{name}") for name in ("csv", "feather", "fs", "orc"))

N = 23
TABLE = pa.table(
    {
        "id": [f"key {i}" for i in range(N)],
        "number": pa.array([None if i % 5 == 4 else i - 3 for i in range(N)], pa.int64()),
        "share": [i / 4 for i in range(N)],
        "flag": [i % 3 == 0 for i in range(N)],
        "day": [datetime.date(2024, 2, 1 + i) for i in range(N)],
        "at": pa.array([datetime.datetime(2024, 2, 1, i, 30) for i in range(N)], pa.timestamp("us")),
    }
)


def write_stream(table: Any, path: Path) -> None:
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def as_lines(table: Any) -> str:
    return "".join(json.dumps(row, default=str) + "\n" for row in table.to_pylist())


def compressed(
    write: Callable[[Any, Path], object], compress: Callable[[bytes], bytes]
) -> Callable[[Any, Path], object]:
    def written(table: Any, path: Path) -> None:
        write(table, path)
        path.write_bytes(compress(path.read_bytes()))

    return written


def write_json(table: Any, path: Path) -> None:
    path.write_text(as_lines(table))


def write_tsv(table: Any, path: Path) -> None:
    csv.write_csv(table, path, csv.WriteOptions(delimiter="\t"))


WRITERS: dict[str, Callable[[Any, Path], object]] = {
    "parquet": lambda table, path: parquet.write_table(table, path, row_group_size=5),
    "orc": orc.write_table,
    "feather": feather.write_feather,
    "arrow": write_stream,
    "csv": csv.write_csv,
    "tsv": write_tsv,
    "csv.gz": compressed(csv.write_csv, gzip.compress),
    "tsv.bz2": compressed(write_tsv, bz2.compress),
    "jsonl": write_json,
    "ndjson.gz": compressed(write_json, gzip.compress),
}


def rows_of(table: Table, columns: list[str] | None = None, most_rows: int = 4) -> list[dict[str, Any]]:
    names = list(table.names) if columns is None else columns
    batches = list(table.batches(names, most_rows))
    assert all(1 <= each.batch.num_rows <= most_rows for each in batches)
    assert all(each.batch.schema.names == names for each in batches)
    assert all(field.type == table.schema.field(field.name).type for each in batches for field in each.batch.schema)
    return [row for each in batches for row in each.batch.to_pylist()]


def write(folder: Path, ending: str, table: Any = TABLE, files: int = 3, name: str = "part") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    cuts = [len(table) * i // files for i in range(files + 1)]
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        WRITERS[ending](table.slice(first, last - first), folder / f"{name}-{number}.{ending}")


# --- formats ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most_rows", [1, 4, 1000])
@pytest.mark.parametrize("ending", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path, ending, most_rows):
    write(tmp_path, ending)
    table = open_table([f"part-*.{ending}"], tmp_path, "nodes.t")
    assert table.names == tuple(TABLE.schema.names) and table.num_rows in (N, None)
    for name in ("id", "number", "share", "flag"):
        assert table.schema.field(name).type == TABLE.schema.field(name).type, name
    rows = rows_of(table, most_rows=most_rows)
    moments = {"day": datetime.datetime, "at": datetime.datetime}
    for got, expected in zip(rows, TABLE.to_pylist(), strict=True):
        for name, value in expected.items():
            is_moment = name in moments and ending.startswith(("json", "ndjson"))  # JSON has no dates
            assert str(got[name])[:10] == str(value)[:10] if is_moment else got[name] == value
    assert rows_of(table, ["share", "id"]) == [{"share": row["share"], "id": row["id"]} for row in TABLE.to_pylist()]
    assert rows_of(table, most_rows=most_rows) == rows  # a second pass
    table.check_unchanged()


@pytest.mark.parametrize("ending", ["parquet", "orc", "feather", "arrow", "csv", "jsonl"])
def test_a_row_has_its_file_and_number(tmp_path, ending):
    write(tmp_path, ending)
    found = {}
    for each in open_table([f"*.{ending}"], tmp_path, "nodes.t").batches(["id"], 3):
        for at, key in enumerate(each.batch.column("id").to_pylist()):
            found[key] = each.where(at)
    assert found["key 0"] == f"part-0.{ending}, row 0" and found["key 6"] == f"part-0.{ending}, row 6"
    assert found["key 7"] == f"part-1.{ending}, row 0" and found["key 22"] == f"part-2.{ending}, row 7"


def test_files_of_several_formats_are_one_table(tmp_path):
    for number, ending in enumerate(("parquet", "csv", "orc")):
        WRITERS[ending](TABLE.slice(number, 1), tmp_path / f"t{number}.{ending}")
    table = open_table(["t0.parquet", "t1.csv", TABLE.slice(3, 1), tmp_path / "t2.orc"], tmp_path, "t")
    assert rows_of(table, ["id"]) == [{"id": f"key {i}"} for i in (0, 1, 3, 2)]


def test_empty_files_have_no_rows(tmp_path):
    for ending in ("parquet", "orc", "feather", "arrow", "csv", "jsonl"):
        folder = tmp_path / ending.replace(".", "-")
        write(folder, ending, files=1)
        WRITERS[ending](TABLE.slice(0, 0), folder / f"none.{ending}")
        table = open_table([f"*.{ending}"], folder, "t")
        assert [row["id"] for row in rows_of(table)] == TABLE["id"].to_pylist(), ending
        assert table.schema.field("number").type == pa.int64(), ending


@pytest.mark.parametrize("lines, rows", [("", 0), ("{}\n{}\n", 2)])
def test_a_file_of_json_without_columns_may_lie_below_a_folder_with_a_value(tmp_path, lines, rows):
    for day, text in enumerate(('{"id": 1}\n', lines)):
        (tmp_path / f"day={day}").mkdir()
        (tmp_path / f"day={day}" / "t.jsonl").write_text(text)
    expected = [{"id": 1, "day": 0}, *[{"id": None, "day": 1}] * rows]
    table = open_table(["*/*.jsonl"], tmp_path, "t")
    assert rows_of(table) == expected
    for name in table.names:
        assert rows_of(table, [name]) == [{name: row[name]} for row in expected]


# --- addresses --------------------------------------------------------------------------------------------


def test_addresses_name_files_folders_and_patterns(tmp_path, monkeypatch):
    write(tmp_path / "data", "parquet", files=12)
    write(tmp_path / "data" / "deeper", "parquet", files=1)
    (tmp_path / "data" / "_SUCCESS").touch()
    (tmp_path / "data" / ".hidden.parquet").write_bytes(b"x")
    (tmp_path / "data" / "notes.txt").write_text("x")

    def files(address: str) -> list[str]:
        return [facts["address"] for facts in open_table([address], tmp_path, "t").facts()]

    twelve = [f"data/part-{i}.parquet" for i in range(12)]  # in the order of numbers
    assert files("data/*.parquet") == files("data/part-*") == twelve
    assert files("data/part-?.parquet") == twelve[:10]
    assert files("data") == files("data/") == ["data/deeper/part-0.parquet", *twelve]
    assert files("data/**/*.parquet") == files("**/*.parquet") == ["data/deeper/part-0.parquet", *twelve]
    assert files("*/deeper/*.parquet") == ["data/deeper/part-0.parquet"]
    assert files(f"file://{tmp_path}/data/part-3.parquet") == [f"{tmp_path}/data/part-3.parquet"]
    monkeypatch.chdir(tmp_path / "data")
    assert files("data/part-3.parquet") == [twelve[3]]  # addresses begin at the base, not at the current folder


@pytest.mark.parametrize("name", ["a [1].parquet", "ü b%20c.parquet", "a*b.parquet", "a?b.parquet", "a#b.parquet"])
def test_odd_letters_in_names(tmp_path, name):
    parquet.write_table(TABLE, tmp_path / name)
    assert len(rows_of(open_table([name], tmp_path, "t"))) == N


def test_folders_with_values_become_columns(tmp_path):
    for year, country in (("2023", "a%2Fb"), ("2024", "__HIVE_DEFAULT_PARTITION__")):
        write(tmp_path / "t" / f"year={year}" / f"country={country}", "parquet", TABLE.select(["id"]), files=1)
    for address in ("t", "t/**", "t/*/*/*.parquet"):
        table = open_table([address], tmp_path, "t")
        assert str(table.schema.field("year").type) == "int64" and str(table.schema.field("country").type) == "string"
        rows = rows_of(table, ["country", "year"])
        assert rows == [{"country": "a/b", "year": 2023}] * N + [{"country": None, "year": 2024}] * N


def test_fsspec_addresses(tmp_path):
    fsspec = package("fsspec")
    memory = fsspec.filesystem("memory")
    for number in range(2):
        parquet.write_table(TABLE.slice(number, 1), tmp_path / "t.parquet")
        memory.pipe(f"/doors/t{number}.parquet", (tmp_path / "t.parquet").read_bytes())
    for address in ("memory://doors/*.parquet", "memory://doors", "memory:///doors/t?.parquet"):
        table = open_table([address], tmp_path, "t")
        assert rows_of(table, ["id"]) == [{"id": "key 0"}, {"id": "key 1"}]
        table.check_unchanged()
    memory.pipe("/doors/t1.parquet", b"other")
    with pytest.raises(ValueError, match=r"t: memory://.*t1.parquet changed while it was read: its size was"):
        table.check_unchanged()
    with pytest.raises(
        FileNotFoundError, match=r"t: memory://doors/t2.parquet: no such file or folder. Did you mean t"
    ):
        open_table(["memory://doors/t2.parquet"], tmp_path, "t")


# --- text -------------------------------------------------------------------------------------------------

TYPES = {
    "int64": ["1", "-20", "9223372036854775807"],
    "double": ["1", "-0.5", "1e-3"],
    "bool": ["true", "False", "TRUE"],
    "date32[day]": ["2024-02-29", "1900-01-01", "2024-03-01"],
    "timestamp[us]": ["2024-02-29", "2024-02-29 12:00:01.5", "2024-02-29T12:00"],
    "timestamp[us, tz=UTC]": ["2024-02-29 12:00:01Z", "2024-02-29T12:00:00+02:00", "2024-02-29 00:00:00Z"],
    "string": ["2024-02-29", "2", "x"],
}
STRINGS = [
    ["007", "1"],
    ["+5", "1"],
    ["9223372036854775808", "1"],
    ["12345678901234567", "1.5"],
    ["2024-02-30", "2024-02-01"],
    ["1", "true"],
    ["1_000", "1"],
    [".", "1.5"],
]


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("order", range(3))
def test_types_of_text_do_not_depend_on_the_order_of_rows(tmp_path, type_, order):
    values = TYPES[type_][order:] + TYPES[type_][:order]
    (tmp_path / "one.csv").write_text("k,v\n" + "".join(f"{i},{value}\n,\n" for i, value in enumerate(values)))
    for number, value in enumerate(values):
        (tmp_path / f"several-{number}.csv").write_text(f"k,v\n{number},{value}\n")
    (tmp_path / "several-3.csv").write_text("k,v\n3,\n")
    for address in ("one.csv", "several-*.csv"):
        table = open_table([address], tmp_path, "t")
        assert str(table.schema.field("v").type) == type_
        assert sum(row["v"] is not None for row in rows_of(table)) == 3


@pytest.mark.parametrize("values", STRINGS)
def test_text_that_would_change_as_a_number_stays_text(tmp_path, values):
    (tmp_path / "t.csv").write_text("v\n" + "\n".join(values) + "\n")
    assert [row["v"] for row in rows_of(open_table(["t.csv"], tmp_path, "t"))] == values


def test_missing_values_of_text(tmp_path):
    (tmp_path / "t.csv").write_text('n,s,e,z\n1,NA,,\nNA,x,"",\nnull,,y,\n')
    table = open_table(["t.csv"], tmp_path, "t")
    assert [str(field.type) for field in table.schema] == ["int64", "string", "string", "null"]
    columns = {name: [row[name] for row in rows_of(table)] for name in table.names}
    assert columns == {"n": [1, None, None], "s": ["NA", "x", None], "e": [None, "", "y"], "z": [None] * 3}


def test_csv_with_quotes_breaks_and_many_blocks(tmp_path):
    texts = [f'line "{i}"\nand, more ' + "x" * 200 for i in range(9000)]  # more than one block
    pandas = package("pandas")
    pandas.DataFrame({"id": range(9000), "t": texts}).to_csv(tmp_path / "t.csv", index=False)
    rows = rows_of(open_table(["t.csv"], tmp_path, "t"), most_rows=1000)
    assert [row["t"] for row in rows] == texts and [row["id"] for row in rows] == list(range(9000))


def test_json_of_many_blocks_has_one_schema(tmp_path):
    lines = [
        {"id": i, "v": i if i < 30_000 else i + 0.5, "pad": "x" * 40} | ({"late": "y"} if i > 39_000 else {})
        for i in range(40_000)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))  # the last line has no end
    table = open_table(["t.jsonl"], tmp_path, "t")
    assert [str(field.type) for field in table.schema] == [
        "int64",
        "double",
        "string",
        "string",
    ] and table.num_rows == 40_000
    rows = rows_of(table, most_rows=10_000)
    assert [row["v"] for row in rows] == [line["v"] for line in lines]
    assert [row["late"] for row in rows] == [line.get("late") for line in lines]


@pytest.mark.parametrize(
    "lines, row, number",
    [
        ([1.5, 2**53 + 1], 1, 2**53 + 1),
        ([2**53 + 1, 1.5], 0, 2**53 + 1),
        ([*range(200_000), -(2**60) - 1, 0.5], 200_000, -(2**60) - 1),  # in a later block than other integers
        ([1, 2**64 + 1], 1, 2**64 + 1),
        ([[0.5, 1], [2**62 + 1, 0]], 1, 2**62 + 1),
    ],
)
def test_integers_of_json_that_would_be_rounded_are_refused(tmp_path, lines, row, number):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"a": value, "b": 1}) + "\n" for value in lines))
    with pytest.raises(
        ValueError, match=f"t: t.jsonl.*row {row}: column 'a' has the integer {number} beside fractions or larger"
    ):
        rows_of(open_table(["t.jsonl"], tmp_path, "t"))


def test_large_numbers_of_json_that_are_not_rounded_are_read(tmp_path):
    values = [1.5, 2**53, -(2**60), 1e300, None]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"a": value, "b": "é"}) + "\n" for value in values))
    assert [row["a"] for row in rows_of(open_table(["t.jsonl"], tmp_path, "t"))] == values
    (tmp_path / "t.jsonl").write_text("".join(f'{{"a": {2**53 + 1 + number}}}\n' for number in range(3)))
    assert [row["a"] for row in rows_of(open_table(["t.jsonl"], tmp_path, "t"))] == [2**53 + 1, 2**53 + 2, 2**53 + 3]


@pytest.mark.parametrize("value", ["1e400", "-1e999"])
def test_numbers_of_csv_that_no_float_holds_are_refused(tmp_path, value):
    (tmp_path / "t.csv").write_text(f"a,b\n1,2.5\n2,\n3,{value}\n4,{value}\n")
    with pytest.raises(ValueError, match=f"t: t.csv.*row 2: column 'b' must hold numbers below 1.8e308.*'{value}'"):
        rows_of(open_table(["t.csv"], tmp_path, "t"))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_empty_lines_are_no_rows(tmp_path, end):
    (tmp_path / "t.csv").write_text(end.join(["", "a,b", "1,x", "", '2,"y\n\nz"', "", "", ""]))
    assert [tuple(row.values()) for row in rows_of(open_table(["t.csv"], tmp_path, "t"))] == [(1, "x"), (2, "y\n\nz")]
    (tmp_path / "one.csv").write_text(end.join(["a", "1", "", '""', "2", ""]))
    assert [row["a"] for row in rows_of(open_table(["one.csv"], tmp_path, "t"))] == [1, None, 2]
    (tmp_path / "t.jsonl").write_text(end.join(["", '{"a": 1}', "  ", "", '{"a": 2}', "", ""]))
    assert [row["a"] for row in rows_of(open_table(["t.jsonl"], tmp_path, "t"))] == [1, 2]


@pytest.mark.parametrize(
    "name, text, error",
    [
        ("t.csv", "a,b\n1,2\n  \n", "t: t.csv: damaged.*Row #3: Expected 2 columns, got 1"),
        ("t.json", '[{"a": 1}]', r"t: t.json: .*a list; write one object on each line"),
        ("t.jsonl", '{"a": 1}\n{"a": "x"}\n', "t: t.jsonl: .*(JSON parse error|one type)"),
        ("t.jsonl", '{"a": 1', "t: t.jsonl: damaged"),
        ("t.csv", "", "t: t.csv: damaged, or not a file of this kind .*Empty CSV"),
        ("t.csv", "a,b\n1,2\n3\n", "t: t.csv: damaged.*Expected 2 columns, got 1"),
        ("t.csv", "a,a\n1,2\n", "t: t.csv: several columns called 'a'; rename them"),
    ],
)
def test_damaged_text_is_refused(tmp_path, name, text, error):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=error):
        open_table([name], tmp_path, "t")


# --- objects of other libraries ---------------------------------------------------------------------------


def test_tables_of_libraries_are_tables(tmp_path):
    pandas, polars = package("pandas"), package("polars")
    frame = TABLE.to_pandas(types_mapper=pandas.ArrowDtype)
    for value in (TABLE, TABLE.combine_chunks().to_batches()[0], frame, polars.from_arrow(TABLE)):
        table = open_table([value], tmp_path, "t")
        assert table.is_spooled and table.num_rows == N
        table.spool(tmp_path / "spool")
        assert not (tmp_path / "spool").exists()
        for _ in range(2):
            assert rows_of(table) == TABLE.to_pylist()
        assert open_table([value], tmp_path, "t").facts() == table.facts()
        (facts,) = table.facts()
        assert facts_of([value], tmp_path, "t") == [facts]
        assert len(facts["digest"]) == 64 and facts["rows"] == N


def test_a_frame_of_pandas_keeps_a_named_index_only(tmp_path):
    pandas = package("pandas")
    frame = pandas.DataFrame({"key": ["a", "b", "c", "d"], "v": [1, 2, 3, 4]})
    assert open_table([frame[frame.v != 3]], tmp_path, "t").names == ("key", "v")
    assert open_table([frame[frame.v != 3]], tmp_path, "t").left_out == ("__index_level_0__",)
    assert set(open_table([frame.set_index("key")], tmp_path, "t").names) == {"key", "v"}
    frame[frame.v != 3].to_parquet(tmp_path / "t.parquet")
    assert open_table(["t.parquet"], tmp_path, "t").names == ("key", "v")


class Stream:
    """A table that gives its rows once."""

    def __init__(self, table: Any) -> None:
        self._reader = table.to_reader(max_chunksize=4)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._reader.__arrow_c_stream__(requested_schema)


def test_a_stream_is_spooled_once(tmp_path):
    categories = TABLE.append_column("c", TABLE["id"].dictionary_encode())
    table = open_table([Stream(categories), TABLE.append_column("c", TABLE["id"])], tmp_path, "t")
    assert not table.is_spooled and table.num_rows is None
    with pytest.raises(RuntimeError, match=r"t: .*Stream gives its rows once; call spool\(\) before batches\(\)"):
        next(table.batches(["id"], 3))
    for _ in range(2):
        table.spool(tmp_path / "spool")
        assert [row["c"] for row in rows_of(table)] == TABLE["id"].to_pylist() * 2
    assert table.is_spooled and [path.name for path in (tmp_path / "spool").iterdir()] == ["stream-0.arrow"]
    other = open_table([Stream(categories.slice(1))], tmp_path, "t")
    other.spool(tmp_path / "spool")  # a stream of another run replaces the file
    assert len(rows_of(other)) == N - 1 and other.facts()[0]["digest"] != table.facts()[0]["digest"]


def test_a_query_of_duckdb_is_a_table(tmp_path):
    duckdb = package("duckdb")
    given = TABLE  # noqa: F841 - DuckDB finds it by name
    table = open_table([duckdb.sql("select id, share from given where share >= 1")], tmp_path, "t")
    table.spool(tmp_path)
    for _ in range(2):
        assert rows_of(table) == [{"id": f"key {i}", "share": i / 4} for i in range(4, N)]


def test_a_stream_that_fails_names_the_table(tmp_path):
    def batches():
        yield TABLE.to_batches()[0]
        raise RuntimeError("the query was cancelled")

    class Failing:
        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return pa.RecordBatchReader.from_batches(TABLE.schema, batches()).__arrow_c_stream__()

    table = open_table([Failing()], tmp_path, "nodes.t")
    with pytest.raises(
        OSError, match=r"nodes.t: .*Failing failed while its rows were read \(.*the query was cancelled"
    ):
        table.spool(tmp_path / "spool")
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.parametrize(
    "value, error", [(3, "got a int"), ([1], "got a list"), ({}, "got a dict"), (None, "got a NoneType")]
)
def test_what_is_no_table_is_refused(tmp_path, value, error):
    with pytest.raises(
        ValueError, match=f"nodes.t: a table must be an address or an object with __arrow_c_stream__, {error}"
    ):
        open_table([value], tmp_path, "nodes.t")


def test_a_lazy_frame_must_be_computed_first(tmp_path):
    polars = package("polars")
    with pytest.raises(ValueError, match=r"got a LazyFrame; call its collect\(\) first"):
        open_table([polars.from_arrow(TABLE).lazy()], tmp_path, "t")


# --- several files ----------------------------------------------------------------------------------------


def test_types_that_hold_the_same_values_are_joined(tmp_path):
    texts = ["a", "b"]
    arrays = [
        pa.array(texts, pa.string()),
        pa.array(texts, pa.large_string()),
        pa.array(texts).dictionary_encode(),
        pa.nulls(2),
    ]
    for number, array in enumerate(arrays):
        feather.write_feather(pa.table({"v": array}), tmp_path / f"t{number}.feather")
    table = open_table(["*.feather"], tmp_path, "t")
    assert table.schema.field("v").type == pa.large_string()
    assert [row["v"] for row in rows_of(table)] == texts * 3 + [None] * 2


@pytest.mark.parametrize(
    "other, error",
    [
        (
            {"a": pa.array([1], pa.int32()), "b": ["x"]},
            "column 'a' holds int64 in 1.parquet and int32 in 2.parquet; write all files with one type",
        ),
        ({"a": [1.5], "b": ["x"]}, "column 'a' holds int64 in 1.parquet and double in 2.parquet"),
        (
            {"a": [1], "c": ["x"]},
            "1.parquet has no column 'c', which 2.parquet has; write all files with the same columns",
        ),
        ({"a": [1]}, "2.parquet has no column 'b', which 1.parquet has"),
    ],
)
def test_files_with_different_columns_are_refused(tmp_path, other, error):
    parquet.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "1.parquet")
    parquet.write_table(pa.table(other), tmp_path / "2.parquet")
    with pytest.raises(ValueError, match=f"edges.a,b,c: {error}"):
        open_table(["*.parquet"], tmp_path, "edges.a,b,c")


def test_columns_may_be_in_another_order(tmp_path):
    parquet.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "1.parquet")
    parquet.write_table(pa.table({"b": ["y"], "a": [2]}), tmp_path / "2.parquet")
    assert rows_of(open_table(["*"], tmp_path, "t")) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


@pytest.mark.parametrize("ending", ["parquet", "feather", "arrow"])
def test_columns_of_one_name_are_refused(tmp_path, ending):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "b", "b"])
    WRITERS[ending](table, tmp_path / f"t.{ending}")
    with pytest.raises(ValueError, match=f"t: t.{ending} has several columns called 'b'; rename them"):
        open_table([f"t.{ending}"], tmp_path, "t")


@pytest.mark.parametrize("ending", ["parquet", "orc", "feather", "csv", "jsonl"])
def test_odd_names_of_columns(tmp_path, ending):
    names = ["a", "a.b", "a b", "ü", "a,b", "list.element", "*"]
    table = pa.table({name: [at] for at, name in enumerate(names)})
    WRITERS[ending](table, tmp_path / f"t.{ending}")
    opened = open_table([f"t.{ending}"], tmp_path, "t")
    for at, name in enumerate(names):
        assert rows_of(opened, [name]) == [{name: at}]


def test_structures_and_lists_are_read_whole(tmp_path):
    values = {"s": [{"x": 1, "y": "a"}], "l": [[1, 2]], "s.x": [5]}
    for ending in ("parquet", "feather"):
        WRITERS[ending](pa.table(values), tmp_path / f"t.{ending}")
        opened = open_table([f"t.{ending}"], tmp_path, "t")
        for name, value in values.items():
            assert rows_of(opened, [name]) == [{name: value[0]}]


def test_a_file_is_read_once(tmp_path):
    parquet.write_table(TABLE, tmp_path / "1.parquet")
    with pytest.raises(ValueError, match="t: its addresses name 1.parquet twice; name each file once"):
        open_table(["*.parquet", "1.parquet"], tmp_path, "t")
    (tmp_path / "latest.parquet").symlink_to("1.parquet")
    for other in tmp_path / "1.parquet", f"file://{tmp_path}/1.parquet", "latest.parquet":
        with pytest.raises(
            ValueError, match=r"t: its addresses name 1.parquet and .*, which are one; name each file once"
        ):
            open_table(["1.parquet", other], tmp_path, "t")
    with pytest.raises(ValueError, match=r"1.parquet and .*latest.parquet, which are one"):
        open_table(["."], tmp_path, "t")


def test_a_pattern_leaves_out_no_folder(tmp_path):
    """Spark writes each table as a folder, whose name may end in .parquet."""
    (tmp_path / "2024.parquet").mkdir()
    parquet.write_table(TABLE.slice(0, 9), tmp_path / "2024.parquet" / "part-0.snappy.parquet")
    parquet.write_table(TABLE.slice(9), tmp_path / "2025.parquet")
    text = r"t: \*.parquet also matches the folder 2024.parquet, whose files, such as 2024.parquet/part-0.snappy.parquet, would be left out; write"
    with pytest.raises(ValueError, match=text):
        open_table(["*.parquet"], tmp_path, "t")
    for addresses in ["*.parquet/*", "2025.parquet"], ["2024.parquet", "2025.parquet"], ["**"], ["**/*.parquet"]:
        assert open_table(addresses, tmp_path, "t").num_rows == N
    (tmp_path / "2024.parquet" / "part-0.snappy.parquet").rename(tmp_path / "2024.parquet" / "_part")
    assert open_table(["*.parquet"], tmp_path, "t").num_rows == N - 9


def test_hidden_folders_are_left_out_of_a_pattern_with_what_is_below(tmp_path):
    """Spark leaves folders such as ``_temporary`` after a failure."""
    write(tmp_path / "a" / "b", "parquet")
    write(tmp_path / "_temporary" / "0", "parquet")
    for pattern in "**", "**/*.parquet", "*/*/*.parquet":
        assert open_table([pattern], tmp_path, "t").num_rows == N


@pytest.mark.parametrize("pattern", ["**", "**/*.parquet", "*/*/*", "x*"])
def test_a_pattern_lists_no_folder_twice(tmp_path, monkeypatch, pattern):
    (tmp_path / "x2").mkdir()  # without files
    write(tmp_path / "a" / "b", "parquet")
    parquet.write_table(TABLE, tmp_path / "x.parquet")
    listed: list[tuple[str, bool]] = []
    selector = fs.FileSelector

    def counted(folder, *, recursive=False, **options):
        listed.append((folder, recursive))
        return selector(folder, recursive=recursive, **options)

    monkeypatch.setattr(fs, "FileSelector", counted)
    find_table_files(pattern, tmp_path, "t", [".parquet"])
    for number, (folder, _) in enumerate(listed):
        others = listed[:number] + listed[number + 1 :]
        assert not any(folder == other or (is_deep and folder.startswith(f"{other}/")) for other, is_deep in others), (
            listed
        )


# --- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address, error",
    [
        ("customer.parquet", "nodes.t: customer.parquet: no such file or folder. Did you mean customers.parquet?"),
        ("x/customers.parquet", "nodes.t: x/customers.parquet: no such file or folder"),
        ("*.orc", "nodes.t: no file matches \\*.orc; the folder . has customers.parquet, empty, notes.txt"),
        ("x/*.orc", "nodes.t: no file matches x/\\*.orc; the folder x does not exist or is empty"),
        ("empty", "nodes.t: no file below empty ends in .parquet, .orc"),
    ],
)
def test_a_missing_file_is_named(tmp_path, address, error):
    parquet.write_table(TABLE, tmp_path / "customers.parquet")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=error):
        open_table([address], tmp_path, "nodes.t")


@pytest.mark.parametrize(
    "address, error",
    [
        ("", "an address is empty"),
        ("notes.txt", "the name of notes.txt must end in .parquet, .orc"),
        ("s4://bucket/x.parquet", "s4://bucket/x.parquet has the unknown scheme s4://"),
        ("delta:", "delta: lacks an address"),
    ],
)
def test_a_wrong_address_is_refused(tmp_path, address, error):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=f"nodes.t: {error}|^{error}"):
        open_table([address], tmp_path, "nodes.t")
    with pytest.raises(ValueError, match="expected at least one address or object, got none"):
        open_table([], tmp_path, "nodes.t")


def test_a_missing_column_is_named(tmp_path):
    parquet.write_table(TABLE, tmp_path / "t.parquet")
    table = open_table(["t.parquet"], tmp_path, "nodes.t")
    error = "nodes.t: key names the column 'shares', which t.parquet does not have; it has id, number, .*. Did you mean share?"
    with pytest.raises(ValueError, match=error):
        table.check_columns(["id", "shares"], "key")
    with pytest.raises(ValueError, match="names the column 'ID', which t.parquet does not have"):
        next(table.batches(["ID"], 10))


@pytest.mark.parametrize("ending", WRITERS)
def test_damage_is_an_error_with_the_file(tmp_path, ending):
    write(tmp_path, ending, files=1)
    path = tmp_path / f"part-0.{ending}"
    whole, noise = path.read_bytes(), random.Random(ending)
    for case in range(60):
        damaged = bytearray(whole)
        if case % 2:
            del damaged[noise.randrange(len(whole)) :]
        else:
            for _ in range(3):
                damaged[noise.randrange(len(whole))] = noise.randrange(256)
        path.write_bytes(damaged)
        try:
            for each in open_table([path.name], tmp_path, "nodes.t").batches(["id", "number"], 5):
                each.batch.validate(full=True)
        except (ValueError, OSError) as error:  # or the damage cannot be seen
            assert str(error).startswith("nodes.t: ") and (path.name in str(error)), error


@pytest.mark.parametrize("ending", ["parquet", "orc", "feather", "csv", "jsonl"])
def test_a_file_that_changes_is_noticed(tmp_path, ending):
    write(tmp_path, ending, files=2)
    table = open_table([f"*.{ending}"], tmp_path, "nodes.t")
    assert len(rows_of(table)) == N
    path = tmp_path / f"part-1.{ending}"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    with pytest.raises(ValueError, match=rf"nodes.t: part-1.{ending} changed while it was read: its modified was"):
        table.check_unchanged()
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match=rf"nodes.t: part-1.{ending} changed while it was read: its size was"):
        rows_of(table)
    path.unlink()
    with pytest.raises(ValueError, match=rf"nodes.t: part-1.{ending} was removed while it was read"):
        table.check_unchanged()
    with pytest.raises(FileNotFoundError, match=rf"nodes.t: part-1.{ending}"):
        rows_of(table)


def test_facts_tell_versions_apart(tmp_path):
    parquet.write_table(TABLE, tmp_path / "t.parquet")
    first = open_table(["t.parquet"], tmp_path, "t")
    assert json.loads(json.dumps(first.facts())) == first.facts() == facts_of(["t.parquet"], tmp_path, "t")
    os.utime(tmp_path / "t.parquet", ns=(0, 10**18 + 1))
    assert open_table(["t.parquet"], tmp_path, "t").facts() != first.facts()


def test_no_permission_is_an_error_with_the_file(tmp_path):
    parquet.write_table(TABLE, tmp_path / "t.parquet")
    (tmp_path / "t.parquet").chmod(0)
    if os.access(tmp_path / "t.parquet", os.R_OK):
        pytest.skip("root may read every file")
    with pytest.raises(PermissionError, match=r"nodes.t: no permission to read t.parquet"):
        open_table(["t.parquet"], tmp_path, "nodes.t")


def test_a_table_of_a_lake_is_not_read_as_files(tmp_path):
    write(tmp_path / "d", "parquet")
    (tmp_path / "d" / "_delta_log").mkdir()
    write(tmp_path / "i" / "data", "parquet")
    (tmp_path / "i" / "metadata").mkdir()
    (tmp_path / "i" / "metadata" / "v1.metadata.json").touch()
    for kind, addresses in {"delta": ("d", "d/*.parquet", "d/**"), "iceberg": ("i", "i/**/*.parquet")}.items():
        for address in addresses:
            with pytest.raises(
                ValueError, match=rf"t: {kind[0]} is a table of {kind.title()}; write {kind}:{kind[0]},"
            ):
                open_table([address], tmp_path, "t")


def test_without_pyarrow_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ImportError, match=r"nodes.t is read with the \"pyarrow\" package, .*pip install salientpp\[tables\]"
    ):
        open_table(["t.parquet"], tmp_path, "nodes.t")
