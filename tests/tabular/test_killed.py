"""A conversion of tables that is killed at any call which makes files safe goes on, and writes the same bytes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from forked_python import python
from table_packages import package

package("pyarrow.parquet")

ROOT = Path(__file__).parents[2]

#: Run number k is killed at call k of a function, before or after it, until a run ends. Runs are forks, so this process never computes with torch.
_SCRIPT = """
import hashlib, os, shutil, signal, sys
sys.path.insert(0, "tests/support")
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
from killed import die_at
from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.convert import Options, write_converted
from salientpp.datasets.tabular.description import read_description
from salientpp.datasets.tabular.staging import staged_tables
from salientpp.progress import Progress

folder, owner, name = Path(sys.argv[1]), {"os": os, "shutil": shutil}[sys.argv[2]], sys.argv[3]
ends = [f"C{i * 7919 % 997}" for i in range(3000)]
pq.write_table(pa.table({"source": ends, "target": ends[::-1], "n": range(3000)}), folder / "edges.parquet")
pq.write_table(pa.table({"id": [f"C{i}" for i in range(900)], "v": range(900)}), folder / "vertices.parquet")
relation = {"table": "edges.parquet", "source": "source", "target": "target", "dangling": "add"}
described = {"nodes": {"c": {"table": "vertices.parquet", "key": "id", "fill": {"v": 0}}}, "edges": {"c,to,c": relation}}

def run(root, killed_at_call=0):
    pid = os.fork()
    if not pid:
        os.chdir(folder)
        if killed_at_call:
            die_at(owner, name, killed_at_call, after=killed_at_call % 2 == 0)
        budget = Budget(0, 1_000_000)
        with staged_tables(read_description(described), root, budget, Progress()) as staged:
            write_converted(staged.source, root, budget, Options(False, {}, False))
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def contents(root):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in root.iterdir()}

assert run(folder / "whole") == 0
root, number, status = folder / "graph", 0, signal.SIGKILL
while status and not (root / "manifest.json").exists():
    number += 1
    status = run(root, number)
    assert status in (0, signal.SIGKILL), status
found = contents(root)
found.pop("journal.jsonl", None)  # of a run that was killed after the manifest
assert found == contents(folder / "whole")
print(number)
"""


@pytest.mark.parametrize("owner, name, least", [("os", "fsync", 6), ("os", "replace", 5), ("shutil", "rmtree", 3)])
def test_a_conversion_of_tables_killed_again_and_again_writes_the_same_bytes(tmp_path, owner, name, least):
    done = subprocess.run(
        [python(), "-c", _SCRIPT, str(tmp_path), owner, name], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= least, "too few runs were killed"
