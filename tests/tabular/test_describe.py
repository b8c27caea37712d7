"""Laws of `salientpp describe`: it finds keys, references, times and splits that the tables have, and what it writes is a description."""

from __future__ import annotations

import datetime
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from table_packages import package

from salientpp.cli import main
from salientpp.datasets.tabular.addresses import name_of
from salientpp.datasets.tabular.description import read_description
from salientpp.datasets.tabular.profiles import plain_name, singular, stem_of
from salientpp.datasets.tabular.propose import propose_graph

pa, parquet, csv = package("pyarrow"), package("pyarrow.parquet"), package("pyarrow.csv")

RNG = np.random.default_rng(0)
N = 300
DAY = datetime.datetime(2024, 1, 1)


def write_shop(folder: Path) -> list[str]:
    """Writes customers in two files, products, orders as text, and the lines of orders, which have no key. Returns their addresses."""
    customers = pa.table(
        {
            "customer_id": [f"C{i}" for i in range(N)],
            "email": [f"{i}@example.org" for i in range(N)],
            "age": pa.array([None if i % 50 == 0 else 20 + i % 60 for i in range(N)], pa.int64()),
            "region": RNG.choice(["north", "south", "west"], N),
            "created": [DAY] * N,
            "churned": RNG.choice([True, False], N),
            "split": RNG.choice(["train", "val", "test"], N),
            "tags": [["a"]] * N,
        }
    )
    (folder / "customers").mkdir()
    parquet.write_table(customers.slice(0, 100), folder / "customers" / "1.parquet")
    parquet.write_table(customers.slice(100), folder / "customers" / "2.parquet")
    parents = pa.array([None] * 10 + list(range(40)), pa.int64())
    parquet.write_table(
        pa.table({"id": range(50), "price": RNG.random(50), "parent_id": parents}), folder / "products.parquet"
    )
    orders = {
        "OrderId": range(1000),
        "customerId": RNG.choice([f"C{i}" for i in range(N + 5)], 1000),
        "ordered_at": [DAY] * 1000,
        "shipped_at": [DAY] * 1000,
    }
    csv.write_csv(pa.table(orders), folder / "orders.csv")
    items = {
        "order_id": RNG.integers(0, 1000, 3000),
        "product_id": RNG.integers(0, 50, 3000),
        "quantity": RNG.integers(1, 5, 3000),
    }
    parquet.write_table(pa.table(items), folder / "order_items.parquet")
    return ["customers/*.parquet", "products.parquet", "orders.csv", "order_items.parquet"]


