"""Measures the conversion of public layouts, compared with reading the same files whole. Writes results/convert_layouts.json.

    python benchmarks/bench_convert_layouts.py [--share 200] [--memory 1GB] [--folder DIR]

Random files are written in each layout, with the sizes of the real dataset divided by ``share``:

* mag240m: 121.8 M papers with 768 float16 features, 122.4 M authors, 1,297.7 M citations and 386.0 M authorships; ``undirected=True``;
* ogbl-citation2: 2.9 M vertices with 128 features, 30.4 M edges in text; 86,596 edges to validate, and as many to test, with 1,000 negatives each;
* a Parquet table of as many vertices as mag240m has papers, with lists of 128 float32, in random order of ids.

For mag240m, *in memory* reads all arrays with numpy, and makes a ``HeteroData``, PyG's ``ToUndirected`` and ``TypedGraph.from_data``. Each step is a process
of its own. Time is wall-clock and CPU time of the call, without imports. Memory is the largest resident set (VmHWM), in total and above the memory before
the call.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import cost_of, run_step, write_results

SIZES = {"paper": 121_751_666, "author": 122_383_112, "institution": 25_721}
RELATIONS = {
    ("author", "affiliated_with", "institution"): 44_592_586,
    ("author", "writes", "paper"): 386_022_720,
    ("paper", "cites", "paper"): 1_297_748_926,
}
STEPS = ("convert mag240m", "in memory mag240m", "convert ogbl-citation2", "convert Parquet table")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, default=200, help="divisor of the sizes of the datasets")
    parser.add_argument("--memory", default="1GB")
    parser.add_argument("--folder", help="where files are written and removed (a temporary folder)")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the step that the child process runs
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, Path(arguments.folder), arguments.memory)))
        return
    folder, rows = Path(tempfile.mkdtemp(prefix="salientpp-layouts-", dir=arguments.folder)), []
    try:
        for step in STEPS:
            if step.startswith("convert"):
                WRITERS[step](folder, arguments.share)
            rows.append({"step": step, **run_step(__file__, step, folder=folder, memory=arguments.memory)})
            print(rows[-1], flush=True)
    finally:
        shutil.rmtree(folder)
    write_results("convert_layouts", rows, memory=arguments.memory, share=arguments.share)


def measure(step: str, folder: Path, memory: str) -> dict:
    """Measures one step, in a process that has done nothing else."""
    from salientpp.datasets import convert
    from salientpp.graph.typed import TypedGraph  # imported here, so that its memory counts as that before the call

    graphs = []
    if step.startswith("in memory"):
        cost = cost_of(lambda: graphs.append(TypedGraph.from_data(whole(folder / "mag"))))
        num_edges = sum(relation.indices.numel() for relation in graphs[0].relations)
    else:
        source = {
            "convert mag240m": f"mag240m:{folder / 'mag'}",
            "convert ogbl-citation2": "ogbl-citation2",
            "convert Parquet table": f"edges:{folder / 'edges.npy'},nodes={folder / 'nodes.parquet'}",
        }[step]
        root = folder / "converted" / step.replace(" ", "-")
        options = {"undirected": True if "mag" in step else None, "memory": memory, "data": folder}
        cost = cost_of(lambda: convert(source, root, **options))
        manifest = json.loads((root / "manifest.json").read_text())
        num_edges = sum(each["num_edges"] for each in manifest["edge_types"])
    raw = {"mag240m": "mag", "citation2": "ogbl_citation2", "table": "nodes.parquet"}
    path = folder / next(file for name, file in raw.items() if name in step)
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return {
        "edges": num_edges,
        "raw_bytes": sum(each.stat().st_size for each in files),
        **cost,
    }


def whole(root: Path):
    from torch_geometric.data import HeteroData
    from torch_geometric.transforms import ToUndirected

    data = HeteroData()
    for type_, size in torch.load(root / "meta.pt", weights_only=True).items():
        data[type_].num_nodes = size
    data["paper"].x = torch.from_numpy(np.load(root / "processed" / "paper" / "node_feat.npy"))
    data["paper"].y = torch.from_numpy(np.load(root / "processed" / "paper" / "node_label.npy"))
    for relation in RELATIONS:
        edges = np.load(root / "processed" / "___".join(relation) / "edge_index.npy")
        data[relation].edge_index = torch.from_numpy(edges)
    return ToUndirected()(data)


def saved(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)


def write_mag(folder: Path, share: int) -> None:
    rng, root = np.random.default_rng(0), folder / "mag"
    sizes = {type_: max(9, size // share) for type_, size in SIZES.items()}
    papers = sizes["paper"]
    paper = root / "processed" / "paper"
    paper.mkdir(parents=True)
    x = np.lib.format.open_memmap(paper / "node_feat.npy", "w+", np.float16, (papers, 768))
    for first in range(0, papers, 50_000):
        x[first : first + 50_000] = rng.random((min(50_000, papers - first), 768), dtype=np.float32)
    del x
    saved(paper / "node_label.npy", np.where(rng.random(papers) < 0.01, rng.integers(0, 153, papers), np.nan))
    saved(paper / "node_year.npy", rng.integers(1900, 2022, papers))
    for relation, count in RELATIONS.items():
        edges = np.stack([rng.integers(0, sizes[end], count // share) for end in (relation[0], relation[2])])
        saved(root / "processed" / "___".join(relation) / "edge_index.npy", edges)
    splits = np.split(rng.permutation(papers)[: papers // 100], [papers // 125, papers // 111])
    torch.save(sizes, root / "meta.pt")
    torch.save(dict(zip(("train", "valid", "test"), splits)), root / "split_dict.pt")


def write_citation(folder: Path, share: int) -> None:
    rng, root, vertices = np.random.default_rng(0), folder / "ogbl_citation2", 2_927_963 // share
    edges = rng.integers(0, vertices, (30_387_995 // share, 2))
    (root / "raw").mkdir(parents=True)
    (root / "split" / "time").mkdir(parents=True)
    tables = {"edge": edges, "num-node-list": [[vertices]], "num-edge-list": [[len(edges)]]}
    tables |= {"node-feat": rng.random((vertices, 128)).round(4), "node_year": np.full((vertices, 1), 2010)}
    for name, rows in tables.items():
        with gzip.open(root / "raw" / f"{name}.csv.gz", "wt", compresslevel=1) as file:
            np.savetxt(file, rows, "%g", ",")
    for split, count in (("train", len(edges)), ("valid", 86_596 // share), ("test", 86_596 // share)):
        arrays = {"source_node": edges[:count, 0].copy(), "target_node": edges[:count, 1].copy()}
        if split != "train":
            arrays["target_node_neg"] = rng.integers(0, vertices, (count, 1000))
        torch.save(arrays, root / "split" / "time" / f"{split}.pt")


def write_table(folder: Path, share: int) -> None:
    import pyarrow
    from pyarrow import parquet

    rng, vertices = np.random.default_rng(0), SIZES["paper"] // share
    saved(folder / "edges.npy", rng.integers(0, vertices, (2, 10 * vertices)))
    ids, rows = rng.permutation(vertices), rng.random((vertices, 128), dtype=np.float32)
    lists = pyarrow.ListArray.from_arrays(np.arange(0, rows.size + 1, 128, dtype=np.int32), rows.ravel())
    table = pyarrow.table({"id": ids, "x": lists, "y": ids % 47, "train": ids < vertices // 10})
    parquet.write_table(table, folder / "nodes.parquet", row_group_size=100_000)


WRITERS = {
    "convert mag240m": write_mag,
    "convert ogbl-citation2": write_citation,
    "convert Parquet table": write_table,
}


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
