"""A disk that fills up while tables are converted or predictions are written gives an error that names the file. The next run goes on."""

from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path

from command_line import mistake
from forked_python import python
from table_packages import package

from salientpp.datasets.tabular import staging

pa, parquet = package("pyarrow"), package("pyarrow.parquet")

ROOT = Path(__file__).parents[2]

#: Converts tables of a stream and of a file, with a limit on the size of files from a stage on, and then without. A limit takes the place of a small disk.
_SCRIPT = """
import hashlib, json, resource, shutil, sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
from salientpp.datasets.converted import convert
from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.tabular import staging, table_parts
from salientpp.datasets.tabular.description import read_description
from salientpp.progress import Progress
from salientpp.store.directory.journal import Journal

folder = Path(sys.argv[1])
ends = [f"C{i * 7919 % 997}" for i in range(6000)]
pq.write_table(pa.table({"source": ends, "target": ends[::-1], "n": range(6000)}), folder / "edges.parquet")
vertices = pa.table({"id": [f"C{i}" for i in range(997)], "v": range(997)})

class Stream:
    def __arrow_c_stream__(self, requested_schema=None):
        return vertices.to_reader(max_chunksize=100).__arrow_c_stream__()

def run(root):
    entry = {"table": str(folder / "edges.parquet"), "source": "source", "target": "target"}
    graph = read_description({"nodes": {"c": {"table": Stream(), "key": "id"}}, "edges": {"c,to,c": entry}})
    budget = Budget(0, 1_000_000)
    with staging.staged_tables(graph, root, budget, Progress()) as staged:
        convert.write_converted(staged.source, root, budget, convert.Options(False, {}, False))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in root.iterdir()}

def limited(number):
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, resource.RLIM_INFINITY))

expected = run(folder / "whole")
for stage, limit in json.loads(sys.argv[2]):
    owner = {"spool": table_parts.ObjectPart, "write_converted": convert, "finish": Journal}.get(stage, staging)
    original = getattr(owner, stage)

    def full(*arguments, **named):
        limited(limit)
        return original(*arguments, **named)

    setattr(owner, stage, full)
    try:
        run(folder / "graph")
    except OSError as error:
        limited(resource.RLIM_INFINITY)
        print(error)
    else:
        raise SystemExit(f"{stage} fits in {limit}")
    assert not (folder / "graph" / "manifest.json").exists(), stage
    setattr(owner, stage, original)
    assert run(folder / "graph") == expected, stage
    assert sorted(path.name for path in folder.iterdir()) == ["edges.parquet", "graph", "whole"], stage
    shutil.rmtree(folder / "graph")
"""


#: Stage, and most bytes of a file from this stage on.
CASES = [
    ("spool", 0),
    ("spool", 10_000),
    ("number_vertices", 0),
    ("number_vertices", 9_000),
    ("join_edges", 0),
    ("join_edges", 60_000),
    ("examine_table", 0),
    ("write_converted", 0),
    ("write_converted", 1_000),
    ("write_converted", 30_000),
    ("finish", 0),
]


def test_a_conversion_of_tables_goes_on_after_a_full_disk(tmp_path):
    done = subprocess.run(
        [python(), "-c", _SCRIPT, str(tmp_path), json.dumps(CASES)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    for case, text in zip(CASES, said, strict=True):
        assert str(tmp_path) in text and "cannot be written (" in text, (case, text)
        assert text.count("cannot be") == 1, (case, text)
        assert "repeat the same command: it continues after the last finished step" in text, (case, text)


#: Writes predictions with no limit, then with a limit on the size of files.
_PREDICTIONS = """
import resource, sys
from pathlib import Path
import torch
import salientpp
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

folder, data = Path(sys.argv[1]), Data(x=torch.randn(5000, 3), edge_index=torch.randint(0, 5000, (2, 5000)))

def with_writer(out):
    with salientpp.PredictionWriter(out, data) as writer:
        for ids in torch.arange(5000).split(1000):
            writer.write(ids, torch.randn(len(ids), 8))

def layer_by_layer(out):
    salientpp.inference([SAGEConv(3, 8)], data, out=out)

def bytes_of(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}

for work, out in (with_writer, "w.parquet"), (layer_by_layer, "i.parquet"), (layer_by_layer, "arrays"):
    work(folder / out)
    whole = bytes_of(folder / out)
    for limit in 0, 1_000, max(map(len, whole.values())) // 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            work(folder / out)
        except OSError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            print(error)
        else:
            raise SystemExit(f"{out} fits in {limit}")
        assert bytes_of(folder / out) == whole, (out, limit)
"""


def test_predictions_on_a_full_disk_leave_the_earlier_ones(tmp_path):
    done = subprocess.run([python(), "-c", _PREDICTIONS, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 9
    for text in said:
        assert str(tmp_path) in text and "cannot be written (File too large)" in text, text


def test_the_command_says_it_in_one_sentence(tmp_path, monkeypatch, capsys):
    words = f"{tmp_path}/keys.arrow cannot be written (No space left on device); the disk is full: make room"

    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, words)

    parquet.write_table(pa.table({"id": [1]}), tmp_path / "v.parquet")
    (tmp_path / "g.toml").write_text('[nodes.v]\ntable = "v.parquet"\nkey = "id"\n')
    monkeypatch.setattr(staging, "number_vertices", full)
    said = mistake(capsys, "convert", f"tables:{tmp_path / 'g.toml'}", str(tmp_path / "graph"))
    assert said == f"salientpp convert: {words}"
