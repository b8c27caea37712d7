"""Measures the conversion of tables whose rows have keys, compared with the same graph under integer ids. Writes results/tables.json.

    python benchmarks/bench_tables.py [--edges 10000000 30000000 100000000] [--memory 2GB] [--folder DIR]

For each size, a process writes Parquet files: a table of vertices with their keys, and ten tables of edges in random order. A graph has a tenth
as many vertices as edges; sources are even and targets are skewed. Keys are texts of 16 bytes in the first form, and int64 ids from 0 in the second.
Then one process each converts the texts (``tables:``), the ids as keys (``tables:``) and the ids as ids (``edges:``). Time is wall-clock and CPU time of
``convert``, without imports. Memory is the largest resident set (VmHWM), in total and above the memory before the call.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import cost_of, run_step, write_results

from salientpp.datasets import convert

DEGREE, FILES, KEY_BYTES = 10, 10, 16
FORMS = ("texts", "integers")
STEPS = ("keys of texts", "keys of integers", "ids")
HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, nargs="+", default=[10_000_000, 30_000_000, 100_000_000])
    parser.add_argument("--memory", default="2GB")
    parser.add_argument("--folder", help="where files are written and removed (a temporary folder)")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the step that the child process runs
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, Path(arguments.folder), arguments.edges[0], arguments.memory)))
        return
    if any(edges % (DEGREE * FILES) for edges in arguments.edges):
        parser.error(f"--edges must be multiples of {DEGREE * FILES}")
    rows = []
    for edges in arguments.edges:
        folder = Path(tempfile.mkdtemp(prefix="salientpp-tables-", dir=arguments.folder))
        try:
            found = {}
            for step in ("raw files", *STEPS):
                os.sync()  # so that the files of earlier steps do not slow this one
                found[step] = run_step(__file__, step, folder=folder, edges=edges, memory=arguments.memory)
        finally:
            shutil.rmtree(folder)
        for step in STEPS:
            row = found[step]
            rows.append({"edges": edges, "vertices": edges // DEGREE, "step": step, **row})
            for name in ("seconds", "cpu_seconds"):
                rows[-1][f"{name}_of_ids"] = row[name] / found["ids"][name]
            print(rows[-1], flush=True)
    write_results("tables", rows, memory=arguments.memory, key_bytes=KEY_BYTES)


def measure(step: str, folder: Path, edges: int, memory: str) -> dict:
    """Measures one row, in a process that has done nothing else."""
    if step == "raw files":
        write_raw(folder, edges)
        return {}
    form = "texts" if step == "keys of texts" else "integers"
    nodes = {"node": {"table": f"{folder / form}/nodes.parquet", "key": "key"}}
    link = {"table": f"{folder / form}/edges-*.parquet", "source": "source", "target": "target", "reverse": False}
    described = {"nodes": nodes, "edges": {"node,to,node": link}}
    plain = f"edges:{folder / form}/edges-*.parquet,source=source,target=target,num_vertices={edges // DEGREE}"
    root = folder / "converted"
    cost = cost_of(lambda: convert(plain if step == "ids" else described, root, memory=memory))
    manifest = json.loads((root / "manifest.json").read_text())
    if manifest["edge_types"][0]["num_edges"] != edges:
        raise RuntimeError(f"{step}: expected {edges} edges, got {manifest['edge_types'][0]['num_edges']}")
    shutil.rmtree(root)
    return {"raw_bytes": sum(path.stat().st_size for path in (folder / form).iterdir()), **cost}


def write_raw(folder: Path, edges: int) -> None:
    """Writes the tables in both forms."""
    num_vertices, rng = edges // DEGREE, np.random.default_rng(0)
    keys = texts(num_vertices)
    order = rng.permutation(num_vertices)
    for form in FORMS:
        (folder / form).mkdir()
    for form, key in zip(FORMS, (as_texts(keys), pa.array(np.arange(num_vertices)))):
        pq.write_table(pa.table({"key": key.take(pa.array(order))}), folder / form / "nodes.parquet")
    for file in range(FILES):
        source = rng.integers(0, num_vertices, edges // FILES)
        target = (num_vertices * rng.random(edges // FILES) ** 3).astype(np.int64)
        for form in FORMS:
            ends = {
                name: as_texts(keys[ids]) if form == "texts" else pa.array(ids)
                for name, ids in (("source", source), ("target", target))
            }
            pq.write_table(pa.table(ends), folder / form / f"edges-{file}.parquet")


def texts(num_vertices: int) -> np.ndarray:
    """Returns a text of 16 hexadecimal digits for each vertex, uint8 [N, 16]. All differ, and their order is not that of the ids."""
    mixed = np.arange(1, num_vertices + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    digits = [HEX[((mixed >> np.uint64(4 * place)) & np.uint64(15)).astype(np.uint8)] for place in range(KEY_BYTES)]
    return np.stack(digits, 1)


def as_texts(rows: np.ndarray) -> pa.Array:
    """Returns bytes [n, 16] as Arrow strings."""
    offsets = np.arange(0, rows.size + 1, KEY_BYTES, dtype=np.int32)
    return pa.StringArray.from_buffers(len(rows), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(rows)))


if __name__ == "__main__":
    main()
