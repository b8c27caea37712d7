"""Measures conversion and generation of graphs, compared with reading the same file whole. Writes results/convert.json.

    python benchmarks/bench_convert.py [--edges 1000000 ... 50000000] [--memory 1GB] [--folder DIR]

For each size, a process generates a graph (``large_graph.generate``). Two raw files are made from it. The .npz archive has a shuffled edge list (each
pair once), 64 float16 columns, labels and splits. The text file has the same edges. Then three processes run: ``convert`` of the archive and of the
text, with ``undirected=True``, and the way in memory (``load_dataset`` of the archive and ``Graph.from_data``). Time is wall-clock and CPU time of
the calls, without imports. Memory is the largest resident set (VmHWM), in total and above the memory before the call.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import cost_of, run_step, write_results
from large_graph import generate

from salientpp.datasets import convert, load_dataset
from salientpp.graph.csc import Graph

DEGREE, FEATURES = 20, 64
STEPS = ("generate", "raw files", "convert npz", "convert text", "in memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, nargs="+", default=[1_000_000, 5_000_000, 20_000_000, 50_000_000])
    parser.add_argument("--memory", default="1GB")
    parser.add_argument("--folder", help="where files are written and removed (a temporary folder)")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the step that the child process runs
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, Path(arguments.folder), arguments.edges[0], arguments.memory)))
        return
    rows = []
    for edges in arguments.edges:
        folder = Path(tempfile.mkdtemp(prefix="salientpp-convert-", dir=arguments.folder))
        try:
            found = {}
            for step in STEPS:
                found[step] = run_step(__file__, step, folder=folder, edges=edges, memory=arguments.memory)
            del found["raw files"]
            for step, row in found.items():
                rows.append({"edges_asked": edges, "step": step, **row})
                if step.startswith("convert"):
                    peer = found["in memory"]
                    rows[-1]["seconds_of_in_memory"] = row["seconds"] / peer["seconds"]
                    rows[-1]["cpu_seconds_of_in_memory"] = row["cpu_seconds"] / peer["cpu_seconds"]
                    rows[-1]["peak_of_in_memory"] = row["peak_bytes"] / peer["peak_bytes"]
                    rows[-1]["arrays_of_in_memory"] = row["above_start_bytes"] / peer["above_start_bytes"]
                print(rows[-1], flush=True)
        finally:
            shutil.rmtree(folder)
    write_results("convert", rows, memory=arguments.memory, degree=DEGREE, features=FEATURES)


def measure(step: str, folder: Path, edges: int, memory: str) -> dict:
    """Measures one row, in a process that has done nothing else."""
    if step == "raw files":
        write_raw(folder)
        return {}
    graphs = []

    def work() -> None:
        if step == "generate":
            size = {"num_vertices": edges // DEGREE, "average_degree": DEGREE, "num_features": FEATURES}
            generate(folder / "g", **size, memory=memory)
        elif step == "in memory":
            graphs.append(Graph.from_data(load_dataset(f"npz:{folder / 'raw.npz'}", undirected=True)))
        else:
            raw = "npz:raw.npz" if step == "convert npz" else "edges:raw.tsv,num_vertices={}"
            kind, _, file = raw.format(edges // DEGREE).partition(":")
            convert(f"{kind}:{folder / file}", folder / step, undirected=True, memory=memory)

    cost = cost_of(work)
    if step == "in memory":
        num_edges = graphs[0].num_edges
    else:
        root = folder / ("g" if step == "generate" else step)
        manifest = json.loads((root / "manifest.json").read_text())
        num_edges = manifest["edge_types"][0]["num_edges"]
    read = {"convert npz": "raw.npz", "convert text": "raw.tsv", "in memory": "raw.npz"}.get(step)
    return {
        "vertices": edges // DEGREE,
        "edges": num_edges,
        "raw_bytes": (folder / read).stat().st_size if read else None,
        "edges_per_second": num_edges / cost["seconds"],
        **cost,
    }


def write_raw(folder: Path) -> None:
    """Writes the files that a user might have: each pair once, in any order and direction."""
    data = load_dataset(f"converted:{folder / 'g'}")
    indptr, indices = data.adj_t.crow_indices(), data.adj_t.col_indices().numpy()
    target = np.repeat(np.arange(data.num_nodes, dtype=np.int32), indptr.diff().numpy())
    once = np.flatnonzero(indices < target)
    rng = np.random.default_rng(0)
    rng.shuffle(once)
    edges = np.stack([indices[once], target[once]])
    turned = rng.random(edges.shape[1]) < 0.5
    edges[:, turned] = edges[::-1, turned]
    splits = {f"{split}_idx": data[f"{split}_mask"].nonzero().flatten().numpy() for split in ("train", "val", "test")}
    np.savez(folder / "raw.npz", edge_index=edges.astype(np.int64), x=data.x.numpy(), y=data.y.numpy(), **splits)
    with (folder / "raw.tsv").open("w") as file:
        for first in range(0, edges.shape[1], 10**6):
            file.write("".join(f"{u}\t{v}\n" for u, v in edges[:, first : first + 10**6].T.tolist()))
    del data
    shutil.rmtree(folder / "g")


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
