"""Later rows are encoded as the rows of a graph were: in memory, and in a later conversion."""

from __future__ import annotations

import datetime
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import salientpp
from salientpp import cli
from salientpp.datasets import convert, load_dataset, load_encoding
from salientpp.store.directory.files import DatasetError

EPOCH = datetime.datetime(1970, 1, 1)


def moments(microseconds: int) -> st.SearchStrategy:
    return st.integers(-5, 10**7).map(lambda n: EPOCH + datetime.timedelta(microseconds=n * microseconds))


#: Arrow type -> values. A missing value is drawn too if the type has one, or fill replaces it.
COLUMNS = {
    pa.int8(): st.integers(-128, 127),
    pa.uint16(): st.integers(0, 2**16 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float16(): st.floats(width=16).map(np.float16),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.decimal128(9, 2): st.decimals(-1000, 1000, places=2),
    pa.bool_(): st.booleans(),
    pa.string(): st.sampled_from(["north", "south", "", "é"]),
    pa.dictionary(pa.int32(), pa.string()): st.sampled_from(["a", "b"]),
    pa.timestamp("s"): moments(10**6),
    pa.timestamp("us", "UTC"): moments(1),
    pa.timestamp("ns"): moments(1000),
    pa.date32(): st.dates(datetime.date(1960, 1, 1), datetime.date(2100, 1, 1)),
    pa.list_(pa.int16(), 2): st.lists(st.integers(-9, 9), min_size=2, max_size=2),
    pa.large_list(pa.float32()): st.lists(st.floats(width=32) | st.none(), min_size=3, max_size=3),
}
NUMBERS = [type_ for type_ in COLUMNS if pa.types.is_floating(type_) or pa.types.is_integer(type_)]
MISSING = [pa.float16(), pa.float32(), pa.float64(), pa.string(), pa.large_list(pa.float32())]
FILL = {
    pa.int8(): 7,
    pa.float16(): 0.25,
    pa.bool_(): True,
    pa.string(): "south",
    pa.timestamp("s"): EPOCH,
    pa.float64(): 0.5,
}


def finite(type_: pa.DataType, value: Any) -> bool:
    """Whether a value may be a part of x or tf."""
    values = value if isinstance(value, list) else [value]
    return all(
        each is None or not isinstance(each, (float, np.floating)) or not abs(float(each)) > 3e38 for each in values
    )


@st.composite
def tables(draw) -> tuple[pa.Table, dict[str, Any]]:
    """Returns a table and its entry of the description."""
    size = draw(st.integers(1, 12))
    in_frame = draw(st.booleans())
    described: dict[str, Any] = {"key": "id", "frame": in_frame, "fill": {}}
    arrays, joined = {"id": pa.array(range(size))}, []
    types = draw(st.lists(st.sampled_from(list(COLUMNS)), max_size=6))
    for number, type_ in enumerate(types):
        name = f"c{number}"
        may_miss = type_ in MISSING
        if type_ in FILL and draw(st.booleans()):
            described["fill"][name], may_miss = FILL[type_], True
        values = draw(
            st.lists(COLUMNS[type_] | st.none() if may_miss else COLUMNS[type_], min_size=size, max_size=size)
        )
        use = draw(st.sampled_from(["x", "attribute", "attribute"]))
        if (type_ in NUMBERS and use == "x") or in_frame:
            values = [value if finite(type_, value) else None for value in values]
            values = values if may_miss else [0 if value is None else value for value in values]
        if type_ in NUMBERS and use == "x":
            joined.append(name)
        arrays[name] = pa.array(values).cast(type_) if pa.types.is_dictionary(type_) else pa.array(values, type_)
    described["x"] = joined
    if draw(st.booleans()):
        described["label"] = "label"
        labels = draw(st.sampled_from([(pa.int8(), [0, 1]), (pa.string(), ["x", "y"]), (pa.bool_(), [True])]))
        values = st.sampled_from([*labels[1], None])
        arrays["label"] = pa.array(draw(st.lists(values, min_size=size, max_size=size)), labels[0])
    if draw(st.booleans()):
        described["split"] = "split"
        words = ["train", "val", "validation", "test", None]
        arrays["split"] = pa.array(draw(st.lists(st.sampled_from(words), min_size=size, max_size=size)), pa.string())
    return pa.table(arrays), described


def tensors_of(value: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of an attribute by name; a table has several."""
    if isinstance(value, torch.Tensor):
        return {"": value}
    return {
        str(stype): each if isinstance(each, torch.Tensor) else each.values for stype, each in value.feat_dict.items()
    }


def check_same(ours: Any, theirs: Any) -> None:
    """Compares bits."""
    ours, theirs = tensors_of(ours), tensors_of(theirs)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert (value.dtype, value.shape) == (theirs[name].dtype, theirs[name].shape)
        bits, others = (each.contiguous().flatten().view(torch.uint8) for each in (value, theirs[name]))
        assert torch.equal(bits, others)


def attributes_of(store: Any) -> dict[str, Any]:
    return {name: value for name, value in store.items() if name not in ("num_nodes", "key_table", *MASKS)}


MASKS = ("train_mask", "val_mask", "test_mask")


@pytest.mark.filterwarnings("ignore:.*no row has 'train'")
@settings(max_examples=min(150, settings.default.max_examples))
@given(drawn=tables(), data=st.data())
def test_rows_of_the_tables_give_the_attributes_of_the_graph_bit_for_bit(tmp_path, drawn, data):
    pytest.importorskip("torch_frame", reason="PyTorch Frame is not installed")
    table, described = drawn
    shutil.rmtree(tmp_path / "v", ignore_errors=True)
    floats = [n for n in table.column_names if table.schema.field(n).type == pa.float64()]
    floats = [] if described["frame"] else [name for name in floats if name not in described["x"]]
    dtype = data.draw(st.fixed_dictionaries({}, optional={name: st.just("bf16") for name in floats}))
    convert({"nodes": {"v": {**described, "table": table}}}, tmp_path / "v", dtype=dtype)
    graph = load_dataset(f"converted:{tmp_path / 'v'}")["v"]
    keys = graph.key_table.rows(range(graph.num_nodes)).column("id")
    rows = table.take(keys)
    found = load_encoding(tmp_path / "v").encode(rows, "v")
    expected = attributes_of(graph)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        check_same(found[name], value)


# --- a shop -----------------------------------------------------------------------------------------------

CUSTOMERS = pa.table(
    {
        "id": ["a", "b", "c", "d"],
        "age": pa.array([20.0, 40.0, 60.0, None]),
        "visits": pa.array([1, None, 3, 4], pa.int32()),
        "region": ["north", "south", None, "west"],
        "since": pa.array([EPOCH + datetime.timedelta(days=day) for day in range(4)], pa.timestamp("ms")),
        "pair": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.int16())),
        "kind": ["x", "y", "x", None],
        "split": ["train", "train", "val", "test"],
    }
)
ORDERS = pa.table(
    {
        "customer": ["a", "b", "b"],
        "other": ["b", "c", "d"],
        "amount": pa.array([1.5, 2.5, 3.5], pa.float32()),
        "when": pa.array([EPOCH + datetime.timedelta(days=day) for day in range(3)]),
    }
)


def shop(customers: Any = CUSTOMERS, orders: Any = ORDERS, **more: Any) -> dict[str, Any]:
    return {
        "nodes": {
            "customer": {
                "table": customers,
                "key": "id",
                "label": "kind",
                "split": "split",
                "x": ["age"],
                "fill": {"visits": 9},
                **more,
            }
        },
        "edges": {
            "customer,pays,customer": {"table": orders, "source": "customer", "target": "other", "time": "when"},
        },
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return convert(shop(), tmp_path_factory.mktemp("encoding") / "shop")


def later(**changes: Any) -> pa.Table:
    """One customer of a later day."""
    columns = {
        "age": [50.0],
        "visits": pa.array([2], pa.int32()),
        "region": ["south"],
        "since": pa.array([EPOCH + datetime.timedelta(days=9)], pa.timestamp("ms")),
        "pair": pa.array([[9, 9]], pa.list_(pa.int16())),
        "kind": ["y"],
        **changes,
    }
    return pa.table({name: column for name, column in columns.items() if column is not None})


def test_a_later_row_has_the_categories_mean_unit_and_fill_of_the_graph(root):
    found = load_encoding(root).encode(later(visits=pa.array([None], pa.int32())), "customer")
    assert {name: value.tolist() for name, value in found.items()} == {
        "pair": [[9, 9]],
        "region": [1],
        "since": [9 * 86_400],
        "visits": [9],
        "x": [[2.0]],  # the training rows have the mean 30 and the deviation 10
        "y": [1],
    }
    assert found["x"].dtype == torch.float32 and found["visits"].dtype == torch.int32


def test_new_texts_are_no_category_and_a_label_may_be_missing(root):
    found = load_encoding(root).encode(later(region=["east"], kind=None), "customer")
    assert found["region"].tolist() == [-1] and "y" not in found
    assert load_encoding(root).encode(later(kind=["z"]), "customer")["y"].tolist() == [-1]


def test_a_missing_label_is_not_taken_for_a_class_of_the_graph(tmp_path):
    def described(labels: list) -> dict[str, Any]:
        table = pa.table({"id": range(len(labels)), "y": pa.array(labels, pa.int64())})
        return {"nodes": {"v": {"table": table, "key": "id", "label": "y"}}}

    later = described([None, 1])
    first = convert(described([-1, 1]), tmp_path / "first")
    for use in (
        lambda: load_encoding(first).encode(later["nodes"]["v"]["table"], "v"),
        lambda: convert(later, tmp_path / "later", encode_as=first),
    ):
        with pytest.raises(ValueError, match="'y' has negative labels and rows without one.*0"):
            use()
    other = convert(described([0, 1]), tmp_path / "other")
    assert load_encoding(other).encode(later["nodes"]["v"]["table"], "v")["y"].tolist() == [-1, 1]


def test_columns_without_values_have_missing_ones(root):
    found = load_encoding(root).encode(later(age=[None], region=[None]), "customer")
    assert found["region"].tolist() == [-1] and found["x"].tolist() == [[0.0]]


def test_other_objects_other_integers_and_further_columns_are_accepted(root, tmp_path):
    encoding = load_encoding(root)
    expected = encoding.encode(later(), "customer")
    frame = later(id=["new"], further=[1]).to_pandas()
    frame["visits"] = frame["visits"].astype(float)  # as pandas does if a value is missing
    stream = pa.RecordBatchReader.from_batches(later().schema, later().to_batches())
    pq.write_table(later(), tmp_path / "later.parquet")
    for rows in (frame, stream, str(tmp_path / "later.parquet"), later(visits=pa.array([2], pa.int64()))):
        found = encoding.encode(rows, "customer")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            check_same(found[name], value)


def test_categories_of_polars_are_texts(tmp_path):
    polars = pytest.importorskip("polars", reason="polars is not installed")
    words = ["b", "a", None, "b"]
    types = [polars.Categorical, polars.Enum(["b", "a"]), polars.String]
    series = [polars.Series(f"c{number}", words, dtype=type_) for number, type_ in enumerate(types)]
    frame = polars.DataFrame([polars.Series("id", ["p", "q", "r", "s"], dtype=polars.Categorical), *series])
    root = convert({"nodes": {"v": {"table": frame, "key": "id"}}}, tmp_path / "v")
    graph, found = load_dataset(f"converted:{root}")["v"], load_encoding(root).encode(frame, "v")
    keys = graph.key_table.rows(range(4)).column("id").to_pylist()
    for column in ("c0", "c1", "c2"):
        assert found[column].tolist() == [1, 0, -1, 1]
        assert dict(zip(keys, graph[column].tolist())) == dict(zip("pqrs", [1, 0, -1, 1]))


def test_no_rows_have_no_rows(root):
    found = load_encoding(root).encode(later().slice(0, 0), "customer")
    assert found["x"].shape == (0, 1) and found["pair"].shape == (0, 2)
    assert found["visits"].dtype == torch.int32


def test_a_dataset_directory_has_the_encoding_of_its_graph(root, tmp_path):
    data = load_dataset(f"converted:{root}")
    part = salientpp.partition(data, 2, tmp_path / "parts", [2], 8, seeds=("customer", "train"), method="random")
    found = load_encoding(tmp_path / "parts").encode(CUSTOMERS, "customer")
    ids = part.ids_of(CUSTOMERS["id"].to_pylist(), "customer")
    for name in ("region", "pair", "since", "visits", "x", "y"):
        check_same(found[name], part.take(name, ids, "customer"))
    assert load_encoding(tmp_path / "parts").digest == load_encoding(root).digest


def test_rows_of_edges_are_encoded(root):
    graph = load_dataset(f"converted:{root}")["customer", "pays", "customer"]
    for entry in (("customer", "pays", "customer"), "customer,pays,customer"):
        found = load_encoding(root).encode(ORDERS, entry)
        assert sorted(zip(*(found[name].tolist() for name in ("amount", "time")))) == sorted(
            zip(*(graph[name].tolist() for name in ("amount", "time")))
        )


@pytest.mark.parametrize(
    "rows, entry, text",
    [
        (
            later(),
            "custmer",
            r"was not made of nodes.custmer; it has edges.*, nodes.customer. Did you mean nodes.customer",
        ),
        (later(), 3, "entry must be a type of vertices or a relation, got 3"),
        (later(age=None), "customer", r"nodes.customer: the rows must have the column 'age', as the tables of .* have"),
        (later(age=["50"]), "customer", "column 'age' must hold double, as in the tables of .*, got string; cast it"),
        (later(region=[1]), "customer", "column 'region' must hold string, as in the tables of .*, got int64; cast it"),
        (later(since=[5]), "customer", "column 'since' must hold timestamps or dates, .*, got int64; cast it"),
        (later(visits=[True]), "customer", "column 'visits' must hold int32, .*, got bool; cast it"),
        (later(visits=[2**40]), "customer", "row 0: column 'visits' must fit int32 .*1099511627776"),
        (later(visits=[1.5]), "customer", "column 'visits' must fit int32 .*1.5.* was truncated"),
        (later(age=[math.inf]), "customer", r"'age' must be finite to become part of x, got infinity.*row 0\)"),
        (later(pair=pa.array([[1, 2, 3]], pa.list_(pa.int16()))), "customer", "must have 2 numbers in each row, got 3"),
        (later(pair=pa.array([None], pa.list_(pa.int16()))), "customer", r"'pair' of .* has no value in a row"),
        (later(pair=[[0.5, 1.5]]), "customer", "column 'pair' must fit large_list<item: int16> .*0.5"),
        (later(since=[EPOCH + datetime.timedelta(seconds=0.5)]), "customer", r"'since' must be whole seconds.*row 0\)"),
        (later(since=pa.nulls(1)), "customer", "'since' of int64 has no value in a row"),
        (7, "customer", "a table must be an address or an object with __arrow_c_stream__, got a int"),
    ],
)
def test_rows_that_cannot_be_encoded_are_refused(root, rows, entry, text):
    with pytest.raises(ValueError, match=text):
        load_encoding(root).encode(rows, entry)


@pytest.mark.parametrize("value", [1e40, -1e100])
def test_values_that_would_be_infinite_in_x_are_refused(tmp_path, value):
    table = pa.table({"id": range(3), "a": [0.0, 1.0, value], "split": ["train", "train", "test"]})
    described = {"nodes": {"v": {"table": table, "key": "id", "split": "split", "x": ["a"]}}}
    text = "'a' must be near the mean 0.5 and deviation 0.5 of x, got .*infinite in float32.*"
    with pytest.raises(ValueError, match=rf"{text}\(v id=2\)"):
        convert(described, tmp_path / "v")
    described["nodes"]["v"]["table"] = table.slice(0, 2)
    encoding = load_encoding(convert(described, tmp_path / "v"))
    with pytest.raises(ValueError, match=rf"{text}row 2\)"):
        encoding.encode(table, "v")
    far = encoding.encode(pa.table({"a": [1e37, -1e37]}), "v")["x"]
    assert bool(far.isfinite().all())


def test_a_double_is_no_float(root):
    orders = ORDERS.set_column(2, "amount", pa.array([1.5, 2.5, 3.5]))
    with pytest.raises(ValueError, match="column 'amount' must hold float, as in the tables of .*, got double; cast"):
        load_encoding(root).encode(orders, ("customer", "pays", "customer"))


def test_an_error_names_the_row_of_a_later_batch(root):
    batches = [later().to_batches()[0], later(age=[-math.inf]).to_batches()[0]]
    with pytest.raises(ValueError, match=r"got infinity.*\(pyarrow.Table, row 1\)"):
        load_encoding(root).encode(pa.Table.from_batches(batches), "customer")


def test_graphs_of_other_sources_have_no_encoding(tmp_path):
    np.save(tmp_path / "edges.npy", np.zeros((2, 3), dtype=np.int64))
    graph = convert(f"edges:{tmp_path / 'edges.npy'}", tmp_path / "graph")
    with pytest.raises(ValueError, match="was not made of tables with keys"):
        load_encoding(graph)
    with pytest.raises(ValueError, match="root must be a directory, got 3"):
        load_encoding(3)
    with pytest.raises((DatasetError, OSError), match="manifest.json"):
        load_encoding(tmp_path / "nothing")


def test_values_that_a_format_cannot_hold_are_refused(tmp_path):
    table = pa.table({"id": [1, 2], "a": [1.0, 2.0]})
    root = convert({"nodes": {"v": {"table": table, "key": "id"}}}, tmp_path / "v", dtype={"a": "fp16"}, finite=True)
    encoding = load_encoding(root)
    assert encoding.encode(pa.table({"a": [0.1]}), "v")["a"].dtype == torch.float16
    with pytest.raises(ValueError, match="row 0: a cannot be stored as fp16, since 1e.06 is too large"):
        encoding.encode(pa.table({"a": [1e6]}), "v")
    with pytest.raises(ValueError, match="row 0: a must be finite, got nan"):
        encoding.encode(pa.table({"a": [math.nan]}), "v")


# --- later conversions ------------------------------------------------------------------------------------

NEW = pa.table(
    {
        "id": ["b", "e", "f"],
        "age": [40.0, 80.0, None],
        "visits": pa.array([1, None, 3], pa.int32()),
        "region": ["south", "east", None],
        "since": pa.array([EPOCH + datetime.timedelta(days=day) for day in range(3)], pa.timestamp("ms")),
        "pair": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16())),
        "kind": ["z", "y", "x"],
        "split": ["val", "test", "dev"],
    }
)
NEW_ORDERS = ORDERS.set_column(0, "customer", pa.array(["b", "e", "e"])).set_column(1, "other", pa.array(["f"] * 3))


def test_a_later_snapshot_is_encoded_as_the_first(root, tmp_path):
    with pytest.warns(UserWarning, match=r"nodes.customer: 1 row has other words in the column 'split'.*'dev' \(1\)"):
        convert(shop(NEW, NEW_ORDERS), tmp_path / "later", encode_as=root)
    graph = load_dataset(f"converted:{tmp_path / 'later'}")["customer"]
    rows = NEW.take([NEW["id"].to_pylist().index(key) for key in graph.key_table.rows(range(3))["id"].to_pylist()])
    first = load_encoding(root)
    expected = first.encode(rows, "customer")
    assert expected.keys() == attributes_of(graph).keys()
    for name, value in expected.items():
        check_same(graph[name], value)
    assert graph.x[rows["id"].to_pylist().index("e")].tolist() == [5.0]
    again = load_encoding(tmp_path / "later")
    for title, facts in first.origin["tables"].items():
        for part in ("columns", "x"):
            assert again.origin["tables"][title].get(part) == facts.get(part)
    assert again.origin["tables"]["nodes.customer"]["split"]["rows"] == {"train": 0, "val": 1, "test": 1}


def test_the_same_tables_give_the_same_arrays_with_their_own_encoding(root, tmp_path):
    convert(shop(), tmp_path / "again", encode_as=root)
    for path in root.iterdir():
        if path.name != "manifest.json":
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_the_command_takes_an_encoding(root, tmp_path, capsys):
    pq.write_table(NEW.drop_columns(["split"]), tmp_path / "customers.parquet")
    toml = tmp_path / "new.toml"
    entry = (
        '[nodes.customer]\ntable = "customers.parquet"\nkey = "id"\nlabel = "kind"\nx = ["age"]\nfill = {visits = 9}\n'
    )
    toml.write_text(entry)
    assert cli.main(["convert", f"tables:{toml}", str(tmp_path / "new"), "--encode-as", str(root)]) == 2
    assert "must have the attributes of" in capsys.readouterr().err
    pq.write_table(NEW.set_column(7, "split", pa.array(["test"] * 3)), tmp_path / "customers.parquet")
    toml.write_text(f'{entry}split = "split"\n')
    assert cli.main(["convert", f"tables:{toml}", str(tmp_path / "new"), "--encode-as", str(root)]) == 0
    assert load_dataset(f"converted:{tmp_path / 'new'}")["customer"].num_nodes == 3


@pytest.mark.parametrize(
    "described, text",
    [
        (
            shop(NEW.append_column("more", [[1, 2, 3]])),
            r"must have the attributes of .*, but 'more' has more here and none there",
        ),
        (shop(NEW.drop_columns(["region"])), r"'region' has none here and region there"),
        (shop(NEW, x=["age", "visits"], fill={}), "'visits' has none here and visits there"),
        (shop(NEW, fill={"visits": 8}), "must have the values of fill of .*, but 'visits' has 8 here and 9 there"),
        (shop(NEW, label=None, time="since"), "must have the attributes of .*, but 'kind' has kind here and y there"),
        (
            shop(NEW.set_column(1, "age", pa.array(["a"] * 3)), x=[]),
            "must have the attributes of .*, but 'age' has age here and none there",
        ),
        (shop(NEW.set_column(3, "region", pa.array([1] * 3))), "column 'region' must hold string, .*, got int64"),
        (
            shop(NEW.set_column(4, "since", pa.array([EPOCH + datetime.timedelta(seconds=0.5)] * 3)), NEW_ORDERS),
            "'since' must be whole seconds, as the times of the graph are, got a fraction of a second",
        ),
        (
            {"nodes": {"product": {"table": NEW, "key": "id"}}},
            r"was not made of nodes.product; it has edges.*, nodes.customer",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tables_that_do_not_fit_an_encoding_are_refused(root, tmp_path, described, text):
    with pytest.raises(ValueError, match=text):
        convert(described, tmp_path / "later", encode_as=root)


def test_staged_work_of_another_encoding_is_not_used(root, tmp_path, monkeypatch):
    tables = shop(CUSTOMERS.set_column(1, "age", pa.array([0.0, 2.0, 4.0, 6.0])))
    other = convert(tables, tmp_path / "other")
    name = "salientpp.datasets.tabular.open.write_whole"
    with monkeypatch.context() as patch:
        patch.setattr(name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(shop(), tmp_path / "later", encode_as=other, report=tmp_path / "report.json")
    convert(shop(), tmp_path / "later", encode_as=root)
    x = load_dataset(f"converted:{root}")["customer"].x
    assert torch.equal(load_dataset(f"converted:{tmp_path / 'later'}")["customer"].x, x)


def test_a_repeated_conversion_compares_the_encoding(root, tmp_path):
    tables = {"nodes": {"v": {"table": pa.table({"id": [1, 2], "a": ["x", "y"]}), "key": "id"}}}
    first = convert(tables, tmp_path / "first")
    other = convert({"nodes": {"v": {"table": pa.table({"id": [1], "a": ["y"]}), "key": "id"}}}, tmp_path / "other")
    later = convert(tables, tmp_path / "later", encode_as=other)
    assert sorted(load_dataset(f"converted:{later}")["v"].a.tolist()) == [-1, 0]
    convert(tables, later, encode_as=other)  # does nothing
    for encode_as in (None, first):
        with pytest.raises(ValueError, match="differs from the one that wrote it: encode_as was"):
            convert(tables, later, encode_as=encode_as)


def test_a_graph_that_has_the_encoding_is_not_replaced(tmp_path):
    tables = {"nodes": {"v": {"table": pa.table({"id": [1, 2], "a": ["x", "y"]}), "key": "id"}}}
    root = convert(tables, tmp_path / "v")
    (tmp_path / "link").symlink_to(root)
    for encode_as in (root, f"converted:{root}", tmp_path / "link"):
        with pytest.raises(ValueError, match=r"encode_as must be another graph than .*v, which is written"):
            convert(tables, root, encode_as=encode_as, overwrite=True)


def test_other_sources_take_no_encoding(root, tmp_path):
    np.save(tmp_path / "edges.npy", np.zeros((2, 3), dtype=np.int64))
    with pytest.raises(ValueError, match="encode_as is only for tables with keys"):
        convert(f"edges:{tmp_path / 'edges.npy'}", tmp_path / "graph", encode_as=root)


# --- TensorFrames -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def framed(tmp_path_factory) -> tuple[pd.DataFrame, Path]:
    pytest.importorskip("torch_frame", reason="PyTorch Frame is not installed")
    rng, size = np.random.default_rng(0), 400
    frame = pd.DataFrame(
        {
            "id": range(size),
            "price": np.where(rng.random(size) < 0.1, np.nan, rng.normal(3, 2, size)),
            "count": rng.integers(-5, 9, size),
            "region": rng.choice(["north", "south", "west", None], size),
            "open": rng.random(size) < 0.3,
            "at": pd.Timestamp("1965-03-01") + pd.to_timedelta(rng.integers(0, 2 * 10**9, size), unit="s"),
            "vector": list(rng.random((size, 3), np.float32)),
            "empty": np.full(size, np.nan),
            "split": rng.choice(["train", "val", "test"], size),
        }
    )
    frame.loc[5, "at"], frame.loc[6, "vector"] = pd.NaT, None
    described = {"nodes": {"shop": {"table": frame, "key": "id", "split": "split", "frame": True}}}
    return frame, convert(described, tmp_path_factory.mktemp("framed") / "shop")


def in_order(frame: pd.DataFrame, store: Any) -> pd.DataFrame:
    return frame.loc[store.key_table.rows(range(store.num_nodes)).column("id").to_pylist()].reset_index(drop=True)


def test_a_frame_equals_that_of_pytorch_frame(framed):
    from torch_frame import stype
    from torch_frame.data import Dataset

    frame, root = framed
    store = load_dataset(f"converted:{root}")["shop"]
    rows = in_order(frame, store)
    stypes = {
        "price": stype.numerical,
        "count": stype.numerical,
        "empty": stype.numerical,
        "at": stype.timestamp,
        "vector": stype.embedding,
    }
    nothing = np.full(3, np.nan, np.float32)
    vectors = [nothing if each is None else each for each in rows["vector"]]
    expected = Dataset(rows.assign(vector=vectors)[list(stypes)], stypes).materialize().tensor_frame
    for each, tensor in expected.feat_dict.items():
        found, names = tensors_of(store.tf)[str(each)], store.tf.col_names_dict[each]
        assert sorted(names) == sorted(expected.col_names_dict[each])
        if each == stype.embedding:
            assert torch.equal(found.nan_to_num(-9), tensor.values.nan_to_num(-9))
            continue
        order = [names.index(name) for name in expected.col_names_dict[each]]
        assert torch.equal(found[:, order].nan_to_num(-9), tensor.nan_to_num(-9))
    names = store.tf.col_names_dict[stype.categorical]
    categories = store.tf.feat_dict[stype.categorical]
    assert names == ["open", "region"]
    regions = ["north", "south", "west"]
    assert categories[:, 1].tolist() == [regions.index(value) if value in regions else -1 for value in rows["region"]]
    assert categories[:, 0].tolist() == rows["open"].astype(int).tolist()
    assert sorted(store.keys()) == ["key_table", "num_nodes", "test_mask", "tf", "train_mask", "val_mask"]


def test_statistics_equal_those_that_pytorch_frame_computes_on_the_training_split(framed):
    from torch_frame import stype
    from torch_frame.data.stats import StatType, compute_col_stats

    frame, root = framed
    stats = load_encoding(root).col_stats("shop")
    training = frame[frame["split"] == "train"].reset_index(drop=True)
    for column in ("price", "count", "empty"):
        expected = compute_col_stats(training[column], stype.numerical)
        assert stats[column].keys() == expected.keys()
        for each, value in expected.items():
            assert stats[column][each] == pytest.approx(value, nan_ok=True)
    for each, value in compute_col_stats(training["at"], stype.timestamp).items():
        assert list(stats["at"][each]) == list(value)
    for column in ("region", "open"):
        (expected,) = compute_col_stats(training[column], stype.categorical).values()
        assert sorted(zip(*stats[column][StatType.COUNT])) == sorted(zip(*expected))
        assert stats[column][StatType.COUNT][0] == sorted(expected[0])
    assert stats["vector"] == {StatType.EMB_DIM: 3}


def test_encoders_of_pytorch_frame_take_frame_and_statistics(framed):
    from torch_frame import stype
    from torch_frame.nn import (
        EmbeddingEncoder,
        LinearBucketEncoder,
        LinearEmbeddingEncoder,
        StypeWiseFeatureEncoder,
        TimestampEncoder,
    )

    frame, root = framed
    frame = frame.drop(columns="empty")
    encoding = load_encoding(root)
    tf = encoding.encode(in_order(frame.assign(empty=0.5), load_dataset(f"converted:{root}")["shop"]), "shop")["tf"]
    stats = encoding.col_stats("shop")
    stats["empty"] = stats["count"]
    encoder = StypeWiseFeatureEncoder(
        8,
        stats,
        tf.col_names_dict,
        {
            stype.numerical: LinearBucketEncoder(),
            stype.categorical: EmbeddingEncoder(),
            stype.timestamp: TimestampEncoder(),
            stype.embedding: LinearEmbeddingEncoder(),
        },
    )
    out, names = encoder(tf)
    assert out.shape == (len(tf), 7, 8) and len(names) == 7


def test_a_frame_is_partitioned_and_loaded(framed, tmp_path):
    frame, root = framed
    data = load_dataset(f"converted:{root}")
    data["shop", "near", "shop"].edge_index = torch.stack([torch.arange(399), torch.arange(1, 400)])
    part = salientpp.partition(data, 1, tmp_path / "parts", [2], 8, seeds=("shop", "train"))
    loader = salientpp.NeighborLoader(part, [2], ("shop", "train"), batch_size=8)
    batch = next(iter(loader))["shop"]
    ids = [each["id"] for each in part.keys_of(batch.n_id, "shop").to_pylist()]
    expected = load_encoding(root).encode(frame.loc[ids], "shop")["tf"]
    check_same(batch.tf, expected)


def test_a_later_snapshot_has_the_frame_of_the_first(framed, tmp_path):
    frame, root = framed
    described = {"nodes": {"shop": {"table": frame.iloc[:50], "key": "id", "split": "split", "frame": True}}}
    convert(described, tmp_path / "later", encode_as=root)
    store = load_dataset(f"converted:{tmp_path / 'later'}")["shop"]
    check_same(store.tf, load_encoding(root).encode(in_order(frame, store), "shop")["tf"])
    first, again = load_encoding(root).col_stats("shop"), load_encoding(tmp_path / "later").col_stats("shop")
    assert str(first) == str(again)


@pytest.mark.parametrize(
    "values, text",
    [
        ([1.0, 1e39], r"'a' must be at most 3.4.*e\+38 in size to become part of tf, got 1e\+39.*v id=2"),
        ([1.0, math.inf], "'a' must be finite to become part of tf, got infinity.*v id=2"),
        ([[1.0, 2.0], [3.0]], "'a' must have . numbers in each row"),
        ([[1.0, 2.0], [3.0, 1e39]], "'a' has a list with a value above 3.4.* in size"),
    ],
)
def test_values_that_a_frame_cannot_hold_are_refused(tmp_path, values, text):
    table = pa.table({"id": [1, 2], "a": values})
    with pytest.raises(ValueError, match=text):
        convert({"nodes": {"v": {"table": table, "key": "id", "frame": True}}}, tmp_path / "v")


def test_without_pytorch_frame_the_error_says_what_to_install(framed, tmp_path, monkeypatch):
    frame, root = framed
    monkeypatch.setitem(sys.modules, "torch_frame", None)
    described = {"nodes": {"shop": {"table": frame.iloc[:9], "key": "id", "drop": ["split"], "frame": True}}}
    convert(described, tmp_path / "shop")  # converting needs tensors only
    for use in (
        lambda: load_dataset(f"converted:{tmp_path / 'shop'}"),
        lambda: load_encoding(root).encode(frame, "shop"),
        lambda: load_encoding(root).col_stats("shop"),
    ):
        with pytest.raises(ImportError, match=re.escape("run `pip install 'salientpp[relational]'`")):
            use()


def test_statistics_need_no_pyarrow(framed, monkeypatch):
    _, root = framed
    encoding = load_encoding(root)
    expected = str(encoding.col_stats("shop"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert str(encoding.col_stats("shop")) == expected


def test_types_without_a_frame_have_no_statistics(root):
    with pytest.raises(ValueError, match="nodes.customer of .* has no TensorFrame; set frame = true"):
        load_encoding(root).col_stats("customer")


def test_frame_is_true_or_false(tmp_path):
    with pytest.raises(ValueError, match=r"\[nodes.v\]: frame must be true or false, got 'yes'"):
        convert({"nodes": {"v": {"table": pa.table({"id": [1]}), "key": "id", "frame": "yes"}}}, tmp_path / "v")


@settings(max_examples=min(50, settings.default.max_examples))
@given(
    pieces=st.lists(st.lists(st.floats(allow_nan=False) | st.integers(-3, 3).map(float), max_size=9), max_size=5),
    data=st.data(),
)
def test_values_at_ranks_equal_those_after_a_sort(pieces, data):
    from salientpp.datasets.tabular.frame_columns import values_at_ranks

    for dtype in (np.float64, np.int64):
        arrays = [np.clip(np.array(each), -1e18, 1e18).astype(dtype) + dtype(0) for each in pieces]
        whole = np.sort(np.concatenate([np.empty(0, dtype), *arrays]))
        if not whole.size:
            return
        ranks = data.draw(st.lists(st.integers(0, whole.size - 1), min_size=1))
        assert values_at_ranks(lambda: iter(arrays), ranks) == {rank: whole[rank] for rank in ranks}


def test_the_report_has_no_lists_of_categories(framed, tmp_path):
    frame, _ = framed
    described = {"nodes": {"shop": {"table": frame, "key": "id", "split": "split", "frame": True}}}
    convert(described, tmp_path / "shop", report=tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())["nodes"]["shop"]
    columns = {each["column"]: each for each in report["tf"]}
    assert columns["region"] == {"column": "region", "stype": "categorical", "kind": "category", "categories": 3}
    assert report["split"]["rows"]["train"] == (frame["split"] == "train").sum()
