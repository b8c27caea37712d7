"""Measures the memory that neighbour lists take on a rank, with the topology whole and in parts. Writes results/topology_memory.json.

    python benchmarks/bench_topology_memory.py [--vertices 10000000] [--degree 22] [--graph DIR] [--parts 8] [--folder DIR]

``large_graph.py`` writes a graph, or an earlier one is given. Ranges of its ids are the parts. The ids are shuffled, so these parts are as bad as random ones,
and most lists of a batch belong to other parts. The directory is written in both forms. One rank for each part loads an epoch. Then every rank reads from
/proc how much of its mapped neighbour lists is resident, and its anonymous memory. Both forms run in processes of their own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import process_figures, write_results
from large_graph import generate
from mapped import resident_lists

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import load_dataset

FANOUTS, FEATURES = [15, 10, 5], 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=10_000_000)
    parser.add_argument("--degree", type=float, default=22.0)
    parser.add_argument("--graph", type=Path, help="a converted graph, instead of a new one")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=100, help="most batches of a rank")
    parser.add_argument("--folder", type=Path, help="where files are written and removed (a temporary folder)")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    folder = Path(tempfile.mkdtemp(prefix="salientpp-topology-", dir=arguments.folder))
    try:
        graph = arguments.graph or generate(
            folder / "g", num_vertices=arguments.vertices, average_degree=arguments.degree, num_features=FEATURES
        )
        data = load_dataset(f"converted:{graph}")
        ranges = torch.arange(data.num_nodes) * arguments.parts // data.num_nodes
        salientpp.partition(
            data, arguments.parts, folder / "whole", FANOUTS, arguments.batch_size, method=ranges, refine=False
        )
        salientpp.rewrite_topology(folder / "whole", folder / "parts", "parts")
        rows = []
        for form in ("whole", "parts"):
            rows.append({"form": form, **of_form(folder / form, arguments)})
            print(rows[-1], flush=True)
        part = salientpp.load(folder / "whole")
        write_results(
            "topology_memory", rows, vertices=part.num_vertices, edges=part.num_edges, parts=arguments.parts, fanouts=FANOUTS,
            batch_size=arguments.batch_size,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)


def of_form(root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of the rank with the most resident bytes of lists, after all ranks have loaded their batches."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    given = (str(root), arguments.parts, port, arguments.batch_size, arguments.batches, queue)
    ranks = mp.spawn(be_rank, given, nprocs=arguments.parts, join=False)
    found = [queue.get() for _ in range(arguments.parts)]
    ranks.join()
    return max(found, key=lambda of_rank: of_rank["resident_bytes"])


def be_rank(rank: int, root: str, ranks: int, port: int, batch_size: int, batches: int, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=ranks)
    part = salientpp.load(root)
    seeds = part.split("train", rank)[: batches * batch_size]
    before = process_figures()["anonymous_bytes"]
    started = time.perf_counter()
    loader = NeighborLoader(part, FANOUTS, seeds, batch_size=batch_size, shuffle=True, seed=0, num_workers=1)
    for _ in loader:
        pass
    stats = loader.stats()
    queue.put(
        {
            "batches": stats.batches,
            "seconds": time.perf_counter() - started,
            "list_bytes": loader.memory_used()["graph"],
            "resident_bytes": resident_lists(root),
            "anonymous_bytes_before": before,
            "anonymous_bytes": process_figures()["anonymous_bytes"],
            "batch_bytes": loader.memory_used()["batches"],
        }
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
