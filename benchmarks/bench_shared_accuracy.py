"""Measures the accuracy of models trained with shared draws. Writes results/shared_accuracy.json.

    python benchmarks/bench_shared_accuracy.py [--graphs facebook_pages debian_full] [--data FOLDER] [--seeds 5] [--epochs 5]

A 2-layer GraphSAGE is trained with independent draws, with draws shared in blocks of 64 batches, within a batch, and both, over several seeds. Accuracy is
measured on the test vertices, with independent draws. Batches are small, so that an epoch has several blocks. Real graphs lie in the folder of
`SALIENTPP_TEST_DATA`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import bench_narrow
import torch
from common import write_results

import salientpp
from salientpp.datasets.load import load_dataset

BATCH = 64
DRAWS: list[dict[str, Any]] = [
    {},
    {"block": 64},
    {"vertices": "batch"},
    {"vertices": "batch", "block": 64},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=["facebook_pages", "debian_full"])
    parser.add_argument("--data", default=os.environ.get("SALIENTPP_TEST_DATA", "."))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.graphs:
        data = load_dataset(f"npz:{Path(arguments.data) / name}.npz")
        data.x = data.x.float()
        with tempfile.TemporaryDirectory() as folder:
            part = salientpp.partition(data, 1, Path(folder) / "parts", bench_narrow.FANOUTS, BATCH)
            for draws in DRAWS:
                found = [
                    bench_narrow.accuracy(part, seed, arguments.epochs, BATCH, shared_draws=draws)
                    for seed in range(arguments.seeds)
                ]
                row = {
                    "graph": name,
                    "shared_draws": draws.get("vertices"),
                    "draw_block": draws.get("block", 1),
                }
                row |= {"accuracy": found, "mean": statistics.mean(found), "spread": statistics.stdev(found)}
                rows.append(row)
                print(row, flush=True)
    write_results("shared_accuracy", rows, epochs=arguments.epochs, fanouts=bench_narrow.FANOUTS, batch_size=BATCH)


if __name__ == "__main__":
    main()
