"""Measures memory and time of training steps on the whole graph, with and without recomputed layers. Writes results/recompute.json.

    python benchmarks/bench_recompute.py npz:GRAPH.npz [--hidden 64] [--steps 3] [--ranks 1 2]

Every case runs in fresh processes. A 14-layer GraphSAGE and a 3-layer GAT train on the graph, partitioned by METIS. The peak of a step is the
resident memory above the memory before the first step, on the rank where it is largest. The peak of the process includes the graph, the features and the
libraries. With ``rows_file``, rows of layers are in a file in a temporary folder.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from common import reset_peak, resident_bytes, settle, write_results
from torch_geometric.nn import GAT, GraphSAGE

import salientpp
from salientpp.datasets import load_dataset
from salientpp.fullgraph import distribute, local, loss_mean
from salientpp.ops import return_freed_blocks

MODELS = ("GraphSAGE, 14 layers", "GAT, 3 layers")

#: Way -> arguments of ``distribute``. "FOLDER" stands for a temporary folder.
WAYS: dict[str, dict[str, str]] = {
    "everything": {},
    "everything, freed blocks returned": {},
    "layers": {"recompute": "layers"},
    "layers, in a file": {"recompute": "layers", "rows_file": "FOLDER"},
}


def network(name: str, columns: int, hidden: int, classes: int) -> torch.nn.Module:
    torch.manual_seed(0)
    if name.startswith("GAT"):
        return GAT(columns, hidden, 3, classes, heads=4)
    return GraphSAGE(columns, hidden, 14, classes)


def measure(rank: int, size: int, folder: str, name: str, way: str, hidden: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    part = local(salientpp.load(f"{folder}/graph"), dtype=torch.float32)
    if way.endswith("returned"):
        return_freed_blocks()
    options: dict[str, Any] = {key: value.replace("FOLDER", folder) for key, value in WAYS[way].items()}
    model = distribute(network(name, part.x.size(1), hidden, part.num_classes), part, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    settle()
    reset_peak()
    before = resident_bytes()
    seconds, losses = [], []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        out = model(part.x, part.edge_index)
        loss = loss_mean(F.cross_entropy(out[part.train_mask], part.y[part.train_mask], reduction="none"), part)
        del out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss.detach()))
        del loss
    peak = resident_bytes(peak=True)
    figures = {"step": peak - before, "process": peak, "seconds": statistics.median(seconds[1:]), "loss": losses[-1]}
    torch.save(figures, f"{folder}/figures-{rank}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", metavar="npz:GRAPH.npz")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--ways", nargs="+", default=[*WAYS])
    arguments = parser.parse_args()
    graph = Path(arguments.graph.rpartition(":")[2]).stem
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        salientpp.partition(load_dataset(arguments.graph), max(2, *arguments.ranks), f"{folder}/graph")
        for size in arguments.ranks:
            for name in arguments.models:
                for way in arguments.ways:
                    given = (size, folder, name, way, arguments.hidden, arguments.steps)
                    torch.multiprocessing.spawn(measure, given, nprocs=size)
                    Path(folder, "meeting").unlink(missing_ok=True)
                    ranks = [torch.load(f"{folder}/figures-{rank}") for rank in range(size)]
                    worst = {key: max(each[key] for each in ranks) for key in ranks[0]}
                    rows.append({"graph": graph, "ranks": size, "model": name, "way": way, **worst})
                    print(rows[-1], flush=True)
    write_results("recompute", rows, hidden=arguments.hidden, steps=arguments.steps)


if __name__ == "__main__":
    main()
