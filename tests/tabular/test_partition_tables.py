"""Laws of ``salientpp partition tables:``: it writes what ``convert`` and ``partition`` write, whatever interrupts it, and knows what has changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from directories import contents, edit_manifest, names_in
from forked_python import python

import salientpp
from salientpp import cli
from salientpp.datasets import convert, load_dataset, partition_tables
from salientpp.datasets import parts_of_tables as made
from salientpp.datasets.tabular import staging
from salientpp.datasets.tabular.description import read_description
from salientpp.store.directory import writer
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.journal import Journal
from salientpp.store.directory.origin import table_origin
from salientpp.store.directory.task import as_given

ROOT = Path(__file__).parents[2]
FANOUTS, BATCH = [3, 2], 8
OPTIONS = {"method": "random", "seeds": ("customer", "train"), "replicate": []}

DESCRIPTION = """
[nodes.customer]
table = "customers-*.parquet"
key = "id"
split = "split"
x = ["age"]

[nodes.product]
table = "products.csv"
key = "sku"

[edges."customer,bought,product"]
table = "orders.parquet"
source = "customer"
target = "product"
dangling = "drop"
"""


def write_shop(folder: Path) -> str:
    """Writes tables and their description. Returns the source."""
    folder.mkdir(exist_ok=True)
    for part in range(2):
        ids = range(30 * part, 30 * part + 30)
        columns = {"id": [f"C{i}" for i in ids], "age": [i % 50 for i in ids], "region": ["nw"[i % 2] for i in ids]}
        columns["split"] = [["train", "val", "test"][i % 3] for i in ids]
        pq.write_table(pa.table(columns), folder / f"customers-{part}.parquet")
    (folder / "products.csv").write_text("sku,price\n" + "".join(f"P{i},{i / 4}\n" for i in range(20)))
    ends = {"customer": [f"C{i * 7 % 61}" for i in range(200)], "product": [f"P{i * 3 % 20}" for i in range(200)]}
    pq.write_table(pa.table({**ends, "n": range(200)}), folder / "orders.parquet")
    (folder / "shop.toml").write_text(DESCRIPTION)
    return f"tables:{folder / 'shop.toml'}"


def partitioned(source, root: Path, num_parts: int = 2, **options) -> salientpp.PartitionedGraph:
    return partition_tables(source, num_parts, root, FANOUTS, BATCH, **{**OPTIONS, **options})


@pytest.fixture
def source(tmp_path) -> str:
    return write_shop(tmp_path / "shop")


@pytest.mark.parametrize("options", [{}, {"topology": "parts", "order": "original", "memory": "8GB"}])
def test_one_command_writes_the_bytes_of_two(source, tmp_path, options):
    part = partitioned(source, tmp_path / "one", report=tmp_path / "report.json", **options)
    data = load_dataset(f"converted:{convert(source, tmp_path / 'graph', report=tmp_path / 'other.json')}")
    options.pop("memory", None)
    salientpp.partition(data, 2, tmp_path / "two", FANOUTS, BATCH, **OPTIONS, **options)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert (tmp_path / "report.json").read_bytes() == (tmp_path / "other.json").read_bytes()
    assert names_in(tmp_path) == ["graph", "one", "other.json", "report.json", "shop", "two"]
    assert part.keys_of(part.ids_of(["C17"], "customer"), "customer")["id"].to_pylist() == ["C17"]


def test_tables_in_memory_are_partitioned_too(tmp_path):
    table = pa.table({"id": range(40), "next": [(i * 7 + 1) % 40 for i in range(40)]})
    described = {
        "nodes": {"v": {"table": table, "key": "id"}},
        "edges": {"v,to,v": {"table": table, "source": "id", "target": "next"}},
    }
    part = partition_tables(described, 2, tmp_path / "parts", FANOUTS, BATCH, seeds="all")
    assert part.num_vertices == 40 and part.num_edges == 80
    before = contents(tmp_path / "parts")
    partition_tables(described, 2, tmp_path / "parts", FANOUTS, BATCH, seeds="all")
    assert contents(tmp_path / "parts") == before
    other = table.set_column(1, "next", pa.array([0] * 40))
    described["edges"]["v,to,v"]["table"] = other
    with pytest.raises(ValueError, match="edges.v,to,v: pyarrow.Table: its rows, their order or their div"):
        partition_tables(described, 2, tmp_path / "parts", FANOUTS, BATCH, seeds="all")
    described["nodes"]["v"]["table"] = table.to_reader()
    with pytest.raises(ValueError, match="parts exists; pass overwrite=True"):
        partition_tables(described, 2, tmp_path / "parts", FANOUTS, BATCH, seeds="all")
    assert contents(tmp_path / "parts") == before


# --- the origin -------------------------------------------------------------------------------------------


def test_parts_and_their_copies_have_the_origin_of_the_converted_graph(source, tmp_path):
    partitioned(source, tmp_path / "parts", 3)
    origin = table_origin(tmp_path / "parts")
    given = origin.pop("partition")
    assert origin == table_origin(convert(source, tmp_path / "graph"))
    assert (given["num_parts"], given["num_neighbors"], given["seeds"]) == (3, FANOUTS, ["customer", "train"])
    customers = origin["tables"]["nodes.customer"]
    assert [fact["address"] for fact in customers["from"]] == ["customers-0.parquet", "customers-1.parquet"]
    assert customers["columns"]["region"]["categories"] == ["n", "w"] and customers["x"][0]["column"] == "age"
    copy = salientpp.copy_to_disk(tmp_path / "parts", tmp_path / "disk", parts=[1])
    salientpp.rewrite_topology(tmp_path / "parts", tmp_path / "rewritten", "parts")
    assert table_origin(copy) == {**origin, "partition": given}
    assert table_origin(tmp_path / "rewritten") == {**origin, "partition": {**given, "topology": "parts"}}


def test_the_origin_is_checked_and_is_no_part_of_the_contents(source, tmp_path):
    fingerprint = partitioned(source, tmp_path / "parts").fingerprint
    for path in (tmp_path / "shop").iterdir():
        os.utime(path, ns=(0, 0))
    copy = salientpp.copy_to_disk(tmp_path / "parts", tmp_path / "disk", parts=[0, 1])
    assert partitioned(source, tmp_path / "parts", overwrite=True).fingerprint == fingerprint
    assert table_origin(copy) != table_origin(tmp_path / "parts")
    salientpp.copy_to_disk(tmp_path / "parts", tmp_path / "disk", parts=[0, 1])
    assert table_origin(copy) == table_origin(tmp_path / "parts")
    salientpp.load(copy, part_id=0, verify="full")
    text = (copy / "tables.json").read_text()
    (copy / "tables.json").write_text(text.replace("customers-0", "customers-9"))
    with pytest.raises(DatasetError, match="tables.json was altered"):
        table_origin(copy)
    with pytest.raises(DatasetError, match="tables.json was altered"):
        salientpp.load(copy, part_id=0)


def test_a_manifest_names_no_other_file_as_the_origin(source, tmp_path):
    partitioned(source, tmp_path / "parts")
    edit_manifest(tmp_path / "parts", lambda manifest: manifest.update(origin="../shop/shop.toml"), checksum=True)
    with pytest.raises(DatasetError, match="origin must be 'tables.json', got '../shop/shop.toml'"):
        table_origin(tmp_path / "parts")
    edit_manifest(tmp_path / "parts", lambda manifest: manifest.pop("origin"), checksum=True)
    with pytest.raises(DatasetError, match="files must have only files of the graph, got 'tables.json'"):
        table_origin(tmp_path / "parts")


def test_a_graph_of_something_else_has_no_origin(tmp_path, monkeypatch):
    data = load_dataset("synthetic:num_vertices=50")
    salientpp.partition(data, 2, tmp_path / "parts", FANOUTS, BATCH)
    assert table_origin(tmp_path / "parts") is None and not (tmp_path / "parts" / "tables.json").exists()
    with pytest.raises(DatasetError, match="is not a dataset directory"):
        table_origin(tmp_path)


def test_passwords_of_addresses_are_not_stored():
    tables = ["s3://key:secret@shop/a.parquet", "b.parquet", "https://host/c.csv?token=secret"]
    graph = read_description({"nodes": {"v": {"table": tables, "key": "id"}}})
    assert "secret" in graph.text and "secret" not in json.dumps(graph.recorded)
    assert graph.recorded["nodes"][0]["tables"] == ["s3://shop/a.parquet", "b.parquet", "https://host/c.csv"]


# --- what has changed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["convert", "partition"])
@pytest.mark.parametrize(
    "change, text",
    [
        ("a new file", "nodes.customer: customers-2.parquet is new"),
        ("a file is gone", "nodes.customer: customers-1.parquet is gone"),
        ("another size", r"nodes.product: products.csv: size was \d+, is \d+, it was last changed at 20.* UTC, now at 20"),
        ("another time", r"orders.parquet: it was last changed at 20.* UTC, now at 1970-01-01 00:00:00.000000005 UTC \(only"),
        ("another line", r'\[nodes.customer\] x was \["age"\], is \[\]'),
        ("another folder", r"folder of relative addresses was .*shop\", is .*moved"),
        ("an option", "(finite was false, is true|num_parts was 2, is 3)"),
    ],
)  # fmt: skip
def test_a_changed_input_is_named_and_nothing_is_replaced(source, tmp_path, command, change, text):
    shop, root = tmp_path / "shop", tmp_path / "made"

    def run(**options):
        if command == "convert":
            return convert(source, root, **options)
        return partitioned(source, root, **options)

    run()
    before = contents(root)
    run()
    assert contents(root) == before
    option = ({"finite": True} if command == "convert" else {"num_parts": 3}) if change == "an option" else {}
    if change == "a new file":
        (shop / "customers-2.parquet").write_bytes((shop / "customers-0.parquet").read_bytes())
    elif change == "a file is gone":
        (shop / "customers-1.parquet").unlink()
    elif change == "another size":
        (shop / "products.csv").write_text((shop / "products.csv").read_text() + "P77,1\n")
    elif change == "another time":
        os.utime(shop / "orders.parquet", ns=(5, 5))
    elif change == "another line":
        (shop / "shop.toml").write_text(DESCRIPTION.replace('["age"]', "[]"))
    elif change == "another folder":
        shop.rename(tmp_path / "moved")
        source = f"tables:{tmp_path / 'moved' / 'shop.toml'}"
    with pytest.raises(
        ValueError, match=rf"made exists, and this command differs from the one that wrote it: .*{text}"
    ):
        run(**option)
    assert contents(root) == before
    if change != "a new file":  # whose keys repeat
        run(**option, overwrite=True)
        assert contents(root) != before
        before = contents(root)
        run(**option)
        assert contents(root) == before


def test_only_relative_addresses_have_a_folder():
    for address in ("/a.csv", "delta:/a", "iceberg:/a", "s3://a/b.csv", "delta:s3://a/b"):
        assert read_description({"nodes": {"v": {"table": address, "key": "id"}}}).folder is None
    for address in ("a.csv", "delta:a", "iceberg:a"):
        described = read_description({"nodes": {"v": {"table": ["/b.csv", address], "key": "id"}}})
        assert described.folder == str(Path().resolve())


def test_an_etag_names_the_contents_whatever_the_time():
    from salientpp.datasets.tabular.changes import differences

    def origin(**facts):
        table = {"from": [{"address": "s3://b/t.parquet", **facts}]}
        return {"description": {"nodes": [], "edges": []}, "folder": None, "options": {}, "tables": {"nodes.v": table}}

    first = origin(size=1, modified=1, etag="a")
    assert not differences(first, origin(size=1, modified=2, etag="a"))
    assert "etag was" in differences(first, origin(size=1, modified=1, etag="b"))[0]
    assert "size was" in differences(first, origin(size=2, modified=1, etag="a"))[0]
    assert "version was 3, is 4" in differences(origin(version=3, id="i"), origin(version=4, id="i"))[0]
    assert "snapshot was 3, is null" in differences(origin(snapshot=3), origin(snapshot=None))[0]


def test_nothing_is_said_to_be_complete_whose_files_are_not(source, tmp_path):
    convert(source, tmp_path / "graph")
    partitioned(source, tmp_path / "parts")
    (tmp_path / "graph" / "n0.x.npy").write_bytes(b"")
    (tmp_path / "parts" / "e0.indices.npy").write_bytes(b"")
    with pytest.raises(DatasetError, match="n0.x.npy must have"):
        convert(source, tmp_path / "graph")
    with pytest.raises(DatasetError, match="e0.indices.npy must have"):
        partitioned(source, tmp_path / "parts")


def test_sets_are_compared_whatever_their_order():
    names = [f"type {number}" for number in range(9)]
    orders = {json.dumps(as_given({"replicate": set(some)})) for some in (names, names[::-1])}
    given = f"{{'replicate': {set(names)!r}}}"
    code = f"import json; from {as_given.__module__} import as_given; print(json.dumps(as_given({given})))"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        orders.add(subprocess.check_output([python(), "-c", code], cwd=ROOT, text=True, env=environment).strip())
    assert len(orders) == 1


def test_a_report_that_no_run_left_is_not_promised(source, tmp_path):
    convert(source, tmp_path / "graph", report=tmp_path / "report.json")
    convert(source, tmp_path / "graph", report=tmp_path / "report.json")
    with pytest.raises(
        ValueError, match=r"other.json is not written, because an earlier run has read the tables of .*graph"
    ):
        convert(source, tmp_path / "graph", report=tmp_path / "other.json")


# --- the command ------------------------------------------------------------------------------------------


def test_the_command_partitions_tables_and_says_that_nothing_changed(source, tmp_path, capsys):
    words = ["partition", source, str(tmp_path / "parts"), "--parts", "2", "--num-neighbors", "3,2", "--seeds", "customer:train"]  # fmt: skip
    assert cli.main([*words, "--memory", "8GB", "--report", str(tmp_path / "report.json")]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["nodes"]["customer"]["vertices"] == 60
    before = contents(tmp_path / "parts")
    capsys.readouterr()
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert "the description, the options and the size and time of all tables are the same" in said.err
    files = "orders.parquet, customers-0.parquet, customers-1.parquet, products.csv"
    assert f"made of {files}, 0.0 MB" in " ".join(said.out.split())
    assert contents(tmp_path / "parts") == before
    assert cli.main([*words, "--batch-size", "7"]) == 2
    assert "batch_size was 1024, is 7. Pass overwrite (--overwrite)" in capsys.readouterr().err
    assert cli.main(["partition", source.removeprefix("tables:"), *words[2:]]) == 2
    assert f"put tables: before its name; write: salientpp partition {source}" in capsys.readouterr().err
    assert cli.main(["partition", "synthetic", *words[2:], "--memory", "8GB"]) == 2
    assert "--memory is only for tables:FILE.toml" in capsys.readouterr().err
    assert cli.main(["analyze", source, "--parts", "2"]) == 2
    assert f"salientpp convert {source} graph; then: salientpp analyze converted:graph" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, text",
    [
        ({"num_parts": 0}, "num_parts must be"),
        ({"method": "metiss"}, "method"),
        ({"topology": "half"}, "topology must be"),
        ({"split": {}}, "split and edge_split are not for tables"),
    ],
)
def test_wrong_options_are_refused_before_tables_are_read(source, tmp_path, monkeypatch, options, text):
    monkeypatch.setattr(made, "convert", None)
    with pytest.raises(ValueError, match=text):
        partitioned(source, tmp_path / "parts", **options)
    assert names_in(tmp_path) == ["shop"]


# --- interruptions ----------------------------------------------------------------------------------------


def stops(*arguments, **named):
    raise KeyboardInterrupt


def test_a_run_that_stopped_in_either_phase_goes_on(source, tmp_path, monkeypatch):
    expected = contents(partitioned(source, tmp_path / "whole").root)
    for name, owner, function in ("tables", staging, "join_edges"), ("parts", writer, "write_vertices"):
        root = tmp_path / name
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, function, stops)
            partitioned(source, root)
        assert (tmp_path / f".{name}.tables" / "graph" / "manifest.json").exists() == (name == "parts")
        with monkeypatch.context() as patch:
            patch.setattr(staging, "number_vertices", stops)  # a finished step
            patch.setattr(made, "convert", convert if name == "tables" else stops)
            assert contents(partitioned(source, root).root) == expected
    assert names_in(tmp_path) == ["parts", "shop", "tables", "whole"]


@pytest.mark.parametrize("name, of", [("part 0", "n0."), ("the origin", "tables.json")])
def test_a_run_that_stopped_before_it_noted_a_step_goes_on(source, tmp_path, monkeypatch, name, of):
    expected = contents(partitioned(source, tmp_path / "whole").root)
    note = Journal.note

    def stopped(self, step, files, facts):
        if any(file.rpartition("/")[2].startswith(of) for file in files):
            raise KeyboardInterrupt
        return note(self, step, files, facts)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "note", stopped)
        partitioned(source, tmp_path / "parts")
    assert contents(partitioned(source, tmp_path / "parts").root) == expected
    assert names_in(tmp_path) == ["parts", "shop", "whole"]


def test_what_a_run_left_that_was_killed_after_its_result_was_complete_is_removed(source, tmp_path, monkeypatch):
    expected = contents(partitioned(source, tmp_path / "whole").root)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(made, "_remove", stops)
        partitioned(source, tmp_path / "parts")
    assert (tmp_path / ".parts.tables").exists()
    assert contents(partitioned(source, tmp_path / "parts").root) == expected
    assert names_in(tmp_path) == ["parts", "shop", "whole"]
    rmtree, graph = shutil.rmtree, tmp_path / "graph"

    def removes_until_the_graph_is_complete(path, **named):
        if (graph / "manifest.json").exists():
            raise KeyboardInterrupt
        rmtree(path, **named)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", removes_until_the_graph_is_complete)
        convert(source, graph)
    load_dataset(f"converted:{graph}")
    assert (tmp_path / ".graph.staged" / "n0" / "done.json").exists()
    convert(source, graph)
    assert names_in(tmp_path) == ["graph", "parts", "shop", "whole"]


def test_a_damaged_beginning_is_made_again(source, tmp_path, monkeypatch):
    expected = contents(partitioned(source, tmp_path / "whole").root)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer, "write_vertices", stops)
        partitioned(source, tmp_path / "parts")
    (tmp_path / ".parts.tables" / "graph" / "n0.x.npy").write_bytes(b"")
    assert contents(partitioned(source, tmp_path / "parts", overwrite=True).root) == expected
    assert names_in(tmp_path) == ["parts", "shop", "whole"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_a_killed_removal_left_is_no_beginning_of_another_call(source, tmp_path, monkeypatch, overwrite):
    root, remove = tmp_path / "parts", made.remove_files

    def removes_some(folder, names, *patterns):
        remove(folder, sorted(names)[:2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(made, "remove_files", removes_some)
        partitioned(source, root)
    if not overwrite:
        shutil.rmtree(root)
    assert partitioned(source, root, 3, overwrite=overwrite).num_parts == 3
    assert names_in(tmp_path) == ["parts", "shop"]


def test_overwrite_goes_on_too(source, tmp_path, monkeypatch):
    expected = contents(partitioned(source, tmp_path / "parts").root)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer, "write_vertices", stops)
        partitioned(source, tmp_path / "parts", 3, overwrite=True)
    assert contents(tmp_path / "parts") == expected
    partitioned(source, tmp_path / "parts")  # which is complete; the work of the other call stays
    assert (tmp_path / ".parts.writing").exists()
    with monkeypatch.context() as patch:
        patch.setattr(made, "convert", stops)
        assert partitioned(source, tmp_path / "parts", 3, overwrite=True).num_parts == 3
    assert names_in(tmp_path) == ["parts", "shop"]


def test_files_of_others_in_the_staging_folder_stay(source, tmp_path):
    convert(source, tmp_path / "graph")
    (tmp_path / ".graph.staged" / "own").mkdir(parents=True)
    (tmp_path / ".graph.staged" / "own" / "file").write_text("")
    convert(source, tmp_path / "graph")
    assert (tmp_path / ".graph.staged" / "own" / "file").exists()


def test_a_conversion_of_other_tables_is_not_continued(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("salientpp.datasets.converted.convert.write_keys_of_vertices", stops)
        convert(source, tmp_path / "graph")
    (tmp_path / "shop" / "shop.toml").write_text(DESCRIPTION.replace('["age"]', "[]"))
    with pytest.raises(ValueError, match="begun by another conversion: the tables or their description differ. Repeat"):
        convert(source, tmp_path / "graph")


def test_unfinished_parts_of_other_tables_are_not_taken(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer, "write_vertices", stops)
        partitioned(source, tmp_path / "parts")
    (tmp_path / "shop" / "shop.toml").write_text(DESCRIPTION.replace('["age"]', "[]"))
    with pytest.raises(ValueError, match=r"parts was begun by another command: .*x was \[.*Repeat that command"):
        partitioned(source, tmp_path / "parts")
    part = partitioned(source, tmp_path / "parts", overwrite=True)
    assert sorted(part.description.vertices("customer").attributes) == ["age", "region"]
    assert names_in(tmp_path) == ["parts", "shop"]


_KILLED = """
import os, random, signal, sys, traceback
sys.path.insert(0, "tests/support")
from pathlib import Path
import pyarrow.parquet, pyarrow.csv
from salientpp.datasets import convert, partition_tables