def test_a_shop_is_described(tmp_path, monkeypatch, capsys):
    addresses = write_shop(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    assert main(["describe", *addresses, "--out", "sub/shop.toml", "--json", "shop.json"]) == 0
    found = {table["name"]: table for table in json.loads((tmp_path / "shop.json").read_text())["tables"]}
    assert found["order"]["references"] == [{"column": "customerId", "to": "customer"}]
    assert found["order"]["columns"][0] | {"distinct": 0} == {
        "name": "OrderId",
        "type": "int64",
        "nulls": 0,
        "distinct": 0,
        "becomes": "key",
    }
    graph = read_description(tmp_path / "sub" / "shop.toml")
    nodes = {table.name: table for table in graph.nodes}
    assert {name: table.key for name, table in nodes.items()} == {
        "customer": ("customer_id",),
        "product": ("id",),
        "order": ("OrderId",),
    }
    customer = nodes["customer"]
    assert customer.tables == ("../customers/*.parquet",) and (tmp_path / "sub" / customer.tables[0]).parent.exists()
    assert (customer.time, customer.split, customer.label) == ("created", "split", None)
    assert set(customer.drop) == {"email", "tags"} and dict(customer.fill) == {"age": 0}
    edges = {table.name: table for table in graph.edges}
    assert {name: (table.source, table.target) for name, table in edges.items()} == {
        ("product", "parent_id", "product"): (("id",), ("parent_id",)),
        ("order", "customer_id", "customer"): (("OrderId",), ("customerId",)),
        ("order", "order_item", "product"): (("order_id",), ("product_id",)),
    }
    assert edges["product", "parent_id", "product"].null_keys == "drop"
    of_customer = edges["order", "customer_id", "customer"]
    assert (of_customer.dangling, of_customer.null_keys, of_customer.time) == ("drop", "error", "ordered_at")
    assert edges["order", "order_item", "product"].dangling == "error"
    text = (tmp_path / "sub" / "shop.toml").read_text()
    assert '# label = "churned"' in text and "or shipped_at" in nodes_block(text, "order")
    assert (
        "salientpp convert tables:sub/shop.toml shop" in text
        and "salientpp convert tables:sub/shop.toml" in capsys.readouterr().out
    )


def test_a_proposal_can_be_converted(tmp_path, monkeypatch, capsys):
    addresses = write_shop(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["describe", *addresses, "--out", "shop.toml"]) == 0
    assert main(["convert", "tables:shop.toml", "shop", "--json", "shop.json"]) == 0, capsys.readouterr().err
    graph = json.loads((tmp_path / "shop.json").read_text())
    sizes = {each["name"]: each["num_vertices"] for each in graph["node_types"]}
    assert sizes == {"customer": N, "product": 50, "order": 1000}
    edges = {tuple(each["name"]): each["num_edges"] for each in graph["edge_types"]}
    assert edges["order", "order_item", "product"] == 3000 and edges["product", "parent_id", "product"] == 40


def nodes_block(text: str, name: str) -> str:
    return text.partition(f"[nodes.{name}]")[2].partition("\n\n")[0]


def test_each_column_is_shown(tmp_path, monkeypatch, capsys):
    addresses = write_shop(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["describe", *addresses]) == 0
    shown = {words[0]: line for line in capsys.readouterr().out.splitlines() if (words := line.split())}
    for column, becomes in {
        "customer_id": "key",
        "email": "left out: text that differs in most rows",
        "age": "attribute",
        "region": "attribute, 3 categories",
        "churned": "attribute, or the label",
        "split": "splits",
        "tags": "left out: list<element: string> cannot become an attribute",
        "parent_id": "refers to product",
        "customerId": "refers to customer",
        "ordered_at": "time",
        "product_id": "refers to product",
    }.items():
        assert becomes in shown[column], shown[column]
    assert "--out FILE.toml" in shown["To"] and not list(tmp_path.glob("*.toml"))


def proposal(folder: Path, rows: int = 1000, **tables: Any) -> dict[str, Any]:
    for name, columns in tables.items():
        parquet.write_table(pa.table(columns), folder / f"{name}.parquet")
    found = propose_graph([f"{name}.parquet" for name in tables], folder, rows)
    return {table.profile.name: table for table in found}


def references(table: Any) -> dict[str, str]:
    return {each.column: each.to for each in table.references}


def test_numbers_are_no_references(tmp_path):
    tables = proposal(
        tmp_path,
        users={"id": range(100), "age": [i % 50 for i in range(100)]},
        items={"id": range(100), "count": [i % 9 for i in range(100)]},
    )
    assert all(not table.references for table in tables.values())


def test_a_column_that_fits_several_tables_is_left_open(tmp_path):
    tables = proposal(
        tmp_path,
        users={"id": range(100)},
        items={"id": range(100)},
        sales={"sale_id": range(90), "buyer_id": [i % 60 for i in range(90)]},
    )
    assert references(tables["sale"]) == {} and tables["sale"].unclear == {"buyer_id": ("user", "item")}
    assert tables["sale"].becomes(tables["sale"].profile.columns["buyer_id"]) == "may refer to user or item"


def test_roles_refer_by_their_last_word(tmp_path):
    people = [f"P{i}" for i in range(30)]
    tables = proposal(
        tmp_path,
        people={"person": people, "country": ["de", "fr", "it"] * 10},
        countries={"code": ["de", "fr", "it", "es"], "size": [1.0, 2.0, 3.0, 4.0]},
        messages={"message_id": range(50), "from_id": people[:25] * 2, "to_id": people[5:30] * 2},
    )
    assert tables["people"].key == ("person",) and tables["country"].key == ("code",)
    assert references(tables["message"]) == {"from_id": "people", "to_id": "people"}
    assert references(tables["people"]) == {"country": "country"}


def test_a_table_that_links_three_has_a_key_of_columns(tmp_path):
    tables = proposal(
        tmp_path,
        users={"id": range(20)},
        items={"id": range(20)},
        shops={"id": range(20)},
        sales={"user_id": [1, 1, 2], "item_id": [1, 2, 2], "shop_id": [3, 3, 3], "price": [1.0, 2.0, 3.0]},
    )
    assert tables["sale"].key == ("user_id", "item_id", "shop_id") and len(tables["sale"].references) == 3


def test_a_table_with_the_key_of_another_refers_to_it(tmp_path):
    tables = proposal(tmp_path, users={"user_id": range(20)}, profiles={"user_id": range(20), "height": [1.5] * 20})
    assert tables["user"].key == ("user_id",) and tables["profile"].key == ("user_id",)
    assert references(tables["profile"]) == {"user_id": "user"} and references(tables["user"]) == {}


def test_a_table_without_a_key_is_reported(tmp_path, monkeypatch, capsys):
    parquet.write_table(pa.table({"v": [1.0, 1.0], "w": ["x", "x"]}), tmp_path / "t.parquet")
    parquet.write_table(pa.table({"id": [1, 2]}), tmp_path / "u.parquet")
    monkeypatch.chdir(tmp_path)
    assert main(["describe", "t.parquet", "u.parquet", "--out", "g.toml"]) == 0
    assert "not used: no key was found" in capsys.readouterr().out
    assert "# t.parquet is not used: none of its columns differs in each row." in (tmp_path / "g.toml").read_text()
    assert [table.name for table in read_description(tmp_path / "g.toml").nodes] == ["u"]


def test_few_rows_of_each_file_are_read(tmp_path):
    for number in range(4):
        parquet.write_table(
            pa.table({"id": range(number * 1000, number * 1000 + 1000)}), tmp_path / f"t{number}.parquet"
        )
    (table,) = propose_graph(["*.parquet"], tmp_path, 100)
    assert table.profile.rows == 100 and table.profile.num_rows == 4000 and not table.profile.is_whole
    assert {int(value) // 1000 for value in table.profile.columns["id"].values.to_pylist()} == {0, 1, 2, 3}


def test_names_that_toml_cannot_write_plainly(tmp_path, monkeypatch):
    names = {
        "ü id": [f"a{i}" for i in range(5)],
        'q"uote\\': range(5),
        "new\nline": [1.0] * 5,
        "a.b,c": ["x", None] * 2 + ["x"],
    }
    parquet.write_table(pa.table(names), tmp_path / "odd – näme,s.parquet")
    parquet.write_table(pa.table(names), tmp_path / "odd.parquet")
    monkeypatch.chdir(tmp_path)
    assert main(["describe", "odd – näme,s.parquet", "odd.parquet", "--out", "g.toml"]) == 0
    graph = read_description(tmp_path / "g.toml")
    assert [table.tables for table in graph.nodes] == [("odd – näme,s.parquet",), ("odd.parquet",)]
    assert all(table.key in (("ü id",), ('q"uote\\',)) for table in graph.nodes)


@pytest.mark.parametrize(
    "words, error",
    [
        (["none.parquet"], "salientpp describe: none.parquet: none.parquet: no such file or folder"),
        (["t.parquet", "--rows", "0"], "salientpp describe: --rows must be >= 1, got 0"),
        (["t.txt"], "salientpp describe: the name of t.txt must end in"),
        ([], "arguments are required: addresses. Example: salientpp describe"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, words, error):
    parquet.write_table(pa.table({"id": [1, 2]}), tmp_path / "t.parquet")
    (tmp_path / "t.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["describe", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2 and error in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, stem",
    [
        ("customer_id", "customer"),
        ("CustomerID", "customer"),
        ("customerid", "customer"),
        ("id", ""),
        ("fk_order", "order"),
        ("categories_key", "category"),
        ("paid", "pa"),
    ],
)
def test_what_a_column_refers_to(name, stem):
    assert stem_of(name) == stem


@pytest.mark.parametrize(
    "address, name",
    [
        ("s3://shop/orders/*.parquet?region=x", "orders"),
        ("orders.csv.gz", "orders"),
        ("data/orders/year=*/**", "orders"),
        ("delta:s3://shop/orders", "orders"),
        ("iceberg:local/shop.orders", "orders"),
        ("iceberg:/data/orders/metadata/v3.metadata.json", "orders"),
        ("*.parquet", "table"),
    ],
)
def test_names_of_tables(address, name):
    assert name_of(address) == name


def test_names_are_plain_and_singular():
    assert [singular(name) for name in ("orders", "categories", "boxes", "status", "glass", "bus", "s")] == [
        "order",
        "category",
        "box",
        "status",
        "glass",
        "bus",
        "s",
    ]
    assert [plain_name(name) for name in ("OrderItem", "order item", "_x_", "–")] == [
        "order_item",
        "order_item",
        "x",
        "table",
    ]


UUIDS = [uuid.UUID(int=2**100 + 7919 * i) for i in range(60)]
FORMS = {
    "uuid": lambda found: pa.array([each.bytes for each in found], pa.uuid()),
    "16 bytes": lambda found: pa.array([each.bytes for each in found], pa.binary(16)),
    "bytes": lambda found: pa.array([each.bytes for each in found], pa.binary()),
    "text": lambda found: pa.array(list(map(str, found))),
    "categories": lambda found: pa.array(list(map(str, found))).dictionary_encode(),
}


@pytest.mark.parametrize(
    "form, of_keys", [*((form, form) for form in FORMS), ("uuid", "16 bytes"), ("16 bytes", "uuid")]
)
def test_uuids_are_keys_and_references(tmp_path, monkeypatch, form, of_keys):
    monkeypatch.chdir(tmp_path)
    parquet.write_table(pa.table({"age": [1] * 60, "customer_id": FORMS[of_keys](UUIDS)}), "customers.parquet")
    ends = {name: FORMS[form](RNG.choice(UUIDS, 200)) for name in ("from_customer", "to_customer_id")}
    parquet.write_table(pa.table({**ends, "n": [1] * 200}), "calls.parquet")
    customers, calls = propose_graph(["customers.parquet", "calls.parquet"], tmp_path, 1000)
    assert customers.key == ("customer_id",)
    assert [(each.column, each.to, each.missing) for each in calls.references] == [
        (name, "customer", 0) for name in ends
    ]
    assert main(["describe", "customers.parquet", "calls.parquet", "--out", "graph.toml"]) == 0
    assert main(["convert", "tables:graph.toml", "graph"]) == 0


def test_a_description_is_never_replaced(tmp_path, monkeypatch, capsys):
    addresses = write_shop(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.toml").write_text("mine")
    assert main(["describe", *addresses, "--out", "shop.toml"]) == 2
    assert "--out: shop.toml exists and is not replaced, since you may have changed it" in capsys.readouterr().err
    assert (tmp_path / "shop.toml").read_text() == "mine"
