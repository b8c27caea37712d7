"""Demonstrates a VIP cache on one machine in a few minutes: `make demo`.

The script partitions a generated graph in two. Two ranks, each with half of the features, train a 3-layer GraphSAGE. VIP chooses
the remote rows that they cache. A table then shows the rows that travelled between the ranks, VIP's forecast of them, and the rows that the
same batches fetch without a cache. The accuracy stands beside that of one rank with all rows.

Run by hand, this file partitions, starts two ranks of itself with torchrun, and prints the report. examples/train_sage.py has the training
loop.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
import train_sage
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import salientpp.cli
from salientpp import NeighborLoader, load
from salientpp.vip.policies import expected_remote_rows

FANOUTS, BATCH_SIZE, ALPHA, EPOCHS, PARTS, SEED = [15, 10, 5], 128, 0.16, 5, 2, 0


def training_arguments(dataset: str, batch_size: int) -> argparse.Namespace:
    return argparse.Namespace(
        dataset=dataset,
        num_neighbors=FANOUTS,
        batch_size=batch_size,
        alpha=ALPHA,
        beta=0.0,
        epochs=EPOCHS,
        hidden=64,
        lr=0.005,
        workers=1,
        depth=10,
        seed=SEED,
        ranks_per_host=1,  # each of the two ranks stands for a machine
        profile=None,
    )


def run_rank(root: Path, out: Path) -> None:
    """Trains with the cache on one of the two ranks, then counts the same batches without a cache."""
    dist.init_process_group("gloo")
    loaders, test = train_sage.train(training_arguments(str(root), BATCH_SIZE))
    part = load(root)
    cached = loaders["train"]
    bare = NeighborLoader(
        part, FANOUTS, "train", batch_size=BATCH_SIZE, shuffle=True, seed=SEED, num_workers=1, ranks_per_host=1
    )
    for _ in range(EPOCHS):
        for _ in tqdm(
            bare,
            desc="the same batches without a cache",
            unit="batch",
            leave=False,
            disable=dist.get_rank() != 0 or None,
        ):
            pass
    report = {"test": test, "runs": []}
    for name, loader in ((f"VIP cache, α = {ALPHA}", cached), ("no cache", bare)):
        predicted = expected_remote_rows(part.vip(), part.book, part.part_id, loader.cache.members.ids)
        stats = asdict(loader.stats())
        report["runs"].append(
            {"name": name, "predicted": predicted * stats["batches"], "memory": loader.memory_used(), **stats}
        )
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def summarize(reports: list[dict], single: float) -> dict:
    """Returns rows and bytes per epoch, summed over ranks, for the runs with and without the cache."""
    runs = []
    for of_ranks in zip(*(report["runs"] for report in reports)):
        total = {
            key: sum(run[key] for run in of_ranks) / EPOCHS
            for key in of_ranks[0]
            if key.startswith(("rows_", "bytes_", "predicted"))
        }
        rows = {tier: total[f"rows_{tier}"] for tier in ("device", "host", "cache", "remote")}
        runs.append(
            {
                "name": of_ranks[0]["name"],
                "rows": sum(rows.values()),
                "local rows": rows["device"] + rows["host"],
                "cache hits": rows["cache"],
                "remote rows": rows["remote"],
                "remote rows, VIP's forecast": total["predicted"],
                "MB exchanged": total["bytes_received"] / 1e6,
                "MB of cache": sum(run["memory"]["cache"] for run in of_ranks) / 1e6,
            }
        )
    return {
        "ranks": PARTS,
        "fanouts": FANOUTS,
        "batch_size": BATCH_SIZE,
        "alpha": ALPHA,
        "epochs": EPOCHS,
        "runs": runs,
        "test accuracy": {f"{PARTS} ranks": reports[0]["test"], "one rank, same global batch": single},
    }


def print_report(summary: dict) -> None:
    console = Console()
    runs = summary["runs"]
    table = Table("", *(run["name"] for run in runs), title=f"Per epoch, sum of {PARTS} ranks", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for quantity in list(runs[0])[1:]:
        table.add_row(
            quantity, *(f"{run[quantity]:,.1f}" if "MB" in quantity else f"{run[quantity]:,.0f}" for run in runs)
        )
    console.print(table)
    with_cache, without = (run["remote rows"] for run in runs)
    console.print(
        f"With the cache, {with_cache / without:.2f} of the remote rows are still fetched. VIP's forecast needs no sampling. From two "
        "hops on it is too high, because it treats neighbours as independent.",
        highlight=False,
    )
    for who, accuracy in summary["test accuracy"].items():
        console.print(f"Test accuracy, {who}: {accuracy:.3f}", highlight=False)


def main() -> None:
    if "RANK" in os.environ:
        run_rank(Path(sys.argv[1]), Path(sys.argv[2]))
        return
    started = time.perf_counter()
    root = Path("demo-data") / f"synthetic-{PARTS}"
    fanouts = ",".join(map(str, FANOUTS))
    command = [
        "partition",
        "synthetic",
        str(root),
        "--parts",
        str(PARTS),
        "--num-neighbors",
        fanouts,
        "--batch-size",
        str(BATCH_SIZE),
    ]
    if salientpp.cli.main([*command, "--overwrite"]) != 0:
        sys.exit(1)
    with tempfile.TemporaryDirectory() as out:
        print(f"\ntraining on {PARTS} ranks", flush=True)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(PARTS),
                __file__,
                str(root),
                out,
            ],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        reports = [json.loads((Path(out) / f"{rank}.json").read_text()) for rank in range(PARTS)]
    print("\ntraining on one rank with all rows", flush=True)
    _, single = train_sage.train(training_arguments("synthetic", PARTS * BATCH_SIZE))
    print()
    summary = summarize(reports, single)
    print_report(summary)
    print(f"{time.perf_counter() - started:.0f} s")
    (root.parent / "report.json").write_text(
        json.dumps({**summary, "seconds": time.perf_counter() - started}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
