"""The whole idea on one machine, in a few minutes: `make demo`.

A generated graph is partitioned in two; two ranks, each with half of the features, train a 3-layer GraphSAGE; VIP chooses
which remote rows they cache. A table then shows what crossed between the ranks, what VIP had predicted, the very same
batches without a cache, and the accuracy beside a run of one rank that holds everything.

Started by hand this file partitions, starts two ranks of itself with torchrun, and reports. The training itself is
examples/train_sage.py.
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

import torch
import torch.distributed as dist
import train_sage
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from salientpp import NeighborLoader, load
from salientpp.plan.cache import expected_remote_rows

FANOUTS, BATCH_SIZE, ALPHA, EPOCHS, PARTS, SEED = [15, 10, 5], 128, 0.16, 5, 2, 0


def training_arguments(dataset: str, batch_size: int) -> argparse.Namespace:
    return argparse.Namespace(
        dataset=dataset, fanouts=FANOUTS, batch_size=batch_size, alpha=ALPHA, beta=0.0, epochs=EPOCHS, hidden=64, lr=0.005,
        workers=1, depth=10, seed=SEED,
    )  # fmt: skip


def run_rank(root: Path, out: Path) -> None:
    """One of the two ranks: train with the cache, then count the same batches without it."""
    dist.init_process_group("gloo")
    loaders, test = train_sage.train(training_arguments(str(root), BATCH_SIZE))
    part = load(root)
    cached = loaders["train"]
    bare = NeighborLoader(part, FANOUTS, "train", batch_size=BATCH_SIZE, shuffle=True, seed=SEED, num_workers=1)
    for _ in range(EPOCHS):
        for _ in tqdm(bare, desc="the same batches without a cache", unit="batch", leave=False, disable=dist.get_rank() != 0):
            pass
    report = {"test": test, "runs": []}
    for name, loader in ((f"VIP cache, α = {ALPHA}", cached), ("no cache", bare)):
        predicted = expected_remote_rows(part.vip(), part.book, part.part_id, loader.cache.members.ids)
        stats = asdict(loader.stats())
        report["runs"].append({"name": name, "predicted": predicted * stats["batches"], "memory": loader.memory(), **stats})
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def print_report(reports: list[dict], single: float) -> None:
    console = Console()
    table = Table(
        "", "rows", "local", "cache hits", "remote", "VIP's forecast\nof remote", "MB exchanged", "cache, MB",
        title=f"Feature rows per epoch, sum of {PARTS} ranks (fanouts {FANOUTS}, batch size {BATCH_SIZE} per rank)",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for runs in zip(*(report["runs"] for report in reports)):
        per_epoch = {key: sum(run[key] for run in runs) / EPOCHS for key in runs[0] if key.startswith(("rows_", "bytes_", "pred"))}
        rows = sum(per_epoch[f"rows_{tier}"] for tier in ("gpu", "cpu", "cache", "remote"))
        table.add_row(
            runs[0]["name"],
            f"{rows:,.0f}",
            f"{per_epoch['rows_cpu'] + per_epoch['rows_gpu']:,.0f}",
            f"{per_epoch['rows_cache']:,.0f}",
            f"{per_epoch['rows_remote']:,.0f}",
            f"{per_epoch['predicted']:,.0f}",
            f"{per_epoch['bytes_received'] / 1e6:,.1f}",
            f"{sum(run['memory']['cache'] for run in runs) / 1e6:,.1f}",
        )
    console.print(table)
    with_cache, without = (sum(report["runs"][i]["rows_remote"] for report in reports) for i in (0, 1))
    console.print(
        f"The cache left {with_cache / without:.2f} of the remote rows. VIP's forecast needs no sampling; from two hops on it is an "
        "overestimate, because it takes neighbours for independent.\n"
        f"Test accuracy: {reports[0]['test']:.3f} with {PARTS} ranks, {single:.3f} with one rank and the same global batch.",
        highlight=False,
    )


def main() -> None:
    if "RANK" in os.environ:
        run_rank(Path(sys.argv[1]), Path(sys.argv[2]))
        return
    started = time.perf_counter()
    root = Path("demo-data") / f"synthetic-{PARTS}"
    fanouts = ",".join(map(str, FANOUTS))
    subprocess.run(
        [sys.executable, "-m", "salientpp.cli", "partition", "synthetic", str(root), "--parts", str(PARTS), "--fanouts", fanouts,
         "--batch-size", str(BATCH_SIZE), "--overwrite"],
        check=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        print(f"\ntraining on {PARTS} ranks", flush=True)
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PARTS), __file__, str(root), out],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        reports = [json.loads((Path(out) / f"{rank}.json").read_text()) for rank in range(PARTS)]
    print("\ntraining on one rank that holds everything", flush=True)
    _, single = train_sage.train(training_arguments("synthetic", PARTS * BATCH_SIZE))
    print()
    print_report(reports, single)
    print(f"{time.perf_counter() - started:.0f} s, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
