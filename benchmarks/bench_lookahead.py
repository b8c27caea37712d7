"""Counts the rows that lookahead saves and measures its CPU time. Writes results/lookahead.json and results/lookahead_cpu.json.

    python benchmarks/bench_lookahead.py [--graphs facebook_pages:16 debian_full:64 generated:64] [--data FOLDER] [--vertices 100000]

Rows are counted by simulation, which gives exactly the rows that a run fetches. The figures are rows per epoch, divided by the rows of the static VIP cache
with the same memory (the ids of the window included), for 4 parts. Each graph has its own batch size. It is counted with independent draws and with shared
draws in blocks. CPU time per batch includes all threads of two ranks, in whole epochs, with and without lookahead (`--only` runs one of the two).
Real graphs are made symmetric. They lie in the folder of `SALIENTPP_TEST_DATA`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import generated, write_results
from torch_geometric.data import Data

import salientpp
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.analysis.result import Analysis
from salientpp.datasets.load import load_dataset
from salientpp.graph.csc import Graph
from salientpp.partitioning.options import PartitionOptions
from salientpp.partitioning.workload import assign_for
from salientpp.store.directory.given_splits import collect_splits

FANOUTS, PARTS = [15, 10, 5], 4
ALPHAS = [0.05, 0.16, 0.32, 1]
WINDOWS: list[Any] = [16, 64, "auto"]
BLOCK = 64
TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=["facebook_pages:16", "debian_full:64", "generated:64"])
    parser.add_argument("--data", default=os.environ.get("SALIENTPP_TEST_DATA", "."))
    parser.add_argument("--vertices", type=int, default=100_000, help="vertices of the generated graph")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--only", choices=["rows", "cpu"])
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    for entry in arguments.graphs:
        name, _, batch_size = entry.partition(":")
        data = (
            generated(arguments.vertices, 20, 64)
            if name == "generated"
            else load_dataset(f"npz:{Path(arguments.data) / name}.npz", undirected=True)
        )
        if arguments.only != "rows":
            times += _times(data, name, int(batch_size))
            write_results("lookahead_cpu", times, fanouts=FANOUTS, block=BLOCK, turns=TURNS)  # keeps finished graphs
        if arguments.only == "cpu":
            continue
        static: list[Any] = []  # rows without lookahead and without sharing
        method = _assignment(data, int(batch_size))
        for shared, block in ((None, 1), ("batch", BLOCK)):
            for window in WINDOWS:
                batches = Batches(
                    FANOUTS, int(batch_size), epochs=arguments.epochs, shared_draws=shared, draw_block=block
                )
                ways = Ways(["vip"], ALPHAS, lookahead=window)
                found = analyze(data, batches, ways, parts=PARTS, name=name, method=method)
                static = static or [volume.remote_rows_per_epoch for volume in found.of(way="cache")]
                rows += _shares(found, static, window)
        write_results("lookahead", rows, fanouts=FANOUTS, parts=PARTS, block=BLOCK, epochs=arguments.epochs)


def _assignment(data: Data, batch_size: int) -> torch.Tensor:
    graph = Graph.from_data(data)
    splits = collect_splits(data, None, data.get("y"), graph.num_vertices)
    options: dict[str, Any] = dict(splits=splits, seeds=splits["train"], num_neighbors=FANOUTS, batch_size=batch_size)
    return assign_for(graph, PARTS, PartitionOptions("metis", refine=False), **options).assignment


def _shares(analysis: Analysis, static: list[Any], window: Any) -> list[dict[str, Any]]:
    found = []
    for own, volume, ahead in zip(static, analysis.of(way="cache"), analysis.of(way="lookahead"), strict=True):
        figures = ahead.ahead
        assert figures is not None  # the way is lookahead
        rows = None if figures.refused else ahead.remote_rows_per_epoch
        found.append(
            {
                "graph": analysis.dataset,
                "row_bytes": volume.row_bytes,
                "batch_size": analysis.batch_size,
                "shared_draws": analysis.draws["shared_draws"],
                "draw_block": analysis.draws["draw_block"],
                "lookahead": window,
                "alpha": ahead.replication_factor,
                "windows": figures.windows,
                "slots": figures.slots,
                "static_rows": own,
                "static_rows_of_these_draws": volume.remote_rows_per_epoch,
                "rows": rows,
                "share": None if rows is None or not own else rows / own,
                "forecast_share": figures.predicted_share,
                "best_share": figures.best_share,
                "reach": figures.reach,
            }
        )
    shares = ", ".join(f"α={r['alpha']:g} " + (f"{r['share']:.3f}" if r["share"] else "–") for r in found)
    draws = analysis.draws["shared_draws"]
    print(
        f"{analysis.dataset:15} batch {analysis.batch_size:3} shared {draws!s:5} W {window!s:4}: {shares}", flush=True
    )
    return found


# --- CPU time -----------------------------------------------------------------------------------------------


def _times(data: Data, name: str, batch_size: int, alpha: float = 0.16) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "parts"
        salientpp.partition(data, 2, root, FANOUTS, batch_size, refine=False)
        mp.spawn(_run, (str(root), folder, batch_size, alpha), nprocs=2)
        found = torch.load(Path(folder) / "times")
    for each in found:
        print(
            f"{name:15} shared {each['shared_draws']!s:5} W={each['lookahead']!s:4} {each['cpu_ms']:.2f} CPU ms per batch, ratio {each['ratio']:.2f}",
            flush=True,
        )
    return [{"graph": name, "batch_size": batch_size, "alpha": alpha, "ranks": 2, **each} for each in found]


def _run(rank: int, root: str, folder: str, batch_size: int, alpha: float) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    part = salientpp.load(root)
    options: dict[str, Any] = dict(batch_size=batch_size, shuffle=True, seed=1, replication_factor=alpha, num_workers=1)
    loaders = {
        (shared, window): salientpp.NeighborLoader(
            part, FANOUTS, "train", lookahead=window, shared_draws={"vertices": shared, "block": block}, **options
        )
        for shared, block in ((None, 1), ("batch", BLOCK))
        for window in (0, 4, 16, "auto")
    }
    seconds: dict[Any, list[float]] = {key: [] for key in loaders}
    for turn in range(TURNS + 1):  # loaders take turns, so that a slow minute affects all; the first turn is warm-up
        for key, loader in loaders.items():
            dist.barrier()
            begin = time.process_time()
            number = sum(1 for _ in loader)  # a whole epoch: the window continues into the next, so no draw is wasted
            of_ranks = torch.tensor(time.process_time() - begin, dtype=torch.float64)
            dist.all_reduce(of_ranks)
            loader.reset_stats()
            if turn:
                seconds[key].append(float(of_ranks) / (2 * number))
    if rank == 0:
        found = []
        for (shared, window), own in seconds.items():
            ratios = [mine / without for mine, without in zip(own, seconds[shared, 0], strict=True)]
            found.append(
                {
                    "shared_draws": shared,
                    "draw_block": 1 if shared is None else BLOCK,
                    "lookahead": window,
                    "cpu_ms": 1e3 * statistics.median(own),
                    "least_cpu_ms": 1e3 * min(own),
                    "ratio": statistics.median(ratios),
                }
            )
        torch.save(found, f"{folder}/times")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
