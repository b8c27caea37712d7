"""Counts the rows that cache policies leave to fetch, compared with oracles. Writes results/volume.json and results/volume_ahead.json.

    python benchmarks/bench_volume.py synthetic npz:GRAPH.npz ... [--only static|ahead]

Directed graphs are made symmetric, as users of sampled training commonly do. The second file has rows and bytes with the static cache, with sums,
with lookahead, with shared draws in blocks, and with narrow rows. It counts ``--ahead-epochs`` epochs of the first of ``--parts``.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import write_results
from torch import Tensor
from torch_geometric.data import Data
from tqdm import tqdm

from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.datasets import load_dataset
from salientpp.graph.csc import Graph
from salientpp.partitioning.options import PartitionOptions
from salientpp.partitioning.workload import assign_for
from salientpp.store.directory.given_splits import collect_splits

FANOUTS = [[15, 10, 5], [20, 20, 20], [5, 5, 5]]
BLOCK = 64
ALPHAS = [0, 0.01, 0.05, 0.1, 0.16, 0.2, 0.5, 1]
POLICIES = ["vip", "vip-hop", "degree", "halo", "wpr", "paths", "simulation", "random", "oracle"]


#: Workloads: (name, share of the vertices that are seeds or None for the training split, batch size). A small set of seeds separates policies. With many seeds
#: and large batches everything is accessed, and policies nearly tie.
WORKLOADS = [("train", None, 256), ("concentrated", 0.01, 32)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--ahead-epochs", type=int, default=2)
    parser.add_argument("--only", choices=["static", "ahead"])
    arguments = parser.parse_args()
    if arguments.only != "ahead":
        _static(arguments)
    if arguments.only != "static":
        rows: list[dict[str, Any]] = []
        for dataset in arguments.datasets:  # after each graph: finished graphs are kept
            rows += _ahead(dataset, arguments.parts[0], arguments.ahead_epochs)
            write_results("volume_ahead", rows, fanouts=FANOUTS[0], block=BLOCK, epochs=arguments.ahead_epochs)


def _load(dataset: str) -> tuple[Data, str]:
    if dataset.startswith("npz:"):
        return load_dataset(dataset, undirected=True), Path(dataset.partition(":")[2]).stem
    return load_dataset(dataset), dataset


def _ahead(dataset: str, parts: int, epochs: int) -> list[dict[str, Any]]:
    """Counts rows and bytes with a static cache, with sums, and with lookahead, to which blocks of draws and narrow rows are added."""
    data, name = _load(dataset)
    _, _, batch_size = WORKLOADS[0]
    graph = Graph.from_data(data)
    splits = collect_splits(data, None, data.get("y"), graph.num_vertices)
    options: dict[str, Any] = dict(
        splits=splits, seeds=splits["train"], num_neighbors=FANOUTS[0], batch_size=batch_size
    )
    method = assign_for(graph, parts, PartitionOptions("metis", refine=False), **options).assignment
    del graph
    rows: list[dict[str, Any]] = []
    agree = dict(shared_draws="batch", draw_block=BLOCK)
    ways: list[tuple[str, dict[str, Any]]] = [
        ("lookahead='auto'", {}),
        ("and blocks of draws", agree),
        ("and rows as int8", {**agree, "send_as": {"x": "int8"}}),
    ]
    for way, draws in ways:
        send_as = draws.get("send_as")
        batches = Batches(
            FANOUTS[0], batch_size, epochs=epochs, **{key: draws[key] for key in draws if key != "send_as"}
        )
        compared = Ways(["vip"], [0.16, 0.32], lookahead="auto", sums=not rows, send_as=send_as)
        found = analyze(data, batches, compared, parts=parts, name=name, method=method)
        lines: list[tuple[str, Any, float, float]] = [
            (way, volume, volume.remote_rows_per_epoch, volume.remote_bytes_per_epoch)
            for volume in found.of(way="lookahead")
        ]
        if not rows:
            static = [
                ("static VIP cache", v, v.remote_rows_per_epoch, v.remote_bytes_per_epoch)
                for v in found.of(way="cache")
            ]
            for volume in found.of(way="sums"):
                number = volume.remote_rows_per_epoch + volume.summed.sums_per_epoch
                # Ids of requested rows are not counted here. Ids of rows in sums are.
                num_bytes = number * volume.row_bytes + 4 * volume.summed.sources_per_epoch
                static.append(("the same with sums", volume, number, num_bytes))
            lines = static + lines
        for words, volume, number, num_bytes in lines:
            rows.append(
                {
                    "dataset": name, "parts": parts, "batch_size": batch_size, "way": words, "alpha": volume.replication_factor,
                    "row_bytes": volume.row_bytes, "rows": number, "bytes": num_bytes,
                    "windows": None if volume.ahead is None else volume.ahead.windows, "steps": found.steps_per_epoch,
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def _static(arguments: argparse.Namespace) -> None:
    rows, partitions = [], []
    plan = [
        (dataset, parts, workload, edge_weights)
        for dataset in arguments.datasets
        for parts in arguments.parts
        for workload in WORKLOADS
        for edge_weights in ("vip", "equal")
    ]
    for dataset, parts, (workload, share, batch_size), edge_weights in tqdm(plan):
        data, name = _load(dataset)
        if share is not None:
            data.train_mask = first_seeds(data.train_mask, int(share * data.num_nodes))
        analysis = analyze(
            data,
            [Batches(fanouts, batch_size, epochs=arguments.epochs) for fanouts in FANOUTS],
            Ways(POLICIES if edge_weights == "vip" else ["vip"], ALPHAS),
            parts=parts,
            name=name,
            method="metis",
            edge_weights=edge_weights,
            refine=False,
        )
        labels = {"dataset": name, "parts": parts, "workload": workload, "batch_size": batch_size}
        own = analysis.of(way="cache", policy="vip")
        bare = {",".join(map(str, volume.num_neighbors)): volume.rows_without_cache for volume in own}
        facts = {
            "edge_cut_fraction": analysis.edge_cut_fraction,
            "balance": analysis.balance,
            "rows_without_cache": bare,
        }
        left = {f"{list(v.num_neighbors)} α={v.replication_factor}": v.remote_rows_per_epoch for v in own}
        partitions.append({**labels, "edge_weights": edge_weights, **facts, "vip_rows": left})
        if edge_weights == "vip":
            rows += [{**labels, **asdict(volume)} for volume in analysis.of(way="cache")]
    write_results("volume", rows, partitions=partitions, epochs=arguments.epochs)


def first_seeds(mask: Tensor, count: int) -> Tensor:
    """Returns a mask of ``count`` random seeds."""
    chosen = mask.nonzero().flatten()
    chosen = chosen[torch.randperm(chosen.numel(), generator=torch.Generator().manual_seed(0))[:count]]
    return torch.zeros_like(mask).index_fill_(0, chosen, True)


if __name__ == "__main__":
    main()