command, source, folder, seed, at_random, last = *sys.argv[1:3], Path(sys.argv[3]), *map(int, sys.argv[4:])
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}

def run(root):
    if command == "convert":
        convert(source, root)
    else:
        partition_tables(source, 2, root, [3, 2], 8, method="random", seeds=("customer", "train"), replicate=[])

def forked(root, last):
    "Runs the command in a fork that kills itself at change number `last` of a file below the folder. Returns the number of changes, or None."
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        count = 0
        def hook(event, arguments):
            nonlocal count
            # shutil.rmtree names files relative to their folder.
            if event in EVENTS and (str(folder) in str(arguments[0]) or event in ("os.remove", "os.rmdir")):
                count += 1
                if count == last:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        try:
            run(root)
            os.write(write, str(count).encode())
            os._exit(0)
        finally:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    os.close(write)
    status = os.waitpid(pid, 0)[1]
    said = os.read(read, 99)
    os.close(read)
    assert status in (0, signal.SIGKILL), status
    return int(said) if said else None

def contents(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}

total = forked(folder / "whole", 0)
print(total, "changes")
expected, draw = contents(folder / "whole"), random.Random(seed)
# The last changes of a run remove its work; each of them is a moment of its own.
for case, first in enumerate([*draw.sample(range(1, total), at_random), *range(total - last, total + 1)]):
    root, moment, runs = folder / f"made-{case}", first, 0
    while forked(root, moment) is None:
        runs += 1
        if (root / "manifest.json").exists():
            found = contents(root)
            found.pop("journal.jsonl", None)
            assert found == expected, (case, moment)
        moment = draw.randrange(1, total)
        assert runs < 60
    found = contents(root)
    found.pop("journal.jsonl", None)
    assert found == expected, (case, first)
    assert forked(root, 0) is not None
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert not left, (case, first, left)
    print(case, first, runs)
"""


@pytest.mark.parametrize("at_random, last", [(2, 6), pytest.param(15, 40, marks=pytest.mark.rare)])
@pytest.mark.parametrize("command", ["convert", "partition"])
def test_a_command_killed_at_random_moments_writes_the_same_bytes_and_leaves_nothing(
    source, tmp_path, command, at_random, last
):
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    folder = tmp_path / "made"
    folder.mkdir()
    done = subprocess.run(
        [python(), "-c", _KILLED, command, source, *map(str, (folder, seed, at_random, last))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr


def test_a_wrong_memory_is_an_error_even_if_nothing_is_to_do(tmp_path):
    described = {"nodes": {"v": {"table": pa.table({"id": range(9)}), "key": "id"}}}
    described["edges"] = {"v,to,v": {"table": pa.table({"a": range(9)}), "source": "a", "target": "a"}}
    for write in (
        lambda memory: convert(described, tmp_path / "graph", memory=memory),
        lambda memory: partition_tables(described, 2, tmp_path / "parts", [2], 4, seeds="all", memory=memory),
    ):
        write("4GB")
        with pytest.raises(ValueError, match="memory must be a number of bytes such as 4GB or 512MiB, got 'lots'"):
            write("lots")
